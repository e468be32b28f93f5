"""Loops in which Keras says little: which optimizer steps, what of the gradients it takes, control flow, leaks."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.keras import Embedding
from keras_setup import (
    BATCH,
    DIM,
    ROWS,
    SEED,
    all_rows,
    batches,
    keras,
    reference,
    row_model,
    tf,
    trained_reference,
)  # fmt: skip

ONE = bb.SGD(1.0)


def explicit(optimizer=ONE) -> Embedding:
    return Embedding(ROWS, DIM, seed=SEED, optimizer=optimizer)


def moved_by(layer: Embedding) -> np.ndarray:
    """What training changed, float32[ROWS, DIM]."""
    return all_rows(layer.table) - all_rows(reference(ONE))


def step_of(layer, optimizer, ids, *, graph: bool):
    """A step whose gradient is 1 for every lookup of an id."""

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant(ids)))
            scaled = optimizer.scale_loss(loss)
        weights = layer.trainable_weights
        optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights, strict=True))

    return tf.function(step) if graph else step


@pytest.mark.parametrize("graph", [False, True])
def test_a_loops_own_optimizer_is_known_without_compile(graph: bool) -> None:
    """Its loss scale, accumulation and clipping reach a table with an optimizer of its own."""
    layer = explicit()
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0)
    step = step_of(layer, scaled, [3], graph=graph)
    step()
    step()
    np.testing.assert_allclose(moved_by(layer)[3], -2.0, rtol=1e-5)

    layer = explicit()
    step = step_of(layer, keras.optimizers.SGD(0.1, gradient_accumulation_steps=4), [3, 4], graph=graph)
    for _ in range(8):
        step()
    assert layer.table.step == 2
    np.testing.assert_allclose(moved_by(layer)[[3, 4]], -2.0, rtol=1e-5)

    layer = explicit()
    step_of(layer, keras.optimizers.SGD(0.1, clipvalue=0.25), [3, 3], graph=graph)()
    np.testing.assert_allclose(moved_by(layer)[3], -0.25, rtol=1e-5)

    layer = explicit()
    step_of(layer, keras.optimizers.SGD(0.1, clipnorm=0.0), [3], graph=graph)()  # off, as in Keras
    np.testing.assert_allclose(moved_by(layer)[3], -1.0, rtol=1e-5)


@pytest.mark.parametrize("graph", [False, True])
def test_the_optimizer_that_steps_is_followed_not_the_compiled_one(graph: bool) -> None:
    layer = Embedding(ROWS, DIM, seed=SEED)
    model = row_model(layer)
    model.compile(keras.optimizers.SGD(1.0), "mse")
    other = keras.optimizers.SGD(0.001)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.constant([3]), training=True))
        weights = model.trainable_weights
        other.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    (tf.function(step) if graph else step)()
    np.testing.assert_allclose(moved_by(layer)[3], -0.001, rtol=1e-3)


def test_a_part_of_a_model_is_called_in_train_step() -> None:
    class Towers(keras.Model):
        def __init__(self):
            super().__init__()
            self.tower = row_model(Embedding(ROWS, DIM, seed=SEED, name="rows"))

        def call(self, ids):
            return self.tower(ids)

        def train_step(self, data):
            ids, targets = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self.tower(ids, training=True) - targets))
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return {"loss": loss}

    ids, targets = batches(4)
    model = Towers()
    model.compile(keras.optimizers.Adam(0.01))
    layer = model.tower.get_layer("rows")
    with pytest.raises(Exception, match=r"or layer.follow\(optimizer\) before a loop"):
        model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)
    layer.follow(model.optimizer)
    model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)
    expected = trained_reference(bb.Adam(0.01, eps=1e-7), ids, targets)
    np.testing.assert_allclose(all_rows(layer.table), all_rows(expected), atol=1e-6)


def test_two_models_with_optimizers_of_their_own_share_a_layer() -> None:
    layer = Embedding(ROWS, DIM, seed=SEED)
    first, second = row_model(layer), row_model(layer)
    first.compile(keras.optimizers.Adam(0.01, beta_1=0.5), "mse")
    second.compile(keras.optimizers.Adam(0.02, beta_1=0.9), "mse")
    ids, targets = batches(6)
    expected = reference(bb.Adam(0.01, eps=1e-7))
    for step in range(6):
        part = slice(step * BATCH, (step + 1) * BATCH)
        (first, second)[step % 2].fit(ids[part], targets[part], batch_size=BATCH, shuffle=False, verbose=0)
        expected.optimizer = bb.Adam((0.01, 0.02)[step % 2], betas=((0.5, 0.9)[step % 2], 0.999), eps=1e-7)
        grads = 2 * (expected.lookup(ids[part]) - targets[part]) / np.float32(BATCH * DIM)
        expected.update(ids[part], grads)
    np.testing.assert_allclose(all_rows(layer.table), all_rows(expected), atol=1e-6)


@pytest.mark.parametrize("graph", [False, True])
def test_accumulation_takes_every_backward_that_was_summed(graph: bool) -> None:
    """A step sums the gradients of two backwards; those of two more, for a plot, are not summed."""
    layer = explicit()
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)

    def step():
        total = 0.0
        for ids in ([1], [2]):
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_sum(layer(tf.constant(ids)))
                plot = 5.0 * loss
            tape.gradient(plot, layer.token.value)
            total += tape.gradient(loss, layer.token.value)
        optimizer.apply_gradients([(total, layer.token)])

    run = tf.function(step) if graph else step
    run()
    run()
    assert layer.table.step == 1
    np.testing.assert_allclose(moved_by(layer)[[1, 2]], -1.0, rtol=1e-5)


@pytest.mark.parametrize("accumulate", [None, 2])
def test_gradient_checkpointing(accumulate: int | None) -> None:
    layer = explicit()
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulate)
    weights = [layer.token]

    def step():
        with tf.GradientTape() as tape:
            tape.watch(layer.token.value)
            part = tf.recompute_grad(lambda ids: 2.0 * layer(ids))
            loss = tf.reduce_sum(part(tf.constant([1, 2]))) + tf.reduce_sum(part(tf.constant([3, 4])))
        optimizer.apply_gradients([(tape.gradient(loss, layer.token.value), weights[0])])

    for _ in range(2):
        step()
    np.testing.assert_allclose(moved_by(layer)[[1, 2, 3, 4]], -2.0 if accumulate else -4.0, rtol=1e-5)


@pytest.mark.parametrize("scaled", [False, True])
def test_lookups_inside_loops_and_branches_of_a_graph(scaled: bool) -> None:
    layer = explicit(bb.SGD(0.01))
    optimizer = keras.optimizers.SGD(0.1)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0)

    @tf.function
    def step(count, flag):
        with tf.GradientTape() as tape:
            total = tf.constant(0.0)
            for i in tf.range(count):
                total += tf.reduce_sum(layer(tf.reshape(tf.cast(i, tf.int64) % ROWS, [1])))
            if flag:
                total += tf.reduce_sum(layer(tf.constant([7])))
            total += tf.reduce_sum(tf.map_fn(lambda i: tf.reduce_sum(layer(i)), tf.constant([[8], [9]]), tf.float32))
            loss = optimizer.scale_loss(total)
        weights = layer.trainable_weights
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    step(tf.constant(40), tf.constant(True))
    step(tf.constant(5), tf.constant(False))
    wanted = np.zeros(ROWS)
    np.add.at(wanted, [*range(40), 7, 8, 9, *range(5), 8, 9], 1)
    assert layer.table.step == 2
    np.testing.assert_allclose(moved_by(layer), np.repeat(-0.01 * wanted[:, None], DIM, 1), atol=1e-6)


def test_a_loop_of_many_lookups_is_one_update() -> None:
    layer = explicit(bb.SGD(0.01))
    optimizer = keras.optimizers.SGD(0.1)

    @tf.function
    def step(count):
        with tf.GradientTape() as tape:
            total = tf.constant(0.0)
            for i in tf.range(count):
                total += tf.reduce_sum(layer(tf.reshape(tf.cast(i, tf.int64) % ROWS, [1])))
        weights = layer.trainable_weights
        optimizer.apply_gradients(zip(tape.gradient(total, weights), weights, strict=True))

    for _ in range(2):
        step(tf.constant(4 * ROWS))
    assert layer.table.step == 2
    np.testing.assert_allclose(moved_by(layer), -0.08, atol=1e-6)


def test_vectorized_map_is_refused() -> None:
    layer = explicit()
    with pytest.raises(ValueError, match=r"inside tf.vectorized_map loses its gradient"), tf.GradientTape():
        tf.vectorized_map(lambda i: layer(i), tf.constant([[8], [9]]))


def test_an_optimizer_given_the_bare_variable_is_an_error() -> None:
    layer = explicit()
    optimizer = keras.optimizers.SGD(0.1)
    with pytest.raises(RuntimeError, match=r"give the optimizer the token itself"):
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(tf.constant([1])))
            optimizer.apply_gradients([(tape.gradient(loss, layer.token.value), layer.token.value)])


def test_learned_weights_of_ids_are_refused() -> None:
    layer = Embedding(ROWS, DIM, combiner="sum", optimizer=ONE)
    learned = tf.Variable([[1.0, 2.0]])
    with tf.GradientTape(), pytest.raises(ValueError, match="weights of ids get no gradient"):
        layer(np.array([[1, 2]]), weights=learned * 1.0)


def test_averaging_optimizers_are_refused_beside_an_explicit_one_too() -> None:
    model = row_model(explicit())
    model.compile(keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=1), "mse")
    with pytest.raises(ValueError, match="averages the weights of all steps"):
        model.fit(*batches(1), verbose=0)


def test_weights_kept_in_the_middle_of_an_accumulation_lose_nothing() -> None:
    layer = explicit()
    model = row_model(layer)
    step = step_of(layer, keras.optimizers.SGD(0.1, gradient_accumulation_steps=4), [3], graph=False)
    for part in range(4):
        step()
        if part == 1:
            model.set_weights(model.get_weights())
    np.testing.assert_allclose(moved_by(layer)[3], -1.0, rtol=1e-5)


def test_prediction_makes_no_table_and_asks_for_no_optimizer() -> None:
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.rows = Embedding(ROWS, DIM, seed=SEED)

        def call(self, ids):
            return self.rows(ids)

    model = Own()
    np.testing.assert_array_equal(model.predict(np.arange(ROWS), verbose=0), all_rows(reference(ONE)))
    tf.function(lambda ids: model(ids))(tf.constant([1]))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.predict(np.arange(ROWS), verbose=0)
    assert not model.rows._shared.has_table


def test_early_stopping_and_checkpoints_keep_apart(tmp_path) -> None:
    layer = Embedding(ROWS, DIM, path=tmp_path / "user", seed=SEED, optimizer=bb.Adam(0.01))
    model = row_model(layer)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    ids, targets = batches(1)

    class Worse(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val"] = float(epoch)

    stop = keras.callbacks.EarlyStopping("val", patience=5, restore_best_weights=True, mode="min")
    save = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", save_weights_only=True)
    model.fit(ids, targets, verbose=0, epochs=9, callbacks=[Worse(), stop, save])
    assert layer.table.step == 1


def test_a_table_closes_when_its_graph_model_goes() -> None:
    layer = explicit()
    model = row_model(layer)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(*batches(2), verbose=0)
    model.predict(np.arange(3), verbose=0)
    table, shared = weakref.ref(layer.table), weakref.ref(layer._shared)
    del layer, model
    keras.backend.clear_session()
    gc.collect()
    assert table() is None and shared() is None


def test_a_table_that_began_outside_a_strategy_is_refused_inside() -> None:
    layer = explicit()
    with (
        tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope(),
        pytest.raises(ValueError, match="has a layer that was made outside this MirroredStrategy"),
    ):
        Embedding(ROWS, DIM, table=layer.table)


def test_a_path_with_any_letters_is_a_name(tmp_path) -> None:
    layer = Embedding(ROWS, DIM, path=tmp_path / "my täble: é", seed=SEED, optimizer=ONE)
    step_of(layer, keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), [3], graph=True)()
    layer.table.close()
