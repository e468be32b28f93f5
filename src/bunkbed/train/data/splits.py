"""Holding pairs out of training for validation: one or a fraction of every user's pairs, or the last of all pairs.

One sort by (user, key, place) serves splits in memory (`split`) and on disk (`bunkbed.train.data.stream.open_split`).
`key` is the sort key of `random_order`, or zero where the last pairs in their order are held out: a user's pairs are
then adjacent, with the pairs to hold out last. `bunkbed.train.data.reading` has put the pairs in the order of their
times, and has taken out those of the test.

Of a run that got more pairs (`bunkbed.train.merge`), a pair that was trained on is never held out later: the pairs
of a user are taken round by round. What was held out stays so, and what the user then lacks is drawn among the pairs of
the new round. Where the last pairs are held out this needs no rounds, because later pairs come after all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bunkbed.train.data.blocks import pair_blocks
from bunkbed.train.data.interactions import Interactions
from bunkbed.train.data.sampling import STREAM_SPLIT, OrderInMemory, SeenPairs, order_keys
from bunkbed.train.data.sequences import Sequences
from bunkbed.train.data.sort import Sorter
from bunkbed.train.data.vocab import Int64Array
from bunkbed.train.settings.config import TrainConfig, num_first

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Split", "UserPairs", "keyed", "number_type", "pairs_by_user", "refuse_nothing_held", "split"]

BoolArray = npt.NDArray[np.bool_]
#: Users, items, places in the file, and whether a pair is held out.
UserPairs = tuple[Int64Array, Int64Array, Int64Array, BoolArray]


@dataclass(frozen=True, eq=False)
class Split:
    """Training pairs, and held-out pairs (None if no pairs are held out)."""

    train: Interactions
    valid: Interactions | None

    def seen(self) -> SeenPairs:
        """Return the training pairs as a set."""
        return SeenPairs(self.train.users, self.train.items, self.train.num_items)

    def order(self, config: TrainConfig) -> OrderInMemory:
        """Return the training pairs in each epoch's order."""
        return OrderInMemory(self.train, config.seed, pair_blocks(config, self.train))

    def sequences(self, config: TrainConfig) -> Sequences:
        """Return the training pairs of each user in their order."""
        return Sequences.of(self.train, config.length_or_default)


def split(interactions: Interactions, config: TrainConfig) -> Split:
    """Hold out pairs as `config.valid` says: a pure function of the pairs, `valid` and `seed`.

    A user with one pair keeps it for training. A fraction is rounded to the nearest number of a user's pairs, but one
    pair always remains for training. By time, users may have all their pairs on one side.

    Raises:
        ValueError: no user has two pairs, or no user has enough pairs for the fraction, or there is one pair.
    """
    if config.valid == "none":
        return Split(interactions, None)
    is_held = np.zeros(len(interactions), dtype=np.bool_)
    with Sorter(None) as sorter:
        for _, _, places, held in pairs_by_user(interactions, config, sorter):
            is_held[places[held]] = True
    refuse_nothing_held(interactions, config, int(np.count_nonzero(is_held)))
    users, items, weights, keep = interactions.users, interactions.items, interactions.weights, ~is_held
    return Split(
        interactions.replace(users[keep], items[keep], None if weights is None else weights[keep]),
        interactions.replace(users[is_held], items[is_held]),
    )


def refuse_nothing_held(pairs: Interactions, config: TrainConfig, num_held: int) -> None:
    """Raise `ValueError` if pairs should be held out and none are."""
    if config.valid != "none" and not num_held:
        source = pairs.source or "the data"
        few = f"no user of {source} has enough pairs"
        if config.valid_first is not None:
            few = f"{source} has {len(pairs):,} pairs for training"
        raise ValueError(f"option valid={config.valid!r} holds nothing out: {few}; use --valid none")


