"""Prefetch rows from SSD while the model computes: `bunkbed.keras.lookahead` as a stage of a tf.data pipeline."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import bunkbed as bb
from bunkbed.keras import Embedding, lookahead


def main() -> None:
    rows, dim = 50_000, 64
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "items"
        with bb.create(path, dim=dim, num_rows=rows, ram="64MiB") as table:  # a table that was trained before
            for start in range(0, rows, 10_000):
                table.update(np.arange(start, start + 10_000), np.ones((10_000, dim), np.float32))

        layer = Embedding(rows, dim, path=path, ram="8MiB")  # of 38 MB
        inputs = keras.Input((), dtype="int64")
        model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
        model.compile(keras.optimizers.Adam(1e-3), "mse")

        ids = np.random.default_rng(0).integers(0, rows, 100 * 1024)
        data = tf.data.Dataset.from_tensor_slices((ids, np.zeros(len(ids), np.float32))).shuffle(1000).batch(1024)
        model.fit(lookahead(data, model), verbose=0)  # the only change

        stats = layer.table.stats()
        print(f"{stats['staged_rows']:,} rows were read ahead of their batch, {stats['misses']:,} were not")
        print(f"lookups and updates waited {stats['stall_s']:.2f} s for reads")
        layer.table.close()


if __name__ == "__main__":
    main()
