"""The order of pairs by blocks of users and of items: pure functions of (seed, epoch).

As `bunkbed.BlockOrder`, for pairs that need not be in memory and for items without pairs. Item blocks are the outer
ones: each is visited once in an epoch, so that negatives have many items to compete, and the user blocks pass by,
forwards and backwards in turn.
"""

from __future__ import annotations

import numpy as np

from bunkbed.order.cells import CELLS_PER_BLOCK, Blocks, Groups, cells_of, group_type, parts
from bunkbed.train.data.interactions import Interactions
from bunkbed.train.data.vocab import Int64Array
from bunkbed.train.settings.config import TrainConfig

__all__ = ["PairBlocks", "pair_blocks"]

_CHUNK = 1 << 20
# The random streams of blocks must not be those of `bunkbed.train.data.sampling` with the same seed.
_SEED_BIT = 1 << 62


class PairBlocks:
    """Blocks of users and of items in every epoch, and the place of a pair among them. Owns nothing; thread-safe.

    Args:
        num_users: known users; num_items: known items.
        blocks: the number of blocks of users and of items.

    Raises:
        ValueError: more blocks than users or items.
    """

    def __init__(self, num_users: int, num_items: int, blocks: tuple[int, int], seed: int) -> None:
        for count, number, what in zip(blocks, (num_users, num_items), ("users", "items"), strict=True):
            if count > number:
                raise ValueError(f"option order has {count} blocks of {what}, but there are {number} {what}")
        self._num_items = num_items
        self._users, self._items = (Blocks(at, count, seed ^ _SEED_BIT) for at, count in enumerate(blocks))

    @property
    def num_item_blocks(self) -> int:
        """The number of item blocks."""
        return self._items.count

    def least_members(self, drawn: Int64Array | None = None) -> int:
        """Return the fewest of `drawn`, ``int64[M]`` items, that a block can have in any epoch; None: of all items."""
        cells = np.zeros(CELLS_PER_BLOCK * self._items.count, np.int64)
        for first in range(0, self._num_items if drawn is None else len(drawn), _CHUNK):
            last = min(first + _CHUNK, self._num_items)
            ids = np.arange(first, last) if drawn is None else drawn[first : first + _CHUNK]
            cells += np.bincount(cells_of(ids, len(cells)), minlength=len(cells))
        return int(np.sort(cells)[:CELLS_PER_BLOCK].sum())

    def places(self, users: Int64Array, items: Int64Array, epoch: int) -> Groups:
        """Return the place of each pair's two blocks in the visiting order of an epoch: an unsigned integer[N]."""
        outer, inner = self._items.of(items, epoch), self._users.of(users, epoch)
        last = self._users.count - 1
        found = np.empty(len(users), group_type(self._users.count * self._items.count))
        for part in parts(len(users)):
            forwards, block = inner[part].astype(np.int64), outer[part].astype(np.int64)
            found[part] = block * (last + 1) + np.where(block & 1, last - forwards, forwards)
        return found

    def starts(self, pairs: Interactions, epoch: int) -> Int64Array:
        """Return the place of the first pair of each item block in the epoch, and the number of pairs: int64[Q + 1]."""
        counts = np.zeros(self._items.count, np.int64)
        for _, items in pairs.batches():
            counts += np.bincount(self._items.of(items, epoch), minlength=len(counts))
        return np.concatenate([[0], np.cumsum(counts)])

    def members(self, epoch: int, block: int) -> Int64Array:
        """Return the items of an item block, with and without pairs, ascending: int64[M]."""
        found = [np.empty(0, np.int64)]
        for first in range(0, self._num_items, _CHUNK):
            ids = np.arange(first, min(first + _CHUNK, self._num_items))
            found.append(ids[self._items.of(ids, epoch) == block])
        return np.concatenate(found)


def pair_blocks(config: TrainConfig, pairs: Interactions) -> PairBlocks | None:
    """Return the blocks of a decided order, or None where it is uniform."""
    if config.blocks is None:
        return None
    return PairBlocks(pairs.num_users, pairs.num_items, config.blocks, config.seed)
