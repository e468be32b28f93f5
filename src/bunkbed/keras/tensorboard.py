"""`TensorBoard`: what the tables of a model did, as scalars for TensorBoard."""

from __future__ import annotations

import importlib.util
import time
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import keras

from bunkbed.keras.embedding import Embedding

#: Counters of `bunkbed.Table.stats` that are written as what they grew by since they were written last.
GROWTH = ("misses", "evictions", "staged_rows", "stall_s", "read_bytes", "written_bytes")
#: And what is written as it is.
LEVELS = ("stored_rows", "dirty_rows", "ram_bytes", "disk_bytes", "snapshot_bytes")


class TensorBoard(keras.callbacks.Callback):  # type: ignore[misc]  # keras is untyped here
    """Writes scalars of every table of the model, beside what `keras.callbacks.TensorBoard` writes.

    ``fit(..., callbacks=[keras.callbacks.TensorBoard("logs"), bunkbed.keras.TensorBoard("logs")])``, and in TensorBoard
    a run ``tables`` with, for each table by its name:

    - ``hit_rate``: of the rows wanted that had been stored, the share that was in RAM. Nothing where none was wanted.
    - ``misses``, ``evictions``, ``staged_rows``, ``stall_s``, ``read_bytes``, ``written_bytes``: since the last time.
    - ``steps_per_s``: updates of the table a second, since the last time.
    - ``stored_rows``, ``dirty_rows``, ``ram_bytes``, ``disk_bytes``, ``snapshot_bytes``: now.

    See `bunkbed.Table.stats` for what they mean. The horizontal axis is the table's step. A table that the first
    training step makes is written once it is there.

    Args:
        log_dir: folder of the logs, as `keras.callbacks.TensorBoard` has it.
        update_freq: ``"epoch"``, or an int: after so many batches, and at the end of ``fit``.

    Raises:
        ValueError, TypeError: `update_freq` is neither. ModuleNotFoundError: TensorFlow, which writes the file, is
            missing.
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
        #: By id(table): when it was written last, and what its counters were.
        self._last: dict[int, tuple[float, int, dict[str, Any]]] = {}

    # ---- keras.callbacks.Callback

    def on_train_begin(self, logs: Any = None) -> None:
        self._seen = 0
        self._last = {id(table): _counters(table) for table in tables_of(self.model)}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # With steps_per_execution=8 only each eighth batch is told.
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
                continue  # the end of fit may come right after a batch that was written
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


def tables_of(model: Any) -> list[Any]:
    """The open tables of a model's layers, each once."""
    found: dict[int, Any] = {}
    for layer in model._flatten_layers():
        if isinstance(layer, Embedding) and layer._shared.has_table and not layer.table.closed:
            found.setdefault(id(layer.table), layer.table)
    return list(found.values())


def _counters(table: Any) -> tuple[float, int, dict[str, Any]]:
    stats = table.stats()
    return time.monotonic(), table.step, {name: stats[name] for name in ("hits", *GROWTH, *LEVELS)}
