"""Ranks of held-out items: among all items, or among a sample.

Ties count against the held-out item: an item with the same score, within the rounding of a float32 dot product, ranks
before it. So does a negative that is the held-out item itself, as for 156 users of the NCF release of MovieLens-1M,
whose items cannot rank first. A model with equal scores for all items ranks held-out items last, not first.

A full ranking has no top-k: the rank of a held-out item is 1 + the number of scores that reach its floor, the lowest
score that ties with it. One pass over a block of scores (`score_blocks`), in the core, excludes the hidden items and
counts for all held-out items of its users.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from bunkbed import _native
from bunkbed.train.data.interactions import Candidates, Interactions
from bunkbed.train.evaluate import score_blocks
from bunkbed.train.evaluate.score_blocks import HiddenScores, ScoreBlocks, one_torch_thread, places_of
from bunkbed.train.models.scorer import Float32Array, Int64Array, Scorer
from bunkbed.train.output.events import EvalReport
from bunkbed.train.processes.team import ALONE, Team

__all__ = ["Progress", "full_ranks", "sampled_ranks"]

Progress = Callable[[EvalReport], object]

# Numbers of the vectors of pairs in memory at once.
_NUMBERS = 8 << 20
# Scores closer than this, relative to the sums in which they are rounded, are a tie: the order of summation changes
# float32 dot products by as much.
_TIE = 1e-6


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
    first, last = team.share(len(every), score_blocks.BLOCK_USERS)
    by_place = by_place[slice(*np.searchsorted(places, [first, last], sorter=by_place))]
    users, places, items = every[first:last], places[by_place] - first, targets.items[by_place]
    ranks = np.empty(len(items), dtype=np.int64)
    if len(every):
        # `_ahead_among_own` ranks held-out items against each other, so counting leaves them out.
        hidden = HiddenScores(targets.num_items)
        hidden.add(places, items)
        hidden.add(places_of(excluded.users, users, targets.num_users), excluded.items)
        with one_torch_thread(), ScoreBlocks(scorer, targets.num_items) as blocks:
            ranking = _FullRanking(scorer, users, hidden, blocks, team)
            for group in range(team.most("an evaluation", -(-len(users) // blocks.num_queries))):
                first, last = (min(at * blocks.num_queries, len(users)) for at in (group, group + 1))
                mine = slice(*np.searchsorted(places, [first, last]))
                ranking.rank(first, last, places[mine], items[mine], ranks[mine], on_event)
    return team.concatenate("an evaluation", users[places]), team.concatenate("an evaluation", ranks)


class _FullRanking:
    """Full ranking of groups of users."""

    def __init__(
        self, scorer: Scorer, users: Int64Array, hidden: HiddenScores, blocks: ScoreBlocks, team: Team
    ) -> None:
        self._scorer = scorer
        self._users = users
        self._hidden = hidden
        self._blocks = blocks
        self._team = team

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

        def count(row: int, column: int, block: torch.Tensor, hidden: Int64Array) -> None:
            of_rows = starts[row - first : row - first + len(block) + 1]
            _native.count_reaching(block.numpy(), hidden, of_rows, floors, ranks)

        def done(columns: int) -> None:
            if on_event is not None:
                on_event(EvalReport(first + (last - first) * columns // self._blocks.num_columns, len(self._users)))

        self._blocks.score(queries, first, self._hidden, count, done)

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
