"""`DeviceTier`: a device cache for the hot rows of one table.

From ids alone, the host decides which frames the rows of a batch get, which rows are loaded and which are evicted
(docs/design/architecture.md, "Plan, then execute"); the device only gathers, sums segments and updates.

1. The host deduplicates and checks a lookup's ids, and gives its rows frames (`_native.DeviceMap.plan`).
2. Rows to load are read from the table; dirty victims are copied from the device and written to the table; then the
   loaded records are copied to the device. In this order, a failed read or write of the table leaves the device
   unchanged, and the plan is undone.
3. The lookup gathers from the frames. Backward sums the gradients of equal ids on the device; `Optimizer.step` updates
   the frames and marks them dirty. The table counts the step, and updates no rows.
4. A call of the table that reads rows, and every commit, runs within `reading`: dirty rows were written back, and no
   step changes rows until it ends. A call that writes rows runs within `writing`; the device then forgets all rows.

Plans are made and executed one at a time under `_lock`, by the training thread or the thread that places coming batches
(window.py). So an evicted row is in the table before a plan loads it again, and no plan overtakes another.
`_frames_lock` is held while frames are used or written: a commit concurrent with a step sees all of the step or none of
it. `_lock` is taken before `_frames_lock`, and a budget's lock before both. A forked child takes neither.

Exactness: the value of a row does not depend on its frame or on when it was loaded. Sums and updates are functions of
the batch alone (sums.py, update_rules.py). Rows after training have the same bits with every size of cache and with or
without `lookahead`; on a CPU device these are the bits of the table's own updates.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bunkbed import _native
from bunkbed.adapters.bag_gradients import IntArray
from bunkbed.core.budget import Budget, format_bytes, format_least, parse_bytes
from bunkbed.errors import BunkbedError
from bunkbed.table.sweeps import NEVER_GOES, as_usage, from_usage
from bunkbed.table.table import Table
from bunkbed.torch.device.base import capabilities
from bunkbed.torch.device.base.batches import FramedBatch
from bunkbed.torch.device.base.link import Link, is_out_of_memory
from bunkbed.torch.device.base.update_rules import step_constants
from bunkbed.torch.device.records import DeviceRecords
from bunkbed.torch.device.rows import DeviceRows

Bytes = npt.NDArray[np.uint8]

#: Bytes of records that a write-back moves at once.
_CHUNK_BYTES = 64 << 20
#: Approximate bytes of RAM that the map takes for a frame. They count in the table's `ram`.
_MAP_BYTES = 72


def _size(table: Table, size: float | str) -> int:
    """Return ``parse_bytes(size)``; its errors name the table."""
    try:
        return parse_bytes(size)
    except (TypeError, ValueError) as error:
        hint = "; 0, a number, keeps no rows on the device" if "above 0" in str(error) else ""
        raise type(error)(f"table {table.name!r}: device_cache: {error}{hint}") from None


class DeviceTier(DeviceRows):
    """A cache of a table's hot records on the device of its layers; a `bunkbed.torch.base.gradients.Rows`.

    Owns the device memory from the first lookup until the table is closed or its layers are deleted. One thread trains;
    other threads may use the table concurrently.

    Args:
        table: a `bunkbed.Table` open for writing.
        size: bytes of device memory for records, as ``"2GiB"``, or a `bunkbed.Budget` that several tables share.
        anchor: see `DeviceRows`.

    Raises:
        MemoryError: not one record fits. TypeError, ValueError: `size` is not a size.
    """

    def __init__(self, table: Table, size: float | str | Budget, anchor: Callable[[], Tensor]) -> None:
        self._records: DeviceRecords | None = None  # first: `__del__` reads it even if `__init__` fails
        super().__init__(table, anchor)
        self._budget = size if isinstance(size, Budget) else None
        self._bytes = 0 if isinstance(size, Budget) else _size(table, size)
        self._lock = threading.RLock()
        self._frames_lock = threading.RLock()
        self._map: _native.DeviceMap | None = None
        self._placed: weakref.WeakSet[FramedBatch] = weakref.WeakSet()
        self._usage: Bytes | None = None  # of the rows in frames, uint8[frames, 12], in RAM; None: the table has none
        self._reserved = 0  # bytes of the table's RAM that the map takes
        self._lost = ""  # why rows on the device are lost; empty if none is
        if self._budget is not None:
            self._budget.join(self)
        self._require_room()
        table.put_above(weakref.ref(self))

    # ---- as a member of a shared budget (see Budget)

    def wanted_bytes(self) -> int | None:
        """Return the bytes of a cache that holds all rows; None if the table has no number of rows."""
        rows = self.table.num_rows
        return None if rows is None else int(rows * self.table.record_bytes)

    def minimum_bytes(self) -> int:
        """Return the bytes of one record."""
        return int(self.table.record_bytes)

    def apply_share(self, num_bytes: int) -> None:
        """Use at most `num_bytes` from now on."""
        with self._lock, self._frames_lock:
            self._bytes = num_bytes
            if self._records is not None and self._frames() != self._records.frames and not self._lost:
                self._give_memory_back()

    def _frames(self) -> int:
        frames = self._bytes // int(self.table.record_bytes)
        rows = self.table.num_rows
        return int(frames if rows is None else min(frames, rows))

    def _size_and_least(self, rows: int) -> tuple[str, int]:
        """Return the size as an error tells it, and the least that has frames for `rows` rows of this table."""
        need = rows * int(self.table.record_bytes)
        if self._budget is None:
            return format_bytes(self._bytes), need
        size = f"{format_bytes(self._budget.total_bytes)} for {len(self._budget.members())} tables"
        return size, self._budget.least_total(self, need)

    def _require_room(self) -> None:
        if self._frames() < 1:
            need = int(self.table.record_bytes)
            raise MemoryError(
                f"table {self.table.name!r}: a device_cache of {self._bytes} bytes holds not one record of {need} "
                "bytes; it must hold the rows of the largest batch"
            )

    # ---- lookups

    def lookup(self, ids: IntArray) -> tuple[Tensor, FramedBatch]:
        """Return float32[N, dim] rows of int64[N] ids on the device, and their batch, in frames.

        Raises:
            IndexError, CorruptionError, OSError: see `Table.lookup`; nothing is changed.
            MemoryError: the batch's rows do not fit the cache; the message says how much is needed.
        """
        batch = self._framed(ids)
        return self._read(batch, lambda records: records.weights(batch.positions)), batch

    def lookup_rows(self, ids: IntArray) -> tuple[Tensor, FramedBatch]:
        """Look each row up once: float32[U, dim] in the order of the batch."""
        batch = self._framed(ids)
        return self._read(batch, lambda records: records.weights(batch.frames)), batch

    def _framed(self, ids: IntArray) -> FramedBatch:
        batch = self._batch(ids)
        assert isinstance(batch, FramedBatch)
        return batch

    def _read(self, batch: FramedBatch, gather: Callable[[DeviceRecords], Tensor]) -> Tensor:
        """Return ``gather(records)``, called while the rows of `batch` have their frames."""
        while True:
            if not batch.is_here:
                with self._lock:
                    self._start()
                    self._place(batch)
            with self._frames_lock:
                if batch.is_here:  # no other thread emptied the cache in between
                    self.link.wait(batch.ready, batch.arrays)
                    values = gather(self._require_records())
                    self.link.used()
                    return values

    def _require_map(self) -> _native.DeviceMap:
        assert self._map is not None, "`_start` makes it"
        return self._map

    def _require_records(self) -> DeviceRecords:
        assert self._records is not None
        return self._records

    def evaluate(self, batch: FramedBatch) -> Tensor:
        """Return float32[U, dim] rows of a batch on the device, without loading any into the cache."""
        unique = batch.unique()
        with self._lock:
            self._start()
            records = self._require_records()
            self.link.wait_for_all()  # also for rows that are prefetched
            frames = self._require_map().find(unique)
            is_here = frames >= 0
            elsewhere = unique[~is_here]
            rows = _native.empty_rows(elsewhere.size, self.table.dim)
            self.table.core.lookup(elsewhere, False, rows)
            if elsewhere.size == unique.size:
                return self.link.up(rows)
            values = torch.empty((unique.size, self.table.dim), dtype=torch.float32, device=self.link.device)
            values[self.link.up(np.flatnonzero(~is_here))] = self.link.up(rows)
            values[self.link.up(np.flatnonzero(is_here))] = records.weights(self.link.up(frames[is_here]))
            self.link.used()
        return values

    def deduped(self, ids: IntArray) -> FramedBatch:
        """Return the batch of int64[N] ids, checked and deduplicated, without frames."""
        return FramedBatch(cast("_native.Batch", self.table.batch(ids)), ids.size, self)

    # ---- frames

    def _start(self) -> None:
        """Make device memory and map on the anchor's device, unless they are there already."""
        self._require_usable()
        table, device = self.table, self._anchor().device
        if self._records is not None:
            if self._records.device == device:
                return
            self._give_memory_back()
        if table.closed:
            table.batch(np.empty(0, np.int64))  # raises TableClosedError
        self._require_one_device(device)
        spec = table.optimizer
        frames = self._frames()
        fields = [(name, int(length)) for name, length in table.core.fields()]
        usage_bytes = sum(4 * length for _, length in table.usage_fields)
        reserved = frames * (_MAP_BYTES + usage_bytes)
        table.reserve_ram(reserved)
        try:
            capabilities.of(device)  # probes an unknown device; raises for one that cannot hold records
            try:
                records = DeviceRecords(frames, fields, table.dtype, getattr(spec, "state_dtype", "float32"), device)
            except RuntimeError as error:  # torch's out-of-memory error is one
                raise MemoryError(
                    f"table {table.name!r}: a device_cache of {format_bytes(self._bytes)} does not fit {device}: "
                    f"{error}"
                ) from None
            if records.words * 4 + usage_bytes != table.record_bytes:
                raise BunkbedError(
                    f"table {table.name!r}: records of {table.record_bytes} bytes are not laid out as known"
                )
            known, link = _native.DeviceMap(table.plain_core, frames), Link(device, self.delay)
        except BaseException:
            table.reserve_ram(-reserved)
            raise
        this = weakref.ref(self)

        def write_back() -> None:
            tier = this()
            if tier is not None:
                tier.write_back()

        table.plain_core.set_device_cache(known, write_back)
        self._map, self._records, self._reserved, self.link = known, records, reserved, link
        self._usage = np.zeros((frames, usage_bytes), np.uint8) if usage_bytes else None
        self.link.used()  # queued work may still read a tensor that had this memory before

    def _require_one_device(self, device: torch.device) -> None:
        """Raise ValueError if the budget has a cache on another device. (``model.to()`` moves all anchors.)"""
        for other in [] if self._budget is None else self._budget.members():
            if not isinstance(other, DeviceTier) or other.table.closed:
                continue
            anchor = other._anchor()
            if anchor is not None and anchor.device != device:
                raise ValueError(
                    f"tables {self.table.name!r} and {other.table.name!r} share a budget of device memory, but the "
                    f"first is on {device} and the second on {anchor.device}, whose memories are two: move both to "
                    "one device, or give the tables of each device a Budget of its own"
                )

    def place(self, batch: FramedBatch, number: int = 0) -> bool:
        """Give the rows of a coming batch frames, for `lookahead`; return False if too many frames are pinned."""
        with self._lock:
            return self._records is not None and not self._lost and self._try_place(batch, number)

    def release(self, batches: list[FramedBatch]) -> None:
        """Release the frames of batches, for the thread of `lookahead`.

        No step reads them meanwhile, and no placement finds frames that no batch has and that are pinned still.
        """
        with self._lock:
            with self._frames_lock:
                plans = [batch.take_plan() for batch in batches]
            for plan in plans:
                if plan is not None:
                    plan.release()

    def expect(self, batch: FramedBatch) -> int:
        """Enter a coming batch; return its number in the map's window, or `_native.DeviceMap.WINDOW_FULL`."""
        if self._map is None:
            with self._lock:
                self._start()
        known = self._map
        return int(_native.DeviceMap.WINDOW_FULL if known is None else known.expect(batch.batch))

    def forget(self, number: int) -> None:
        """Remove the batch of that number from the map's window."""
        known = self._map
        if known is not None:
            known.forget(number)

    def missing(self, batch: FramedBatch) -> IntArray:
        """Return the rows of a batch that have no frame, int64[M]."""
        unique, known = batch.unique(), self._map
        return unique if known is None else unique[known.find(unique) < 0]

    def _place(self, batch: FramedBatch) -> None:
        """Place a batch; if frames are short, unpin those of batches that keep them only to save time."""
        frames = self._require_records().frames
        if len(batch) > frames:
            size, need = self._size_and_least(len(batch))
            raise MemoryError(
                f"table {self.table.name!r}: a lookup wants {len(batch):,} rows, and a device_cache of {size} holds "
                f"{frames:,}; give at least {need} bytes ({format_least(need)}), or look up fewer ids at once"
            )
        if not self._try_place(batch, 0):
            for other in list(self._placed):
                other.let_go()
            if not self._try_place(batch, 0):
                raise BunkbedError(
                    f"table {self.table.name!r}: frames of its device cache are in use by another thread"
                )

    def _try_place(self, batch: FramedBatch, number: int) -> bool:
        # A plan that is deleted before `done` is undone, also if an interrupt comes before the next line.
        plan = self._require_map().plan(batch.batch, number)
        try:
            if plan is None:
                return False
            self._carry_out(batch, plan)
            plan.done()
        except BaseException:
            if plan is not None:
                plan.undo()  # at once, as the traceback keeps the plan alive
            raise
        batch.plan = plan
        self._placed.add(batch)
        return True

    def _carry_out(self, batch: FramedBatch, plan: _native.DevicePlan) -> None:
        records, link = self._require_records(), self.link
        loads, going = plan.load_ids, plan.evict_ids
        host = batch.packed_with(plan)
        with link.copying():
            to_load, to_evict = batch.unpack_with(plan, link.send(host))
            # The device copies the victims while the host reads the rows to load.
            leave = link.start_down(records.read(to_evict)) if going.size else None
            coming, arriving = self._load(loads) if loads.size else (None, None)
            if leave is not None:
                self.table.plain_core.scatter_records(going, self._whole(leave(), plan.evict_frames))
            if coming is not None:
                records.write(to_load, link.send(coming))
            if arriving is not None and self._usage is not None:
                self._usage[plan.load_frames] = arriving
        batch.ready = link.ready()

    def _load(self, ids: IntArray) -> tuple[Tensor, Bytes | None]:
        """Return records of the table for the device, int32[N, words], and the usage of these rows."""
        words = self._require_records().words
        records, native = self.link.host_memory((ids.size, words), torch.int32), self.table.plain_core
        if self._usage is None:
            native.gather_records(ids, records.numpy().view(np.uint8))
            return records, None
        whole = np.empty((ids.size, self.table.record_bytes), np.uint8)
        native.gather_records(ids, whole)
        records.numpy().view(np.uint8)[...] = whole[:, : words * 4]
        return records, whole[:, words * 4 :]

    def _whole(self, records: Tensor, frames: IntArray) -> Bytes:
        """Return records from the device as the table has them: with the usage of the rows in these frames."""
        found: Bytes = records.numpy().view(np.uint8)
        return found if self._usage is None else np.ascontiguousarray(np.hstack((found, self._usage[frames])))

    # ---- steps

    def step(self, batch: FramedBatch, sums: Tensor, *, lr: float, step: int | None) -> None:
        """See `Rows`. Place a batch that lost its frames; step a batch with more rows than frames in pieces."""
        number = self.table.step + 1 if step is None else step
        while True:
            if not batch.is_here:
                with self._lock:
                    self._start()
                    if len(batch) > self._require_records().frames:
                        self._step_in_pieces(batch, sums, lr, number)
                        return
                    self._place(batch)
            with self._frames_lock:
                if batch.is_here:
                    self._take_step(batch, self._stepped(batch, sums, lr, number), lr, number)
                    break
        batch.is_stepped = True
        if not batch.is_kept:  # a second step with the same gradients is rare, and places the batch again
            batch.let_go()

    def _step_in_pieces(self, batch: FramedBatch, sums: Tensor, lr: float, number: int) -> None:
        unique, frames = batch.unique(), self._require_records().frames
        is_counted = False
        try:
            for begin in range(0, unique.size, frames):
                piece = self.deduped(unique[begin : begin + frames])
                self._place(piece)
                with self._frames_lock:
                    new = self._stepped(piece, sums[begin : begin + frames], lr, number)
                    if is_counted:
                        self._store(piece, new, self._named(piece, number))
                    else:
                        self._take_step(piece, new, lr, number)
                        is_counted = True
                piece.let_go()
        except BaseException as error:
            if is_counted:
                self._lost = f"a step larger than its device cache failed half-way ({error})"
            raise

    def _stepped(self, batch: FramedBatch, sums: Tensor, lr: float, number: int) -> Tensor:
        records, optimizer = self._require_records(), self.table.optimizer
        self.link.wait(batch.ready, batch.arrays)
        ids = self.link.up(batch.unique()) if records.is_narrow else None
        return records.stepped(
            optimizer,
            step_constants(optimizer, lr, number),
            batch.frames,
            sums,
            seed=self.table.seed,
            ids=ids,
            number=number,
        )

    def _take_step(self, batch: FramedBatch, new: Tensor, lr: float, number: int) -> None:
        """Count the step and store its result; an interrupt in between does not prevent the store."""
        native, nothing = self.table.plain_core, np.empty((0, self.table.dim), np.float32)
        usage = self._named(batch, number)
        steps = native.stats()["updates"]
        try:
            native.update(np.empty(0, np.int64), nothing, lr, number)
            self._store(batch, new, usage)
        except BaseException as error:
            if native.stats()["updates"] != steps:  # counted, so the rows must follow; storing twice is harmless
                try:
                    self._store(batch, new, usage)
                except BaseException:
                    self._lost = f"a step was interrupted half-way ({error!r})"
            raise

    def _named(self, batch: FramedBatch, number: int) -> Bytes | None:
        """Return the usage of the rows of a batch after a step named them, as the core computes it for its own rows."""
        if self._usage is None:
            return None
        assert batch.plan is not None
        times, counts = from_usage(self._usage[batch.plan.frames].view(np.float32))
        now = self.table.clock if self.table.spec.retention.clock else number  # a clock of events, or the step
        goes = times != NEVER_GOES
        counts += goes & (counts < 0xFFFFFFFF)
        return as_usage(np.where(goes, now, times), counts).view(np.uint8)

    def _store(self, batch: FramedBatch, new: Tensor, usage: Bytes | None) -> None:
        assert batch.plan is not None
        batch.plan.mark_dirty()
        if self._usage is not None and usage is not None:
            self._usage[batch.plan.frames] = usage
        self._require_records().store(batch.frames, new)
        self.link.used()

    # ---- called by the table: see `bunkbed.table.core.Above`

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """See `Above`; the rows stay in their frames."""
        with self._lock, self._frames_lock:
            self.write_back()
            yield

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """See `Above`."""
        with self._lock, self._frames_lock:
            self._leave_frames()
            yield

    def write_back(self) -> None:
        """Write every dirty row to the table.

        Raises:
            BunkbedError: the device does not return rows; says how many are lost. OSError: see `Table.update`.
            MemoryError: the device has no memory to copy even one row; none is lost.
        """
        with self._lock, self._frames_lock:
            if self._records is None:
                return
            self._require_usable()
            ids, frames = self._require_map().dirty()
            chunk, begin = max(1, _CHUNK_BYTES // (self._records.words * 4)), 0
            while begin < ids.size:
                part = frames[begin : begin + chunk]
                try:
                    self.link.used()  # the copy waits for work issued on this thread's stream
                    with self.link.copying():
                        records = self.link.down(self._records.read(self.link.up(part)))
                except RuntimeError as error:
                    if is_out_of_memory(error):  # no row is lost: copy fewer at once
                        if part.size > 1:
                            chunk = part.size // 2
                            continue
                        raise MemoryError(
                            f"table {self.table.name!r}: no memory on {self.link.device} to write back "
                            f"{ids.size - begin:,} rows of its device cache, which stay there; free some and try "
                            f"again ({error})"
                        ) from None
                    self._lost = (
                        f"{self.link.device} does not give back {ids.size - begin:,} rows that were updated since the "
                        f"last commit ({error})"
                    )
                    self._require_usable()
                self.table.plain_core.scatter_records(ids[begin : begin + chunk], self._whole(records, part))
                self._require_map().mark_clean(part)
                begin += part.size

    def _leave_frames(self) -> None:
        """Write every dirty row back and free all frames."""
        if self._records is not None:
            self.write_back()
            self._let_all_go()
            self._require_map().forget_all()

    def _let_all_go(self) -> None:
        for batch in list(self._placed):
            batch.let_go()
        self.present.clear()

    def leave(self) -> None:
        """Write every dirty row back and free the device memory until the next lookup."""
        with self._lock, self._frames_lock:
            if self._records is not None:
                self._give_memory_back()

    def _give_memory_back(self) -> None:
        self._leave_frames()
        self._detach()

    def _detach(self) -> None:
        self.table.core.set_device_cache(None, None)
        self.link.finish()
        self._map = self._records = None
        self.table.reserve_ram(-self._reserved)
        self._reserved = 0

    def table_closed(self) -> None:
        """See `Above`."""
        with self._lock, self._frames_lock:
            self._let_all_go()
            with contextlib.suppress(RuntimeError):  # the device failed, so no copy is under way
                self.link.finish()
            self._map = self._records = None
        if self._budget is not None:
            self._budget.leave(self)

    def __del__(self) -> None:
        # The table may outlive its layers and then needs the rows. A table that is deleted with them warns of the loss.
        if sys.is_finalizing() or self._records is None or self.table.closed or not self.table.is_own:
            return
        self.write_back()
        self._detach()

    def _require_usable(self) -> None:
        if self._lost:
            raise BunkbedError(
                f"table {self.table.name!r} refuses use until it is reopened at its last commit, {self.table.epoch}: "
                f"{self._lost}; close it with close(commit=False)"
            )

    # ---- facts

    def stats(self) -> dict[str, int | float]:
        """Return counters since the first lookup, for `Table.stats`."""
        counts = self.counters()
        counts["device_bytes"] = 0 if self._records is None else self._records.nbytes
        if self._map is not None:
            found = self._map.stats()
            counts["device_map_bytes"] = found.pop("bytes")  # in RAM
            counts.update({f"device_{name}": value for name, value in found.items()})
        return counts
