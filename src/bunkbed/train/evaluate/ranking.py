"""Ranks of held-out items: among all items, or among a sample.

Ties count against the held-out item: an item with the same score, within the rounding of a float32 dot product, ranks
before it. So does a negative that is the held-out item itself, as for 156 users of the NCF release of MovieLens-1M,
whose items cannot rank first. A model with equal scores for all items ranks held-out items last, not first.

A full ranking has no top-k: the rank of a held-out item is 1 + the number of scores that reach its floor, the lowest
score that ties with it. Scores are made in blocks that fit in a core's cache. One pass over a block, in the core,
excludes the hidden items and counts for all held-out items of its users. Each thread makes and counts its own blocks,
so no score is shared, and no sum depends on the number of threads.

Ranking does not change the tables' cache. Outside the RAM budget it holds 8 bytes for each held-out and hidden pair,
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
from bunkbed import _native
from bunkbed.train.data.interactions import Candidates, Interactions
from bunkbed.train.models.scorer import Float32Array, Int64Array, Scorer
from bunkbed.train.output.events import EvalReport
from bunkbed.train.processes.team import ALONE, Team

__all__ = ["Progress", "full_ranks", "sampled_ranks"]

Progress = Callable[[EvalReport], object]

# Users and items of a block of scores.
_USERS, _ITEMS = 256, 1024
# Numbers of queries, or of the vectors of pairs, in memory at once.
_NUMBERS = 8 << 20
# Numbers of the item vectors that are read at once. The next ones are read while these are ranked.
_READ_NUMBERS = 1 << 19
# Scores closer than this, relative to the sums in which they are rounded, are a tie: the order of summation changes
# float32 dot products by as much.
_TIE = 1e-6
# With up to so many users, an array has the place of each user; with more, places are found by binary search.
_MOST_PLACES = 1 << 22


def full_ranks(
    scorer: Scorer,
    targets: Interactions,
    excluded: Interactions,
    *,
    on_event: Progress | None = None,
    team: Team = ALONE,
) -> tuple[Int64Array, Int64Array]:
    """Return the rank of every held-out item among all items except those excluded for its user.

    Held-out items of one user have different ranks; other ties count against the held-out item. A held-out item is
    ranked even if it is also excluded. Uses `bunkbed.get_num_threads` threads. Each process of a team ranks for a part
    of the users, in the blocks of one process, so that every score is the same; the call is collective.

    Args:
        targets: held-out pairs, without duplicates.
        excluded: pairs that are not ranked: the training pairs.

    Returns:
        ``int64[Q]`` users and ``int64[Q]`` exact ranks from 1, of all processes, in any order.
    """
    every, places = np.unique(targets.users, return_inverse=True)
    by_place = np.argsort(places, kind="stable")
    first, last = team.share(len(every), _USERS)
    by_place = by_place[slice(*np.searchsorted(places, [first, last], sorter=by_place))]
    users, places, items = every[first:last], places[by_place] - first, targets.items[by_place]
    ranks = np.empty(len(items), dtype=np.int64)
    if len(every):
        # `_ahead_among_own` ranks held-out items against each other, so counting leaves them out.
        hidden = _HiddenScores(targets.num_items)
        hidden.add(places, items)
        hidden.add(_places_of(excluded.users, users, targets.num_users), excluded.items)
        with _one_torch_thread(), _FullRanking(scorer, users, hidden, targets.num_items, team) as ranking:
            for group in range(team.most("an evaluation", -(-len(users) // ranking.num_queries))):
                first, last = (min(at * ranking.num_queries, len(users)) for at in (group, group + 1))
                mine = slice(*np.searchsorted(places, [first, last]))
                ranking.rank(first, last, places[mine], items[mine], ranks[mine], on_event)
    return team.concatenate("an evaluation", users[places]), team.concatenate("an evaluation", ranks)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Let torch compute in the thread of each call: its own threads spin, and would take the cores of ours."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _places_of(asked: Int64Array, users: Int64Array, num_users: int) -> Int64Array:
    """Return the place of each asked user in `users`, which ascend; -1 for other users."""
    if num_users <= _MOST_PLACES:
        places = np.full(num_users, -1, dtype=np.int64)
        places[users] = np.arange(len(users))
        return places[asked]
    if not len(users):
        return np.full(len(asked), -1, dtype=np.int64)
    at = np.minimum(np.searchsorted(users, asked), len(users) - 1)
    return np.where(users[at] == asked, at, -1)


class _HiddenScores:
    """The scores of each block that are not counted: places ``row * _ITEMS + column`` in the block."""

    def __init__(self, num_items: int) -> None:
        self._blocks_across = -(-num_items // _ITEMS)
        self._places = np.empty(0, dtype=np.int64)

    def add(self, places: Int64Array, items: Int64Array) -> None:
        """Add ``int64[N]`` places of users and their items; a place of -1 adds nothing."""
        known = places >= 0
        places, items = places[known], items[known]
        blocks = places // _USERS * self._blocks_across + items // _ITEMS
        added = (blocks * _USERS + places % _USERS) * _ITEMS + items % _ITEMS
        self._places = np.concatenate([self._places, added])
        self._places.sort()

    def of_block(self, place: int, item: int) -> Int64Array:
        """Return the hidden scores of the block whose first user has this place and whose first item is `item`."""
        start = (place // _USERS * self._blocks_across + item // _ITEMS) * _USERS * _ITEMS
        return self._places[slice(*np.searchsorted(self._places, [start, start + _USERS * _ITEMS]))] - start


class _FullRanking:
    """Full ranking of groups of users by threads; owns the threads and their blocks of scores."""

    def __init__(self, scorer: Scorer, users: Int64Array, hidden: _HiddenScores, num_items: int, team: Team) -> None:
        self._scorer = scorer
        self._users = users
        self._hidden = hidden
        self._num_items = num_items
        self._team = team
        width = scorer.vectors(np.zeros(1, dtype=np.int64)).shape[1]
        self._num_read = _ITEMS * max(1, _READ_NUMBERS // (_ITEMS * width))
        #: Users of a group. Every group reads all items.
        self.num_queries = _USERS * max(1, _NUMBERS // (_USERS * width))
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(bb.get_num_threads(), "bunkbed-ranks", self._start)

    def __enter__(self) -> _FullRanking:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _start(self) -> None:
        torch.set_num_threads(1)  # MKL has a number for each thread
        self._own.scores = torch.empty(_USERS, _ITEMS)

    def rank(
        self,
        first: int,
        last: int,
        places: Int64Array,
        items: Int64Array,
        ranks: Int64Array,
        on_event: Progress | None,
    ) -> None:
        """Set the ranks of the held-out pairs of users ``[first, last)``, which may be none; their places ascend."""
        queries = self._scorer.queries(self._users[first:last])
        scores, floors = self._held_out_scores(queries, places - first, items)
        ranks[:] = 1 + _ahead_among_own(places, scores)
        starts = np.searchsorted(places, np.arange(first, last + 1))
        running: list[Future[None]] = []

        def count(row: int, item: int, vectors: torch.Tensor, biases: torch.Tensor | None) -> None:
            mine = queries[row : row + _USERS]
            for at in range(0, len(vectors), _ITEMS):
                part = vectors[at : at + _ITEMS]
                block = self._own.scores[: len(mine), : len(part)]
                self._scorer.all_scores(mine, part, None if biases is None else biases[at : at + _ITEMS], block)
                hidden = self._hidden.of_block(first + row, item + at)
                _native.count_reaching(block.numpy(), hidden, starts[row : row + len(mine) + 1], floors, ranks)

        def finish(num_items: int) -> None:
            for each in running:
                each.result()
            if on_event is not None:
                on_event(EvalReport(first + (last - first) * num_items // self._num_items, len(self._users)))

        for item in range(0, self._num_items, self._num_read):
            read = np.arange(item, min(item + self._num_read, self._num_items), dtype=np.int64)
            vectors, biases = self._scorer.vectors(read), self._scorer.biases(read)
            if item:
                finish(item)
            running = [
                self._threads.submit(count, row, item, vectors, biases) for row in range(0, last - first, _USERS)
            ]
        finish(self._num_items)

    def _held_out_scores(
        self, queries: torch.Tensor, rows: Int64Array, items: Int64Array
    ) -> tuple[Float32Array, Float32Array]:
        """Return the scores of ``int64[Q]`` rows of the queries with ``int64[Q]`` items, and their floors.

        In ascending order of items, so that each row of the table is read once.
        """
        scores, floors = np.empty((2, len(items)), dtype=np.float32)
        by_item = np.argsort(items, kind="stable")
        step = max(1, _NUMBERS // (2 * queries.shape[1] + self._scorer.numbers_per_score))
        for part in range(self._team.most("an evaluation", -(-len(items) // step))):
            mine = by_item[part * step : (part + 1) * step]
            scores[mine], floors[mine] = _scores_and_floors(
                self._scorer, queries[torch.from_numpy(rows[mine])], items[mine]
            )
        return scores, floors


def _scores_and_floors(scorer: Scorer, queries: torch.Tensor, items: Int64Array) -> tuple[Float32Array, Float32Array]:
    """Return scores of ``int64[N]`` items for ``float32[N, q]`` queries, and the lowest scores that tie with them."""
    scores, magnitudes = scorer.scores_and_magnitudes(queries, items)
    return scores.numpy(), (scores - _TIE * magnitudes).numpy()


def _ahead_among_own(owners: Int64Array, scores: Float32Array) -> Int64Array:
    """Return, for each held-out item, the number of better items of the same owner; owners ascend."""
    order = np.lexsort((-scores, owners))
    position = np.arange(len(owners)) - np.searchsorted(owners, owners)
    result = np.empty(len(owners), dtype=np.int64)
    result[order] = position
    return result


def sampled_ranks(
    scorer: Scorer, candidates: Candidates, *, on_event: Progress | None = None, team: Team = ALONE
) -> tuple[Int64Array, Int64Array]:
    """Return the rank of every positive among its own negatives: ``int64[Q]`` users and ranks from 1.

    Each process of a team ranks a part of the positives; the call is collective.
    """
    total, width = candidates.negatives.shape
    begin, end = team.share(total)
    ranks = np.empty(end - begin, dtype=np.int64)
    numbers = scorer.vectors(np.zeros(1, dtype=np.int64)).shape[1] + scorer.numbers_per_score
    step = max(1, _NUMBERS // (max(width, 1) * numbers))
    for part in range(team.most("an evaluation", -(-len(ranks) // step))):
        first, last = (min(begin + at * step, end) for at in (part, part + 1))
        mine = slice(first, last)
        queries = scorer.queries(candidates.users[mine])
        _, floors = _scores_and_floors(scorer, queries, candidates.positives[mine])
        scores = scorer.pair_scores(queries, candidates.negatives[mine]).numpy()
        ranks[first - begin : last - begin] = 1 + (scores >= floors[:, None]).sum(1)
        if on_event is not None:
            on_event(EvalReport(last - begin, end - begin))
    return candidates.users, team.concatenate("an evaluation", ranks)
