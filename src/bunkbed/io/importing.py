"""`import_rows`.

1. The file's kind, shapes and dtypes are read; if they do not fit the table, the import fails.
2. The file is read to check every id and value: the first bad one is an error that has its place.
3. The file is read again, and rows are set. From here on the import fails only through the disk, memory, the user or a
   change of the file; the error says which rows were set. None of these is in the last commit.
4. The optimizer's step is set, if the file has state; then a new vocabulary is written.

The file is read twice, because a copy that is swapped in at the end would need disk space for two tables.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bunkbed.core.arguments import Floats, Ids
from bunkbed.core.typed import typed
from bunkbed.errors import ReadOnlyError
from bunkbed.io.common.ahead import ahead
from bunkbed.io.common.naming import Naming
from bunkbed.io.common.source import Chunk, Progress, Reading, Source, naming_file, slot_length
from bunkbed.io.formats import Format, format_of
from bunkbed.io.setting import Setting
from bunkbed.table.table import Table

#: The least magnitude that a 16-bit dtype rounds to infinity.
_BEYOND = {"float16": 65520.0, "bfloat16": float(np.uint32(0x7F7F8000).view(np.float32))}
#: Slots whose square roots the update rules take.
_SQUARES = ("sum", "exp_avg_sq")
#: Upper bound of a table's steps.
_STEPS = 2**63 - 1


@typed
def import_rows(
    table: Table,
    path: str | os.PathLike[str],
    *,
    ids: Any = None,
    format: str | None = None,
    name: str | None = None,
    state: str | None = None,
    slots: Sequence[str] | None = None,
    vocab: str | os.PathLike[str] | None = None,
    chunk: int | None = None,
    progress: Progress | None = None,
    checking: Progress | None = None,
) -> int:
    """Set rows of `table` from a file; do not commit them.

    The whole file is checked before the first row is set. Rows already in the table are overwritten; of equal ids the
    last row wins.

    Args:
        table: an open table, its writer.
        path: the file; its suffix decides the format.
        ids: int64[N], the id of each row, instead of the file's ids; or the name of the file's column of ids (words in
            it are ids in decimal). Default: the file's ids, or ``0 .. N-1`` if it has none.
        format: a name of `bunkbed.io.formats.FORMATS`, if the suffix does not decide.
        name: name of the array, if the file has several.
        state: path of the array's optimizer state in a checkpoint, if it is ambiguous.
        slots: what to import. Default: the weights and every slot that both have. State includes its step.
        vocab: for rows named by words: a file of one word per line, whose number from 0 is the id. If the file exists,
            it decides the ids; otherwise rows get the ids ``0 .. N-1`` and the file is written.
        chunk: rows held in memory at a time; default: 4 MiB of rows.
        progress: called after each chunk with (rows set, rows in all).
        checking: as `progress`, while the file is checked.

    Returns:
        Rows set.

    Raises:
        ValueError: an unknown suffix, another dim, too many rows, a column missing, a word unknown, a value not finite
            or beyond the table's dtype; state of an earlier step than the table has taken. TypeError: not floats of 32
            or 16 bits. IndexError: an id outside the table. The message has the first bad value and its place, and
            nothing was changed.
        ReadOnlyError: a reader. ImportError: the format's library is missing; says how to install it.
        OSError, MemoryError, KeyboardInterrupt: while rows were set: a note says which rows. None is committed.

    >>> import bunkbed as bb, numpy as np
    >>> np.save("rows.npy", np.ones((3, 2), np.float32))
    >>> with bb.create(None, dim=2, num_rows=10, init=bb.Zeros()) as table:
    ...     bb.import_rows(table, "rows.npy", ids=[4, 5, 9])
    ...     table.lookup([4, 6])
    3
    array([[1., 1.],
           [0., 0.]], dtype=float32)
    """
    source_path = Path(path)
    if table.mode == "r":
        raise ReadOnlyError(f"table '{table.name}' is a reader; open it with mode=\"w\" to import rows")
    for slot in slots or ():
        slot_length(table, slot)  # raises for an unknown slot
    if slots is not None and not slots:
        raise ValueError("slots must name at least one of the table's slots, got none")
    column = ids if isinstance(ids, str) else None
    chosen = format_of(source_path, format)
    if not source_path.exists() and chosen.name != "tensorflow":
        raise FileNotFoundError(2, "No such file or directory", str(source_path))
    reading = Reading(
        path=source_path,
        format=chosen.name,
        table=table,
        slots=("weight", *table.slots) if slots is None else tuple(slots),
        chunk=chunk,
        name=name,
        state=state,
        id_column=column,
    )
    source = _read(chosen, reading)
    absent = [slot for slot in slots or () if slot not in source.slots]
    if absent:
        raise ValueError(f"{source_path} holds no {absent[0]!r}; it holds: {', '.join(source.slots)}")
    steps = _steps(table, source, source_path)
    naming = Naming(
        table, source_path, source.rows, None if column else ids, column is not None, Path(vocab) if vocab else None
    )
    _check(table, source, naming, source_path, checking)
    setting = Setting(table, source.slots)
    done = 0
    try:
        with closing(ahead(_finite(source.chunks(), source_path))) as chunks:
            for keys, values in chunks:
                count = len(next(iter(values.values())))
                setting.set(naming.ids_of(keys, done, count), values)
                done += count
                if progress is not None:
                    progress(done, source.rows)
        if steps:  # a step without rows sets the number, which bias correction continues from
            table.update(np.empty(0, np.int64), np.empty((0, table.dim), np.float32), step=source.step)
        naming.finish()
    except BaseException as error:
        error.add_note(
            f"rows 0 to {done} of {source_path} are in table '{table.name}', not committed; "
            "close(commit=False) leaves the table at its last commit"
        )
        raise
    return done


def _read(chosen: Format, reading: Reading) -> Source:
    """Return the file's rows; errors of the format's library name the file."""
    with naming_file(reading.path, chosen.name):
        source: Source = chosen.load().read(reading)

    def chunks() -> Iterator[Chunk]:
        with naming_file(reading.path, chosen.name):
            yield from source.chunks()

    return replace(source, chunks=chunks)


def _finite(chunks: Iterator[Chunk], path: Path) -> Iterator[Chunk]:
    """Check `chunks` again while they are imported, as the file may have changed since the first check."""
    for keys, values in chunks:
        for slot, rows in values.items():
            if not np.isfinite(rows).all():
                raise ValueError(f"{path} changed while it was imported: {slot} has values that are not finite")
        yield keys, values


def _steps(table: Table, source: Source, path: Path) -> bool:
    """Return whether the table's step must change to that of the file's state."""
    if source.step is None or not any(slot != "weight" for slot in source.slots):
        return False
    if not 0 <= source.step < _STEPS:
        raise ValueError(f"{path} holds optimizer state of step {source.step}, and steps are in [0, {_STEPS - 1}]")
    if source.step < table.step:
        raise ValueError(
            f"{path} holds optimizer state of step {source.step}, table '{table.name}' has taken {table.step}, which "
            'cannot be taken back; import into a new table, or only weights: slots=("weight",)'
        )
    return source.step > table.step


def _check(table: Table, source: Source, naming: Naming, path: Path, checking: Progress | None) -> None:
    """Read the whole file; raise at the first id or value that the table cannot store."""
    done = 0
    with closing(ahead(source.chunks())) as chunks:
        for keys, values in chunks:
            count = len(next(iter(values.values())))
            ids = naming.ids_of(keys, done, count)
            for slot, rows in values.items():
                _check_values(table, slot, rows, ids, done, path)
            done += count
            if done > source.rows:  # the file may be endless
                break
            if checking is not None:
                checking(done, source.rows)
    if done != source.rows:
        found = f"{done} or more" if done > source.rows else f"{done}"
        raise ValueError(f"{path} says that it holds {source.rows} rows, and holds {found}; nothing was changed")
    if done:
        naming.require_used()


def _check_values(table: Table, slot: str, rows: Floats, ids: Ids, begin: int, path: Path) -> None:
    dtype = table.dtype if slot == "weight" else getattr(table.optimizer, "state_dtype", "float32")
    what = ""
    good = np.isfinite(rows)
    if not good.all():
        what = "which is not finite"
    elif dtype in _BEYOND:
        good = np.abs(rows) < _BEYOND[dtype]
        what = "" if good.all() else f"beyond {dtype}"
    if not what and slot in _SQUARES:
        good = rows >= 0
        what = "" if good.all() else "a sum of squares below 0"
    if what:
        row, element = (int(one) for one in np.argwhere(~good)[0])
        raise ValueError(
            f"{path}: {slot} of row {begin + row} (id {ids[row]}), element {element}, is {rows[row, element]}, {what}; "
            "nothing was changed"
        )
