"""The order of pairs, sampled negatives and batches: pure functions of (seed, epoch, step).

All random bits come from Philox, keyed by (seed, stream), with a separate counter for each epoch and step. So a run
that is resumed in the middle of an epoch gets the same batches as an uninterrupted run. Raw bits are used, because
NumPy may change the streams of its distributions between releases.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bunkbed import _native
from bunkbed.train.data.blocks import PairBlocks
from bunkbed.train.data.interactions import Interactions
from bunkbed.train.processes.team import ALONE, Team

__all__ = [
    "Batch",
    "BatchSource",
    "BatchesAhead",
    "OrderInMemory",
    "OrderedPairs",
    "PairOrder",
    "SeenPairs",
    "first_of_order",
    "order_keys",
    "philox",
    "random_order",
    "sample_unseen",
]

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
# Draws a number of items, only from bits of the generator.
Draw = Callable[[np.random.Philox, int], Int64Array]
#: Users, items, and the weights of the pairs or None.
OrderedPairs = tuple[Int64Array, Int64Array, Float32Array | None]

# One stream for each use, so that no two uses share random bits.
STREAM_ORDER = 1
STREAM_NEGATIVES = 2
STREAM_SPLIT = 3
STREAM_EVAL = 4
STREAM_WINDOWS = 5

# Tries before the user's unseen items are listed, which takes time in proportion to all items. A user with half of
# the items needs the list once in 65,536 negatives.
_MAX_TRIES = 16

# Keys and items processed at once, to limit memory.
_CHUNK = 1 << 20


def philox(seed: int, stream: int, epoch: int, step: int) -> np.random.Philox:
    """Return the generator of one stream for a step of an epoch."""
    # The generator counts in the low words: 2^64 blocks for each (epoch, step).
    return np.random.Philox(key=[seed, stream], counter=[0, 0, step, epoch])


def _below(bits: npt.NDArray[np.uint64], count: int, bound: int) -> Int64Array:
    """Return `count` numbers below `bound`, from the 32-bit halves of the raw bits.

    Multiply and shift (Lemire) without the rejection step: the relative error of an item's probability is at most
    bound / 2^32, which is 0.2 % for ten million items.
    """
    halves = bits.view(np.uint32)[:count].astype(np.uint64)
    halves *= np.uint64(bound)
    halves >>= np.uint64(32)
    return halves.view(np.int64)


def random_order(seed: int, stream: int, epoch: int, count: int) -> Int64Array:
    """Return a permutation of ``range(count)``: ``int64[count]``, a pure function of the arguments."""
    keys = np.asarray(philox(seed, stream, epoch, 0).random_raw(count), dtype=np.uint64)
    return _stable_order(keys)


def order_keys(seed: int, stream: int, epoch: int) -> Callable[[int], npt.NDArray[np.uint64]]:
    """Return a function that returns the next `n` sort keys of `random_order` (equal keys keep their order)."""
    random = philox(seed, stream, epoch, 0)
    return lambda count: np.asarray(random.random_raw(count), dtype=np.uint64)


def first_of_order(seed: int, stream: int, epoch: int, count: int, first: int) -> Int64Array:
    """Return ``random_order(seed, stream, epoch, count)[:first]``, in memory for `first` instead of `count` numbers."""
    draw = order_keys(seed, stream, epoch)
    keys, places = np.empty(0, np.uint64), np.empty(0, np.int64)
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        keys = np.concatenate([keys, draw(stop - start)])
        places = np.concatenate([places, np.arange(start, stop)])
        best = np.argsort(keys, kind="stable")[:first]  # equal keys are appended with ascending places
        keys, places = keys[best], places[best]
    return places


def _stable_order(keys: npt.NDArray[np.uint64]) -> Int64Array:
    """Return a stable argsort of random keys: two passes of NumPy's radix sort by the upper half, then by the rest.

    Six times as fast as NumPy's comparison sort for 64 bits; each epoch in memory starts with this sort.
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
    """Set of pairs: the items of each user.

    The core answers without the GIL, so that a batch is made while a step computes. Owns about 12 bytes a pair. After
    the first `clashes`, it owns 4 more bytes a pair, and 12 bytes a user and an item. Not thread-safe.
    """

    def __init__(self, users: Int64Array, items: Int64Array, num_items: int) -> None:
        self._num_items = num_items
        self._native = _native.SeenPairs(np.sort(users * num_items + items), num_items)

    def contains(self, users: Int64Array, items: Int64Array) -> npt.NDArray[np.bool_]:
        """Return ``bool[N]`` for ``int64[N]`` users and items, true where the pair is in the set."""
        return self._native.contains(users, items)

    def clashes(self, users: Int64Array, items: Int64Array) -> Int64Array:
        """Return which of ``int64[M]`` different items each of ``int64[B]`` users has.

        Iterates over the users' items, or over the items' users if they are fewer, instead of all B x M pairs.

        Returns:
            ``int64[S]`` places in a matrix of B x M: rows ascend; within a row the places have no order.
        """
        return self._native.clashes(users, items)

    def items_of(self, user: int) -> Int64Array:
        """Return the items ``int64[M]`` of one user, ascending."""
        return self._native.items_of(user)

    def replace_by_unseen(
        self,
        users: Int64Array,
        items: Int64Array,
        at: Int64Array,
        random: npt.NDArray[np.uint64],
        among: Int64Array | None = None,
    ) -> None:
        """Replace ``items[at]`` by items that the user does not have, chosen by ``random uint64[len(at)]``.

        Slow but certain, for users with most items. `among` are the items to choose from, ``int64[M]``; None: all. For
        a user with all of these, the item is not changed.
        """
        for user in np.unique(users[at]).tolist():
            unseen = np.setdiff1d(np.arange(self._num_items) if among is None else among, self.items_of(user))
            if len(unseen):
                mine = users[at] == user
                items[at[mine]] = unseen[(random[mine] % np.uint64(len(unseen))).astype(np.int64)]


