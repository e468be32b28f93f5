"""Rewrite the rows of a table into a table with another dtype or optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from bunkbed.core import optim as _optim
from bunkbed.core.arguments import Ids
from bunkbed.core.types import Array
from bunkbed.table.definition import Definition
from bunkbed.table.table import Table

_CHUNK_BYTES = 8 << 20
_IDS_AT_ONCE = 1 << 20  # of which counts are moved


@dataclass(frozen=True)
class Rewritten:
    """The number of the commit that was read, in the source, and the number of rows written."""

    epoch: int
    rows: int


def rewritten_definition(table: Table, dtype: str | None, optimizer: _optim.Optimizer | None) -> Definition:
    """Return the definition of the copy of `table`.

    Raises:
        ValueError: dtype and optimizer state would stay the same.
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
    return replace(Definition.of(table), optimizer=definition, dtype=table.dtype if dtype is None else dtype)


def rewrite_rows(
    table: Table, copied: Table, progress: Callable[[int, int], None] | None, *, scale: float = 1.0
) -> int:
    """Copy every stored row, in chunks; return how many. The copy has the table's step number.

    Slots that both tables have are copied; the others have their initial values. Weights are multiplied by `scale`.
    """
    slots = ["weight", *(slot for slot in table.slots if slot in copied.slots)]
    into = [copied.field(slot) for slot in slots] + copied.usage_fields
    chunk = max(1, min(65_536, _CHUNK_BYTES // (4 * table.dim)))
    total, done = len(table), 0
    for ids, every in table.scan_fields([table.field(slot) for slot in slots] + table.usage_fields, chunk):
        if scale != 1.0:
            every[0] = every[0] * np.float32(scale)
        for (field, _), values in zip(into, every, strict=True):
            copied.core.set(ids, field, values)
        done += len(ids)
        if progress is not None:
            progress(done, total)
    set_time(copied, table)
    move_counts(copied, table)
    return done


def forget_counts(table: Table) -> None:
    """Take the counts from all ids of a table."""
    parts = _parts(table)
    for part in range(parts):
        table.core.erase(table.core.counted(part, parts)[0])


def move_counts(copied: Table, table: Table, owns: Callable[[Ids], Array] | None = None) -> None:
    """Give a table the counts of the ids that steps of another table have named and not stored.

    Args:
        copied: a table without counts of these ids.
        table: the other table.
        owns: returns which of some ids are to have their counts, bool[n]; default: all.
    """
    parts = _parts(table)
    for part in range(parts):
        ids, counts, times, since = table.core.counted(part, parts)
        if owns is not None:
            mine = owns(ids)
            ids, counts, times = ids[mine], counts[mine], times[mine]
        if ids.size or since:
            copied.core.set_counts(ids, counts, times)
            copied.core.forget_counts(since)


def _parts(table: Table) -> int:
    return 1 + int(table.core.stats()["counted_ids"]) // _IDS_AT_ONCE


def set_time(copied: Table, table: Table) -> None:
    """Give a table the step number and the clock of another."""
    if table.retention.clock == "event" and table.clock >= 0:
        copied.clock = table.clock
    if table.step > copied.step:  # an empty step sets the step number, which bias correction depends on
        copied.update(np.empty(0, np.int64), np.empty((0, copied.dim), np.float32), step=table.step)
