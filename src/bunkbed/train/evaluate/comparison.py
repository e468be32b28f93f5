"""Comparison of several runs: their options, their quality and their speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import bunkbed as bb
from bunkbed.core.types import Json
from bunkbed.train.evaluate.results import JUDGED_BY, Baseline, EvalResult, load_test
from bunkbed.train.features.features import read_about
from bunkbed.train.output.plots import read_metrics
from bunkbed.train.output.progress import Progress
from bunkbed.train.settings.config import TrainConfig
from bunkbed.train.settings.run_config import CHOICE_NAME, DATA_NAME, LOG_NAME

__all__ = ["RunSummary", "differing_options", "ranked", "summarize_run", "with_baselines"]


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run, from its last commit and its log.

    Attributes:
        folder: of the run.
        config: its options.
        epochs: finished epochs.
        is_done: all epochs of the config are finished, or patience ran out.
        best_epoch: the epoch with the best `config.metric`; None when nothing was evaluated.
        best: validation figures of `best_epoch`.
        valid: how their pairs were held out, see `TrainConfig.valid`.
        test: figures of the best epoch on the test pairs; None if there are no figures of this state.
        loss: mean over the last finished epoch; None before the first.
        pairs_per_s: positive pairs a second, the median of the epochs; None before the first.
        seconds: of the steps of the finished epochs, with those of a training that chose the epoch; None before the
            first.
        hit_rate: of the last finished epoch; None before the first.
        data: numbers of users, items and training pairs, which identify the data set.
        features: whose side features, of which file, "item items.csv"; empty: none.
    """

    folder: Path
    config: TrainConfig
    epochs: int
    is_done: bool
    best_epoch: int | None
    best: dict[str, float]
    valid: str
    test: EvalResult | None
    loss: float | None
    pairs_per_s: float | None
    seconds: float | None
    hit_rate: float | None
    data: tuple[int, int, int]
    features: str = ""

    @property
    def options(self) -> Json:
        """The options in which runs may differ."""
        return {**self.config.to_dict(), "features": self.features}

    @property
    def value(self) -> float | None:
        """The best value of the run's own metric."""
        return self.best.get(self.config.metric)

    @property
    def judged_by(self) -> tuple[Any, ...]:
        """The options that must agree with another run's, or the validation figures are not comparable."""
        options = {**self.config.to_dict(), "valid": self.valid}
        return (self.data, *(options[name] for name in JUDGED_BY))


def summarize_run(folder: Path) -> RunSummary:
    """Read the summary of a run from its folder; works during a training that writes the folder.

    Raises:
        FileNotFoundError: no such folder, or the run was never committed.
        ValueError: the run is not one of ``bunkbed train``, or its description is damaged.
    """
    import pyarrow.parquet as pq

    with bb.Run(folder, ram="64MiB", mode="r") as run:
        meta = run.meta
    if "progress" not in meta:
        raise ValueError(f"{folder}: was not made by bunkbed train: its last commit has no progress")
    config = TrainConfig.of_run(meta["config"])
    progress, _ = Progress.from_meta(meta, config)
    epochs = _finished_epochs(folder / LOG_NAME, progress.epoch)
    before = _finished_epochs(folder / CHOICE_NAME) if progress.chosen_on else []
    # An epoch that a resumed run finished may have had no step left.
    rates = [epoch["samples_per_s"] for epoch in epochs if epoch.get("samples_per_s")]
    users, items, pairs = (
        pq.read_metadata(folder / DATA_NAME / f"{name}.parquet").num_rows for name in ("users", "items", "train")
    )
    return RunSummary(
        folder=folder,
        config=config,
        epochs=progress.epoch,
        is_done=progress.stopped_early or progress.epoch >= config.epochs,
        best_epoch=progress.best_epoch or None,
        best=dict(progress.best),
        valid=progress.chosen_on or config.valid,
        test=load_test(folder, step=progress.global_step),
        loss=epochs[-1]["loss"] if epochs else None,
        pairs_per_s=median(rates) if rates else None,
        seconds=sum(epoch.get("seconds", 0.0) for epoch in [*before, *epochs]) if epochs else None,
        hit_rate=epochs[-1]["unique_hit_rate"] if epochs else None,
        data=(users, items, pairs),
        features=_features(folder / DATA_NAME),
    )


def _features(data: Path) -> str:
    about = read_about(data)
    return " and ".join(f"{side} {Path(about[side]['source']).name}" for side in ("item", "user") if side in about)


def _finished_epochs(log: Path, count: int | None = None) -> list[Json]:
    """Return the log's lines of the first `count` epochs, or all; lines that power loss removed are missing."""
    try:
        metrics = read_metrics(log)
    except FileNotFoundError:
        return []
    return [epoch for epoch in metrics.epochs if count is None or epoch["epoch"] <= count]


def differing_options(runs: Sequence[RunSummary]) -> list[str]:
    """Return the names of the options in which the runs differ, in the order of `RunSummary.options`."""
    every = [run.options for run in runs]
    return [name for name in every[0] if any(one[name] != every[0][name] for one in every[1:])]


def ranked(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Return runs with the best value first and runs without value last; unsorted if their metrics differ."""
    if len({run.config.metric for run in runs}) > 1:
        return list(runs)
    return sorted(runs, key=lambda run: -1.0 if run.value is None else run.value, reverse=True)


def with_baselines(runs: Sequence[RunSummary], baselines: Sequence[Baseline]) -> list[RunSummary | Baseline]:
    """Return runs and baselines, sorted as `ranked`, or by the test where a run has no validation; all by one metric.

    Where the metrics of the runs differ, the baselines come last.
    """
    metric, is_valid = runs[0].config.metric, all(run.best for run in runs)
    if not baselines or len({run.config.metric for run in runs}) > 1:
        return [*runs, *baselines]

    def value(one: RunSummary | Baseline) -> float:
        found = one.best if is_valid else {} if one.test is None else one.test.metrics
        return found.get(metric, -1.0)

    return sorted([*runs, *baselines], key=value, reverse=True)
