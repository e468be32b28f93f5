"""Rows in the order of their ids, from a log that has them in another.

Looking every id up would read the log row by row: on an SSD ten times slower than reading it through. Instead:

1. The ids are divided into regions whose rows fit in memory. The log is scanned once.
2. While it goes through regions in order, as a table does that was imported, the rows of a region are gathered in
   memory and written at once.
3. Rows that come in another order are set aside, in a file for each region.
4. At the end each region with such rows is completed from its file, and those without any are written.

Rows that are not stored have their initial values, which cost no read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bunkbed.arguments import Floats, Ids
from bunkbed.io.ahead import ahead
from bunkbed.io.source import read_fully
from bunkbed.table import Table

#: Bytes of a region, two of which are in memory, and most regions: above 64 GiB they grow instead.
_REGION_BYTES = 16 << 20
_MAX_REGIONS = 4096
_LEAST_ROWS = 256
#: Bytes of what is scanned at once.
_SCAN_BYTES = 1 << 20


class Rows(Protocol):
    """Where rows go: float32[N, length] by slices, as a NumPy array, an HDF5 dataset or a `FileRows`."""

    def __getitem__(self, part: slice) -> Any: ...
    def __setitem__(self, part: slice, rows: Any) -> None: ...


class FileRows:
    """float32[N, length] in a file, by slices of rows. Written through calls: a mapping is twice as slow to fill.

    Args:
        descriptor: of the open file.
        offset: bytes before the first row.
        length: values of a row.
    """

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor = descriptor
        self._offset = offset
        self._length = length

    def __getitem__(self, part: slice) -> Floats:
        rows = np.empty((part.stop - part.start, self._length), "<f4")
        view, at = memoryview(rows.reshape(-1).view(np.uint8)), self._offset + 4 * self._length * part.start
        done = 0
        while done < len(view):
            done += os.preadv(self._descriptor, [view[done:]], at + done)
        return rows

    def __setitem__(self, part: slice, rows: Any) -> None:
        at = self._offset + 4 * self._length * part.start
        view = memoryview(np.ascontiguousarray(rows, "<f4").reshape(-1).view(np.uint8))
        begin, length = at, len(view)
        while view:
            done = os.pwrite(self._descriptor, view, at)
            view, at = view[done:], at + done
        # The disk begins now, and not all at once when the file is synced.
        os.posix_fadvise(self._descriptor, begin, length, os.POSIX_FADV_DONTNEED)


def fill(table: Table, slot: str, length: int, out: Rows, scratch: Path, report: Callable[[int, int], None]) -> None:
    """Writes a slot of every row of `table` to `out`.

    Args:
        length: values of the slot in a row.
        scratch: an empty folder for what is set aside.
        report: called with (rows written, rows in all).
    """
    assert table.num_rows is not None
    rows = max(_LEAST_ROWS, _REGION_BYTES // (4 * length), -(-table.num_rows // _MAX_REGIONS))
    with ThreadPoolExecutor(1, "bunkbed-export") as writer:
        _Filling(table, slot, length, out, scratch, report, rows, writer).run(
            max(_LEAST_ROWS, _SCAN_BYTES // (4 * length))
        )


class _Filling:
    def __init__(
        self,
        table: Table,
        slot: str,
        length: int,
        out: Rows,
        scratch: Path,
        report: Callable[[int, int], None],
        region_rows: int,
        writer: ThreadPoolExecutor,
    ) -> None:
        assert table.num_rows is not None
        self._table, self._slot, self._length = table, slot, length
        self._out, self._scratch, self._report = out, scratch, report
        self._rows, self._total = region_rows, table.num_rows
        self._written: set[int] = set()
        self._aside: set[int] = set()
        self._now = -1  # the region being gathered
        # Two of them: one is written by a thread while rows are gathered in the other.
        shape = (min(region_rows, table.num_rows), length)
        self._buffer: Floats = np.empty(shape, np.float32)
        self._other: Floats = np.empty(shape, np.float32)
        self._present = np.zeros(len(self._buffer), np.bool_)
        self._writer = writer
        self._writing: Future[None] | None = None
        self._count = 0

    def run(self, chunk: int) -> None:
        """All four steps."""
        with closing(ahead(self._table.scan(self._slot, chunk))) as parts:
            for ids, values in parts:
                regions = ids // self._rows
                if (regions == regions[0]).all():
                    self._take(int(regions[0]), ids, values, gather=True)
                    continue
                order = np.argsort(regions, kind="stable")
                cuts = np.flatnonzero(np.diff(regions[order])) + 1
                gather = bool((np.diff(regions) >= 0).all())  # otherwise the scan is in no order, as after training
                for part in np.split(order, cuts):
                    self._take(int(regions[part[0]]), ids[part], values[part], gather=gather)
        self._finish()
        for region in range(-(-self._total // self._rows)):
            if region in self._aside or region not in self._written:
                self._complete(region)
        self._wait()

    def _take(self, region: int, ids: Ids, values: Floats, *, gather: bool) -> None:
        if gather and region != self._now and region not in self._written and region not in self._aside:
            self._finish()
            self._now = region
            self._present[:] = False
        if region == self._now:
            self._place(ids - region * self._rows, values)
            return
        self._aside.add(region)
        with (self._scratch / f"{region}.ids").open("ab") as file:
            file.write(np.ascontiguousarray(ids).data)
        with (self._scratch / f"{region}.rows").open("ab") as file:
            file.write(np.ascontiguousarray(values).data)

    def _place(self, at: Ids, values: Floats) -> None:
        """Rows of the region in `_buffer`; those that follow each other as one copy."""
        first, last = int(at[0]), int(at[-1])
        if last - first == len(at) - 1 and (np.diff(at) == 1).all():
            self._buffer[first : last + 1] = values
            self._present[first : last + 1] = True
        else:
            self._buffer[at] = values
            self._present[at] = True

    def _finish(self) -> None:
        """Writes the region that was gathered; should more of it come, that is set aside and added."""
        if self._now < 0:
            return
        self._put(self._now)
        self._written.add(self._now)
        self._now = -1

    def _complete(self, region: int) -> None:
        begin = region * self._rows
        count = min(self._rows, self._total - begin)
        self._present[:] = False
        if region in self._written:
            self._wait()
            self._buffer[:count] = self._out[begin : begin + count]
            self._present[:] = True
        if region in self._aside:
            ids_file, rows_file = self._scratch / f"{region}.ids", self._scratch / f"{region}.rows"
            at = np.fromfile(ids_file, np.int64) - begin
            step = max(1, (4 << 20) // (4 * self._length))
            with rows_file.open("rb", buffering=0) as file:
                for start in range(0, len(at), step):
                    part = at[start : start + step]
                    rows = np.empty((len(part), self._length), np.float32)
                    read_fully(file, rows, rows_file)
                    self._place(part, rows)
            ids_file.unlink()
            rows_file.unlink()
        self._put(region)

    def _put(self, region: int) -> None:
        begin = region * self._rows
        count = min(self._rows, self._total - begin)
        missing = np.flatnonzero(~self._present[:count])
        step = max(1, (4 << 20) // (4 * self._length))
        for start in range(0, len(missing), step):
            part = missing[start : start + step]
            ids = part + begin
            self._buffer[part] = (
                self._table.lookup(ids, touch=False) if self._slot == "weight" else self._table.get(ids, self._slot)
            )
        self._wait()
        self._writing = self._writer.submit(self._out.__setitem__, slice(begin, begin + count), self._buffer[:count])
        self._buffer, self._other = self._other, self._buffer
        if region not in self._written:
            self._count += count
            self._report(self._count, self._total)

    def _wait(self) -> None:
        """Until the region before this one is written; raises what that failed with."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None
