"""Create rows when an id is first trained: any non-negative int64 id, no vocabulary, no ``input_dim``."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import keras
import numpy as np

from bunkbed.keras import Embedding


def id_of(word: str) -> int:
    """Return a 63-bit hash of `word`. Among a billion words, two collide with a probability of 5 %."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little") >> 1


def main() -> None:
    words = [f"user-{number}" for number in range(1000)]
    ids = np.array([id_of(word) for word in words])
    labels = (np.arange(1000) % 2).astype(np.float32)

    with tempfile.TemporaryDirectory() as folder:
        inputs = keras.Input((), dtype="int64")  # int64: the default would convert ids to float32
        layer = Embedding(None, 16, path=Path(folder) / "users", ram="16MiB")
        model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(layer(inputs)))
        model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy", metrics=["accuracy"])
        model.fit(ids, labels, batch_size=100, epochs=20, verbose=0)

        table = layer.table
        print(f"{len(table):,} rows stored of 2^63 possible; accuracy {model.evaluate(ids, labels, verbose=0)[1]:.2f}")
        print(f"an id never trained has its initial row: {table.lookup([id_of('new user')])[0, :3]}")
        print(f"and is not stored: {bool(table.contains([id_of('new user')])[0])}")
        table.close()


if __name__ == "__main__":
    main()
