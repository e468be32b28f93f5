"""Base layer for TensorFlow that converts its ids and looks up rows, independent of the storage of rows."""

from __future__ import annotations

import keras
import tensorflow as tf
from tensorflow.python.eager import record  # has no public name

from bunkbed.keras.base.rows_layer import RowsLayer
from bunkbed.keras.base.types import Layer, LookupOptions, Tensor

_OTHER_PLACES = "Embedding: the weights must have the shape of the ids, one for each id at its place"


def is_recorded(value: Tensor) -> bool:
    """Return whether an active tape watches a variable or tensor, or would watch a read of it."""
    value = getattr(value, "value", value) if isinstance(value, keras.Variable) else value
    return bool(record.should_record_backprop([tf.convert_to_tensor(value)]))


class IdsLayer(RowsLayer):
    """A layer from ids to rows, or to pooled rows with a combiner: dtypes, ragged and sparse ids, masks, shapes.

    A subclass sets the attributes of `RowsLayer`, and defines `_rows` and `_bags`.
    """

    def _rows(self, ids: Tensor, options: LookupOptions) -> Tensor:
        """Return float32[..., output_dim] rows of int64[...] ids."""
        raise NotImplementedError

    def _bags(self, ids: Tensor, splits: Tensor, weights: Tensor, options: LookupOptions) -> Tensor:
        """Return float32[B, output_dim] pooled rows of int64[N] ids, int64[B + 1] splits, float32[N] weights/None."""
        raise NotImplementedError

    def _look_up(self, inputs: Tensor, weights: Tensor, options: LookupOptions) -> Tensor:
        """Return rows of ids of any kind, in the layer's compute dtype; `_rows` and `_bags` get `options`."""
        entry = self._get_call_context().entry_layer
        if self.combiner is not None:
            rows = self._pooled(inputs, weights, entry, options)
        elif weights is not None:
            raise ValueError("Embedding: weights of ids need a combiner: Embedding(..., combiner='sum')")
        elif isinstance(inputs, tf.RaggedTensor):
            values = self._rows(self._as_ids(inputs.flat_values, entry), options)
            return inputs.with_flat_values(tf.cast(values, self.compute_dtype))
        else:
            if isinstance(inputs, tf.SparseTensor):
                inputs = tf.sparse.to_dense(inputs)  # as Keras's layer: what is not there is id 0
            rows = self._rows(self._as_ids(inputs, entry), options)
        return tf.cast(rows, self.compute_dtype)

    def _as_ids(self, ids: Tensor, entry: Layer) -> Tensor:
        """Return int64 ids; raise TypeError if their dtype may have changed the caller's ids."""
        ids = tf.convert_to_tensor(ids)
        is_float = self._ids_are_float(ids.dtype.name, entry)
        return tf.cast(_whole(ids) if is_float else ids, tf.int64)

    def _pooled(self, inputs: Tensor, weights: Tensor, entry: Layer, options: LookupOptions) -> Tensor:
        assert self.combiner is not None
        shape = None
        if isinstance(inputs, tf.SparseTensor):
            if weights is not None and not isinstance(weights, tf.SparseTensor):
                raise TypeError("Embedding: weights of sparse ids must be sparse too")
            if inputs.shape.rank != 2:
                raise ValueError(f"Embedding: sparse ids of a combiner must be [B, L], got {inputs.shape}")
            values, factors = inputs.values, None if weights is None else weights.values
            places = None if weights is None else (inputs.indices, weights.indices)
            # searchsorted needs sorted rows, which the canonical row-major order has; else it would mix up bags.
            rows = inputs.indices[:, 0]
            ordered = tf.debugging.assert_non_negative(
                rows[1:] - rows[:-1], "Embedding: sparse ids are not in row-major order; give tf.sparse.reorder(ids)"
            )
            with tf.control_dependencies([] if ordered is None else [ordered]):
                splits = tf.searchsorted(rows, tf.range(inputs.dense_shape[0] + 1, dtype=tf.int64), out_type=tf.int64)
        elif isinstance(inputs, tf.RaggedTensor):
            if inputs.ragged_rank != 1 or inputs.flat_values.shape.rank != 1:
                raise ValueError(f"Embedding: ragged ids of a combiner must be [B, None], got {inputs.shape}")
            if weights is not None and not isinstance(weights, tf.RaggedTensor):
                raise TypeError("Embedding: weights of ragged ids must be ragged too")
            values, factors = inputs.flat_values, None if weights is None else weights.flat_values
            splits = tf.cast(inputs.row_splits, tf.int64)
            places = None if weights is None else (splits, tf.cast(weights.row_splits, tf.int64))
        else:
            inputs = tf.convert_to_tensor(inputs)
            if inputs.shape.rank is None:
                raise ValueError(f"Embedding: ids of a combiner must be [..., L], got {inputs.shape}")
            self._output(inputs.shape)  # raises for another rank
            shape = tf.concat([tf.shape(inputs)[:-1], [self.output_dim]], 0)
            length = tf.shape(inputs, tf.int64)[-1]
            values = tf.reshape(inputs, [-1])
            factors, places = None, None
            if weights is not None:
                weights = tf.convert_to_tensor(weights)
                if not weights.shape.is_compatible_with(inputs.shape):
                    raise ValueError(f"{_OTHER_PLACES}: {inputs.shape}, got {weights.shape}")
                factors, places = tf.reshape(weights, [-1]), (tf.shape(inputs), tf.shape(weights))
            count = tf.reduce_prod(tf.shape(inputs, tf.int64)[:-1])
            splits = tf.range(count + 1, dtype=tf.int64) * length
        if factors is not None:
            if is_recorded(factors):
                raise ValueError(
                    "Embedding: weights of ids get no gradient; pass tf.stop_gradient(weights), or pool by hand what "
                    "the layer gives without a combiner"
                )
            assert places is not None
            with tf.control_dependencies(_same_places(*places)):
                factors = tf.identity(tf.cast(factors, tf.float32))
        pooled = self._bags(self._as_ids(values, entry), splits, factors, options)
        return pooled if shape is None else tf.ensure_shape(tf.reshape(pooled, shape), self._output(inputs.shape))


def _same_places(ids: Tensor, weights: Tensor) -> list[Tensor]:
    """Return assertions that weights are at the places of the ids: shapes, row splits or indices."""
    same_shape = tf.debugging.assert_equal(tf.shape(ids), tf.shape(weights), _OTHER_PLACES)
    with tf.control_dependencies([] if same_shape is None else [same_shape]):
        same = tf.debugging.assert_equal(ids, weights, _OTHER_PLACES)
    return [] if same is None else [same]


def _whole(ids: Tensor) -> Tensor:
    """Return the float ids after asserting that they are whole numbers."""
    checked = tf.debugging.assert_equal(ids, tf.floor(ids), "Embedding: ids must be whole numbers")
    with tf.control_dependencies([] if checked is None else [checked]):
        return tf.identity(ids)
