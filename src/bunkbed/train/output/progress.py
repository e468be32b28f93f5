"""Progress of a run's training, and the log of its reports."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bunkbed import _native
from bunkbed.core.types import Json
from bunkbed.files.durable import make_file
from bunkbed.train.output.events import EpochReport, StepReport
from bunkbed.train.settings.config import TrainConfig

__all__ = ["FREE_TO_CHANGE", "MetricsLog", "Progress"]

#: Options that may change on resuming; a change of any other option would make it another training.
FREE_TO_CHANGE = (
    "ram",
    "epochs",
    "patience",
    "commit_every",
    "device",
    "device_cache",
    "lookahead",
    "window",
    "threads",
    "stream",
    "refit",
)


@dataclass
class Progress:
    """Progress of training, stored in the meta of every commit of the run.

    Attributes:
        epoch: finished epochs.
        step: steps done in the current epoch.
        global_step: steps done in all epochs.
        loss_sum: sum of the losses of these `step` steps, in order of the steps.
        best_epoch: the epoch with the best metric, 0 for none yet.
        best: metrics of `best_epoch`.
        stale: evaluations since `best_epoch`.
        stopped_early: patience has run out.
        before: epochs of earlier rounds of training (`bunkbed.train.more`).
        first: epochs of the first round, if there are more.
        lr_scale: factor of the config's learning rate in the first epoch of this round.
        lr_decay: factor after each epoch of the round; 0: the config's.
        chosen_on: of a training on all pairs (`bunkbed.train.refit`): the option `valid` of the one before, which found
            `best_epoch` and `best`.
    """

    epoch: int = 0
    step: int = 0
    global_step: int = 0
    loss_sum: float = 0.0
    best_epoch: int = 0
    best: dict[str, float] = field(default_factory=dict)
    stale: int = 0
    stopped_early: bool = False
    before: int = 0
    first: int = 0
    lr_scale: float = 1.0
    lr_decay: float = 0.0
    chosen_on: str = ""

    def lr_factor(self, epoch: int, config: TrainConfig) -> float:
        """Return the factor of the config's learning rate in an epoch of this round."""
        return self.lr_scale * (self.lr_decay or config.lr_decay) ** (epoch - self.before - 1)

    def is_done(self, config: TrainConfig) -> bool:
        """Return whether training is complete."""
        return self.epoch >= config.epochs or self.stopped_early

    def to_meta(self, config: TrainConfig) -> Json:
        """Return the meta for `Run.commit(meta=...)`."""
        return {"progress": asdict(self), "config": config.to_dict()}

    @classmethod
    def from_meta(cls, meta: Json, config: TrainConfig) -> tuple[Progress, TrainConfig]:
        """Return the progress from the result of `to_meta`, and the config with the run's decisions.

        Raises:
            ValueError: an option that may not change differs from the run's.
        """
        if config.refit and meta.get("progress", {}).get("before"):
            raise ValueError(
                "option refit is not for a run with rounds of --more: its best epoch does not say how long to train "
                "new rows; start a new run on all pairs"
            )
        if "progress" not in meta:
            raise ValueError("the run was not made by bunkbed train: its last commit has no progress")
        stored = TrainConfig.of_run(meta["config"])
        config = config.with_decisions_of(stored)
        started = stored.to_dict()
        for name, value in config.to_dict().items():
            if name not in FREE_TO_CHANGE and value != started[name]:
                raise ValueError(
                    f"option {name}={value!r} differs from {started[name]!r}, with which the run was started; "
                    f"only {', '.join(FREE_TO_CHANGE)} may change on resuming"
                )
        progress = cls(**meta["progress"])
        progress.settle_patience(config)
        return progress, config

    def settle_patience(self, config: TrainConfig) -> None:
        """Set `stopped_early` from the patience of `config`, which may change on resuming."""
        self.stopped_early = bool(config.patience) and self.stale >= config.patience


class MetricsLog:
    """Writer of a run's ``metrics.jsonl``: one report per line, with its ``kind``.

    Training appends lines, and opening cuts the file back to the last commit, so that a resumed run has each step once.
    Written without sync: lines that power loss removes are not part of the model.

    Args:
        global_step: steps of the last commit; lines of later ones are dropped.
        epoch: finished epochs of the last commit.
    """

    def __init__(self, path: Path, *, global_step: int, epoch: int) -> None:
        kept = []
        if path.exists():
            for line in _native.read_file(str(path)).decode().splitlines(keepends=True):
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue  # torn by a crash
                is_later = entry["global_step"] > global_step
                if not is_later and not (entry["kind"] == "epoch" and entry["epoch"] > epoch):
                    kept.append(line)
        self._file = io.TextIOWrapper(make_file(path), encoding="utf-8")
        self._file.writelines(kept)
        self._file.flush()

    def write(self, report: StepReport | EpochReport) -> None:
        """Append one line."""
        kind = "step" if isinstance(report, StepReport) else "epoch"
        self._file.write(json.dumps({"kind": kind, **asdict(report)}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