@dataclass(frozen=True, eq=False)
class Batch:
    """Pairs of one step, or the part of them that one rank takes.

    Attributes:
        users: ``int64[B]``.
        items: ``int64[B, 1 + K]``: each user's positive, then its own negatives; or, with shared negatives,
            ``int64[B + K]``: the positives, then the negatives, all different.
        log_q: optional, to subtract from the score of each of `items` before a softmax: ``float32`` of their shape,
            the logarithm of the probability that the item is drawn (with shared negatives, divided by the number of
            times that it was drawn).
        seen: with shared negatives, the negatives that a user has: ``int64[S]`` places in the matrix of B x K
            scores, row by row. None without `SeenPairs`.
        step_pairs: pairs of the step, on all ranks.
        weight: factor of the loss, such that its mean over the ranks is the loss of the step.
        pair_weights: factor of the loss of each pair: ``float32[B]``; None: ones.
    """

    users: Int64Array
    items: Int64Array
    seen: Int64Array | None = None
    log_q: Float32Array | None = None
    step_pairs: int = 0
    weight: float = 1.0
    pair_weights: Float32Array | None = None

    @property
    def parts(self) -> Sequence[npt.NDArray[np.generic] | None]:
        """The arrays that the model takes, in the order of its arguments."""
        return self.users, self.items, self.seen, self.log_q, self.pair_weights


class PairOrder(Protocol):
    """Protocol of the order of the training pairs in each epoch."""

    def pairs(self, epoch: int, first: int, last: int) -> OrderedPairs:
        """Return ``int64`` users and items of places ``[first, last)`` of the epoch, fewer at its end; and their
        weights, ``float32``, or None."""

    def close(self) -> None:
        """Release the current epoch; `pairs` makes it again."""


