"""Pooling of rows that were gathered, to the bits that the core's own pooling of a table's rows has."""

from __future__ import annotations

import numpy as np

from bunkbed import _native
from bunkbed.core.arguments import Floats, Ids
from bunkbed.core.optim import SGD
from bunkbed.table.opening import make_spec

#: Poolings as the core numbers them.
SUM, MEAN, SQRTN = 0, 1, 2


class BagPooling:
    """Pools rows in batch order. Owns an empty core, whose batches sum what is equal in order.

    Args:
        name: of the table the rows are from.
    """

    def __init__(self, name: str) -> None:
        any_id = make_spec(1, None, SGD(lr=1.0), None, 0, "float32", False)
        self._core = _native.create("", name, any_id, 0, 0)

    def pool(self, rows: Floats, offsets: Ids, pooling: int, weights: Floats | None, out: Floats) -> None:
        """float32[N, dim] rows to float32[B, dim] `out`, the pooled rows of bags.

        Args:
            rows: of the ids of all bags; overwritten where there are `weights`.
            offsets: int64[B], where each bag begins.
            pooling: `SUM`, `MEAN` or `SQRTN`.
            weights: float32[N] factors of the rows, or None; see `bunkbed.Table.lookup_bags`.
            out: where they go.
        """
        lengths = np.diff(offsets, append=len(rows))
        # Sums of equal "ids", which here are numbers of bags, in batch order.
        bags = self._core.batch(np.repeat(np.arange(len(offsets), dtype=np.int64), lengths))
        if weights is not None:
            rows *= weights[:, None]
        sums = bags.sum(rows)[0]
        sums += np.float32(0)  # a sum begins with 0, so it is never -0
        if pooling in (MEAN, SQRTN):
            if weights is None:
                masses = lengths[bags.unique()].astype(np.float32)[:, None]
            else:
                masses = bags.sum((weights if pooling == MEAN else weights * weights)[:, None])[0] + np.float32(0)
            with np.errstate(all="ignore"):  # weights that cancel each other out: the core divides by them too
                sums /= np.sqrt(masses) if pooling == SQRTN else masses
        out[...] = 0
        out[bags.unique()] = sums
