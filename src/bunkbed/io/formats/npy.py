"""``.npy``: float32[N, dim], one slot; row `i` is id `i` unless ids are given."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from bunkbed.io.common.source import Chunk, Reading, Source, check_rows, rows_of_file, widened
from bunkbed.io.common.writing import Writing
from bunkbed.io.formats.dense import FileRows, fill


def read(reading: Reading) -> Source:
    """Return rows of an array by position."""
    path = reading.path
    reading.refuse(name=reading.name, state=reading.state, ids=reading.id_column)
    try:
        with np.errstate(over="ignore"):  # of sizes, which np.load itself reports
            rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OverflowError) as error:
        raise ValueError(f"{path} is not a .npy file: {error}") from None
    if not isinstance(rows, np.memmap):
        raise ValueError(f"{path} is not a .npy file, but an .npz archive; save each of its arrays with numpy.save")
    slot = reading.slots[0]
    if "weight" in reading.slots:
        slot = "weight"
    length, count, offset = reading.length(slot), len(rows) if rows.ndim else 0, rows.offset
    dtype = rows.dtype.name if rows.dtype.isnative else str(rows.dtype)
    check_rows(f"{path}: rows", rows.shape, dtype, length)
    chunk = reading.rows_of()
    is_plain = rows.flags.c_contiguous
    del rows

    def chunks() -> Iterator[Chunk]:
        if is_plain:
            for values in rows_of_file(path, offset, count, length, dtype, chunk):
                yield None, {slot: values}
            return
        by_column = np.load(path, mmap_mode="r", allow_pickle=False)
        for begin in range(0, count, chunk):
            yield None, {slot: np.ascontiguousarray(widened(by_column[begin : begin + chunk], dtype))}

    return Source(count, (slot,), chunks)


def write(writing: Writing) -> int:
    """Write every id in ``[0, num_rows)``."""
    rows = writing.every_row()
    ((slot, length),) = writing.lengths.items()
    with writing.file.open("w+b") as file:
        np.lib.format.write_array_header_2_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, length)})
        file.flush()
        start = file.tell()
        os.truncate(file.fileno(), start + 4 * rows * length)
        fill(writing.table, {slot: FileRows(file.fileno(), start, length)}, writing.scratch, writing.report)
    return rows
