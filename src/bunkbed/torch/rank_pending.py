"""Row gradients of a table that several ranks share, between backward and step.

The protocol of the anchor is that of `bunkbed.torch.pending`, with three differences:

1. When a backward call has reached every lookup, the anchor's hook only keeps this rank's parts and sets
   ``anchor.grad`` to None, so that `DistributedDataParallel` reduces zeros. The exchange follows at the end of the
   backward call, after DDP's own work, for all tables together.
2. Each rank sends the gradient of every occurrence, times 1 / W, to the row's owner. The owner adds them in the order
   (round, rank, forward order, backward call, position), which is that of one process that runs the ranks' batches one
   after another. A *round* begins with a backward call over lookups that were made after the backward call before. A
   second backward call over one forward belongs to the round, so the owner keeps the parts of a round apart.
3. ``anchor.grad`` is the norm over the rows of all ranks, with the same bits on each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from bunkbed import _native
from bunkbed.adapters.gradient_parts import not_finite
from bunkbed.core.arguments import Ids
from bunkbed.core.budget import Budget
from bunkbed.table.table import Table
from bunkbed.torch.base.gradients import HostRows, Part
from bunkbed.torch.base.types import Device
from bunkbed.torch.pending import Pending, grad_dtype, rounded
from bunkbed.torch.ranks.exchange import Received
from bunkbed.torch.ranks.group import RanksError
from bunkbed.torch.ranks.plan import empty_rows
from bunkbed.torch.ranks.references import RankReferences
from bunkbed.torch.ranks.table import DistributedTable


class RankPending(Pending):
    """The gradients of a `DistributedTable` that wait for a step, on the rank that owns their rows."""

    def __init__(
        self, table: DistributedTable, device: Device = None, device_cache: int | str | Budget | None = None
    ) -> None:
        if device_cache is not None:
            raise ValueError(
                f"table {table.name!r}: device_cache= is for a table of one process; leave it out, or give "
                'placement="local"'
            )
        super().__init__(table, device)
        self.factor = 1.0 if table.sums_gradients else 1.0 / table.ranks.world
        self._mark = 0  # the place in the forward order of the first lookup after the last backward call
        self._calls = 0  # backward calls that were added
        self._bad = ""
        self._sums_are_finite = True

    def use(self, table: DistributedTable) -> None:  # type: ignore[override]  # no other is given
        """See `Pending.use`."""
        super().use(table)
        self.shared = table
        self.rows = HostRows(table.local)
        self.steps_joined = table.has_one_core
        self.core = table.local.plain_core
        self._rows = self.rank_rows = table.core
        self._rows.exchange.join_gradients(self._rows, self)

    def _new_references(self, table: Table) -> RankReferences:
        assert isinstance(table, DistributedTable)
        return RankReferences(table)

    def require_group(self) -> None:
        """See `Pending.require_group`: the table has one."""

    # ---- backward, on the rank that has the gradients

    def accept(self, anchor: Tensor) -> None:
        """Keep the parts of a backward call that has reached all its lookups; see the module."""
        task = torch._C._current_graph_task_id()
        new = sorted((part for part in self._arrived if part.task == task), key=lambda part: part.order)
        self._arrived = [part for part in self._arrived if part.task != task]
        self._rows.exchange.arrive(self._rows.number, task, new)
        anchor.grad = None

    def prepare(self) -> None:
        """See `bunkbed.torch.ranks.exchange.Gradients`."""
        self.reconcile()

    def starts_round(self, parts: Sequence[Part]) -> bool:
        """See `Gradients`."""
        return bool(parts[0].order >= self._mark)

    def pending(self) -> tuple[float, ...]:
        """See `Gradients`."""
        return (float(self._calls), self._norm) if self._parts else ()

    def mark(self) -> None:
        """See `Gradients`."""
        self._mark = next(self.order)

    def drop(self) -> None:
        """Forget every pending gradient."""
        super().drop()
        self._bad = ""

    # ---- backward, on the owner

    def add(self, received: Sequence[Received]) -> Ids:
        """See `Gradients`."""
        starts = {one.rank: one.starts_round for one in received}
        if len(set(starts.values())) > 1:
            ranks = ", ".join(str(rank) for rank, is_new in starts.items() if is_new)
            raise RanksError(
                f"table {self.name!r}: the ranks' backward calls differ: on rank {ranks} it belongs to a new forward, "
                "on the others to an earlier one"
            )
        self._calls += 1
        if self._parts and all(starts.values()):
            ids = self.rows.unique(self.batch)
            self._parts = [Part(order=(-1, -1, -1), ids=ids, grads=self.sums)]
        # A copy: the next exchange overwrites what was received.
        grads = empty_rows(sum(len(one.ids) for one in received), self.table.dim)
        at = 0
        for one in received:
            own = grads[at : at + len(one.ids)]
            own[...] = one.grads
            at += len(one.ids)
            self._parts.append(Part(order=(one.rank, one.order, self._calls), ids=one.ids.copy(), grads=own))
        is_first = len(self._parts) == len(received)
        if not is_first:
            self._parts.sort(key=lambda part: part.order)
            scaled = [part.scaled() for part in self._parts]
            grads = np.concatenate(scaled, out=empty_rows(sum(map(len, scaled)), self.table.dim))
        self.batch = self.shared.local.batch(np.concatenate([part.ids for part in self._parts]))
        self.sums, squares = self.batch.sum_squares(grads)
        self._sums_are_finite = math.isfinite(_native.norm_of(squares[None]))
        self._rows.check_change(self.batch, is_step=True)
        exact: Ids = squares
        return exact

    def first_bad(self) -> str:
        """See `Gradients`."""
        if self._sums_are_finite:
            return ""
        row, column, value = self.rows.first_bad(self.sums)
        row_id = int(self.rows.unique(self.batch)[row])
        return not_finite(self.name, row_id, value, column, "torch.amp.GradScaler")

    def finish(self, norm: float, bad: str) -> None:
        """See `Gradients`."""
        self._bad = bad
        self._is_finite = math.isfinite(norm)
        self._norm = rounded(norm, grad_dtype(self.anchor.device))
        self.restore()

    def restore(self) -> None:
        """See `Gradients`."""
        if not self._parts:
            return
        value = self._norm if self._norm != 0.0 else -0.0
        dtype = grad_dtype(self.anchor.device)
        self.anchor.grad = self._written = torch.tensor([value], dtype=dtype, device=self.anchor.device)

    # ---- step

    def take_nothing(self) -> bool:
        """Return False: here zeros are no step, as ranks take them for the gradients of other ranks."""
        return False

    def require_finite(self) -> None:
        """Raise ValueError with the first id of any rank whose gradient is not finite."""
        if self._bad:
            raise ValueError(self._bad)
        super().require_finite()

    def stepping(self, lr: float) -> AbstractContextManager[None]:
        """See `Pending.stepping`."""
        return self._rows.changing(lr, self._norm)
