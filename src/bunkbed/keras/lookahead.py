"""`lookahead`: a stage of a tf.data pipeline that prefetches the rows of coming batches."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bunkbed.keras.base.types import Dataset, Model, Tensor
from bunkbed.keras.embedding import Embedding
from bunkbed.keras.tensorflow.callbacks import ranged
from bunkbed.window import MAX_BATCHES, Window

#: Iterations over one pipeline whose windows are kept. An abandoned iterator gives no notice, so older ones are closed.
_ITERATIONS = 2


def lookahead(
    dataset: Dataset,
    model: Model,
    ids: Callable[..., Mapping[Any, Any]] | None = None,
    *,
    depth: int | None = None,
    window: int | None = None,
) -> Tensor:
    """Return the dataset's batches, unchanged and in order, and prefetch the rows of the coming ones.

    The ids of up to `window` coming batches rank the eviction of a table's cache; the rows of the next `depth` batches
    are read from disk while the model works. This moves records and never changes values, so training is bit-identical
    with and without. Apply it after ``batch``; ``repeat`` may come before or after, and `tf.distribute` may distribute
    the result. A batch with an id outside its table is not planned; the model's lookup raises the error.

    Args:
        dataset: a `tf.data.Dataset` of batches, as ``fit`` takes them: x, or a tuple that begins with x.
        model: the model that is trained on the dataset.
        ids: function from x to ``{layer: ids}``, dense, ragged or sparse, or several in a list. None: read from the
            model's graph, for functional and sequential models.
        depth: batches whose rows are prefetched, at least 1. None: 2 to 4, by the time of reads compared with a step.
        window: most batches pulled ahead, 1 to 32, default 32.

    Returns:
        A `tf.data.Dataset` with the same elements.

    Raises:
        ValueError, TypeError: `depth` or `window` out of range; a model whose graph is not known, without `ids`; a
            model without a layer of `bunkbed.keras`.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(f"lookahead: dataset must be a tf.data.Dataset, got {type(dataset).__name__}")
    if not isinstance(model, keras.Model):
        raise TypeError(f"lookahead: model must be a keras.Model, got {type(model).__name__}")
    if depth is not None and depth < 1:
        raise ValueError(f"lookahead: depth must be at least 1, got {depth}")
    if window is not None and not 1 <= window <= MAX_BATCHES:
        raise ValueError(f"lookahead: window must be 1 to {MAX_BATCHES}, got {window}")
    find = _by_graph(model) if ids is None else ids
    plan = _Plan(depth, window)

    def begin(_: Tensor) -> Tensor:
        iteration = tf.numpy_function(plan.begin, [], tf.int64, stateful=True)
        iteration.set_shape([])

        def enter(*batch: Any) -> Tensor:
            wanted = _flat(find(batch[0]))
            layers, tensors = list(wanted), list(wanted.values())

            def push(iteration: Tensor, *arrays: Any) -> Tensor:
                return plan.push(int(iteration), layers, arrays)

            goes_on = tf.numpy_function(push, [iteration, *tensors], tf.bool, stateful=True)
            goes_on.set_shape([])
            return goes_on, batch if isinstance(dataset.element_spec, tuple) else batch[0]

        def leave(*batch: Any) -> Tensor:
            done = tf.numpy_function(plan.advance, [iteration], tf.int64, stateful=True)
            with tf.control_dependencies([done]):
                return tf.nest.map_structure(tf.identity, batch, expand_composites=True)

        entered = dataset.map(enter).take_while(lambda goes_on, _: goes_on).map(lambda _, batch: batch)
        return entered.prefetch(window or MAX_BATCHES).map(_packed(dataset, leave))

    made = tf.data.Dataset.range(1).flat_map(begin)
    if dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY:
        return made
    return made.apply(tf.data.experimental.assert_cardinality(dataset.cardinality()))


def _packed(dataset: Dataset, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `function` of a tuple as `Dataset.map` calls it: with the parts of a tuple, or with one value."""
    if isinstance(dataset.element_spec, tuple):
        return lambda *batch: function(*batch)
    return lambda batch: function(batch)[0]


def _flat(wanted: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return {layer: int64[N] ids}."""
    if not isinstance(wanted, Mapping):
        raise TypeError(f"lookahead: ids must return {{layer: ids}}, got {type(wanted).__name__}")
    found = {}
    for layer, given in wanted.items():
        if not isinstance(layer, Embedding):
            raise ValueError(f"lookahead: ids names {type(layer).__name__}, which is not a bunkbed.keras layer")
        parts = []
        for tensor in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(tensor, tf.RaggedTensor):
                tensor = tensor.flat_values
            elif isinstance(tensor, tf.SparseTensor):
                tensor = tensor.values
            parts.append(tf.cast(tf.reshape(tensor, [-1]), tf.int64))
        found[layer] = tf.concat(parts, 0)
    return found


def _by_graph(model: Model) -> Callable[[Any], dict[Any, Any]]:
    """Return a function from x to the inputs of each `Embedding`, by the model's graph."""
    graph = model._functional if isinstance(model, keras.Sequential) and model.built else model
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, Embedding)]
    if not layers:
        raise ValueError("lookahead: the model has no layer of bunkbed.keras")
    if not hasattr(graph, "_nodes_by_depth") or not hasattr(graph, "inputs"):
        raise ValueError(
            "lookahead: which ids the layers will be called with is known of functional and built sequential models "
            "only; pass ids=lambda x: {model.user: x['user']}"
        )
    nodes = [(node.operation, node) for nodes in graph._nodes_by_depth.values() for node in nodes]
    nodes = [(layer, node) for layer, node in nodes if isinstance(layer, Embedding)]
    if {layer for layer, _ in nodes} != set(layers):
        raise ValueError(
            "lookahead: a layer of bunkbed.keras lies inside another layer of the model, whose graph is not known; "
            "pass ids=lambda x: {layer: x['user']}"
        )
    # Other layers (a cast, a hash) may make the input of an Embedding, so run the part of the model before it.
    before = keras.Model(graph.inputs, [node.input_tensors[0] for _, node in nodes])

    def find(x: Tensor) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for (layer, _), ids in zip(nodes, tf.nest.flatten(before(x)), strict=True):
            found.setdefault(layer, []).append(ids)
        return found

    return find


