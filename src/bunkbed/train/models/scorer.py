"""Scores for ranking, from rows and head of a model. Lookups do not touch the cache, so a reader can rank too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bunkbed.train.models.dense import DENSE_FILE, dense_state
from bunkbed.train.models.heads import DotHead, Head, make_head
from bunkbed.train.settings.config import TrainConfig

if TYPE_CHECKING:
    from bunkbed.run.run import Run

__all__ = ["Scorer", "head_of_run", "scorer_of_run"]

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


class Rows(Protocol):
    """Protocol of the only table method that a `Scorer` calls."""

    def lookup(self, ids: Int64Array, *, touch: bool = True) -> Float32Array: ...


class Scorer:
    """Scores of users and items: ``score = head(query(user), vector(item)) + bias(item)``.

    Owns nothing; as thread-safe as its tables.

    Args:
        user: table of users.
        item: table of items.
        head: on the CPU; None selects a dot product.
        item_bias: table of item biases, or None.
        touch: whether lookups put rows into the tables' caches, for items that are scored again and again and fit.
    """

    def __init__(
        self, user: Rows, item: Rows, head: Head | None = None, *, item_bias: Rows | None = None, touch: bool = False
    ) -> None:
        self._touch = touch
        self._user = user
        self._item = item
        self._head = DotHead() if head is None else head
        self._item_bias = item_bias

    @property
    def numbers_per_score(self) -> int:
        """Temporary numbers for each score of `pair_scores`, in addition to the item's vector."""
        return self._head.numbers_per_score

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch is untyped here
    def queries(self, users: Int64Array) -> Tensor:
        """Return the queries of users: ``int64[N]`` -> ``float32[N, q]``."""
        return self._head.queries(torch.from_numpy(self._user.lookup(users, touch=self._touch)))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def vectors(self, items: Int64Array) -> Tensor:
        """Return the vectors of items: ``int64[...]`` -> ``float32[..., q]``."""
        return self._head.vectors(torch.from_numpy(self._item.lookup(items, touch=self._touch)))

    def biases(self, items: Int64Array) -> Tensor | None:
        """Return the biases of items: ``int64[...]`` -> ``float32[...]``, or None where the model has no biases."""
        return (
            None
            if self._item_bias is None
            else torch.from_numpy(self._item_bias.lookup(items, touch=self._touch)[..., 0])
        )

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def pair_scores(self, queries: Tensor, items: Int64Array) -> Tensor:
        """Score each user with its own items: ``float32[N, q]`` and ``int64[N, K]`` -> ``float32[N, K]``."""
        return self._biased(self._head.pair_scores(queries, self.vectors(items)), self.biases(items))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def all_scores(self, queries: Tensor, vectors: Tensor, biases: Tensor | None, out: Tensor) -> Tensor:
        """Score each user with every item: ``float32[N, q]`` and ``float32[M, q]`` -> ``out[N, M]``."""
        return self._biased(self._head.all_scores(queries, vectors, out), biases)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def scores_and_magnitudes(self, queries: Tensor, items: Int64Array) -> tuple[Tensor, Tensor]:
        """Return scores ``float32[N]`` of ``float32[N, q]`` and ``int64[N]``, and their `Head.magnitudes`."""
        vectors = self.vectors(items)
        scores = self._head.pair_scores(queries, vectors[:, None])[:, 0]
        magnitudes = self._head.magnitudes(queries, vectors)
        biases = self.biases(items)
        return (scores, magnitudes) if biases is None else (scores + biases, magnitudes + biases.abs())

    @staticmethod
    def _biased(scores: Tensor, biases: Tensor | None) -> Tensor:
        return scores if biases is None else scores.add_(biases)


def head_of_run(run: Run, config: TrainConfig) -> Head:
    """Return the head at the commit at which a run is open.

    Raises:
        FileNotFoundError: the run was never committed.
    """
    head = make_head(config)
    head.load_state_dict(dense_state(run.read(DENSE_FILE))["weights"])
    return head


def scorer_of_run(run: Run, config: TrainConfig, *, touch: bool = False) -> Scorer:
    """Return the `Scorer` of the commit at which a run is open.

    Raises:
        FileNotFoundError: the run was never committed.
    """
    user, item = run.table("user"), run.table("item")
    bias = run.table("item_bias") if config.bias else None
    return Scorer(user, item, head_of_run(run, config), item_bias=bias, touch=touch)
