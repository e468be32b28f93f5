"""One worker of a MultiWorkerMirroredStrategy: a program that test_keras_multiworker.py runs twice, or four times.

    python keras_worker.py SCENARIO FOLDER

A model of two tables, one replicated and one sharded, whose output is their rows side by side. What a scenario finds it
writes to FOLDER/found-K.npz (arrays) and FOLDER/said-K.json (messages of errors), K being the worker.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

ROWS, DIM, SEED, WORKERS = 50, 4, 3, 2
BATCH = 16  # of all workers together
SAVED_AT, KILLED_AT, STEPS = 4, 6, 10


def batches(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """int64[steps * BATCH] ids (`zipf`) and float32[steps * BATCH, 2 * DIM] targets."""
    rng = np.random.default_rng(5)
    ids = zipf(rng, steps * BATCH)
    return ids, rng.standard_normal((steps * BATCH, 2 * DIM)).astype(np.float32)


def zipf(rng: np.random.Generator, size: int | tuple[int, int]) -> np.ndarray:
    """int64 ids, of which few come often: the bits of a sum of float32 gradients depend on the order of additions."""
    return (rng.zipf(1.3, size) - 1) % ROWS


def layers_in(folder: Path | None, keras, **arguments) -> list:
    from bunkbed.keras import Embedding

    return [
        Embedding(ROWS, DIM, path=None if folder is None else folder / name, placement=name, **arguments)
        for name in ("replicated", "sharded")
    ]


def model_of(keras, layers, optimizer):
    ids = keras.Input((), dtype="int64")
    model = keras.Model(ids, keras.layers.Concatenate()([layer(ids) for layer in layers]))
    model.compile(optimizer, "mse")
    return model


class Worker:
    """What every scenario has."""

    def __init__(self, folder: Path) -> None:
        import keras
        import tensorflow as tf

        self.tf, self.keras, self.folder = tf, keras, folder
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy()
        self.index = self.strategy.cluster_resolver.task_id
        self.count = self.strategy.num_replicas_in_sync
        self.found: dict[str, np.ndarray] = {}
        self.said: dict[str, str] = {}

    def model(self, folder: Path | None, optimizer=None, **arguments):
        with self.strategy.scope():
            optimizer = self.keras.optimizers.Adam(0.01) if optimizer is None else optimizer()
            layers = layers_in(folder, self.keras, **arguments)
            return layers, model_of(self.keras, layers, optimizer)

    def step_of(self, model):
        """A function that trains on this worker's part of one batch."""
        run = self.tf.function(lambda ids, targets: self.strategy.run(model.train_step, args=((ids, targets),)))

        def step(ids, targets, cut: int | None = None):
            size = len(ids) // self.count
            part = slice(self.index * size, (self.index + 1) * size)
            if cut is not None:  # between two workers
                part = slice(None, cut) if self.index == 0 else slice(cut, None)
            return run(self.tf.constant(ids[part], self.tf.int64), self.tf.constant(targets[part], self.tf.float32))

        return step

    def rows(self, model, ids: np.ndarray) -> np.ndarray:
        """What the model gives for ids, which all workers look up at once."""
        look_up = self.tf.function(lambda ids: self.strategy.run(lambda ids: model(ids, training=False), args=(ids,)))
        return look_up(self.tf.constant(ids)).numpy()

    def must_raise(self, name: str, work) -> None:
        """Notes with what message `work` fails, which it must."""
        try:
            work()
        except Exception as error:
            self.said[name] = f"{type(error).__name__}: {error}"
        else:
            raise AssertionError(f"{name}: no error")

    def note_stored(self, name: str, layers) -> None:
        for kind, layer in zip(("replicated", "sharded"), layers, strict=True):
            scanned = list(layer.table.scan()) or [(np.empty(0, np.int64), np.empty((0, DIM), np.float32))]
            ids = np.concatenate([ids for ids, _ in scanned])
            order = np.argsort(ids)
            self.found[f"{name}_{kind}_ids"] = ids[order]
            self.found[f"{name}_{kind}_rows"] = np.concatenate([rows for _, rows in scanned])[order]
            self.found[f"{name}_{kind}_step"] = np.array(layer.table.step)

    def write(self) -> None:
        np.savez(self.folder / f"found-{self.index}.npz", **self.found)
        (self.folder / f"said-{self.index}.json").write_text(json.dumps(self.said))


