"""`TransferTier`: rows stay in RAM; each batch copies its rows to the device and the sums of gradients back.

``device_cache=0`` uses it, for devices without free memory for a cache. The weights of a batch's unique rows are copied
to the device in their storage type. The device sums the gradients of equal ids and the sums are copied back; the table
steps in RAM.

`lookahead` copies the rows of coming batches while the model works. The lookup copies rows again that a step changed in
between: a copy has the number of the last step before it was read, and the tier knows the rows of the last few steps.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import torch
from torch import Tensor

from bunkbed import _native
from bunkbed.adapters.bag_gradients import IntArray
from bunkbed.table.table import Table
from bunkbed.torch.device.base.batches import SentBatch
from bunkbed.torch.device.base.link import Link
from bunkbed.torch.device.rows import DeviceRows

#: Steps whose rows are remembered; an older copy is read again.
_REMEMBERED = 8
_WIDE = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class TransferTier(DeviceRows):
    """Temporary copies of rows on the device, for the current and coming batches.

    Owns no other device memory. One thread trains; other threads may use the table concurrently.

    Args:
        table, anchor: see `DeviceRows`.
    """

    def __init__(self, table: Table, anchor: Callable[[], Tensor]) -> None:
        super().__init__(table, anchor)
        self._lock = threading.RLock()  # guards the three below
        self._steps = 0
        self._changed: deque[tuple[int, _native.Batch]] = deque(maxlen=_REMEMBERED)  # (number of the step, its batch)
        self._forgotten = 0  # copies as of a step up to this one are invalid
        table.put_above(weakref.ref(self))

    # ---- lookups

    def lookup(self, ids: IntArray) -> tuple[Tensor, SentBatch]:
        """Return float32[N, dim] rows of int64[N] ids on the device, and their batch."""
        rows, batch = self.lookup_rows(ids)
        return rows.index_select(0, batch.inverse()), batch

    def lookup_rows(self, ids: IntArray) -> tuple[Tensor, SentBatch]:
        """Look each row up once: float32[U, dim] in the order of the batch."""
        batch = self._batch(ids)
        assert isinstance(batch, SentBatch)
        self._send_what_changed(batch)
        self.link.wait(batch.ready, batch.rows, batch.arrays)
        rows = batch.rows
        batch.let_go()
        return rows, batch

    def evaluate(self, batch: SentBatch) -> Tensor:
        """Return float32[U, dim] rows of a batch on the device; the cache in RAM stays as it is."""
        return self._send(batch.unique(), touch=False)

    def deduped(self, ids: IntArray) -> SentBatch:
        """See `DeviceRows`."""
        batch = cast("_native.Batch", self.table.batch(ids))
        device = self._anchor().device
        if self.link.device != device:
            self.link = Link(device, self.delay)
        return SentBatch(batch, ids.size, self)

    def _send(self, ids: IntArray, *, touch: bool) -> Tensor:
        native, dtype, shape = self.table.core, self.table.dtype, (ids.size, self.table.dim)
        rows = _native.empty_rows(*shape)
        native.lookup(ids, touch, rows)
        if dtype not in _WIDE:
            return self.link.up(rows)
        halves = np.empty(shape, np.uint16)
        _native.narrow(rows.reshape(-1), self.table.spec.dtype, halves.reshape(-1))  # exact
        return self.link.up(halves.view(np.int16)).view(_WIDE[dtype]).float()

    def _send_what_changed(self, batch: SentBatch) -> None:
        """Copy the batch's rows, or those that changed since the last copy, to the device."""
        with self._lock:
            first = self._changed[0][0] if self._changed else self._steps
            is_known = (
                batch.is_here
                and batch.rows.device == self.link.device
                and batch.as_of > self._forgotten
                and batch.as_of >= first - 1
            )
            later = [stepped for number, stepped in self._changed if number > batch.as_of]
        if not is_known:
            self._bring(batch)
            return
        is_old = np.zeros(len(batch), np.bool_)
        for stepped in later:
            is_old |= batch.batch.rows_in(stepped)
        if is_old.any():
            self.link.wait(batch.ready, batch.rows)
            again = self._send(batch.unique()[is_old], touch=False)  # the first copy touched them
            batch.rows.index_copy_(0, self.link.up(np.flatnonzero(is_old)), again)

    def _bring(self, batch: SentBatch) -> None:
        with self._lock:
            as_of = self._steps
        numbers = batch.packed()
        with self.link.copying():
            batch.unpack(self.link.send(numbers))
            batch.rows = self._send(batch.unique(), touch=True)
        batch.ready = self.link.ready()
        batch.as_of = as_of

    # ---- for `lookahead`

    def place(self, batch: SentBatch, number: int = 0) -> bool:
        """Copy the rows of a coming batch to the device."""
        self._bring(batch)
        return True

    def release(self, batches: list[SentBatch]) -> None:
        """Drop the copies of batches."""
        for batch in batches:
            batch.let_go()

    def expect(self, batch: SentBatch) -> int:
        """Return 0: only the table's own window plans."""
        return 0

    def forget(self, number: int) -> None:
        """Do nothing, as `expect` enters no batch."""

    def missing(self, batch: SentBatch) -> IntArray:
        """Return the rows of a batch that come from the table: all, int64[U]."""
        return batch.unique()

    # ---- steps

    def step(self, batch: SentBatch, sums: Tensor, *, lr: float, step: int | None) -> None:
        """See `bunkbed.torch.base.gradients.Rows`."""
        values = np.ascontiguousarray(self.link.down(sums).numpy())
        with self._lock:
            self.table.update_batch(batch.batch, values, lr=lr, step=step)
            self._steps += 1
            self._changed.append((self._steps, batch.batch))

    # ---- called by the table: see `bunkbed.table.core.Above`

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """See `Above`; the table always has the newest rows."""
        yield

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """See `Above`; copies made before its end are invalid afterwards."""
        with self._lock:
            try:
                yield
            finally:
                self._steps += 1
                self._forgotten = self._steps
                self._changed.clear()

    def table_closed(self) -> None:
        """See `Above`."""
        self.present.clear()

    def stats(self) -> dict[str, int | float]:
        """Return counters since the first lookup, for `Table.stats`."""
        return self.counters()
