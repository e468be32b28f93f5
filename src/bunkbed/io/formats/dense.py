"""Rows in the order of their ids, from a log with another order.

A lookup of every id would read the log row by row, on an SSD ten times slower than a scan. Instead:

1. The ids are divided into regions. The rows of a region, with all wanted slots, fit in memory. The log is scanned once
   for all regions.
2. While the scan meets regions in order, as in an imported table, the rows of a region are gathered in memory and
   written together.
3. Rows in another order, or rows that follow after their region was written, are set aside in a file for each region.
4. At the end, each region that lacks rows is completed from its file, and regions without stored rows are written.

Rows that are not stored have their initial values, which cost no read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bunkbed.core.arguments import Floats, Ids
from bunkbed.errors import BunkbedError
from bunkbed.io.common.ahead import ahead
from bunkbed.io.common.source import read_fully, slot_length
from bunkbed.table.table import Table

#: Bytes of a region with all its slots (two regions are in memory), and most regions: above 64 GiB regions grow.
_REGION_BYTES = 16 << 20
_MAX_REGIONS = 4096
_LEAST_ROWS = 256
#: Bytes of one chunk of the scan.
_SCAN_BYTES = 1 << 20
#: Bytes of one chunk of rows that were set aside, or that are not stored.
_STEP_BYTES = 1 << 20


class Rows(Protocol):
    """Target of rows: float32[N, length] by slices, such as a NumPy array, an HDF5 dataset or a `FileRows`."""

    def __getitem__(self, part: slice) -> Any: ...
    def __setitem__(self, part: slice, rows: Any) -> None: ...


class FileRows:
    """float32[N, length] in a file, by slices of rows. System calls write it, as a mapping takes twice the time.

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
        # Start write-back now, so that the sync of the file has less to write.
        os.posix_fadvise(self._descriptor, begin, length, os.POSIX_FADV_DONTNEED)


