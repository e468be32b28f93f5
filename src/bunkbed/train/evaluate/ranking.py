"""Ranks of held-out items: among all items, or among a sample.

Ties count against the held-out item: an item with the same score, within the rounding of a float32 dot product, ranks
before it. So does a negative that is the held-out item itself, as for 156 users of the NCF release of MovieLens-1M,
whose items cannot rank first. A model with equal scores for all items ranks held-out items last, not first.

Ranking does not change the tables' cache. It holds at most about 130 MiB outside the RAM budget: up to 64 MiB of item
vectors, if all vectors fit in them, and blocks of scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from bunkbed.train.data.interactions import Candidates, Interactions
from bunkbed.train.models.scorer import Float32Array, Int64Array, Scorer
from bunkbed.train.output.events import EvalReport

__all__ = ["Progress", "full_ranks", "sampled_ranks"]

Progress = Callable[[EvalReport], object]

# Item vectors are kept for the whole ranking if they fit in these bytes, otherwise read again for each block of users.
_KEPT_BYTES = 64 << 20
# Scores in memory at once.
_BLOCK_SCORES = 8 << 20
# Scores closer than this, relative to the sums in which they are rounded, are a tie: the order of summation changes
# float32 dot products by as much.
_TIE = 1e-6
# With up to so many users, an array has the place of each user; with more, places are found by binary search.
_MOST_PLACES = 1 << 22


def _scores_and_floors(scorer: Scorer, queries: torch.Tensor, items: Int64Array) -> tuple[Float32Array, Float32Array]:
    """Return scores of ``int64[N]`` items for ``float32[N, q]`` queries, and the lowest scores that tie with them."""
    scores, magnitudes = scorer.scores_and_magnitudes(queries, items)
    return scores.numpy(), (scores - _TIE * magnitudes).numpy()


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Pairs of a user's place, ascending, and an item."""

    places: Int64Array
    items: Int64Array

    @classmethod
    def of(cls, pairs: Interactions, places: Int64Array) -> _Pairs:
        """Return the pairs whose user has a place other than -1: ``int64[N]``."""
        order = np.argsort(places, kind="stable")[int((places < 0).sum()) :]
        return cls(places[order], pairs.items[order])

    def part(self, first: int, last: int) -> _Pairs:
        """Return the pairs of places ``[first, last)``, with places counted from `first`."""
        mine = slice(*np.searchsorted(self.places, [first, last]))
        return _Pairs(self.places[mine] - first, self.items[mine])


def full_ranks(
    scorer: Scorer,
    targets: Interactions,
    excluded: Interactions,
    *,
    on_event: Progress | None = None,
) -> tuple[Int64Array, Int64Array]:
    """Return the rank of every held-out item among all items except those excluded for its user.

    Held-out items of one user have different ranks; other ties count against the held-out item. A held-out item is
    ranked even if it is also excluded.

    Args:
        targets: held-out pairs, without duplicates.
        excluded: pairs that are not ranked: the training pairs.

    Returns:
        ``int64[Q]`` users and ``int64[Q]`` exact ranks from 1, in any order.
    """
    known, counts = np.unique(targets.users, return_counts=True)
    # Users with the most held-out items first: see _count_ahead.
    users = known[np.argsort(-counts, kind="stable")]
    place_of = _place_of(users, targets.num_users)
    held, hidden = (_Pairs.of(pairs, place_of(pairs.users)) for pairs in (targets, excluded))
    ranks = [np.empty(0, dtype=np.int64)]
    ranking = _FullRanking(scorer, targets.num_items)
    for first in range(0, len(users), ranking.block_users):
        last = min(first + ranking.block_users, len(users))
        ranks.append(ranking.ranks(users[first:last], held.part(first, last), hidden.part(first, last)))
        if on_event is not None:
            on_event(EvalReport(last, len(users)))
    return users[held.places], np.concatenate(ranks)


def _place_of(users: Int64Array, num_users: int) -> Callable[[Int64Array], Int64Array]:
    """Return a function from users to their places in `users`, -1 for other users."""
    if num_users <= _MOST_PLACES:
        place = np.full(num_users, -1, dtype=np.int64)
        place[users] = np.arange(len(users))
        return lambda asked: place[asked]
    order = np.argsort(users)
    ascending = users[order]

    def search(asked: Int64Array) -> Int64Array:
        if not len(users):
            return np.full(len(asked), -1, dtype=np.int64)
        at = np.minimum(np.searchsorted(ascending, asked), len(users) - 1)
        return np.where(ascending[at] == asked, order[at], -1)

    return search


