"""What every Keras test shares; imported before TensorFlow starts, which it gives four logical devices."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.core.optim import Optimizer
from bunkbed.testing import ReferenceTable

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
keras = pytest.importorskip("keras", reason="keras is not installed")

if keras.backend.backend() != "tensorflow":
    pytest.skip("keras runs on another backend", allow_module_level=True)

DEVICES = 4
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * DEVICES
)

ROWS, DIM, BATCH = 50, 4, 16
INIT = bb.Uniform(-0.05, 0.05)  # Keras's own
SEED = 3
ADAM = bb.Adam(0.01, eps=1e-7)  # as the table follows keras.optimizers.Adam(0.01)


def batches(steps: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """int64[steps * BATCH] ids with repeats and float32[steps * BATCH, DIM] targets."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, ROWS, steps * BATCH)
    return ids, rng.standard_normal((steps * BATCH, DIM)).astype(np.float32)


def mse_gradient(rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Of the mean over all elements of the squared difference, float32 like `rows`."""
    return 2.0 * (rows - targets) / np.float32(rows.size)


def reference(optimizer: Optimizer) -> ReferenceTable:
    """An untrained table as the layers of these tests make it."""
    return ReferenceTable(dim=DIM, num_rows=ROWS, optimizer=optimizer, init=INIT, seed=SEED)


def trained_reference(optimizer, ids, targets, *, batch: int = BATCH, lrs=None) -> ReferenceTable:
    """A table after one update for each batch of a model whose output is the row and whose loss is "mse"."""
    table = reference(optimizer)
    for step, start in enumerate(range(0, len(ids), batch)):
        part = slice(start, start + batch)
        grads = mse_gradient(table.lookup(ids[part]), targets[part])
        table.update(ids[part], grads, lr=None if lrs is None else lrs[step])
    return table


def row_model(layer):
    """A model whose output is the layer's rows."""
    ids = keras.Input((), dtype="int64")
    return keras.Model(ids, layer(ids))


def all_rows(table) -> np.ndarray:
    """Every row, float32[ROWS, DIM]."""
    return table.get(np.arange(ROWS))


def stored_layers(path):
    """What makes a layer on a table of 20,000 x 32 stored rows, of which a quarter fits the budget."""
    rows, dim = 20_000, 32
    with bb.create(path, dim=dim, num_rows=rows, optimizer=bb.Adam(0.01), ram="64MiB", seed=1) as table:
        for start in range(0, rows, 5000):
            table.update(np.arange(start, start + 5000), np.ones((5000, dim), np.float32))

    def layer():
        from bunkbed.keras import Embedding

        return Embedding(rows, dim, path=path, ram="3MiB", optimizer=bb.Adam(0.01))

    return layer


def stored_dataset(steps: int = 12, seed: int = 0):
    """Batches of 256 ids and targets for `stored_layers`."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 20_000, steps * 256)
    return tf.data.Dataset.from_tensor_slices((ids, rng.standard_normal((len(ids), 32)).astype(np.float32))).batch(256)
