"""Lookups as TensorFlow ops, whose gradients go to `Pending`.

Callbacks refer to `SharedTable` weakly: TensorFlow keeps the gradient functions of a graph, and with them the graph, in
a registry until the process ends, and tables must close with the last layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from bunkbed.adapters.bag_gradients import FloatArray, IntArray
from bunkbed.keras.base.bags import Bags
from bunkbed.keras.base.types import Tensor
from bunkbed.keras.shared.table import SharedTable, alive
from bunkbed.keras.tensorflow.callbacks import call
from bunkbed.table.core import Batch
from bunkbed.table.table import Table


def rows_of(shared: SharedTable, ids: Tensor, *, train: bool, touch: bool, is_certain: bool) -> Tensor:
    """Return float32[..., dim] rows of an int64[...] tensor of ids.

    Args:
        train: whether the rows may get gradients.
        touch: see `bunkbed.Table.lookup`.
        is_certain: whether the rows will get gradients for certain.
    """

    def look_up(table: Table, ids: IntArray) -> FloatArray:
        return table.lookup(ids, touch=touch)

    def look_up_batch(table: Table, ids: IntArray) -> tuple[FloatArray, Batch]:
        batch = table.batch(ids)
        return table.lookup_batch(batch, ids.size, touch=touch).reshape(*ids.shape, table.dim), batch

    rows = _looked_up("lookup", shared, [ids], look_up, look_up_batch, None, train=train, is_certain=is_certain)
    if not tf.executing_eagerly() and ids.shape.rank is not None:
        rows.set_shape([*ids.shape, shared.dim])
    return rows


def bags_of(
    shared: SharedTable,
    ids: Tensor,
    splits: Tensor,
    weights: Tensor,
    combiner: str,
    *,
    skip_zero: bool,
    train: bool,
    touch: bool,
    is_certain: bool,
) -> Tensor:
    """Return float32[B, dim] pooled rows of int64[N] ids, int64[B + 1] row splits and float32[N] weights or None.

    Args:
        combiner: ``"sum"``, ``"mean"`` or ``"sqrtn"``, as in `tf.nn.embedding_lookup_sparse`.
        skip_zero: whether to skip id 0.
        train, touch, is_certain: see `rows_of`.
    """
    inputs, bags = bag_inputs(ids, splits, weights, combiner, skip_zero)

    def look_up(table: Table, *arrays: Any) -> FloatArray:
        return bags(*arrays).lookup(table, touch=touch)

    def look_up_batch(table: Table, *arrays: Any) -> tuple[FloatArray, Batch]:
        made = bags(*arrays)
        return made.lookup(table, touch=touch), table.batch(made.ids)

    pooled = _looked_up("bags", shared, inputs, look_up, look_up_batch, bags, train=train, is_certain=is_certain)
    if not tf.executing_eagerly():
        pooled.set_shape([None, shared.dim])
    return pooled


def bag_inputs(
    ids: Tensor, splits: Tensor, weights: Tensor, combiner: str, skip_zero: bool
) -> tuple[list[Tensor], Callable[..., Bags]]:
    """Return the inputs of ops on bags, and what makes `Bags` of their arrays."""
    has_weights = weights is not None

    def bags(ids: IntArray, splits: IntArray, weights: FloatArray) -> Bags:
        return Bags(ids, splits, weights if has_weights else None, combiner, skip_zero)

    return [ids, splits, weights if has_weights else tf.zeros([0], tf.float32)], bags


def _looked_up(
    what: str,
    shared: SharedTable,
    inputs: list[Tensor],
    look_up: Callable[..., FloatArray],
    look_up_batch: Callable[..., tuple[FloatArray, Batch]],
    bags: Callable[..., Bags] | None,
    *,
    train: bool,
    is_certain: bool,
) -> Tensor:
    """Return what `look_up` gives of the table and the arrays of `inputs`; with `train`, `look_up_batch`.

    Args:
        what: for the profiler.
        bags: makes the bags of `inputs`; None if these are ids.
    """
    name, this = shared.name, weakref.ref(shared)

    def plain(*arrays: Any) -> FloatArray:
        return look_up(alive(this).for_lookup(), *arrays)

    def trained(*arrays: Any) -> tuple[FloatArray, np.int64]:
        *given, place, token = arrays
        found = alive(this)
        require_zero(found, token)
        rows, batch = look_up_batch(found.table, *given)
        return rows, np.int64(found.pending.began(batch, int(place[0]), is_certain=is_certain))

    if not train:
        return call(what, name, plain, inputs, tf.float32)
    place = place_of(shared)
    token = tf.stop_gradient(shared.token.value)
    rows, handle = call(what, name, trained, [*inputs, place, token], [tf.float32, tf.int64])
    return answered(shared, rows, handle, inputs, place, bags)


def answered(
    shared: SharedTable,
    rows: Tensor,
    handle: Tensor,
    inputs: list[Tensor],
    place: Tensor,
    bags: Callable[..., Bags] | None,
) -> Tensor:
    """Return `rows` whose gradients go to `Pending.push`; the result of that becomes the token's gradient."""
    if "loop_body" in tf.get_current_name_scope():
        raise ValueError(
            f"table {shared.name!r}: a lookup inside tf.vectorized_map loses its gradient; look all ids up at once, "
            "outside of it"
        )
    name, this = shared.name, weakref.ref(shared)

    def push(handle: Tensor, *arrays: Any) -> np.float64:
        *given, grads, place = arrays
        found, order = alive(this), tuple(place.tolist())
        if bags is None:
            number = found.pending.push(int(handle), order, given[0].reshape(-1), grads.reshape(-1, found.dim))
        else:
            made = bags(*given)
            number = found.pending.push(int(handle), order, made.ids, grads, bags=made.gradients())
        return np.float64(number)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def attach(rows: Tensor, _: Tensor) -> Tensor:
        def backward(grads: Tensor) -> Tensor:
            grads = tf.convert_to_tensor(grads)  # from IndexedSlices, if the model gathered from `rows`
            value = call("gradients", name, push, [handle, *inputs, grads, place], tf.float64)
            if not tf.executing_eagerly():
                value.set_shape([])
            return None, value

        return tf.identity(rows), backward

    return attach(rows, tf.convert_to_tensor(shared.token.value))


def require_zero(shared: SharedTable, token: Tensor) -> None:
    """Raise RuntimeError if a caller other than a step changed the token's value, which every lookup gets."""
    if token != 0.0:
        raise RuntimeError(
            f"table {shared.name!r}: its token's variable was set to {float(token):g} and no row was updated; give the "
            "optimizer the token itself, layer.token or bunkbed.keras.token_of(table), not its .value"
        )


def place_of(shared: SharedTable) -> Tensor:
    """Return int64[2]: replica and place in the forward order, the order in which gradients are summed."""
    replica = tf.distribute.get_replica_context()
    number = 0 if replica is None else tf.get_static_value(replica.replica_id_in_sync_group)
    return tf.constant([0 if number is None else int(number), shared.next_place()], tf.int64)
