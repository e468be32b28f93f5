"""Open or create the table of a framework's layer, and compare it with the layer's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Literal

from bunkbed.core.budget import Budget
from bunkbed.core.init import Initializer
from bunkbed.core.optim import Adam, Optimizer
from bunkbed.errors import FormatError
from bunkbed.sharded.opening import open
from bunkbed.table.opening import create, path_lock
from bunkbed.table.table import Table


def require_same(kind: str, table: Table, **given: object) -> None:
    """Raise ValueError, with both values, if an argument of a layer is not that of its table.

    Args:
        kind: the layer's class.
        given: the arguments by the layer's names.
    """
    stored = {
        "num_embeddings": table.num_rows,
        "input_dim": table.num_rows,
        "embedding_dim": table.dim,
        "output_dim": table.dim,
        "dtype": table.dtype,
        "init": table.init,
        "embeddings_initializer": table.init,
        "seed": table.seed,
        "durability": table.durability,
    }
    for name, value in given.items():
        if stored[name] != value:
            raise ValueError(
                f"{kind}: {name}={value!r} was given, but table {table.name!r} has {stored[name]!r}; give what it "
                "has, or another path for a new table"
            )


def require_alone(kind: str, **given: object) -> None:
    """Raise ValueError if an argument is given together with ``table=``, whose table already has a value for it."""
    extra = [name for name, value in given.items() if value is not None]
    if extra:
        raise ValueError(f"{kind}: {extra[0]}= cannot be given together with table=; the table brings its own")


def open_stored(
    kind: str,
    path: Path,
    *,
    ram: int | str | Budget | None,
    disk: int | str | None,
    optimizer: Optimizer | None,
    durability: Literal["durable", "scratch"] | None,
    same: Mapping[str, object],
) -> Table | None:
    """Open the table at `path` and check it against `same` (see `require_same`); return None if there is no table."""
    try:
        table = open(path, ram=ram, disk=disk)
    except FileNotFoundError:
        return None
    except FormatError:
        # A new scratch table replaces the files of an old one. create() raises if they are not of a scratch table.
        if durability != "scratch":
            raise
        return None
    try:
        require_same(kind, table, **same)
        if optimizer is not None and optimizer != table.optimizer:
            table.optimizer = optimizer  # raises for other slots
    except BaseException:
        table.close(commit=False)  # ends only this opening; a table that another layer has open stays open
        raise
    return table


def open_or_create(
    kind: str,
    path: str | PathLike[str] | None,
    *,
    dim: int,
    num_rows: int | None,
    optimizer: Optimizer | None,
    init: Initializer,
    seed: int,
    dtype: str | None,
    ram: int | str | Budget | None,
    durability: Literal["durable", "scratch"] | None,
    disk: int | str | None,
    same: Mapping[str, object],
) -> Table:
    """Open the table at `path`, or create one there; only a new table uses `init`, `seed` and `dtype`.

    Args:
        same: the values that a stored table must have; see `require_same`.
    """
    with path_lock(None if path is None else Path(path).expanduser()):
        if path is not None:
            path = Path(path)
            table = open_stored(kind, path, ram=ram, disk=disk, optimizer=optimizer, durability=durability, same=same)
            if table is not None:
                return table
        return create(
            path,
            dim=dim,
            num_rows=num_rows,
            optimizer=Adam(lr=1e-3) if optimizer is None else optimizer,
            init=init,
            seed=seed,
            dtype="float32" if dtype is None else dtype,
            ram=ram,
            durability="durable" if durability is None else durability,
            disk=disk,
        )
