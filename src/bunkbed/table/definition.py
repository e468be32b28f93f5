"""What a new table is: the arguments of `bunkbed.create` that do not say where its rows are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from bunkbed import _native
from bunkbed.core import init as _init
from bunkbed.core import optim as _optim
from bunkbed.core.arguments import as_whole
from bunkbed.core.retention import Retention
from bunkbed.core.types import Json
from bunkbed.table.facts import DTYPES

if TYPE_CHECKING:
    from bunkbed.table.table import Table

_MAX_DIM = 1 << 24
_LARGEST = {"float32": 3.4028e38, "bfloat16": 3.3895e38, "float16": 65504.0}


@dataclass(frozen=True)
class Definition:
    """The definition of a new table; see `bunkbed.create` for the arguments. `spec` checks them."""

    dim: int
    num_rows: int | None = None
    optimizer: _optim.Optimizer | None = None
    init: _init.Initializer | None = None
    seed: int = 0
    dtype: str = "float32"
    durability: Literal["durable", "scratch"] = "durable"
    expire: int | None = None
    clock: Literal["step", "event"] = "step"
    max_rows: int | None = None
    evict: Literal["oldest", "rarest", "smallest"] = "oldest"
    keep: int = 0
    admit: float | None = None

    @classmethod
    def of(cls, table: Table) -> Self:
        """Return the definition of a durable table like `table`."""
        return cls(
            table.dim,
            table.num_rows,
            table.optimizer,
            table.init,
            table.seed,
            table.dtype,
            **vars(table.retention),
        )

    @property
    def retention(self) -> Retention:
        """The rules by which rows come and go.

        Raises:
            ValueError, TypeError: see `Retention`; a rule for a table with a number of rows.
        """
        rules = Retention(self.expire, self.clock, self.max_rows, self.evict, self.keep, self.admit)
        if rules and self.num_rows is not None:
            name = next(name for name in ("expire", "max_rows", "admit") if getattr(rules, name) is not None)
            raise ValueError(
                f"{name}={getattr(rules, name)} is for a table of any id, whose rows come and go; "
                f"num_rows={self.num_rows} was given, with which every row is there: give num_rows=None"
            )
        return rules

    def arguments(self) -> Json:
        """Return the arguments of `bunkbed.create` by name."""
        return dict(vars(self))

    def spec(self, *, belongs_to_run: bool = False) -> _native.TableSpec:
        """Return the definition as the core takes it.

        Raises:
            ValueError, TypeError: an argument out of range.
        """
        dtype = self.dtype
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        definition = _optim.require_optimizer(_optim.Adam() if self.optimizer is None else self.optimizer)
        initializer = _init.require_initializer(_init.Normal(std=0.01) if self.init is None else self.init)
        kind, a, b = initializer.native()
        # The largest magnitude that the initialiser gives; Normal gives at most 5.77 std.
        largest = 5.77 * a if kind == "normal" else max(abs(a), abs(b))
        if largest >= _LARGEST[dtype]:
            raise ValueError(
                f"init={initializer!r} gives values up to {largest:.6g}, beyond the largest {dtype}, "
                f"{_LARGEST[dtype]:.6g}"
            )
        num_rows = self.num_rows
        return _native.TableSpec(
            num_rows=-1 if num_rows is None else as_whole(num_rows, what="num_rows", low=1, high=2**63 - 1),
            dim=as_whole(self.dim, what="dim", low=1, high=_MAX_DIM),
            dtype=DTYPES.index(dtype),
            init_kind=kind,
            init_a=a,
            init_b=b,
            seed=as_whole(self.seed, what="seed", low=0, high=2**64 - 1),
            optimizer=definition.native(),
            retention=self.retention.native(),
            belongs_to_run=belongs_to_run,
            is_scratch=self.durability == "scratch",
        )
