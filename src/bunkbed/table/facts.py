"""The facts of a table: its definition and its present state."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, cast

from bunkbed import _native
from bunkbed.core import init as _init
from bunkbed.core import optim as _optim
from bunkbed.core.arguments import as_whole
from bunkbed.core.retention import Retention
from bunkbed.core.types import Json
from bunkbed.table.core import Core

DTYPES = ("float32", "bfloat16", "float16")
_INIT_KINDS = ("zeros", "normal", "uniform")


class TableFacts:
    """The properties of `bunkbed.Table` that read no row."""

    spec: _native.TableSpec
    _path: Path | None
    _mode: Literal["w", "r"]
    _name: str
    core: Core
    _run: Any
    _ram_bytes: int
    _closed: bool
    fields: dict[str, tuple[int, int]]
    _dim: int
    _pid: int
    _above: object

    @property
    def name(self) -> str:
        """The last part of the path; ``"table"`` for a table in RAM."""
        return self._name

    @property
    def path(self) -> Path | None:
        """The table's directory; None for a table in RAM."""
        return self._path

    @property
    def mode(self) -> Literal["w", "r"]:
        """``"w"``: this process writes it; ``"r"``: a reader."""
        return self._mode

    @property
    def dim(self) -> int:
        """Weights of a row."""
        return self._dim

    @property
    def num_rows(self) -> int | None:
        """Ids are in ``[0, num_rows)``; None: any non-negative int64."""
        rows = int(self.spec.num_rows)
        return None if rows < 0 else rows

    @property
    def dtype(self) -> str:
        """Storage type of the weights: float32, bfloat16 or float16. The state has `optimizer.state_dtype`."""
        return DTYPES[self.spec.dtype]

    @property
    def init(self) -> _init.Initializer:
        """The initialiser of untouched rows."""
        return _init.from_native(_INIT_KINDS[self.spec.init_kind], self.spec.init_a, self.spec.init_b)

    @property
    def seed(self) -> int:
        """Seed of the initialiser and of stochastic rounding."""
        return int(self.spec.seed)

    @property
    def durability(self) -> Literal["durable", "scratch"]:
        """``"scratch"``: a temporary table, of which nothing becomes durable; see `bunkbed.create`."""
        return "scratch" if self.spec.is_scratch else "durable"

    @property
    def optimizer(self) -> _optim.Optimizer:
        """The optimizer. Assign one of the same class to change lr, betas, eps and weight decay for later steps.

        Raises:
            ValueError: on assignment, an optimizer with other slots or state dtype.
        """
        return _optim.from_native(self.core.optimizer())

    @optimizer.setter
    def optimizer(self, value: _optim.Optimizer) -> None:
        _optim.check_same_slots(self._name, self.optimizer, _optim.require_optimizer(value))
        self.core.set_optimizer(value.native())

    @property
    def retention(self) -> Retention:
        """The rules by which rows come, and `sweep` removes them. Assign others, with the same `clock`, to change them.

        Raises:
            ValueError: on assignment, another clock; `expire` or `max_rows` for a table that was made without, whose
                rows have no age; neither for one that was made with one; `admit` for a table with a number of rows, or
                with a device cache. ReadOnlyError: the table is open for reading.
        """
        return Retention.from_native(self.core.retention())

    @retention.setter
    def retention(self, value: Retention) -> None:
        present = self.retention
        if not isinstance(value, Retention):
            raise TypeError(f"table '{self._name}': retention must be a bunkbed.Retention, got {value!r}")
        if value.removes and not present.removes:
            raise ValueError(
                f"table '{self._name}' was made without expire= and max_rows=, so its rows have no age; make a table "
                "with these, and move the rows with bb.export_rows and bb.import_rows"
            )
        if present.removes and not value.removes:
            raise ValueError(
                f"table '{self._name}': its rules for sweeps cannot all go, since its rows have an age; give an expire "
                "or a max_rows that no row reaches"
            )
        if present.clock != value.clock:
            raise ValueError(
                f"table '{self._name}': clock is {present.clock!r} in the table, {value.clock!r} was asked for; to "
                "change one rule: table.retention = dataclasses.replace(table.retention, expire=...)"
            )
        if value.admit is not None and self.num_rows is not None:
            raise ValueError(
                f"table '{self._name}': admit={value.admit} is for a table of any id, whose rows come and go; this one "
                f"has num_rows={self.num_rows}, with which every row is there"
            )
        if value.admit not in (None, present.admit) and self.has_cache:
            raise ValueError(
                f"table '{self._name}': admit={value.admit} does not work with a device cache, and a layer with "
                "device_cache= uses the table; change the rule without such a layer"
            )
        if present != value:
            self.core.set_retention(value.native())

    @property
    def clock(self) -> int:
        """The time of the table's clock, by which rows expire: `step`, or for ``clock="event"`` what was last assigned.

        The ages of rows that are updated or set from now on begin at this time. It is part of commits, and -1 until it
        is assigned.

        Raises:
            ValueError: on assignment, a value below the present one, or the clock is the step. TypeError: no int.
            ReadOnlyError: the table is open for reading.

        >>> import bunkbed as bb, numpy as np
        >>> table = bb.create(None, dim=2, expire=7, clock="event")
        >>> table.clock = 0
        >>> table.update([1], np.ones((1, 2), np.float32))
        >>> table.clock = 7
        >>> table.sweep().expired
        1
        """
        return int(self.core.clock())

    @clock.setter
    def clock(self, value: int) -> None:
        self.core.set_clock(as_whole(value, what="clock", table=f"table '{self._name}'", low=0, high=2**63 - 2))

    # Internal: when rows were last named and by how many updates, as a field of floats whose bits are moved only. Empty
    # for a table without rules for sweeps.
    @property
    def usage_fields(self) -> list[tuple[int, int]]:
        return [(len(self.fields), 3)] if self.retention.removes else []

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the per-row optimizer arrays; ``"weight"`` is not among them."""
        return tuple(name for name in self.fields if name != "weight")

    @property
    def step(self) -> int:
        """Optimizer steps taken so far: one for each `update`, for any number of ids."""
        return int(self.core.step())

    @property
    def version(self) -> int:
        """Number of the last commit; 0 when the table was just created."""
        return int(self.core.epoch())

    @property
    def epoch(self) -> int:
        """`version` under its older name, which the next release has no more."""
        return self.version

    @property
    def meta(self) -> Json:
        """The `meta` of the last commit."""
        value: Json = json.loads(self.core.meta())
        return value

    @property
    def uuid(self) -> str:
        """Identity of the table as 32 hexadecimal digits; a copy of its directory has the same."""
        return bytes(self.core.uuid()).hex()

    @property
    def run(self) -> Any:
        """The `bunkbed.Run` that commits this table together with others; None without a run."""
        return self._run

    @property
    def closed(self) -> bool:
        """True once closed."""
        return self._closed

    @property
    def is_dirty(self) -> bool:
        """True when rows were updated or set since the last commit."""
        return bool(self.core.is_changed())

    @property
    def ram_bytes(self) -> int:
        """The RAM budget in bytes; 0: no limit."""
        return self._ram_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes of a row's weights and optimizer state, as they are stored."""
        return int(self.core.payload_bytes())

    # Internal: the core, for what only the core of a plain table does: whole records, pinned epochs, a device cache.
    # Requires: the table is not sharded.
    @property
    def plain_core(self) -> _native.Table:
        return cast("_native.Table", self.core)

    # Internal: whether this process opened the table; in a forked child locks may never be released.
    @property
    def is_own(self) -> bool:
        return self._pid == os.getpid()

    # Internal: whether rows may be in a device cache.
    @property
    def has_cache(self) -> bool:
        return self._above is not None

    def __repr__(self) -> str:
        where = "in RAM" if self._path is None else f"at {self._path}"
        if self._closed:
            return f"<bunkbed.Table '{self._name}' {where}, closed>"
        rows = "any id" if self.num_rows is None else f"{self.num_rows} rows"
        return (
            f"<bunkbed.Table '{self._name}' {where}: {rows} x {self.dim} {self.dtype}, "
            f"{type(self.optimizer).__name__}, step {self.step}, commit {self.epoch}>"
        )
