"""Reports of a training as scalars for TensorBoard. Training never reads these files of a run."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from bunkbed.files.durable import require_real
from bunkbed.train.output.events import EpochReport, Event, StepReport
from bunkbed.train.settings.run_config import SCALARS_NAME

if TYPE_CHECKING:
    from bunkbed.train.loop import Trainer

__all__ = ["Scalars"]

#: Field of `StepReport` -> its name in TensorBoard, which groups names by the part before the slash.
_OF_STEPS = {
    "loss": "train/loss",
    "samples_per_s": "speed/samples_per_s",
    "stall_share": "speed/stall_share",
    "unique_hit_rate": "rows/unique_hit_rate",
    "device_hit_rate": "rows/device_hit_rate",
    "ram_bytes": "bytes/ram",
    "ssd_read_bytes_per_s": "bytes/ssd_read_per_s",
    "ssd_write_bytes_per_s": "bytes/ssd_written_per_s",
}


class Scalars:
    """Writer of a training's events into ``tensorboard`` in its run's folder; pass it to `Trainer.fit`.

    The horizontal axis is the step since the run began. A resumed run writes a new file that first purges the steps
    after the last commit: these steps are done again, and TensorBoard shows each step once.

    Owns the file. One thread calls and closes it; a ``with`` block closes it. Written without sync.

    Args:
        trainer: the trainer that sends the events; `Trainer.fit` must not have been called yet.

    Raises:
        ModuleNotFoundError: tensorboard is not installed. OSError: the folder cannot be written.
    """

    def __init__(self, trainer: Trainer) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # If training stopped within an evaluation, all steps of the epoch are done, but the epoch's own figures, which
        # belong to its last step, are not committed.
        self.folder = Path(trainer.run.path) / SCALARS_NAME
        require_real(self.folder)
        self._writer = SummaryWriter(str(self.folder), purge_step=trainer.step + (0 if trainer.owes_evaluation else 1))

    def __call__(self, event: Event) -> None:
        """Write the report of a step or an epoch; ignore reports of an evaluation under way."""
        if isinstance(event, StepReport):
            for field, name in _OF_STEPS.items():
                self._write(name, getattr(event, field), event.global_step)
        elif isinstance(event, EpochReport):
            self._write("train/epoch_loss", event.loss, event.global_step)
            self._write("rows/epoch_unique_hit_rate", event.unique_hit_rate, event.global_step)
            for name, value in event.metrics.items():
                self._write(f"validation/{name}", value, event.global_step)
            self._writer.flush()

    def _write(self, name: str, value: float | None, step: int) -> None:
        if value is not None:
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write pending scalars and close the file; idempotent."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
