"""Lookups of a table without a layer, for TensorFlow code."""

from __future__ import annotations

import tensorflow as tf

from bunkbed.keras.base.types import Tensor
from bunkbed.keras.shared.lookups import rows_of
from bunkbed.keras.shared.table import SharedTable, shared_of_table
from bunkbed.keras.tensorflow.ids_layer import is_recorded
from bunkbed.keras.workers.group import workers_of
from bunkbed.table.table import Table


def token_of(table: Table) -> Tensor:
    """Return the variable that represents a table's rows: a tape must watch it and an optimizer must get it.

    Args:
        table: an open `bunkbed.Table`.

    Returns:
        A scalar `keras.Variable`, the same one for every layer and lookup of the table.
    """
    return _shared_of(table).token


def embedding_lookup(table: Table, ids: Tensor, *, trainable: bool = True) -> Tensor:
    """Look up rows of a table that may be larger than RAM, as `tf.nn.embedding_lookup` does of a variable.

    Gradients of the rows go through the table's token; an optimizer that gets the token's gradient makes one update of
    the table, by the table's own rule and learning rate::

        token = bunkbed.keras.token_of(table)
        with tf.GradientTape() as tape:
            loss = loss_of(bunkbed.keras.embedding_lookup(table, ids))
        weights = [token, *others]
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

    Args:
        table: a `bunkbed.Table`, open for writing if it is to be trained.
        ids: int64[...] or a smaller integer; a tensor, a ragged tensor or an array.
        trainable: False for a lookup without gradients; it does not change the cache.

    Returns:
        float32[..., dim], ragged where the ids are.

    Raises:
        RuntimeError: `trainable`, and no tape watches the token, so an update would be lost.
        TypeError: ids that are not integers. IndexError: see `bunkbed.Table.lookup`; in a graph a
            `tf.errors.InvalidArgumentError` with the same message.

    >>> import bunkbed as bb, numpy as np
    >>> table = bb.create(None, dim=2, num_rows=10, optimizer=bb.SGD(1.0), init=bb.Zeros())
    >>> with tf.GradientTape() as tape:
    ...     loss = tf.reduce_sum(embedding_lookup(table, np.array([3, 3])))
    >>> token_of(table).assign(tape.gradient(loss, token_of(table).value)) is not None
    True
    >>> table.lookup([3])
    array([[-2., -2.]], dtype=float32)
    """
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(embedding_lookup(table, ids.flat_values, trainable=trainable))
    if isinstance(ids, tf.SparseTensor):
        raise TypeError("embedding_lookup: sparse ids have no rows where there is no id; give tf.sparse.to_dense(ids)")
    workers_of("central")
    shared = _shared_of(table)
    ids = tf.convert_to_tensor(ids)
    if not ids.dtype.is_integer or ids.dtype == tf.uint64:
        raise TypeError(f"embedding_lookup: ids must be int64 or a smaller integer, got {ids.dtype.name}")
    if trainable:
        if table.mode == "r":
            raise ValueError(f"table {table.name!r} is open with mode='r'; look it up with trainable=False")
        if tf.executing_eagerly() and not is_recorded(shared.token):
            raise RuntimeError(
                f"table {table.name!r}: no tape watches its token, so what its rows learn would be lost; look up "
                "inside `with tf.GradientTape() as tape:` (or after tape.watch(token.value)), "
                "and give bunkbed.keras.token_of(table) to tape.gradient and to the optimizer; or pass trainable=False"
            )
    return rows_of(shared, tf.cast(ids, tf.int64), train=trainable, touch=trainable, is_certain=trainable)


def _shared_of(table: Table) -> SharedTable:
    """Return the shared object of a table, kept alive by the table, as there may be no layer."""
    table.companion = shared = shared_of_table(table)
    return shared
