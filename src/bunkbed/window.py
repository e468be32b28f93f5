"""The window: what the coming batches of a table want, so that their rows are there in time and stay."""

from __future__ import annotations

from collections import deque
from typing import Any, Self

from bunkbed import _native
from bunkbed.core.arguments import Ids, as_ids

#: Most batches a window holds.
MAX_BATCHES = 32


class Window:
    """The coming batches of one table, in order; what `bunkbed.torch.lookahead` is made of.

    `push` tells the table the ids of a batch to come: from then on its cache gives up first what no coming batch wants,
    then what is wanted last (Belady's rule within the window). `advance` is called when a batch begins: the one before
    it is over, and the rows of the next few are staged, read from disk while the caller computes. Only records move,
    never values: a training loop gives the same bits with a window and without. A batch the window has no room for
    waits outside until it has.

    It owns no memory and no thread; the table's budget holds what it needs. Several windows on one table add up. Not
    thread-safe. `close` (or leaving a ``with`` block) forgets the batches that have not come.

    Args:
        table: a `bunkbed.Table`.
        depth: batches whose rows are staged ahead, at least 1. None: 2 to 4, by how long the reads of a batch take
            beside a step.
        batches: most batches the window holds, 1 to 32. None: up to 32, fewer where the cache holds only a few batches.

    Raises:
        ValueError: depth or batches out of range.

    >>> import bunkbed as bb
    >>> window = Window(bb.create(None, dim=2, num_rows=10, optimizer=bb.SGD(0.1)))
    >>> window.push([1, 2])
    >>> window.push([2, 3])
    >>> window.advance()  # the batch [1, 2] begins
    >>> window.is_full, window.plans  # all rows are in RAM: there is nothing to plan
    (False, False)
    """

    def __init__(self, table: Any, *, depth: int | None = None, batches: int | None = None) -> None:
        if depth is not None and depth < 1:
            raise ValueError(f"window: depth must be at least 1, got {depth}")
        if batches is not None and not 1 <= batches <= MAX_BATCHES:
            raise ValueError(f"window: batches must be 1 to {MAX_BATCHES}, got {batches}")
        self.table = table
        self._depth = depth or 0
        self._batches = batches or 0
        self._present = 0  # the core's number of the batch that began; 0: it has none
        self._coming: deque[int] = deque()  # those after it
        self._outside: deque[Ids | None] = deque()  # and those after them, that have not been entered
        self._plans = False

    @property
    def plans(self) -> bool:
        """Whether the last batch entered was worth planning: False where every row is in RAM."""
        return self._plans

    @property
    def is_full(self) -> bool:
        """Whether a batch waits outside: pushing more is of no use before `advance`."""
        return bool(self._outside)

    def push(self, ids: Any) -> None:
        """Enter the next batch: int64[...], or None for one that does not want this table.

        Raises:
            IndexError, TypeError: see `Table.lookup`; the batch counts as pushed, and is not planned.
        """
        self._outside.append(None if ids is None else as_ids(ids, table=f"table '{self.table.name}'").reshape(-1))
        self._enter()

    def _enter(self) -> None:
        while self._outside:
            ids, number = self._outside[0], 0
            if ids is not None:
                try:
                    number = self.table._native.expect(ids, self._batches)
                except Exception:
                    self._outside[0] = None
                    raise
                if number == _native.Table.WINDOW_FULL:
                    return
                self._plans = number != 0
            self._outside.popleft()
            self._coming.append(number)

    def advance(self) -> None:
        """The oldest batch that was pushed begins, and the one before it is over; rows of the next are staged."""
        over = self._present
        if self._coming:
            self._present = self._coming.popleft()
        else:
            self._present = 0
            if self._outside:
                self._outside.popleft()
        if over or self._present or any(self._coming):
            self.table._native.advance(over, self._present, self._depth)
        if self._outside:
            self._enter()
        if not self._coming and self._outside and self._outside[0] is not None:
            # Larger than the window: its rows are staged all the same, as far as they fit.
            self.table.stage(self._outside[0])

    def close(self) -> None:
        """Forget every batch. Closing twice is no error."""
        for number in (self._present, *self._coming):
            if number and not self.table.closed:
                self.table._native.forget(number)
        self._coming.clear()
        self._outside.clear()
        self._present = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
