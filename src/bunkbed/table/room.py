"""How many rows a budget of RAM has room for: the smallest budget, and a warning where a new table's is smaller.

The core's `minimum_ram` is the one figure that `create`, `open`, `plan` and their messages use.
"""

from __future__ import annotations

import math
import warnings

from bunkbed import _native
from bunkbed.core import optim as _optim
from bunkbed.core.budget import format_bytes, format_least
from bunkbed.core.typed import typed
from bunkbed.table.definition import Definition


@typed
def minimum_ram(
    rows: int,
    dim: int,
    optimizer: _optim.Optimizer | None = None,
    dtype: str = "float32",
    *,
    num_rows: int | None = None,
) -> int:
    """Return the smallest `ram` in bytes with which a table on disk can store so many rows and be opened again.

    It holds the directory, about 5 bytes for each row of the table or 17 for each stored row, whichever is less, the
    buffers, and 16 rows. With it every step reads and writes the disk; more RAM caches rows.

    Args:
        rows: rows that are trained or set, at least 0.
        dim: weights of a row.
        optimizer: default ``Adam()``.
        dtype: of the stored weights: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        num_rows: the rows of the table, where few of them are stored; default: `rows`.

    Raises:
        ValueError, TypeError: an argument out of range.

    >>> round(minimum_ram(1_000_000, 64) / 1e6, 1), round(minimum_ram(1_000_000_000, 64) / 1e9, 1)
    (7.5, 5.2)
    """
    if rows < 0:
        raise ValueError(f"rows must be at least 0, got {rows}")
    definition = Definition(dim, max(rows, 1) if num_rows is None else num_rows, optimizer, dtype=dtype)
    return int(definition.spec().minimum_ram(rows, True))


def warn_if_small(name: str, spec: _native.TableSpec, ram_bytes: int, *, on_disk: bool = True, shards: int = 1) -> None:
    """Warn where the budget of a new table, 0 for no bound, has no room for all of its rows.

    Args:
        name: the table's name.
        spec: its definition, or that of each of its shards.
        ram_bytes: the budget, of all shards.
        on_disk: False for a table in RAM only.
        shards: the tables that the rows are divided over.
    """
    # With more rows than any table can store, the ids are sparse.
    if ram_bytes == 0 or not 0 < spec.num_rows <= spec.rows_within(0, on_disk):
        return
    each = spec.num_rows
    if shards > 1:  # a hash divides the ids: binomially
        each = min(each, math.ceil(each / shards + 6 * math.sqrt(each / shards)))
    needed = shards * int(spec.minimum_ram(each, on_disk))
    # A budget that is too small for any work is refused.
    if not shards * int(spec.minimum_ram(0, on_disk)) <= ram_bytes < needed:
        return
    rows = min(spec.num_rows, shards * int(spec.rows_within(ram_bytes // shards, on_disk)))
    path = "" if on_disk else "a path or "
    warnings.warn(
        f"table '{name}': ram={ram_bytes} ({format_bytes(ram_bytes)}) has room for {rows:,} of its {spec.num_rows:,} "
        "rows; training or setting more will be a MemoryError; if more will be stored, give it "
        f"{path}ram={needed} ({format_least(needed)}) or more",
        stacklevel=4,
    )
