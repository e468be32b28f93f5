"""`suggest_blocks`: the number of blocks whose rows fit in a budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from bunkbed import _native
from bunkbed.core.budget import format_bytes, parse_bytes
from bunkbed.order.cells import CELLS_PER_BLOCK, MAX_CELLS
from bunkbed.sharded.table import ShardedTable
from bunkbed.table.table import Table

_READ_UNIT = 4096
# The part of the budget that the ids of the coming batches may take: `bunkbed.planning` uses the same.
_WINDOW = 0.1


def suggest_blocks(tables: Sequence[Table], ram: float | str = "1GiB") -> int:
    """Return the least number of blocks of a `BlockOrder` whose rows fit in a budget.

    Computes the RAM that the tables need to hold one block of rows each, and the next block of the table where it is
    largest, which is read while the present pair of blocks is trained. Counts what the core counts: frames, directory,
    buffers; and a tenth of the budget for the ids of coming batches. Blocks differ in size, because ids are divided by
    a hash: four standard deviations are added to the mean size. Tables in RAM only (``path=None``) count in full.

    More blocks than needed cost more reads per epoch: with P blocks of each of two columns an epoch loads the rows of
    the outer column once, and those of the inner column about P times.

    Args:
        tables: the table of each column. A table is listed once for each column with ids of it: twice for the heads and
            tails of a graph.
        ram: the budget of all tables together, in bytes or as ``"2GiB"``. Several tables share it as a `Budget`.

    Returns:
        The number of blocks, for each column. 1: all rows fit, so that any order of samples does.

    Raises:
        TypeError: `tables` has something that is not a `Table`; `ram` is not a size.
        ValueError: no number of blocks fits (the message says how much RAM is needed), `tables` is empty, or a table
            without `num_rows` stores no rows, so that its size is unknown.

    >>> import bunkbed as bb, tempfile
    >>> path = tempfile.mkdtemp() + "/item"
    >>> with bb.create(path, dim=64, num_rows=1_000_000, ram="64MiB") as table:  # 833 MiB when all rows are stored
    ...     25 < suggest_blocks([table], ram="64MiB") < 50, suggest_blocks([table], ram="1GiB")
    (True, 1)
    """
    if isinstance(tables, Table) or not all(isinstance(table, Table) for table in tables):
        raise TypeError(f"suggest_blocks: tables must be a list of tables, got {tables!r}")
    if not tables:
        raise ValueError("suggest_blocks: tables is empty; give the table of each column")
    budget = parse_bytes(ram)
    parts = [_Part.of(table, columns) for table, columns in Counter(tables).items()]
    if sum(part.ram(part.rows) for part in parts) <= budget:
        return 1

    def needed(blocks: int) -> int:
        resident = [part.ram(part.resident(blocks)) for part in parts]
        staged = [part.ram(part.resident(blocks, 1)) for part in parts]
        total = sum(resident) + max(more - one for one, more in zip(resident, staged, strict=True))
        return math.ceil(total / (1 - _WINDOW))

    most = min([MAX_CELLS // CELLS_PER_BLOCK, *(part.rows for part in parts if part.on_disk)])
    least = needed(most)
    if least > budget:
        raise ValueError(
            f"suggest_blocks: ram={budget} ({format_bytes(budget)}) is too small for {len(parts)} tables with any "
            f"number of blocks; it must be at least {least} ({format_bytes(least)})"
        )
    below, enough = 1, most  # `needed` decreases with the number of blocks
    while enough - below > 1:
        middle = (below + enough) // 2
        if needed(middle) <= budget:
            enough = middle
        else:
            below = middle
    return enough


@dataclass(frozen=True)
class _Part:
    """A table, and how many columns have ids of it."""

    spec: _native.TableSpec
    rows: int
    columns: int
    on_disk: bool
    shards: int

    @classmethod
    def of(cls, table: Table, columns: int) -> Self:
        rows = int(table.stats()["stored_rows"]) if table.num_rows is None else table.num_rows
        if rows == 0:
            raise ValueError(
                f"suggest_blocks: table '{table.name}' has no num_rows and stores no rows, so its size is unknown; "
                "choose a number of blocks, or ask after the first epoch"
            )
        shards = table.num_shards if isinstance(table, ShardedTable) else 1
        return cls(table.spec, rows, columns, table.path is not None, shards)

    def resident(self, blocks: int, staged: int = 0) -> int:
        """Return the rows of one block for each column and of `staged` more blocks."""
        if not self.on_disk:
            return self.rows
        mean = self.rows / blocks
        return min(self.rows, math.ceil((self.columns + staged) * (mean + 4 * math.sqrt(mean))))

    def ram(self, rows: int) -> int:
        """Return the budget with which the cache holds so many rows when all rows of the table are stored."""
        stored, wanted = -(-self.rows // self.shards), -(-rows // self.shards)
        ram = self.spec.minimum_ram(stored, self.on_disk)
        while True:  # parts of the memory plan grow with the budget
            use = self.spec.memory_use(stored, ram, _READ_UNIT, self.on_disk)
            missing = wanted - int(use["frames"])
            if missing <= 0:
                return ram * self.shards
            ram += missing * int(use["frame_bytes"])
