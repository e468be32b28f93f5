"""Batches of ids for a device cache: deduplicated on the host, with the state of their rows on the device."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from bunkbed import _native
from bunkbed.adapters.bag_gradients import IntArray
from bunkbed.torch.base.types import DeviceHandle
from bunkbed.torch.device.base.link import Link

#: Most gradients of one row that a device adds one after another. It adds more in pieces of this size and then adds the
#: pieces: a frequent id would otherwise keep one multiprocessor busy while the others wait. A CPU adds without pieces,
#: in the core's order.
PIECE = 64


class HasLink(Protocol):
    """A device cache. Its link is replaced when the model moves to another device."""

    link: Link


class DeviceBatch:
    """Ids that are deduplicated once for a lookup, the sums of its gradients and the step."""

    __slots__ = ("__weakref__", "_inverse", "_offsets", "_order", "_tier", "batch", "ready", "size")

    def __init__(self, batch: _native.Batch, size: int, tier: HasLink) -> None:
        self.batch = batch  # of the core
        self.size = size  # number of ids, with repetitions
        self.ready: DeviceHandle = None  # see `Link.wait`
        self._tier = tier
        self._inverse: Tensor = None
        self._order: Tensor = None
        self._offsets: Tensor = None

    @property
    def link(self) -> Link:
        """The present link of the device cache."""
        return self._tier.link

    @property
    def is_here(self) -> bool:
        """Whether its rows are on the device."""
        raise NotImplementedError

    def let_go(self) -> None:
        """Release the frames or the copy on the device; the next lookup makes them again."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.batch)

    def unique(self) -> IntArray:
        """Return int64[U], each id once, in order of first occurrence."""
        ids: IntArray = self.batch.unique()
        return ids

    def inverse(self) -> Tensor:
        """Return int64[N] on the device: the row of each id."""
        link = self._tier.link
        if self._inverse is None or self._inverse.device != link.device:
            self._inverse = link.up(self.batch.inverse())
        return self._inverse

    def segments(self) -> tuple[Tensor, Tensor]:
        """Return places in the batch grouped by row, int64[N], and each row's start, int64[U], on the device."""
        link = self._tier.link
        if self._order is None or self._order.device != link.device:
            self._order = link.up(self.batch.order())
            self._offsets = link.up(self.batch.offsets()[:-1])
        return self._order, self._offsets

    def pieces(self, most: int) -> tuple[Tensor, Tensor]:
        """Cut `segments` into pieces of at most `most` places, on the device.

        Returns:
            The start of each piece, int64[P], and the first piece of each row, int64[U], or None if no row was cut.
        """
        first, again = cut(self.batch.offsets(), most)
        if again is None:
            return self.segments()[1], None
        up = self._tier.link.up
        return up(first), up(again)


def cut(bounds: IntArray, most: int) -> tuple[IntArray, IntArray | None]:
    """Cut segments into pieces of at most `most` places.

    Args:
        bounds: int64[U + 1], the start of each segment, then the end of the last one; no segment is empty.
        most: at least 1.

    Returns:
        The start of each piece, int64[P], and the first piece of each segment, int64[U], or None if none was cut.
    """
    counts = -(-np.diff(bounds) // most)
    if counts.size == 0 or counts.max() == 1:
        return bounds[:-1], None
    firsts = np.cumsum(counts) - counts
    within = np.arange(counts.sum(), dtype=np.int64) - np.repeat(firsts, counts)
    return np.repeat(bounds[:-1], counts) + within * most, firsts


class FramedBatch(DeviceBatch):
    """A batch whose rows keep frames of a cache while it `is_here`.

    Its pins only save time: another batch may take the frames (`let_go`), and the next use places this one again.
    """

    __slots__ = ("frames", "plan", "positions")

    def __init__(self, batch: _native.Batch, size: int, tier: HasLink) -> None:
        super().__init__(batch, size, tier)
        self.plan: _native.DevicePlan | None = None
        self.frames: Tensor = None  # int64[U] on the device: the frame of each row
        self.positions: Tensor = None  # int64[N] on the device: the frame of each id

    @property
    def is_here(self) -> bool:
        """Whether its rows are pinned in `frames`."""
        return self.plan is not None

    def let_go(self) -> None:
        """Release the frames."""
        plan, self.plan = self.plan, None
        self.frames = self.positions = self.ready = None
        if plan is not None:
            plan.release()


class SentBatch(DeviceBatch):
    """A batch with a copy of its rows on the device."""

    __slots__ = ("as_of", "rows")

    def __init__(self, batch: _native.Batch, size: int, tier: HasLink) -> None:
        super().__init__(batch, size, tier)
        self.rows: Tensor = None  # float32[U, dim] on the device
        self.as_of = 0  # number of steps before they were read

    @property
    def is_here(self) -> bool:
        """Whether it has its rows, as of step `as_of`."""
        return self.rows is not None

    def let_go(self) -> None:
        """Drop the copy."""
        self.rows = self.ready = None
