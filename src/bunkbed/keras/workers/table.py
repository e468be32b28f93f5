"""What all layers on one table share where several workers train it.

Under `tf.distribute.MultiWorkerMirroredStrategy` every worker has a table of its own, in a directory of its own below
`path`, or in RAM:

- ``placement="replicated"``, ``path/replica-0001-of-0002``: each has all rows, and looks up without the others. A step
  exchanges the summed gradients of the workers' batches, and each applies all of them: replicas stay bit-identical.
- ``placement="sharded"``, ``path/shard-0001-of-0002``: each has the rows whose hash is its own
  (`bunkbed.files.sharding`), and never another's. A lookup asks all for their rows, and a step gives each its own
  gradients.

What holds:

1. Every worker takes part in every step, also one whose batch was empty, and with shards in every lookup, also in
   ``predict``. What goes wrong on one before the exchange is sent in place of its part: all raise, nothing changes.
2. Every exchange says at which step of the table each is, and with which arguments: workers that resumed at different
   steps, or run different programs, raise.
3. Saving commits on every worker, then waits for all, and only then gives the reference that is written to a file,
   which names the epoch of each. So every epoch that a file refers to is there on all workers, and each finds its own
   when the file is loaded. All workers must save, as Keras asks of them anyway, each to a file of its own or the same.
4. Workers that crashed between two commits are at different steps. Loading the last saved model puts all back.
5. What is done to ``layer.table`` by hand (`set`, `commit`, `rewind`) is done on one worker: do it on all.

Lookups of shards, steps and saves are collective, so workers must train, evaluate and save equally often; TensorFlow
tells the others when the process of one ends. A lookup in a replica is not collective: an error in it ends the others
once its process has ended.

Keras 3.15's own ``fit`` and ``evaluate`` fail under this strategy for any model, without a layer of ours too: they
build the model from a batch that is still divided among replicas (``Attempt to convert a value (PerReplica) ...``), and
reduce scalar losses along an axis they do not have (``Invalid reduction dimension 0``). ``strategy.run`` of
``model.train_step`` or of a step of your own works, and so does ``predict``. `keras.optimizers.LossScaleOptimizer` lets
each worker decide whether a step is skipped, so that one would wait for the other forever: it is refused; a constant
``loss_scale_factor`` and bfloat16 work.

The rows of all shards in one table, for serving::

    whole = bunkbed.create("whole", dim=dim, num_rows=rows, optimizer=..., init=..., seed=seed)
    for part in sorted(Path("table").glob("shard-*-of-*")):
        with bunkbed.open(part, mode="r") as shard:
            for ids, values in shard.scan():
                whole.set(ids, values)
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from bunkbed.adapters.references import Reference
from bunkbed.core.optim import Optimizer
from bunkbed.files.sharding import shards_of
from bunkbed.keras.base.optimizers import is_update
from bunkbed.keras.shared.table import SharedTable, TableArguments, alive, shared_of
from bunkbed.keras.tensorflow.callbacks import call
from bunkbed.keras.workers.group import Workers
from bunkbed.keras.workers.messages import error_message, message, sign_of, told
from bunkbed.keras.workers.pending import WorkersPending
from bunkbed.table.bag_pooling import BagPooling
from bunkbed.table.table import Table


@dataclass(frozen=True)
class WorkersReference(Reference):
    """A kept epoch of each worker's table: (uuid, epoch), in order. The other four values are this worker's."""

    workers: tuple[tuple[str, int], ...] = ()


class WorkersTable(SharedTable):
    """One worker's table and what Keras needs of it."""

    workers: Workers

    def __init__(self, arguments: TableArguments, table: Any, *, is_explicit: bool, workers: Workers) -> None:
        self.workers = workers
        self.pooling = BagPooling("table")
        super().__init__(arguments, table, is_explicit=is_explicit)

    @property
    def name(self) -> str:
        """The table's, without the worker's own folder."""
        path = None if self._arguments is None else self._arguments.path
        return "table" if path is None else path.parent.name

    @property
    def label(self) -> str:
        """What errors begin with."""
        return f"table {self.name!r}"

    @property
    def pending(self) -> WorkersPending:
        """The gradients that wait for a step."""
        found = super().pending
        assert isinstance(found, WorkersPending)
        return found

    def _start(self, table: Any) -> None:
        if self.is_divided and type(table) is Table:
            table.__class__ = _Shard
            cast("_Shard", table)._workers = self.workers
        super()._start(table)

    def _new_pending(self, table: Any) -> WorkersPending:
        return WorkersPending(table, self.workers)

    def _set_rows(self, table: Any, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        if self.is_divided and table is self._table:
            own = shards_of(ids, self.workers.count) == self.workers.index
            ids, rows = ids[own], rows[own]
        table.set(ids, rows)

    # ---- training

    def sign(self, *doing: object) -> int:
        """What workers must have in common to go on; see `bunkbed.keras.workers.messages`."""
        table = self.for_lookup()
        facts = (self.workers.placement, table.dim, table.num_rows, table.dtype, table.seed)
        return sign_of(*facts, table.init.native(), *doing)

    @property
    def step_now(self) -> int:
        """The table's step; 0 while it is not there."""
        return int(self._table.step) if self.has_table else 0

    def settle(self, gradients: Any, optimizer: Any, scaling: Any) -> Any:
        """The ops of an optimizer's step, in which every worker takes part; see `SharedTable.settle`."""
        self.workers.require_replica("a step")
        if scaling is not None:
            raise ValueError(
                f"Embedding: keras.optimizers.LossScaleOptimizer skips a step on each of {self.workers.count} workers "
                "by itself, and one that does not would wait for the others forever; use bfloat16 "
                "(mixed_bfloat16), which needs no scaling, or a constant loss_scale_factor= of the optimizer"
            )
        rule, definition, rate, unscale, follows = self._what_steps(optimizer, scaling)
        this, whose = weakref.ref(self), 0 if optimizer is None else id(optimizer)

        def offer(gradients: Any, rate: Any, unscale: Any, is_update: Any) -> Any:
            try:
                shared = alive(this)
                table = shared.table
                used = table.optimizer if definition is None else definition
                numbers = [float(rate), float(unscale), bool(is_update)]
                sign = shared.sign("update", used.native(), rule, *numbers)
                ids, sums = shared.pending.offer(
                    gradients, unscale=float(unscale), is_update=bool(is_update), optimizer=whose
                )
                return message(table.step, sign, table.dim, ids, sums)
            except Exception as error:  # the others wait for this worker's part
                return error_message(error)

        def conclude(gathered: Any, rate: Any, is_update: Any) -> Any:
            shared = alive(this)
            table = shared.table
            offered = told(gathered, shared.workers.index, shared.label, table.dim)
            if definition is not None and definition != table.optimizer:
                table.optimizer = definition
            lr = float(rate) if follows else None
            shared.pending.conclude(offered, rule, lr, is_update=bool(is_update))
            return np.zeros((), np.float64)

        ends = is_update(optimizer)
        said = call("offer", self.name, offer, [gradients, rate, unscale, ends], tf.int64)
        gathered = self.workers.all_gather(said)
        zero = call("update", self.name, conclude, [gathered, rate, ends], tf.float64)
        if not tf.executing_eagerly():
            zero.set_shape([])
        return zero

    # ---- saved weights

    def save(self, *, in_process: bool = False) -> Reference | None:
        """Commits on every worker and keeps the epochs; see `SharedTable.save`. For ``get_weights`` this worker only.

        Raises:
            RuntimeError: another worker could not, or is at another step.
        """
        if in_process:
            return super().save(in_process=True)

        def commit() -> Any:
            reference = self._keep_epoch(None, drop=False)
            return None if reference is None else reference.fields()

        said = self.workers.meet(f"saving table {self.name!r}", commit)
        if any((each is None) != (said[0] is None) or (each and each["step"] != said[0]["step"]) for each in said):
            where = ", ".join(
                f"worker {index} {'none' if each is None else each['step']}" for index, each in enumerate(said)
            )
            raise RuntimeError(
                f"table {self.name!r}: its workers save different steps: {where}; every worker must save after the "
                "same step"
            )
        mine = said[self.workers.index]
        if mine is None:
            return None
        assert self._references is not None
        self._references.drop_old()  # now that the new epoch is durable everywhere
        return WorkersReference(**mine, workers=tuple((each["uuid"], each["epoch"]) for each in said))


class _Shard(Table):
    """One worker's part of a sharded table, which has its own rows, and raises where it is asked for another's."""

    _workers: Workers

    def _require_own(self, ids: Any) -> None:
        array = np.asarray(ids)
        if array.dtype.kind not in "iu" or array.size == 0:
            return  # said by the call itself
        flat = array.astype(np.int64).reshape(-1)
        owners = shards_of(flat, self._workers.count)
        others = np.flatnonzero((owners != self._workers.index) & (flat >= 0))
        if len(others):
            first = int(others[0])
            raise ValueError(
                f"table {self.name!r}: id {flat[first]} at position {first} is a row of worker {owners[first]}, and "
                f"this is worker {self._workers.index}, whose table has rows of its own only; look up with the layer, "
                "inside strategy.run(...)"
            )

    def lookup(self, ids: Any, **arguments: Any) -> Any:
        """See `bunkbed.Table.lookup`. ValueError: another worker's id."""
        self._require_own(ids)
        return super().lookup(ids, **arguments)

    def lookup_bags(self, ids: Any, offsets: Any, **arguments: Any) -> Any:
        """See `bunkbed.Table.lookup_bags`. ValueError: another worker's id."""
        self._require_own(ids)
        return super().lookup_bags(ids, offsets, **arguments)

    def get(self, ids: Any, slot: str = "weight") -> Any:
        """See `bunkbed.Table.get`. ValueError: another worker's id."""
        self._require_own(ids)
        return super().get(ids, slot)

    def set(self, ids: Any, values: Any, slot: str = "weight") -> None:
        """See `bunkbed.Table.set`. ValueError: another worker's id."""
        self._require_own(ids)
        super().set(ids, values, slot)

    def update(self, ids: Any, grads: Any, **arguments: Any) -> None:
        """See `bunkbed.Table.update`. ValueError: another worker's id."""
        self._require_own(ids)
        super().update(ids, grads, **arguments)


def workers_table_of(arguments: TableArguments, optimizer: Optimizer | None, workers: Workers) -> SharedTable:
    """What the layers share whose table these arguments describe, on every worker; see `shared_of`.

    Args:
        arguments: with the path that the user gave, of all workers' parts.
        optimizer, workers: of the layer.

    Raises:
        ValueError: the workers were told different things, or what lies at the path is not theirs.
    """
    path = arguments.path
    told_of = [
        arguments.input_dim,
        arguments.output_dim,
        list(arguments.init.native()),
        arguments.dtype,
        workers.placement,
    ]
    told_of += [None if optimizer is None else repr(optimizer.native()), path is None, "seed" in arguments.same]
    facts = {"facts": repr(told_of), "seed": arguments.seed, "same": arguments.same.get("seed")}
    said = workers.meet("making a layer", lambda: {**facts, **({} if path is None else {"parts": workers.parts(path)})})
    for index, each in enumerate(said):
        if each["facts"] != said[0]["facts"] or each["same"] != said[0]["same"]:
            raise ValueError(
                f"Embedding: worker {index} makes a layer with other arguments than worker 0: {each['facts']} and "
                f"{said[0]['facts']}"
            )
    if path is not None:
        workers.agree_on_parts(path, [each["parts"] for each in said])
    if path is not None:
        arguments = replace(arguments, path=workers.place(path))
    arguments = replace(arguments, seed=said[0]["seed"])
    has_met = False

    def meet(failure: Exception | None = None) -> None:
        # Before the token is made: making a variable is an exchange too, and all must come to it or none.
        nonlocal has_met
        has_met = True
        workers.meet("opening its table", lambda: _raised(failure))

    def make(*given: Any, **named: Any) -> WorkersTable:
        meet()
        return WorkersTable(*given, **named, workers=workers)

    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
        found = shared_of(arguments, optimizer, make)
    except Exception as error:
        if not has_met:
            meet(error)
        raise
    if not has_met:
        meet()  # another layer made it
    return found


def _raised(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def require_shared_by(workers: Workers, shared: SharedTable) -> None:
    """Raises ValueError where ``table=`` is not one that these workers train already."""
    theirs = shared.workers
    if theirs is None or theirs.strategy is not workers.strategy or theirs.placement != workers.placement:
        raise ValueError(
            f"Embedding: table= under {workers.count} workers must be another layer's .table with placement="
            f"{workers.placement!r}; give path= (or neither, for a table in RAM) instead"
        )
