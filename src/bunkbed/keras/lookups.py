"""Lookups as TensorFlow ops: rows out, gradients back to `Pending`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record  # for the one question that TensorFlow has no public name for

from bunkbed.bag_gradients import BagGradients, FloatArray, IntArray
from bunkbed.keras.callbacks import call
from bunkbed.keras.shared import SharedTable


def is_recorded(token: Any) -> bool:
    """Whether a tape that runs now watches the token, or would on reading it."""
    return bool(record.should_record_backprop([tf.convert_to_tensor(token.value)]))


def rows_of(shared: SharedTable, ids: Any, *, train: bool, touch: bool, is_certain: bool) -> Any:
    """float32[..., dim] rows of an int64[...] tensor of ids.

    Args:
        train: let gradients come back; the driver of `shared` is set.
        touch: see `bunkbed.Table.lookup`.
        is_certain: that a gradient will come back.
    """
    name = f"bunkbed lookup {shared.name}"

    def plain(ids: IntArray) -> FloatArray:
        rows: FloatArray = shared.for_lookup().lookup(ids, touch=touch)
        return rows

    def trained(ids: IntArray, place: Any, _: Any) -> tuple[FloatArray, np.int64]:
        table, pending = shared.table, shared.pending
        batch = table.batch(ids)
        rows = table.lookup_batch(batch, ids.size, touch=touch)
        return rows.reshape(*ids.shape, table.dim), np.int64(pending.began(batch, int(place[0]), is_certain=is_certain))

    place = _place(shared)
    if not train:
        rows = call(name, plain, [ids], tf.float32)
    else:
        # The token's value makes the lookup follow the step before, wherever the graph runs it.
        rows, handle = call(name, trained, [ids, place, tf.stop_gradient(shared.token.value)], [tf.float32, tf.int64])

        def push(handle: Any, ids: IntArray, grads: FloatArray, place: Any, unscale: Any) -> np.float64:
            grads = grads.reshape(-1, shared.table.dim)
            value = shared.pending.push(
                int(handle), tuple(place.tolist()), ids.reshape(-1), grads, unscale=float(unscale)
            )
            return np.float64(value)

        rows = _answered(shared, rows, handle, [ids], place, push)
    rows.set_shape([*ids.shape, shared.dim]) if not tf.executing_eagerly() else None
    return rows


def bags_of(
    shared: SharedTable,
    ids: Any,
    splits: Any,
    weights: Any,
    combiner: str,
    *,
    skip_zero: bool,
    train: bool,
    touch: bool,
    is_certain: bool,
) -> Any:
    """float32[B, dim] pooled rows of int64[N] ids, int64[B + 1] row splits and float32[N] weights or None.

    Args:
        combiner: ``"sum"``, ``"mean"`` or ``"sqrtn"``, as `tf.nn.embedding_lookup_sparse` has them.
        skip_zero: leave id 0 out.
        train, touch, is_certain: see `rows_of`.
    """
    name = f"bunkbed bags {shared.name}"
    has_weights = weights is not None
    inputs = [ids, splits, tf.zeros([0], tf.float32) if weights is None else weights]

    def bags(ids: IntArray, splits: IntArray, weights: FloatArray) -> _Bags:
        return _Bags(ids, splits, weights if has_weights else None, combiner, skip_zero)

    def plain(*arrays: Any) -> FloatArray:
        return bags(*arrays).lookup(shared.for_lookup(), combiner, touch=touch)

    def trained(
        ids: IntArray, splits: IntArray, weights: FloatArray, place: Any, _: Any
    ) -> tuple[FloatArray, np.int64]:
        made = bags(ids, splits, weights)
        pooled = made.lookup(shared.table, combiner, touch=touch)
        return pooled, np.int64(
            shared.pending.began(shared.table.batch(made.ids), int(place[0]), is_certain=is_certain)
        )

    place = _place(shared)
    if not train:
        pooled = call(name, plain, inputs, tf.float32)
    else:
        pooled, handle = call(
            name, trained, [*inputs, place, tf.stop_gradient(shared.token.value)], [tf.float32, tf.int64]
        )

        def push(
            handle: Any,
            ids: IntArray,
            splits: IntArray,
            weights: FloatArray,
            grads: FloatArray,
            place: Any,
            unscale: Any,
        ) -> np.float64:
            made = bags(ids, splits, weights)
            value = shared.pending.push(
                int(handle), tuple(place.tolist()), made.ids, grads, unscale=float(unscale), bags=made.gradients()
            )
            return np.float64(value)

        pooled = _answered(shared, pooled, handle, inputs, place, push)
    if not tf.executing_eagerly():
        pooled.set_shape([None, shared.dim])
    return pooled


def _answered(
    shared: SharedTable, rows: Any, handle: Any, inputs: list[Any], place: Any, push: Callable[..., Any]
) -> Any:
    """`rows` whose gradient goes to `push`, and whose answer becomes the token's gradient."""
    scale = shared.driver.loss_scale

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def attach(rows: Any, _: Any) -> Any:
        def backward(grads: Any) -> Any:
            factor = scale()
            unscale = tf.ones([], tf.float32) if factor is None else 1.0 / tf.cast(factor, tf.float32)
            grads = tf.convert_to_tensor(grads)  # from IndexedSlices, where rows were gathered from
            value = call(f"bunkbed gradients {shared.name}", push, [handle, *inputs, grads, place, unscale], tf.float64)
            if not tf.executing_eagerly():
                value.set_shape([])
                with tf.control_dependencies([value]):
                    shared.token.fence.assign_add(1)
            return None, value

        return tf.identity(rows), backward

    return attach(rows, tf.convert_to_tensor(shared.token.value))


