"""What a run remembers about its training, and the log of what it reported."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bunkbed import _native
from bunkbed.files.durable import make_file
from bunkbed.train.output.events import EpochReport, StepReport
from bunkbed.train.settings.config import TrainConfig

__all__ = ["FREE_TO_CHANGE", "MetricsLog", "Progress"]

#: Options a resumed run may change; any other would not continue what was begun.
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
)


@dataclass
class Progress:
    """Where training stands; kept in the meta of every commit of the run.

    Attributes:
        epoch: finished epochs.
        step: steps done in the epoch after those.
        global_step: steps done.
        loss_sum: sum of the losses of `step` steps, in order of the steps.
        best_epoch: the epoch with the best metric, 0 for none yet.
        best: its metrics.
        stale: evaluations since then.
        stopped_early: patience has run out.
    """

    epoch: int = 0
    step: int = 0
    global_step: int = 0
    loss_sum: float = 0.0
    best_epoch: int = 0
    best: dict[str, float] = field(default_factory=dict)
    stale: int = 0
    stopped_early: bool = False

    def is_done(self, config: TrainConfig) -> bool:
        """Whether there is nothing left to train."""
        return self.epoch >= config.epochs or self.stopped_early

    def to_meta(self, config: TrainConfig) -> dict[str, Any]:
        """For `Run.commit(meta=...)`."""
        return {"progress": asdict(self), "config": config.to_dict()}

    @classmethod
    def from_meta(cls, meta: dict[str, Any], config: TrainConfig) -> Progress:
        """What `to_meta` made.

        Raises:
            ValueError: an option differs from the one the run was begun with and may not.
        """
        if "progress" not in meta:
            raise ValueError("the run was not made by bunkbed train: its last commit has no progress")
        begun = TrainConfig.from_dict(meta["config"]).to_dict()
        for name, value in config.to_dict().items():
            if name not in FREE_TO_CHANGE and value != begun[name]:
                raise ValueError(
                    f"option {name}={value!r} differs from {begun[name]!r}, with which the run was begun; "
                    f"only {', '.join(FREE_TO_CHANGE)} may change on resuming"
                )
        progress = cls(**meta["progress"])
        progress.settle_patience(config)
        return progress

    def settle_patience(self, config: TrainConfig) -> None:
        """Says whether patience has run out; another one may be given on resuming."""
        self.stopped_early = bool(config.patience) and self.stale >= config.patience


class MetricsLog:
    """``metrics.jsonl`` of a run: one report a line, with its ``kind``.

    Appended to as training goes and cut back to the last commit on opening, so that a resumed run has each
    step once. Written without sync: what power loss takes from it is not part of the model.

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
