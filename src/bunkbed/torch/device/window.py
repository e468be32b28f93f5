"""Coming batches of a table with a device cache: prefetches their rows to the device."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from bunkbed import _native
from bunkbed.adapters.bag_gradients import IntArray
from bunkbed.table.table import Table
from bunkbed.torch.base.types import RowsBatch
from bunkbed.torch.device.tiers import Tier
from bunkbed.window import MAX_BATCHES, Window

#: Default number of batches placed on the device ahead of the current one.
DEPTH = 2


@dataclass(slots=True)
class _Lookup:
    """One lookup of a coming batch."""

    ids: IntArray  # int64[N], a copy
    batch: RowsBatch  # of the device cache
    number: int | None = None  # in the map's window, once it has room


class _Coming:
    """A pushed batch: its lookups, and whether the window's thread placed them."""

    def __init__(self, lookups: list[_Lookup]) -> None:
        self.lookups = lookups
        self.work: Future[bool] | None = None

    @property
    def is_placed(self) -> bool:
        """Whether all its rows have frames; waits for the thread."""
        return self.work is not None and self.work.result()


class DeviceWindow:
    """`bunkbed.window.Window` for a table with a device cache, with the same methods.

    A thread of the window does all that the model need not wait for, in the order of the calls: it enters the ids of
    pushed batches, which rank eviction in the device cache, and has the table's own window prefetch the rows that the
    device lacks from disk; it releases the frames of a batch that is over; and it places the rows of the next `depth`
    batches, which writes evicted rows back and loads missing rows. A batch waits while too many frames are pinned; its
    lookup places it at the latest. `push` only deduplicates the ids.

    An error on the thread is not reported: it recurs in the lookup of the batch.

    On a CPU device there are no copies to hide: a step is slightly shorter if a core is free, and longer if none is.

    Owns a thread until `close`. Not thread-safe.

    Args:
        tier: the device cache of the table.
        depth: batches placed ahead, at least 1. None: 2.
        batches: most batches that rank eviction, 1 to 32. None: 32.
    """

    def __init__(self, tier: Tier, *, depth: int | None = None, batches: int | None = None) -> None:
        self._tier = tier
        self._depth = DEPTH if depth is None else depth
        self._most = batches or MAX_BATCHES
        # A table without a directory has nothing to read from disk.
        self._below = None if tier.table.path is None else Window(tier.table, batches=batches)
        self._coming: deque[_Coming] = deque()
        self._present: list[RowsBatch] = []  # the lookups of the current batch that were placed
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="bunkbed-device")

    @property
    def table(self) -> Table:
        """The table."""
        return self._tier.table

    @property
    def plans(self) -> bool:
        """Whether there is something to plan: always."""
        return True

    @property
    def is_full(self) -> bool:
        """Whether pushing more is of no use before `advance`."""
        return len(self._coming) >= self._most

    def push(self, lookups: Sequence[IntArray] | None) -> None:
        """Enter the next batch: int64[N] ids of each lookup in it, or None for a batch that does not use this table.

        Raises:
            IndexError: see `Table.lookup`; the batch counts as pushed, and is not planned.
        """
        coming = _Coming([])
        self._coming.append(coming)
        try:
            with self._stalled():
                # Copies: if the caller changes its ids before the lookup, the lookup must not match this plan.
                copies = [np.array(ids) for ids in lookups or ()]
                coming.lookups = [_Lookup(ids, self._tier.deduped(ids)) for ids in copies]
        finally:
            self._worker.submit(self._plan, coming)

    @contextlib.contextmanager
    def _stalled(self) -> Iterator[None]:
        """Count the time within as a stall of the model: planning, and waits for locks of the window's thread."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._tier.stall_s += time.perf_counter() - started

    def advance(self) -> None:
        """Make the oldest pushed batch the current one; the one before it is over."""
        over, self._present, self._tier.present = self._over(), [], []
        to_place = []
        for coming in list(self._coming)[: self._depth + 1]:
            if coming.work is not None and coming.work.done() and not coming.is_placed:
                coming.work = None  # it found no frames, or failed: place it again
            if coming.work is None:
                coming.work = Future()
                to_place.append(coming)
        self._worker.submit(self._begin, over, to_place, [one for one in self._coming if one.work is None])
        if not self._coming:
            return
        present = self._coming.popleft()
        with self._stalled():
            if present.is_placed:
                self._present = [lookup.batch for lookup in present.lookups]
                self._tier.present = [(lookup.ids, lookup.batch) for lookup in present.lookups]
            else:
                self._forget(present)

    def _over(self) -> list[RowsBatch]:
        """Return the batches of the current one that no step needs any more; a later step releases the others."""
        unused = [batch for _, batch in self._tier.present]
        over = [batch for batch in self._present if batch.is_stepped or batch in unused]
        for batch in self._present:
            batch.is_kept = False
        return over

    # ---- on the window's thread

    def _plan(self, coming: _Coming) -> None:
        """Enter a pushed batch in the map's window, and its rows that are not on the device in the table's."""
        missing: list[IntArray] = []
        with contextlib.suppress(Exception):
            self._enter(coming)
            if self._below is not None:
                missing = [self._tier.missing(lookup.batch) for lookup in coming.lookups]
        with contextlib.suppress(Exception):
            if self._below is not None:
                self._below.push(np.concatenate(missing) if missing else None)

    def _enter(self, coming: _Coming) -> None:
        """Enter the batch in the map's window, as far as it has room, so that it ranks eviction."""
        for lookup in coming.lookups:
            if lookup.number is None:
                number = self._tier.expect(lookup.batch)
                if number == _native.DeviceMap.WINDOW_FULL:
                    return
                lookup.number = number

    def _begin(self, over: list[RowsBatch], to_place: list[_Coming], waiting: list[_Coming]) -> None:
        """Release batches, place others, and enter those that wait for room in the map's window."""
        self._tier.release(over)
        with contextlib.suppress(Exception):
            if self._below is not None:
                self._below.advance()
        for coming in to_place:
            assert coming.work is not None
            coming.work.set_result(self._place(coming))
        with contextlib.suppress(Exception):
            for coming in waiting:
                self._enter(coming)

    def _place(self, coming: _Coming) -> bool:
        """Place a batch; return False if it found no frames, or failed."""
        try:
            for lookup in coming.lookups:
                if lookup.batch.is_here:
                    continue
                if not self._tier.place(lookup.batch, lookup.number or 0):
                    return False
                lookup.batch.is_kept = True
                lookup.number = None
        except Exception:
            return False
        return True

    def _forget(self, coming: _Coming) -> None:
        for lookup in coming.lookups:
            lookup.batch.is_kept = False
            lookup.batch.let_go()
            if lookup.number is not None:
                self._tier.forget(lookup.number)
                lookup.number = None

    def close(self) -> None:
        """Forget every batch and end the thread. A second call does nothing."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._tier.release(self._over())
        self._present, self._tier.present = [], []
        for coming in self._coming:
            self._forget(coming)
        self._coming.clear()
        if self._below is not None:
            self._below.close()
