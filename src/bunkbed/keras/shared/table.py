"""Shared by all layers on one table: the table, its token and kept epoch, its pending gradients.

A layer that follows compile's optimizer cannot make its table when it is constructed, because the optimizer decides
which state a row has. Until a training step shows the optimizer, lookups use a substitute table in RAM without state.
Its untouched rows have the same bits, as they are a function of (seed, id).
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import keras
import numpy as np
from numpy.typing import NDArray

import bunkbed as bb
from bunkbed.adapters.ram_rows import Facts, Rows, saved, why_not, with_rows
from bunkbed.adapters.references import Reference, References
from bunkbed.adapters.tables import TableArguments, log_opening
from bunkbed.core.init import Initializer
from bunkbed.core.optim import Optimizer, check_same_slots
from bunkbed.core.types import Json
from bunkbed.keras.base.backend import IS_TORCH
from bunkbed.keras.base.optimizers import is_update, learning_rate_now, loss_scale, rule_of, step_rule
from bunkbed.keras.base.pending import Pending, StepRule
from bunkbed.keras.base.stepping import require_known_keras
from bunkbed.keras.base.types import KerasOptimizer, Tensor, WorkersOf
from bunkbed.keras.shared.variables import KeptEpoch
from bunkbed.table.opening import open_writer, resolve
from bunkbed.table.table import Table

if IS_TORCH:
    from bunkbed.keras.torch.backend import Token, as_scalar, call, outside_graph
else:
    from bunkbed.keras.shared.variables import Token
    from bunkbed.keras.tensorflow.callbacks import as_scalar, call, outside_graph

_Shared = TypeVar("_Shared", bound="SharedTable")
_log = logging.getLogger("bunkbed.keras")

#: Rows per `Table.set` when weights are imported.
_CHUNK = 65_536
#: Prefixes of the names of kept epochs: those in saved files, and those in arrays from ``get_weights``.
_PREFIX = "keras-"
_PREFIX_IN_PROCESS = "get_weights-"


@dataclass(frozen=True)
class LayerArguments(TableArguments):
    """The arguments about a table that may be sharded, with the directories of a new one's shards."""

    is_sharded: bool = False
    directories: tuple[Path, ...] | None = None

    def opened(self, optimizer: Optimizer | None) -> Table | None:
        """See `TableArguments`."""
        found = super().opened(optimizer)
        if self.is_sharded and found is not None and not isinstance(found, bb.ShardedTable):
            found.close(commit=False)
            raise ValueError(
                f'{self.kind}: placement="sharded" was given, but table {found.name!r} is not sharded; leave it out, '
                "or give another path"
            )
        return found

    def created(self, optimizer: Optimizer | None) -> Table:
        """See `TableArguments`."""
        if not self.is_sharded:
            return super().created(optimizer)
        assert self.path is not None
        definition = replace(self.definition, optimizer=optimizer).arguments()
        del definition["durability"]
        return self.opened(optimizer) or bb.ShardedTable.create(
            self.path, directories=self.directories, ram=self.ram, disk=self.disk, **definition
        )

    def stand_in(self) -> Table:
        """Make a table in RAM with the same untouched rows, and no state."""
        return bb.create(None, **replace(self.definition, optimizer=bb.SGD(0.0), durability="durable").arguments())


