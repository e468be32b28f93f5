"""The items with the highest scores: for one user, for some, or for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from bunkbed import _native
from bunkbed.train.data.interactions import Interactions
from bunkbed.train.data.stream import pairs_of
from bunkbed.train.evaluate import score_blocks
from bunkbed.train.evaluate.score_blocks import HiddenScores, ScoreBlocks, one_torch_thread, places_of
from bunkbed.train.features.features import Features
from bunkbed.train.models.scorer import Float32Array, Int64Array, Known, Scorer, scorer_of_run
from bunkbed.train.settings.config import TrainConfig

if TYPE_CHECKING:
    from bunkbed.run.run import Run

__all__ = ["Best", "best_items", "known_pairs", "recommend"]


class Best(NamedTuple):
    """The best items of some users, best first.

    Attributes:
        users: ``int64[N]``.
        items: ``int64[N, k]``; -1 where a user has fewer.
        scores: ``float32[N, k]``; -inf there.
    """

    users: Int64Array
    items: Int64Array
    scores: Float32Array


def best_items(
    scorer: Scorer,
    users: Int64Array,
    k: int,
    *,
    num_users: int,
    num_items: int,
    known: Known | None = None,
    items: Int64Array | None = None,
    on_progress: Callable[[float], object] | None = None,
) -> Iterator[Best]:
    """Yield the `k` items with the highest scores of each user, some users at a time, in their order.

    Equal scores are in the order of the items; a user's scores have the same bits with any other users. Uses
    `bunkbed.get_num_threads` threads; memory as `score_blocks`.

    Args:
        users: ``int64[N]``, distinct.
        k: at least 1; at most as many as there are items.
        known: returns the pairs of users that are not recommended, such as those of the training.
        items: ``int64[M]``, ascending: only these are recommended; None: all.
        on_progress: called with the finished share of the work.
    """
    columns = num_items if items is None else len(items)
    k = min(k, max(columns, 1))
    with one_torch_thread(), ScoreBlocks(scorer, num_items, items=items) as blocks:
        for first in range(0, len(users), blocks.num_queries):
            group = users[first : first + blocks.num_queries]
            ascending = np.argsort(group, kind="stable")
            hidden_of_group = _known_scores(group[ascending], num_users, num_items, known, items)
            # Whole blocks: the products of a user have the same bits with any other users.
            queries = scorer.queries(group[ascending])
            queries = torch.nn.functional.pad(queries, (0, 0, 0, -len(group) % score_blocks.BLOCK_USERS))
            best, places = np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), -1, np.int64)

            def keep(
                row: int,
                column: int,
                block: torch.Tensor,
                hidden: Int64Array,
                best: Float32Array = best,
                places: Int64Array = places,
            ) -> None:
                rows = slice(row, row + len(block))
                _native.keep_best(block.numpy(), hidden, column, best[rows], places[rows])

            def done(finished: int, first: int = first, size: int = len(group)) -> None:
                if on_progress is not None:
                    on_progress((first + size * finished / columns) / len(users))

            blocks.score(queries, 0, hidden_of_group, keep, done)
            as_given = np.empty_like(ascending)
            as_given[ascending] = np.arange(len(group))
            found = places[as_given]
            if items is not None and len(items):
                found = np.where(found < 0, -1, items[found])
            yield Best(group, found, best[as_given])


def _known_scores(
    users: Int64Array, num_users: int, num_items: int, known: Known | None, items: Int64Array | None
) -> HiddenScores:
    """Return the scores of the known pairs of users, which ascend, among the items."""
    hidden = HiddenScores(num_items if items is None else len(items))
    if known is not None:
        owners, theirs = known(users)
        columns = theirs if items is None else places_of(theirs, items, num_items)
        hidden.add(places_of(owners, users, num_users), columns)
    return hidden


def known_pairs(*parts: Interactions) -> Known:
    """Return the pairs of users of a dataset, in one or more parts in memory or on disk, for `best_items`."""

    def of(users: Int64Array) -> tuple[Int64Array, Int64Array]:
        asked = np.zeros(parts[0].num_users, dtype=np.bool_)
        asked[users] = True
        found = [pairs_of(pairs, asked) for pairs in parts]
        return np.concatenate([part.users for part in found]), np.concatenate([part.items for part in found])

    return of


def recommend(
    run: Run,
    config: TrainConfig,
    user_index: int,
    k: int,
    exclude: Int64Array | None = None,
    *,
    history: Int64Array | None = None,
    touch: bool = False,
    features: Mapping[str, Features] | None = None,
) -> tuple[Int64Array, Float32Array]:
    """Return the `k` items with the highest scores for a user, best first; equal scores by smaller index.

    Reads every item's row once, in chunks, whatever the size of the table.

    Args:
        run: committed at least once, open for reading or writing.
        user_index: dense index of the user.
        k: at least 1; the result is shorter if fewer items remain.
        exclude: ``int64[M]`` items not to recommend, such as items that the user has.
        history: ``int64[M]`` items of the user in their order, for a model of sequences.
        touch: see `Scorer`.
        features: see `scorer_of_run`.

    Returns:
        ``int64[k]`` dense item indices and their ``float32[k]`` scores.

    Raises:
        ValueError: `k` below 1.
        IndexError: no such user.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    num_items = run.table("item").num_rows
    assert num_items is not None  # a trainer's tables have a fixed number of rows
    hidden = np.unique(np.asarray([] if exclude is None else exclude, dtype=np.int64))
    past = np.asarray([] if history is None else history, dtype=np.int64)
    of_past = (np.full(len(past), user_index, dtype=np.int64), past)
    scorer = scorer_of_run(run, config, known=lambda _: of_past, touch=touch, features=features)
    user = np.array([user_index], dtype=np.int64)
    scorer.queries(user)  # raises where there is no such user
    own = (np.full(len(hidden), user_index, dtype=np.int64), hidden)
    best = next(best_items(scorer, user, k, num_users=user_index + 1, num_items=num_items, known=lambda _: own))
    found = best.items[0] >= 0
    return best.items[0, found], best.scores[0, found]
