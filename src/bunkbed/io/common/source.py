"""Rows of a file, independent of its format, and the checks that all formats share."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from bunkbed.core.arguments import Floats, Ids
from bunkbed.errors import BunkbedError
from bunkbed.table.table import Table

#: A table, column, type or module of pyarrow, which is untyped.
Arrow: TypeAlias = Any
#: (rows done, rows in all) after each chunk.
Progress = Callable[[int, int], None]
#: The names of rows in the file (ids, words, or None), and their values. The next chunk is read while one is used, so
#: the arrays of a chunk may be reused for the second chunk after it.
Chunk = tuple[Ids | Sequence[str] | None, dict[str, Floats]]

#: Most bytes of one slot in a chunk, if the caller does not set the rows of a chunk.
CHUNK_BYTES = 4 << 20
FLOATS = ("float32", "float16", "bfloat16")
#: Most bytes that one byte of a file expands to: the limit of DEFLATE.
MOST_EXPANSION = 1032


@dataclass(frozen=True)
class Source:
    """Rows of a file.

    Args:
        rows: the number of rows.
        slots: the slots that both the file and the table have.
        chunks: starts from the first row at each call: a file is read once to check it and once to import it.
        step: the optimizer's step of the state; None if the file does not have it.
    """

    rows: int
    slots: tuple[str, ...]
    chunks: Callable[[], Iterator[Chunk]]
    step: int | None = None


@dataclass(frozen=True)
class Reading:
    """A request to read a file; see `bunkbed.io.import_rows` for the arguments."""

    path: Path
    format: str
    table: Table
    slots: tuple[str, ...]
    chunk: int | None
    name: str | None
    state: str | None
    id_column: str | None

    def rows_of(self, chunk_bytes: int = CHUNK_BYTES) -> int:
        """Return the rows of a chunk."""
        return chunk_rows(self.chunk, max(self.length(slot) for slot in self.slots), chunk_bytes)

    def length(self, slot: str) -> int:
        """Return the number of values of a slot of one row of the table."""
        return slot_length(self.table, slot)

    def refuse(self, **given: Any) -> None:
        """Raise ValueError if an argument was given that has no meaning for this format."""
        for argument, value in given.items():
            if value is not None:
                raise ValueError(f"{self.path}: {argument}={value!r} means nothing for the format {self.format}")


def chunk_rows(chunk: int | None, length: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return the rows of a chunk: `chunk`, or 256 to 65,536 rows, of which one slot takes about `chunk_bytes`."""
    if chunk is None:
        return max(256, min(65_536, chunk_bytes // (4 * length)))
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    return chunk


def slot_length(table: Table, slot: str) -> int:
    """Return the number of values of a slot of one row.

    Raises:
        ValueError: no such slot; lists the slots.
    """
    return table.field(slot)[1]


def the_array_meant(
    reading: Reading, names: Collection[str], matrices: Collection[str], listed: str, *, separator: str, what: str
) -> str:
    """Return the array of a checkpoint whose name is, or ends with, `Reading.name`; without name, the only matrix.

    Args:
        names: of all arrays. matrices: of those that may be rows.
        listed: the matrices, for error messages.
        separator: between the parts of a name.
        what: the format's word for an array.

    Raises:
        ValueError: there is none, or several; lists the matrices.
    """
    if reading.name is not None:
        fits = [name for name in names if name == reading.name or name.endswith(separator + reading.name)]
        fits = [reading.name] if reading.name in fits else fits
        if len(fits) == 1:
            return fits[0]
        problem = f"several {what}s {reading.name!r}: {', '.join(fits)}" if fits else f"no {what} {reading.name!r}"
        raise ValueError(f"{reading.path} has {problem}; its matrices are: {listed}")
    if len(matrices) != 1:
        raise ValueError(f"{reading.path} has {len(matrices)} matrices, say which one with name=: {listed}")
    return next(iter(matrices))


def check_rows(where: str, shape: Sequence[int], dtype: str, length: int) -> None:
    """Raise unless these are rows of `length` floats.

    16-bit floats are widened, which changes no value. float64 would lose digits, so the caller must convert it.

    Raises:
        TypeError: another dtype. ValueError: another shape.
    """
    wanted, got = f"float32[N, {length}]", f"{dtype}[{', '.join(map(str, shape))}]"
    if dtype not in FLOATS:
        raise TypeError(f"{where} must be {wanted}, got {got}")
    if len(shape) != 2 or shape[1] != length:
        raise ValueError(f"{where} must be {wanted}, got {got}")


def check_claim(where: str, rows: int, row_bytes: int, file_bytes: int) -> None:
    """Check that a file does not claim more rows than it can hold, also compressed: a small one could fill the disk.

    Raises:
        ValueError: it claims more.
    """
    if rows * row_bytes > MOST_EXPANSION * file_bytes:
        raise ValueError(
            f"{where} claims {rows} rows of {row_bytes} bytes, and a file of {file_bytes} bytes cannot hold more than "
            f"{MOST_EXPANSION * file_bytes // row_bytes}; nothing was changed"
        )


@contextmanager
def naming_file(path: Path, format: str) -> Iterator[None]:
    """Add the file's name to errors of libraries: damage is a ValueError, a failing disk an OSError.

    Raises:
        ValueError, OSError, MemoryError: with the file's name.
    """
    try:
        yield
    except (BunkbedError, ImportError):
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        # The projector's format has two files.
        is_named = any(str(one) in str(error) for one in (path, path.with_name("metadata.tsv")))
        if is_named or (isinstance(error, OSError) and error.filename is not None):
            raise
        if isinstance(error, OSError) and error.errno is not None:
            raise type(error)(error.errno, error.strerror, str(path)) from error
        if isinstance(error, MemoryError):
            raise MemoryError(f"{path}: there is not enough memory to read it: {reason}") from error
        raise ValueError(f"{path} is damaged, or not of the format {format}: {reason}") from error


def widened(values: Any, dtype: str) -> Floats:
    """Widen 16-bit floats to float32, exactly; bfloat16 is given as uint16."""
    if dtype == "bfloat16":
        wide: Floats = (values.astype(np.uint32) << 16).view(np.float32)
        return wide
    return np.asarray(values, np.float32)


def rows_of_file(path: Path, offset: int, rows: int, length: int, dtype: str, chunk: int) -> Iterator[Floats]:
    """Yield consecutive rows of a file, in two buffers that are used in turns.

    The file is read, not mapped: a page fault for every 16 pages took longer than the copy.

    Raises:
        ValueError: the file ends early.
    """
    stored = np.dtype({"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[dtype])
    buffers = [np.empty((min(chunk, rows), length), stored) for _ in range(2 if rows > chunk else 1)]
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        os.posix_fadvise(file.fileno(), offset, rows * length * stored.itemsize, os.POSIX_FADV_SEQUENTIAL)
        for begin in range(0, rows, chunk):
            part = buffers[0][: min(chunk, rows - begin)]
            read_fully(file, part, path)
            yield widened(part, dtype)
            buffers.reverse()


def read_fully(file: Any, array: Any, path: Path) -> None:
    """Fill an array from an unbuffered file.

    Raises:
        ValueError: the file ends early.
    """
    view = memoryview(array.reshape(-1).view(np.uint8))
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise ValueError(f"{path} ends after {file.tell()} bytes, in the middle of its rows")
        done += count


def need(module: str, what: str, install: str) -> Any:
    """Import an optional library.

    Raises:
        ImportError: the library is missing; says how to install it.
    """
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise ModuleNotFoundError(f"{what} needs {name}; install it with: pip install {install}", name=name) from None
