"""Sequences of items for a model of what comes next: windows of them, and batches that are functions of (epoch, step).

A user's sequence is its training pairs in their order. Each pair after the first is to be predicted from those before
it. A sequence of n pairs is cut into the least number of windows of at most `length` such predictions, so that an epoch
has each prediction once; where the cuts are differs between epochs, and so does the order of the windows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bunkbed.train.data.interactions import Interactions
from bunkbed.train.data.sampling import (
    STREAM_NEGATIVES,
    STREAM_WINDOWS,
    Batch,
    BatchSource,
    Float32Array,
    Int64Array,
    SeenPairs,
    philox,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["SequenceBatch", "SequenceSource", "Sequences", "num_windows", "sorted_pairs"]

UInt64Array = npt.NDArray[np.uint64]

# Rounds of the permutation of windows.
_ROUNDS = 6


class Sequences:
    """The items of each user in the order of the pairs, user by user, in memory: 8 bytes a pair and 16 a user.

    Args:
        starts: ``int64[U + 1]``: where the items of each user start in `items`.
        items: ``int64[N]``.
        windows: ``int64[U + 1]``: the number of the first window of each user.
        num_predictions: those of all windows.
    """

    def __init__(
        self, starts: Int64Array, items: npt.NDArray[np.integer], windows: Int64Array, num_predictions: int
    ) -> None:
        self._starts = starts
        self._items = items
        self._windows = windows
        self.num_predictions = num_predictions

    @classmethod
    def of(cls, pairs: Interactions, length: int) -> Sequences:
        """Return the sequences of pairs in memory, in windows of `length` predictions."""
        counts = np.bincount(pairs.users, minlength=pairs.num_users)
        starts, windows = (np.concatenate([[0], np.cumsum(each)]) for each in (counts, num_windows(counts, length)))
        items = pairs.items[np.argsort(pairs.users, kind="stable")]
        return cls(starts, items, windows, len(pairs) - int(np.count_nonzero(counts)))

    @property
    def num_windows(self) -> int:
        """Number of windows of all users."""
        return int(self._windows[-1])

    def cut(self, windows: Int64Array, length: int, share: float) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return the users of windows ``int64[W]``, and the items ``[first, last)`` of each, at least two.

        Args:
            share: where to cut, in ``[0, 1)``: of the places that leave the number of windows as it is.
        """
        users = np.searchsorted(self._windows, windows, side="right") - 1
        self._want_starts(users)
        starts, ends = self._starts[users], self._starts[users + 1]
        within = windows - self._windows[users]
        spare = (self._windows[users + 1] - self._windows[users]) * length - (ends - starts - 1)
        first = starts + within * length - (share * (spare + 1)).astype(np.int64)
        return users, np.maximum(first, starts), np.minimum(first + length + 1, ends)

    def items(self, first: Int64Array, last: Int64Array) -> Int64Array:
        """Return the items of places ``[first[i], last[i])`` of all sequences, one after another."""
        self._want_items(first, last)
        return self._items[ranges(first, last)].astype(np.int64, copy=False)

    def _want_starts(self, users: Int64Array) -> None:
        """Start to read where the items of users start, if that is on disk."""

    def _want_items(self, first: Int64Array, last: Int64Array) -> None:
        """Start to read items, if these are on disk."""


def ranges(first: Int64Array, last: Int64Array) -> Int64Array:
    """Return the numbers of the ranges ``[first[i], last[i])``, one after another.

    >>> ranges(np.array([5, 0]), np.array([8, 2])).tolist()
    [5, 6, 7, 0, 1]
    """
    counts = last - first
    return np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