def batch(data, step: int):
    part = slice(step * BATCH, (step + 1) * BATCH)
    return data[0][part], data[1][part]


def train(worker: Worker) -> None:
    """Everything that ends well, and errors that a program survives."""
    data = batches(STEPS)
    # Seeds that each worker draws by itself are those of worker 0.
    np.random.seed(worker.index)
    layers, model = worker.model(worker.folder / "drawn")
    assert worker.rows(model, np.arange(ROWS)).shape == (ROWS, 2 * DIM)  # before there is a table
    worker.found["seeds"] = np.array([layer._shared.seed for layer in layers])

    layers, model = worker.model(worker.folder / "tables", seed=SEED)
    step = worker.step_of(model)
    for number in range(STEPS):
        if number == SAVED_AT:
            model.save(worker.folder / f"model-{worker.index}.keras")
        step(*batch(data, number), cut=cut_of(number))
    worker.note_stored("trained", layers)
    worker.found["looked_up"] = worker.rows(model, np.arange(ROWS))
    # Each looks up other ids, and one none at all.
    own = np.array([[3, 3, 7], [49, 0, 11]][worker.index])
    worker.found["own"] = worker.rows(model, own)
    worker.found["none"] = worker.rows(model, own if worker.index else own[:0])
    worker.found["predicted"] = model.predict(np.arange(ROWS), batch_size=10, verbose=0)

    # Errors on one worker raise on both, change nothing, and the next step works.
    before = [layer.table.step for layer in layers]
    ids, targets = (array.copy() for array in batch(data, 0))
    wrong = ids.copy()
    if worker.index == 1:
        wrong[-1] = ROWS
    sharded = layers[1]
    run = worker.tf.function(lambda ids: worker.strategy.run(lambda ids: sharded(ids, training=True), args=(ids,)))
    worker.must_raise("out of range", lambda: run(worker.tf.constant(wrong)))
    bad = targets.copy()
    bad[-1, -1] = np.nan  # of worker 1
    worker.must_raise("not finite", lambda: step(ids, bad))
    model.optimizer.learning_rate = 0.01 + worker.index
    worker.must_raise("learning rate", lambda: step(ids, targets))
    model.optimizer.learning_rate = 0.01
    assert [layer.table.step for layer in layers] == before, before

    foreign = int(np.flatnonzero(sharded.table._workers.index != owners(np.arange(ROWS)))[0])
    worker.must_raise("foreign", lambda: sharded.table.get([foreign]))
    worker.must_raise("outside", lambda: sharded(np.array([1, 2])))
    worker.must_raise("scaling", lambda: scaled(worker, data))

    # Back to what was saved, by this worker's own file and by the other's.
    for index in (worker.index, 1 - worker.index):
        model.load_weights(worker.folder / f"model-{index}.keras")
        worker.note_stored(f"loaded{int(index != worker.index)}", layers)
    for number in range(SAVED_AT, STEPS):
        step(*batch(data, number))
    worker.note_stored("again", layers)
    if worker.index == 1:  # what one worker does alone the next exchange notices
        layers[0].table.update([1], np.ones((1, DIM), np.float32))
    worker.must_raise("skew", lambda: step(*batch(data, 0)))
    for layer in layers:
        layer.table.close()

    accumulated(worker, data)
    pooled(worker)
    layered(worker)
    half_saved(worker, data)
    alone(worker)


def cut_of(step: int) -> int:
    """How many of a batch worker 0 has: after the save also few, and none."""
    return BATCH // WORKERS if step < SAVED_AT else (8, 0, 3)[step % 3]


def owners(ids: np.ndarray, count: int = WORKERS) -> np.ndarray:
    from bunkbed.files.sharding import shards_of

    return shards_of(ids.astype(np.int64), count).astype(np.int64)


def scaled(worker: Worker, data) -> None:
    keras = worker.keras
    _, model = worker.model(None, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)), seed=SEED)
    worker.step_of(model)(*batch(data, 0))


def accumulated(worker: Worker, data) -> None:
    """Four batches for an update, clipped by their norm, with a constant loss scale, in RAM."""
    keras = worker.keras

    def optimizer():
        return keras.optimizers.SGD(0.5, gradient_accumulation_steps=2, clipnorm=0.05, loss_scale_factor=4.0)

    layers, model = worker.model(None, optimizer, seed=SEED)
    step = worker.step_of(model)
    for number in range(STEPS):
        step(*batch(data, number))
    worker.note_stored("accumulated", layers)
    step(*batch(data, 0))
    if worker.index == 1:  # forgets what the other keeps
        layers[0]._shared.pending.drop()
    worker.must_raise("half accumulated", lambda: step(*batch(data, 1)))


