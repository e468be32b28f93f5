"""Kinds of ids that `bunkbed.keras.Embedding` takes and refuses; combiners."""

from __future__ import annotations

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.keras import Embedding
from keras_setup import ADAM, BATCH, DIM, ROWS, SEED, all_rows, batches, keras, reference, row_model, tf

PLAIN = {"optimizer": ADAM, "seed": SEED}
BAGS = [[3, 1, 3], [], [7], [0, 2, 0, 9, 9]]
WEIGHTS = [[1.0, 0.5, 2.0], [], [3.0], [0.25, 1.0, 1.0, 2.0, 4.0]]


def ragged(values, dtype):
    return tf.ragged.constant(values, dtype=dtype, ragged_rank=1)


def expected_bags(table, combiner: str, weights, *, skip_zero: bool = False) -> np.ndarray:
    """By tf.nn.embedding_lookup_sparse on a copy of the table."""
    ids, factors = ragged(BAGS, tf.int64), ragged(WEIGHTS, tf.float32)
    if skip_zero:
        kept = ids != 0
        ids, factors = tf.ragged.boolean_mask(ids, kept), tf.ragged.boolean_mask(factors, kept)
    return tf.nn.safe_embedding_lookup_sparse(
        tf.constant(all_rows(table)), ids.to_sparse(), factors.to_sparse() if weights else None, combiner=combiner
    ).numpy()


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_combiners_pool_and_train_as_tensorflows_do(combiner: str, kind: str, weights: bool, graph: bool) -> None:
    layer = Embedding(ROWS, DIM, combiner=combiner, **PLAIN | {"optimizer": bb.SGD(0.5)})
    ids, factors = ragged(BAGS, tf.int64), ragged(WEIGHTS, tf.float32)
    if kind == "sparse":
        ids, factors = ids.to_sparse(), factors.to_sparse()
    before = all_rows(layer.table)
    targets = np.random.default_rng(0).standard_normal((len(BAGS), DIM)).astype(np.float32)
    optimizer = keras.optimizers.SGD(1.0)

    def step():
        with tf.GradientTape() as tape:
            out = layer(ids, weights=factors if weights else None)
            loss = tf.reduce_sum(out * targets)
        token = layer.trainable_weights
        optimizer.apply_gradients(zip(tape.gradient(loss, token), token, strict=True))
        return out

    expected = expected_bags(layer.table, combiner, weights)
    out = (tf.function(step) if graph else step)()
    np.testing.assert_allclose(out.numpy(), expected, atol=1e-6)

    rows = tf.Variable(before)
    with tf.GradientTape() as tape:
        pooled = tf.nn.safe_embedding_lookup_sparse(
            rows, ragged(BAGS, tf.int64).to_sparse(), ragged(WEIGHTS, tf.float32).to_sparse() if weights else None,
            combiner=combiner,
        )  # fmt: skip
        loss = tf.reduce_sum(pooled * targets)
    gradient = tf.convert_to_tensor(tape.gradient(loss, rows)).numpy()
    np.testing.assert_allclose(all_rows(layer.table), before - 0.5 * gradient, atol=1e-6)


def test_mask_zero_leaves_padding_out_of_bags() -> None:
    layer = Embedding(ROWS, DIM, combiner="mean", mask_zero=True, **PLAIN)
    out = layer(ragged(BAGS, tf.int64)).numpy()
    np.testing.assert_allclose(out, expected_bags(layer.table, "mean", False, skip_zero=True), atol=1e-6)
    dense = np.array([[3, 1, 0], [0, 0, 0]])
    rows = all_rows(layer.table)
    np.testing.assert_allclose(layer(dense).numpy(), [(rows[3] + rows[1]) / 2, np.zeros(DIM)], atol=1e-6)


def test_mask_zero_masks_for_the_layers_after() -> None:
    layer = Embedding(ROWS, DIM, mask_zero=True, **PLAIN)
    inputs = keras.Input((3,), dtype="int64")
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(layer(inputs)))
    rows = all_rows(layer.table)
    np.testing.assert_allclose(model(np.array([[3, 1, 0]])).numpy(), [(rows[3] + rows[1]) / 2], atol=1e-6)


def test_ragged_ids_give_ragged_rows() -> None:
    layer = Embedding(ROWS, DIM, **PLAIN)
    out = layer(ragged(BAGS, tf.int64))
    assert isinstance(out, tf.RaggedTensor)
    np.testing.assert_array_equal(out[3].numpy(), all_rows(layer.table)[BAGS[3]])


