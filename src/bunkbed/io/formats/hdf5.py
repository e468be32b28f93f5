"""Keras's files: ``.weights.h5``, and ``.keras``, an archive of such a file and a configuration.

Arrays are named by their path in the file, such as ``layers/user/vars/0``. An HDF5 file may refer to arrays or groups
in other files of any path; an import refuses a file with such references.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from bunkbed.core.arguments import Floats
from bunkbed.core.types import Json
from bunkbed.io.common.source import (
    Chunk,
    Reading,
    Source,
    check_claim,
    check_rows,
    need,
    rows_of_file,
    the_array_meant,
    widened,
)
from bunkbed.io.common.writing import Writing
from bunkbed.io.formats.dense import FileRows, fill
from bunkbed.io.formats.zip_members import offset_of

#: A file, dataset or link of h5py, which is untyped.
Hdf5: TypeAlias = Any

_INSTALL = "h5py"
_WEIGHTS = "model.weights.h5"
_STEP = "optimizer/vars/0"
#: Most bytes of a ``.keras`` file's configuration.
_MAX_CONFIG = 100_000_000
#: Slots in the order of Keras's files, by the optimizer's class.
_SLOTS = {"Adam": ("exp_avg", "exp_avg_sq"), "AdamW": ("exp_avg", "exp_avg_sq"), "Adagrad": ("sum",)}


def read(reading: Reading) -> Source:
    """Return rows of a dataset by position; with state if a ``.keras`` file names the optimizer."""
    need("h5py", reading.path.name, _INSTALL)
    path = reading.path
    reading.refuse(ids=reading.id_column, state=reading.state)
    optimizer = _optimizer_of(path) if reading.format == "keras" else None
    with _opened(path) as (file, _):
        shapes = _datasets(path, file)
        name = _named(reading, shapes)
        found = {"weight": name}
        step = None
        if optimizer in _SLOTS and set(reading.slots) & set(_SLOTS[optimizer]):
            found.update(_state_of(reading, name, shapes, _SLOTS[optimizer]))
            if len(found) > 1 and shapes.get(_STEP, ((0,), ""))[0] != ():
                raise ValueError(f"{path} has optimizer state and no step, one number named {_STEP}")
            step = int(file[_STEP][()]) if len(found) > 1 else None
        found = {slot: dataset for slot, dataset in found.items() if slot in reading.slots}
        for slot, dataset in found.items():
            check_rows(f"{path}: {dataset}", *shapes[dataset], reading.length(slot))
            _check_sizes(path, file[dataset])
        rows = shapes[name][0][0]
        places = {slot: _place(file[dataset]) for slot, dataset in found.items()}
    chunk = reading.rows_of()

    def chunks() -> Iterator[Chunk]:
        with _opened(path) as (file, start):
            if _datasets(path, file) != shapes:
                raise ValueError(f"{path} changed while it was imported")
            parts: dict[str, Iterator[Floats]] = {}
            for slot, dataset in found.items():
                place, length, dtype = places[slot], reading.length(slot), shapes[dataset][1]
                if place is None:
                    parts[slot] = _rows_of(file[dataset], chunk)
                else:
                    parts[slot] = rows_of_file(path, start + place, rows, length, dtype, chunk)
            for values in zip(*parts.values(), strict=True):
                yield None, dict(zip(parts, values, strict=True))

    return Source(rows, tuple(found), chunks, step)


def _place(dataset: Hdf5) -> int | None:
    """Return the offset in the HDF5 file of a dataset's consecutive rows; None if only h5py can read the rows.

    h5py makes an additional copy, and reads through Python calls if the file is in an archive.
    """
    if dataset.dtype not in (np.dtype("<f4"), np.dtype("<f2")):
        return None
    # None for a dataset that is chunked, in another file, never written, or so small that it is in the object header.
    place: int | None = dataset.id.get_offset()
    return place


def _rows_of(dataset: Hdf5, chunk: int) -> Iterator[Floats]:
    for begin in range(0, len(dataset), chunk):
        yield widened(dataset[begin : begin + chunk], "float32")


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Hdf5, int]]:
    """Open the HDF5 file, which may be inside an archive; yield it and its offset in `path`."""
    import h5py

    if not zipfile.is_zipfile(path):
        try:
            file = h5py.File(path, "r")
        except OSError as error:
            raise ValueError(f"{path} is not an HDF5 file: {error}") from None
        with file:
            yield file, 0
        return
    with zipfile.ZipFile(path) as archive:
        if _WEIGHTS not in archive.namelist():
            raise ValueError(f"{path} has no {_WEIGHTS}; it has: {', '.join(archive.namelist())}")
        about = archive.getinfo(_WEIGHTS)
    if about.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{path} is compressed; extract its {_WEIGHTS} and import that")
    with path.open("rb") as raw:
        start = offset_of(raw, about)
        if start + about.file_size > path.stat().st_size:
            raise ValueError(f"{path}: its {_WEIGHTS} of {about.file_size} bytes lies outside the file")
        with h5py.File(_Part(raw, start, about.file_size), "r") as file:
            yield file, start


class _Part(io.RawIOBase):
    """A range of a file's bytes, as a file. An archive's own file object reads all bytes up to a place to seek it."""

    def __init__(self, file: Hdf5, start: int, size: int) -> None:
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

    def readinto(self, buffer: Hdf5) -> int:
        self._file.seek(self._start + self._at)
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        count: int = self._file.readinto(view)
        self._at += count
        return count


def _check_sizes(path: Path, dataset: Hdf5) -> None:
    """Raise ValueError if an array, or one of its chunks, is larger than the file can hold."""
    rows, length = dataset.shape
    where, size, itemsize = f"{path}: {dataset.name}", path.stat().st_size, dataset.dtype.itemsize
    check_claim(where, rows, length * itemsize, size)
    if dataset.chunks is not None:
        check_claim(f"{where}, a chunk,", dataset.chunks[0], dataset.chunks[1] * itemsize, size)


def _datasets(path: Path, file: Hdf5) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of every array in the file, by name.

    Raises:
        ValueError: an array is stored in another file, or made of other arrays, which may be in other files; or a name
        is a link to another file.
    """
    import h5py

    found = {}

    def external(name: bytes, link: Hdf5) -> bytes | None:
        return name if link.type == h5py.h5l.TYPE_EXTERNAL else None  # a result ends the visit

    def visit(name: str, item: Hdf5) -> None:
        if hasattr(item, "is_virtual"):  # checked before the shape, which may open other files
            if item.is_virtual or item.external:
                kind = "made of other arrays (virtual storage)" if item.is_virtual else "stored in another file"
                raise ValueError(f"{path}: {name} is {kind}, which is not read; write its rows into the file itself")
            found[name] = (tuple(item.shape or ()), item.dtype.name)

    elsewhere = file.id.links.visit(external, info=True)
    if elsewhere is not None:
        name = elsewhere.decode(errors="replace")
        raise ValueError(f"{path}: {name} is a link to another file, which is not read")
    file.visititems(visit)
    return found


