"""`Wish` and `Plan`: the ids that the lookups of a batch want, by owner, and the rows that come back."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bunkbed import _native
from bunkbed.core.arguments import Floats, Ids
from bunkbed.files.sharding import Split, shards_of

if TYPE_CHECKING:
    from bunkbed.torch.ranks.rows import RankRows


@functools.cache
def _owners(num_shards: int, world: int) -> npt.NDArray[np.uint16]:
    """Return the rank of each shard, uint16[num_shards]: shard s of S belongs to rank s * W // S."""
    return (np.arange(num_shards) * world // num_shards).astype(np.uint16)


def owners_of(ids: Ids, num_shards: int, world: int) -> npt.NDArray[np.uint16]:
    """Return the rank that owns each row, uint16[N]."""
    return _owners(num_shards, world)[shards_of(ids, num_shards)]


def shards_of_rank(rank: int, num_shards: int, world: int) -> range:
    """Return the shards that a rank owns; see `owners_of`.

    >>> [list(shards_of_rank(rank, 5, 2)) for rank in range(2)]
    [[0, 1, 2], [3, 4]]
    """
    return range(-(-rank * num_shards // world), -(-(rank + 1) * num_shards // world))


def split_by_owner(ids: Ids, num_shards: int, world: int) -> Split:
    """Return the places of int64[N] ids by owner."""
    return Split.by_part(ids, _owners(num_shards, world), world)


class Wish:
    """The lookups of one table in a batch: this rank's ids, and what all ranks ask of this one.

    Attributes:
        table: the rows of the table.
        unique: int64[U], each id once, by owner.
        split: of `unique` before it was sorted.
        asked: int64[M], ids that the ranks ask of this one, rank by rank.
        asked_bounds: rank r asks ``asked[asked_bounds[r]:asked_bounds[r + 1]]``.
    """

    def __init__(self, table: RankRows, ids: list[Ids]) -> None:
        self.table = table
        self._ids: Ids = ids[0].copy() if len(ids) == 1 else np.concatenate(ids)
        self._ends: list[int] = np.cumsum([len(one) for one in ids]).tolist()
        batch = table.deduped(self._ids)
        unique: Ids = batch.unique()
        self.split = split_by_owner(unique, table.num_shards, table.ranks.world)
        self.unique: Ids = self.split.take(unique)
        places = np.empty(len(unique), np.int64)
        self.split.put(np.arange(len(unique)), places)
        self._inverse: Ids = places[batch.inverse()]  # for each of `_ids`, its place in `unique`
        self._made = 0  # lookups made so far
        self.asked: Ids = np.empty(0, np.int64)
        self.asked_bounds: list[int] = []
        self._rows: Floats | None = None
        self._changes = -1  # those of the table when `_rows` came

    def hear(self, parts: list[Ids]) -> None:
        """Note what each rank asks of this one."""
        self.asked = np.concatenate(parts)
        self.asked_bounds = [0, *np.cumsum([len(part) for part in parts]).tolist()]

    def comes_next(self, ids: Ids) -> bool:
        """Return whether int64[N] `ids` are those of the next lookup in the plan."""
        return not self.is_over and bool(np.array_equal(self._ids[self._next()], ids))

    def _next(self) -> slice:
        return slice(self._ends[self._made - 1] if self._made else 0, self._ends[self._made])

    @property
    def is_over(self) -> bool:
        """Whether every lookup was made."""
        return self._made == len(self._ends)

    @property
    def is_fresh(self) -> bool:
        """Whether the rows are here, and the table has not changed since they came."""
        return self._rows is not None and self._changes == self.table.changes

    def fill(self, rows: Floats) -> None:
        """Take the rows of `unique`, float32[U, dim]."""
        self._rows, self._changes = rows, self.table.changes

    def take(self, out: Floats) -> None:
        """Copy the rows of the next lookup, of N ids, to float32[N, dim] `out`."""
        assert self._rows is not None
        places = self._inverse[self._next()]
        self._made += 1
        if len(places):
            np.take(self._rows, places, axis=0, out=out, mode="clip")  # to raise, NumPy would copy again


class Plan:
    """The lookups of one batch, of every table that it looks up, in the order of the tables."""

    def __init__(self, wishes: list[Wish]) -> None:
        self.wishes = wishes

    def of(self, table: RankRows) -> Wish | None:
        """Return the lookups of a table, or None."""
        for wish in self.wishes:
            if wish.table is table:
                return wish
        return None


@dataclass(frozen=True, eq=False)
class ScaledRows:
    """float32[N, dim] `rows` at int64[M] `places`, times `factor`: gathered when they are written into a message."""

    rows: Floats
    places: Ids
    factor: float

    @property
    def nbytes(self) -> int:
        """Bytes of the M rows."""
        return len(self.places) * int(self.rows.shape[1]) * 4

    def write(self, out: npt.NDArray[np.uint8]) -> None:
        """Write the M rows to uint8[nbytes]."""
        _native.gather_scaled(self.rows, self.places, self.factor, out.view(np.float32))


def empty_rows(count: int, dim: int) -> Floats:
    """Return float32[count, dim], aligned to 64 bytes."""
    rows: Floats = _native.empty_rows(count, dim)
    return rows
