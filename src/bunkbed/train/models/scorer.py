"""Scores for ranking, from rows and head of a model. Lookups do not touch the cache, so a reader can rank too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bunkbed.train.features.features import Features
from bunkbed.train.models.dense import DENSE_FILE, dense_state
from bunkbed.train.models.featured import Rows, features_of_run, rows_of_run
from bunkbed.train.models.heads import DotHead, Head, SequenceHead, make_head
from bunkbed.train.settings.config import TrainConfig

if TYPE_CHECKING:
    from bunkbed.run.run import Run

__all__ = ["EncodedUsers", "Known", "Scorer", "head_of_run", "scorer_of_run"]

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
#: The pairs of ``int64[N]`` ascending users, each user's in their order: ``int64[P]`` users and items.
Known = Callable[[Int64Array], tuple[Int64Array, Int64Array]]

# Users that are encoded together.
_ENCODED = 32


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


class EncodedUsers:
    """The users of a model of sequences: the encoder's output at the last of a user's items, in place of a row.

    Owns nothing; as thread-safe as the items' table. A user without items has zeros.

    Args:
        item: table of items.
        head: on the CPU.
        known: the pairs of users.
    """

    def __init__(self, item: Rows, head: SequenceHead, known: Known) -> None:
        self._item = item
        self._encoder = head.encoder
        self._known = known

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def lookup(self, ids: Int64Array, *, touch: bool = True) -> Float32Array:
        """Return the outputs of users, ``float32[N, dim]``, each with the same bits alone or with others."""
        users, of_ids = np.unique(ids, return_inverse=True)
        items, counts = _last_items(*self._known(users), users, self._encoder.length)
        ends = np.cumsum(counts)
        found = np.zeros((len(users), self._encoder.norm.weight.shape[0]), dtype=np.float32)
        for first in range(0, len(users), _ENCODED):
            mine = slice(first, min(first + _ENCODED, len(users)))
            rows = self._item.lookup(items[ends[first] - counts[first] : ends[mine.stop - 1]], touch=touch)
            # Always so many windows of one width, or the bits would depend on the other users.
            lengths = np.zeros(_ENCODED, dtype=np.int64)
            lengths[: mine.stop - first] = counts[mine]
            outputs = self._encoder(torch.from_numpy(rows), torch.from_numpy(lengths), width=self._encoder.length)
            has = counts[mine] > 0
            found[mine][has] = outputs.numpy()[(np.cumsum(counts[mine]) - 1)[has]]
        return found[of_ids]


def _last_items(owners: Int64Array, items: Int64Array, users: Int64Array, length: int) -> tuple[Int64Array, Int64Array]:
    """Return the last items of each of ascending users, at most `length`, one user after another, and their numbers.

    Args:
        owners: ``int64[P]`` users of pairs, each user's pairs in their order.
        items: ``int64[P]``.
    """
    order = np.argsort(owners, kind="stable")
    owners = owners[order]
    first, last = (np.searchsorted(owners, users, side=side) for side in ("left", "right"))
    to_last = last[np.searchsorted(users, owners)] - np.arange(len(owners))
    return items[order[to_last <= length]], np.minimum(last - first, length)


def head_of_run(run: Run, config: TrainConfig) -> Head:
    """Return the head at the commit at which a run is open.

    Raises:
        FileNotFoundError: the run was never committed.
    """
    head = make_head(config)
    head.load_state_dict(dense_state(run.read(DENSE_FILE))["weights"])
    return head


def scorer_of_run(
    run: Run,
    config: TrainConfig,
    *,
    known: Known | None = None,
    touch: bool = False,
    features: Mapping[str, Features] | None = None,
) -> Scorer:
    """Return the `Scorer` of the commit at which a run is open.

    Args:
        known: the pairs of users, for a model of sequences.
        features: of the run, by side; None: they are read.

    Raises:
        FileNotFoundError: the run was never committed. DataError: the features are damaged.
    """
    if features is None:
        features = features_of_run(run)
    item, head = rows_of_run(run, "item", features), head_of_run(run, config)
    if isinstance(head, SequenceHead):
        assert known is not None
        return Scorer(EncodedUsers(item, head, known), item, head, touch=touch)
    bias = run.table("item_bias") if config.bias else None
    return Scorer(rows_of_run(run, "user", features), item, head, item_bias=bias, touch=touch)
