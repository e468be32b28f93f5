"""`TensorBoard`: counters of a model's tables, as scalars for TensorBoard."""

from __future__ import annotations

import importlib.util
import time
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import keras

from bunkbed.core.types import Json
from bunkbed.keras.base.types import Model
from bunkbed.keras.embedding import Embedding
from bunkbed.table.table import Table

#: Counters of `bunkbed.Table.stats` that are written as their growth since the last write.
GROWTH = ("misses", "evictions", "staged_rows", "stall_s", "read_bytes", "written_bytes")
#: Values that are written unchanged.
LEVELS = ("stored_rows", "dirty_rows", "ram_bytes", "disk_bytes", "snapshot_bytes")


class TensorBoard(keras.callbacks.Callback):  # type: ignore[misc]  # keras is untyped here
    """Callback that writes scalars of every table of the model, in addition to `keras.callbacks.TensorBoard`.

    With ``fit(..., callbacks=[keras.callbacks.TensorBoard("logs"), bunkbed.keras.TensorBoard("logs")])`` TensorBoard
    shows a run ``tables`` with, for each table by its name:

    - ``hit_rate``: the share of the wanted stored rows that was in RAM. Not written if no stored row was wanted.
    - ``misses``, ``evictions``, ``staged_rows``, ``stall_s``, ``read_bytes``, ``written_bytes``: since the last write.
    - ``steps_per_s``: updates of the table per second, since the last write.
    - ``stored_rows``, ``dirty_rows``, ``ram_bytes``, ``disk_bytes``, ``snapshot_bytes``: present values.

    See `bunkbed.Table.stats` for their meaning. The horizontal axis is the table's step. A table that the first
    training step makes is written from then on.

    Args:
        log_dir: folder of the logs, the same as for `keras.callbacks.TensorBoard`.
        update_freq: ``"epoch"``, or an int: after this many batches, and at the end of ``fit``.

    Raises:
        ValueError, TypeError: `update_freq` is neither. ModuleNotFoundError: TensorBoard, or TensorFlow, which writes
            the file, is missing.
    """

    def __init__(self, log_dir: str | PathLike[str] = "logs", *, update_freq: Literal["epoch"] | int = "epoch") -> None:
        super().__init__()
        if importlib.util.find_spec("tensorboard") is None:
            raise ModuleNotFoundError(
                "bunkbed.keras.TensorBoard writes what TensorBoard reads, which is missing; install it with: "
                "pip install tensorboard",
                name="tensorboard",
            )
        if update_freq != "epoch":
            if isinstance(update_freq, (bool, str)) or not isinstance(update_freq, int):
                raise TypeError(f'TensorBoard: update_freq must be "epoch" or an int, got {update_freq!r}')
            if update_freq < 1:
                raise ValueError(f"TensorBoard: update_freq must be at least 1, got {update_freq}")
        try:
            from tensorflow import summary
        except ModuleNotFoundError as error:
            if error.name != "tensorflow":
                raise
            raise ModuleNotFoundError(
                "bunkbed.keras.TensorBoard writes with TensorFlow, which is missing; install tensorflow-cpu, or log "
                "layer.table.stats() yourself",
                name="tensorflow",
            ) from None
        self._summary = summary
        self._folder = Path(log_dir) / "tables"
        self._batches = None if update_freq == "epoch" else update_freq
        self._seen = 0
        self._writer: Any = None
        #: By id(table): time, step and counters of the last write.
        self._last: dict[int, tuple[float, int, Json]] = {}

    # ---- keras.callbacks.Callback

    def on_train_begin(self, logs: Any = None) -> None:
        self._seen = 0
        self._last = {id(table): _counters(table) for table in tables_of(self.model)}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # With steps_per_execution=8, Keras calls this only for each eighth batch.
        before, self._seen = self._seen, batch + 1
        if self._batches is not None and self._seen // self._batches != before // self._batches:
            self._write()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._seen = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._batches is None:
            self._write()

    def on_train_end(self, logs: Any = None) -> None:
        if self._batches is not None:
            self._write()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._last = {}

    def _write(self) -> None:
        for table in tables_of(self.model):
            now, step, stats = _counters(table)
            since, step_before, before = self._last.get(id(table), (now, step, dict.fromkeys(stats, 0)))
            if self._last.get(id(table)) is not None and step == step_before and stats == before:
                continue  # the end of fit may follow a batch that was written
            self._last[id(table)] = now, step, stats
            values = {name: stats[name] - before[name] for name in GROWTH}
            values |= {name: stats[name] for name in LEVELS}
            hits = stats["hits"] - before["hits"]
            if hits + values["misses"]:
                values["hit_rate"] = hits / (hits + values["misses"])
            if now > since:
                values["steps_per_s"] = (step - step_before) / (now - since)
            if self._writer is None:
                self._writer = self._summary.create_file_writer(str(self._folder))
            with self._writer.as_default(), self._summary.record_if(True):
                for name, value in values.items():
                    self._summary.scalar(f"{table.name}/{name}", value, step=step)


def tables_of(model: Model) -> list[Any]:
    """Return the open tables of a model's layers, each once."""
    found: dict[int, Any] = {}
    for layer in model._flatten_layers():
        if isinstance(layer, Embedding) and layer._shared.has_table and not layer.table.closed:
            found.setdefault(id(layer.table), layer.table)
    return list(found.values())


def _counters(table: Table) -> tuple[float, int, Json]:
    stats = table.stats()
    return time.monotonic(), table.step, {name: stats[name] for name in ("hits", *GROWTH, *LEVELS)}
