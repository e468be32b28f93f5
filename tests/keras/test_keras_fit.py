"""`bunkbed.keras.Embedding` in fit and in custom loops, against the reference table."""

from __future__ import annotations

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.keras import Embedding
from keras_setup import (
    ADAM,
    BATCH,
    DIM,
    ROWS,
    SEED,
    all_rows,
    batches,
    keras,
    mse_gradient,
    reference,
    row_model,
    tf,
    trained_reference,
)  # fmt: skip

MODES = {
    "graph": {},
    "eager": {"run_eagerly": True},
    "steps_per_execution": {"steps_per_execution": 8},
    "jit_compile": {"jit_compile": True},
}


@pytest.mark.parametrize("mode", ["graph", "eager", "steps_per_execution"])
def test_200_steps_of_fit_are_the_reference_tables_and_torchs(mode: str) -> None:
    import torch

    from bunkbed.torch import Embedding as TorchEmbedding
    from bunkbed.torch import Optimizer

    ids, targets = batches(200)
    layer = Embedding(ROWS, DIM, seed=SEED)
    model = row_model(layer)
    model.compile(keras.optimizers.Adam(0.01), "mse", **MODES[mode])
    model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)

    expected = trained_reference(ADAM, ids, targets)
    assert layer.table.step == 200 == layer._shared.pending.steps_settled
    np.testing.assert_allclose(all_rows(layer.table), all_rows(expected), rtol=0, atol=1e-6)

    other = TorchEmbedding(ROWS, DIM, seed=SEED, init=bb.Uniform(-0.05, 0.05), optimizer=ADAM)
    optimizer = Optimizer(torch.nn.ModuleList([other]))
    for start in range(0, len(ids), BATCH):
        part = slice(start, start + BATCH)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(other(torch.from_numpy(ids[part])), torch.from_numpy(targets[part])).backward()
        optimizer.step()
    np.testing.assert_allclose(all_rows(layer.table), all_rows(other.table), rtol=0, atol=1e-6)


def test_jit_compile_works_with_kerass_own_downgrade() -> None:
    ids, targets = batches(3)
    layer = Embedding(ROWS, DIM, seed=SEED)
    model = row_model(layer)
    with pytest.warns(UserWarning, match="jit_compile"):
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=True)
    model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)
    np.testing.assert_allclose(all_rows(layer.table), all_rows(trained_reference(ADAM, ids, targets)), atol=1e-6)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (lambda: keras.optimizers.SGD(0.5), bb.SGD(0.5)),
        (lambda: keras.optimizers.SGD(0.5, weight_decay=0.1), bb.SGD(0.5, weight_decay=0.1, decoupled=True)),
        (lambda: keras.optimizers.Adagrad(0.1), bb.Adagrad(0.1, eps=1e-7, initial_accumulator=0.1)),
        (lambda: keras.optimizers.Adam(0.01, beta_1=0.8), bb.Adam(0.01, betas=(0.8, 0.999), eps=1e-7)),
        (lambda: keras.optimizers.AdamW(0.01), bb.Adam(0.01, eps=1e-7, weight_decay=0.004, decoupled=True)),
    ],
    ids=["sgd", "sgd-decay", "adagrad", "adam", "adamw"],
)
def test_the_table_follows_compiles_optimizer(theirs, ours) -> None:
    ids, targets = batches(10)
    layer = Embedding(ROWS, DIM, seed=SEED)
    model = row_model(layer)
    model.compile(theirs(), "mse")
    model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)
    assert type(layer.table.optimizer) is type(ours)
    np.testing.assert_allclose(all_rows(layer.table), all_rows(trained_reference(ours, ids, targets)), atol=1e-6)


