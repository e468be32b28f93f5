"""Train with `MirroredStrategy` without a copy of the table for each replica.

Two logical CPU devices simulate two GPUs. All replicas look up one table; their gradients become one update per step.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from bunkbed.keras import Embedding


def main() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])

    rows, dim = 100_000, 32
    with strategy.scope():
        inputs = keras.Input((), dtype="int64")
        layer = Embedding(rows, dim)
        model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
        model.compile(keras.optimizers.Adam(0.05), "mse")

    ids = np.random.default_rng(0).integers(0, 1000, 20_000)
    history = model.fit(ids, (ids % 5).astype(np.float32), batch_size=500, epochs=3, verbose=0)
    mirrored = sum(int(tf.size(copy)) for weight in model.weights for copy in weight.value.values)
    print(f"loss {history.history['loss'][0]:.3f} -> {history.history['loss'][-1]:.3f}, {layer.table.step} updates")
    print(f"numbers in mirrored variables: {mirrored}; keras.layers.Embedding would mirror {2 * rows * dim:,}")


if __name__ == "__main__":
    main()
