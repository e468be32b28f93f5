"""SavedModels of models with tables: rows are copied into variables, if a given number of bytes suffices."""

from __future__ import annotations

from os import PathLike
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from bunkbed.core.budget import parse_bytes
from bunkbed.keras.base.types import Layer, LookupOptions, Model, Tensor
from bunkbed.keras.embedding import Embedding
from bunkbed.keras.tensorflow.ids_layer import IdsLayer

#: Bytes of rows in one variable. Rows are not in a SavedModel's graph, which may have 2 GB; but writing and restoring
#: hold one variable at a time in memory.
_CHUNK_BYTES = 256 * 2**20


def export(
    model: Model,
    path: str | PathLike[str],
    *,
    max_bytes: float | str,
    untrained: Literal["error", "zeros"] = "error",
    **arguments: Any,
) -> None:
    """Run ``model.export(path)`` with the rows of its tables copied into the SavedModel.

    All rows of a table are copied if they take at most 1 MiB, or no more than its stored rows and their ids. Otherwise
    the stored rows are copied, and `untrained` decides the result for other ids. The SavedModel holds float32 rows and
    no optimizer state, runs in any process, and does not follow the table.

    Args:
        model: a functional or sequential model.
        path: folder of the SavedModel.
        max_bytes: most bytes that rows and their ids may take, of all tables together, as ``"2GiB"``.
        untrained: ``"error"``, or ``"zeros"`` for rows of zeros.
        arguments: those of ``model.export``.

    Raises:
        ValueError: the rows do not fit (says what they need), or an `Embedding` is inside another layer.
    """
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, Embedding)]
    if any(layer not in model.layers for layer in layers):
        raise ValueError("export: a layer of bunkbed.keras lies inside another layer of the model; export that one")
    shared = {id(layer._shared): layer for layer in layers}
    for layer in layers:
        if layer._shared.is_divided:
            raise ValueError(
                f"export: table {layer._shared.name!r} is divided among workers, and this process has its rows only; "
                "copy the rows of all shards into one table first (see bunkbed.keras.workers_table)"
            )
    needs = {key: _plan(layer) for key, layer in shared.items()}
    total, most = sum(need for need, _ in needs.values()), parse_bytes(max_bytes)
    if total > most:
        raise ValueError(
            f"export: the rows take {total:,} bytes and max_bytes={max_bytes!r} allows {most:,}; give what they take, "
            'or serve rows from a reader, bunkbed.open(path, mode="r"), next to the rest of the model'
        )
    rows = {key: _Rows(layer, all_rows=needs[key][1], untrained=untrained) for key, layer in shared.items()}

    def clone(layer: Layer) -> Layer:
        if isinstance(layer, Embedding):
            return ExportedEmbedding(layer, rows[id(layer._shared)])
        return layer.__class__.from_config(layer.get_config())

    copy = keras.models.clone_model(model, clone_function=clone)
    for theirs, ours in zip(model.layers, copy.layers, strict=True):
        if not isinstance(theirs, Embedding):
            ours.set_weights(theirs.get_weights())
    copy.export(path, **arguments)


def _plan(layer: Embedding) -> tuple[int, bool]:
    """Return the bytes that a table takes in a SavedModel, and whether all its rows are copied."""
    table, width = layer._shared.for_lookup(), 4 * layer.output_dim
    stored = len(table) * (width + 8)
    if layer.input_dim is not None and layer.input_dim * width <= max(stored, 2**20):
        return layer.input_dim * width, True
    return stored, False