def test_the_table_trains_as_keras_layers_embedding_does() -> None:
    """Adagrad and SGD move the rows of a step only in Keras too: no reference of ours in between."""
    repeated, targets = batches(20)
    # Keras's Adagrad squares the gradients of a repeated id apart; the table sums them first, as torch does.
    each_once = np.concatenate([np.random.default_rng(s).permutation(ROWS)[:BATCH] for s in range(20)])
    for make, ids in (
        (lambda: keras.optimizers.SGD(0.5), repeated),
        (lambda: keras.optimizers.Adagrad(0.1), each_once),
    ):
        layer = Embedding(ROWS, DIM, seed=SEED)
        plain = keras.layers.Embedding(ROWS, DIM, weights=np.array(reference(ADAM).get(np.arange(ROWS))))
        for model in (row_model(layer), row_model(plain)):
            model.compile(make(), "mse")
            model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)
        np.testing.assert_allclose(all_rows(layer.table), plain.embeddings.numpy(), atol=1e-6)


def test_learning_rate_schedules_and_callbacks_reach_the_table() -> None:
    ids, targets = batches(12)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, decay_steps=1, decay_rate=0.9)
    layer = Embedding(ROWS, DIM, seed=SEED)
    model = row_model(layer)
    model.compile(keras.optimizers.SGD(schedule), "mse")
    model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)
    expected = trained_reference(bb.SGD(0.5), ids, targets, lrs=[0.5 * 0.9**step for step in range(12)])
    np.testing.assert_allclose(all_rows(layer.table), all_rows(expected), atol=1e-6)

    layer = Embedding(ROWS, DIM, seed=SEED)
    model = row_model(layer)
    model.compile(keras.optimizers.SGD(0.5), "mse")
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 / 2**epoch)
    model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0, epochs=2, callbacks=[halve])
    twice = np.concatenate([ids, ids]), np.concatenate([targets, targets])
    expected = trained_reference(bb.SGD(0.5), *twice, lrs=[0.5] * 12 + [0.25] * 12)
    np.testing.assert_allclose(all_rows(layer.table), all_rows(expected), atol=1e-6)


def test_an_explicit_optimizer_wins_and_fit_says_so_once(caplog) -> None:
    ids, targets = batches(4)
    layer = Embedding(ROWS, DIM, seed=SEED, optimizer=bb.Adagrad(0.1))
    model = row_model(layer)
    model.compile(keras.optimizers.Adam(0.5), "mse")
    with caplog.at_level("WARNING", logger="bunkbed.keras"):
        model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0, epochs=2)
    said = [record.getMessage() for record in caplog.records if record.name == "bunkbed.keras"]
    assert len(said) == 1 and "Adagrad(lr=0.1" in said[0] and "not by compile's Adam" in said[0]
    twice = np.concatenate([ids, ids]), np.concatenate([targets, targets])
    np.testing.assert_allclose(all_rows(layer.table), all_rows(trained_reference(bb.Adagrad(0.1), *twice)), atol=1e-6)


def clipped(optimizer, ids, targets, clip):
    table = reference(optimizer)
    for start in range(0, len(ids), BATCH):
        part = slice(start, start + BATCH)
        unique, places = np.unique(ids[part], return_inverse=True)
        sums = np.zeros((len(unique), DIM), np.float32)
        np.add.at(sums, places, mse_gradient(table.lookup(ids[part]), targets[part]))
        table.update(unique, clip(sums))
    return table


@pytest.mark.parametrize("which", ["clipnorm", "clipvalue"])
def test_clipping_is_of_the_tables_summed_gradients(which: str) -> None:
    ids, targets = batches(5)
    layer = Embedding(ROWS, DIM, seed=SEED)
    model = row_model(layer)
    model.compile(keras.optimizers.SGD(0.5, **{which: 0.05}), "mse")
    model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)

    def clip(sums):
        if which == "clipvalue":
            return np.clip(sums, -0.05, 0.05)
        return sums * min(1.0, 0.05 / np.linalg.norm(sums))

    expected = clipped(bb.SGD(0.5), ids, targets, clip)
    np.testing.assert_allclose(all_rows(layer.table), all_rows(expected), atol=1e-6)
    assert np.abs(all_rows(expected) - all_rows(trained_reference(bb.SGD(0.5), ids, targets))).max() > 1e-3


