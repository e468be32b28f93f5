"""Keras 3 on TensorFlow: an embedding layer and `keras.optimizers.Adam`, stepped by a `tf.function` or by ``fit``.

In a process of its own: TensorFlow's thread pools would compete with torch's. The child makes the same batches from the
same seed. The layer is Keras's own, or ours. Keras's Adam turns the sparse gradient of its own layer into a dense one,
so each step updates every row, as torch's dense Adam does and as SparseAdam and ours do not.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from benchmarks.harness import common
from benchmarks.harness.figures import Settings
from benchmarks.peers import Missing


class Keras:
    """The parent's end.

    Args:
        layer: ``"keras"`` for `keras.layers.Embedding`, ``"bunkbed"`` for ours, ``"none"`` for one that multiplies
            constant rows with a scalar variable: what a step costs that looks nothing up.
        repeat: steps for each one asked for, whose mean is its time: what a call of ``fit`` costs is spread over them.
        fit: step by ``fit`` instead of a `tf.function`.
        stored: how many rows of ours are stored.
    """

    def __init__(
        self,
        settings: Settings,
        num_rows: int,
        dim: int,
        batch: int,
        num_batches: int,
        *,
        layer: Literal["keras", "bunkbed", "none"] = "keras",
        fit: bool = False,
        repeat: int = 1,
        stored: int = 0,
    ) -> None:
        for module in ("keras", "tensorflow"):
            if importlib.util.find_spec(module) is None:
                raise Missing(f'{module} is not installed; pip install "tensorflow-cpu==2.21.*" "keras>=3.15"')
        values = {
            "rows": num_rows, "dim": dim, "batch": batch, "batches": num_batches, "seed": settings.seed,
            "layer": layer, "repeat": repeat, "stored": stored,
        }  # fmt: skip
        arguments = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        arguments += ["--fit"] if fit else []
        self.child = common.Child(["-m", "benchmarks.peers.keras_tensorflow", *arguments])
        self.settings = str(self.child.ask(indices=[])["settings"])

    def turn(self, indices: Sequence[int]) -> list[float]:
        """Seconds of a step on each of these batches."""
        return list(self.child.ask(indices=list(indices))["times"])

    def close(self) -> None:
        self.child.close()


def child(options: argparse.Namespace) -> None:
    """Steps on request."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras
    import tensorflow as tf

    rng = np.random.default_rng(options.seed)
    sample = common.zipf(options.rows)
    batches = [sample(rng, options.batch) for _ in range(options.batches)]
    layer = _layer(options)
    take = _fit(options, layer, batches) if options.fit else _function(options, layer, batches)
    how = "fit" if options.fit else "tf.function"

    def handle(indices: list[int]) -> dict[str, Any]:
        return {
            "times": [take(i) for i in indices],
            "settings": f"Keras {keras.__version__}, TensorFlow {tf.__version__}, {how}",
        }

    common.serve(handle)


def _layer(options: argparse.Namespace) -> Any:
    import keras

    if options.layer == "keras":
        layer = keras.layers.Embedding(options.rows, options.dim)
        layer.build()
        return layer
    if options.layer == "none":
        return _nothing(options)
    import bunkbed as bb
    from bunkbed.keras import Embedding

    table = bb.create(None, dim=options.dim, num_rows=options.rows, optimizer=bb.Adam(1e-3))
    for start in range(0, options.stored, 65_536):
        ids = np.arange(start, min(start + 65_536, options.stored))
        table.update(ids, np.full((len(ids), options.dim), 1e-3, np.float32))
    return Embedding(options.rows, options.dim, table=table)


def _nothing(options: argparse.Namespace) -> Any:
    import keras
    import tensorflow as tf

    class Nothing(keras.layers.Layer):  # type: ignore[misc]  # keras is untyped here
        def build(self, input_shape: Any = None) -> None:
            self.scalar = self.add_weight(shape=(), overwrite_with_gradient=True)
            self.rows = tf.ones((options.batch, options.dim))
            self.built = True

        def call(self, ids: Any) -> Any:
            return self.rows * self.scalar

    layer = Nothing()
    layer.build()
    return layer


def _function(options: argparse.Namespace, layer: Any, batches: Sequence[Any]) -> Callable[[int], float]:
    """Seconds of a lookup, its backward and the optimizer's step, in one `tf.function`."""
    import keras
    import tensorflow as tf

    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(layer.trainable_variables)
    grad = tf.ones((options.batch, options.dim))
    tensors = [tf.constant(ids) for ids in batches]

    @tf.function
    def step(ids: Any) -> None:
        with tf.GradientTape() as tape:
            out = layer(ids)
        gradients = tape.gradient(out, layer.trainable_variables, output_gradients=grad)
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))

    def take(index: int) -> float:
        ids = tensors[index]
        began = time.perf_counter()
        for _ in range(options.repeat):
            step(ids)
        return (time.perf_counter() - began) / options.repeat

    return take


def _fit(options: argparse.Namespace, layer: Any, batches: Sequence[Any]) -> Callable[[int], float]:
    """Seconds of a step of ``fit`` on a model whose output is the rows."""
    import keras
    import tensorflow as tf

    ids = keras.Input((), dtype="int64")
    model = keras.Model(ids, layer(ids))
    model.compile(keras.optimizers.Adam(1e-3), lambda _, rows: tf.reduce_mean(rows, -1))
    targets = tf.zeros((options.batch, 1))
    datasets = [tf.data.Dataset.from_tensors((tf.constant(batch), targets)).repeat(options.repeat) for batch in batches]

    def take(index: int) -> float:
        began = time.perf_counter()
        model.fit(datasets[index], verbose=0)
        return (time.perf_counter() - began) / options.repeat

    return take


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for argument in ("rows", "dim", "batch", "batches", "seed", "repeat", "stored"):
        parser.add_argument(f"--{argument}", type=int, required=True)
    parser.add_argument("--layer", choices=("keras", "bunkbed", "none"), required=True)
    parser.add_argument("--fit", action="store_true")
    child(parser.parse_args())