class _FullRanking:
    """Full ranking by blocks of users and chunks of items; owns the buffers and, if they fit, the item vectors."""

    def __init__(self, scorer: Scorer, num_items: int) -> None:
        self._scorer = scorer
        self._num_items = num_items
        width = scorer.vectors(np.zeros(1, dtype=np.int64)).shape[1]
        is_kept = num_items * width * 4 <= _KEPT_BYTES
        # If items are read again for each block of users, few large blocks of users read the items least often.
        self._chunk = min(num_items, 8192 if is_kept else 1024)
        self.block_users = max(1, _BLOCK_SCORES // self._chunk)
        self._scores = torch.empty(self.block_users * self._chunk)
        self._reached = np.empty((self.block_users, self._chunk), dtype=np.bool_)
        self._kept = list(self._read_items()) if is_kept else None

    def _read_items(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        """Yield the first item, the vectors and the biases of each chunk."""
        for first in range(0, self._num_items, self._chunk):
            items = np.arange(first, min(first + self._chunk, self._num_items), dtype=np.int64)
            yield first, self._scorer.vectors(items), self._scorer.biases(items)

    def ranks(self, users: Int64Array, held: _Pairs, hidden: _Pairs) -> Int64Array:
        """Return ranks of the held-out pairs of `users`, which are in descending order of their number of pairs."""
        queries = self._scorer.queries(users)
        own_scores, floors = _scores_and_floors(self._scorer, queries[held.places], held.items)
        ranks = 1 + _ahead_among_own(held.places, own_scores)
        # Excluded from counting: hidden items, and held-out items, which `_ahead_among_own` has ranked already.
        rows = np.concatenate([hidden.places, held.places])
        columns = np.concatenate([hidden.items, held.items])
        by_item = np.argsort(columns, kind="stable")
        rows, columns = rows[by_item], columns[by_item]
        starts = np.searchsorted(held.places, np.arange(len(users) + 1))
        for first, vectors, biases in self._read_items() if self._kept is None else self._kept:
            # A view of the front of the buffer, so that a smaller last chunk is contiguous too.
            block = self._scores[: len(users) * len(vectors)].view(len(users), len(vectors))
            self._scorer.all_scores(queries, vectors, biases, block)
            here = slice(*np.searchsorted(columns, [first, first + len(vectors)]))
            block[torch.from_numpy(rows[here]), torch.from_numpy(columns[here] - first)] = -torch.inf
            self._count_ahead(block.numpy(), floors, starts, ranks)
        return ranks

    def _count_ahead(self, block: Float32Array, floors: Float32Array, starts: Int64Array, ranks: Int64Array) -> None:
        """Add to ``ranks[Q]`` the number of scores in the user's row that reach each floor of ``float32[Q]``.

        Counts for all first held-out items at once, then for all second ones. Users are in descending order of their
        number of items, so the users with one more item are the front rows of the block. `count_nonzero` for each row
        is 20 times as fast as a sum of booleans along an axis.
        """
        sizes = np.diff(starts)
        for j in range(int(sizes[0])):
            num_rows = int(np.searchsorted(-sizes, -j, side="left"))
            at = starts[:num_rows] + j
            reached = self._reached[:num_rows, : block.shape[1]]
            np.greater_equal(block[:num_rows], floors[at][:, None], out=reached)
            ranks[at] += [np.count_nonzero(row) for row in reached]


def _ahead_among_own(owners: Int64Array, scores: Float32Array) -> Int64Array:
    """Return, for each held-out item, the number of better items of the same owner; owners ascend."""
    order = np.lexsort((-scores, owners))
    position = np.arange(len(owners)) - np.searchsorted(owners, owners)
    result = np.empty(len(owners), dtype=np.int64)
    result[order] = position
    return result


def sampled_ranks(
    scorer: Scorer, candidates: Candidates, *, on_event: Progress | None = None
) -> tuple[Int64Array, Int64Array]:
    """Return the rank of every positive among its own negatives: ``int64[Q]`` users and ranks from 1."""
    total, width = candidates.negatives.shape
    ranks = np.empty(total, dtype=np.int64)
    numbers = scorer.vectors(np.zeros(1, dtype=np.int64)).shape[1] + scorer.numbers_per_score
    step = max(1, _BLOCK_SCORES // (max(width, 1) * numbers))
    for first in range(0, total, step):
        mine = slice(first, min(first + step, total))
        queries = scorer.queries(candidates.users[mine])
        _, floors = _scores_and_floors(scorer, queries, candidates.positives[mine])
        scores = scorer.pair_scores(queries, candidates.negatives[mine]).numpy()
        ranks[mine] = 1 + (scores >= floors[:, None]).sum(1)
        if on_event is not None:
            on_event(EvalReport(mine.stop, total))
    return candidates.users, ranks