def _named(reading: Reading, shapes: Json) -> str:
    """Return the name of the array to read."""
    tables = [
        name
        for name, (shape, kind) in shapes.items()
        if len(shape) == 2 and "float" in kind and name[:10] != "optimizer/"
    ]
    listed = ", ".join(f"{name} {list(shapes[name][0])}" for name in tables) or "none"
    return the_array_meant(reading, shapes, tables, listed, separator="/", what="array")


def _optimizer_of(path: Path) -> str | None:
    """Return the class name of the optimizer that a ``.keras`` file's model was compiled with."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = archive.getinfo("config.json").file_size
            if size > _MAX_CONFIG:
                raise ValueError(f"its config.json claims {size} bytes, at most {_MAX_CONFIG} are read")
            config = json.loads(archive.read("config.json"))
    except (zipfile.BadZipFile, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a .keras file: {error}") from None
    optimizer = (config.get("compile_config") or {}).get("optimizer")
    return optimizer.get("class_name") if isinstance(optimizer, dict) else None


def _state_of(reading: Reading, name: str, shapes: Json, slots: tuple[str, ...]) -> dict[str, str]:
    """Return the weight's arrays of optimizer state. Keras numbers them, so only one weight may have its shape."""
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
    """Write every id in ``[0, num_rows)``, as the weights of a model of one `Embedding` layer."""
    h5py = need("h5py", writing.target.name, _INSTALL)
    rows = writing.every_row()
    ((slot, length),) = writing.lengths.items()
    with h5py.File(writing.file, "w") as file:
        dataset = file.create_dataset(writing.name or "layers/embedding/vars/0", (rows, length), "<f4")
        dataset[rows - 1 :] = 0  # the first write allocates the whole dataset
        place = dataset.id.get_offset()
    with writing.file.open("r+b") as raw:  # h5py would copy each part again
        fill(writing.table, {slot: FileRows(raw.fileno(), place, length)}, writing.scratch, writing.report)
    return rows