def num_windows(counts: Int64Array, length: int) -> Int64Array:
    """Return the number of windows of sequences of ``int64[U]`` items: one has at most `length` predictions."""
    return -(-np.maximum(counts - 1, 0) // length)


def sorted_pairs(pairs: Interactions) -> Callable[[Int64Array], tuple[Int64Array, Int64Array]]:
    """Return a function from ascending users ``int64[N]`` to their pairs, each user's in their order.

    It owns 16 bytes a pair.
    """
    order = np.argsort(pairs.users, kind="stable")
    owners, items = pairs.users[order].astype(np.int64, copy=False), pairs.items[order].astype(np.int64, copy=False)

    def of(users: Int64Array) -> tuple[Int64Array, Int64Array]:
        at = ranges(*(np.searchsorted(owners, users, side=side) for side in ("left", "right")))
        return owners[at], items[at]

    return of


@dataclass(frozen=True, eq=False)
class SequenceBatch(Batch):
    """Windows of one step.

    Attributes:
        users: ``int64[W]``, of the windows.
        items: ``int64[sum(lengths + 1) + K]``: the items of the windows, one window after another, then the negatives,
            all different.
        lengths: ``int64[W]``: predictions of each window. The positives are all items of a window but the first.
        log_q: of the positives, then of the negatives.
        seen: places in the matrix of positives x negatives.
        noise: ``int64[1]``: seed of the dropout.
    """

    lengths: Int64Array = field(kw_only=True)
    noise: Int64Array = field(kw_only=True)

    @property
    def parts(self) -> Sequence[npt.NDArray[np.generic] | None]:
        return self.lengths, self.items, self.noise, self.seen, self.log_q


class SequenceSource(BatchSource):
    """`BatchSource` of windows of sequences, with negatives that the step shares.

    A batch has as many windows as have `batch_size` predictions in the mean. Owns nothing that grows with the data but
    what its arguments own and, where items are drawn by popularity, 12 bytes an item.

    Args:
        length: most predictions of a window.
        options: as `BatchSource`.
    """

    def __init__(
        self,
        pairs: Interactions,
        sequences: Sequences,
        *,
        length: int,
        batch_size: int,
        seed: int,
        negatives: int,
        seen: SeenPairs | None,
        popular: bool,
        drawn: Int64Array | None = None,
    ) -> None:
        super().__init__(
            pairs,
            batch_size=batch_size,
            negatives=negatives,
            seed=seed,
            seen=seen,
            shared=True,
            popular=popular,
            log_q=True,
            drawn=drawn,
        )
        if not sequences.num_windows:
            source = pairs.source or "the data"
            raise ValueError(f"no user of {source} has two pairs to train on, and a sequence is at least two")
        self._sequences = sequences
        self._length = length
        self._per_step = max(1, round(batch_size * sequences.num_windows / sequences.num_predictions))

    @property
    def num_pairs(self) -> int:
        """Predictions of an epoch."""
        return self._sequences.num_predictions

    def steps(self, epoch: int) -> int:
        """Return the steps of an epoch, the same for all epochs."""
        return -(-self._sequences.num_windows // self._per_step)

    def batch(self, epoch: int, step: int) -> SequenceBatch:
        """Return batch `step` (from 0) of an epoch."""
        total = self._sequences.num_windows
        of_epoch = np.asarray(philox(self._seed, STREAM_WINDOWS, epoch, 0).random_raw(1 + _ROUNDS), np.uint64)
        share = int(of_epoch[0] >> np.uint64(32)) / 2**32
        places = np.arange(step * self._per_step, min((step + 1) * self._per_step, total))
        users, first, last = self._sequences.cut(permuted(places, total, of_epoch[1:]), self._length, share)
        history, lengths = self._sequences.items(first, last), last - first - 1

        random = philox(self._seed, STREAM_NEGATIVES, epoch, step)
        negatives, counts = self._items.different(random, self._negatives)
        noise = np.asarray(random.random_raw(1), np.uint64).view(np.int64)
        targets = np.delete(history, np.cumsum(lengths + 1) - (lengths + 1))
        log_q: Float32Array | None = self._items.log_q(np.concatenate([targets, negatives]))
        if log_q is not None:
            log_q[len(targets) :] -= np.log(counts, dtype=np.float32)
        if self._seen is None:
            seen = _same(targets, negatives)
        else:
            seen = self._seen.clashes(np.repeat(users, lengths), negatives)
        items = np.concatenate([history, negatives])
        return SequenceBatch(users, items, seen, log_q, len(targets), lengths=lengths, noise=noise)


def _same(targets: Int64Array, negatives: Int64Array) -> Int64Array:
    """Return the places in the matrix of targets x negatives, all of these different, where both are one item."""
    order = np.argsort(negatives)
    at = np.minimum(np.searchsorted(negatives[order], targets), len(negatives) - 1)
    is_same = negatives[order[at]] == targets
    found: Int64Array = np.flatnonzero(is_same) * len(negatives) + order[at[is_same]]
    return found


def permuted(places: Int64Array, count: int, keys: UInt64Array) -> Int64Array:
    """Return the values of a permutation of ``range(count)`` at ``int64[N]`` places, in memory for N numbers.

    A Feistel network over the next power of four; a value of `count` or more goes through it again (Black and Rogaway
    2002).

    >>> sorted(permuted(np.arange(5), 5, np.arange(6, dtype=np.uint64)).tolist())
    [0, 1, 2, 3, 4]
    """
    half = np.uint64(max(1, -(-(count - 1).bit_length() // 2)))
    mask = np.uint64((1 << int(half)) - 1)
    values = places.astype(np.uint64)
    left = np.arange(len(values))
    while len(left):
        high, low = values[left] >> half, values[left] & mask
        for key in keys:
            high, low = low, high ^ (_mixed(low ^ key) & mask)
        values[left] = high << half | low
        left = left[values[left] >= count]
    found: Int64Array = values.view(np.int64)
    return found


def _mixed(values: UInt64Array) -> UInt64Array:
    """Return hashes of numbers (the finalizer of SplitMix64)."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
