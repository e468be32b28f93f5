"""The shard of a row, and the part of a run's manifest that describes a sharded table.

The hash of an id, version 1: with x = id + 0x9e3779b97f4a7c15, every operation modulo 2**64,

    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb
    shard = ((x >> 32) * shards) >> 32

This is splitmix64 without its last step, which would mix bits that are not used, and with a multiplication instead of
a division. The hash is part of the file format, because it locates rows. It must differ from the core's own hash of
ids (`mix_id`); otherwise the ids of a shard would have only some of that hash's values.
"""

from __future__ import annotations

import functools
import uuid
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from bunkbed import _native
from bunkbed.core.arguments import Ids
from bunkbed.core.types import Array, Json

#: Version of the hash.
HASH = 1
#: Maximum number of shards of a table.
MAX_SHARDS = 1024


def shard_name(index: int) -> str:
    """Return the name of a shard in its run, and of its directory.

    >>> shard_name(3)
    'shard-0003'
    """
    return f"shard-{index:04d}"


@functools.cache
def _names(num_shards: int, table: str) -> tuple[str, ...]:
    return tuple(f"{table}.{shard_name(index)}" if table else shard_name(index) for index in range(num_shards))


@functools.cache
def _places(num_shards: int, owned: range) -> npt.NDArray[np.uint16]:
    """Return the place of each shard in `owned`, uint16[num_shards]; of the others a number that is too large."""
    places = np.full(num_shards, np.iinfo(np.uint16).max, np.uint16)
    places[owned.start : owned.stop] = np.arange(len(owned))
    return places


def shards_of(ids: Ids, num_shards: int) -> npt.NDArray[np.uint16]:
    """Return the shard of each row.

    Args:
        ids: int64[...], none negative.
        num_shards: 1 to 1024.

    Returns:
        uint16[...], in ``[0, num_shards)``.

    >>> shards_of(np.array([0, 1, 2, 3, 4, 2**63 - 1]), 4).tolist()
    [3, 2, 2, 0, 1, 0]
    """
    shards: npt.NDArray[np.uint16] = _native.shards_of(ids.reshape(-1), num_shards).reshape(ids.shape)
    return shards


class Split:
    """The positions of a batch, grouped by part; within a part in batch order, because sums of equal ids depend on it.

    Attributes:
        order: int64[N], positions in the batch; None for a single part.
        bounds: part i has ``order[bounds[i]:bounds[i + 1]]``.
    """

    __slots__ = ("bounds", "order")

    def __init__(self, order: Ids | None, bounds: list[int]) -> None:
        self.order = order
        self.bounds = bounds

    @classmethod
    def by_part(cls, ids: Ids, parts: npt.NDArray[np.uint16], num_parts: int) -> Self:
        """Return the positions by the part of each id.

        Args:
            ids: int64[N], none negative.
            parts: uint16[S], the part of each shard.
            num_parts: number of parts.

        Raises:
            ValueError: an id is in a shard whose part is `num_parts` or more.
        """
        return cls(*_native.split(ids, parts, num_parts))

    @classmethod
    def by_shard(cls, ids: Ids, num_shards: int, owned: range | None = None) -> Self:
        """Return the positions by shard.

        Args:
            ids: int64[N], none negative.
            num_shards: shards of the table.
            owned: the shards that may have these ids; default: all.
        """
        owned = range(num_shards) if owned is None else owned
        if len(owned) == 1:
            return cls(None, [0, len(ids)])
        return cls.by_part(ids, _places(num_shards, owned), len(owned))

    def part(self, index: int) -> slice:
        """Return where part `index` is in the result of `take`."""
        return slice(self.bounds[index], self.bounds[index + 1])

    def size(self, index: int) -> int:
        """Return the number of positions of part `index`."""
        return self.bounds[index + 1] - self.bounds[index]

    def take(self, values: Array) -> Array:
        """Return [N, ...] values in batch order, sorted by part."""
        return values if self.order is None else values.take(self.order, axis=0)

    def put(self, values: Array, out: Array) -> None:
        """Write [N, ...] values that are sorted by part to `out` in batch order."""
        if self.order is not None:
            out[self.order] = values
        elif out is not values:
            out[...] = values


@dataclass(frozen=True)
class Sharding:
    """The part of a run's manifest that makes the run, or some of its tables, one sharded table.

    Attributes:
        uuid: identity of the sharded table, 32 hexadecimal digits; a copy has the same.
        shards: uuids of the shards' tables, in order, to detect directories that were mixed up.
        hash: version of the hash.
    """

    uuid: str
    shards: tuple[str, ...]
    hash: int = HASH

    @classmethod
    def new(cls, shards: list[str]) -> Self:
        """Return the record of a new sharded table with these uuids of shards."""
        return cls(uuid.uuid4().hex, tuple(shards))

    def names(self, table: str = "") -> list[str]:
        """Return the names of the shards in their run, in order.

        Args:
            table: name of the table, in a run of several; empty where the run is the table.

        >>> Sharding.new(["ab" * 16] * 2).names("user")
        ['user.shard-0000', 'user.shard-0001']
        """
        return list(_names(len(self.shards), table))

    def as_json(self) -> Json:
        """Return the record for the manifest."""
        return {"hash": self.hash, "uuid": self.uuid, "shards": list(self.shards)}

    @classmethod
    def from_json(cls, value: object) -> Self | None:
        """Return the record of a manifest; None where it is not valid. The caller must check the version."""

        def is_uuid(one: object) -> bool:
            return isinstance(one, str) and len(one) == 32 and set(one) <= set("0123456789abcdef")

        if not isinstance(value, dict) or set(value) != {"hash", "uuid", "shards"} or type(value["hash"]) is not int:
            return None
        shards = value["shards"]
        if not isinstance(shards, list) or not 1 <= len(shards) <= MAX_SHARDS or not all(map(is_uuid, shards)):
            return None
        return cls(value["uuid"], tuple(shards), value["hash"]) if is_uuid(value["uuid"]) else None
