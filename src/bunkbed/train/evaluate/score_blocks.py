"""Scores of many users with many items, in blocks that fit in a core's cache.

Each thread makes its own blocks and passes each to a visitor, so no score is shared, and no sum depends on the number
of threads. Scoring does not change the tables' cache. Outside the RAM budget it holds 8 bytes for each hidden pair,
about 50 while it sorts them, at most about 100 MiB of queries and vectors, and 1 MiB of scores for each thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch

import bunkbed as bb
from bunkbed.train.models.scorer import Int64Array, Scorer

__all__ = ["BLOCK_ITEMS", "BLOCK_USERS", "HiddenScores", "ScoreBlocks", "one_torch_thread", "places_of"]

#: Users and items of a block of scores.
BLOCK_USERS, BLOCK_ITEMS = 256, 1024
# Numbers of the queries in memory at once.
_QUERY_NUMBERS = 8 << 20
# Numbers of the item vectors that are read at once. The next ones are read while these are scored.
_READ_NUMBERS = 1 << 19
# With up to so many users, an array has the place of each user; with more, places are found by binary search.
_MOST_PLACES = 1 << 22

#: Called with the first row and the first column of a block, its scores, and the places in it that are hidden.
Visit = Callable[[int, int, torch.Tensor, Int64Array], object]


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch compute in the thread of each call: its own threads spin, and would take the cores of ours."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def places_of(asked: Int64Array, known: Int64Array, total: int) -> Int64Array:
    """Return the place of each asked id, of `total`, in `known`, which ascend; -1 for other ids."""
    if total <= _MOST_PLACES:
        places = np.full(total, -1, dtype=np.int64)
        places[known] = np.arange(len(known))
        return places[asked]
    if not len(known):
        return np.full(len(asked), -1, dtype=np.int64)
    at = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    return np.where(known[at] == asked, at, -1)


class HiddenScores:
    """The scores of each block that do not count: places ``row * BLOCK_ITEMS + column`` in the block.

    Args:
        num_items: columns of all blocks together.
    """

    def __init__(self, num_items: int) -> None:
        self._blocks_across = -(-num_items // BLOCK_ITEMS)
        self._places = np.empty(0, dtype=np.int64)

    def add(self, places: Int64Array, items: Int64Array) -> None:
        """Add ``int64[N]`` places of users, and of items; a place of -1 adds nothing."""
        known = (places >= 0) & (items >= 0)
        places, items = places[known], items[known]
        blocks = places // BLOCK_USERS * self._blocks_across + items // BLOCK_ITEMS
        added = (blocks * BLOCK_USERS + places % BLOCK_USERS) * BLOCK_ITEMS + items % BLOCK_ITEMS
        self._places = np.concatenate([self._places, added])
        self._places.sort()

    def of_block(self, place: int, item: int) -> Int64Array:
        """Return the hidden scores of the block whose first user has this place and whose first item is `item`."""
        start = (place // BLOCK_USERS * self._blocks_across + item // BLOCK_ITEMS) * BLOCK_USERS * BLOCK_ITEMS
        return self._places[slice(*np.searchsorted(self._places, [start, start + BLOCK_USERS * BLOCK_ITEMS]))] - start


class ScoreBlocks:
    """Owns the threads that score, and a block of scores for each. A context manager.

    Args:
        items: ``int64[M]``, the columns; None: all `num_items` of the model.
    """

    def __init__(self, scorer: Scorer, num_items: int, *, items: Int64Array | None = None) -> None:
        self._scorer = scorer
        self._items = items
        self.num_columns = num_items if items is None else len(items)
        width = scorer.vectors(np.zeros(1, dtype=np.int64)).shape[1]
        self._num_read = BLOCK_ITEMS * max(1, _READ_NUMBERS // (BLOCK_ITEMS * width))
        #: Users whose queries are in memory at once: a group. Every group reads all items.
        self.num_queries = BLOCK_USERS * max(1, _QUERY_NUMBERS // (BLOCK_USERS * width))
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(bb.get_num_threads(), "bunkbed-scores", self._start)

    def __enter__(self) -> ScoreBlocks:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _start(self) -> None:
        torch.set_num_threads(1)  # MKL has a number for each thread
        self._own.scores = torch.empty(BLOCK_USERS, BLOCK_ITEMS)

    def score(
        self,
        queries: torch.Tensor,
        first: int,
        hidden: HiddenScores,
        visit: Visit,
        done: Callable[[int], object],
    ) -> None:
        """Score a group of users, whose rows are numbered from `first`, as in `hidden`, with all items.

        `visit` is called in several threads at once, but the blocks of a row come one after another, by ascending
        columns. It may change the scores that it gets. `done` is called with the number of columns that are finished.
        """
        running: list[Future[None]] = []

        def visit_all(row: int, column: int, vectors: torch.Tensor, biases: torch.Tensor | None) -> None:
            mine = queries[row : row + BLOCK_USERS]
            for at in range(0, len(vectors), BLOCK_ITEMS):
                part = vectors[at : at + BLOCK_ITEMS]
                block = self._own.scores[: len(mine), : len(part)]
                self._scorer.all_scores(mine, part, None if biases is None else biases[at : at + BLOCK_ITEMS], block)
                visit(first + row, column + at, block, hidden.of_block(first + row, column + at))

        def finish(columns: int) -> None:
            for each in running:
                each.result()
            done(columns)

        for column in range(0, self.num_columns, self._num_read):
            end = min(column + self._num_read, self.num_columns)
            read = np.arange(column, end, dtype=np.int64) if self._items is None else self._items[column:end]
            vectors, biases = self._scorer.vectors(read), self._scorer.biases(read)
            if column:
                finish(column)
            running = [
                self._threads.submit(visit_all, row, column, vectors, biases)
                for row in range(0, len(queries), BLOCK_USERS)
            ]
        finish(self.num_columns)