@pytest.mark.parametrize("eager", [False, True])
def test_accumulating_four_steps_is_one_step_of_four_times_the_batch(eager: bool) -> None:
    ids, targets = batches(16)
    layer = Embedding(ROWS, DIM, seed=SEED)
    model = row_model(layer)
    model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=4), "mse", run_eagerly=eager)
    model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)
    assert layer.table.step == 4
    expected = trained_reference(ADAM, ids, targets, batch=4 * BATCH)
    np.testing.assert_allclose(all_rows(layer.table), all_rows(expected), atol=1e-6)


class Spoil(keras.layers.Layer):
    """Multiplies by infinity where the batch holds the id 0."""

    def call(self, inputs):
        ids, rows = inputs
        return rows * tf.where(tf.reduce_any(ids == 0), np.float32(np.inf), np.float32(1.0))


@pytest.mark.parametrize("accumulate", [None, 2])
@pytest.mark.parametrize("eager", [False, True])
def test_loss_scaling_skips_steps_that_are_not_finite(eager: bool, accumulate: int | None) -> None:
    ids, targets = batches(12)
    ids[ids == 0] = 1
    bad = [3, 4, 9]
    for step in bad:
        ids[step * BATCH] = 0
    layer = Embedding(ROWS, DIM, seed=SEED)
    inputs = keras.Input((), dtype="int64")
    model = keras.Model(inputs, Spoil()([inputs, layer(inputs)]))
    inner = keras.optimizers.Adam(0.01, gradient_accumulation_steps=accumulate)
    scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10, dynamic_growth_steps=3)
    model.compile(scaled, "mse", run_eagerly=eager)
    model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)

    kept = np.concatenate([np.arange(s * BATCH, (s + 1) * BATCH) for s in range(12) if s not in bad])
    if accumulate:  # of nine good steps eight make four updates, and one waits
        kept = kept[: 8 * BATCH]
    expected = trained_reference(ADAM, ids[kept], targets[kept], batch=BATCH * (accumulate or 1))
    assert layer.table.step == (9 if accumulate is None else 4)
    np.testing.assert_allclose(all_rows(layer.table), all_rows(expected), atol=1e-6)
    assert not layer.table.contains(np.array([0]))[0]


def test_mixed_precision_trains_float32_rows() -> None:
    ids, targets = batches(6)
    layer = Embedding(ROWS, DIM, seed=SEED, dtype="mixed_float16")
    model = row_model(layer)
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)), "mse")
    assert model(ids[:2]).dtype == tf.float16
    model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)
    assert layer.table.dtype == "float32"
    expected = trained_reference(bb.SGD(0.5), ids, targets)
    np.testing.assert_allclose(all_rows(layer.table), all_rows(expected), atol=5e-3)


def test_gradients_that_are_not_finite_are_an_error_that_names_the_id() -> None:
    ids, targets = batches(2)
    ids[ids == 0] = 1
    ids[BATCH + 3] = 0
    layer = Embedding(ROWS, DIM, seed=SEED, optimizer=ADAM)
    inputs = keras.Input((), dtype="int64")
    model = keras.Model(inputs, Spoil()([inputs, layer(inputs)]))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(ids[:BATCH], targets[:BATCH], batch_size=BATCH, verbose=0)
    before = all_rows(layer.table)
    with pytest.raises(
        Exception, match=r"table 'table': the gradient of id \d+ is (nan|inf|-inf) at column 0; nothing"
    ):
        model.fit(ids[BATCH:], targets[BATCH:], batch_size=BATCH, verbose=0, shuffle=False)
    np.testing.assert_array_equal(all_rows(layer.table), before)
    assert layer.table.step == 1


