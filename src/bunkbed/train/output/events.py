"""Reports of the training loop while it runs: plain records, so that any display can read them."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Advice", "Change", "EpochReport", "EvalReport", "Event", "Outcome", "StepReport"]


@dataclass(frozen=True)
class StepReport:
    """Progress of training; at most about five reports a second.

    Attributes:
        epoch: the epoch being trained, from 1.
        epochs: the epoch training ends with.
        step: steps done in this epoch.
        steps_per_epoch: steps of this epoch.
        global_step: steps done since the run was started, including those before a resume.
        loss: mean over the steps since the last report.
        samples_per_s: positive pairs a second since the last report.
        eta_s: estimated seconds for the remaining steps, evaluations and commits, at the rates so far.
        unique_hit_rate: rows found in RAM / unique rows wanted, all tables, since the last report. A row that
            is not stored does not count as a hit, although it needs no read.
        ram_bytes: RAM of the tables.
        ram_budget_bytes: limit of `ram_bytes`.
        ssd_read_bytes_per_s: bytes read from the log a second.
        ssd_write_bytes_per_s: bytes appended to the log a second.
        stall_share: fraction of the time that steps waited for reads, since the last report; other reads overlap with
            the model's work.
        time_s: seconds since `Trainer.fit` began.
        device_hit_rate: rows found on the device / unique rows wanted there; None without a device cache.
        disk_share: rows read from disk / unique rows wanted; above 1 where a step reads rows twice.
    """

    epoch: int
    epochs: int
    step: int
    steps_per_epoch: int
    global_step: int
    loss: float
    samples_per_s: float
    eta_s: float
    unique_hit_rate: float
    ram_bytes: int
    ram_budget_bytes: int
    ssd_read_bytes_per_s: float
    ssd_write_bytes_per_s: float
    time_s: float
    stall_share: float = 0.0
    device_hit_rate: float | None = None
    disk_share: float = 0.0


@dataclass(frozen=True)
class EpochReport:
    """Report of one finished epoch.

    Attributes:
        epoch: from 1.
        epochs: the epoch training ends with.
        global_step: steps done since the run began.
        loss: mean over the steps of the epoch.
        metrics: of the validation, such as ``{"ndcg@10": 0.42}``; empty when this epoch was not evaluated.
        is_best: this epoch has the best value of the chosen metric so far.
        ranking: description of the items that the held-out items competed with, and of the users; empty without an
            evaluation.
        seconds: wall time of the epoch's steps in this session.
        unique_hit_rate: as in `StepReport`, over the epoch's steps in this session.
        ram_bytes: RAM of the tables.
        ram_budget_bytes: limit of `ram_bytes`.
        disk_read_bytes: read from the log during the epoch.
        disk_written_bytes: appended to the log during the epoch.
        time_s: seconds since `Trainer.fit` began.
        eval_seconds: wall time of the evaluation.
        stall_s: the part of `seconds` that steps waited for reads.
        device_hit_rate: as in `StepReport`, over the epoch's steps in this session.
        samples_per_s: positive pairs a second of those steps.
        disk_reads: reads of the log during the epoch; neighbouring rows share one. None in files of earlier releases.
        moved_bytes: least bytes that the tables' steps moved through memory
            (`bunkbed.machine.limits.memory_bytes`). None in files of earlier releases.
        records_by_path: records of the log that were read, by access path (`bunkbed.machine.read_paths`). None in files
            of earlier releases.
        wanted_bytes: bytes of those records. None in files of earlier releases.
    """

    epoch: int
    epochs: int
    global_step: int
    loss: float
    metrics: dict[str, float]
    is_best: bool
    ranking: str
    seconds: float
    unique_hit_rate: float
    ram_bytes: int
    ram_budget_bytes: int
    disk_read_bytes: int
    disk_written_bytes: int
    time_s: float
    eval_seconds: float = 0.0
    stall_s: float = 0.0
    device_hit_rate: float | None = None
    samples_per_s: float = 0.0
    disk_reads: int | None = None
    moved_bytes: int | None = None
    records_by_path: dict[str, int] | None = None
    wanted_bytes: int | None = None


@dataclass(frozen=True)
class EvalReport:
    """Progress of an evaluation: users ranked so far, and in all, of this process.

    Users whose ranking is under way count in part.
    """

    done: int
    total: int


Event = StepReport | EpochReport | EvalReport


@dataclass(frozen=True)
class Outcome:
    """Outcome of `Trainer.fit`.

    Attributes:
        interrupted: `Trainer.request_stop` was called; everything done is committed.
        stopped_early: the metric did not improve for `patience` evaluations.
        epoch: finished epochs.
        step: steps since the run began.
        best_epoch: the epoch kept as snapshot ``"best"``, or chosen by an earlier training; None when nothing was
            evaluated.
        best: metrics of `best_epoch`.
        seconds: wall time of this call.
    """

    interrupted: bool
    stopped_early: bool
    epoch: int
    step: int
    best_epoch: int | None
    best: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Change:
    """Options that would make a run faster.

    Attributes:
        options: as for ``bunkbed train``.
        speedup: the predicted time of an epoch, divided by its time with these.
    """

    options: str
    speedup: float


@dataclass(frozen=True)
class Advice:
    """A prediction that a run will be much slower than in RAM, and what would change it.

    Attributes:
        slowdown: the predicted time of an epoch, divided by its time in RAM.
        rows_read: rows that a step reads from disk.
        is_measured: the rates of the disk are measured ones; otherwise assumed ones.
        changes: options that would change it.
    """

    slowdown: float
    rows_read: float
    is_measured: bool
    changes: tuple[Change, ...]

    def lines(self) -> list[str]:
        """Return the advice as text.

        >>> for line in Advice(64.6, 35_210.0, False, (Change("--order blocks", 8.1),)).lines():
        ...     print(line)
        slow: about 65 times the time of the same run in RAM; a step reads about 35,210 rows from disk
        an estimate, with assumed rates of the disk (bunkbed plan measures them); these options would change it:
          --order blocks: about 8.1 times faster
        """
        rates = "the measured rates of" if self.is_measured else "assumed rates of"
        how = "" if self.is_measured else " (bunkbed plan measures them)"
        return [
            f"slow: about {_times(self.slowdown)} the time of the same run in RAM; a step reads about "
            f"{self.rows_read:,.0f} rows from disk",
            f"an estimate, with {rates} the disk{how}; these options would change it:",
            *(f"  {change.options}: about {_times(change.speedup)} faster" for change in self.changes),
        ]


def _times(value: float) -> str:
    return f"{value:.0f} times" if value >= 10 or value == round(value) else f"{value:.1f} times"
