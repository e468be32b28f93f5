"""Keras 3 on TensorFlow: `keras.layers.Embedding` and `keras.optimizers.Adam`, in a `tf.function`.

In a process of its own: TensorFlow's thread pools would compete with torch's. The child makes the same batches
from the same seed. Keras's Adam turns the sparse gradient into a dense one, so each step updates every row, as
torch's dense Adam does and as SparseAdam and ours do not.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.figures import Settings
from benchmarks.peers import Missing


class Keras:
    """The parent's end."""

    def __init__(self, settings: Settings, num_rows: int, dim: int, batch: int, num_batches: int) -> None:
        for module in ("keras", "tensorflow"):
            if importlib.util.find_spec(module) is None:
                raise Missing(f'{module} is not installed; pip install "tensorflow-cpu==2.21.*" "keras>=3.15"')
        values = {"rows": num_rows, "dim": dim, "batch": batch, "batches": num_batches, "seed": settings.seed}
        arguments = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        self.child = common.Child(["-m", "benchmarks.peers.keras_tensorflow", *arguments])
        self.settings = str(self.child.ask(indices=[])["settings"])

    def turn(self, indices: Sequence[int]) -> list[float]:
        """Seconds of a step on each of these batches."""
        return list(self.child.ask(indices=list(indices))["times"])

    def close(self) -> None:
        self.child.close()


def child(options: argparse.Namespace) -> None:
    """Steps when told to."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras
    import tensorflow as tf

    rng = np.random.default_rng(options.seed)
    sample = common.zipf(options.rows)
    batches = [tf.constant(sample(rng, options.batch)) for _ in range(options.batches)]
    layer = keras.layers.Embedding(options.rows, options.dim)
    layer.build()
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(layer.trainable_variables)
    grad = tf.ones((options.batch, options.dim))

    @tf.function
    def step(ids: Any) -> None:
        with tf.GradientTape() as tape:
            out = layer(ids)
        gradients = tape.gradient(out, layer.trainable_variables, output_gradients=grad)
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))

    def handle(indices: list[int]) -> dict[str, Any]:
        times = [common.timed(lambda ids=batches[i]: step(ids)) for i in indices]
        return {"times": times, "settings": f"Keras {keras.__version__}, TensorFlow {tf.__version__}, tf.function"}

    common.serve(handle)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for argument in ("rows", "dim", "batch", "batches", "seed"):
        parser.add_argument(f"--{argument}", type=int, required=True)
    child(parser.parse_args())