class SharedTable:
    """One table with its Keras variables and gradients, for every layer on the table.

    Thread-safe where TensorFlow's threads call it: lookups, pushes, steps. `bunkbed.keras.workers_table` has the
    subclass for several workers, each of which trains a part or a copy of the table.

    Args:
        arguments: of the first layer; None with `table`.
        table: an open table; None while the state of its rows is unknown.
        is_explicit: whether its optimizer was given; otherwise it follows compile's.
    """

    #: The `bunkbed.keras.workers.group.Workers` that train the table; None without workers.
    workers: WorkersOf = None

    def __init__(self, arguments: LayerArguments | None, table: Table, *, is_explicit: bool) -> None:
        assert arguments is not None or table is not None
        self._arguments = arguments
        self._lock = threading.Lock()
        self._stand_in: Table | None = None
        self._initial: NDArray[np.float32] | None = None
        self._told = False
        self.is_explicit = is_explicit
        self._places = itertools.count()
        self._table: Table | None = None
        self._pending: Pending | None = None
        self._references: References | None = None
        self._keep: int | None = 0
        if table is not None:
            self._start(table)
        require_known_keras()
        name = re.sub(r"[^A-Za-z0-9]+", "_", self.name).strip("_") or "table"  # as TensorFlow's scopes require
        self.token = Token(self, f"{name}_embeddings_token")
        self.kept_epoch = KeptEpoch(self, f"{name}_embeddings_epoch")

    # ---- the table

    @property
    def name(self) -> str:
        """The table's name."""
        if self._table is not None:
            return str(self._table.name)
        path = None if self._arguments is None else self._arguments.path
        return "table" if path is None else path.name

    @property
    def dim(self) -> int:
        """The number of weights of a row."""
        return self.table.dim if self._arguments is None else self._arguments.definition.dim

    @property
    def seed(self) -> int:
        """The seed of the initialiser; a stored table has its own."""
        if self._table is not None:
            return int(self._table.seed)
        assert self._arguments is not None
        return self._arguments.definition.seed

    @property
    def init(self) -> Initializer:
        """The initialiser; a stored table has its own."""
        if self._table is not None:
            found: Initializer = self._table.init
            return found
        assert self._arguments is not None and self._arguments.definition.init is not None
        return self._arguments.definition.init

    @property
    def is_divided(self) -> bool:
        """Whether each of several workers has a part of the rows."""
        return self.workers is not None and bool(self.workers.is_sharded)

    def next_place(self) -> int:
        """Return the next number of the forward order."""
        return next(self._places)

    @property
    def has_table(self) -> bool:
        """Whether the table was made or opened; see the module's docstring."""
        return self._table is not None

    @property
    def table(self) -> Table:
        """The `bunkbed.Table`.

        Raises:
            RuntimeError: the table was not made yet.
        """
        if self._table is None:
            raise RuntimeError(
                "Embedding: its table follows compile's optimizer, and is made by the first training step; train, or "
                "give the layer its own: Embedding(..., optimizer=bunkbed.Adam(lr=1e-3))"
            )
        return self._table

    @property
    def pending(self) -> Pending:
        """The pending gradients."""
        assert self._pending is not None
        return self._pending

    def adopt(self, table: Table) -> None:
        """Use this table, which was not known before."""
        self._start(table)

    def require_same(self, arguments: LayerArguments) -> None:
        """Raise ValueError if another layer on the same table, which is not made yet, has different arguments."""
        assert self._arguments is not None
        ours, theirs = self._arguments, arguments
        for name in ("input_dim", "output_dim", "dtype"):
            if ours.same.get(name) != theirs.same.get(name):
                raise ValueError(
                    f"{theirs.kind}: {name}={theirs.same.get(name)!r} was given, but another layer on {theirs.path} "
                    f"has {ours.same.get(name)!r}; give what it has, or another path for a new table"
                )

    def _start(self, table: Table) -> None:
        _by_table[id(table)] = self
        self._table = table
        self._pending = self._new_pending(table)
        self._references = References(table, _PREFIX, "saved model", self._pending.drop)
        self._references.keep_at_least(self._keep)
        if self._initial is not None:
            self._import(table, self._initial)
        self._initial = self._stand_in = None

    def _new_pending(self, table: Table) -> Pending:
        return Pending(table)

    def keep_at_least(self, keep: int | None) -> None:
        """Keep at least this many checkpoints; the largest number of all layers on the table applies, None is all."""
        self._keep = None if keep is None or self._keep is None else max(keep, self._keep)
        if self._references is not None:
            self._references.keep_at_least(keep)

    def import_rows(self, weights: NDArray[np.float32]) -> None:
        """Overwrite rows ``0 .. len(weights) - 1`` with float32[rows, output_dim]."""
        if self._table is not None:
            self._import(self._table, weights)
            return
        self._initial = weights
        self._stand_in = None

    def _import(self, table: Table, weights: NDArray[np.float32]) -> None:
        for start in range(0, len(weights), _CHUNK):
            chunk = weights[start : start + _CHUNK]
            self._set_rows(table, np.arange(start, start + len(chunk), dtype=np.int64), chunk)

    def _set_rows(self, table: Table, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        table.set(ids, rows)

    def for_lookup(self) -> Table:
        """Return the table, or its substitute until it is made."""
        if self._table is not None:
            return self._table
        with self._lock:
            if self._stand_in is None and self._table is None:
                assert self._arguments is not None
                self._stand_in = self._arguments.stand_in()
                if self._initial is not None:
                    self._import(self._stand_in, self._initial)
            return self._stand_in if self._table is None else self._table

    # ---- training

    def follow(self, optimizer: KerasOptimizer) -> None:
        """Make the table that follows a Keras optimizer, unless it is made already.

        Raises:
            ValueError: no update rule of bunkbed follows the optimizer; or it is None.
        """
        if self.is_explicit or self._table is not None:
            return
        if optimizer is None:
            raise ValueError(
                "Embedding: its table follows the optimizer that steps it, and which that is is not known: the model "
                "that is called was not compiled; call model.compile(optimizer=...), or layer.follow(optimizer) before "
                "a loop of your own, or give the layer its own: Embedding(..., optimizer=bunkbed.Adam(lr=1e-3))"
            )
        with outside_graph():
            rule = rule_of(optimizer, self.token, learning_rate_now(optimizer))
            assert self._arguments is not None
            self._start(self._arguments.created(rule))

    def settle(self, gradients: Tensor, optimizer: KerasOptimizer, scaling: KerasOptimizer) -> Tensor:
        """Make the op of an optimizer's step.

        Each table has its own op. A common op of several tables would have to guess the end of a step, because Keras
        assigns the tokens one by one, does not mark the last one, and skips tokens without a gradient. A table that the
        op missed would be a step behind. An additional op costs about 25 us of a step's milliseconds.

        Args:
            gradients: float64[replicas], the token's gradient in each.
            optimizer: the Keras optimizer that steps; None if another caller assigns the token.
            scaling: the `keras.optimizers.LossScaleOptimizer` around it, or None.

        Returns:
            float64[], 0.

        Raises:
            ValueError: the table cannot follow the optimizer, or has no equivalent of one of its settings.
        """
        rule, definition, rate, unscale, follows = self._what_steps(optimizer, scaling)
        this, whose = weakref.ref(self), 0 if optimizer is None else id(optimizer)

        def step(gradients: Tensor, rate: Tensor, unscale: Tensor, is_update: Tensor) -> Tensor:
            shared = alive(this)
            if definition is not None and definition != shared.table.optimizer:
                shared.table.optimizer = definition  # two models may follow different ones
            shared.pending.settle(
                gradients,
                rule,
                float(rate) if follows else None,
                unscale=float(unscale),
                is_update=bool(is_update),
                optimizer=whose,
            )
            return np.zeros((), np.float64)

        inputs = [gradients, rate, unscale, is_update(optimizer)]
        return as_scalar(call("update", self.name, step, inputs, np.float64))

    def _what_steps(
        self, optimizer: KerasOptimizer, scaling: KerasOptimizer
    ) -> tuple[StepRule, Optimizer | None, Tensor, Tensor, bool]:
        """Return the parameters of an optimizer's step of the table.

        Returns:
            Its rule, the table's new optimizer (None: its own), float64[] learning rate, float64[] reciprocal of the
            loss scale, and whether that learning rate is used.
        """
        follows = not self.is_explicit and optimizer is not None
        rule = step_rule(optimizer, follows=follows)
        if follows:
            self.follow(optimizer)
            with outside_graph():
                definition = rule_of(optimizer, self.token, learning_rate_now(optimizer))
            check_same_slots(self.name, self.table.optimizer, definition)
        else:
            definition = None
            self._tell(optimizer)
        rate = keras.ops.cast(optimizer.learning_rate if follows else 0.0, "float64")
        scale = loss_scale(optimizer, scaling)
        unscale = 1.0 / keras.ops.cast(1.0 if scale is None else scale, "float64")
        return rule, definition, rate, unscale, follows

    def _tell(self, optimizer: KerasOptimizer) -> None:
        """Log, at the first call, that the table does not follow the optimizer that steps it."""
        if optimizer is None or self._told:
            return
        self._told = True
        addition = "" if optimizer.global_clipnorm is None else ", and global_clipnorm leaves it out"
        _log.warning(
            "table %r is trained by its own optimizer %r, not by compile's %s%s",
            self.table.name, self.table.optimizer, type(optimizer).__name__, addition,
        )  # fmt: skip

    # ---- saved weights

    def save(self, *, in_process: bool = False) -> Reference | None:
        """Commit the table and keep the epoch; return None for a table that was not made yet.

        Args:
            in_process: for ``get_weights``, whose epochs are counted separately from those of files.

        Raises:
            ValueError: rows were given, and the table that will hold them was not made yet.
        """
        return self._keep_epoch(_PREFIX_IN_PROCESS if in_process else None)

    def saved_rows(self) -> tuple[Rows, Json | None]:
        """Return the rows of a table in RAM only and their facts as JSON; nothing and None for other tables."""
        table = self._table
        found = None if table is None or self.workers is not None else saved(table)
        if table is None or found is None:
            return {}, None
        rows, facts = found
        reference = Reference(table.uuid, table.name, table.epoch, table.step)
        return rows, {**reference.fields(), **facts}

    def load_rows(self, rows: Rows, fields: Json) -> None:
        """Take over the rows of a table that was in RAM only.

        Raises:
            ValueError: they do not fit the table, or its files have rows of their own.
        """
        facts = Facts.from_fields(fields)
        if self._table is None:
            assert self._arguments is not None
            definition = replace(
                self._arguments.definition, optimizer=facts.optimizer, init=facts.init, seed=facts.seed
            )
            # A table that the rows do not fit must not be made.
            why = why_not(bb.create(None, **replace(definition, durability="durable").arguments()), rows, facts)
        else:
            why = why_not(self._table, rows, facts)
        if why:
            raise ValueError(f"table {self.name!r}: {why}")
        self._initial = None
        if self._table is None:
            assert self._arguments is not None
            self._start(replace(self._arguments, definition=definition).created(facts.optimizer))
        table = self.table
        self.pending.drop()
        made = with_rows(table, rows, facts)
        if made is not table:
            table.close(commit=False)
            self._start(made)

    def _keep_epoch(self, prefix: str | None, *, drop: bool = True) -> Reference | None:
        if self._references is None:
            if self._initial is not None:
                raise ValueError(
                    "Embedding: the rows that were given are in no table yet, as the first training step makes it; "
                    "train, or give the layer its own: Embedding(..., optimizer=bunkbed.Adam(lr=1e-3)), or "
                    "bunkbed.SGD(0.0) for rows that stay as they are"
                )
            return None
        if self.pending.accumulates:
            _log.warning("table %r: gradients that still accumulate are not part of what is saved", self.table.name)
        return self._references.save(prefix, drop=drop)

    def go_back(self, number: int, number_of: Callable[[str, int], int]) -> None:
        """Rewind the table to the epoch that `number` encodes, and forget pending gradients; see `KeptEpoch`.

        Raises:
            ValueError: the epoch was dropped, or is another table's.
        """
        if self._references is None:
            if number:
                raise ValueError(self._not_there())
            return
        if number == 0:
            return
        table, epoch = self.table, number & 2**40 - 1
        if number_of(table.uuid, epoch) != number:
            raise ValueError(
                f"table {table.name!r}: these weights refer to another table's epoch; weights of a layer hold a "
                "reference, not rows, so they fit only layers on the same table (table=layer.table, or the same path=)"
            )
        error = None if table.run is not None else self._references.go_back(epoch)
        if error is not None:
            raise ValueError(error)

    def load(self, fields: Json | None) -> None:
        """Rewind the table to the epoch of a reference's fields, and forget pending gradients.

        Raises:
            ValueError: the epoch was dropped, or is another table's, or the table does not exist.
        """
        if fields is None:
            return
        if self._references is None:
            raise ValueError(self._not_there())
        worker = (0, 1) if self.workers is None else (self.workers.index, self.workers.count)
        error = self._references.load(reference_of(fields, self.table, worker))
        if error is not None:
            raise ValueError(error)

    def _not_there(self) -> str:
        assert self._arguments is not None
        if self._arguments.path is None:
            return (
                "Embedding: the saved model refers to a table in RAM only, which ended with its process; give path= to "
                "the layer that is saved"
            )
        return (
            f"Embedding: the saved model refers to the table at {self._arguments.path}, and there is none; if it was "
            "moved, load with `with bunkbed.keras.moved({old: new}):`"
        )


def reference_of(fields: Json, table: Table, worker: tuple[int, int] = (0, 1)) -> Reference:
    """Return the saved reference; if several workers saved together, the reference to this worker's table.

    Tables of several workers may have the same uuid after `bunkbed.reshard`. Where the number of workers is that of the
    save, each has its own reference; otherwise a table has the one to a commit that it has.

    Args:
        fields: of the saved reference.
        table: the table that is to go back.
        worker: the number of this worker, and of all.
    """
    own = {name: value for name, value in fields.items() if name != "workers"}
    said: list[tuple[str, int]] = [(one, epoch) for one, epoch in fields.get("workers") or []]
    index, count = worker
    if len(said) == count and said[index][0] == table.uuid:
        return Reference(**{**own, "uuid": table.uuid, "epoch": said[index][1]})
    epochs = [epoch for one, epoch in said if one == table.uuid]
    if not epochs:
        return Reference(**own)
    present = {table.epoch, *table.snapshots().values()}
    epoch = next((one for one in epochs if one in present), epochs[0])
    return Reference(**{**own, "uuid": table.uuid, "epoch": epoch})


def alive(shared: weakref.ref[_Shared]) -> _Shared:
    """Return the table's shared object, to which TensorFlow's graphs refer weakly, as graphs outlive models.

    Raises:
        RuntimeError: it was deleted.
    """
    found = shared()
    if found is None:
        raise RuntimeError("the layers on this table are gone, and the table with them")
    return found


_lock = threading.Lock()
#: Shared objects by id(table), and by path while the table is not made yet.
_by_table: weakref.WeakValueDictionary[int, SharedTable] = weakref.WeakValueDictionary()
_by_path: weakref.WeakValueDictionary[str, SharedTable] = weakref.WeakValueDictionary()


def is_in_use(path: Path) -> bool:
    """Return whether a layer of this process has the table at `path`, which it may still have to make."""
    with _lock:
        return open_writer(resolve(path)) is not None or str(path.resolve()) in _by_path


def shared_of_table(table: Table) -> SharedTable:
    """Return the shared object of an open table."""
    with _lock:
        found = _by_table.get(id(table))
        return SharedTable(None, table, is_explicit=True) if found is None else found


def shared_of(
    arguments: LayerArguments, optimizer: Optimizer | None, make: Callable[..., SharedTable] = SharedTable
) -> SharedTable:
    """Return the shared object of the table that these arguments describe; call `make` if there is none yet.

    Raises:
        ValueError: a stored table, or the arguments of another layer on the same path, differ from these.
    """
    with _lock:
        arguments.settle()
        table = arguments.opened(optimizer)
        if table is not None:
            log_opening(table, len(table))
        if table is None and optimizer is not None:
            table = arguments.created(optimizer)
        key = None if arguments.path is None else str(arguments.path.resolve())
        waiting = None if key is None else _by_path.get(key)
        if waiting is not None and waiting.has_table:
            waiting = None  # its table is open, and found by id, or was closed since
        found = waiting if table is None else _by_table.get(id(table))
        if found is None and waiting is not None and table is not None:
            waiting.adopt(table)  # an earlier layer has no optimizer=, this one has
            found = waiting
        if found is None:
            found = make(arguments, table, is_explicit=optimizer is not None)
            if key is not None:
                _by_path[key] = found
        elif table is None:
            found.require_same(arguments)
        if optimizer is not None:
            found.is_explicit = True
        return found
