"""Keras's files: ``.weights.h5``, and ``.keras``, an archive of such a file and a configuration.

Arrays are named by their path in the file, such as ``layers/user/vars/0``.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bunkbed.io.dense import fill
from bunkbed.io.exporting import Writing
from bunkbed.io.source import Chunk, Reading, Source, check_rows, need, the_array_meant, widened

_INSTALL = "h5py"
_WEIGHTS = "model.weights.h5"
#: Slots in the order in which Keras keeps them, by the optimizer's class.
_SLOTS = {"Adam": ("exp_avg", "exp_avg_sq"), "AdamW": ("exp_avg", "exp_avg_sq"), "Adagrad": ("sum",)}


def read(reading: Reading) -> Source:
    """Rows of a dataset by position; with state, of a ``.keras`` file that says whose it is."""
    need("h5py", reading.path.name, _INSTALL)
    path = reading.path
    reading.refuse(ids=reading.id_column, state=reading.state)
    optimizer = _optimizer_of(path) if reading.format == "keras" else None
    with _opened(path) as file:
        shapes = _datasets(file)
        name = _named(reading, shapes)
        found = {"weight": name}
        step = None
        if optimizer in _SLOTS and set(reading.slots) & set(_SLOTS[optimizer]):
            found.update(_state_of(reading, name, shapes, _SLOTS[optimizer]))
            step = int(file["optimizer/vars/0"][()])
        found = {slot: dataset for slot, dataset in found.items() if slot in reading.slots}
        for slot, dataset in found.items():
            check_rows(f"{path}: {dataset}", *shapes[dataset], reading.length(slot))
        rows = shapes[name][0][0]
    chunk = reading.rows_of()

    def chunks() -> Iterator[Chunk]:
        with _opened(path) as file:
            for begin in range(0, rows, chunk):
                part = slice(begin, min(rows, begin + chunk))
                yield None, {slot: widened(file[dataset][part], "float32") for slot, dataset in found.items()}

    return Source(rows, tuple(found), chunks, step)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The HDF5 file, by itself or in its archive."""
    import h5py

    if not zipfile.is_zipfile(path):
        try:
            file = h5py.File(path, "r")
        except OSError as error:
            raise ValueError(f"{path} is not an HDF5 file: {error}") from None
        with file:
            yield file
        return
    with zipfile.ZipFile(path) as archive:
        if _WEIGHTS not in archive.namelist():
            raise ValueError(f"{path} has no {_WEIGHTS}; it has: {', '.join(archive.namelist())}")
        about = archive.getinfo(_WEIGHTS)
    if about.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{path} is compressed; extract its {_WEIGHTS} and import that")
    with path.open("rb") as raw:
        raw.seek(about.header_offset + 26)  # of the entry's own header: lengths of its name and of what follows it
        lengths = np.frombuffer(raw.read(4), "<u2")
        start = about.header_offset + 30 + int(lengths.sum())
        with h5py.File(_Part(raw, start, about.file_size), "r") as file:
            yield file


class _Part(io.RawIOBase):
    """Bytes of a file, as a file: an archive's own would read up to every place that is sought."""

    def __init__(self, file: Any, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + {0: 0, 1: self._at, 2: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        count: int = self._file.readinto(view)
        self._at += count
        return count


def _datasets(file: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every array in the file, by name."""
    found = {}

    def visit(name: str, item: Any) -> None:
        if hasattr(item, "shape"):
            found[name] = (tuple(item.shape), item.dtype.name)

    file.visititems(visit)
    return found


def _named(reading: Reading, shapes: dict[str, Any]) -> str:
    """The one array that is meant."""
    tables = [
        name
        for name, (shape, kind) in shapes.items()
        if len(shape) == 2 and "float" in kind and name[:10] != "optimizer/"
    ]
    listed = ", ".join(f"{name} {list(shapes[name][0])}" for name in tables) or "none"
    return the_array_meant(reading, shapes, tables, listed, separator="/", what="array")


def _optimizer_of(path: Path) -> str | None:
    """The class of the optimizer that a ``.keras`` file was compiled with."""
    try:
        with zipfile.ZipFile(path) as archive:
            config = json.loads(archive.read("config.json"))
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not a .keras file: {error}") from None
    optimizer = (config.get("compile_config") or {}).get("optimizer")
    return optimizer.get("class_name") if isinstance(optimizer, dict) else None


def _state_of(reading: Reading, name: str, shapes: dict[str, Any], slots: tuple[str, ...]) -> dict[str, str]:
    """Arrays of the optimizer that are that weight's: Keras numbers them, so only one weight may have its shape."""
    shape = shapes[name][0]
    numbered = [key for key in shapes if key.startswith("optimizer/vars/")]
    fits = sorted((key for key in numbered if shapes[key][0] == shape), key=lambda key: int(key.rpartition("/")[2]))
    alike = [key for key in shapes if shapes[key][0] == shape and not key.startswith("optimizer/")]
    if not fits:
        return {}
    if len(fits) != len(slots) or len(alike) != 1:
        raise ValueError(
            f"{reading.path} does not say which optimizer state is that of {name}: {len(alike)} weights and "
            f'{len(fits)} arrays of state have its shape; leave state out with slots=("weight",)'
        )
    return dict(zip(slots, fits, strict=True))


def write(writing: Writing) -> int:
    """Every id in ``[0, num_rows)``, as the weights of a model of one `Embedding` layer."""
    h5py = need("h5py", writing.target.name, _INSTALL)
    rows = writing.every_row()
    ((slot, length),) = writing.lengths.items()
    with h5py.File(writing.file, "w") as file:
        dataset = file.create_dataset(writing.name or "layers/embedding/vars/0", (rows, length), "<f4")
        fill(writing.table, {slot: dataset}, writing.scratch, writing.report)
    return rows