class OrderInMemory:
    """`PairOrder` with the order of one epoch in memory: 8 bytes a pair. Not thread-safe.

    NumPy sorts, not DuckDB, which needs up to three times as long at the start of each epoch.
    """

    def __init__(self, pairs: Interactions, seed: int, blocks: PairBlocks | None = None) -> None:
        self._pairs = pairs
        self._seed = seed
        self._blocks = blocks
        self._order: tuple[int, Int64Array] | None = None

    def pairs(self, epoch: int, first: int, last: int) -> OrderedPairs:
        if self._order is None or self._order[0] != epoch:
            order = random_order(self._seed, STREAM_ORDER, epoch, len(self._pairs))
            if self._blocks is not None:
                places = self._blocks.places(self._pairs.users, self._pairs.items, epoch)
                order = order[np.argsort(places[order], kind="stable")]
            self._order = (epoch, order)
        chosen = self._order[1][first:last]
        weights = self._pairs.weights
        return self._pairs.users[chosen], self._pairs.items[chosen], None if weights is None else weights[chosen]

    def close(self) -> None:
        self._order = None


class _Items:
    """The items from which negatives are drawn uniformly: `members`, or all."""

    def __init__(self, num_items: int, members: Int64Array | None = None) -> None:
        self.members = members
        self.count = num_items if members is None else len(members)

    def draw(self, random: np.random.Philox, count: int) -> Int64Array:
        """Draw items, with repetitions."""
        return self._named(_draw(random, count, self.count))

    def different(self, random: np.random.Philox, count: int) -> tuple[Int64Array, Int64Array]:
        """Return different items, and how often each was drawn."""
        return self._named(_distinct_items(random, count, self.count)), np.ones(count, dtype=np.int64)

    def log_q(self, items: Int64Array) -> Float32Array | None:
        """Return the logarithms of the probabilities of items, or None where they are equal."""
        return None

    def _named(self, drawn: Int64Array) -> Int64Array:
        return drawn if self.members is None else self.members[drawn]


class _PopularItems(_Items):
    """Items that are drawn in proportion to 1 + their pairs, so that each logarithm of a probability is finite.

    Owns 8 bytes an item, with `log_q` 4 more. Of `members`, each item with pairs is one. The probability of another
    item, which is never drawn, is taken as that of one without pairs.
    """

    def __init__(self, pairs: Interactions, log_q: bool, members: Int64Array | None = None) -> None:
        super().__init__(pairs.num_items, members)
        self._pairs = pairs
        self.weights = np.ones(pairs.num_items, dtype=np.int64)
        for _, items in pairs.batches():  # np.bincount converts its argument to int64
            self.weights += np.bincount(items, minlength=pairs.num_items)
        self.total = self.weights.sum() - (pairs.num_items - self.count)
        self._log_q = np.log(self.weights / self.total).astype(np.float32) if log_q else None

    def draw(self, random: np.random.Philox, count: int) -> Int64Array:
        pairs = self._pairs  # the item of a pair, or any item
        items = _draw(random, count, len(pairs) + self.count)
        of_pairs = items < len(pairs)
        items[~of_pairs] = self._named(items[~of_pairs] - len(pairs))
        items[of_pairs] = pairs.items[items[of_pairs]]
        return items

    def different(self, random: np.random.Philox, count: int) -> tuple[Int64Array, Int64Array]:
        return np.unique(self.draw(random, count), return_counts=True)

    def log_q(self, items: Int64Array) -> Float32Array | None:
        return None if self._log_q is None else self._log_q[items]


class _PopularMembers(_PopularItems):
    """`_PopularItems` of one block."""

    def __init__(self, every: _PopularItems, members: Int64Array) -> None:
        self._every = every
        self.members = members
        self._ends = np.cumsum(every.weights[members])
        self._log_share = np.float32(np.log(self._ends[-1] / every.total))

    def draw(self, random: np.random.Philox, count: int) -> Int64Array:
        drawn = _draw(random, count, int(self._ends[-1]))
        return self._named(np.searchsorted(self._ends, drawn, side="right"))

    def log_q(self, items: Int64Array) -> Float32Array | None:
        log_q = self._every.log_q(items)
        return None if log_q is None else log_q - self._log_share


