"""The gradients that bags give their ids."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


class BagGradients:
    """Bags of ids that a lookup pooled, and how a gradient of a bag becomes gradients of its ids.

    Bag b is ``ids[offsets[b] : offsets[b + 1]]``, the last one ends at N: int64[N], int64[B]. An id's gradient is its
    bag's, times its float32[N] weight where there are `weights`, divided by the bag's length where `is_mean`.
    """

    __slots__ = ("ids", "is_mean", "offsets", "weights")

    def __init__(self, ids: IntArray, offsets: IntArray, weights: FloatArray | None, is_mean: bool) -> None:
        self.ids = ids
        self.offsets = offsets
        self.weights = weights
        self.is_mean = is_mean

    def spread(self, grads: FloatArray) -> FloatArray:
        """float32[B, dim] gradients of bags to float32[N, dim] of their ids."""
        lengths = np.diff(self.offsets, append=self.ids.size)
        if self.is_mean:
            grads = grads / np.maximum(lengths, 1).astype(np.float32)[:, None]
        rows = np.repeat(grads, lengths, axis=0)
        if self.weights is not None:
            rows *= self.weights[:, None]
        return rows

    def sum_in(self, batch: Any, grads: FloatArray) -> tuple[FloatArray, float]:
        """``batch.sum(self.spread(grads))``, the sums to the last bit, without spreading them."""
        sums, norm = batch.sum_bags(self.offsets, grads, self.weights, self.is_mean)
        return sums, norm
