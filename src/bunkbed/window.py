"""The window: the ids of a table's coming batches, for prefetch and for the choice of victims."""

from __future__ import annotations

from collections import deque
from typing import Self

from numpy.typing import ArrayLike

from bunkbed import _native
from bunkbed.core.arguments import Ids, as_ids
from bunkbed.table.table import Table

#: Maximum number of batches in a window.
MAX_BATCHES = 32


class Window:
    """The coming batches of one table, in order. `bunkbed.torch.lookahead` uses this class.

    `push` enters the ids of a coming batch. The table's cache then evicts first the rows that no coming batch wants,
    then the rows that are wanted last (Belady's rule within the window). Call `advance` when a batch begins: it ends
    the batch before, and prefetches rows of the next batches while the caller computes. The window moves records and
    never changes values: a training loop gives the same bits with and without it. A batch that does not fit in the
    window waits outside until it fits.

    Owns no thread; the memory of the window is in the table's budget. The batches of several windows on one table add
    up. Not thread-safe. `close`, and the end of a ``with`` block, remove all batches.

    Args:
        table: a `bunkbed.Table`.
        depth: number of batches whose rows are prefetched, at least 1. None: 2 to 4, by the read time of a batch
            compared with the time of a step.
        batches: maximum batches in the window, 1 to 32. None: up to 32, fewer if the cache holds only a few batches.

    Raises:
        ValueError: depth or batches out of range.

    >>> import bunkbed as bb
    >>> window = Window(bb.create(None, dim=2, num_rows=10, optimizer=bb.SGD(0.1)))
    >>> window.push([1, 2])
    >>> window.push([2, 3])
    >>> window.advance()  # the batch [1, 2] begins
    >>> window.is_full, window.plans  # all rows have room in RAM: there is nothing to plan
    (False, False)
    """

    def __init__(self, table: Table, *, depth: int | None = None, batches: int | None = None) -> None:
        if depth is not None and depth < 1:
            raise ValueError(f"window: depth must be at least 1, got {depth}")
        if batches is not None and not 1 <= batches <= MAX_BATCHES:
            raise ValueError(f"window: batches must be 1 to {MAX_BATCHES}, got {batches}")
        self.table = table
        self._depth = depth or 0
        self._batches = batches or 0
        self._present = 0  # the core's number of the present batch; 0: it is not in the window
        self._coming: deque[int] = deque()  # the core's numbers of the batches after the present one
        self._outside: deque[Ids | None] = deque()  # later batches, which are not yet in the window
        self._plans = False

    @property
    def plans(self) -> bool:
        """True if the core planned the last entered batch.

        False where RAM has room for every stored row, and for a batch that is larger than the cache.
        """
        return self._plans

    @property
    def is_full(self) -> bool:
        """True if a batch waits outside the window; pushing more has no effect before `advance`."""
        return bool(self._outside)

    def push(self, ids: ArrayLike | None) -> None:
        """Enter the next batch: int64[...], or None for a batch that does not use this table.

        Raises:
            IndexError, TypeError: see `Table.lookup`. A batch with an id outside the table counts as pushed.
        """
        self._outside.append(None if ids is None else as_ids(ids, table=f"table '{self.table.name}'").reshape(-1))
        self._enter()

    def _enter(self) -> None:
        while self._outside:
            ids, number = self._outside[0], 0
            if ids is not None:
                try:
                    number = self.table.core.expect(ids, self._batches)
                except Exception:
                    self._outside[0] = None
                    raise
                if number == _native.Table.WINDOW_FULL:
                    return
                self._plans = number != 0
            self._outside.popleft()
            self._coming.append(number)

    def advance(self) -> None:
        """End the present batch, begin the oldest pushed batch, and prefetch rows of the batches after it."""
        over = self._present
        if self._coming:
            self._present = self._coming.popleft()
        else:
            self._present = 0
            if self._outside:
                self._outside.popleft()
        if over or self._present or any(self._coming):
            self.table.core.advance(over, self._present, self._depth)
        if self._outside:
            self._enter()
        if not self._coming and self._outside and self._outside[0] is not None:
            # A batch larger than the window: prefetch its rows without the window, as far as they fit.
            self.table.stage(self._outside[0])

    def close(self) -> None:
        """Remove every batch. Closing twice is no error."""
        for number in (self._present, *self._coming):
            if number and not self.table.closed:
                self.table.core.forget(number)
        self._coming.clear()
        self._outside.clear()
        self._present = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