class BatchSource:
    """Source of batches of positive pairs with sampled negatives; batches can be requested in any order.

    A batch has pairs of one item block, and negatives of that block. Each rank of a team has a source, and takes its
    part of the pairs of each batch with their negatives; shared negatives are those of all ranks. Owns the order of one
    epoch (8 bytes a pair) unless `order` is given, and 8 bytes an item if items are drawn by popularity, with `log_q`
    12. Only one thread may call `batch`, because the order is cached; any thread may call `steps`.

    Args:
        shared: one set of negatives for all pairs of a step.
        popular: draw items in proportion to 1 + their pairs, instead of uniformly.
        log_q: set `Batch.log_q` for items that are drawn by popularity.
        seen: pairs that are never sampled as negatives, or None to sample any item.
        order: every epoch's pairs, in the order of `random_order` by `blocks`; None makes the order in memory.
        blocks: of the pairs; None: no blocks.
        team: the processes that share the batches.
        counted: pairs, in memory, that say how popular an item is; None: `pairs`.
        drawn: ``int64[M]``, ascending, the items from which negatives are drawn, with all those that have pairs; None:
            all.

    Raises:
        ValueError: no training pairs, more shared negatives than items (of the least block), or too many items to draw
            from.
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
        blocks: PairBlocks | None = None,
        team: Team = ALONE,
        counted: Interactions | None = None,
        drawn: Int64Array | None = None,
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
        num_drawn = pairs.num_items if drawn is None else len(drawn)
        with_pairs = "" if drawn is None else ", those with pairs or without features"
        if shared and not popular and negatives > num_drawn:
            raise ValueError(
                f"option negatives={negatives} is more than the {num_drawn} items there are to share{with_pairs}"
            )
        least = num_drawn if blocks is None else blocks.least_members(drawn)
        if least < (negatives if shared and not popular else 1):
            raise ValueError(
                f"option negatives={negatives} is more than the {least} items that the smallest of the item blocks "
                "has in some epoch; use fewer blocks, or fewer negatives"
            )
        self._pairs = pairs
        self._shared = shared
        self._batch_size = batch_size
        self._negatives = negatives
        self._seed = seed
        self._seen = seen
        self._items = (
            _PopularItems(pairs if counted is None else counted, log_q, drawn)
            if popular
            else _Items(pairs.num_items, drawn)
        )
        self._order = OrderInMemory(pairs, seed, blocks) if order is None else order
        self._blocks = blocks
        self._team = team
        self._block: tuple[tuple[int, int], _Items] | None = None
        self._cuts: dict[int, tuple[Int64Array, Int64Array]] = {}

    @property
    def num_pairs(self) -> int:
        """Positive pairs of an epoch."""
        return len(self._pairs)

    def steps(self, epoch: int) -> int:
        """Return the steps of an epoch, in which every pair is a positive once.

        The last batch of each item block may be smaller.
        """
        return int(self._cuts_of(epoch)[1][-1])

    def batch(self, epoch: int, step: int) -> Batch:
        """Return this rank's part of batch `step` (from 0) of an epoch."""
        starts, ends = self._cuts_of(epoch)
        block = int(np.searchsorted(ends, step, side="right"))
        first = int(starts[block]) + (step - int(ends[block - 1] if block else 0)) * self._batch_size
        users, positives, weights = self._order.pairs(
            epoch, first, min(first + self._batch_size, int(starts[block + 1]))
        )
        random = philox(self._seed, STREAM_NEGATIVES, epoch, step)
        pool = self._items_of(epoch, block)
        total = len(users)
        first, last = self._team.share(total)
        weight = (last - first) * self._team.world / total
        mine = slice(first, last) if first < last else slice(0, 1)  # a rank without pairs has one that does not count
        weights = None if weights is None else weights[mine]
        if self._shared:
            users, positives = users[mine], positives[mine]
            negatives, counts = pool.different(random, self._negatives)
            seen = None if self._seen is None else self._seen.clashes(users, negatives)
            items = np.concatenate([positives, negatives])
            log_q = pool.log_q(items)
            if log_q is not None:
                log_q[len(positives) :] -= np.log(counts, dtype=np.float32)
            return Batch(users, items, seen, log_q, total, weight, weights)
        owners = np.repeat(users, self._negatives)
        sampled = _sample_items(random, owners, pool.draw, self._seen, pool.members)
        items = np.empty((len(users), 1 + self._negatives), dtype=np.int64)
        items[:, 0] = positives
        items[:, 1:] = sampled.reshape(len(users), -1)
        users, items = users[mine], items[mine]
        return Batch(users, items, None, pool.log_q(items), total, weight, weights)

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from step `first` on."""
        for step in range(first, self.steps(epoch)):
            yield self.batch(epoch, step)

    def _cuts_of(self, epoch: int) -> tuple[Int64Array, Int64Array]:
        """Return the place of each item block's first pair, with the number of pairs, and the step that ends it."""
        found = self._cuts.get(epoch)
        if found is None:
            pairs = self._pairs
            starts = np.array([0, len(pairs)]) if self._blocks is None else self._blocks.starts(pairs, epoch)
            found = starts, np.cumsum(-(-np.diff(starts) // self._batch_size))
            self._cuts = {**{other: cuts for other, cuts in self._cuts.items() if abs(other - epoch) < 2}, epoch: found}
        return found

    def _items_of(self, epoch: int, block: int) -> _Items:
        """Return the items that negatives of a block are drawn from."""
        if self._blocks is None or self._blocks.num_item_blocks == 1:
            return self._items
        if self._block is None or self._block[0] != (epoch, block):
            members = self._blocks.members(epoch, block)
            if self._items.members is not None:
                members = np.intersect1d(members, self._items.members, assume_unique=True)
            pool = (
                _PopularMembers(self._items, members)
                if isinstance(self._items, _PopularItems)
                else _Items(self._pairs.num_items, members)
            )
            self._block = (epoch, block), pool
        return self._block[1]


class BatchesAhead:
    """Batches of a `BatchSource` in order, made in a separate thread a few steps ahead.

    A batch does not depend on the thread that makes it, or on the time. Owns the thread until `close`; the source must
    not be used elsewhere meanwhile. One thread may call the methods.

    Args:
        depth: batches made ahead, at least 1.
        epochs: the last epoch; batches after it are not made ahead.
    """

    def __init__(self, source: BatchSource, *, depth: int, epochs: int) -> None:
        self._source = source
        self._depth = depth
        self._epochs = epochs
        self._pool = ThreadPoolExecutor(1, "bunkbed-batches")
        self._made: deque[tuple[tuple[int, int], Future[Batch]]] = deque()

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from step `first` on; then the thread makes batches of the next epoch.

        Raises:
            Exception: the error of making a batch, at the place of the batch.
        """
        for step in range(first, self._source.steps(epoch)):
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
        return (epoch, step + 1) if step + 1 < self._source.steps(epoch) else (epoch + 1, 0)

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
    """Return an unseen item for each of ``int64[N]`` users: ``int64[N]``, a pure function of the arguments.

    Uniform over the user's unseen items; any item for a user with all items.
    """
    return _sample_items(philox(seed, stream, 0, 0), owners, partial(_draw, bound=num_items), seen)


def _draw(random: np.random.Philox, count: int, bound: int) -> Int64Array:
    bits = random.random_raw((count + 1) // 2)
    return _below(np.asarray(bits, dtype=np.uint64), count, bound)


def _distinct_items(random: np.random.Philox, count: int, num_items: int) -> Int64Array:
    """Return `count` different items, in the order of drawing."""
    if 2 * count > num_items:  # drawing would rarely find the last items
        return _stable_order(np.asarray(random.random_raw(num_items), dtype=np.uint64))[:count]
    items = np.empty(0, dtype=np.int64)
    while len(items) < count:
        items = np.concatenate([items, _draw(random, count, num_items)])
        _, first = np.unique(items, return_index=True)
        items = items[np.sort(first)]
    return items[:count]


def _sample_items(
    random: np.random.Philox,
    owners: Int64Array,
    draw: Draw,
    seen: SeenPairs | None,
    among: Int64Array | None = None,
) -> Int64Array:
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
    seen.replace_by_unseen(owners, items, bad, ranks, among)
    return items
