"""Common part of the device caches: lookups that find prefetched rows, and sums of gradients on the device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from bunkbed.adapters.bag_gradients import BagGradients, IntArray
from bunkbed.table.table import Table
from bunkbed.torch.base.gradients import Part
from bunkbed.torch.device.base.batches import DeviceBatch
from bunkbed.torch.device.base.link import Link
from bunkbed.torch.device.sums import add_segments, norm, spread_bags, sum_bags, sum_rows


class DeviceRows:
    """The part of `bunkbed.torch.base.gradients.Rows` that does not depend on where steps run.

    Args:
        table: a `bunkbed.Table` open for writing.
        anchor: returns the tensor whose device the cache uses; called at every lookup, as ``model.to()`` may move it.
    """

    def __init__(self, table: Table, anchor: Callable[[], Tensor]) -> None:
        self.table = table
        self.link = Link(torch.device("cpu"))
        #: What `lookahead` prefetched for the current batch: (ids, batch) of each lookup, oldest first.
        self.present: list[tuple[IntArray, DeviceBatch]] = []
        self.stall_s = 0.0  # time the loop waited for plans of coming batches and for their placement
        self.delay: Callable[[str], None] | None = None  # of the link; for tests
        self._anchor = anchor

    def deduped(self, ids: IntArray) -> DeviceBatch:
        """Return the batch of int64[N] ids, checked and deduplicated, with nothing on the device."""
        raise NotImplementedError

    def _batch(self, ids: IntArray) -> DeviceBatch:
        """Return the prefetched batch of exactly these ids if its rows are still on the device, else a new one."""
        is_own = self.table.is_own  # in a forked child `deduped` raises
        for index, (wanted, batch) in enumerate(self.present if is_own else []):
            if batch.is_here and wanted.size == ids.size and np.array_equal(wanted, ids):
                del self.present[index]
                return batch
        return self.deduped(ids)

    def pooled(self, batch: DeviceBatch, rows: Tensor, bags: BagGradients) -> Tensor:
        """Pool float32[U, dim] rows of a batch in batch order; return float32[B, dim]."""
        weights = None if bags.weights is None else self.link.up(bags.weights)
        bounds = np.append(bags.offsets, bags.ids.size)
        pooled = add_segments(batch.inverse(), rows, self.link.up(bags.offsets), bounds, weights, self.link)
        if bags.is_mean:
            lengths = np.diff(bags.offsets, append=bags.ids.size)
            pooled /= self.link.up(np.maximum(lengths, 1).astype(np.float32))[:, None]
        return pooled

    # ---- `Rows`

    def grads(self, grad: Tensor) -> Tensor:
        """See `Rows`."""
        return grad.reshape(-1, self.table.dim).to(self.link.device, torch.float32).contiguous()

    def select(self, grads: Tensor, kept: Tensor) -> Tensor:
        """See `Rows`."""
        return grads.index_select(0, self.link.up(np.flatnonzero(kept)))

    def unique(self, batch: DeviceBatch) -> IntArray:
        """See `Rows`."""
        return batch.unique()

    def sum(self, parts: list[Part]) -> tuple[DeviceBatch, Tensor, float]:
        """See `Rows`."""
        for part in parts:
            part.grads = part.grads.to(self.link.device)  # the model may have moved since
        if len(parts) == 1:
            part = parts[0]
            batch = self.deduped(part.ids) if part.batch is None else part.batch
            if part.bags is not None and part.scale == 1.0:
                sums = sum_bags(batch, part.bags, part.grads, self.link)
            else:
                sums = sum_rows(batch, self._spread(part))
        else:
            batch = self.deduped(np.concatenate([part.ids for part in parts]))
            sums = sum_rows(batch, torch.cat([self._spread(part) for part in parts]))
        return batch, sums, norm(sums)

    def _spread(self, part: Part) -> Tensor:
        grads = part.grads if part.bags is None else spread_bags(part.bags, part.grads, self.link)
        return grads if part.scale == 1.0 else grads * float(np.float32(part.scale))

    def scale(self, sums: Tensor, ratio: float) -> bool:
        """See `Rows`."""
        sums *= float(np.float32(ratio))
        return bool(torch.isfinite(sums).all())

    def first_bad(self, sums: Tensor) -> tuple[int, int, float]:
        """See `Rows`."""
        row, column = (~torch.isfinite(sums)).nonzero()[0].tolist()
        return row, column, float(sums[row, column])

    # ---- facts

    def counters(self) -> dict[str, int | float]:
        """Return the bytes copied over the link, and the time that the model waited."""
        return {
            "device_stall_s": self.stall_s,
            "device_bytes_up": self.link.bytes_up,
            "device_bytes_down": self.link.bytes_down,
        }
