"""Train one model in two worker processes with `MultiWorkerMirroredStrategy`.

The users' table is *sharded*: a hash of the id assigns each row to a worker, so two machines hold twice the rows. The
items' table is *replicated*: each worker has all rows, and workers exchange data only in a step. Keras 3's `fit` does
not work under this strategy, for any model; a loop around `train_step` does.

The script starts both workers on this machine. On several machines, start `worker()` on each, with a TF_CONFIG that
names all machines.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

WORKERS, BATCH, STEPS = 2, 512, 60
USERS, ITEMS, DIM = 20_000, 500, 16


def worker(folder: Path) -> None:
    import keras
    import tensorflow as tf

    from bunkbed.keras import Embedding

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    keras.utils.set_random_seed(1)
    with strategy.scope():
        user, item = keras.Input((), dtype="int64"), keras.Input((), dtype="int64")
        users = Embedding(USERS, DIM, path=folder / "users", placement="sharded")
        items = Embedding(ITEMS, DIM, path=folder / "items", placement="replicated")
        score = keras.layers.Dense(1)(keras.layers.Multiply()([users(user), items(item)]))
        model = keras.Model([user, item], score)
        model.compile(keras.optimizers.Adam(0.02), "mse")

    @tf.function
    def step(data):
        return strategy.run(model.train_step, args=(data,))

    rng = np.random.default_rng(index)  # each worker reads its own part of the data
    taste = np.random.default_rng(7).standard_normal((ITEMS, 2)).astype(np.float32)
    losses = []
    for number in range(STEPS):
        who, what = rng.integers(0, 1000, BATCH // WORKERS), rng.integers(0, ITEMS, BATCH // WORKERS)
        wanted = taste[what, who % 2, None]
        losses.append(float(step(((tf.constant(who), tf.constant(what)), tf.constant(wanted)))["loss"]))
        model.reset_metrics()
        if number == STEPS // 2:  # all workers save; the file refers to each worker's commit
            model.save(folder / f"model-{index}.keras")

    if index == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {users.table.step} updates")
    model.save(folder / f"model-{index}.keras")
    for layer in (users, items):
        layer.table.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sockets = [socket.create_server(("localhost", 0)) for _ in range(WORKERS)]
        addresses = [f"localhost:{each.getsockname()[1]}" for each in sockets]
        for each in sockets:
            each.close()
        running = []
        for index in range(WORKERS):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            env = {**os.environ, "TF_CONFIG": json.dumps(task), "CUDA_VISIBLE_DEVICES": "-1"}
            running.append(subprocess.Popen([sys.executable, __file__, name], env=env))
        statuses = [each.wait() for each in running]
        if any(statuses):
            raise SystemExit("a worker failed")

        import bunkbed as bb

        shards = [bb.open(part, mode="r") for part in sorted((folder / "users").iterdir())]
        print("users of each worker:", ", ".join(f"{len(shard)} in {shard.name}" for shard in shards))
        replicas = [bb.open(part, mode="r") for part in sorted((folder / "items").iterdir())]
        rows = [replica.get(np.arange(ITEMS)) for replica in replicas]
        print(f"items of both workers are the same bits: {np.array_equal(*rows)}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        worker(Path(sys.argv[1]))
    else:
        main()
