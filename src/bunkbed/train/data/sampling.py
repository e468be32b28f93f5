"""The order of pairs, sampled negatives and batches: pure functions of (seed, epoch, step).

Everything random comes from Philox keyed by (seed, stream) and started at a counter of its own for each epoch
and step, so that a run resumed in the middle of an epoch sees exactly the batches it would have seen. Raw
bits are used rather than NumPy's distributions, whose streams NumPy may change between releases.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bunkbed import _native
from bunkbed.train.data.interactions import Interactions

__all__ = [
    "Batch",
    "BatchSource",
    "BatchesAhead",
    "PairOrder",
    "SeenPairs",
    "first_of_order",
    "order_keys",
    "random_order",
    "sample_unseen",
]

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
# Draws so many items; every bit is the generator's.
Draw = Callable[[np.random.Philox, int], Int64Array]

# Streams: one for each use, so that no two uses share random bits.
STREAM_ORDER = 1
STREAM_NEGATIVES = 2
STREAM_SPLIT = 3
STREAM_EVAL = 4

# Tries before the user's unseen items are listed, which takes time in proportion to all items. A user with
# half of them gets there once in 65,536 negatives.
_MAX_TRIES = 16

# Keys and items looked at together where all of them would be too many.
_CHUNK = 1 << 20


def _philox(seed: int, stream: int, epoch: int, step: int) -> np.random.Philox:
    # The low counter words are left to the generator: 2^64 blocks for each (epoch, step).
    return np.random.Philox(key=[seed, stream], counter=[0, 0, step, epoch])


def _below(bits: npt.NDArray[np.uint64], count: int, bound: int) -> Int64Array:
    """`count` numbers below `bound`, from the 32-bit halves of the raw bits.

    Multiply and shift (Lemire) without its rejection step: the chance of an item is off by at most
    bound / 2^32, which is 0.2 % for ten million items.
    """
    halves = bits.view(np.uint32)[:count].astype(np.uint64)
    halves *= np.uint64(bound)
    halves >>= np.uint64(32)
    return halves.view(np.int64)


def random_order(seed: int, stream: int, epoch: int, count: int) -> Int64Array:
    """A permutation of ``range(count)``: ``int64[count]``, a pure function of the arguments."""
    keys = np.asarray(_philox(seed, stream, epoch, 0).random_raw(count), dtype=np.uint64)
    return _stable_order(keys)


def order_keys(seed: int, stream: int, epoch: int) -> Callable[[int], npt.NDArray[np.uint64]]:
    """The keys that `random_order` sorts by (equal ones by their place), as many at a time as are asked for."""
    philox = _philox(seed, stream, epoch, 0)
    return lambda count: np.asarray(philox.random_raw(count), dtype=np.uint64)


def first_of_order(seed: int, stream: int, epoch: int, count: int, first: int) -> Int64Array:
    """``random_order(seed, stream, epoch, count)[:first]``, in memory for `first` rather than `count` numbers."""
    draw = order_keys(seed, stream, epoch)
    keys, places = np.empty(0, np.uint64), np.empty(0, np.int64)
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        keys = np.concatenate([keys, draw(stop - start)])
        places = np.concatenate([places, np.arange(start, stop)])
        best = np.argsort(keys, kind="stable")[:first]  # places ascend among equal keys: they were appended so
        keys, places = keys[best], places[best]
    return places


def _stable_order(keys: npt.NDArray[np.uint64]) -> Int64Array:
    """A stable argsort of random keys: by their upper half in two passes of NumPy's radix sort, then by the rest.

    Six times as fast as NumPy's own for 64 bits, which compares; an epoch of a million pairs begins with this.
    """
    words = np.ascontiguousarray((keys >> np.uint64(32)).astype(np.uint32)).view(np.uint16).reshape(-1, 2)
    low, high = (0, 1) if sys.byteorder == "little" else (1, 0)
    order = np.argsort(np.ascontiguousarray(words[:, low]), kind="stable")
    order = order[np.argsort(words[:, high][order], kind="stable")]
    upper = keys[order] >> np.uint64(32)
    same = np.flatnonzero(upper[1:] == upper[:-1])
    if len(same):  # one pair in 2^32 of all pairs of keys
        at = np.union1d(same, same + 1)
        tied = order[at]
        order[at] = tied[np.argsort(keys[tied], kind="stable")]
    return order.astype(np.int64, copy=False)


class SeenPairs:
    """Which items a user has: a set of pairs.

    The core answers, outside the interpreter's lock, so that a batch is made while a step computes. Owns about 12 bytes
    a pair and, once `clashes` was called, 4 more and 12 bytes a user and an item. Not thread-safe.
    """

    def __init__(self, users: Int64Array, items: Int64Array, num_items: int) -> None:
        self._num_items = num_items
        self._native = _native.SeenPairs(np.sort(users * num_items + items), num_items)

    def contains(self, users: Int64Array, items: Int64Array) -> npt.NDArray[np.bool_]:
        """For ``int64[N]`` users and items: ``bool[N]``, true where the pair is in the set."""
        return self._native.contains(users, items)

    def clashes(self, users: Int64Array, items: Int64Array) -> Int64Array:
        """Which of ``int64[M]`` different items which of ``int64[B]`` users has.

        Walks through the users' items, or the items' users where they are fewer, rather than through all B x M
        questions.

        Returns:
            ``int64[S]`` places in a matrix of B x M: rows ascend, and in a row they are in no order.
        """
        return self._native.clashes(users, items)

    def items_of(self, user: int) -> Int64Array:
        """The items ``int64[M]`` of one user, ascending."""
        return self._native.items_of(user)

    def replace_by_unseen(
        self, users: Int64Array, items: Int64Array, at: Int64Array, random: npt.NDArray[np.uint64]
    ) -> None:
        """Put at ``items[at]`` an item its user has not, chosen by ``random uint64[len(at)]``.

        The slow and sure way, for users who have most items. One who has all of them keeps what stands there.
        """
        for user in np.unique(users[at]).tolist():
            unseen = np.setdiff1d(np.arange(self._num_items), self.items_of(user))
            if len(unseen):
                mine = users[at] == user
                items[at[mine]] = unseen[(random[mine] % np.uint64(len(unseen))).astype(np.int64)]


@dataclass(frozen=True, eq=False)
class Batch:
    """One step's pairs.

    Attributes:
        users: ``int64[B]``.
        items: ``int64[B, 1 + K]``: each user's positive, then its own negatives; or, with shared negatives,
            ``int64[B + K]``: the positives, then the negatives, all different.
        log_q: where it was asked for, what to take off the score of each of `items` before a softmax: ``float32`` of
            their shape, the logarithm of how likely the item was to be drawn (with shared negatives, divided by how
            often it was drawn).
        seen: with shared negatives, which of them which user has: ``int64[S]`` places in the matrix of B x K
            scores, row by row. None where that was not asked.
    """

    users: Int64Array
    items: Int64Array
    seen: Int64Array | None = None
    log_q: Float32Array | None = None


class PairOrder(Protocol):
    """The pairs to train on, as each epoch takes them."""

    def pairs(self, epoch: int, first: int, last: int) -> tuple[Int64Array, Int64Array]:
        """``int64`` users and items of places ``[first, last)`` of the epoch, cut short at its end."""


class _OrderInMemory:
    """A `PairOrder` that holds the order of one epoch: 8 bytes a pair. Not thread-safe."""

    def __init__(self, pairs: Interactions, seed: int) -> None:
        self._pairs = pairs
        self._seed = seed
        self._order: tuple[int, Int64Array] | None = None

    def pairs(self, epoch: int, first: int, last: int) -> tuple[Int64Array, Int64Array]:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, random_order(self._seed, STREAM_ORDER, epoch, len(self._pairs)))
        chosen = self._order[1][first:last]
        return self._pairs.users[chosen], self._pairs.items[chosen]


class BatchSource:
    """Batches of positive pairs with sampled negatives; any batch can be asked for at any time.

    Owns the order of one epoch (8 bytes a pair) unless it is given one, when it rejects seen items a `SeenPairs`, and
    with `log_q` 4 bytes an item. Not thread-safe: the order is cached.

    Args:
        shared: one set of negatives for all pairs of a step.
        popular: draw an item in proportion to 1 + its pairs, rather than every item alike.
        log_q: batches say how likely their items were; None where all are alike.
        seen: pairs never to be sampled as negatives, or None to sample any item.
        order: gives every epoch's pairs, in the order that `random_order` has; None holds it in memory.

    Raises:
        ValueError: no pairs to train on, more shared negatives than items, or more items than can be drawn from.
    """

    def __init__(
        self,
        pairs: Interactions,
        *,
        batch_size: int,
        negatives: int,
        seed: int,
        seen: SeenPairs | None,
        shared: bool = False,
        popular: bool = False,
        log_q: bool = False,
        order: PairOrder | None = None,
    ) -> None:
        if len(pairs) == 0:
            raise ValueError(f"{pairs.source or 'the data'} has no pairs to train on")
        if pairs.num_items > 2**32:
            raise ValueError(f"at most 2^32 items can be sampled from, got {pairs.num_items}")
        if popular and pairs.num_items + len(pairs) > 2**32:
            raise ValueError(
                f"at most 2^32 pairs and items can be sampled from by popularity, got {pairs.num_items + len(pairs)}; "
                "sample uniformly"
            )
        if shared and not popular and negatives > pairs.num_items:
            raise ValueError(
                f"option negatives={negatives} is more than the {pairs.num_items} items there are to share"
            )
        self._pairs = pairs
        self._shared = shared
        self._batch_size = batch_size
        self._negatives = negatives
        self._seed = seed
        self._seen = seen
        self._popular = popular
        self._log_q = _log_popularity(pairs) if popular and log_q else None
        self._order = _OrderInMemory(pairs, seed) if order is None else order

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every pair was a positive once; the last batch may be smaller."""
        return -(-len(self._pairs) // self._batch_size)

    def batch(self, epoch: int, step: int) -> Batch:
        """Batch `step` (from 0) of an epoch."""
        users, positives = self._order.pairs(epoch, step * self._batch_size, (step + 1) * self._batch_size)
        random = _philox(self._seed, STREAM_NEGATIVES, epoch, step)
        if self._shared:
            negatives, counts = self._shared_negatives(random)
            seen = None if self._seen is None else self._seen.clashes(users, negatives)
            items = np.concatenate([positives, negatives])
            log_q = None
            if self._log_q is not None:
                log_q = self._log_q[items]
                log_q[len(positives) :] -= np.log(counts, dtype=np.float32)
            return Batch(users, items, seen, log_q)
        owners = np.repeat(users, self._negatives)
        sampled = _sample_items(random, owners, self._draw, self._seen)
        items = np.empty((len(users), 1 + self._negatives), dtype=np.int64)
        items[:, 0] = positives
        items[:, 1:] = sampled.reshape(len(users), -1)
        return Batch(users, items, log_q=None if self._log_q is None else self._log_q[items])

    def _draw(self, random: np.random.Philox, count: int) -> Int64Array:
        """Items, of which the same may come again."""
        pairs = self._pairs
        if not self._popular:
            return _draw(random, count, pairs.num_items)
        # A pair's item, or any item: so that each has a chance, and the logarithm of it is finite.
        items = _draw(random, count, len(pairs) + pairs.num_items)
        of_pairs = items < len(pairs)
        items[~of_pairs] -= len(pairs)
        items[of_pairs] = pairs.items[items[of_pairs]]
        return items

    def _shared_negatives(self, random: np.random.Philox) -> tuple[Int64Array, Int64Array]:
        """Different items, and how often each was drawn."""
        if not self._popular:
            negatives = _distinct_items(random, self._negatives, self._pairs.num_items)
            return negatives, np.ones(len(negatives), dtype=np.int64)
        return np.unique(self._draw(random, self._negatives), return_counts=True)

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step `first` on."""
        for step in range(first, self.steps_per_epoch):
            yield self.batch(epoch, step)


class BatchesAhead:
    """Batches of a `BatchSource` in order, made in a thread of their own a few steps before they are asked for.

    Which thread makes a batch, and when, changes nothing in it. Owns the thread until `close`; the source must not be
    used beside it. One thread asks.

    Args:
        depth: batches made ahead, at least 1.
        epochs: the last epoch; nothing beyond it is made before it is asked for.
    """

    def __init__(self, source: BatchSource, *, depth: int, epochs: int) -> None:
        self._source = source
        self._depth = depth
        self._epochs = epochs
        self._pool = ThreadPoolExecutor(1, "bunkbed-batches")
        self._made: deque[tuple[tuple[int, int], Future[Batch]]] = deque()

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step `first` on; the last ones are followed by the next epoch's in the thread.

        Raises:
            Exception: what making the batch raised, where it would have come.
        """
        for step in range(first, self._source.steps_per_epoch):
            if not self._made or self._made[0][0] != (epoch, step):
                self._forget()
                self._make(epoch, step)
            while len(self._made) <= self._depth:
                following = self._after(*self._made[-1][0])
                if following[0] > self._epochs:
                    break
                self._make(*following)
            yield self._made.popleft()[1].result()

    def _after(self, epoch: int, step: int) -> tuple[int, int]:
        return (epoch, step + 1) if step + 1 < self._source.steps_per_epoch else (epoch + 1, 0)

    def _make(self, epoch: int, step: int) -> None:
        self._made.append(((epoch, step), self._pool.submit(self._source.batch, epoch, step)))

    def _forget(self) -> None:
        for _, batch in self._made:
            batch.cancel()
        self._made.clear()

    def close(self) -> None:
        """End the thread; idempotent."""
        self._forget()
        self._pool.shutdown()


def sample_unseen(seed: int, stream: int, owners: Int64Array, num_items: int, seen: SeenPairs) -> Int64Array:
    """For ``int64[N]`` users an item each that its user has not: ``int64[N]``, fixed by the arguments.

    Uniform over the user's unseen items; any item for a user who has them all.
    """
    return _sample_items(_philox(seed, stream, 0, 0), owners, partial(_draw, bound=num_items), seen)


def _draw(random: np.random.Philox, count: int, bound: int) -> Int64Array:
    bits = random.random_raw((count + 1) // 2)
    return _below(np.asarray(bits, dtype=np.uint64), count, bound)


def _distinct_items(random: np.random.Philox, count: int, num_items: int) -> Int64Array:
    """`count` different items, in the order in which they were drawn."""
    if 2 * count > num_items:  # drawing would seldom find the last ones
        return _stable_order(np.asarray(random.random_raw(num_items), dtype=np.uint64))[:count]
    items = np.empty(0, dtype=np.int64)
    while len(items) < count:
        items = np.concatenate([items, _draw(random, count, num_items)])
        _, first = np.unique(items, return_index=True)
        items = items[np.sort(first)]
    return items[:count]


def _log_popularity(pairs: Interactions) -> Float32Array:
    """``float32[num_items]``: the logarithm of how likely `BatchSource._draw` is to draw an item by popularity."""
    counts = np.ones(pairs.num_items, dtype=np.int64)
    for _, items in pairs.batches():  # np.bincount makes int64 of what it is given
        counts += np.bincount(items, minlength=pairs.num_items)
    likely: Float32Array = np.log(counts / counts.sum()).astype(np.float32)
    return likely


def _sample_items(random: np.random.Philox, owners: Int64Array, draw: Draw, seen: SeenPairs | None) -> Int64Array:
    items = draw(random, len(owners))
    if seen is None:
        return items
    bad = np.flatnonzero(seen.contains(owners, items))
    for _ in range(_MAX_TRIES):
        if not len(bad):
            return items
        items[bad] = draw(random, len(bad))
        bad = bad[seen.contains(owners[bad], items[bad])]
    ranks = np.asarray(random.random_raw(len(bad)), dtype=np.uint64)
    seen.replace_by_unseen(owners, items, bad, ranks)
    return items
