"""Lookups of a table whose rows are divided among workers: ids go to all workers, rows come from their owners.

1. *Ask*: each worker sends the distinct ids of its batch to all.
2. *Answer*: each worker looks up the ids that it owns, each once, and sends their rows to all.
3. *Finish*: each worker selects the rows of its batch from the answers.

Both exchanges gather and do not add, so rows keep their bits. A worker without ids asks for none, and still answers.
Gradients go to `Pending` as in other lookups, and to their owners with the step.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from bunkbed.files.sharding import shards_of
from bunkbed.keras.base.types import Tensor
from bunkbed.keras.shared.lookups import answered, bag_inputs, place_of, require_zero
from bunkbed.keras.shared.table import alive
from bunkbed.keras.tensorflow.callbacks import call
from bunkbed.keras.workers.messages import Body, FloatArray, IntArray, error_message, message, split_messages
from bunkbed.keras.workers.table import WorkersTable
from bunkbed.table.table import POOLINGS


def rows_of_workers(shared: WorkersTable, ids: Tensor, *, train: bool, touch: bool, is_certain: bool) -> Tensor:
    """Return float32[..., dim] rows of an int64[...] tensor of ids; see `bunkbed.keras.shared.lookups.rows_of`."""
    dim = shared.dim
    place = place_of(shared)
    flat = tf.reshape(ids, [-1])
    rows, handle = _exchanged(shared, flat, place, train=train, touch=touch, is_certain=is_certain)
    rows = tf.reshape(rows, tf.concat([tf.shape(ids), [dim]], 0))
    if train:
        rows = answered(shared, rows, handle, [ids], place, None)
    if not tf.executing_eagerly() and ids.shape.rank is not None:
        rows.set_shape([*ids.shape, dim])
    return rows


def bags_of_workers(
    shared: WorkersTable,
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
    """Return float32[B, dim] pooled rows; see `bunkbed.keras.shared.lookups.bags_of`."""
    this, dim = weakref.ref(shared), shared.dim
    inputs, bags = bag_inputs(ids, splits, weights, combiner, skip_zero)

    def kept(*arrays: Any) -> IntArray:
        return bags(*arrays).ids

    def pool(rows: FloatArray, *arrays: Any) -> FloatArray:
        made = bags(*arrays)
        pooled = np.empty((len(made.offsets), dim), np.float32)
        alive(this).pooling.pool(rows.copy(), made.offsets, POOLINGS.index(combiner), made.weights, pooled)
        return pooled

    place = place_of(shared)
    flat = call("bags", shared.name, kept, inputs, tf.int64) if skip_zero else ids
    rows, handle = _exchanged(shared, flat, place, train=train, touch=touch, is_certain=is_certain)
    pooled = call("pooling", shared.name, pool, [rows, *inputs], tf.float32)
    if train:
        pooled = answered(shared, pooled, handle, inputs, place, bags)
    if not tf.executing_eagerly():
        pooled.set_shape([None, dim])
    return pooled


def _exchanged(
    shared: WorkersTable, ids: Tensor, place: Tensor, *, train: bool, touch: bool, is_certain: bool
) -> tuple[Any, Any]:
    """Return float32[N, dim] rows of int64[N] ids, from all workers, and the lookup's handle (0 without `train`)."""
    workers = shared.workers
    workers.require_replica("a lookup")
    this, index, dim = weakref.ref(shared), workers.index, shared.dim
    token = tf.stop_gradient(shared.token.value) if train else tf.zeros([], tf.float64)

    def ask(ids: IntArray, place: Tensor, token: Tensor) -> tuple[IntArray, np.int64]:
        try:
            found = alive(this)
            require_zero(found, token)
            batch = found.for_lookup().batch(ids)
            handle = found.pending.began(batch, int(place[0]), is_certain=is_certain) if train else 0
            sign = found.sign("lookup", train, touch)
            return message(found.step_now, sign, dim, batch.unique()), np.int64(handle)
        except Exception as error:  # the other workers wait for this worker's message
            return error_message(error), np.int64(0)

    def answer(asked: IntArray) -> IntArray:
        found = alive(this)
        wanted, owners = _wanted(found, split_messages(asked, index, found.label, dim))
        try:
            rows = found.for_lookup().lookup(wanted[owners == index], touch=touch)
            return message(found.step_now, 0, dim, rows=rows)
        except Exception as error:
            return error_message(error)

    def finish(ids: IntArray, asked: IntArray, answers: IntArray) -> FloatArray:
        found = alive(this)
        wanted, owners = _wanted(found, split_messages(asked, index, found.label, dim))
        given = split_messages(answers, index, found.label, dim)
        rows = np.empty((len(wanted), dim), np.float32)
        for owner, each in enumerate(given):
            rows[owners == owner] = each.rows
        return rows.take(np.searchsorted(wanted, ids), axis=0)

    name = shared.name
    said, handle = call("ask", name, ask, [ids, place, token], [tf.int64, tf.int64])
    asked = workers.all_gather(said)
    answers = workers.all_gather(call("answer", name, answer, [asked], tf.int64))
    rows = call("lookup", name, finish, [ids, asked, answers], tf.float32)
    if not tf.executing_eagerly():
        rows.set_shape([None, dim])
    return rows, handle


def _wanted(shared: WorkersTable, asked: list[Body]) -> tuple[IntArray, IntArray]:
    """Return the ids that any worker wants, int64[U], ascending, and the owner of each, int64[U]."""
    wanted = np.unique(np.concatenate([each.ids for each in asked]))
    return wanted, shards_of(wanted, shared.workers.count).astype(np.int64)
