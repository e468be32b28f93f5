"""What the training loop tells whoever watches it. Plain values only; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepReport:
    """Progress within an epoch, a few times a second at most.

    Attributes:
        epoch: the running epoch, from 1.
        epochs: how many there will be.
        step: steps done in this epoch.
        steps_per_epoch: steps in each epoch.
        global_step: steps done since the run began, over all its sessions.
        loss: mean per sample since the last report.
        samples_per_s: positive samples per second since the last report.
        eta_s: seconds until the last epoch ends, evaluation left out.
        unique_hit_rate: share of the unique rows since the last report that were found in RAM, in [0, 1].
        ram_bytes: RAM in use by all tables.
        ram_budget_bytes: their budget.
        ssd_read_bytes_per_s: read from disk since the last report.
        ssd_write_bytes_per_s: written to disk since the last report.
        time_s: since `fit` began.
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


@dataclass(frozen=True)
class EvalProgress:
    """Progress of an evaluation: users ranked so far."""

    done: int
    total: int


@dataclass(frozen=True)
class EpochReport:
    """A finished epoch, after its evaluation and before its commit is acknowledged.

    Attributes:
        epoch: which one, from 1.
        epochs: how many there will be.
        global_step: steps done since the run began.
        loss: mean per sample over the epoch.
        metrics: quality, such as ``{"hr@10": 0.71, "ndcg@10": 0.43}``; empty without evaluation.
        ranking: what the metrics rank, for people: "full ranking of 3,706 items", "99 sampled negatives".
        is_best: the best epoch so far by the chosen metric.
        seconds: training only, evaluation left out.
        unique_hit_rate: over the epoch, in [0, 1].
        ram_bytes: RAM in use by all tables.
        ram_budget_bytes: their budget.
        disk_read_bytes: read from disk in this epoch.
        disk_written_bytes: written to disk in this epoch.
        time_s: since `fit` began.
    """

    epoch: int
    epochs: int
    global_step: int
    loss: float
    metrics: dict[str, float]
    ranking: str
    is_best: bool
    seconds: float
    unique_hit_rate: float
    ram_bytes: int
    ram_budget_bytes: int
    disk_read_bytes: int
    disk_written_bytes: int
    time_s: float


Event = StepReport | EvalProgress | EpochReport


@dataclass(frozen=True)
class Outcome:
    """How a call of `fit` ended; everything up to it is committed.

    Attributes:
        interrupted: a stop was asked for; the run can be resumed.
        stopped_early: patience ran out.
        epoch: finished epochs.
        step: steps done since the run began.
        best_epoch: the best one by the chosen metric, None without evaluation.
        best: its metrics.
        seconds: wall time of this call.
    """

    interrupted: bool
    stopped_early: bool
    epoch: int
    step: int
    best_epoch: int | None = None
    best: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
