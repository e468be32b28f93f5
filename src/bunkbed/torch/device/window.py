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
    """A pushed batch: its lookups, and the task that places them."""

    def __init__(self, lookups: list[_Lookup]) -> None:
        self.lookups = lookups
        self.work: Future[bool] | None = None

    @property
    def is_placed(self) -> bool:
        """Whether all its rows have frames; waits for the task."""
        return self.work is not None and self.work.result()


class DeviceWindow:
    """`bunkbed.window.Window` for a table with a device cache, with the same methods.

    The ids of all pushed batches rank eviction in the device cache. A thread of the window places the rows of the next
    `depth` batches, in order: it writes evicted rows back and loads missing rows while the model works. The table's own
    window prefetches the missing rows from disk before that. A batch waits while too many frames are pinned; its lookup
    places it at the latest.

    On a CPU device there are no copies to hide. Only the placing runs concurrently with the model, about a seventh of a
    step's time, and planning ahead (`expect`, `missing`) costs a third as much in addition: a step is slightly shorter
    if a core is free, and longer if none is.

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
        self._below = Window(tier.table, batches=batches)
        self._coming: deque[_Coming] = deque()
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
        if not lookups:
            self._below.push(None)
            return
        with self._stalled():
            try:
                # Copies: if the caller changes its ids before the lookup, the lookup must not match this plan.
                copies = [np.array(ids) for ids in lookups]
                coming.lookups = [_Lookup(ids, self._tier.deduped(ids)) for ids in copies]
            except Exception:
                self._below.push(None)
                raise
            self._enter(coming)
            missing = [self._tier.missing(lookup.batch) for lookup in coming.lookups]
        self._below.push(np.concatenate(missing))

    @contextlib.contextmanager
    def _stalled(self) -> Iterator[None]:
        """Count the time within as a stall of the model: planning, and waits for locks of the window's thread."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._tier.stall_s += time.perf_counter() - started

    def _enter(self, coming: _Coming) -> None:
        """Enter the batch in the map's window, as far as it has room, so that it ranks eviction."""
        for lookup in coming.lookups:
            if lookup.number is None:
                number = self._tier.expect(lookup.batch)
                if number == _native.DeviceMap.WINDOW_FULL:
                    return
                lookup.number = number

    def advance(self) -> None:
        """Make the oldest pushed batch the current one; the one before it is over."""
        self._let_go_of_present()
        self._below.advance()
        if not self._coming:
            return
        for coming in list(self._coming)[: self._depth + 1]:
            if coming.work is not None and coming.work.done() and not coming.is_placed:
                coming.work = None  # it found no frames, or failed: place it again
            if coming.work is None:
                coming.work = self._worker.submit(self._place, coming)
        present = self._coming.popleft()
        with self._stalled():
            if present.is_placed:
                self._tier.present = [(lookup.ids, lookup.batch) for lookup in present.lookups]
            else:
                self._forget(present)
            for coming in self._coming:
                if coming.work is None:  # the thread may use the others
                    self._enter(coming)

    def _place(self, coming: _Coming) -> bool:
        """Place a batch, on the window's thread. An error recurs in the batch's lookup, which raises it."""
        try:
            for lookup in coming.lookups:
                if lookup.batch.is_here:
                    continue
                if not self._tier.place(lookup.batch, lookup.number or 0):
                    return False
                lookup.number = None
        except Exception:
            return False
        return True

    def _let_go_of_present(self) -> None:
        for _, batch in self._tier.present:
            batch.let_go()
        self._tier.present = []

    def _forget(self, coming: _Coming) -> None:
        for lookup in coming.lookups:
            lookup.batch.let_go()
            if lookup.number is not None:
                self._tier.forget(lookup.number)
                lookup.number = None

    def close(self) -> None:
        """Forget every batch and end the thread. A second call does nothing."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._let_go_of_present()
        for coming in self._coming:
            self._forget(coming)
        self._coming.clear()
        self._below.close()