def pooled(worker: Worker) -> None:
    """Bags, weighted, of padded ids, with a schedule."""
    keras, tf = worker.keras, worker.tf
    ids = zipf(np.random.default_rng(1), (8, 5))
    weights = np.random.default_rng(2).random((8, 5)).astype(np.float32)
    for combiner in ("sum", "mean", "sqrtn"):
        with worker.strategy.scope():
            layers = layers_in(None, keras, seed=SEED, combiner=combiner, mask_zero=True)
            optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5))
        tokens = [layer.token for layer in layers]
        for layer in layers:
            layer.follow(optimizer)

        def step(ids, weights, layers=layers, optimizer=optimizer, tokens=tokens):
            with tf.GradientTape() as tape:
                outputs = [layer(ids, weights, training=True) for layer in layers]
                loss = tf.add_n([tf.reduce_sum(tf.square(output)) for output in outputs])
            optimizer.apply(tape.gradient(loss, [token.value for token in tokens]), tokens)
            return outputs

        run = tf.function(lambda *part, step=step: worker.strategy.run(step, args=part))
        part = slice(worker.index * 4, worker.index * 4 + 4)
        for _ in range(3):
            outputs = run(tf.constant(ids[part]), tf.constant(weights[part]))
        worker.found[f"bags_{combiner}"] = np.stack([output.numpy() for output in outputs])
        worker.note_stored(f"bags_{combiner}", layers)


def several(tf, keras, layers, bags, parts: int, run):
    """A function that trains on `parts` batches of int64[N, 2] ids, one after another, as one batch.

    Each table is looked up three times in a part: each column of the ids, and bags of its rows. Two calls are one
    update.
    """
    optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2, clipnorm=0.5)
    for layer in layers:
        layer.follow(optimizer)
    tokens = [layer.token for layer in layers]

    def step(ids):
        with tf.GradientTape() as tape:
            losses = []
            for part in tf.split(ids, parts):
                for layer, bag in zip(layers, bags, strict=True):
                    found = [layer(part[:, 1]), bag(part), layer(part[:, 0])]
                    losses += [tf.reduce_sum(tf.square(rows - 0.1 * number)) for number, rows in enumerate(found)]
            loss = tf.add_n(losses)
        optimizer.apply(tape.gradient(loss, [token.value for token in tokens]), tokens)

    return tf.function(lambda ids: run(step, args=(ids,)))


def columns(steps: int) -> np.ndarray:
    """int64[steps, BATCH, 2] ids for `several`."""
    return zipf(np.random.default_rng(6), (steps * BATCH, 2)).reshape(steps, BATCH, 2)


def ordinary(worker: Worker) -> None:
    """Ids as they come, on any number of workers: one lookup of a table in a step, and `several`."""
    from bunkbed.keras import Embedding

    keras, tf, data = worker.keras, worker.tf, batches(STEPS)
    layers, model = worker.model(None, seed=SEED)
    step = worker.step_of(model)
    for number in range(STEPS):
        step(*batch(data, number))
    worker.note_stored("once", layers)

    with worker.strategy.scope():
        layers = layers_in(None, keras, seed=SEED)
        for layer in layers:
            layer.follow(keras.optimizers.SGD(0.5))
        bags = [
            Embedding(ROWS, DIM, table=layer.table, placement=kind, combiner="mean")
            for kind, layer in zip(("replicated", "sharded"), layers, strict=True)
        ]
        train = several(tf, keras, layers, bags, 1, worker.strategy.run)
    size = BATCH // worker.count
    for ids in columns(STEPS):
        train(tf.constant(ids[worker.index * size : (worker.index + 1) * size]))
    worker.note_stored("several", layers)


