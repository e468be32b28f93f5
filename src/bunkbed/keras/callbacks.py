"""Python called from TensorFlow: at once in eager mode, as an op of the graph otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def call(name: str, function: Callable[..., Any], inputs: Sequence[Any], dtypes: Any) -> Any:
    """``function(*inputs)`` on NumPy arrays, as tensors.

    The op is stateful: TensorFlow neither prunes nor merges nor hoists it, any of which would lose an update or count
    one twice, and runs those of one graph in the order they were made. Shows in TensorFlow's profiler under `name`.

    Args:
        name: as the profiler shows it.
        function: takes and returns arrays.
        inputs: tensors.
        dtypes: of what it returns, one or a list.
    """

    def ranged(*arrays: Any) -> Any:
        with tf.profiler.experimental.Trace(name):
            return function(*arrays)

    if tf.executing_eagerly():
        return tf.nest.map_structure(tf.convert_to_tensor, ranged(*(tensor.numpy() for tensor in inputs)))

    def in_graph(*arrays: Any) -> Any:
        try:
            return ranged(*arrays)
        except IndexError as error:  # which TensorFlow would turn into OutOfRange, and Keras take for the data's end
            raise ValueError(f"IndexError: {error}") from None

    return tf.numpy_function(in_graph, inputs, dtypes, stateful=True)
