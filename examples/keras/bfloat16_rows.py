"""Store rows in half the bytes: bfloat16 with stochastic rounding and row-wise Adagrad, in a float32 model."""

from __future__ import annotations

import keras
import numpy as np

import bunkbed as bb
from bunkbed.keras import Embedding


def train(**arguments) -> tuple[float, int]:
    """Return the last loss, and the bytes of a row with its state."""
    keras.utils.set_random_seed(0)
    layer = Embedding(1000, 64, **arguments)
    inputs = keras.Input((), dtype="int64")
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    ids = np.random.default_rng(0).integers(0, 1000, 20_000)
    history = model.fit(ids, np.sin(ids).astype(np.float32), batch_size=200, epochs=4, verbose=0)
    return history.history["loss"][-1], layer.table.record_bytes


def main() -> None:
    for name, arguments in {
        "float32, Adam as compiled": {},
        "bfloat16, Adam with bfloat16 state": {"dtype": "bfloat16", "optimizer": bb.Adam(0.01, state_dtype="bfloat16")},
        "bfloat16, row-wise Adagrad": {"dtype": "bfloat16", "optimizer": bb.RowwiseAdagrad(0.1)},
    }.items():
        loss, size = train(**arguments)
        print(f"{name}: loss {loss:.4f}, {size} bytes a row")


if __name__ == "__main__":
    main()
