"""Python called from TensorFlow: at once in eager mode, as an op of the graph otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.profiler.trace import enabled as is_profiling  # 20 ns, which TensorFlow has no public name for

from bunkbed import _native


def ranged(what: str, table: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, which does `what` to a table; as a range of TensorFlow's profiler, where it runs.

    ``bunkbed lookup NAME``, ``bags``, ``gradients`` (a backward's sums), ``update`` and ``stage`` (planning what the
    coming batches want, and starting its reads, which then go on by themselves); inside of them ``bunkbed stall NAME``:
    the time they waited for reads, which ``table.stats()["stall_s"]`` adds up.
    """
    if not is_profiling():
        return function(*arguments)
    trace = tf.profiler.experimental.Trace
    with trace(f"bunkbed {what} {table}"):
        return _native.with_stalls(lambda: trace(f"bunkbed stall {table}"), function, *arguments)


#: Outside of a graph that is being traced.
outside_graph = tf.init_scope


def is_eager() -> bool:
    """Whether no graph is being traced."""
    return bool(tf.executing_eagerly())


def answer_with_error(shared: Any, rows: Any) -> Any:
    """`rows`: in a graph nobody knows yet whether a gradient will be asked for, and outside of one no tape does."""
    return rows


def as_scalar(value: Any) -> Any:
    """`value`, whose shape is known from now on: []."""
    if not tf.executing_eagerly():
        value.set_shape([])
    return value


def call(what: str, table: str, function: Callable[..., Any], inputs: Sequence[Any], dtypes: Any) -> Any:
    """``function(*inputs)`` on NumPy arrays, as tensors.

    The op is stateful: TensorFlow neither prunes nor merges nor hoists it, any of which would lose an update or count
    one twice, and runs those of one graph in the order they were made.

    Args:
        what, table: as the profiler shows it; see `ranged`.
        function: takes and returns arrays.
        inputs: tensors.
        dtypes: of what it returns, one or a list.
    """
    if tf.executing_eagerly():
        arrays = [tensor.numpy() for tensor in inputs]
        return tf.nest.map_structure(tf.convert_to_tensor, ranged(what, table, function, *arrays))

    def in_graph(*arrays: Any) -> Any:
        try:
            return ranged(what, table, function, *arrays)
        except IndexError as error:  # which TensorFlow would turn into OutOfRange, and Keras take for the data's end
            raise ValueError(f"IndexError: {error}") from None

    return tf.numpy_function(in_graph, inputs, dtypes, stateful=True)
