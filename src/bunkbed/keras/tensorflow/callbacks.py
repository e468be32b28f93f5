"""Python functions called from TensorFlow: directly in eager mode, as an op in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.profiler.trace import enabled as is_profiling  # 20 ns; has no public name

from bunkbed import _native
from bunkbed.keras.base.types import DType, Shared, Tensor


def ranged(what: str, table: str, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Return ``function(*arguments)``; run it in a range named `what` while TensorFlow's profiler runs.

    Ranges are ``bunkbed lookup NAME``, ``bags``, ``gradients`` (a backward's sums), ``update`` and ``stage`` (planning
    for the coming batches, and the start of reads that continue in the background). Inside them, ``bunkbed stall NAME``
    is a wait for reads; ``table.stats()["stall_s"]`` adds these up.
    """
    if not is_profiling():
        return function(*arguments)
    trace = tf.profiler.experimental.Trace
    with trace(f"bunkbed {what} {table}"):
        return _native.with_stalls(lambda: trace(f"bunkbed stall {table}"), function, *arguments)


#: Context outside a graph that is being traced.
outside_graph = tf.init_scope


def is_eager() -> bool:
    """Return whether no graph is being traced."""
    return bool(tf.executing_eagerly())


def answer_with_error(shared: Shared, rows: Tensor) -> Tensor:
    """Return `rows`: a graph does not show yet whether it needs gradients, and outside a graph no tape needs them."""
    return rows


def as_scalar(value: Tensor) -> Tensor:
    """Return `value` with its shape set to []."""
    if not tf.executing_eagerly():
        value.set_shape([])
    return value


def call(what: str, table: str, function: Callable[..., Tensor], inputs: Sequence[Any], dtypes: DType) -> Tensor:
    """Return ``function(*inputs)``, called with NumPy arrays, as tensors.

    The op is stateful: TensorFlow does not prune, merge or hoist it, which would lose an update or apply it twice. It
    runs the ops of one graph in the order in which they were made.

    Args:
        what, table: names for the profiler; see `ranged`.
        function: takes and returns arrays.
        inputs: tensors.
        dtypes: of the results, one or a list.
    """
    if tf.executing_eagerly():
        arrays = [tensor.numpy() for tensor in inputs]
        return tf.nest.map_structure(tf.convert_to_tensor, ranged(what, table, function, *arrays))

    def in_graph(*arrays: Any) -> Tensor:
        try:
            return ranged(what, table, function, *arrays)
        except IndexError as error:  # TensorFlow makes it OutOfRange, which means the end of the data to Keras
            raise ValueError(f"IndexError: {error}") from None

    return tf.numpy_function(in_graph, inputs, dtypes, stateful=True)
