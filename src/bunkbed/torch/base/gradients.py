"""The gradients of a table's rows between backward and step: parts of lookups, and how they are summed and stepped.

`Pending` (the anchor's protocol) knows neither where gradients lie nor what a batch of theirs is: that is the business
of a `Rows`. `HostRows` keeps them in RAM and lets the core sum and step them; a device cache brings its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from bunkbed import _native

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(slots=True)
class Part:
    """Gradients of one lookup, or the sum of earlier ones; `order` is its place in the forward order."""

    order: int
    task: int  # the backward call it came from
    ids: IntArray  # int64[N]
    grads: Any  # float32[N, dim] of a `Rows`; may be autograd's own buffer, so never written to
    scale: float = 1.0  # still to be multiplied in
    batch: Any = None  # the ids deduped, where the lookup did it
    bags: Any = None  # where `grads` are those of bags, float32[B, dim]: what makes them gradients of ids

    def scaled(self) -> Any:
        """The gradients with `scale` applied, float32[N, dim]."""
        grads = self.grads if self.bags is None else self.bags.spread(self.grads)
        return grads if self.scale == 1.0 else grads * np.float32(self.scale)


class Rows(Protocol):
    """What `Pending` asks of where gradients lie. A batch is ids deduped; sums are float32[U, dim] in its order."""

    def grads(self, grad: Any) -> Any:
        """float32[N, dim] in C order from a gradient of any dtype, device and leading shape; a view where it can be."""

    def select(self, grads: Any, kept: NDArray[np.bool_]) -> Any:
        """Those of float32[N, dim] that are kept, bool[N]."""

    def unique(self, batch: Any) -> IntArray:
        """int64[U], each id of the batch once."""

    def sum(self, parts: list[Part]) -> tuple[Any, Any, float]:
        """The batch of all parts, the sums of equal ids one by one in order, and their norm in float64."""

    def scale(self, sums: Any, ratio: float) -> bool:
        """Multiplies the sums in place; False where one of them is not finite then."""

    def first_bad(self, sums: Any) -> tuple[int, int, float]:
        """Row, column and value of the first that is not finite."""

    def step(self, batch: Any, sums: Any, *, lr: float, step: int | None) -> None:
        """One step of the table, with finite sums."""


class HostRows:
    """Gradients in RAM, summed and stepped by the core. Owns nothing."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def grads(self, grad: Any) -> FloatArray:
        """See `Rows`."""
        return grad_array(grad, self._table.dim)

    def select(self, grads: FloatArray, kept: NDArray[np.bool_]) -> FloatArray:
        """See `Rows`."""
        return grads[kept]

    def unique(self, batch: Any) -> IntArray:
        """See `Rows`."""
        ids: IntArray = batch.unique()
        return ids

    def sum(self, parts: list[Part]) -> tuple[Any, FloatArray, float]:
        """See `Rows`."""
        if len(parts) == 1:
            part = parts[0]
            batch = self._table.batch(part.ids) if part.batch is None else part.batch
            if part.bags is not None and part.scale == 1.0:
                sums, norm = part.bags.sum_in(batch, part.grads)
            else:
                sums, norm = batch.sum(part.scaled())
        else:
            batch = self._table.batch(np.concatenate([part.ids for part in parts]))
            sums, norm = batch.sum(np.concatenate([part.scaled() for part in parts]))
        return batch, sums, norm

    def scale(self, sums: FloatArray, ratio: float) -> bool:
        """See `Rows`."""
        return bool(_native.scale(sums, ratio))

    def first_bad(self, sums: FloatArray) -> tuple[int, int, float]:
        """See `Rows`."""
        row, column = np.argwhere(~np.isfinite(sums))[0].tolist()
        return row, column, float(sums[row, column])

    def step(self, batch: Any, sums: FloatArray, *, lr: float, step: int | None) -> None:
        """See `Rows`."""
        self._table.update_batch(batch, sums, lr=lr, step=step)


def grad_array(grad: Any, dim: int) -> FloatArray:
    """float32[N, dim] in C order from a gradient of any dtype, device and leading shape; a view where it can be."""
    grad = grad.reshape(-1, dim)
    if grad.dtype is not torch.float32 or not grad.is_cpu:
        grad = grad.to("cpu", torch.float32)
    array: FloatArray = grad.contiguous().numpy()
    return array
