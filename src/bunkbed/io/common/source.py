"""What a file's rows are once its format is understood, and the checks that all formats share."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bunkbed.core.arguments import Floats, Ids
from bunkbed.errors import BunkbedError
from bunkbed.table.table import Table

#: (rows done, rows in all) after each chunk.
Progress = Callable[[int, int], None]
#: What the file calls its rows (ids, words, or nothing), and their values. The next chunk is asked for while one is
#: used: arrays may be used again for the next but one.
Chunk = tuple[Ids | Sequence[str] | None, dict[str, Floats]]

#: Most bytes of one slot in a chunk, where the caller does not say how many rows it is to have.
CHUNK_BYTES = 4 << 20
FLOATS = ("float32", "float16", "bfloat16")
#: Most bytes that a byte of a file becomes: what DEFLATE reaches at most.
MOST_EXPANSION = 1032


@dataclass(frozen=True)
class Source:
    """Rows of a file.

    Args:
        rows: how many.
        slots: what there is of them that the table has too.
        chunks: begins anew whenever it is called: a file is read once to check it and once to import it.
        step: the optimizer's step that the state belongs to; None where the file does not tell.
    """

    rows: int
    slots: tuple[str, ...]
    chunks: Callable[[], Iterator[Chunk]]
    step: int | None = None


@dataclass(frozen=True)
class Reading:
    """What a format is asked to read; see `bunkbed.io.import_rows` for the arguments."""

    path: Path
    format: str
    table: Table
    slots: tuple[str, ...]
    chunk: int | None
    name: str | None
    state: str | None
    id_column: str | None

    def rows_of(self, chunk_bytes: int = CHUNK_BYTES) -> int:
        """Rows of a chunk."""
        return chunk_rows(self.chunk, max(self.length(slot) for slot in self.slots), chunk_bytes)

    def length(self, slot: str) -> int:
        """Values of a slot of one row of the table."""
        return slot_length(self.table, slot)

    def refuse(self, **given: Any) -> None:
        """Raises where an argument was given that means nothing to this format."""
        for argument, value in given.items():
            if value is not None:
                raise ValueError(f"{self.path}: {argument}={value!r} means nothing for the format {self.format}")


def chunk_rows(chunk: int | None, length: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Rows of a chunk: those asked for, or so many that one slot of them takes `chunk_bytes`."""
    if chunk is None:
        return max(256, min(65_536, chunk_bytes // (4 * length)))
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    return chunk


def slot_length(table: Table, slot: str) -> int:
    """Values of a slot of one row.

    Raises:
        ValueError: no such slot; lists those there are.
    """
    return table._field(slot)[1]


def the_array_meant(
    reading: Reading, names: Collection[str], matrices: Collection[str], listed: str, *, separator: str, what: str
) -> str:
    """Of the arrays of a checkpoint the one that `Reading.name` names, by its end too, or the only matrix.

    Args:
        names: of all arrays. matrices: of those that may be rows.
        listed: the matrices, for people.
        separator: between the parts of a name.
        what: an array is called in this format.

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
    """Raises unless these are rows of `length` floats.

    16-bit floats are widened, which changes no value; float64 would lose digits and is the caller's to convert.

    Raises:
        TypeError: another dtype. ValueError: another shape.
    """
    wanted, got = f"float32[N, {length}]", f"{dtype}[{', '.join(map(str, shape))}]"
    if dtype not in FLOATS:
        raise TypeError(f"{where} must be {wanted}, got {got}")
    if len(shape) != 2 or shape[1] != length:
        raise ValueError(f"{where} must be {wanted}, got {got}")


def check_claim(where: str, rows: int, row_bytes: int, file_bytes: int) -> None:
    """Raises where a file says that it holds more than it can, compressed or not: a small one would fill the disk.

    Raises:
        ValueError: it does.
    """
    if rows * row_bytes > MOST_EXPANSION * file_bytes:
        raise ValueError(
            f"{where} claims {rows} rows of {row_bytes} bytes, and a file of {file_bytes} bytes cannot hold more than "
            f"{MOST_EXPANSION * file_bytes // row_bytes}; nothing was changed"
        )


@contextmanager
def naming_file(path: Path, format: str) -> Iterator[None]:
    """Names the file in what libraries raise of it: damage is a ValueError, a failing disk an OSError.

    Raises:
        ValueError, OSError, MemoryError: with the file's name.
    """
    try:
        yield
    except (BunkbedError, ImportError):
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        # Two files make the projector's format.
        is_named = any(str(one) in str(error) for one in (path, path.with_name("metadata.tsv")))
        if is_named or (isinstance(error, OSError) and error.filename is not None):
            raise
        if isinstance(error, OSError) and error.errno is not None:
            raise type(error)(error.errno, error.strerror, str(path)) from error
        if isinstance(error, MemoryError):
            raise MemoryError(f"{path}: there is not enough memory to read it: {reason}") from error
        raise ValueError(f"{path} is damaged, or not of the format {format}: {reason}") from error


def widened(values: Any, dtype: str) -> Floats:
    """Float32 of 16-bit floats, exactly; bfloat16 comes as uint16."""
    if dtype == "bfloat16":
        wide: Floats = (values.astype(np.uint32) << 16).view(np.float32)
        return wide
    return np.asarray(values, np.float32)


def rows_of_file(path: Path, offset: int, rows: int, length: int, dtype: str, chunk: int) -> Iterator[Floats]:
    """Rows that lie one after the other in a file, in two buffers that are used in turns.

    Read rather than mapped: a page fault for every 16 pages took longer than the copy.

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
    """Fills an array from an unbuffered file.

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
    """An optional library.

    Raises:
        ImportError: it is not there; says how to install it.
    """
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise ModuleNotFoundError(f"{what} needs {name}; install it with: pip install {install}", name=name) from None