def layered(worker: Worker) -> None:
    """Two layers on one table; rows that were given; a step in eager mode."""
    from bunkbed.keras import Embedding

    keras, tf = worker.keras, worker.tf
    given = np.random.default_rng(3).random((ROWS, DIM)).astype(np.float32)
    with worker.strategy.scope():
        optimizer = keras.optimizers.SGD(0.5)
        first = Embedding(ROWS, DIM, placement="sharded", path=worker.folder / "given", weights=given, seed=SEED)
        second = Embedding(ROWS, DIM, placement="sharded", path=worker.folder / "given", seed=SEED)
        first.follow(optimizer)
        third = Embedding(ROWS, DIM, placement="sharded", table=first.table)
        optimizer.build([first.token])
    assert first.token is second.token is third.token

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(layer(ids, training=True)) for layer in (first, second, third)])
        optimizer.apply(tape.gradient(loss, [first.token.value]), [first.token])

    worker.strategy.run(step, args=(tf.constant([worker.index, 2, 4]),))
    worker.note_stored("given", [first, second])
    checkpoint = tf.train.Checkpoint(layer=first)
    saved = checkpoint.save(str(worker.folder / f"checkpoint-{worker.index}" / "it"))
    worker.strategy.run(step, args=(tf.constant([worker.index, 2, 4]),))
    assert first.table.step == 2
    checkpoint.restore(saved)
    assert first.table.step == 1
    worker.note_stored("restored", [first, second])
    worker.must_raise("bare table", lambda: bare(worker))
    first.table.close(commit=False)


def half_saved(worker: Worker, data) -> None:
    """Worker 1 cannot commit: worker 0 does not release the save before, though only one checkpoint is kept."""
    layers, model = worker.model(worker.folder / "half", seed=SEED, keep_checkpoints=1)
    step, file = worker.step_of(model), worker.folder / f"half-{worker.index}.keras"
    step(*batch(data, 0))
    model.save(file)
    step(*batch(data, 1))
    references = layers[1]._shared._references
    if worker.index == 1:

        def fail(*_, **__):
            raise OSError("no space left")

        references.save = fail
    worker.must_raise("half saved", lambda: layers[1]._shared.save())
    references.__dict__.pop("save", None)
    model.load_weights(file)
    assert [layer.table.step for layer in layers] == [1, 1]
    model.save(file)
    model.load_weights(file)
    step(*batch(data, 1))
    model.save(file)
    worker.note_stored("half", layers)
    worker.found["half_saved"] = np.array([[layer.table.step, len(layer.table.snapshots())] for layer in layers])


def alone(worker: Worker) -> None:
    """Worker 0 saves long before worker 1 does, and says that it waits."""
    from bunkbed.keras.workers import group as workers

    _, model = worker.model(None, seed=SEED)
    worker.step_of(model)(*batch(batches(1), 0))
    said = worker.folder / "said-that-it-waits"
    if worker.index == 0:
        workers._PATIENCE_S = 0.2
        handler = logging.Handler()
        handler.emit = lambda record: said.write_text(record.getMessage())
        logging.getLogger("bunkbed.keras").addHandler(handler)
    else:
        while not said.exists():
            time.sleep(0.1)
    model.save(worker.folder / f"alone-{worker.index}.keras")
    worker.said["alone"] = said.read_text()


def bare(worker: Worker) -> None:
    import bunkbed as bb
    from bunkbed.keras import Embedding

    with worker.strategy.scope():
        Embedding(ROWS, DIM, placement="sharded", table=bb.create(None, dim=DIM, num_rows=ROWS))


def crash(worker: Worker) -> None:
    """Worker 1 is killed between two steps, after a save; the other must end by itself."""
    data = batches(STEPS)
    layers, model = worker.model(worker.folder / "tables", seed=SEED)
    step = worker.step_of(model)
    for number in range(STEPS):
        if number == SAVED_AT:
            model.save(worker.folder / f"model-{worker.index}.keras")
        if number == KILLED_AT and worker.index == 1:
            layers[0].table.commit()  # one is ahead, as after a crash between two commits
            os.kill(os.getpid(), signal.SIGKILL)
        step(*batch(data, number))


def resume(worker: Worker) -> None:
    """After `crash`: the tables are at different steps; loading the model puts them back, and training goes on."""
    data = batches(STEPS)
    with worker.strategy.scope():
        layers = layers_in(worker.folder / "tables", worker.keras)
        model = model_of(worker.keras, layers, worker.keras.optimizers.Adam(0.01))
    step = worker.step_of(model)
    worker.must_raise("apart", lambda: step(*batch(data, SAVED_AT)))
    with worker.strategy.scope():
        model = worker.keras.models.load_model(worker.folder / "model-1.keras")
    layers = model.layers[1:3]
    worker.note_stored("resumed", layers)
    step = worker.step_of(model)
    for number in range(SAVED_AT, STEPS):
        step(*batch(data, number))
    worker.note_stored("trained", layers)
    for layer in layers:
        layer.table.close()
    worker.must_raise("central", lambda: central(worker))
    worker.must_raise("function", lambda: looked_up(worker))


