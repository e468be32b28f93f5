"""All rows of a table in RAM only, as arrays: a checkpoint has them, as the table ends with its process.

Untouched rows are a function of (seed, id), so `Facts` of the table belong to them.

The arrays are ``ids`` int64[n], ascending, and for each slot float32[n, length of the slot]. Values of 16-bit slots
are exact in float32, so rows that go back are equal to the bit. Where the table has rules by which rows go, ``usage``
int64[n, 2] has the time of the last step that named each row, and the number of these steps. Where ``admit=`` counts
steps, ``counts`` int64[m, 3] has the ids that are named and not stored, their counts and the times of the last steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bunkbed import _native
from bunkbed.core.arguments import describe
from bunkbed.core.init import Initializer
from bunkbed.core.init import from_native as initializer_from_native
from bunkbed.core.optim import Optimizer
from bunkbed.core.optim import from_native as optimizer_from_native
from bunkbed.core.types import Json
from bunkbed.table.definition import Definition
from bunkbed.table.opening import create
from bunkbed.table.sweeps import as_usage, from_usage
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
    clock: int = -1

    @classmethod
    def of(cls, table: Table) -> Facts:
        """Return those of a table."""
        clock = table.clock if table.retention.clock == "event" else -1
        return cls(table.step, table.optimizer, table.init, table.seed, clock)

    def fields(self) -> Json:
        """Return them as JSON."""
        init = list(self.init.native())
        fields = {"step": self.step, "optimizer": self.optimizer.native(), "init": init, "seed": self.seed}
        return fields if self.clock < 0 else {**fields, "clock": self.clock}

    @classmethod
    def from_fields(cls, fields: Json) -> Facts:
        """Return those of `fields`; ValueError, KeyError, TypeError for others."""
        init = initializer_from_native(*fields["init"])
        optimizer, clock = optimizer_from_native(fields["optimizer"]), int(fields.get("clock", -1))
        return cls(int(fields["step"]), optimizer, init, int(fields["seed"]), clock)


def is_in_ram(table: Table) -> bool:
    """Return whether a table is in the RAM of this process alone."""
    return table.path is None and table.run is None and isinstance(table.core, _native.Table)


def bytes_of(table: Table) -> int:
    """Return the size of the arrays of `rows_of`."""
    rows = len(table) * (8 + 4 * sum(table.field(slot)[1] for slot in ("weight", *table.slots)))
    return rows + 24 * int(table.core.stats()["counted_ids"])


def rows_of(table: Table, slots: Sequence[str] | None = None) -> dict[str, Array]:
    """Return all stored rows of some slots, with their usage, as copies; None: of all slots."""
    empty, with_usage, with_counts = no_rows(table), table.usage_fields, slots is None
    slots = ("weight", *table.slots) if slots is None else slots
    parts = list(table.scan_fields([table.field(slot) for slot in slots] + with_usage, 65_536))
    ids = np.concatenate([empty["ids"], *(part[0] for part in parts)])
    order = np.argsort(ids)
    values = {
        slot: np.concatenate([empty[slot], *(part[1][place] for part in parts)])[order]
        for place, slot in enumerate(slots)
    }
    if with_usage:
        usage = [np.column_stack(from_usage(part[1][-1])) for part in parts]
        values["usage"] = np.concatenate([empty["usage"], *usage])[order]
    if "counts" in empty and with_counts:
        counted = np.column_stack(table.core.counted(0, 1)[:3])
        values["counts"] = counted[np.argsort(counted[:, 0])]
    return {"ids": ids[order], **values}


def no_rows(table: Table) -> dict[str, Array]:
    """Return what `rows_of` returns for a table without stored rows."""
    empty = {slot: np.empty((0, table.field(slot)[1]), np.float32) for slot in ("weight", *table.slots)}
    usage = {"usage": np.empty((0, 2), np.int64)} if table.usage_fields else {}
    found: dict[str, Array] = {"ids": np.empty(0, np.int64), **empty, **usage}
    if table.retention.counts_steps:
        found["counts"] = np.empty((0, 3), np.int64)
    return found


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
    if "usage" in rows and (rows["usage"].shape != (len(rows["ids"]), 2) or rows["usage"].dtype != np.int64):
        return f"the saved 'usage' must be int64[{len(rows['ids'])}, 2], got {describe(rows['usage'])}"
    if "counts" in rows and (rows["counts"].shape[1:] != (3,) or rows["counts"].dtype != np.int64):
        return f"the saved 'counts' must be int64[..., 3], got {describe(rows['counts'])}"
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
    _set(table, rows, facts)
    return table


def copy_of(table: Table) -> Table:
    """Return a new table in RAM with the rows, state and step of one in RAM."""
    return _made(table, rows_of(table), Facts.of(table))


def _set(table: Table, rows: Rows, facts: Facts) -> None:
    has_clock = table.retention.clock == "event"
    if len(table) or table.step or (has_clock and table.clock > facts.clock):
        table.rewind(0)
    if has_clock and facts.clock >= 0:
        table.clock = facts.clock
    if facts.step:
        table.core.update(np.empty(0, np.int64), np.empty((0, table.dim), np.float32), 0.0, facts.step)
    for slot in ("weight", *table.slots):
        table.put(rows["ids"], np.ascontiguousarray(rows[slot], np.float32), table.field(slot)[0])
    for field, _ in table.usage_fields if "usage" in rows else []:
        table.put(rows["ids"], as_usage(*rows["usage"].T), field)
    if "counts" in rows:
        table.core.set_counts(*(np.ascontiguousarray(column) for column in rows["counts"].T))


def _made(table: Table, rows: Rows, facts: Facts) -> Table:
    definition = replace(Definition.of(table), init=facts.init, seed=facts.seed)
    made = create(None, ram=table.ram_bytes or None, **definition.arguments())
    _set(made, rows, facts)
    return made