class _Rows(tf.Module):  # type: ignore[misc]  # tensorflow is untyped here
    """Rows of a table in variables of at most `_CHUNK_BYTES`; without `all_rows`, sorted by `ids`."""

    def __init__(self, layer: Embedding, *, all_rows: bool, untrained: str) -> None:
        super().__init__()
        table, dim = layer._shared.for_lookup(), layer.output_dim
        self._name = table.name
        self._zeros = untrained == "zeros"
        self._dim = dim
        if all_rows:
            self.ids = None
            self.count = table.num_rows or 0
        else:
            found = [ids for ids, _ in table.scan()]
            if layer.mask_zero:
                found.append(np.zeros(1, np.int64))  # padding, trained or not
            ids = np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)
            self.ids = tf.Variable(ids, trainable=False, name="ids")
            self.count = len(ids)
        self.chunk = max(1, _CHUNK_BYTES // (4 * dim))
        self.chunks = []
        for start in range(0, self.count, self.chunk):
            stop = min(start + self.chunk, self.count)
            wanted = np.arange(start, stop) if self.ids is None else self.ids.numpy()[start:stop]
            self.chunks.append(tf.Variable(table.get(wanted), trainable=False, name=f"rows_{start}"))

    def look_up(self, ids: Tensor) -> Tensor:
        """Return float32[..., dim] rows of int64[...] ids."""
        flat = tf.reshape(ids, [-1])
        places = flat if self.ids is None else tf.searchsorted(self.ids, flat, out_type=tf.int64)
        inside = (flat >= 0) & (places < self.count)
        safe = tf.where(inside, places, 0)
        if self.ids is not None and self.count:
            inside &= tf.gather(self.ids, safe) == flat
        # With all rows, an id outside is an error. With a part of the rows, an unknown id may be in the table.
        if self.ids is None or not self._zeros:
            bad = tf.boolean_mask(flat, ~inside)
            what = "is outside" if self.ids is None else "was never trained, so it is not part of this export, in"
            check = tf.debugging.Assert(tf.equal(tf.size(bad), 0), [f"an id {what} table {self._name!r}:", bad])
            with tf.control_dependencies([] if check is None else [check]):
                safe = tf.identity(safe)
        if not self.chunks:
            return tf.zeros(tf.concat([tf.shape(ids), [self._dim]], 0))
        of_chunk = tf.cast(safe // self.chunk, tf.int32)
        order = tf.dynamic_partition(tf.range(tf.size(flat)), of_chunk, len(self.chunks))
        within = tf.dynamic_partition(safe % self.chunk, of_chunk, len(self.chunks))
        rows = [tf.gather(chunk, places) for chunk, places in zip(self.chunks, within, strict=True)]
        found = tf.reshape(tf.dynamic_stitch(order, rows), [-1, self._dim])
        found = tf.where(inside[:, None], found, 0.0)
        return tf.reshape(found, tf.concat([tf.shape(ids), [self._dim]], 0))


class ExportedEmbedding(IdsLayer):
    """Layer with the rows in variables, with which `export` replaces an `Embedding`."""

    def __init__(self, layer: Embedding, rows: _Rows) -> None:
        super().__init__(name=layer.name, dtype=layer.dtype_policy, trainable=False)
        self.input_dim = layer.input_dim
        self.output_dim = layer.output_dim
        self.mask_zero = layer.mask_zero
        self.combiner = layer.combiner
        self.supports_masking = layer.supports_masking
        self.autocast = False
        self.rows = rows
        self.built = True

    def call(self, inputs: Tensor, weights: Tensor = None) -> Tensor:
        """Return the rows of ids, as `Embedding.call`."""
        return self._look_up(inputs, weights, None)

    def _rows(self, ids: Tensor, options: LookupOptions) -> Tensor:
        rows = self.rows.look_up(ids)
        return tf.ensure_shape(rows, [*ids.shape, self.output_dim])

    def _bags(self, ids: Tensor, splits: Tensor, weights: Tensor, options: LookupOptions) -> Tensor:
        weights = tf.ones(tf.shape(ids), tf.float32) if weights is None else weights
        bag = tf.ragged.row_splits_to_segment_ids(splits)
        if self.mask_zero:
            ids, weights, bag = (tf.boolean_mask(each, ids != 0) for each in (ids, weights, bag))
        count = tf.size(splits) - 1

        def sums(values: Tensor) -> Tensor:
            return tf.math.unsorted_segment_sum(values, bag, count)

        pooled = sums(self.rows.look_up(ids) * weights[:, None])
        if self.combiner == "mean":
            pooled = tf.math.divide_no_nan(pooled, sums(weights)[:, None])
        elif self.combiner == "sqrtn":
            pooled = tf.math.divide_no_nan(pooled, tf.sqrt(sums(weights * weights))[:, None])
        return tf.ensure_shape(pooled, [None, self.output_dim])
