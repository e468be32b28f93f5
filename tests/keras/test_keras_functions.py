"""`embedding_lookup` and `lookahead` of `bunkbed.keras`."""

from __future__ import annotations

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.keras import Embedding, embedding_lookup, lookahead, token_of
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
    stored_dataset,
    stored_layers,
    tf,
    trained_reference,
)


def new_table():
    return bb.create(None, dim=DIM, num_rows=ROWS, optimizer=ADAM, init=bb.Uniform(-0.05, 0.05), seed=SEED)


@pytest.mark.parametrize("eager", [False, True])
def test_a_table_is_trained_without_a_layer(eager: bool) -> None:
    ids, targets = batches(8)
    table = new_table()
    token = token_of(table)
    optimizer = keras.optimizers.SGD(0.1)

    def step(ids, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(embedding_lookup(table, ids) - targets))
        optimizer.apply_gradients([(tape.gradient(loss, token.value), token)])

    run = step if eager else tf.function(step)
    for start in range(0, len(ids), BATCH):
        run(tf.constant(ids[start : start + BATCH]), tf.constant(targets[start : start + BATCH]))
    assert table.step == 8
    np.testing.assert_allclose(all_rows(table), all_rows(trained_reference(ADAM, ids, targets)), atol=1e-6)


def test_an_update_that_no_tape_watches_is_an_error() -> None:
    table = new_table()
    with pytest.raises(RuntimeError, match=r"table 'table': no tape watches its token, .* pass trainable=False"):
        embedding_lookup(table, [1])
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        with pytest.raises(RuntimeError, match="no tape watches its token"):
            embedding_lookup(table, [1])
        tape.watch(token_of(table).value)
        embedding_lookup(table, [1])
    assert embedding_lookup(table, [[1, 2]], trainable=False).shape == (1, 2, DIM)
    with pytest.raises(TypeError, match="got float32"):
        embedding_lookup(table, [1.0], trainable=False)


def test_a_graph_whose_gradients_leave_the_token_out_is_an_error() -> None:
    table = new_table()
    other = tf.Variable(1.0)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(other * embedding_lookup(table, tf.constant([1])))
        return tape.gradient(loss, other)

    with pytest.raises(tf.errors.OpError, match="backwards and no optimizer took their gradients"):
        for _ in range(1002):
            step()


@pytest.fixture
def on_disk(tmp_path):
    return stored_layers(tmp_path / "user")


def flat_model(layer, inside):
    ids = keras.Input((), dtype="int64")
    return keras.Model(ids, layer(keras.ops.maximum(ids, 0) if inside else ids))


@pytest.mark.parametrize("inside", [False, True], ids=["ids", "ids-made-by-the-model"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_lookahead_stages_rows_and_changes_no_bit(on_disk, tmp_path, replicas: int, inside: bool) -> None:
    import contextlib
    import shutil

    results = []
    for ahead in (False, True):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]) if replicas > 1 else None
        with strategy.scope() if strategy else contextlib.nullcontext():
            layer = on_disk()
            model = flat_model(layer, inside)
            model.compile(keras.optimizers.SGD(0.1), "mse")
        data = lookahead(stored_dataset(), model) if ahead else stored_dataset()
        before = layer.table.stats()
        model.fit(data.repeat(2), steps_per_epoch=24, verbose=0)
        after = layer.table.stats()
        results.append((layer.table.get(np.arange(20_000)), after["staged_rows"] - before["staged_rows"]))
        layer.table.close(commit=False)
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert results[0][1] == 0 and results[1][1] > 1000


def test_lookahead_hands_batches_over_unchanged(on_disk) -> None:
    layer = on_disk()
    model = row_model(layer)
    data = stored_dataset()
    ahead = lookahead(data, model)
    assert ahead.element_spec == data.element_spec and len(ahead) == len(data) == 12
    for _ in range(3):
        for one, other in zip(data, ahead, strict=True):
            for left, right in zip(one, other, strict=True):
                np.testing.assert_array_equal(left, right)
    for _ in zip(range(2), ahead, strict=False):
        pass  # an iterator given up
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(ahead, verbose=0)
    assert layer.table.step == 4 + 12
    layer.table.close(commit=False)


def test_lookahead_leaves_an_id_outside_the_table_to_the_lookup() -> None:
    layer = Embedding(ROWS, DIM, optimizer=ADAM)
    model = row_model(layer)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    ids, targets = batches(3)
    ids[2 * BATCH + 1] = ROWS
    data = lookahead(tf.data.Dataset.from_tensor_slices((ids, targets)).batch(BATCH), model)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{ROWS}.*position 1"):
        model.fit(data, verbose=0)
    assert layer.table.step == 2


def test_lookahead_takes_endless_datasets_and_those_of_unknown_length() -> None:
    layer = Embedding(ROWS, DIM, seed=SEED, optimizer=ADAM)
    model = row_model(layer)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    ids, targets = batches(2)
    endless = tf.data.Dataset.from_tensor_slices((ids, targets)).batch(BATCH).repeat()
    model.fit(lookahead(endless, model), steps_per_epoch=2, verbose=0)
    signature = (tf.TensorSpec((None,), tf.int64), tf.TensorSpec((None, DIM), tf.float32))
    unknown = tf.data.Dataset.from_generator(lambda: iter([(ids, targets)]), output_signature=signature)
    model.fit(lookahead(unknown.unbatch().batch(BATCH), model), verbose=0)
    twice = np.concatenate([ids, ids]), np.concatenate([targets, targets])
    np.testing.assert_allclose(all_rows(layer.table), all_rows(trained_reference(ADAM, *twice)), atol=1e-6)


def test_lookahead_says_what_it_needs() -> None:
    layer = Embedding(ROWS, DIM, optimizer=ADAM)
    model = row_model(layer)
    data = tf.data.Dataset.from_tensor_slices(batches(1)).batch(BATCH)
    with pytest.raises(TypeError, match=r"dataset must be a tf.data.Dataset, got list"):
        lookahead([1], model)
    with pytest.raises(ValueError, match=r"the model has no layer of bunkbed\.keras"):
        lookahead(data, row_model(keras.layers.Embedding(ROWS, DIM)))
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        lookahead(data, model, depth=0)
    with pytest.raises(ValueError, match="window must be 1 to 32, got 33"):
        lookahead(data, model, window=33)

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.user = Embedding(ROWS, DIM, optimizer=ADAM, seed=SEED)

        def call(self, x):
            return self.user(x)

    own = Own()
    with pytest.raises(ValueError, match="pass ids=lambda x"):
        lookahead(data, own)
    own.compile(keras.optimizers.SGD(0.1), "mse")
    own.fit(lookahead(data, own, lambda x: {own.user: [x, x]}), verbose=0)
    np.testing.assert_allclose(all_rows(own.user.table), all_rows(trained_reference(ADAM, *batches(1))), atol=1e-6)
