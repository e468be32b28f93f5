"""Rows of one table written into another of a different dtype or optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bunkbed.core import optim as _optim
from bunkbed.table.table import Table

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Rewritten:
    """The commit that was read, by its number in the source, and how many rows were written."""

    epoch: int
    rows: int


def rewritten_spec(table: Table, dtype: str | None, optimizer: _optim.Optimizer | None) -> dict[str, Any]:
    """Arguments of `bunkbed.create` for the copy of `table`.

    Raises:
        ValueError: nothing about the rows would change.
    """
    definition = table.optimizer if optimizer is None else optimizer
    same_state = type(definition) is type(table.optimizer) and (
        getattr(definition, "state_dtype", None) == getattr(table.optimizer, "state_dtype", None)
    )
    if same_state and dtype in (None, table.dtype):
        raise ValueError(
            f"table '{table.name}' has {table.dtype} rows and {type(definition).__name__} already; leave dtype= and "
            "optimizer= out to copy it as it is (its hyperparameters can change when it is opened)"
        )
    return {
        "dim": table.dim,
        "num_rows": table.num_rows,
        "optimizer": definition,
        "init": table.init,
        "seed": table.seed,
        "dtype": table.dtype if dtype is None else dtype,
    }


def rewrite_rows(table: Table, copied: Table, progress: Callable[[int, int], None] | None) -> int:
    """Every stored row, in memory of a few chunks; returns how many. The optimizer's step goes on where it was.

    Slots that both have at the same length are carried over; the others have their initial values.
    """
    none = np.empty(0, np.int64)
    shared = [slot for slot in table.slots if slot in copied.slots]
    chunk = max(256, min(65_536, _CHUNK_BYTES // (4 * table.dim)))
    total, done = len(table), 0
    scans = {slot: table.scan(slot, chunk) for slot in ("weight", *shared)}
    for parts in zip(*scans.values(), strict=True):
        ids = parts[0][0]
        for slot, (_, values) in zip(scans, parts, strict=True):
            copied.set(ids, values, slot)
        done += len(ids)
        if progress is not None:
            progress(done, total)
    if table.step > 0:  # a step without rows, for its number only: bias correction goes on where it was
        copied.update(none, np.empty((0, copied.dim), np.float32), step=table.step)
    return done
