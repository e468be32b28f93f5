"""Open or create the table of a framework's layer, and compare it with the layer's arguments."""

from __future__ import annotations

import errno
import logging
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Literal, TypeAlias

from bunkbed.adapters.removal import close_writer, is_taken, remove_table, require_removable
from bunkbed.core.budget import Budget
from bunkbed.core.init import Initializer
from bunkbed.core.optim import Adam, Optimizer, check_same_slots
from bunkbed.core.retention import Retention
from bunkbed.core.types import Json
from bunkbed.errors import FormatError
from bunkbed.sharded.opening import open
from bunkbed.sharded.table import ShardedTable
from bunkbed.table.definition import Definition
from bunkbed.table.opening import Wanted, create, is_shared, open_table, path_lock, resolve
from bunkbed.table.table import Table

#: What a layer does where a table is at its path: go on with its rows, raise, or replace it.
Exist: TypeAlias = Literal["open", "error", "new"]
_log = logging.getLogger("bunkbed")


def log_opening(table: Table, num_rows: int) -> None:
    """Log one line: which rows a layer goes on with, or that the table at its path is new, as after a mistyped path.

    The first is a warning, which Python shows: a script that runs again would go on with trained rows unseen.

    Args:
        table: as `TableArguments.created` returned it.
        num_rows: its stored rows.
    """
    where = table.name if table.path is None else table.path
    if is_shared(table):
        _log.warning("shares the open table %s: %s rows, step %s", where, f"{num_rows:,}", f"{table.step:,}")
    elif num_rows or table.step or table.epoch:
        _log.warning("opened %s: %s rows, step %s", where, f"{num_rows:,}", f"{table.step:,}")
    elif table.path is not None:
        _log.info("new table %s: no row is stored", where)


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


@dataclass(frozen=True)
class TableOptions:
    """The options about a table that every layer takes; None where the caller gave none."""

    path: str | PathLike[str] | None = None
    ram: float | str | Budget | None = None
    disk: float | str | None = None
    optimizer: Optimizer | None = None
    init: Initializer | None = None
    seed: int | None = None
    dtype: str | None = None
    durability: Literal["durable", "scratch"] | None = None
    exist: Exist = "open"
    retention: Retention | None = None

    def require_none(self, kind: str) -> None:
        """Raise ValueError if an option is given together with ``table=``, whose table already has a value for it."""
        for name, value in {**vars(self), "exist": None if self.exist == "open" else self.exist}.items():
            if value is not None:
                raise ValueError(f"{kind}: {name}= cannot be given together with table=; the table brings its own")

    def arguments(
        self, kind: str, dims: Json, init_name: str, *, num_rows: int | None, dim: int, init: Initializer, seed: int
    ) -> TableArguments:
        """Return the arguments for `bunkbed.open` and `bunkbed.create`.

        Args:
            kind: the layer's class, for messages.
            dims: number of rows and dim by the layer's argument names.
            init_name: the layer's name of `init`.
            num_rows, dim, init, seed: of a new table; `init` and `seed` where no option gives them.
        """
        if self.exist not in ("open", "error", "new"):
            raise ValueError(f'{kind}: exist must be "open", "error" or "new", got {self.exist!r}')
        if self.retention is not None:
            if not isinstance(self.retention, Retention):
                raise TypeError(f"{kind}: retention must be a bunkbed.Retention, got {self.retention!r}")
            if self.retention and num_rows is not None:
                name = next(iter(dims))
                raise ValueError(
                    f"{kind}: retention= is for a table of any id, whose rows come and go; {name}={num_rows} was "
                    f"given, with which every row is there: give {name}=None"
                )
        given = {"dtype": self.dtype, init_name: self.init, "seed": self.seed, "durability": self.durability}
        return TableArguments(
            kind,
            Definition(
                dim,
                num_rows,
                init=init if self.init is None else self.init,
                seed=seed if self.seed is None else self.seed,
                dtype=self.dtype or "float32",
                durability=self.durability or "durable",
                **vars(self.retention or Retention()),
            ),
            {**dims, **{name: value for name, value in given.items() if value is not None}},
            None if self.path is None else Path(self.path),
            self.ram,
            self.disk,
            exist=self.exist,
            retention=self.retention,
        )


