"""All rows of a table in RAM only, as arrays: a checkpoint has them, as the table ends with its process.

Untouched rows are a function of (seed, id), so `Facts` of the table belong to them.

The arrays are ``ids`` int64[n], ascending, and for each slot float32[n, length of the slot]. Values of 16-bit slots
are exact in float32, so rows that go back are equal to the bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bunkbed import _native
from bunkbed.core.init import Initializer
from bunkbed.core.init import from_native as initializer_from_native
from bunkbed.core.optim import Optimizer
from bunkbed.core.optim import from_native as optimizer_from_native
from bunkbed.core.types import Json
from bunkbed.table.opening import create
from bunkbed.table.table import Table

Array: TypeAlias = NDArray[Any]
Rows: TypeAlias = Mapping[str, Array]

#: Most bytes of these arrays in one checkpoint. A checkpoint of a larger table refers to a copy in its process.
MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Facts:
    """What decides the untouched rows of a table, the rule that trained its rows, and how often."""

    step: int
    optimizer: Optimizer
    init: Initializer
    seed: int

    @classmethod
    def of(cls, table: Table) -> Facts:
        """Return those of a table."""
        return cls(table.step, table.optimizer, table.init, table.seed)

    def fields(self) -> Json:
        """Return them as JSON."""
        init = list(self.init.native())
        return {"step": self.step, "optimizer": self.optimizer.native(), "init": init, "seed": self.seed}

    @classmethod
    def from_fields(cls, fields: Json) -> Facts:
        """Return those of `fields`; ValueError, KeyError, TypeError for others."""
        init = initializer_from_native(*fields["init"])
        return cls(int(fields["step"]), optimizer_from_native(fields["optimizer"]), init, int(fields["seed"]))


def is_in_ram(table: Table) -> bool:
    """Return whether a table is in the RAM of this process alone."""
    return table.path is None and table.run is None and isinstance(table.core, _native.Table)


def bytes_of(table: Table) -> int:
    """Return the size of the arrays of `rows_of`."""
    return len(table) * (8 + 4 * sum(table.field(slot)[1] for slot in ("weight", *table.slots)))


def rows_of(table: Table, slots: Sequence[str] | None = None) -> dict[str, Array]:
    """Return all stored rows of some slots, as copies; None: of all slots."""
    empty = no_rows(table)
    slots = [name for name in empty if name != "ids"] if slots is None else slots
    parts = list(table.scan_slots(slots, 65_536))
    ids = np.concatenate([empty["ids"], *(part[0] for part in parts)])
    order = np.argsort(ids)
    values = {
        slot: np.concatenate([empty[slot], *(part[1][place] for part in parts)])[order]
        for place, slot in enumerate(slots)
    }
    return {"ids": ids[order], **values}


def no_rows(table: Table) -> dict[str, Array]:
    """Return what `rows_of` returns for a table without stored rows."""
    empty = {slot: np.empty((0, table.field(slot)[1]), np.float32) for slot in ("weight", *table.slots)}
    return {"ids": np.empty(0, np.int64), **empty}


def saved(table: Table) -> tuple[Rows, Json] | None:
    """Return the rows and `Facts` that a checkpoint has of a table in RAM; None if it only refers to the table.

    Warns of a table in RAM whose rows a checkpoint does not have.
    """
    if table.path is not None or table.run is not None:
        return None
    if is_in_ram(table) and bytes_of(table) <= MOST_BYTES:
        return rows_of(table), Facts.of(table).fields()
    size = f"{len(table):,} rows" if is_in_ram(table) else "rows of several processes"
    warnings.warn(
        f"table {table.name!r} is in RAM only, and its {size} are not saved (they are up to {MOST_BYTES >> 20} MiB): "
        "what is saved refers to a copy in this process; give the layer a path= to keep rows in files",
        stacklevel=2,
    )
    return None


def why_not(table: Table, rows: Rows, facts: Facts) -> str:
    """Return why rows that were saved do not fit a table; empty where they do."""
    if type(facts.optimizer) is not type(table.optimizer):
        return f"its rows have the state of {table.optimizer!r}, those that were saved that of {facts.optimizer!r}"
    for slot in ("weight", *table.slots):
        shape = (len(rows["ids"]), table.field(slot)[1])
        if slot not in rows or rows[slot].shape != shape:
            found = list(rows[slot].shape) if slot in rows else "nothing"
            return f"the saved {slot!r} must be float32{list(shape)}, got {found}"
    largest = int(rows["ids"].max(initial=-1))
    if table.num_rows is not None and largest >= table.num_rows:
        return f"a row with id {largest} was saved, and the table has ids in [0, {table.num_rows})"
    if is_in_ram(table):
        return ""
    if table.step or table.epoch:
        return "it was trained or committed, so rows in its files would mix with those that were saved; give a new path"
    if is_other(table, facts):
        return (
            f"its untouched rows have init={table.init!r}, seed={table.seed}, those that were saved {facts.init!r} and "
            f"{facts.seed}; give the layer init={facts.init!r}, seed={facts.seed}"
        )
    return ""


def is_other(table: Table, facts: Facts) -> bool:
    """Return whether untouched rows of a table differ from those of `facts`."""
    return (facts.init, facts.seed) != (table.init, table.seed)


def with_rows(table: Table, rows: Rows, facts: Facts) -> Table:
    """Return the table with these rows; another one in RAM if its untouched rows would differ.

    Rows of the table that are not among them are untouched again.

    Requires: `why_not` has no reason.
    """
    if is_other(table, facts):
        return _made(table, rows, facts)
    _set(table, rows, facts.step)
    return table


def copy_of(table: Table) -> Table:
    """Return a new table in RAM with the rows, state and step of one in RAM."""
    return _made(table, rows_of(table), Facts.of(table))


def _set(table: Table, rows: Rows, step: int) -> None:
    if len(table) or table.step:
        table.rewind(0)
    for slot in ("weight", *table.slots):
        table.set(rows["ids"], rows[slot], slot=slot)
    if step:
        table.core.update(np.empty(0, np.int64), np.empty((0, table.dim), np.float32), 0.0, step)


def _made(table: Table, rows: Rows, facts: Facts) -> Table:
    made = create(
        None,
        dim=table.dim,
        num_rows=table.num_rows,
        optimizer=table.optimizer,
        init=facts.init,
        seed=facts.seed,
        dtype=table.dtype,
        ram=table.ram_bytes or None,
    )
    _set(made, rows, facts.step)
    return made
