"""Which shard of a table has a row, and what a run that is a sharded table says of its shards.

The rule, version 1: with x = id + 0x9e3779b97f4a7c15, every operation modulo 2**64,

    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb
    shard = ((x >> 32) * shards) >> 32

which is splitmix64, but for its last step, which mixes bits that are not used, and a multiplication in place of a
division. It is file format: rows are found by it. It must differ from the core's own hash of ids (`mix_id`), or the
directory of a shard would get only some of its values.
"""

from __future__ import annotations

import functools
import uuid
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from bunkbed.core.arguments import Ids

#: Version of the rule.
HASH = 1
#: Most shards of a table.
MAX_SHARDS = 1024


def shard_name(index: int) -> str:
    """Name of a shard in its run, and of its directory.

    >>> shard_name(3)
    'shard-0003'
    """
    return f"shard-{index:04d}"


@functools.cache
def _names(num_shards: int) -> tuple[str, ...]:
    return tuple(shard_name(index) for index in range(num_shards))


def shards_of(ids: Ids, num_shards: int) -> npt.NDArray[np.uint16]:
    """The shard that has each row.

    Args:
        ids: int64[N], none negative.
        num_shards: 1 to 1024.

    Returns:
        uint16[N], in ``[0, num_shards)``.

    >>> shards_of(np.array([0, 1, 2, 3, 4, 2**63 - 1]), 4).tolist()
    [3, 2, 2, 0, 1, 0]
    """
    x = ids.astype(np.uint64)
    x += np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x >>= np.uint64(32)
    x *= np.uint64(num_shards)
    x >>= np.uint64(32)
    return x.astype(np.uint16)


class Split:
    """The places of a batch, shard by shard; within a shard in batch order, which sums of equal ids depend on.

    Attributes:
        order: int64[N], places in the batch; None where all of it is one shard's.
        bounds: shard i has ``order[bounds[i]:bounds[i + 1]]``.
    """

    def __init__(self, ids: Ids, num_shards: int) -> None:
        self.order: Ids | None = None
        if num_shards == 1:
            self.bounds = [0, len(ids)]
            return
        owners = shards_of(ids, num_shards)
        self.order = np.argsort(owners, kind="stable")  # of 16 bits: a radix sort
        self.bounds = [0, *np.cumsum(np.bincount(owners, minlength=num_shards)).tolist()]

    def part(self, index: int) -> slice:
        """Where shard `index` stands in what `take` gives."""
        return slice(self.bounds[index], self.bounds[index + 1])

    def size(self, index: int) -> int:
        """Places of shard `index`."""
        return self.bounds[index + 1] - self.bounds[index]

    def take(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """[N, ...] in batch order to [N, ...] shard by shard."""
        return values if self.order is None else values.take(self.order, axis=0)

    def put(self, values: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """[N, ...] shard by shard into `out` in batch order."""
        if self.order is not None:
            out[self.order] = values
        elif out is not values:
            out[...] = values


@dataclass(frozen=True)
class Sharding:
    """What the manifest of a run says where the run is one sharded table.

    Attributes:
        uuid: identity of the whole, 32 hexadecimal digits; a copy has the same.
        shards: uuids of the shards' tables, in order: directories that were mixed up are noticed.
        hash: version of the rule.
    """

    uuid: str
    shards: tuple[str, ...]
    hash: int = HASH

    @classmethod
    def new(cls, shards: list[str]) -> Self:
        """A sharded table of its own, of these tables."""
        return cls(uuid.uuid4().hex, tuple(shards))

    def names(self) -> list[str]:
        """Names of the shards in their run, in order."""
        return list(_names(len(self.shards)))

    def as_json(self) -> dict[str, Any]:
        """What the manifest holds."""
        return {"hash": self.hash, "uuid": self.uuid, "shards": list(self.shards)}

    @classmethod
    def from_json(cls, value: object) -> Self | None:
        """What the manifest held; None where that is no such record. The version is for the caller to look at."""

        def is_uuid(one: object) -> bool:
            return isinstance(one, str) and len(one) == 32 and set(one) <= set("0123456789abcdef")

        if not isinstance(value, dict) or set(value) != {"hash", "uuid", "shards"} or type(value["hash"]) is not int:
            return None
        shards = value["shards"]
        if not isinstance(shards, list) or not 1 <= len(shards) <= MAX_SHARDS or not all(map(is_uuid, shards)):
            return None
        return cls(value["uuid"], tuple(shards), value["hash"]) if is_uuid(value["uuid"]) else None
