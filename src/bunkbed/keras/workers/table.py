"""Shared by all layers on one table that several workers train.

Under `tf.distribute.MultiWorkerMirroredStrategy` every worker has a separate table, in its own directory below `path`,
or in RAM:

- ``placement="replicated"``, ``path/replica-0001-of-0002``: each worker has all rows, and looks up without the others.
  A step exchanges the gradients of all occurrences of ids, and each worker adds and applies all: replicas stay
  bit-identical.
- ``placement="sharded"``, ``path/shard-0001-of-0002``: each worker has the rows that a hash assigns to it
  (`bunkbed.files.sharding`), and no others. A lookup asks all workers for their rows, and a step exchanges
  gradients as above; each worker applies those of its rows.

The gradients of a row are added one by one in the order (accumulated step, worker, lookup, position in the batch). So
the rows have the bits of one process that looks up the workers' batches one worker after another, and then steps once.
If a step looks a table up once, that is one batch: the workers' batches, concatenated. This holds for equal gradients:
Keras divides the mean loss of a worker by the number of workers, which is exact if that number is a power of two and
the batches have equal sizes; a ``loss_scale_factor`` must also be one. Every worker receives 4 * dim + 8 bytes
for each occurrence of an id in the batches of all workers, at every step, also while gradients accumulate; repeated ids
are not merged.

Rules:

1. Every worker takes part in every step, also with an empty batch, and with shards in every lookup, also in
   ``predict``. A worker that fails before the exchange sends its error instead: all raise, nothing changes.
2. Every message has the table's step and a checksum of the arguments: if workers resumed at different steps, or run
   different programs, all raise.
3. Saving commits on every worker, waits for all, and then returns the reference for the file, which has the epoch of
   each worker. So every epoch that a file refers to exists on all workers, and each worker finds its own when it loads
   the file. All workers must save, as Keras requires, each to its own file or all to the same.
4. Workers that crashed between two commits are at different steps. Loading the last saved model rewinds all.
5. A direct call of ``layer.table`` (`set`, `commit`, `rewind`) changes one worker only: make it on all.

Lookups of shards, steps and saves are collective, so workers must train, evaluate and save equally often. If the
process of a worker ends, TensorFlow reports that to the others. A lookup in a replica is not collective: an error in it
reaches the others only when its process ends.

Keras 3.15's own ``fit`` and ``evaluate`` fail under this strategy for any model: they build the model from a batch that
is still divided among replicas (``Attempt to convert a value (PerReplica) ...``), and reduce scalar losses along an
axis that these do not have (``Invalid reduction dimension 0``). ``strategy.run`` of ``model.train_step`` or of a custom
step works, and so does ``predict``. `keras.optimizers.LossScaleOptimizer` is refused: each worker would decide by
itself to skip a step, and the others would hang. A constant ``loss_scale_factor`` and bfloat16 work.

`bunkbed.reshard(path, shards=3)` changes the number of workers of shards after they have saved and ended, and
``shards=1`` makes one table of them, for serving. Workers may then have tables of the same uuid: the new worker ``i``
has that of the old worker ``i`` modulo their number, so that the model that was saved last loads.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike, NDArray

from bunkbed import _native
from bunkbed.adapters.references import Reference
from bunkbed.core.arguments import Floats
from bunkbed.core.optim import Optimizer
from bunkbed.core.types import Json
from bunkbed.files.sharding import shards_of
from bunkbed.keras.base.optimizers import is_update
from bunkbed.keras.base.types import KerasOptimizer, Tensor
from bunkbed.keras.shared.table import LayerArguments, SharedTable, alive, shared_of
from bunkbed.keras.tensorflow.callbacks import call
from bunkbed.keras.workers.group import Workers
from bunkbed.keras.workers.messages import error_message, message, sign_of, split_messages
from bunkbed.keras.workers.pending import WorkersPending
from bunkbed.sharded.base.bag_pooling import BagPooling
from bunkbed.table.table import Table


@dataclass(frozen=True)
class WorkersReference(Reference):
    """A kept epoch of each worker's table: (uuid, epoch), in order. The other four values are of this worker."""

    workers: tuple[tuple[str, int], ...] = ()


