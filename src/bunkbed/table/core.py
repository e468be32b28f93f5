"""What lies below a table and above it.

The core is below: what a `bunkbed.Table` calls to read, change and commit its rows.
`_native.Table` is the core of a plain table; `bunkbed.sharded.core.ShardedCore` puts the cores of several together.
Arrays are contiguous and of the right type, as `bunkbed.core.arguments` makes them. Errors are those of the method of
`bunkbed.Table` with the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bunkbed import _native
from bunkbed.core.arguments import Floats, Ids
from bunkbed.core.types import Json


class Batch(Protocol):
    """The ids of a training step, int64[N], with its U unique ids, which `bunkbed.Table.batch` makes."""

    def __len__(self) -> int: ...

    def num_ids(self) -> int:
        """Return N."""

    def unique(self) -> Ids:
        """Return int64[U], each id once; the order depends on the batch alone."""

    def sum(self, grads: Floats, /) -> tuple[Floats, float]:
        """Return the sums of float32[N, dim] gradients of equal ids, float32[U, dim], and their norm in float64."""

    def sum_bags(self, offsets: Ids, grads: Floats, weights: Floats | None, is_mean: bool, /) -> tuple[Floats, float]:
        """Return as `sum`, of the gradients that bags with gradients float32[B, dim] give their ids."""


class CorePending(Protocol):
    """A commit that a core has started."""

    def wait(self) -> int:
        """Wait until the commit is durable; return its epoch, or raise its error."""

    def is_over(self) -> bool:
        """Return whether the commit is durable or has failed."""


class Core(Protocol):
    """Rows, optimizer and commits of one table. Thread-safe."""

    # ---- Rows. `out` is filled; `ids` are int64[N].

    def lookup(self, ids: Ids, touch: bool, out: Floats, /) -> None: ...
    def lookup_bags(
        self, ids: Ids, offsets: Ids, pooling: int, weights: Floats | None, touch: bool, out: Floats, /
    ) -> None: ...
    def update(self, ids: Ids, grads: Floats, lr: float | None, step: int | None, /) -> None: ...
    def get(self, ids: Ids, field: int, out: Floats, /) -> None: ...
    def set(self, ids: Ids, field: int, values: Floats, /) -> None: ...
    def contains(self, ids: Ids, out: npt.NDArray[np.bool_], /) -> None: ...
    def erase(self, ids: Ids, /) -> int: ...
    def write_dirty(self) -> None: ...

    # ---- A training step, in three calls. A core takes only batches that it made: hence `Any`.

    def batch(self, ids: Ids, /) -> Batch: ...
    def lookup_batch(self, batch: Any, touch: bool, out: Floats, /) -> None: ...
    def update_batch(self, batch: Any, sums: Floats, lr: float | None, step: int | None, /) -> None: ...

    # ---- Coming batches; see `bunkbed.window.Window`

    def stage(self, ids: Ids, /) -> None: ...
    def expect(self, ids: Ids, most: int, /) -> int: ...
    def advance(self, over: int, begins: int, depth: int, /) -> None: ...
    def forget(self, number: int, /) -> None: ...

    # ---- Commits. `meta` is JSON, or None for that of the last commit; an empty `keep` gives no name.

    def commit(self, meta: str | None, keep: str, /) -> int: ...
    def begin_commit(self, meta: str | None, keep: str, /) -> CorePending: ...
    def snapshots(self) -> list[tuple[str, int]]: ...
    def drop(self, name: str, /) -> None: ...
    def rewind(self, name: str, epoch: int | None, /) -> None: ...
    def refresh(self, to: int | None = None) -> int: ...
    def compact(self) -> int: ...
    def close(self) -> None: ...

    # ---- Device cache; a sharded table cannot have one, and takes only None

    def set_holder(self, map: _native.DeviceMap | None, write_back: object | None, /) -> None: ...

    # ---- Facts

    def fields(self) -> Sequence[tuple[str, int]]: ...
    def optimizer(self) -> Json: ...
    def set_optimizer(self, values: Json, /) -> None: ...
    def stats(self) -> dict[str, int | float]: ...
    def step(self) -> int: ...
    def epoch(self) -> int: ...
    def is_changed(self) -> bool: ...
    def uncommitted(self) -> tuple[int, bool, int]: ...
    def meta(self) -> str: ...
    def uuid(self) -> bytes: ...
    def payload_bytes(self) -> int: ...


class Above(Protocol):
    """The calls that a table makes to its device cache, or to the check of a reader's age.

    One thread may nest the contexts.
    """

    def reading(self) -> AbstractContextManager[None]:
        """Return a context in which the table has the newest rows and a device cache does not change them."""

    def writing(self) -> AbstractContextManager[None]:
        """Return a context in which the table may change; it has the newest rows, and later a cache has no copies."""

    def table_closed(self) -> None:
        """Note that the table is closed. Rows that were not written back are lost."""

    def stats(self) -> dict[str, int | float]:
        """Return counters for `Table.stats`."""
