"""Convert a trained `keras.layers.Embedding` to a table, train the table, and convert it back."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np

from bunkbed.keras import Embedding

ROWS, DIM = 500, 16


def model_with(layer: keras.layers.Layer) -> keras.Model:
    inputs = keras.Input((), dtype="int64")
    model = keras.Model(inputs, keras.layers.Dense(1, name="head")(layer(inputs)))
    model.compile(keras.optimizers.Adam(0.05), "mse")
    return model


def main() -> None:
    ids = np.random.default_rng(0).integers(0, ROWS, 10_000)
    labels = (ids % 5).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        old = model_with(keras.layers.Embedding(ROWS, DIM, name="rows"))
        old.fit(ids, labels, batch_size=100, verbose=0)
        old.save_weights(Path(folder) / "old.weights.h5")

        # In: the unchanged weights file. weights=old_layer.get_weights() does the same without a file.
        layer = Embedding(ROWS, DIM, name="rows", path=Path(folder) / "rows")
        new = model_with(layer)
        new.load_weights(Path(folder) / "old.weights.h5", skip_mismatch=True)  # the optimizers' state differs
        print(f"taken over: {np.array_equal(new.predict(ids, verbose=0), old.predict(ids, verbose=0))}")
        new.fit(ids, labels, batch_size=100, verbose=0)

        # Out: rows that fit one tensor.
        back = keras.layers.Embedding(ROWS, DIM, weights=layer.table.get(np.arange(ROWS)))
        model = model_with(back)
        model.get_layer("head").set_weights(new.get_layer("head").get_weights())
        print(f"given back: {np.array_equal(model.predict(ids, verbose=0), new.predict(ids, verbose=0))}")
        layer.table.close()


if __name__ == "__main__":
    main()
