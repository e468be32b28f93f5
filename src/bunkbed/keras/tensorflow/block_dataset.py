"""`block_dataset`: the batches of a `bunkbed.BlockOrder` as a `tf.data.Dataset`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from bunkbed.core.arguments import as_whole, describe
from bunkbed.keras.base.types import Dataset
from bunkbed.order.block_order import BlockOrder

#: An iteration counts as an epoch when it has so many batches, or all. More than a stage like `lookahead` pulls ahead.
_BATCHES_THAT_COUNT = 64


def block_dataset(order: BlockOrder, arrays: Any, batch_size: int, *, epoch: int = 0) -> Dataset:
    """Return the batches of a `bunkbed.BlockOrder` as a `tf.data.Dataset`; each iteration is the next epoch.

    ``fit`` trains on a new epoch of the order in each of its epochs::

        model.fit(block_dataset(order, ({"user": users, "item": items}, ratings), 4096), epochs=10)

    An iteration that is left within its first 64 batches does not count, and the next one repeats its epoch: Keras
    takes a batch to build a model, and stages such as `lookahead` and ``prefetch`` then pull batches ahead.

    Args:
        order: the order of samples.
        arrays: an array, or a tuple or dict of arrays, with one entry for each sample, as ``fit`` takes them.
        batch_size: most samples of a batch.
        epoch: the epoch of the first iteration, for a resumed run.

    Raises:
        TypeError: `order` is not a `bunkbed.BlockOrder`, or `batch_size` or `epoch` is not an int. ValueError: they are
            out of range, or an array has another length than the order has samples.
    """
    if not isinstance(order, BlockOrder):
        raise TypeError(f"block_dataset: order must be a bunkbed.BlockOrder, got {type(order).__name__}")
    epoch = as_whole(epoch, what="epoch", table="block_dataset", low=0, high=2**62)
    size = as_whole(batch_size, what="batch_size", table="block_dataset", low=1, high=2**63 - 1)
    arrays = tf.nest.map_structure(np.asarray, tuple(arrays) if isinstance(arrays, list) else arrays)
    for at, array in enumerate(tf.nest.flatten(arrays)):
        if array.ndim == 0 or len(array) != order.num_samples:
            raise ValueError(
                f"block_dataset: array {at} must have one entry for each of the {order.num_samples} samples of the "
                f"order, got {describe(array)}"
            )
    total, coming = order.num_batches(epoch, size), epoch

    def batches() -> Iterator[Any]:
        nonlocal coming
        epoch = coming
        for number, batch in enumerate(order.batches(epoch, size), 1):
            if number == min(total, _BATCHES_THAT_COUNT):
                coming = epoch + 1
            yield tf.nest.map_structure(lambda array, rows=batch.indices: array[rows], arrays)

    def spec(array: Any) -> Any:
        return tf.TensorSpec([None, *array.shape[1:]], tf.as_dtype(array.dtype))

    dataset = tf.data.Dataset.from_generator(batches, output_signature=tf.nest.map_structure(spec, arrays))
    return dataset.apply(tf.data.experimental.assert_cardinality(total))
