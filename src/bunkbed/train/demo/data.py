"""Synthetic interactions from known preferences, so that the best possible quality is known.

Users and items have hidden tastes (unit vectors). A user, drawn by Zipf's law, sees `SHOWN` items, also drawn by
Zipf's law, and takes one with probability softmax(strength * <user, item>). So the probability of each item for each
user is known, and with it the best possible ranking.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bunkbed.train.data.interactions import Candidates, Dataset, Interactions
from bunkbed.train.data.vocab import Int64Array, Vocab
from bunkbed.train.evaluate.metrics import ranking_metrics

Float32Array = npt.NDArray[np.float32]

TASTES = 4
SHOWN = 16
STRENGTH = 12.0
NEGATIVES = 99
_GUIDE_BITS = 22
_BLOCK = 65_536


@dataclass(frozen=True)
class Planted:
    """Data, and reference metrics of its ranking.

    Attributes:
        data: training pairs and candidates (one held-out pair a user, 99 random negatives).
        optimum: metrics of ranking by the true probabilities.
        popularity: metrics of ranking only by popularity.
        chance: metrics of ranking at random.
    """

    data: Dataset
    optimum: dict[str, float]
    popularity: dict[str, float]
    chance: dict[str, float]


def plant(*, num_users: int, num_items: int, num_pairs: int, num_tests: int, seed: int) -> Planted:
    """Generate interactions, a pure function of the arguments.

    Args:
        num_users: users that can be drawn; some users of the tail may not be drawn.
        num_items: items that can be drawn.
        num_pairs: draws; repeated pairs count once, so fewer pairs remain.
        num_tests: most held-out pairs, each of another user.
        seed: of all random draws.
    """
    rng = np.random.default_rng(seed)
    teacher = _Teacher(rng, num_users, num_items)
    users, items = teacher.draw(rng, num_pairs + 2 * num_tests)
    _, first = np.unique(users * np.int64(num_items) + items, return_index=True)
    first.sort()
    users, items = users[first], items[first]
    is_test = _choose_tests(rng, users, num_tests)
    test_users, test_items = users[is_test], items[is_test]
    negatives = rng.integers(0, num_items - 1, (len(test_users), NEGATIVES))
    negatives += negatives >= test_items[:, None]
    vocabs = Vocab.of(range(num_users)), Vocab.of(range(num_items))
    source = "planted preferences"
    train = Interactions(users[~is_test], items[~is_test], *vocabs, source=source, form="generated")
    candidates = Candidates(test_users, test_items, negatives, source)
    shown = np.concatenate([test_items[:, None], negatives], axis=1)
    return Planted(
        Dataset(train, None, candidates),
        optimum=_metrics(test_users, teacher.scores(test_users, shown)),
        popularity=_metrics(test_users, teacher.log_popularity[shown]),
        chance=_metrics(test_users, rng.random(shown.shape)),
    )


class _Teacher:
    """Hidden tastes and the two Zipf distributions."""

    def __init__(self, rng: np.random.Generator, num_users: int, num_items: int) -> None:
        self._users = _unit_vectors(rng, num_users)
        self._items = _unit_vectors(rng, num_items)
        self._user_guide, _ = _zipf(num_users, exponent=1.2, shift=100)
        self._item_guide, popularity = _zipf(num_items, exponent=1.05, shift=500)
        self.log_popularity = np.log(popularity)
        # The mean appeal of the other shown items, with which an item competes. It is equal for all users, because
        # tastes are distributed uniformly on the sphere.
        sample = self._item_guide[rng.integers(0, len(self._item_guide), 100_000)]
        appeal = np.exp(STRENGTH * (self._items[sample] @ self._users[:64].T).astype(np.float64))
        self._others = (SHOWN - 1) * float(appeal.mean())

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Int64Array, Int64Array]:
        """Return pairs of user and item, ``int64[count]`` each."""
        users = self._user_guide[rng.integers(0, len(self._user_guide), count)].astype(np.int64)
        items = np.empty(count, np.int64)
        for start in range(0, count, _BLOCK):
            mine = users[start : start + _BLOCK]
            shown = self._item_guide[rng.integers(0, len(self._item_guide), (len(mine), SHOWN))]
            appeal = np.einsum("nd,nkd->nk", self._users[mine], self._items[shown])
            # The argmax of scores plus Gumbel noise is a draw from their softmax.
            draws = rng.standard_exponential(shown.shape, dtype=np.float32)
            noise = -np.log(np.maximum(draws, np.finfo(np.float32).tiny))
            choice = (STRENGTH * appeal + noise).argmax(axis=1)
            items[start : start + len(mine)] = shown[np.arange(len(mine)), choice]
        return users, items

    def scores(self, users: Int64Array, items: Int64Array) -> npt.NDArray[np.float64]:
        """Return log-probabilities of ``int64[N, K]`` items for ``int64[N]`` users, up to a constant per user."""
        affinity = np.einsum("nd,nkd->nk", self._users[users], self._items[items]).astype(np.float64)
        appeal = np.exp(STRENGTH * affinity)
        scores: npt.NDArray[np.float64] = self.log_popularity[items] + np.log(appeal / (appeal + self._others))
        return scores


def _unit_vectors(rng: np.random.Generator, count: int) -> Float32Array:
    vectors = rng.standard_normal((count, TASTES), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def _zipf(count: int, *, exponent: float, shift: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    """Return a guide table of a Zipf-Mandelbrot law (one look-up per draw), and its probabilities.

    The shift limits the probability of the most popular ids. Ids are ranks, so that the most popular id is the
    first.
    """
    weights = (np.arange(count) + 1.0 + shift) ** -exponent
    edges = np.rint(np.cumsum(weights) / weights.sum() * 2**_GUIDE_BITS).astype(np.int64)
    shares = np.maximum(np.diff(edges, prepend=0), 1)
    guide = np.repeat(np.arange(count, dtype=np.int32), shares)
    return guide, shares / shares.sum()


def _choose_tests(rng: np.random.Generator, users: Int64Array, num_tests: int) -> npt.NDArray[np.bool_]:
    """Return which pairs to hold out: one pair of each user that keeps at least four others."""
    order = rng.permutation(len(users))
    _, first = np.unique(users[order], return_index=True)
    chosen = order[first]
    chosen = chosen[np.bincount(users)[users[chosen]] >= 5]
    is_test = np.zeros(len(users), bool)
    is_test[rng.permutation(chosen)[:num_tests]] = True
    return is_test


def _metrics(users: Int64Array, scores: npt.NDArray[np.float64]) -> dict[str, float]:
    ranks = 1 + (scores[:, 1:] >= scores[:, :1]).sum(axis=1)
    return ranking_metrics(users, ranks, [10])