def pairs_by_user(pairs: Interactions, config: TrainConfig, sorter: Sorter) -> Iterator[UserPairs]:
    """Yield the pairs of some users at a time, users ascending."""
    is_random = config.valid == "random" or config.valid_fraction is not None
    schema = pair_schema(pairs)
    sorter.stream(
        "pairs", schema, keyed(pairs, schema, order_keys(config.seed, STREAM_SPLIT, 0) if is_random else None)
    )
    rounds = np.array(pairs.rounds if is_random else (), np.int64)
    number = "".join(f"(place >= {first})::INT + " for first in rounds.tolist()) + "0"
    order = f'"user", {number}, key, place' if len(rounds) else '"user", key, place'
    answer = sorter.batches(f'SELECT "user", "item", place FROM pairs ORDER BY {order}')
    for users, items, places in _whole_users(answer):
        yield users, items, places, _held(users, places, config, len(pairs), rounds)


def _held(users: Int64Array, places: Int64Array, config: TrainConfig, num_pairs: int, rounds: Int64Array) -> BoolArray:
    """Return which pairs are held out: ``bool[n]`` for ascending ``users int64[n]``, whose pairs are by rounds.

    Args:
        rounds: the first place of each later round, ascending.
    """
    if config.valid_first is not None:
        after: BoolArray = places >= num_first(num_pairs, config.valid_first)
        return after
    _, at, counts = np.unique(users, return_inverse=True, return_counts=True)
    if config.valid == "none":
        return np.zeros(len(users), dtype=np.bool_)
    is_held = np.zeros(len(users), dtype=np.bool_)
    of_round = np.searchsorted(rounds, places, side="right")
    ends, total, held = np.cumsum(counts) - counts, np.zeros_like(counts), np.zeros_like(counts)
    for number in range(len(rounds) + 1):
        inside = of_round == number
        own = np.bincount(at[inside], minlength=len(counts))
        ends, total = ends + own, total + own
        share = 1 if config.valid_fraction is None else np.rint(total * config.valid_fraction).astype(np.int64)
        missing = np.minimum(share, np.maximum(total - 1, 0)) - held
        is_held |= inside & (np.arange(len(users)) >= (ends - missing)[at])
        held += missing
    return is_held


def number_type(count: int) -> np.dtype[Any]:
    """Return the integer type for numbers below `count`."""
    return np.dtype(np.int32 if count <= 2**31 else np.int64)


def pair_schema(pairs: Interactions) -> pa.Schema:
    """Return the columns of `keyed`."""
    import pyarrow as pa

    users, items = (pa.from_numpy_dtype(number_type(count)) for count in (pairs.num_users, pairs.num_items))
    return pa.schema([("user", users), ("item", items), ("key", pa.uint64()), ("place", pa.int64())])


def keyed(
    pairs: Interactions, schema: pa.Schema, draw: Callable[[int], npt.NDArray[np.uint64]] | None
) -> Iterator[pa.RecordBatch]:
    """Yield pairs with their random keys (without `draw`: zeros) and places."""
    import pyarrow as pa

    place = 0
    for users, items in pairs.batches():
        count = len(users)
        keys = np.zeros(count, np.uint64) if draw is None else draw(count)
        places = np.arange(place, place + count, dtype=np.int64)
        columns = [pa.array(column).cast(kind) for column, kind in zip((users, items), schema.types[:2], strict=True)]
        yield pa.record_batch([*columns, pa.array(keys), pa.array(places)], schema=schema)
        place += count


def _whole_users(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[Int64Array, Int64Array, Int64Array]]:
    """Yield columns of batches, sorted by the first column, cut between users."""
    kept: list[Int64Array] = [np.empty(0, np.int64)] * 3
    for batch in batches:
        joined = [np.concatenate([old, column.to_numpy()]) for old, column in zip(kept, batch.columns, strict=True)]
        last = int(np.searchsorted(joined[0], joined[0][-1]))  # pairs of the last user may continue in the next batch
        if last:
            yield joined[0][:last], joined[1][:last], joined[2][:last]
        kept = [column[last:] for column in joined]
    if len(kept[0]):
        yield kept[0], kept[1], kept[2]
