"""The gradients of a table's rows between backward and step: parts of lookups, and how they are summed and stepped.

`Pending` (the anchor's protocol) does not know where gradients are stored or what a batch is; a `Rows` does. `HostRows`
keeps gradients in RAM, where the core sums and steps them; a device cache has its own `Rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bunkbed import _native
from bunkbed.adapters.bag_gradients import FloatArray, IntArray
from bunkbed.adapters.gradient_parts import GradientPart, sum_parts
from bunkbed.table.table import Table
from bunkbed.torch.base.types import RowsBatch


@dataclass(slots=True, eq=False, kw_only=True)
class Part(GradientPart):
    """Gradients of one lookup, or the sum of earlier ones; `order` is its place in the forward order."""

    task: int = -1  # the backward call that made it
    summed: tuple[FloatArray, float] | None = None  # sums and norm of the unscaled gradients, if they were made already


class Rows(Protocol):
    """Storage of gradients for `Pending`. A batch is deduplicated ids; sums are float32[U, dim] in its order."""

    def grads(self, grad: Tensor) -> Tensor:
        """Return a gradient of any dtype, device and shape as float32[N, dim] in C order; a view if possible."""

    def select(self, grads: Tensor, kept: NDArray[np.bool_]) -> Tensor:
        """Return the rows of float32[N, dim] `grads` where bool[N] `kept` is true."""

    def unique(self, batch: RowsBatch) -> IntArray:
        """Return int64[U], each id of the batch once."""

    def sum(self, parts: list[Part]) -> tuple[RowsBatch, Tensor, float]:
        """Return the batch of all parts, the sums of equal ids, added in order, and the norm of the sums."""

    def scale(self, sums: Tensor, ratio: float) -> bool:
        """Multiply the sums in place; return whether all are finite afterwards."""

    def first_bad(self, sums: Tensor) -> tuple[int, int, float]:
        """Return row, column and value of the first element that is not finite."""

    def step(self, batch: RowsBatch, sums: Tensor, *, lr: float, step: int | None) -> None:
        """Take one step of the table, with finite sums."""


class HostRows:
    """Gradients in RAM, summed and stepped by the core. Owns nothing."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def grads(self, grad: Tensor) -> FloatArray:
        """See `Rows`."""
        return grad_array(grad, self._table.dim)

    def select(self, grads: FloatArray, kept: NDArray[np.bool_]) -> FloatArray:
        """See `Rows`."""
        return grads[kept]

    def unique(self, batch: RowsBatch) -> IntArray:
        """See `Rows`."""
        ids: IntArray = batch.unique()
        return ids

    def sum(self, parts: list[Part]) -> tuple[RowsBatch, FloatArray, float]:
        """See `Rows`."""
        if len(parts) == 1:
            part = parts[0]
            if part.summed is not None:
                made, part.summed = part.summed, None  # only once: the caller may scale these sums
                return part.batch, *made
            batch = self._table.batch(part.ids) if part.batch is None else part.batch
            if part.bags is not None and part.scale == 1.0:
                sums, norm = part.bags.sum_in(batch, part.grads)
            else:
                sums, norm = batch.sum(np.ascontiguousarray(part.scaled()))
        else:
            batch, sums, norm = sum_parts(self._table, parts)
        return batch, sums, norm

    def scale(self, sums: FloatArray, ratio: float) -> bool:
        """See `Rows`."""
        return bool(_native.scale(sums, ratio))

    def first_bad(self, sums: FloatArray) -> tuple[int, int, float]:
        """See `Rows`."""
        row, column = np.argwhere(~np.isfinite(sums))[0].tolist()
        return row, column, float(sums[row, column])

    def step(self, batch: RowsBatch, sums: FloatArray, *, lr: float, step: int | None) -> None:
        """See `Rows`."""
        self._table.update_batch(batch, sums, lr=lr, step=step)


def grad_array(grad: Tensor, dim: int) -> FloatArray:
    """Return a gradient of any dtype, device and leading shape as float32[N, dim] in C order; a view if possible."""
    grad = grad.reshape(-1, dim)
    if grad.dtype is not torch.float32 or not grad.is_cpu:
        grad = grad.to("cpu", torch.float32)
    array: FloatArray = grad.contiguous().numpy()
    return array
