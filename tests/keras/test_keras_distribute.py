"""`bunkbed.keras.Embedding` under `tf.distribute`: one table, whatever the number of replicas."""

from __future__ import annotations

import time

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.keras import Embedding
from bunkbed.keras.shared import lookups
from keras_setup import (
    ADAM,
    BATCH,
    DIM,
    ROWS,
    SEED,
    all_rows,
    batches,
    keras,
    row_model,
    tf,
    trained_reference,
)  # fmt: skip


def mirrored(replicas: int):
    return tf.distribute.MirroredStrategy([f"/cpu:{device}" for device in range(replicas)])


def compiled(replicas: int, optimizer, **compile_arguments):
    with mirrored(replicas).scope():
        layer = Embedding(ROWS, DIM, seed=SEED)
        model = row_model(layer)
        model.compile(optimizer(), "mse", **compile_arguments)
    return layer, model


@pytest.mark.parametrize("arguments", [{}, {"steps_per_execution": 8}, {"run_eagerly": True}])
@pytest.mark.parametrize("replicas", [2, 4])
def test_mirrored_replicas_train_one_table_as_one_device_does(replicas: int, arguments) -> None:
    ids, targets = batches(24)
    layer, model = compiled(replicas, lambda: keras.optimizers.Adam(0.01), **arguments)
    model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)
    assert layer.table.step == 24
    np.testing.assert_allclose(all_rows(layer.table), all_rows(trained_reference(ADAM, ids, targets)), atol=1e-6)


@pytest.mark.parametrize("replicas", [2, 4])
def test_mirrored_replicas_train_a_sharded_table_as_one_device_does(replicas: int, tmp_path) -> None:
    ids, targets = batches(24)
    places = [tmp_path / "ssd0", tmp_path / "ssd1", tmp_path / "ssd2"]
    with mirrored(replicas).scope():
        layer = Embedding(ROWS, DIM, seed=SEED, path=tmp_path / "user", placement="sharded", directories=places)
        model = row_model(layer)
        model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)
    assert isinstance(layer.table, bb.ShardedTable) and layer.table.step == 24
    np.testing.assert_allclose(all_rows(layer.table), all_rows(trained_reference(ADAM, ids, targets)), atol=1e-6)

    model.save(tmp_path / "model.keras")
    rows = all_rows(layer.table)
    stored = len(layer.table)
    model.fit(ids, targets, batch_size=BATCH, verbose=0)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(all_rows(loaded.layers[-1].table), rows)
    directories = layer.table.directories
    assert [directory.parent for directory in directories] == places or list(directories) == places
    layer.table.close()
    shards = [bb.open(directory, mode="r") for directory in directories]
    assert sum(len(shard) for shard in shards) == stored and all(len(shard) < stored for shard in shards)
    ids_of = [set(np.concatenate([ids for ids, _ in shard.scan()]).tolist()) for shard in shards]
    assert sum(len(each) for each in ids_of) == len(set.union(*ids_of))  # a shard never holds another's rows


def test_a_strategy_of_several_processes_is_refused(monkeypatch) -> None:
    from bunkbed.keras import embedding

    class Resolver:
        def cluster_spec(self):
            return tf.train.ClusterSpec({"worker": ["localhost:1", "localhost:2"]})

    class Strategy:
        cluster_resolver = Resolver()

    monkeypatch.setattr(embedding.tf.distribute, "get_strategy", Strategy)
    with pytest.raises(ValueError, match="under Strategy with 2 processes each would train a table of its own"):
        Embedding(ROWS, DIM)


def test_two_runs_with_replicas_give_the_same_bits() -> None:
    ids, targets = batches(24)
    rows = []
    for _ in range(2):
        layer, model = compiled(4, lambda: keras.optimizers.Adam(0.01))
        model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)
        rows.append(all_rows(layer.table))
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("accumulate", [None, 4])
def test_loss_scaling_and_accumulation_with_replicas(accumulate: int | None) -> None:
    ids, targets = batches(8)

    def optimizer():
        inner = keras.optimizers.Adam(0.01, gradient_accumulation_steps=accumulate)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10)

    layer, model = compiled(2, optimizer)
    model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)
    expected = trained_reference(ADAM, ids, targets, batch=BATCH * (accumulate or 1))
    assert layer.table.step == 8 // (accumulate or 1)
    np.testing.assert_allclose(all_rows(layer.table), all_rows(expected), atol=1e-6)


@pytest.mark.parametrize("accumulate", [None, 2])
def test_a_replica_that_is_late_at_random_changes_nothing_in_300_steps(monkeypatch, accumulate: int | None) -> None:
    """Lookups and pushes of single replicas are delayed: an update that one replica missed would change the rows."""
    ids, targets = batches(300)
    rng = np.random.default_rng(1)
    real = lookups.call

    def late(what, table, function, inputs, dtypes):
        def delayed(*arrays):
            if rng.random() < 0.2:
                time.sleep(rng.random() * 1e-3)
            return function(*arrays)

        return real(what, table, delayed, inputs, dtypes)

    monkeypatch.setattr(lookups, "call", late)

    def optimizer():
        inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulate)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10) if accumulate else inner

    layer, model = compiled(4, optimizer, steps_per_execution=10)
    model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)
    assert layer.table.step == 300 // (accumulate or 1)
    expected = trained_reference(bb.SGD(0.1), ids, targets, batch=BATCH * (accumulate or 1))
    np.testing.assert_allclose(all_rows(layer.table), all_rows(expected), atol=1e-6)


def test_nothing_of_the_size_of_the_table_is_mirrored() -> None:
    layer, model = compiled(4, lambda: keras.optimizers.Adam(0.01))
    model.fit(*batches(2), batch_size=BATCH, verbose=0)
    copies = [tf.size(value).numpy() for weight in model.weights for value in weight.value.values]
    assert sum(copies) == 8 and len(layer.table) <= ROWS  # a token and an epoch in each of four replicas

    with mirrored(4).scope():
        plain = keras.layers.Embedding(ROWS, DIM)
        plain.build()
    assert sum(tf.size(value).numpy() for value in plain.embeddings.value.values) == 4 * ROWS * DIM


def test_replicas_with_a_custom_loop() -> None:
    ids, targets = batches(8)
    strategy = mirrored(2)
    with strategy.scope():
        layer = Embedding(ROWS, DIM, seed=SEED, optimizer=ADAM)
        optimizer = keras.optimizers.SGD(0.1)

    def step(ids, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer(ids) - targets)) / (BATCH * DIM)
        grads = tape.gradient(loss, layer.trainable_weights)
        optimizer.apply_gradients(zip(grads, layer.trainable_weights, strict=True))

    data = tf.data.Dataset.from_tensor_slices((ids, targets)).batch(BATCH)
    run = tf.function(lambda *batch: strategy.run(step, args=batch))
    for batch in strategy.experimental_distribute_dataset(data):
        run(*batch)
    assert layer.table.step == 8
    np.testing.assert_allclose(all_rows(layer.table), all_rows(trained_reference(ADAM, ids, targets)), atol=1e-6)