@dataclass(frozen=True)
class TableArguments:
    """How a layer opens or makes its table.

    Attributes:
        kind: the layer's class, for messages.
        definition: of a new table; `created` is given its optimizer.
        same: what a stored table must have, by the layer's argument names; see `require_same`.
        path, ram, disk: see `bunkbed.create`.
        make: see `bunkbed.table.opening.open_table`.
        shards: the number of shards that a table with a path must have; None: any, and a new one is not sharded.
        exist: what `settle` does where a table is at `path`.
        retention: the rules of a stored table from now on; None: its own.
    """

    kind: str
    definition: Definition
    same: Json
    path: Path | None
    ram: float | str | Budget | None
    disk: float | str | None
    make: Callable[..., Table] = Table
    shards: int | None = None
    exist: Exist = "open"
    retention: Retention | None = None

    def settle(self, meet: Callable[[Callable[[], None]], None] = lambda call: call()) -> None:
        """Where something is at `path`: go on for ``"open"``, raise for ``"error"``, remove the table for ``"new"``.

        Args:
            meet: where several processes share the table: makes the call on one, and raises its error on all.

        Raises:
            FileExistsError: `exist` is ``"error"``, or more than a table is there. See `remove_table`.
        """
        place = None if self.path is None else resolve(self.path)
        if place is None or self.exist == "open":
            return
        if self.exist == "new" and self.definition.durability == "scratch":
            return  # a scratch table is new in any case
        meet(lambda: self._require_removable(place))
        if self.exist == "new":
            close_writer(place)
            meet(lambda: remove_table(place) if is_taken(place) else None)

    def _require_removable(self, place: Path) -> None:
        if is_taken(place) and self.exist == "error":
            raise FileExistsError(
                errno.EEXIST,
                f'{self.kind}: exist="error" was given, and there is a table; exist="open" goes on with its rows, '
                'exist="new" removes them, another path= leaves it alone',
                str(place),
            )
        if is_taken(place):
            require_removable(place)

    def opened(self, optimizer: Optimizer | None) -> Table | None:
        """Open the table at `path` and compare it with `same`; return None if there is none."""
        if self.path is None:
            return None
        try:
            if self.make is Table:
                table = open(self.path, ram=self.ram, disk=self.disk)
            else:
                table = open_table(resolve(self.path), Wanted.of("w", ram=self.ram, disk=self.disk), make=self.make)
        except FileNotFoundError:
            return None
        except FormatError:
            # A new scratch table replaces the files of an old one. create() raises if they are not of a scratch table.
            if self.definition.durability != "scratch":
                raise
            return None
        try:
            require_same(self.kind, table, **self.same)
            if optimizer is not None:
                check_same_slots(table.name, table.optimizer, optimizer)
            if self.retention is not None and self.retention != table.retention:
                if is_shared(table):
                    raise ValueError(
                        f"{self.kind}: retention={self.retention!r} was given, but table {table.name!r}, which another "
                        f"layer has open, has {table.retention!r}; give that, or assign table.retention"
                    )
                table.retention = self.retention  # raises for another clock
            if optimizer is not None and optimizer != table.optimizer:
                table.optimizer = optimizer
        except BaseException:
            table.close(commit=False)  # ends only this opening; a table that another layer has open stays open
            raise
        return table

    def created(self, optimizer: Optimizer | None) -> Table:
        """Open the table at `path`, or make it there or in RAM; only a new table has `definition`."""
        shards = self.shards
        with path_lock(None if self.path is None else self.path.expanduser()):
            table = self.opened(optimizer)
            if table is not None:
                if shards is not None and self.path is not None and getattr(table, "num_shards", None) != shards:
                    stored = getattr(table, "num_shards", "no")
                    table.close(commit=False)
                    raise ValueError(
                        f"{self.kind}: {self.path} has {stored} shards, not shards={shards}; divide it with: "
                        f"bunkbed reshard {shlex.quote(str(self.path))} --shards {shards}"
                    )
                return table
            definition = replace(self.definition, optimizer=Adam(lr=1e-3) if optimizer is None else optimizer)
            if shards is not None and self.path is not None:
                arguments = definition.arguments()
                if arguments.pop("durability") != "durable":
                    raise ValueError(f'{self.kind}: durability="scratch" is for a table without shards=')
                return ShardedTable.create(self.path, shards=shards, ram=self.ram, disk=self.disk, **arguments)
            return create(self.path, ram=self.ram, disk=self.disk, _make=self.make, **definition.arguments())
