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


def rows_of(shared: SharedTable, ids: Tensor, *, train: bool, touch: bool, is_certain: bool) -> Tensor:
    """Return float32[..., dim] rows of an int64[...] tensor of ids.

    Args:
        train: whether the rows may get gradients.
        touch: see `bunkbed.Table.lookup`.
        is_certain: whether the rows will get gradients for certain.
    """
    name, this = shared.name, weakref.ref(shared)

    def plain(ids: IntArray) -> FloatArray:
        rows: FloatArray = alive(this).for_lookup().lookup(ids, touch=touch)
        return rows

    def trained(ids: IntArray, place: Tensor, token: Tensor) -> tuple[FloatArray, np.int64]:
        found = alive(this)
        require_zero(found, token)
        table, pending = found.table, found.pending
        batch = table.batch(ids)
        rows = table.lookup_batch(batch, ids.size, touch=touch)
        return rows.reshape(*ids.shape, table.dim), np.int64(pending.began(batch, int(place[0]), is_certain=is_certain))

    def push(handle: Tensor, ids: IntArray, grads: FloatArray, place: Tensor) -> np.float64:
        found = alive(this)
        grads = grads.reshape(-1, found.dim)
        return np.float64(found.pending.push(int(handle), tuple(place.tolist()), ids.reshape(-1), grads))

    if not train:
        rows = call("lookup", name, plain, [ids], tf.float32)
    else:
        place = place_of(shared)
        rows, handle = call(
            "lookup", name, trained, [ids, place, tf.stop_gradient(shared.token.value)], [tf.float32, tf.int64]
        )
        rows = answered(shared, rows, handle, [ids], place, push)
    if not tf.executing_eagerly():
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
    name, this = shared.name, weakref.ref(shared)
    has_weights = weights is not None
    inputs = [ids, splits, tf.zeros([0], tf.float32) if weights is None else weights]

    def bags(ids: IntArray, splits: IntArray, weights: FloatArray) -> Bags:
        return Bags(ids, splits, weights if has_weights else None, combiner, skip_zero)

    def plain(*arrays: Any) -> FloatArray:
        return bags(*arrays).lookup(alive(this).for_lookup(), touch=touch)

    def trained(
        ids: IntArray, splits: IntArray, weights: FloatArray, place: Tensor, token: Tensor
    ) -> tuple[FloatArray, np.int64]:
        found, made = alive(this), bags(ids, splits, weights)
        require_zero(found, token)
        pooled = made.lookup(found.table, touch=touch)
        batch = found.table.batch(made.ids)
        return pooled, np.int64(found.pending.began(batch, int(place[0]), is_certain=is_certain))

    def push(
        handle: Tensor, ids: IntArray, splits: IntArray, weights: FloatArray, grads: FloatArray, place: Tensor
    ) -> np.float64:
        made = bags(ids, splits, weights)
        order = tuple(place.tolist())
        return np.float64(alive(this).pending.push(int(handle), order, made.ids, grads, bags=made.gradients()))

    if not train:
        pooled = call("bags", name, plain, inputs, tf.float32)
    else:
        place = place_of(shared)
        token = tf.stop_gradient(shared.token.value)
        pooled, handle = call("bags", name, trained, [*inputs, place, token], [tf.float32, tf.int64])
        pooled = answered(shared, pooled, handle, inputs, place, push)
    if not tf.executing_eagerly():
        pooled.set_shape([None, shared.dim])
    return pooled


def answered(
    shared: SharedTable, rows: Tensor, handle: Tensor, inputs: list[Any], place: Tensor, push: Callable[..., Tensor]
) -> Tensor:
    """Return `rows` whose gradient goes to `push`; the result of `push` becomes the token's gradient."""
    if "loop_body" in tf.get_current_name_scope():
        raise ValueError(
            f"table {shared.name!r}: a lookup inside tf.vectorized_map loses its gradient; look all ids up at once, "
            "outside of it"
        )
    name = shared.name

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