@pytest.mark.parametrize("eager", [False, True])
def test_a_custom_loop(eager: bool) -> None:
    ids, targets = batches(8)
    layer = Embedding(ROWS, DIM, seed=SEED, optimizer=ADAM)
    optimizer = keras.optimizers.SGD(0.1)

    def step(ids, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(ids) - targets))
        grads = tape.gradient(loss, layer.trainable_weights)
        optimizer.apply_gradients(zip(grads, layer.trainable_weights, strict=True))

    run = step if eager else tf.function(step)
    for start in range(0, len(ids), BATCH):
        part = slice(start, start + BATCH)
        run(tf.constant(ids[part]), tf.constant(targets[part]))
    assert layer.table.step == 8
    np.testing.assert_allclose(all_rows(layer.table), all_rows(trained_reference(ADAM, ids, targets)), atol=1e-6)


def test_a_layer_used_twice_and_two_layers_on_one_table_make_one_update() -> None:
    ids, targets = batches(6)
    others = np.roll(ids, 5)
    first = Embedding(ROWS, DIM, seed=SEED, optimizer=ADAM)
    second = Embedding(ROWS, DIM, table=first.table)
    one, two = keras.Input((), dtype="int64"), keras.Input((), dtype="int64")
    model = keras.Model([one, two], first(one) + first(two) + second(two))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit([ids, others], targets, batch_size=BATCH, shuffle=False, verbose=0)
    assert len(model.trainable_weights) == 1

    expected = reference(ADAM)
    for start in range(0, len(ids), BATCH):
        a, b, t = ids[start : start + BATCH], others[start : start + BATCH], targets[start : start + BATCH]
        grads = mse_gradient(expected.lookup(a) + 2 * expected.lookup(b), t)
        expected.update(np.concatenate([a, b, b]), np.concatenate([grads] * 3))
    assert first.table.step == 6
    np.testing.assert_allclose(all_rows(first.table), all_rows(expected), atol=1e-6)

    second.trainable = False  # the other one still trains
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit([ids[:BATCH], others[:BATCH]], targets[:BATCH], batch_size=BATCH, verbose=0)
    assert first.table.step == 7


def test_a_frozen_layer_and_evaluation_change_nothing() -> None:
    ids, targets = batches(4)
    layer = Embedding(ROWS, DIM, seed=SEED, optimizer=ADAM, trainable=False)
    inputs = keras.Input((), dtype="int64")
    model = keras.Model(inputs, keras.layers.Dense(DIM)(layer(inputs)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(ids, targets, batch_size=BATCH, verbose=0)
    assert layer.table.step == 0 and len(layer.table) == 0 and not layer.trainable_weights

    layer.trainable = True
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(ids, targets, batch_size=BATCH, verbose=0)
    assert layer.table.step == 4
    before, rows = layer.table.stats(), all_rows(layer.table)
    loss = model.evaluate(ids, targets, batch_size=BATCH, verbose=0)
    out = model.predict(ids, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(loss, np.mean((out - targets) ** 2), rtol=1e-5)
    after = layer.table.stats()
    assert layer.table.step == 4 and after["first_touches"] == before["first_touches"]
    np.testing.assert_array_equal(all_rows(layer.table), rows)


def test_a_table_that_is_not_there_yet_gives_its_untouched_rows() -> None:
    layer = Embedding(ROWS, DIM, seed=SEED)
    np.testing.assert_array_equal(layer(np.arange(ROWS)).numpy(), all_rows(reference(ADAM)))
    with pytest.raises(RuntimeError, match="follows compile's optimizer"):
        _ = layer.table
    weights = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)
    layer = Embedding(ROWS, DIM, weights=weights)
    np.testing.assert_array_equal(layer(np.arange(ROWS)).numpy(), weights)
    model = row_model(layer)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(*batches(1), verbose=0)
    np.testing.assert_array_equal(all_rows(layer.table), weights)


def test_gradients_nobody_asks_for_are_not_applied() -> None:
    """A gradient for a plot, a step whose optimizer call is left out: neither is part of the next step."""
    ids, targets = batches(3)
    layer = Embedding(ROWS, DIM, seed=SEED, optimizer=ADAM)
    optimizer = keras.optimizers.SGD(0.1)

    def gradients(part):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(tf.constant(ids[part])) - targets[part]))
        return tape.gradient(loss, layer.trainable_weights)

    gradients(slice(0, BATCH))
    for step in (1, 2):
        grads = gradients(slice(step * BATCH, (step + 1) * BATCH))
        optimizer.apply_gradients(zip(grads, layer.trainable_weights, strict=True))
    expected = trained_reference(ADAM, ids[BATCH:], targets[BATCH:])
    np.testing.assert_allclose(all_rows(layer.table), all_rows(expected), atol=1e-6)


