"""Gradients of a table of several workers between backward and step: workers exchange sums, and each applies all."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bunkbed import _native
from bunkbed.files.sharding import shards_of
from bunkbed.keras.base.pending import Pending, StepRule
from bunkbed.keras.workers.group import Workers
from bunkbed.keras.workers.messages import Body, FloatArray, IntArray
from bunkbed.table.core import Batch
from bunkbed.table.table import Table


class WorkersPending(Pending):
    """`Pending` whose step has two halves, with an exchange between them.

    `offer` returns the sums of this worker's own batch for each id; `conclude` adds the sums of all workers for each
    id, in the order of the workers' numbers. So all apply the same sums, and a step has the same bits on each worker.
    With shards, each worker then writes only its own rows, and also counts the step.
    """

    def __init__(self, table: Table, workers: Workers) -> None:
        super().__init__(table)
        self._workers = workers
        self._offered: tuple[list[Any], int] = ([], 0)

    def offer(
        self, gradients: NDArray[np.float64], *, unscale: float, is_update: bool, optimizer: int
    ) -> tuple[IntArray, FloatArray]:
        """Return this worker's part: int64[U], each id once, and float32[U, dim] sums; see `Pending.settle`.

        `conclude` accepts the gradients. It is not called if another worker fails.
        """
        with self._lock:
            self._unsettled = 0
            if np.isnan(gradients).any():
                raise ValueError(self._not_finite())
            pushes = self._take(gradients)
            for push in pushes:
                push.scale = unscale
            accumulated = self._accepted if self._accumulates_for == optimizer else []
            self._offered = ([*accumulated, *pushes], optimizer)
            if not is_update:
                return np.empty(0, np.int64), np.empty((0, self.table.dim), np.float32)
            batch, sums, _, factor = self._summed(list(self._offered[0]))
            if factor != 1.0:
                _native.scale(sums, factor)
            return batch.unique(), sums

    def conclude(self, offered: list[Body], rule: StepRule, lr: float | None, *, is_update: bool) -> None:
        """Accept this worker's gradients; with `is_update`, update the table by the sums of all workers."""
        with self._lock:
            accepted, self._accumulates_for = self._offered
            self._offered = ([], 0)
            self._accepted = [] if is_update else accepted
            if not is_update:
                return
            batch = self.table.batch(np.concatenate([each.ids for each in offered]))
            sums, norm = batch.sum(np.concatenate([each.rows for each in offered]))
            self._step(batch, sums, float(norm), 1.0 / rule.accumulate, rule, lr)
            self.steps_settled += 1

    def drop(self) -> None:
        """Forget every gradient, after the table was rewound."""
        with self._lock:
            super().drop()
            self._offered = ([], 0)

    def _write(self, batch: Batch, sums: FloatArray, lr: float | None) -> None:
        if not self._workers.is_sharded:
            super()._write(batch, sums, lr)
            return
        ids = batch.unique()
        own = shards_of(ids, self._workers.count) == self._workers.index
        part = self.table.batch(ids[own])
        super()._write(part, part.sum(sums[own])[0], lr)
