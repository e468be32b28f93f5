"""Batches of ids as a tier on a device sees them: deduped on the host, with what of them is on the device."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from bunkbed.torch.base.gradients import IntArray
from bunkbed.torch.device.base.link import Link

#: Gradients of one row that a device adds one after another; longer rows are added in pieces of so many, then those. A
#: frequent id would otherwise keep one multiprocessor busy while the others wait. Not on a CPU, where the order is then
#: the core's.
PIECE = 64


class HasLink(Protocol):
    """A tier, which has another link once the model has moved to another device."""

    link: Link


class DeviceBatch:
    """Ids deduped once for a lookup, the sums of its gradients and the step."""

    __slots__ = ("__weakref__", "_inverse", "_offsets", "_order", "_tier", "batch", "ready", "size")

    def __init__(self, batch: Any, size: int, tier: HasLink) -> None:
        self.batch = batch  # the core's
        self.size = size  # ids, repeated ones counted
        self.ready: Any = None  # see `Link.wait`
        self._tier = tier
        self._inverse: Any = None
        self._order: Any = None
        self._offsets: Any = None

    @property
    def link(self) -> Link:
        """To the device of the tier, wherever that is now."""
        return self._tier.link

    @property
    def is_here(self) -> bool:
        """Whether its rows are on the device."""
        raise NotImplementedError

    def let_go(self) -> None:
        """Gives up what it has on the device; whoever looks it up brings it again."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.batch)

    def unique(self) -> IntArray:
        """int64[U], each id once, in order of first occurrence."""
        ids: IntArray = self.batch.unique()
        return ids

    def inverse(self) -> Any:
        """int64[N] on the device: the row of each id."""
        link = self._tier.link
        if self._inverse is None or self._inverse.device != link.device:
            self._inverse = link.up(self.batch.inverse())
        return self._inverse

    def segments(self) -> tuple[Any, Any]:
        """Places in the batch grouped by row, int64[N], and where each row's begin, int64[U]: on the device."""
        link = self._tier.link
        if self._order is None or self._order.device != link.device:
            self._order = link.up(self.batch.order())
            self._offsets = link.up(self.batch.offsets()[:-1])
        return self._order, self._offsets

    def pieces(self, most: int) -> tuple[Any, Any]:
        """`segments` cut into pieces of at most `most` places, on the device.

        Returns:
            Where each piece begins, int64[P], and the first piece of each row, int64[U]; None where no row was cut.
        """
        first, again = cut(self.batch.offsets(), most)
        if again is None:
            return self.segments()[1], None
        up = self._tier.link.up
        return up(first), up(again)


def cut(bounds: IntArray, most: int) -> tuple[IntArray, IntArray | None]:
    """Segments cut into pieces of at most `most` places.

    Args:
        bounds: int64[U + 1] where each segment, none of them empty, begins; then where the last one ends.
        most: at least 1.

    Returns:
        Where each piece begins, int64[P], and the first piece of each segment, int64[U]; None where none was cut.
    """
    counts = -(-np.diff(bounds) // most)
    if counts.size == 0 or counts.max() == 1:
        return bounds[:-1], None
    firsts = np.cumsum(counts) - counts
    within = np.arange(counts.sum(), dtype=np.int64) - np.repeat(firsts, counts)
    return np.repeat(bounds[:-1], counts) + within * most, firsts


class FramedBatch(DeviceBatch):
    """A batch whose rows keep frames of a cache while it `is_here`.

    Pins are for speed: whoever needs the frames may take them (`let_go`), and the next user places the batch again.
    """

    __slots__ = ("frames", "plan", "positions")

    def __init__(self, batch: Any, size: int, tier: HasLink) -> None:
        super().__init__(batch, size, tier)
        self.plan: Any = None
        self.frames: Any = None  # int64[U] on the device: of each row
        self.positions: Any = None  # int64[N] on the device: of each id

    @property
    def is_here(self) -> bool:
        """Whether its rows lie in `frames` for sure."""
        return self.plan is not None

    def let_go(self) -> None:
        """Gives the frames up."""
        plan, self.plan = self.plan, None
        self.frames = self.positions = self.ready = None
        if plan is not None:
            plan.release()


class SentBatch(DeviceBatch):
    """A batch with a copy of its rows."""

    __slots__ = ("as_of", "rows")

    def __init__(self, batch: Any, size: int, tier: HasLink) -> None:
        super().__init__(batch, size, tier)
        self.rows: Any = None  # float32[U, dim] on the device
        self.as_of = 0  # the steps that had been taken when they were read

    @property
    def is_here(self) -> bool:
        """Whether it has its rows, as they were at `as_of`."""
        return self.rows is not None

    def let_go(self) -> None:
        """Drops the copy."""
        self.rows = self.ready = None
