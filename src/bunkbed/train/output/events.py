"""What the training loop reports while it runs: plain records, so that any display can read them."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["EpochReport", "EvalReport", "Event", "Outcome", "StepReport"]


@dataclass(frozen=True)
class StepReport:
    """Where training stands; at most about five a second.

    Attributes:
        epoch: the epoch being trained, from 1.
        epochs: the epoch training ends with.
        step: steps done in this epoch.
        steps_per_epoch: steps of every epoch.
        global_step: steps done since the run began, resumed ones included.
        loss: mean over the steps since the last report.
        samples_per_s: positive pairs a second since the last report.
        eta_s: seconds left for the steps to come, evaluation and commits included at the rate seen so far.
        unique_hit_rate: rows found in RAM / unique rows asked for, all tables, since the last report. A row
            that was never stored is no hit, though it needs no read.
        ram_bytes: RAM the tables use.
        ram_budget_bytes: what they may use.
        ssd_read_bytes_per_s: bytes read from the log a second.
        ssd_write_bytes_per_s: bytes appended to the log a second.
        stall_share: part of the time that steps waited for reads, since the last report; the rest of the reading is
            hidden behind the model's work.
        time_s: seconds since `Trainer.fit` began.
        device_hit_rate: rows found on the device / unique rows asked for there; None without a device cache.
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


@dataclass(frozen=True)
class EpochReport:
    """One finished epoch.

    Attributes:
        epoch: from 1.
        epochs: the epoch training ends with.
        global_step: steps done since the run began.
        loss: mean over the steps of the epoch.
        metrics: of the validation, such as ``{"ndcg@10": 0.42}``; empty when this epoch was not evaluated.
        is_best: this epoch has the best value of the chosen metric so far.
        ranking: what the held-out items competed with, in words; empty without an evaluation.
        seconds: wall time of the epoch's steps in this session.
        unique_hit_rate: as in `StepReport`, over the epoch's steps in this session.
        ram_bytes: RAM the tables use.
        ram_budget_bytes: what they may use.
        disk_read_bytes: read from the log during the epoch.
        disk_written_bytes: appended to the log during the epoch.
        time_s: seconds since `Trainer.fit` began.
        eval_seconds: wall time of the evaluation.
        stall_s: of `seconds`, how long steps waited for reads.
        device_hit_rate: as in `StepReport`, over the epoch's steps in this session.
        samples_per_s: positive pairs a second of those steps.
        disk_reads: reads of the log during the epoch; neighbouring rows share one. None in files of earlier releases.
        moved_bytes: bytes that the tables' steps had to move through memory at least
            (`bunkbed.machine.limits.memory_bytes`). None in files of earlier releases.
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


@dataclass(frozen=True)
class EvalReport:
    """Progress of an evaluation: users ranked so far, of how many."""

    done: int
    total: int


Event = StepReport | EpochReport | EvalReport


@dataclass(frozen=True)
class Outcome:
    """How `Trainer.fit` ended.

    Attributes:
        interrupted: `Trainer.request_stop` was called; everything done is committed.
        stopped_early: the metric did not improve for `patience` evaluations.
        epoch: finished epochs.
        step: steps since the run began.
        best_epoch: the epoch kept as snapshot ``"best"``; None when nothing was evaluated.
        best: its metrics.
        seconds: wall time of this call.
    """

    interrupted: bool
    stopped_early: bool
    epoch: int
    step: int
    best_epoch: int | None
    best: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
