"""`bunkbed.keras.Embedding` compared with Keras's layer in ``fit`` and with our torch layer; its memory over time.

Zipf(1.05) ids, 8,192 a batch. Keras's layers run in processes of their own (`benchmarks.peers.keras_tensorflow`).
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import numpy as np
import torch

from benchmarks.harness import common, turns
from benchmarks.harness.figures import Figure, Settings
from benchmarks.peers import ours
from benchmarks.peers.keras_tensorflow import Keras

#: Rows of ours that are stored beforehand: the most wanted ones. Keras's 10M rows with Adam's state and the memory of
#: a dense step leave no room on the machine for all rows.
STORED = 4_000_000


def fit(settings: Settings) -> list[Figure]:
    """A step of ``fit``, ours and `keras.layers.Embedding` with Adam, 10M x 64."""
    rows, dim, batch = settings.pick((2_000, 8, 64), (1_000_000, 64, 8_192), (10_000_000, 64, 8_192))
    rounds = settings.pick(1, 3, 5)
    sides = {
        turns.OURS: Keras(
            settings, rows, dim, batch, 4, layer="bunkbed", fit=True, repeat=settings.pick(2, 50, 100),
            stored=min(rows, STORED),
        ),
        "keras Adam": Keras(settings, rows, dim, batch, 4, layer="keras", fit=True, repeat=settings.pick(1, 3, 2)),
    }  # fmt: skip
    try:
        taken = {name: side.turn for name, side in sides.items()}
        times = turns.take(taken, 4, rounds=rounds, steps=1, warmup=1)
    finally:
        for side in sides.values():
            side.close()
    notes = {name: side.settings for name, side in sides.items()}
    return [turns.ratio(times, "keras Adam", at_least=20.0), *turns.step_times(times, notes=notes)]


def layer(settings: Settings) -> list[Figure]:
    """Compare our Keras layer in a `tf.function` with our torch layer: lookup, backward and update, 4M x 64 in RAM.

    The time that TensorFlow takes for a step without a lookup is subtracted; the ratio without this is reported too.
    """
    rows, dim, batch = settings.pick((2_000, 8, 64), (1_000_000, 64, 8_192), (4_000_000, 64, 8_192))
    num_batches = 8
    rng = np.random.default_rng(settings.seed)
    sample = common.zipf(rows)
    batches = [torch.from_numpy(sample(rng, batch)) for _ in range(num_batches)]
    torch_step = ours.training("adam", rows, dim, torch.ones(batch, dim))
    children = {
        "keras layer": Keras(settings, rows, dim, batch, num_batches, layer="bunkbed", stored=rows),
        "keras, no layer": Keras(settings, rows, dim, batch, num_batches, layer="none"),
    }
    try:
        taken = {"torch layer": turns.stepping(torch_step, batches), **{n: c.turn for n, c in children.items()}}
        rounds, steps = settings.pick((2, 2), (10, 20), (20, 20))
        times = turns.take(taken, num_batches, rounds=rounds, steps=steps, warmup=2)
    finally:
        for child in children.values():
            child.close()
    whole, empty, theirs = (times.medians(name) for name in ("keras layer", "keras, no layer", "torch layer"))
    own = [(w - e) / t for w, e, t in zip(whole, empty, theirs, strict=True)]
    return [
        _ratio("ratio keras layer, less a step without it, / torch layer", own, at_most=1.3),
        _ratio("ratio keras layer / torch layer", times.ratios("keras layer", "torch layer")),
        *turns.step_times(times, notes={name: child.settings for name, child in children.items()}),
    ]


def _ratio(name: str, values: list[float], **target: float) -> Figure:
    return Figure(name, float(np.median(values)), "x", min(values), max(values), len(values), **target)


def memory(settings: Settings) -> list[Figure]:
    """What the process's resident memory grew by between step 100 and the last, in a graph and eagerly."""
    steps = settings.pick(200, 3_000, 10_000)
    figures = []
    for how in ("graph", "eager"):
        command = ["-m", "benchmarks.cases.training.keras_fit", "--steps", str(steps)]
        child = common.Child([*command, *(["--eager"] if how == "eager" else [])])
        answer = child.ask(steps=100)
        before = answer["resident"]
        answer = child.ask(steps=steps - 100)
        child.close()
        assert answer["taken"] == steps, answer
        grown = (answer["resident"] - before) / common.MIB
        figures.append(Figure(f"memory grown from step 100 to {steps:,}, {how}", grown, "MiB", at_most=20.0))
    return figures


def _steps(options: argparse.Namespace) -> None:
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras
    import tensorflow as tf

    import bunkbed as bb
    from bunkbed.keras import Embedding

    rows, dim, batch = 5_000, 16, 256
    table = bb.create(None, dim=dim, num_rows=rows, optimizer=bb.Adam(1e-3))
    table.update(np.arange(rows), np.full((rows, dim), 1e-3, np.float32))
    ids = keras.Input((), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(Embedding(rows, dim, table=table)(ids)))
    model.compile(keras.optimizers.Adam(1e-3), "mse", run_eagerly=options.eager)
    rng = np.random.default_rng(0)
    data = tf.data.Dataset.from_tensor_slices((rng.integers(0, rows, 64 * batch), rng.random((64 * batch, 1))))
    feed = iter(data.batch(batch).repeat())

    def handle(steps: int) -> dict[str, Any]:
        for _ in range(steps):
            model.train_on_batch(*next(feed))
        return {"resident": common.resident_bytes("VmRSS"), "taken": table.step - 1}

    common.serve(handle)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--eager", action="store_true")
    _steps(parser.parse_args())
    sys.exit(0)
