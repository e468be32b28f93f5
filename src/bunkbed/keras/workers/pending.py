"""Gradients of a table of several workers between backward and step: workers exchange those of each occurrence."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bunkbed.adapters.gradient_parts import GradientPart, sum_parts
from bunkbed.files.sharding import shards_of
from bunkbed.keras.base.pending import Pending, StepRule
from bunkbed.keras.workers.group import Workers
from bunkbed.keras.workers.messages import Body, FloatArray, IntArray
from bunkbed.table.core import Batch
from bunkbed.table.table import Table


class WorkersPending(Pending):
    """`Pending` whose step has two halves, with an exchange between them.

    `offer` returns the gradient of each occurrence of an id in this worker's own batch; `conclude` adds those of all
    workers one by one in the order (accumulated step, worker, lookup, position in the batch). That is one process's
    order of additions, which sums of each worker's own batch would not give. Every worker makes the same sums, and so
    the same norm, and a step has the same bits on each. With shards, each worker then writes only its own rows, and
    also counts the step. While gradients accumulate, every worker keeps the sums of all.
    """

    def __init__(self, table: Table, workers: Workers) -> None:
        super().__init__(table)
        self._workers = workers
        self._sums: list[GradientPart] = []  # of the steps that accumulated: none or one
        self._steps = 0  # that accumulated

    @property
    def accumulates(self) -> bool:
        """Whether gradients were accepted for an update that is not complete."""
        return bool(self._sums)

    def offer(
        self, gradients: NDArray[np.float64], *, unscale: float, optimizer: int
    ) -> tuple[IntArray, FloatArray, int]:
        """Return this worker's part of a step; see `Pending.settle` for the arguments.

        `conclude` accepts the gradients of all workers. It is not called if another worker fails.

        Returns:
            int64[N] ids, as often as they occur, and float32[N, dim] gradients of the occurrences, times `unscale`;
            the number of steps that accumulated, which must be equal on all workers.
        """
        with self._lock:
            self._unsettled = 0
            if np.isnan(gradients).any():
                raise ValueError(self._not_finite())
            steps = self._steps if self._accumulates_for == optimizer else 0
            pushes = self._take(gradients)
            for push in pushes:
                push.scale = unscale
            ids = np.concatenate([np.empty(0, np.int64), *(push.ids for push in pushes)])
            none = np.empty((0, self.table.dim), np.float32)
            return ids, np.concatenate([none, *(push.scaled() for push in pushes)]), steps

    def conclude(
        self, offered: list[Body], rule: StepRule, lr: float | None, *, is_update: bool, optimizer: int
    ) -> None:
        """Accept the gradients of all workers; with `is_update`, update the table. See `Pending.settle`."""
        with self._lock:
            if self._accumulates_for != optimizer:
                self._forget()
                self._accumulates_for = optimizer
            parts = [GradientPart(order=worker, ids=each.ids, grads=each.rows) for worker, each in enumerate(offered)]
            batch, sums, norm = sum_parts(self.table, [*self._sums, *parts])
            if not is_update:
                self._sums = [GradientPart(order=None, ids=batch.unique(), grads=sums)]
                self._steps += 1
                return
            self._forget()
            self._step(batch, sums, norm, 1.0 / rule.accumulate, rule, lr)
            self.steps_settled += 1

    def drop(self) -> None:
        """Forget every gradient, after the table was rewound."""
        with self._lock:
            super().drop()
            self._forget()

    def _forget(self) -> None:
        self._sums, self._steps = [], 0

    def _write(self, batch: Batch, sums: FloatArray, lr: float | None) -> None:
        if not self._workers.is_sharded:
            super()._write(batch, sums, lr)
            return
        ids = batch.unique()
        own = shards_of(ids, self._workers.count) == self._workers.index
        part = self.table.batch(ids[own])
        super()._write(part, part.sum(sums[own])[0], lr)
