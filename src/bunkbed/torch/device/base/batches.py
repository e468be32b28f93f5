"""Batches of ids for a device cache: deduplicated on the host, with the state of their rows on the device."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bunkbed import _native
from bunkbed.adapters.bag_gradients import IntArray
from bunkbed.torch.base.types import DeviceHandle
from bunkbed.torch.device.base import capabilities
from bunkbed.torch.device.base.link import Link

#: Most gradients of one row that a device adds one after another. It adds more in pieces of this size and then adds the
#: pieces: a frequent id would otherwise keep one multiprocessor busy while the others wait. A CPU adds without pieces,
#: in the core's order.
PIECE = 64


class HasLink(Protocol):
    """A device cache. Its link is replaced when the model moves to another device."""

    link: Link


class Segments(NamedTuple):
    """The places of each row in a batch, on the device, as sums of gradients need them.

    Attributes:
        order: int64[N], the places grouped by row, ascending in each.
        starts: int64[U], the start of each row in `order`.
        pieces: int64[P], the start of each piece of at most `PIECE` places; `starts` if the device adds without pieces
            or no row is cut.
        firsts: int64[U], the first piece of each row, or None if no row is cut.
    """

    order: Tensor
    starts: Tensor
    pieces: Tensor
    firsts: Tensor


class DeviceBatch:
    """Ids that are deduplicated once for a lookup, the sums of its gradients and the step.

    One copy brings all the numbers of a batch to the device: to start a copy takes longer than to make it.
    """

    __slots__ = (
        "__weakref__",
        "_inverse",
        "_pieces",
        "_segments",
        "_tier",
        "arrays",
        "batch",
        "is_kept",
        "is_stepped",
        "ready",
        "size",
    )

    def __init__(self, batch: _native.Batch, size: int, tier: HasLink) -> None:
        self.batch = batch  # of the core
        self.size = size  # number of ids, with repetitions
        self.ready: DeviceHandle = None  # see `Link.wait`
        self._tier = tier
        self.is_kept = False  # whether the window of `lookahead` releases it; else the step does
        self.is_stepped = False  # whether a step used it
        self.arrays: Tensor = None  # all that was copied at once, for `Link.wait`
        self._inverse: Tensor = None
        self._pieces = 0  # of the segments; 0 if no row is cut
        self._segments: Segments | None = None

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

    def segments(self) -> Segments:
        """Return the places of each row, on the device."""
        if self._segments is None or self._segments.order.device != self._tier.link.device:
            self.unpack(self._tier.link.send(self.packed()))
        assert self._segments is not None
        return self._segments

    def packed(self) -> Tensor:
        """Return all numbers of the batch in host memory, int64; `unpack` takes the device's copy."""
        return self._packed(self.batch)

    def _packed(self, source: _native.Batch | _native.DevicePlan) -> Tensor:
        device = capabilities.of(self._tier.link.device)
        most = self.size + 1 if device.adds_in_order or not device.has_bags else PIECE
        host = self._tier.link.host_memory((source.max_numbers(most),), torch.int64)
        self._pieces = source.write_numbers(most, host.numpy())
        return host

    def unpack(self, arrays: Tensor) -> None:
        """Take the device's copy of `packed`."""
        self._inverse = self._unpacked(arrays, [])[0]

    def _unpacked(self, arrays: Tensor, before: list[int]) -> list[Tensor]:
        """Take the segments; return the arrays of lengths `before` that come first, and the row or frame of each id."""
        rows, pieces = len(self), self._pieces
        sizes = [*before, self.size, self.size, rows, *([rows, pieces] if pieces else [])]
        parts = torch.split_with_sizes(arrays, [*sizes, arrays.numel() - sum(sizes)])  # the last one is not used
        at = len(before) + 1
        order, starts = parts[at : at + 2]
        firsts, begins = parts[at + 2 : at + 4] if pieces else (None, starts)
        self.arrays, self._segments = arrays, Segments(order, starts, begins, firsts)
        return list(parts[:at])


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

    def packed_with(self, plan: _native.DevicePlan) -> Tensor:
        """Return all numbers of the batch and of its plan in host memory, int64; `unpack_with` takes the copy."""
        return self._packed(plan)

    def unpack_with(self, plan: _native.DevicePlan, arrays: Tensor) -> tuple[Tensor, Tensor]:
        """Take the device's copy of `packed_with`; return the frames to load, int64[L], and to evict, int64[E]."""
        before = [len(self), plan.load_ids.size, plan.evict_ids.size]
        self.frames, load, evict, self.positions = self._unpacked(arrays, before)
        return load, evict

    def let_go(self) -> None:
        """Release the frames."""
        plan = self.take_plan()
        if plan is not None:
            plan.release()

    def take_plan(self) -> _native.DevicePlan | None:
        """Return the plan, which the caller releases; the batch has no frames afterwards."""
        plan, self.plan = self.plan, None
        self.frames = self.positions = self.ready = self.arrays = None
        return plan


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
        self.rows = self.ready = self.arrays = None
