"""The coming batches of a table with a device cache: their rows are on the device when their turn comes."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from bunkbed import _native
from bunkbed.torch.base.gradients import IntArray
from bunkbed.torch.device.tiers import Tier
from bunkbed.window import MAX_BATCHES, Window

#: Batches placed on the device ahead of the one that has begun, unless told otherwise.
DEPTH = 2


@dataclass(slots=True)
class _Lookup:
    """One lookup of a coming batch."""

    ids: IntArray  # int64[N], ours
    batch: Any  # the tier's
    number: int | None = None  # the map's, once it has room for it


class _Coming:
    """A batch that was pushed: its lookups, and the work that places them."""

    def __init__(self, lookups: list[_Lookup]) -> None:
        self.lookups = lookups
        self.work: Future[bool] | None = None

    @property
    def is_placed(self) -> bool:
        """Whether all of its rows have frames; waits for the work under way."""
        return self.work is not None and self.work.result()


class DeviceWindow:
    """`bunkbed.window.Window` for a table with a device cache, with the same verbs.

    The ids of all batches pushed rank what the device cache gives up. A thread of the window's own places the rows of
    the next `depth` batches, in order: it writes back what gives way and copies up what is missing, beside the model's
    work. What the table must read from disk for that, its own window stages earlier still. A batch that finds too many
    frames taken waits; its lookup places it at the latest.

    On a CPU device there is no link to hide. What is done beside the model's work is the placing alone, about a seventh
    of a step's time, and planning ahead (`expect`, `missing`) costs a third as much again: with a core to spare a step
    is a little shorter for it, with none longer.

    Owns a thread until `close`. Not thread-safe.

    Args:
        tier: of the table.
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
    def table(self) -> Any:
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
        """Enter the next batch: int64[N] ids of each lookup in it, or None for one that does not want this table.

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
                # Copies: what the caller does to his before the lookup must not make it look like the one planned for.
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
        """Counts what is done within as time that the model waits: planning, and the locks that staging holds."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._tier.stall_s += time.perf_counter() - started

    def _enter(self, coming: _Coming) -> None:
        """Lets the batch rank eviction, as far as the map has room."""
        for lookup in coming.lookups:
            if lookup.number is None:
                number = self._tier.expect(lookup.batch)
                if number == _native.DeviceMap.WINDOW_FULL:
                    return
                lookup.number = number

    def advance(self) -> None:
        """The oldest batch that was pushed begins, and the one before it is over."""
        self._let_go_of_present()
        self._below.advance()
        if not self._coming:
            return
        for coming in list(self._coming)[: self._depth + 1]:
            if coming.work is not None and coming.work.done() and not coming.is_placed:
                coming.work = None  # it found no frames, or failed: again
            if coming.work is None:
                coming.work = self._worker.submit(self._place, coming)
        present = self._coming.popleft()
        with self._stalled():
            if present.is_placed:
                self._tier.present = [(lookup.ids, lookup.batch) for lookup in present.lookups]
            else:
                self._forget(present)
            for coming in self._coming:
                if coming.work is None:  # the others are the thread's
                    self._enter(coming)

    def _place(self, coming: _Coming) -> bool:
        """On the window's thread. What goes wrong here goes wrong again, and is raised, where it is looked up."""
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
        """Forget every batch, and end the thread. Closing twice is no error."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._let_go_of_present()
        for coming in self._coming:
            self._forget(coming)
        self._coming.clear()
        self._below.close()