def test_bags_in_fit_of_a_functional_model() -> None:
    layer = Embedding(ROWS, DIM, combiner="mean", **PLAIN)
    inputs = keras.Input((3,), dtype="int64")
    model = keras.Model(inputs, layer(inputs))
    assert model.output_shape == (None, DIM)
    model.compile(keras.optimizers.SGD(1.0), "mse")
    ids, targets = batches(3)
    bags = np.stack([ids, np.roll(ids, 1), np.roll(ids, 2)], 1)
    model.fit(bags, targets, batch_size=BATCH, shuffle=False, verbose=0)
    expected = reference(ADAM)
    for start in range(0, len(ids), BATCH):
        part, target = bags[start : start + BATCH], targets[start : start + BATCH]
        grads = 2 * (expected.lookup(part).mean(1) - target) / target.size
        expected.update(part.reshape(-1), np.repeat(grads / 3, 3, axis=0))
    np.testing.assert_allclose(all_rows(layer.table), all_rows(expected), atol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"])
def test_every_integer_dtype_is_taken(dtype: str) -> None:
    layer = Embedding(ROWS, DIM, **PLAIN)
    np.testing.assert_array_equal(layer(np.array([[1, 49]], dtype)).numpy(), all_rows(layer.table)[[[1, 49]]])


def test_int64_ids_beyond_int32_arrive_whole() -> None:
    layer = Embedding(2**40, DIM, **PLAIN)
    model = row_model(layer)
    ids = np.array([2**40 - 1, 2**31, 5])
    np.testing.assert_array_equal(model.predict(ids, verbose=0), layer.table.lookup(ids))


@pytest.mark.parametrize("input_dim", [2**31 + 1, None])
def test_int32_ids_of_a_table_beyond_int32_are_refused(input_dim) -> None:
    layer = Embedding(input_dim, DIM, **PLAIN)
    with pytest.raises(TypeError, match=r"ids come as int32, and the table has ids beyond 2,147,483,647"):
        layer(np.array([1], np.int32))


def test_float_ids_are_refused() -> None:
    layer = Embedding(ROWS, DIM, **PLAIN)
    for ids in (np.array([1.0, 2.0], np.float32), np.array([0.5])):
        with pytest.raises(TypeError, match=r"ids must be integers, got float(32|64); give int64"):
            layer(ids)
    with pytest.raises(TypeError, match="got uint64"):
        layer(np.array([1], np.uint64))


def test_a_sequential_model_without_input_works_though_keras_makes_floats_of_its_ids() -> None:
    layer = Embedding(ROWS, DIM, **PLAIN)
    model = keras.Sequential([layer, keras.layers.Flatten()])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    ids, targets = batches(2)
    model.fit(ids[:, None], targets, batch_size=BATCH, verbose=0)
    assert layer.table.step == 2
    with pytest.raises(Exception, match="ids must be whole numbers"):
        model.predict(np.array([[1.5]]), verbose=0)
    large = keras.Sequential([Embedding(2**24 + 1, DIM, **PLAIN), keras.layers.Flatten()])
    with pytest.raises(TypeError, match=r"ids must be integers, got float32; give int64, and declare it: keras.Input"):
        large.predict(np.array([[1]]), verbose=0)


@pytest.mark.parametrize("bad", [ROWS, -1, 2**40])
@pytest.mark.parametrize("eager", [False, True])
def test_an_id_outside_the_table_is_an_error_from_fit_that_names_it(bad: int, eager: bool) -> None:
    """Not the end of the data, for which Keras takes TensorFlow's OutOfRange."""
    ids, targets = batches(2)
    ids[BATCH + 5] = bad
    layer = Embedding(ROWS, DIM, **PLAIN)
    model = row_model(layer)
    model.compile(keras.optimizers.SGD(1.0), "mse", run_eagerly=eager)
    with pytest.raises((IndexError, tf.errors.InvalidArgumentError), match=rf"table 'table'.*{bad}.*position 5"):
        model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)
    assert layer.table.step == 1
    with pytest.raises((IndexError, tf.errors.InvalidArgumentError), match=rf"{bad}.*position 5"):
        model.predict(ids[BATCH:], verbose=0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input_dim": 0}, ValueError, "input_dim must be at least 1, got 0"),
        ({"output_dim": 2.5}, TypeError, "output_dim must be an int, got 2.5"),
        ({"combiner": "max"}, ValueError, "combiner must be None, sum, mean, sqrtn, got 'max'"),
        ({"placement": "mirrored"}, ValueError, 'placement must be "central", "sharded" or "replicated"'),
        ({"placement": "sharded"}, ValueError, "needs a path"),
        ({"directories": ["a", "b"]}, ValueError, 'give placement="sharded" too'),
        ({"keep_checkpoints": 0}, ValueError, "keep_checkpoints must be at least 1, or None for all, got 0"),
        ({"optimizer": "adam"}, TypeError, "optimizer must be one of bb.SGD"),
        ({"embeddings_initializer": "orthogonal"}, ValueError, "embeddings_initializer=Orthogonal is not among"),
        ({"embeddings_regularizer": "l2"}, ValueError, "embeddings_regularizer= is not supported"),
        ({"embeddings_constraint": "max_norm"}, ValueError, "embeddings_constraint= is not supported"),
        ({"lora_rank": 4}, ValueError, "lora_rank= is not supported"),
        ({"weights": np.zeros((3, DIM))}, ValueError, r"weights must be float32\[50, 4\], got shape \[3, 4\]"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        Embedding(**{"input_dim": ROWS, "output_dim": DIM, **arguments})


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), "SGD has momentum=0.9, which a table does not do"),
        (lambda: keras.optimizers.Adam(amsgrad=True), "Adam has amsgrad=True"),
        (lambda: keras.optimizers.Adam(use_ema=True), "averages the weights of all steps"),
        (lambda: keras.optimizers.Adam(global_clipnorm=1.0), "clips by the norm of all gradients together"),
        (lambda: keras.optimizers.RMSprop(), "no update rule of a table is keras.optimizers.RMSprop; compile SGD"),
    ],
)
def test_an_optimizer_that_no_table_follows_is_refused(optimizer, message) -> None:
    model = row_model(Embedding(ROWS, DIM))
    model.compile(optimizer(), "mse")
    with pytest.raises(ValueError, match=message):
        model.fit(*batches(1), verbose=0)