def begin(worker: Worker) -> None:
    """The first steps, and a save."""
    data = batches(STEPS)
    layers, model = worker.model(worker.folder / "tables", seed=SEED)
    step = worker.step_of(model)
    for number in range(SAVED_AT):
        step(*batch(data, number))
    model.save(worker.folder / f"model-{worker.index}.keras")
    for layer in layers:
        layer.table.close()


def go_on(worker: Worker) -> None:
    """After `begin` and `bunkbed.reshard`: as many workers as there are folders now load what the first ones saved."""
    import bunkbed.keras  # noqa: F401  # registers the layer

    data = batches(STEPS)
    with worker.strategy.scope():
        model = worker.keras.models.load_model(worker.folder / "model-1.keras")
    layers = model.layers[1:3]
    worker.note_stored("loaded", layers)
    step = worker.step_of(model)
    for number in range(SAVED_AT, STEPS):
        step(*batch(data, number))
    model.save(worker.folder / f"model-{worker.index}.keras")
    worker.note_stored("trained", layers)
    step(*batch(data, 0))
    with worker.strategy.scope():
        model.load_weights(worker.folder / "model-0.keras")
    worker.note_stored("again", layers)
    step(*batch(data, 0))
    model.save(worker.folder / f"end-{worker.index}.keras")
    worker.note_stored("end", layers)


def central(worker: Worker) -> None:
    from bunkbed.keras import Embedding

    with worker.strategy.scope():
        Embedding(ROWS, DIM)


def looked_up(worker: Worker) -> None:
    import bunkbed as bb
    from bunkbed.keras import embedding_lookup

    table = bb.create(None, dim=DIM, num_rows=ROWS)
    worker.strategy.run(lambda: embedding_lookup(table, [1]))


def refused(worker: Worker) -> None:
    """Layers that workers do not agree on, and what one worker does not survive."""
    import bunkbed as bb
    from bunkbed.keras import Embedding

    def make(path, **arguments):
        with worker.strategy.scope():
            Embedding(ROWS, arguments.pop("dim", DIM), path=worker.folder / path, placement="sharded", **arguments)

    worker.must_raise("other arguments", lambda: make("a", dim=DIM + worker.index))
    parts = {"of three": "shard-0000-of-0003", "lost": "shard-0000-of-0002", "another": "replica-0000-of-0002"}
    for name, part in parts.items():
        (worker.folder / name / part).mkdir(parents=True, exist_ok=True)
        worker.must_raise(name, lambda name=name: make(name))
    if worker.index == 0:
        bb.create(worker.folder / "whole", dim=DIM, num_rows=ROWS).close()
    worker.must_raise("whole", lambda: make("whole"))
    make("damaged", optimizer=bb.Adam())
    gc.collect()  # and it is closed
    if worker.index == 0:
        for file in (worker.folder / "damaged" / "shard-0000-of-0002").rglob("*"):
            if file.is_file():
                file.write_bytes(b"")
    worker.must_raise("not opened", lambda: make("damaged"))
    worker.write()
    # A lookup in a replica is this worker's alone: its error ends the process, and TensorFlow tells the other.
    data = batches(STEPS)
    _, model = worker.model(None, seed=SEED)
    step = worker.step_of(model)
    step(*batch(data, 0))
    with worker.strategy.scope():
        replica = Embedding(ROWS, DIM, placement="replicated", seed=SEED)
        model = model_of(worker.keras, [replica, replica], worker.keras.optimizers.SGD(0.1))
    step = worker.step_of(model)
    step(*batch(data, 0))
    ids, targets = batch(data, 1)
    if worker.index == 1:
        ids[-1] = ROWS
    step(ids, targets)


if __name__ == "__main__":
    scenario, folder = sys.argv[1:]
    this = Worker(Path(folder))
    {
        "train": train,
        "ordinary": ordinary,
        "crash": crash,
        "resume": resume,
        "begin": begin,
        "go_on": go_on,
        "refused": refused,
    }[scenario](this)
    this.write()
