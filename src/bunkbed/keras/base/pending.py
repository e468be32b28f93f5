"""Row gradients of one table between Keras's backward and its optimizer's step. NumPy only.

A table's rows are never a variable, so Keras gets a *token*, one scalar variable, instead. The protocol:

1. A lookup makes the token an input of its gradient function.
2. The function's backward passes ids and gradients to `Pending.push` and returns, as the token's gradient, a number
   that identifies this push: one bit of 46, plus 1. It is NaN if a gradient is not finite.
3. The token has ``overwrite_with_gradient``: the optimizer assigns the gradient to it, without clipping, decay or
   slots. The token's ``assign`` calls `Pending.settle` with that gradient, at every step, updating or accumulating.
   Sums of such numbers are exact in float64, so they identify the pushes whose gradients the optimizer got. The low 6
   bits of a sum count its pushes, so a number that was scaled, clipped or averaged is not a valid sum.
4. Gradients that no optimizer gets are never applied: those of a step that loss scaling rejects, or for a plot. Their
   bits are reused, oldest first, when bits are short.

The gradients of a row are added one by one in the order (accumulated step, replica, lookup, position in the batch). So
the bits of a step depend neither on the order in which backward visits the graph nor on the speed of replicas.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bunkbed import _native
from bunkbed.adapters.bag_gradients import BagGradients, FloatArray, IntArray
from bunkbed.adapters.gradient_parts import GradientPart, not_finite, sum_parts
from bunkbed.table.core import Batch
from bunkbed.table.table import Table

#: Pushes that one token value can identify; its low `COUNT_BITS` bits count them.
BITS = 46
COUNT_BITS = 6
#: Lookups whose deduplicated ids are kept for their backward; for older lookups, backward deduplicates again.
BATCHES = 64
#: Limits: consecutive backwards without a step that takes their gradients, and lookups for training without a
#: backward. Beyond them, `began` raises an error.
MOST_UNSETTLED, MOST_UNANSWERED = 1000, 20_000


@dataclass(slots=True, eq=False, kw_only=True)
class _Push(GradientPart):
    """Gradients of one lookup, with their sums float32[U, dim] and norm; `order` is (replica, place)."""

    sums: FloatArray
    norm: float


@dataclass(slots=True, eq=False)
class _Group:
    """Pushes of a replica with no lookup between them: those of one backward."""

    replica: int
    bits: dict[int, list[_Push]] = field(default_factory=dict)

    def pushes(self) -> list[_Push]:
        return [push for pushes in self.bits.values() for push in pushes]


@dataclass(frozen=True)
class StepRule:
    """Settings of a Keras optimizer that apply to a table's step, in addition to the learning rate."""

    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None


