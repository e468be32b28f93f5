"""Train a table larger than TensorFlow's 2 GB in ``fit``, within a RAM budget; save and load it.

python examples/keras/large_table.py                                # seconds
python examples/keras/large_table.py --rows 6_000_000 --ram 512MiB  # 4 GB of rows and Adam's state
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import keras
import numpy as np

from bunkbed.keras import Embedding


def build(path: Path, rows: int, ram: str) -> keras.Model:
    users = keras.Input((), dtype="int64", name="user")
    vector = Embedding(rows, 64, path=path, ram=ram, name="users")(users)
    model = keras.Model(users, keras.layers.Dense(1)(vector))
    model.compile(keras.optimizers.Adam(0.05), "mse")  # the table follows it
    return model


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=lambda text: int(text.replace("_", "")), default=20_000)
    options.add_argument("--ram", default="8MiB")
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--path", type=Path, help="keep the table here")
    given = options.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = given.path or Path(folder) / "users"
        rng = np.random.default_rng(0)
        ids = rng.integers(0, given.rows, given.steps * 512)
        truth = (ids % 7 - 3).astype(np.float32)  # the value that a row must learn

        model = build(path, given.rows, given.ram)
        history = model.fit(ids, truth, batch_size=512, epochs=2, verbose=2)
        model.save(Path(folder) / "model.keras")  # commits the table; the file refers to that commit

        table = model.get_layer("users").table
        memory = table.stats()["ram_bytes"] / 2**20
        print(f"{len(table):,} rows of {table.nbytes / 1e9:.2f} GB stored, {memory:.0f} MiB of RAM")
        loaded = keras.models.load_model(Path(folder) / "model.keras")
        sample = ids[:1000]
        same = np.array_equal(loaded.predict(sample, verbose=0), model.predict(sample, verbose=0))
        first, last = history.history["loss"]
        print(f"loss {first:.3f} -> {last:.3f}; loaded model agrees: {same}")
        table.close()


if __name__ == "__main__":
    main()