def test_a_stored_table_of_another_optimizer_is_refused(tmp_path) -> None:
    bb.create(tmp_path / "user", dim=DIM, num_rows=ROWS, optimizer=bb.Adagrad()).close()
    model = row_model(Embedding(ROWS, DIM, path=tmp_path / "user"))
    model.compile(keras.optimizers.Adam(), "mse")
    with pytest.raises(ValueError, match=r"its records hold the state of Adagrad \(sum\), Adam"):
        model.fit(*batches(1), verbose=0)


def test_a_model_that_was_not_compiled_is_told_what_to_do() -> None:
    layer = Embedding(ROWS, DIM)
    with (
        pytest.raises(ValueError, match=r"was not compiled; call model.compile"),
        tf.GradientTape(),
    ):
        layer(np.array([1]), training=True)


def test_arguments_of_a_table_that_is_given_are_refused() -> None:
    table = bb.create(None, dim=DIM, num_rows=ROWS)
    with pytest.raises(ValueError, match="path= cannot be given together with table="):
        Embedding(ROWS, DIM, table=table, path="x")
    with pytest.raises(ValueError, match=f"input_dim=51 was given, but table 'table' has {ROWS}"):
        Embedding(51, DIM, table=table)


def test_a_reader_is_looked_up_and_not_trained(tmp_path) -> None:
    with bb.create(tmp_path / "user", dim=DIM, num_rows=ROWS) as table:
        table.update(np.arange(5), np.ones((5, DIM), np.float32))
    layer = Embedding(ROWS, DIM, table=bb.open(tmp_path / "user", mode="r"))
    model = row_model(layer)
    assert model.predict(np.arange(5), verbose=0).shape == (5, DIM)
    model.compile(keras.optimizers.Adam(), "mse")
    with pytest.raises(bb.ReadOnlyError, match="open with mode='r' and cannot be trained; set layer"):
        model.fit(*batches(1), verbose=0)


def test_the_rows_are_no_attribute() -> None:
    layer = Embedding(ROWS, DIM)
    assert not hasattr(layer, "embeddings")
    with pytest.raises(AttributeError, match=r"read rows with layer.table.get\(ids\)"):
        _ = layer.embeddings
