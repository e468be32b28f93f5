"""Several runs side by side: where they differ, what they reached, what that took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import bunkbed as bb
from bunkbed.train.evaluate.evaluator import EvalResult
from bunkbed.train.evaluate.results import load_test
from bunkbed.train.output.plots import read_metrics
from bunkbed.train.output.progress import Progress
from bunkbed.train.settings.config import TrainConfig

__all__ = ["RunSummary", "differing_options", "ranked", "summarize_run"]

# Options that change how fast a run is, or how long, and nothing that is learned a step.
_JUDGED_BY = ("valid", "ranking", "eval_negatives", "eval_users", "seed")


@dataclass(frozen=True)
class RunSummary:
    """One run as its last commit and its log tell it.

    Attributes:
        folder: of the run.
        config: its options.
        epochs: finished epochs.
        is_done: they are all that were asked for, or patience ran out.
        best_epoch: the epoch with the best `config.metric`; None when nothing was evaluated.
        best: its validation figures.
        test: figures on the test pairs, of the best epoch; None where there are none of this state.
        loss: mean over the last finished epoch; None before the first.
        pairs_per_s: positive pairs a second, the median of the epochs; None before the first.
        hit_rate: of the last finished epoch's rows; None before the first.
        data: how many users, items and training pairs there are, which tells data sets apart.
    """

    folder: Path
    config: TrainConfig
    epochs: int
    is_done: bool
    best_epoch: int | None
    best: dict[str, float]
    test: EvalResult | None
    loss: float | None
    pairs_per_s: float | None
    hit_rate: float | None
    data: tuple[int, int, int]

    @property
    def value(self) -> float | None:
        """The best value of the run's own metric."""
        return self.best.get(self.config.metric)

    @property
    def judged_by(self) -> tuple[Any, ...]:
        """What must agree with another run's, or the validation figures of the two do not compare."""
        return (self.data, *(getattr(self.config, name) for name in _JUDGED_BY))


def summarize_run(folder: Path) -> RunSummary:
    """Read what a run's folder says of it; works beside the training that writes it.

    Raises:
        FileNotFoundError: no such folder, or the run was never committed.
        ValueError: the run is not one of ``bunkbed train``, or its description is damaged.
    """
    import pyarrow.parquet as pq

    with bb.Run(folder, ram="64MiB", mode="r") as run:
        meta = run.meta
    if "progress" not in meta:
        raise ValueError(f"{folder}: was not made by bunkbed train: its last commit has no progress")
    config = TrainConfig.from_dict(meta["config"])
    progress = Progress.from_meta(meta, config)
    epochs = _finished_epochs(folder, progress.epoch)
    # An epoch that was finished by a resumed run may have had no step of its own left.
    rates = [epoch["samples_per_s"] for epoch in epochs if epoch.get("samples_per_s")]
    users, items, pairs = (
        pq.read_metadata(folder / "data" / f"{name}.parquet").num_rows for name in ("users", "items", "train")
    )
    return RunSummary(
        folder=folder,
        config=config,
        epochs=progress.epoch,
        is_done=progress.stopped_early or progress.epoch >= config.epochs,
        best_epoch=progress.best_epoch or None,
        best=dict(progress.best),
        test=load_test(folder, step=progress.global_step),
        loss=epochs[-1]["loss"] if epochs else None,
        pairs_per_s=median(rates) if rates else None,
        hit_rate=epochs[-1]["unique_hit_rate"] if epochs else None,
        data=(users, items, pairs),
    )


def _finished_epochs(folder: Path, count: int) -> list[dict[str, Any]]:
    """The log's lines of the first `count` epochs; what power loss took from it is missing."""
    try:
        metrics = read_metrics(folder / "metrics.jsonl")
    except FileNotFoundError:
        return []
    return [epoch for epoch in metrics.epochs if epoch["epoch"] <= count]


def differing_options(runs: Sequence[RunSummary]) -> list[str]:
    """Names of the options in which the runs differ, in the order of `TrainConfig`."""
    every = [run.config.to_dict() for run in runs]
    return [name for name in every[0] if any(one[name] != every[0][name] for one in every[1:])]


def ranked(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Best value first where all have the same metric, those without one last; as given where metrics differ."""
    if len({run.config.metric for run in runs}) > 1:
        return list(runs)
    return sorted(runs, key=lambda run: -1.0 if run.value is None else run.value, reverse=True)