class Pending:
    """The gradients of one table that wait for a step; all layers on the table share it.

    Owns only these gradients. Thread-safe: TensorFlow's threads call it.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.steps_settled = 0
        self._lock = threading.RLock()
        self._groups: list[_Group] = []  # not accepted, oldest first
        self._accepted: list[_Push] = []  # by the optimizer, for an update that is still accumulating
        self._open: dict[int, _Group] = {}  # by replica: the group that its next push joins
        self._free = set(range(BITS))
        self._handles = itertools.count(1)
        self._batches: OrderedDict[int, Any] = OrderedDict()
        self._unanswered = 0
        self._unsettled = 0
        self._accumulates_for = 0

    @property
    def accumulates(self) -> bool:
        """Whether gradients were accepted for an update that is not complete."""
        return bool(self._accepted)

    # ---- forward

    def began(self, batch: Batch, replica: int, *, is_certain: bool) -> int:
        """Register a lookup of a replica; return the handle by which its backward finds `batch`.

        Raises:
            RuntimeError: too many backwards without a step, or too many `is_certain` lookups without a backward.
        """
        with self._lock:
            is_next = self._open.pop(replica, None) is not None
            self._unanswered += is_certain
            self._unsettled += is_next  # a backward came: the lookup before was for training
            if self._unsettled > MOST_UNSETTLED or self._unanswered > MOST_UNANSWERED:
                self._unsettled = self._unanswered = 0
                raise RuntimeError(
                    f"table {self.table.name!r}: {MOST_UNSETTLED} backwards and no optimizer took their gradients, or "
                    f"{MOST_UNANSWERED} lookups for training and no backward; the tape must watch the table's token "
                    "and the optimizer be given it: layer.trainable_weights holds it, as does model.trainable_weights; "
                    "to look up without training pass training=False or set layer.trainable = False"
                )
            handle = next(self._handles)
            self._batches[handle] = batch
            while len(self._batches) > BATCHES:
                self._batches.popitem(last=False)
            return handle

    # ---- backward

    def push(
        self,
        handle: int,
        order: tuple[int, int],
        ids: IntArray,
        grads: FloatArray,
        *,
        bags: BagGradients | None = None,
    ) -> float:
        """Add the gradients of one lookup; return the number that identifies them in the token's gradient.

        Args:
            handle: of the lookup, see `began`.
            order: (replica, place in the forward order): its place in the order of the sums.
            ids: int64[N].
            grads: float32[N, dim]; with `bags`, the gradients of its bags, float32[B, dim].

        Returns:
            The number of the push; 0 if all `BITS` are in use, when the bit of another push also covers this one; NaN
            if a gradient is not finite.
        """
        with self._lock:
            batch = self._batches.pop(handle, None)
        if batch is None:
            batch = self.table.batch(ids)
        # Outside the lock: replicas push at the same time.
        sums, norm = batch.sum(grads) if bags is None else bags.sum_in(batch, grads)
        push = _Push(order=order, ids=ids, grads=grads, batch=batch, bags=bags, sums=sums, norm=float(norm))
        with self._lock:
            self._unanswered = 0
            group = self._open.get(order[0])
            if group is None:
                group = self._open[order[0]] = _Group(order[0])
                self._groups.append(group)
            bit = self._free_bit()
            if bit is not None:
                group.bits[bit] = [push]
            else:  # the bit of another push, of this backward if possible, covers it
                owner = group if group.bits else next(each for each in reversed(self._groups) if each.bits)
                owner.bits[max(owner.bits)].append(push)
            if not np.isfinite(norm):
                return float("nan")
            return 0.0 if bit is None else float(2 ** (bit + COUNT_BITS) + 1)

    def _free_bit(self) -> int | None:
        """Return a free bit, if needed by forgetting the oldest finished backward; None if all are in use."""
        while not self._free and self._groups[0] not in self._open.values():
            self._free.update(self._groups.pop(0).bits)
        if not self._free:
            return None
        bit = min(self._free)
        self._free.discard(bit)
        return bit

    # ---- the optimizer's step

    def settle(
        self,
        gradients: NDArray[np.float64],
        rule: StepRule,
        lr: float | None,
        *,
        unscale: float = 1.0,
        is_update: bool = True,
        optimizer: int = 0,
    ) -> bool:
        """Accept the gradients that the optimizer got when it assigned the token; with `is_update`, update the table.

        Args:
            gradients: float64[replicas], the token's gradient in each.
            rule: see `StepRule`.
            lr: learning rate of this step; None is the table's own.
            unscale: factor of the gradients, the reciprocal of the loss scale.
            is_update: False while gradients accumulate.
            optimizer: id of the optimizer, 0 for none; gradients that accumulated for another one are forgotten.

        Returns:
            Whether the table was updated.

        Raises:
            ValueError: a gradient is not finite; names the first id. Nothing is changed.
            RuntimeError: a gradient identifies pushes that are not pending.
        """
        with self._lock:
            self._unsettled = 0
            if np.isnan(gradients).any():
                raise ValueError(self._not_finite())
            if optimizer == 0 and not gradients.any():
                return False  # not a step: for example set_weights() assigned the token
            pushes = self._take(gradients)
            if self._accumulates_for != optimizer:
                self._accepted.clear()
                self._accumulates_for = optimizer
            for push in pushes:
                push.scale = unscale
            self._accepted += pushes
            if not is_update:
                return False
            pushes, self._accepted = self._accepted, []
            self._update(pushes, rule, lr)
            self.steps_settled += 1
            return True

    def drop(self) -> None:
        """Forget every gradient, after the table was rewound."""
        with self._lock:
            self._groups.clear()
            self._accepted.clear()
            self._open.clear()
            self._free = set(range(BITS))

    def _take(self, gradients: NDArray[np.float64]) -> list[_Push]:
        """Return the pushes that `gradients` identify, in the order of the sums; they wait no longer."""
        known = {bit: group for group in self._groups for bit in group.bits}
        named: list[int] = []
        for gradient in gradients.tolist():
            if not 0 <= gradient < 2 ** (BITS + COUNT_BITS) or int(gradient) != gradient:
                raise RuntimeError(self._changed(gradient))
            bits = [bit for bit in range(BITS) if int(gradient) >> COUNT_BITS + bit & 1]
            count = int(gradient) % 2**COUNT_BITS
            if len(bits) != count or not known.keys() >= set(bits) or set(bits) & set(named):
                raise RuntimeError(self._changed(gradient))
            named += bits
        taken: list[_Push] = []
        for bit in named:
            taken += known[bit].bits.pop(bit)
        self._free.update(named)
        self._groups = [group for group in self._groups if group.bits]
        self._open.clear()
        return sorted(taken, key=lambda push: push.order)

    def _changed(self, value: float) -> str:
        return (
            f"table {self.table.name!r}: the gradient of its token is {value:g}, which names no gradients of rows that "
            "wait; it cannot be scaled, clipped or used twice: take the token out of what you clip, and clip the rows "
            "by the optimizer's clipnorm= or clipvalue=. (Or concurrent loops look up more than "
            f"{BITS} times in a step; look ids up together instead.)"
        )

    def _not_finite(self) -> str:
        for push in [push for group in reversed(self._groups) for push in group.pushes()]:
            if not np.isfinite(push.norm):
                found = np.argwhere(~np.isfinite(push.sums))
                if len(found):
                    row, column = found[0].tolist()
                    row_id, value = int(push.batch.unique()[row]), float(push.sums[row, column])
                    skips = "keras.optimizers.LossScaleOptimizer"
                    return not_finite(self.table.name, row_id, value, column, skips)
        return f"table {self.table.name!r}: its token's gradient is NaN; nothing was changed"

    def _update(self, pushes: list[_Push], rule: StepRule, lr: float | None) -> None:
        batch, sums, norm, factor = self._summed(pushes)
        self._step(batch, sums, norm, factor / rule.accumulate, rule, lr)

    def _summed(self, pushes: list[_Push]) -> tuple[Any, FloatArray, float, float]:
        """Sum pushes in order; return their batch, float32[U, dim], the norm, and a factor for sums and norm.

        The sums may be the array of a push, which is not used after its step.
        """
        table = self.table
        if len(pushes) == 1:
            # The sums of scaled gradients: a loss scale is a power of two in practice, so the factor is exact.
            return pushes[0].batch, pushes[0].sums, pushes[0].norm, pushes[0].scale
        if pushes:
            return *sum_parts(table, pushes), 1.0
        return table.batch(np.empty(0, np.int64)), np.empty((0, table.dim), np.float32), 0.0, 1.0

    def _step(
        self, batch: Batch, sums: FloatArray, norm: float, factor: float, rule: StepRule, lr: float | None
    ) -> None:
        """Update the table by `sums` times `factor`, clipped."""
        norm *= factor
        if rule.clip_norm is not None and norm > rule.clip_norm:
            factor *= rule.clip_norm / norm
        if factor != 1.0:
            _native.scale(sums, factor)
        if rule.clip_value is not None:
            np.clip(sums, -rule.clip_value, rule.clip_value, out=sums)
        if not np.isfinite(norm):
            raise ValueError(
                f"table {self.table.name!r}: the summed gradients of this step are not finite (norm {norm}); nothing "
                "was changed"
            )
        self._write(batch, sums, lr)

    def _write(self, batch: Batch, sums: FloatArray, lr: float | None) -> None:
        self.table.update_batch(batch, sums, lr=lr)
