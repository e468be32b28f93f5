"""The gradients of one lookup, and how those of several are summed: what the `Pending` of torch and of Keras share.

The two `Pending` classes stay apart: torch's reads a step from changes of ``anchor.grad``, Keras's from numbers in its
token, and neither value exists in the other framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bunkbed.adapters.bag_gradients import BagGradients, FloatArray, IntArray
from bunkbed.table.core import Batch
from bunkbed.table.table import Table


@dataclass(slots=True, eq=False, kw_only=True)
class GradientPart:
    """Gradients of one lookup, or the sums of earlier ones. Gradients and batch are those of the table's cache.

    Attributes:
        order: place in the order of the sums.
        ids: int64[N].
        grads: float32[N, dim]; with `bags`, of its bags, float32[B, dim]. Never written to: it may be the framework's.
        batch: the deduplicated ids, if the lookup made them.
        bags: turns the gradients of bags into those of ids.
        scale: a factor that `grads` do not contain yet.
    """

    order: Any
    ids: IntArray
    grads: Any
    batch: Any = None
    bags: BagGradients | None = None
    scale: float = 1.0

    def scaled(self) -> FloatArray:
        """Return float32[N, dim] gradients of the ids, times `scale`."""
        grads: FloatArray = self.grads if self.bags is None else self.bags.spread(self.grads)
        return grads if self.scale == 1.0 else grads * np.float32(self.scale)


def sum_parts(table: Table, parts: Sequence[GradientPart]) -> tuple[Batch, FloatArray, float]:
    """Return the batch of all parts, the sums of equal ids, added in the order of `parts`, and the norm of the sums."""
    batch = table.batch(np.concatenate([part.ids for part in parts]))
    return batch, *batch.sum(np.concatenate([part.scaled() for part in parts]))


def not_finite(table: str, row_id: int, value: float, column: int, skips: str) -> str:
    """Return the message for a gradient that is not finite; `skips` is what lets the framework skip such steps."""
    return (
        f"table {table!r}: the gradient of id {row_id} is {value} at column {column}; nothing was changed; find where "
        f"the loss stops being finite, or let {skips} skip such steps"
    )