def _place(shared: SharedTable) -> Any:
    """int64[2]: replica and place in the forward order, by which gradients are summed."""
    replica = tf.distribute.get_replica_context()
    number = 0 if replica is None else tf.get_static_value(replica.replica_id_in_sync_group)
    return tf.constant([0 if number is None else int(number), shared.next_place()], tf.int64)


class _Bags:
    """Bags of ids as the table wants them: int64[N], int64[B] offsets, float32[N] weights or None."""

    def __init__(
        self, ids: IntArray, splits: IntArray, weights: FloatArray | None, combiner: str, skip_zero: bool
    ) -> None:
        if skip_zero:
            kept = ids != 0
            before = np.concatenate([[0], np.cumsum(kept)])
            ids, splits = ids[kept], before[splits]
            weights = None if weights is None else weights[kept]
        self.ids = ids
        self.weights = weights
        self._combiner = combiner
        self._splits = splits

    def lookup(self, table: Any, combiner: str, *, touch: bool) -> FloatArray:
        pooled: FloatArray = table.lookup_bags(
            self.ids, self._splits[:-1], pooling=combiner, weights=self.weights, touch=touch
        )
        return pooled

    def gradients(self) -> BagGradients:
        """What each id has of its bag's gradient: its weight by the sum of weights, or the root of that of squares."""
        offsets, weights = np.ascontiguousarray(self._splits[:-1]), self.weights
        if self._combiner == "sum" or (self._combiner == "mean" and weights is None):
            return BagGradients(self.ids, offsets, weights, self._combiner == "mean")
        lengths = np.diff(self._splits)
        given = np.ones(self.ids.size, np.float32) if weights is None else weights
        terms = given if self._combiner == "mean" else given * given
        # reduceat cannot say that a bag is empty; a cumulative sum in float64 can.
        sums = np.diff(np.concatenate([[0.0], np.cumsum(terms, dtype=np.float64)])[self._splits])
        divisors = sums if self._combiner == "mean" else np.sqrt(sums)
        factors = given / np.repeat(np.where(lengths > 0, divisors, 1.0), lengths)
        return BagGradients(self.ids, offsets, factors.astype(np.float32), False)
