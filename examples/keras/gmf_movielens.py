"""Generalised matrix factorization (He et al. 2017) in Keras, whose user and item tables may be larger than RAM.

    python examples/keras/gmf_movielens.py FOLDER --epochs 20    # FOLDER with the NCF authors' MovieLens-1M files
    python examples/keras/gmf_movielens.py                       # a small synthetic set, seconds

The evaluation ranks each user's last item among 99 given items. One held-out pair of each user selects the epoch.
Early stopping restores that epoch: tables, their optimizer state and dense weights. Data, negatives and ranking come
from `bunkbed.train`, the options from its recipe ``ml1m-bce``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
import torch

from bunkbed.keras import Embedding
from bunkbed.train.data.interactions import read_dataset
from bunkbed.train.data.sampling import BatchSource, SeenPairs
from bunkbed.train.data.splits import split
from bunkbed.train.evaluate.evaluator import Evaluator
from bunkbed.train.models.heads import DotHead
from bunkbed.train.models.scorer import Scorer
from bunkbed.train.recipes import ML1M_BCE


class GMF(keras.layers.Layer):
    """Layer for the logits of a user and its items, sum(w * user * item); adds the L2 term of the rows to the loss."""

    def build(self, shapes) -> None:
        self.w = self.add_weight(shape=(shapes[0][-1],), initializer="ones")

    def call(self, rows):
        user, items = rows  # [B, dim], [B, 1 + negatives, dim]
        squares = tf.reduce_sum(tf.square(items), -1)
        penalty = tf.reduce_sum(tf.square(user), -1) + squares[:, 0] + tf.reduce_mean(squares[:, 1:], -1)
        self.add_loss(0.5 * ML1M_BCE.l2 * tf.reduce_mean(penalty))
        return tf.einsum("bd,bnd->bn", self.w * user, items)


def build(users: int, items: int, folder: Path, ram: str) -> keras.Model:
    user = keras.Input((), dtype="int64", name="user_id")
    choices = keras.Input((None,), dtype="int64", name="item_ids")
    start = keras.initializers.RandomNormal(stddev=ML1M_BCE.init_std, seed=1)
    user_rows = Embedding(users, ML1M_BCE.dim, start, path=folder / "user", ram=ram, name="users")(user)
    item_rows = Embedding(items, ML1M_BCE.dim, start, path=folder / "item", ram=ram, name="items")(choices)
    model = keras.Model([user, choices], GMF(name="gmf")([user_rows, item_rows]))
    model.compile(keras.optimizers.Adam(ML1M_BCE.lr), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def scorer_of(model: keras.Model) -> Scorer:
    """Return a scorer that reads the tables for a ranking."""
    user, item = (model.get_layer(name).table for name in ("users", "items"))
    return Scorer(user, item, DotHead(torch.from_numpy(model.get_layer("gmf").w.numpy())))


class Validate(keras.callbacks.Callback):
    """Callback that logs NDCG@10 of the held-out pairs as ``val_ndcg``."""

    def __init__(self, evaluator: Evaluator) -> None:
        super().__init__()
        self._evaluator = evaluator

    def on_epoch_end(self, epoch, logs=None) -> None:
        logs["val_ndcg"] = self._evaluator.evaluate(scorer_of(self.model)).metrics["ndcg@10"]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, nargs="?")
    options.add_argument("--epochs", type=int, default=4)
    options.add_argument("--ram", default="16MiB", help="of each table")
    given = options.parse_args()
    keras.utils.set_random_seed(0)

    with tempfile.TemporaryDirectory() as temporary:
        files = {"path": "train.tsv.gz", "test": "ml-1m.test.rating.gz", "test_negatives": "ml-1m.test.negative.gz"}
        folder = given.folder or made_up(Path(temporary))
        data = read_dataset(**{name: folder / file for name, file in files.items() if (folder / file).exists()})
        parts = split(data.train, ML1M_BCE)
        known = SeenPairs(data.train.users, data.train.items, data.num_items)
        source = BatchSource(
            parts.train, batch_size=ML1M_BCE.batch_size, negatives=ML1M_BCE.negatives, seed=0, seen=known
        )

        def batches():
            for epoch in range(given.epochs):
                for batch in source.batches(epoch):
                    labels = np.zeros(batch.items.shape, np.float32)
                    labels[:, 0] = 1.0
                    yield (batch.users, batch.items), labels

        ids, labels = tf.TensorSpec((None,), tf.int64), tf.TensorSpec((None, None), tf.float32)
        stream = tf.data.Dataset.from_generator(
            batches, output_signature=((ids, tf.TensorSpec((None, None), tf.int64)), labels)
        )
        model = build(data.num_users, data.num_items, Path(temporary), given.ram)
        valid = Evaluator(parts.valid, data.train, ranking="sampled", ks=(10,))
        best = keras.callbacks.EarlyStopping("val_ndcg", mode="max", patience=given.epochs, restore_best_weights=True)
        model.fit(
            stream.prefetch(4), steps_per_epoch=source.steps(0), epochs=given.epochs, verbose=2,
            callbacks=[Validate(valid), best],
        )  # fmt: skip
        if data.candidates is not None:
            test = Evaluator(
                data.test, data.train, ranking="sampled", ks=(10,), candidates=data.candidates, split="test"
            )
            metrics = test.evaluate(scorer_of(model)).metrics
            print(f"test: HR@10 {metrics['hr@10']:.4f}, NDCG@10 {metrics['ndcg@10']:.4f}")
        for name in ("users", "items"):
            model.get_layer(name).table.close()


def made_up(folder: Path) -> Path:
    """Write a synthetic log of 300 users and 200 items, in which each user prefers a fifth of the items."""
    rng = np.random.default_rng(0)
    user, item = np.nonzero(rng.random((300, 200)) < 0.2 * (np.arange(300)[:, None] % 5 == np.arange(200) % 5) + 0.02)
    np.savetxt(folder / "train.tsv.gz", np.stack([user, item], 1), fmt="%d", delimiter="\t")
    return folder


if __name__ == "__main__":
    main()