class WorkersTable(SharedTable):
    """One worker's table with its Keras variables and gradients."""

    workers: Workers

    def __init__(self, arguments: LayerArguments, table: Table, *, is_explicit: bool, workers: Workers) -> None:
        self.workers = workers
        self.pooling = BagPooling("table")
        super().__init__(arguments, table, is_explicit=is_explicit)

    @property
    def name(self) -> str:
        """The table's name, without the worker's own directory."""
        path = None if self._arguments is None else self._arguments.path
        return "table" if path is None else path.parent.name

    @property
    def label(self) -> str:
        """The start of error messages."""
        return f"table {self.name!r}"

    @property
    def pending(self) -> WorkersPending:
        """The pending gradients."""
        found = super().pending
        assert isinstance(found, WorkersPending)
        return found

    def _new_pending(self, table: Table) -> WorkersPending:
        return WorkersPending(table, self.workers)

    def _set_rows(self, table: Table, ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        if self.is_divided and table is self._table:
            own = shards_of(ids, self.workers.count) == self.workers.index
            ids, rows = ids[own], rows[own]
        table.set(ids, rows)

    # ---- training

    def sign(self, *doing: object) -> int:
        """Return a checksum that must be equal on all workers; see `bunkbed.keras.workers.messages`."""
        table = self.for_lookup()
        facts = (self.workers.placement, table.dim, table.num_rows, table.dtype, table.seed)
        return sign_of(*facts, table.init.native(), *doing)

    @property
    def step_now(self) -> int:
        """The table's step; 0 while the table is not made."""
        return self.table.step if self.has_table else 0

    def settle(self, gradients: Tensor, optimizer: KerasOptimizer, scaling: KerasOptimizer) -> Tensor:
        """Make the ops of an optimizer's step, in which every worker takes part; see `SharedTable.settle`."""
        self.workers.require_replica("a step")
        if scaling is not None:
            raise ValueError(
                f"Embedding: keras.optimizers.LossScaleOptimizer skips a step on each of {self.workers.count} workers "
                "by itself, and one that does not would wait for the others forever; use bfloat16 "
                "(mixed_bfloat16), which needs no scaling, or a constant loss_scale_factor= of the optimizer"
            )
        rule, definition, rate, unscale, follows = self._what_steps(optimizer, scaling)
        this, whose = weakref.ref(self), 0 if optimizer is None else id(optimizer)

        def offer(gradients: Tensor, rate: Tensor, unscale: Tensor, is_update: Tensor) -> Tensor:
            try:
                shared = alive(this)
                table = shared.table
                used = table.optimizer if definition is None else definition
                numbers = [float(rate), float(unscale), bool(is_update)]
                ids, grads, steps = shared.pending.offer(gradients, unscale=float(unscale), optimizer=whose)
                sign = shared.sign("update", used.native(), rule, *numbers, steps)
                return message(table.step, sign, table.dim, ids, grads)
            except Exception as error:  # the other workers wait for this worker's message
                return error_message(error)

        def conclude(gathered: Tensor, rate: Tensor, is_update: Tensor) -> Tensor:
            shared = alive(this)
            table = shared.table
            offered = split_messages(gathered, shared.workers.index, shared.label, table.dim)
            if definition is not None and definition != table.optimizer:
                table.optimizer = definition
            lr = float(rate) if follows else None
            shared.pending.conclude(offered, rule, lr, is_update=bool(is_update), optimizer=whose)
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
        """Commit on every worker and keep the epochs; see `SharedTable.save`. For ``get_weights``, on this worker only.

        Raises:
            RuntimeError: another worker failed, or is at another step.
        """
        if in_process:
            return super().save(in_process=True)

        def commit() -> Json | None:
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
        self._references.drop_old()  # the new epoch is durable on all workers
        return WorkersReference(**mine, workers=tuple((each["uuid"], each["epoch"]) for each in said))


class _Shard(Table):
    """One worker's part of a sharded table. It raises an error for ids of other workers."""

    def __init__(
        self, spec: _native.TableSpec, path: Path | None, mode: Literal["w", "r"], *, workers: Workers, **named: Any
    ) -> None:
        super().__init__(spec, path, mode, **named)
        self._workers = workers

    def _require_own(self, ids: ArrayLike) -> None:
        array = np.asarray(ids)
        if array.dtype.kind not in "iu" or array.size == 0:
            return  # the call itself checks them
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

    def lookup(self, ids: ArrayLike, **arguments: Any) -> Floats:
        """See `bunkbed.Table.lookup`. ValueError: another worker's id."""
        self._require_own(ids)
        return super().lookup(ids, **arguments)

    def lookup_bags(self, ids: ArrayLike, offsets: ArrayLike, **arguments: Any) -> Floats:
        """See `bunkbed.Table.lookup_bags`. ValueError: another worker's id."""
        self._require_own(ids)
        return super().lookup_bags(ids, offsets, **arguments)

    def get(self, ids: ArrayLike, slot: str = "weight") -> Floats:
        """See `bunkbed.Table.get`. ValueError: another worker's id."""
        self._require_own(ids)
        return super().get(ids, slot)

    def set(self, ids: ArrayLike, values: ArrayLike, slot: str = "weight") -> None:
        """See `bunkbed.Table.set`. ValueError: another worker's id."""
        self._require_own(ids)
        super().set(ids, values, slot)

    def update(self, ids: ArrayLike, grads: ArrayLike, **arguments: Any) -> None:
        """See `bunkbed.Table.update`. ValueError: another worker's id."""
        self._require_own(ids)
        super().update(ids, grads, **arguments)


def workers_table_of(arguments: LayerArguments, optimizer: Optimizer | None, workers: Workers) -> SharedTable:
    """Return the shared object of the table that these arguments describe, on every worker; see `shared_of`.

    Args:
        arguments: their path is the user's, above the parts of all workers.
        optimizer, workers: of the layer.

    Raises:
        ValueError: the workers have different arguments, or the files at the path are not theirs.
    """
    path, definition = arguments.path, arguments.definition
    told_of = [
        definition.num_rows,
        definition.dim,
        None if definition.init is None else list(definition.init.native()),
        arguments.same.get("dtype"),
        workers.placement,
    ]
    told_of += [None if optimizer is None else repr(optimizer.native()), path is None, "seed" in arguments.same]
    facts = {"facts": repr(told_of), "seed": definition.seed, "same": arguments.same.get("seed")}
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
    arguments = replace(
        arguments,
        definition=replace(definition, seed=said[0]["seed"]),
        make=partial(_Shard, workers=workers) if workers.is_sharded else Table,
    )
    has_met = False

    def meet(failure: Exception | None = None) -> None:
        # Before the token is made: making a variable is a collective too, so all workers must make it, or none.
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
    """Raise ValueError if ``table=`` is not a table that these workers train already."""
    theirs = shared.workers
    if theirs is None or theirs.strategy is not workers.strategy or theirs.placement != workers.placement:
        raise ValueError(
            f"Embedding: table= under {workers.count} workers must be another layer's .table with placement="
            f"{workers.placement!r}; give path= (or neither, for a table in RAM) instead"
        )
