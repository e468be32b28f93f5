"""Bags of ids, as in `tf.nn.embedding_lookup_sparse`, for a table's pooled lookups and their gradients."""

from __future__ import annotations

import numpy as np

from bunkbed.adapters.bag_gradients import BagGradients, FloatArray, IntArray, only_kept
from bunkbed.table.table import Table


class Bags:
    """Bags of ids as the table expects them: int64[N], int64[B] offsets, float32[N] weights or None."""

    def __init__(
        self, ids: IntArray, splits: IntArray, weights: FloatArray | None, combiner: str, skip_zero: bool
    ) -> None:
        if skip_zero:
            ids, splits, weights = only_kept(ids != 0, ids, splits, weights)
        self.ids = ids
        self.weights = weights
        self._combiner = combiner
        self._splits = splits

    @property
    def offsets(self) -> IntArray:
        """int64[B], the start of each bag."""
        return np.ascontiguousarray(self._splits[:-1])

    def lookup(self, table: Table, *, touch: bool) -> FloatArray:
        """Return float32[B, dim] pooled rows."""
        pooled: FloatArray = table.lookup_bags(
            self.ids, self._splits[:-1], pooling=self._combiner, weights=self.weights, touch=touch
        )
        return pooled

    def gradients(self) -> BagGradients:
        """Return the ids' gradients: the bag's, times weight / (sum of weights, or root of the sum of squares).

        Of a bag for which that is 0 they are 0, as in `tf.math.divide_no_nan`.
        """
        offsets, weights, is_mean = self.offsets, self.weights, self._combiner == "mean"
        if self._combiner == "sum" or (is_mean and weights is None):
            return BagGradients(self.ids, offsets, weights, is_mean)
        lengths = np.diff(self._splits)
        given = np.ones(self.ids.size, np.float32) if weights is None else weights
        divisors = np.zeros(lengths.size, np.float32)
        # In batch order and float32, as the lookup adds them: both must agree whether weights sum to 0.
        np.add.at(divisors, np.repeat(np.arange(lengths.size), lengths), given if is_mean else given * given)
        divisors[divisors == 0] = np.inf
        with np.errstate(over="ignore"):  # a gradient that is not finite is an error of the update
            factors = given / np.repeat(divisors if is_mean else np.sqrt(divisors), lengths)
        return BagGradients(self.ids, offsets, factors, False)
