"""The core of a table: what a `bunkbed.Table` calls to read, change and commit its rows."""

from __future__ import annotations

from typing import Protocol

from bunkbed.core.arguments import Floats, Ids


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