class _Calls:
    """Calls of tf.data's threads into Python, which must be over before the interpreter ends.

    A thread that waits for the GIL at exit never continues, or is ended inside TensorFlow: the destructor of the
    iterator then hangs, or the process aborts. So at exit this object ends the pipelines and waits until no call has
    come for some time. A pipeline whose prefetch buffer is full, or that is over, makes no more calls.
    """

    #: Required time without a call. It is longer if batches come slowly, up to `MOST_S`.
    QUIET_S, MOST_S = 0.1, 2.0

    def __init__(self) -> None:
        self.goes_on = True
        self._lock = threading.Lock()
        self._under_way = 0
        self._last_s = -self.MOST_S
        self._apart_s = 0.0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Count the call within as under way."""
        with self._lock:
            self._under_way += 1
            now = time.monotonic()
            self._apart_s, self._last_s = now - self._last_s, now
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                self._last_s = time.monotonic()

    def end(self) -> None:
        """End all pipelines, and wait for their calls."""
        self.goes_on = False
        began = time.monotonic()
        quiet_s = min(max(self.QUIET_S, 2 * self._apart_s), self.MOST_S)
        while time.monotonic() < began + self.MOST_S:
            with self._lock:
                if not self._under_way and time.monotonic() > self._last_s + quiet_s:
                    return
            time.sleep(0.005)


_calls = _Calls()
atexit.register(_calls.end)


class _Plan:
    """The windows of every iteration over one pipeline. Thread-safe: tf.data's threads call it."""

    def __init__(self, depth: int | None, window: int | None) -> None:
        self._depth = depth
        self._window = window
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._by_iteration: OrderedDict[int, dict[int, Window]] = OrderedDict()
        self._entered: dict[int, int] = {}  # batches that entered and have not left, by iteration

    def begin(self) -> Tensor:
        with _calls.one(), self._lock:
            number = next(self._numbers)
            self._by_iteration[number] = {}
            self._entered[number] = 0
            while len(self._by_iteration) > _ITERATIONS:
                old, windows = self._by_iteration.popitem(last=False)
                del self._entered[old]
                for window in windows.values():
                    window.close()
            return np.int64(number)

    def push(self, iteration: int, layers: list[Embedding], arrays: tuple[Any, ...]) -> Tensor:
        """Plan a batch; return False if the pipeline must end."""
        with _calls.one():
            if _calls.goes_on:
                self._push(iteration, layers, arrays)
            return np.bool_(_calls.goes_on)

    def _push(self, iteration: int, layers: list[Embedding], arrays: tuple[Any, ...]) -> None:
        wanted: dict[int, tuple[Any, list[Any]]] = {}
        for layer, array in zip(layers, arrays, strict=True):
            # In a table divided among workers, a worker also looks up the ids of the others' batches: do not plan it.
            if layer._shared.has_table and not layer._shared.is_divided:
                wanted.setdefault(id(layer.table), (layer.table, []))[1].append(array)
        with self._lock:
            windows = self._by_iteration.get(iteration)
            if windows is None:
                return
            for key, (table, _) in wanted.items():
                if key not in windows:
                    windows[key] = Window(table, depth=self._depth, batches=self._window)
                    for _ in range(self._entered[iteration]):
                        windows[key].push(None)
            for key, window in windows.items():
                parts = wanted[key][1] if key in wanted else []
                with contextlib.suppress(IndexError):  # the lookup raises it
                    ranged("stage", window.table.name, window.push, np.concatenate(parts) if parts else None)
            self._entered[iteration] += 1

    def advance(self, iteration: Tensor) -> Tensor:
        with _calls.one(), self._lock:
            windows = self._by_iteration.get(int(iteration))
            if windows is not None:
                self._entered[int(iteration)] -= 1
                for window in windows.values():
                    ranged("stage", window.table.name, window.advance)
        return np.int64(0)