def fill(table: Table, targets: Mapping[str, Rows], scratch: Path, report: Callable[[int, int], None]) -> None:
    """Write slots of every row of `table`, which is scanned once.

    Args:
        targets: the target of each slot's rows.
        scratch: an empty folder for rows that are set aside.
        report: called with (rows written, rows in all).
    """
    assert table.num_rows is not None
    row_bytes = 4 * sum(slot_length(table, slot) for slot in targets)
    rows = max(_LEAST_ROWS, _REGION_BYTES // row_bytes, -(-table.num_rows // _MAX_REGIONS))
    with ThreadPoolExecutor(1, "bunkbed-export") as writer:
        _Filling(table, targets, scratch, report, rows, writer).run(max(_LEAST_ROWS, _SCAN_BYTES // row_bytes))


def gather(table: Table, slot: str, out: Floats, report: Callable[[int, int], None]) -> None:
    """Write a slot of every row of `table` to `out`, which is in memory, in log order.

    Args:
        out: float32[num_rows, length of the slot].
        report: called with (rows written, rows in all); rows that are not stored come last.
    """
    row_bytes = 4 * out.shape[1]
    present, count = np.zeros(len(out), np.bool_), 0
    with closing(ahead(table.scan_slots((slot,), max(_LEAST_ROWS, _SCAN_BYTES // row_bytes)))) as parts:
        for ids, (rows,) in parts:
            where = _places(ids)
            out[where] = rows
            present[where] = True
            count += len(ids)
            report(count, len(out))
    missing = np.flatnonzero(~present)
    step = max(1, _STEP_BYTES // row_bytes)
    for begin in range(0, len(missing), step):
        part = missing[begin : begin + step]
        out[part] = _values(table, slot, part)
        _require_not_stored(table, part)
        report(count + begin + len(part), len(out))


def _places(at: Ids) -> Any:
    """Return an index of rows `at`; a slice if they are consecutive, which is copied at once."""
    first, last = int(at[0]), int(at[-1])
    follow = last - first == len(at) - 1 and bool((np.diff(at) == 1).all())
    return slice(first, last + 1) if follow else at


def _values(table: Table, slot: str, ids: Ids) -> Floats:
    """Return values of rows that are not stored, without changing the cache."""
    return table.lookup(ids, touch=False) if slot == "weight" else table.get(ids, slot)


def _require_not_stored(table: Table, ids: Ids) -> None:
    """Raise if a row was stored since the scan, and so has another state; call it after reading the values."""
    stored = table.contains(ids)
    if stored.any():
        raise BunkbedError(
            f"table '{table.name}': row {int(ids[stored.argmax()])} was first trained while rows were exported; "
            "nothing was exported; export again without changing the table meanwhile"
        )


class _Filling:
    def __init__(
        self,
        table: Table,
        targets: Mapping[str, Rows],
        scratch: Path,
        report: Callable[[int, int], None],
        region_rows: int,
        writer: ThreadPoolExecutor,
    ) -> None:
        assert table.num_rows is not None
        self._table, self._scratch, self._report = table, scratch, report
        self._slots, self._outs = tuple(targets), tuple(targets.values())
        lengths = [slot_length(table, slot) for slot in targets]
        self._rows, self._total = region_rows, table.num_rows
        self._written: set[int] = set()
        self._aside: set[int] = set()
        self._late: dict[int, int] = {}  # by written region: the number of stored rows it lacks
        self._now = -1  # the region being gathered
        # Double buffers, each with an array for each slot: a thread writes one while the other gathers rows.
        rows = min(region_rows, table.num_rows)
        self._buffers: list[Floats] = [np.empty((rows, length), np.float32) for length in lengths]
        self._others: list[Floats] = [np.empty((rows, length), np.float32) for length in lengths]
        self._present = np.zeros(rows, np.bool_)
        #: A row that is set aside: its id, then its slots.
        fields = ((slot, "<f4", (length,)) for slot, length in zip(targets, lengths, strict=True))
        self._record = np.dtype([("id", "<i8"), *fields])
        self._step = max(1, _STEP_BYTES // self._record.itemsize)
        self._records = np.empty(self._step, self._record)
        self._writer = writer
        self._writing: Future[None] | None = None
        self._count = 0

    def run(self, chunk: int) -> None:
        """Run the four steps of the module's docstring."""
        with closing(ahead(self._table.scan_slots(self._slots, chunk))) as parts:
            for ids, values in parts:
                regions = ids // self._rows
                steps = np.diff(regions)
                if (steps >= 0).all():
                    cuts = np.flatnonzero(steps) + 1
                    for part in map(slice, (0, *cuts), (*cuts, len(ids))):
                        self._take(int(regions[part.start]), ids[part], [one[part] for one in values])
                else:  # unordered, as after training
                    self._take_any(regions, ids, values)
        self._finish()
        self._wait()  # now the files have all rows that were set aside
        for region in range(-(-self._total // self._rows)):
            if region in self._late or region not in self._written:
                self._complete(region)
        self._wait()

    def _take(self, region: int, ids: Ids, values: Sequence[Floats]) -> None:
        """Take rows of one region; start gathering the region if no row of it came before."""
        if region != self._now and region not in self._written and region not in self._aside:
            self._finish()
            self._now = region
            self._present[:] = False
        if region == self._now:
            self._place(ids - region * self._rows, values)
        else:
            self._set_aside(np.full(len(ids), region), ids, values)

    def _take_any(self, regions: Ids, ids: Ids, values: Sequence[Floats]) -> None:
        """Take rows of several regions, without starting a region."""
        here = regions == self._now
        if here.any():
            self._place(ids[here] - self._now * self._rows, [one[here] for one in values])
            regions, ids, values = regions[~here], ids[~here], [one[~here] for one in values]
        self._set_aside(regions, ids, values)

    def _set_aside(self, regions: Ids, ids: Ids, values: Sequence[Floats]) -> None:
        """Sort rows by region, and let the thread append them to the regions' files."""
        order = np.argsort(regions, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        records = np.empty(len(ids), self._record)
        records["id"][places] = ids
        for slot, rows in zip(self._slots, values, strict=True):
            records[slot][places] = rows
        names, begins = np.unique(regions[order], return_index=True)
        self._aside.update(names.tolist())
        self._submit(self._append, names, begins, records)

    def _append(self, regions: Ids, begins: Ids, records: Any) -> None:
        for region, part in zip(regions.tolist(), np.split(records, begins[1:]), strict=True):
            with (self._scratch / f"{region}.rows").open("ab") as file:
                file.write(part.view(np.uint8).data)

    def _place(self, at: Ids, values: Sequence[Floats]) -> None:
        """Put rows of the present region into `_buffers`."""
        where = _places(at)
        for buffer, rows in zip(self._buffers, values, strict=True):
            buffer[where] = rows
        self._present[where] = True

    def _finish(self) -> None:
        """Write the gathered region; its rows that follow later are set aside and added at the end."""
        region = self._now
        if region < 0:
            return
        missing = np.flatnonzero(~self._present[: self._count_of(region)])
        is_late = self._table.contains(missing + region * self._rows)  # a lookup would read row by row
        if is_late.any():
            self._late[region] = int(is_late.sum())
        self._put(region, missing[~is_late])
        self._written.add(region)
        self._now = -1

    def _complete(self, region: int) -> None:
        begin, count = region * self._rows, self._count_of(region)
        came = 0
        self._present[:] = False
        if region in self._written:
            self._wait()
            for buffer, out in zip(self._buffers, self._outs, strict=True):
                buffer[:count] = out[begin : begin + count]
            self._present[:] = True
        if region in self._aside:
            path = self._scratch / f"{region}.rows"
            left = path.stat().st_size // self._record.itemsize
            with path.open("rb", buffering=0) as file:
                while left:
                    records = self._records[:left]
                    read_fully(file, records, path)
                    self._place(records["id"] - begin, [records[slot] for slot in self._slots])
                    left -= len(records)
                    came += len(records)
            path.unlink()
        if region in self._written and came != self._late[region]:
            raise BunkbedError(
                f"table '{self._table.name}': the log brought {came} of {self._late[region]} rows that ids from "
                f"{begin} still lacked; it was changed meanwhile, or is damaged: see bunkbed check"
            )
        missing = np.flatnonzero(~self._present[:count])
        self._put(region, missing)
        for start in range(0, len(missing), self._step):
            _require_not_stored(self._table, missing[start : start + self._step] + begin)

    def _count_of(self, region: int) -> int:
        return min(self._rows, self._total - region * self._rows)

    def _put(self, region: int, missing: Ids) -> None:
        """Write a region, with initial values for its `missing` rows."""
        begin, count = region * self._rows, self._count_of(region)
        for start in range(0, len(missing), self._step):
            part = missing[start : start + self._step]
            for slot, buffer in zip(self._slots, self._buffers, strict=True):
                buffer[part] = _values(self._table, slot, part + begin)
        self._submit(self._write, slice(begin, begin + count), self._buffers)
        self._buffers, self._others = self._others, self._buffers
        if region not in self._written:
            self._count += count
            self._report(self._count, self._total)

    def _write(self, part: slice, buffers: Sequence[Floats]) -> None:
        for out, rows in zip(self._outs, buffers, strict=True):
            out[part] = rows[: part.stop - part.start]

    def _submit(self, call: Callable[..., None], *given: Any) -> None:
        """Let the thread run `call`, after its previous call is done."""
        self._wait()
        self._writing = self._writer.submit(call, *given)

    def _wait(self) -> None:
        """Wait until the thread's call is done; raise its error."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None
