"""The gradients of ids from the gradients of their bags."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


def only_kept(
    kept: NDArray[np.bool_], ids: IntArray, bounds: IntArray, weights: FloatArray | None
) -> tuple[IntArray, IntArray, FloatArray | None]:
    """Return ids, bounds of bags and weights without the ids where bool[N] `kept` is False."""
    before = np.concatenate([[0], np.cumsum(kept)])  # number of kept ids before each position
    return ids[kept], before[bounds], None if weights is None else weights[kept]


class BagGradients:
    """The bags of a pooled lookup; turns the gradient of a bag into gradients of its ids.

    Bag b is ``ids[offsets[b] : offsets[b + 1]]``; the last bag ends at N: int64[N], int64[B]. An id's gradient is that
    of its bag, times the id's weight if there are `weights` (float32[N]), divided by the bag's length if `is_mean`.
    """

    __slots__ = ("ids", "is_mean", "offsets", "weights")

    def __init__(self, ids: IntArray, offsets: IntArray, weights: FloatArray | None, is_mean: bool) -> None:
        self.ids = ids
        self.offsets = offsets
        self.weights = weights
        self.is_mean = is_mean

    def spread(self, grads: FloatArray) -> FloatArray:
        """Return the float32[N, dim] gradients of the ids from the float32[B, dim] gradients of the bags."""
        lengths = np.diff(self.offsets, append=self.ids.size)
        if self.is_mean:
            grads = grads / np.maximum(lengths, 1).astype(np.float32)[:, None]
        rows = np.repeat(grads, lengths, axis=0)
        if self.weights is not None:
            rows *= self.weights[:, None]
        return rows

    def sum_in(self, batch: Any, grads: FloatArray) -> tuple[FloatArray, float]:
        """Return ``batch.sum(self.spread(grads))``, with the same bits of the sums, without the memory of `spread`."""
        sums, norm = batch.sum_bags(self.offsets, grads, self.weights, self.is_mean)
        return sums, norm