def test_gradients_of_two_tapes_added_up_are_one_update() -> None:
    ids, targets = batches(2)
    layer = Embedding(ROWS, DIM, seed=SEED, optimizer=bb.SGD(0.5))
    optimizer = keras.optimizers.SGD(0.1)
    total = []
    for part in (slice(0, BATCH), slice(BATCH, None)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer(tf.constant(ids[part])) - targets[part]))
        total.append(tape.gradient(loss, layer.token.value))
    optimizer.apply_gradients([(total[0] + total[1], layer.token)])
    expected = reference(bb.SGD(0.5))
    expected.update(ids, 2 * (expected.lookup(ids) - targets))
    assert layer.table.step == 1
    np.testing.assert_allclose(all_rows(layer.table), all_rows(expected), rtol=1e-5)


@pytest.mark.parametrize("change", [lambda g: 0.5 * g, lambda g: g * 0 + 3.5, lambda g: -g, lambda g: g / g])
def test_a_changed_token_gradient_is_an_error(change) -> None:
    ids, targets = batches(1)
    layer = Embedding(ROWS, DIM, seed=SEED, optimizer=ADAM)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(layer(tf.constant(ids)) - targets))
    grad = tape.gradient(loss, layer.token.value)
    with pytest.raises(RuntimeError, match="names no gradients of rows that wait"):
        keras.optimizers.SGD(0.1).apply_gradients([(change(grad), layer.token)])
    assert layer.table.step == 0


def test_backwards_whose_gradients_no_optimizer_takes_are_an_error(monkeypatch) -> None:
    from bunkbed.keras.base import pending

    monkeypatch.setattr(pending, "MOST_UNSETTLED", 10)
    layer = Embedding(ROWS, DIM, optimizer=ADAM)
    with pytest.raises(RuntimeError, match=r"10 backwards and no optimizer took their gradients"):
        for _ in range(12):
            with tf.GradientTape() as tape:
                out = layer(np.array([1]), training=True)
            tape.gradient(out, layer.trainable_weights)


def test_many_lookups_of_one_step_are_no_error() -> None:
    layer = Embedding(ROWS, DIM, seed=SEED, optimizer=bb.SGD(0.001))
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(layer(np.array([i % ROWS]))) for i in range(1200)])
    token = layer.trainable_weights
    keras.optimizers.SGD(1.0).apply_gradients(zip(tape.gradient(loss, token), token, strict=True))
    expected = reference(bb.SGD(0.001))
    expected.update(np.arange(1200) % ROWS, np.ones((1200, DIM), np.float32))
    np.testing.assert_allclose(all_rows(layer.table), all_rows(expected), atol=1e-6)


def test_a_pruned_backward_is_noticed(monkeypatch) -> None:
    """If the token's gradient is not the gradient op's output, TensorFlow may prune the op: no update would be made."""
    from bunkbed.keras.shared import lookups

    ids, targets = batches(8)
    real = lookups.call

    def forgetful(what, table, function, inputs, dtypes):
        out = real(what, table, function, inputs, dtypes)
        return tf.zeros([], tf.float64) + (2.0**40 + 1) if what == "gradients" else out

    monkeypatch.setattr(lookups, "call", forgetful)
    layer = Embedding(ROWS, DIM, seed=SEED, optimizer=ADAM)
    model = row_model(layer)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with pytest.raises(Exception, match="names no gradients of rows that wait"):
        model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)
