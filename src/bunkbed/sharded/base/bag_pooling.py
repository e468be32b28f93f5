"""Pool rows that were gathered before. The result has the same bits as the core's pooled lookup."""

from __future__ import annotations

import numpy as np

from bunkbed import _native
from bunkbed.core.arguments import Floats, Ids
from bunkbed.core.optim import SGD
from bunkbed.table.definition import Definition

#: The core's numbers of the poolings.
SUM, MEAN, SQRTN = 0, 1, 2


class BagPooling:
    """A pooler of rows, in batch order. Owns an empty core; its batches sum the rows of equal ids in order.

    Args:
        name: name of the table that the rows are from.
    """

    def __init__(self, name: str) -> None:
        any_id = Definition(1, optimizer=SGD(lr=1.0)).spec()
        self._core = _native.create("", name, any_id, 0, 0)

    def pool(self, rows: Floats, offsets: Ids, pooling: int, weights: Floats | None, out: Floats) -> None:
        """Write the pooled rows of bags to `out`.

        Args:
            rows: float32[N, dim], the rows of the ids of all bags; overwritten if there are `weights`.
            offsets: int64[B], where each bag begins.
            pooling: `SUM`, `MEAN` or `SQRTN`.
            weights: float32[N] factors of the rows, or None; see `bunkbed.Table.lookup_bags`.
            out: float32[B, dim].
        """
        lengths = np.diff(offsets, append=len(rows))
        # The batch's ids are the numbers of the bags, so it sums the rows of each bag in batch order.
        bags = self._core.batch(np.repeat(np.arange(len(offsets), dtype=np.int64), lengths))
        if weights is not None:
            rows *= weights[:, None]
        sums = bags.sum(rows)[0]
        sums += np.float32(0)  # turns -0 to 0: the core's sums start with 0, so they are never -0
        if pooling in (MEAN, SQRTN):
            if weights is None:
                masses = lengths[bags.unique()].astype(np.float32)[:, None]
            else:
                masses = bags.sum((weights if pooling == MEAN else weights * weights)[:, None])[0] + np.float32(0)
            masses[masses == 0] = np.inf  # of weights that sum to 0: the bag is zeros
            with np.errstate(all="ignore"):  # as the core divides
                sums /= np.sqrt(masses) if pooling == SQRTN else masses
        out[...] = 0
        out[bags.unique()] = sums
