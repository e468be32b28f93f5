"""What TensorFlow's own tests of its embedding operations ask for, asked of tables.

The names are those of ``tensorflow/python/kernel_tests/nn_ops/embedding_ops_test.py`` of tensorflow/tensorflow (commit
00ee1a9d), in this spelling; those of its classes ScatterAddSubTest, DynamicStitchOpTest and ParallelDynamicStitchOpTest
have a prefix. Weights that TensorFlow divides by hand are here those of a table in shards. See `test_torch_suite` for
the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.keras import Embedding, embedding_lookup, token_of
from keras_setup import tf

NAMES = (
    "scatter_no_repetitions",
    "scatter_with_repetitions",
    "scatter_random",
    "scatter_sub_random",
    "scatter_wrong_shape",
    "simple_sharded",
    "max_norm",
    "max_norm_nontrivial",
    "simple_sharded_partitioned_variable",
    "simple_sharded_partitioned_resource_variable",
    "sharded_mod_partitioning_int32_ids",
    "sharded_mod_partitioning_int64_ids",
    "sharded_div_partitioning_int32_ids",
    "sharded_div_partitioning_int32_ids_partitioned_variable",
    "sharded_div_partitioning_int64_ids",
    "sharded_div_partitioning_unknown_param_shape",
    "gradients_embedding_lookup",
    "gradients_embedding_lookup_with_computed_params",
    "construction_non_sharded",
    "construction_sharded",
    "higher_rank",
    "higher_rank_max_norm",
    "transform",
    "ragged_max_norm",
    "embedding_lookup_sparse",
    "missing_in_sparse_ids",
    "gradients_embedding_lookup_sparse",
    "incompatible_shapes",
    "safe_embedding_lookup_sparse_return_zero_vector",
    "safe_embedding_lookup_sparse_return_special_vector",
    "safe_embedding_lookup_sparse_no_weights",
    "safe_embedding_lookup_sparse_partitioned",
    "safe_embedding_lookup_sparse_partitioned_inconsistent_weights",
    "safe_embedding_lookup_sparse_3d_return_zero_vector",
    "safe_embedding_lookup_sparse_3d_return_special_vector",
    "safe_embedding_lookup_sparse_3d_no_weights",
    "safe_embedding_lookup_sparse_3d_partitioned",
    "safe_embedding_lookup_sparse_3d_partitioned_inconsistent_weights",
    "dynamic_stitch_cint32_cpu",
    "dynamic_stitch_cint32_gpu",
    "dynamic_stitch_int32_cpu",
    "dynamic_stitch_int32_gpu",
    "dynamic_stitch_sum_grad_args",
    "dynamic_stitch_order",
    "parallel_dynamic_stitch_cint32_cpu",
    "parallel_dynamic_stitch_int32_cpu",
    "parallel_dynamic_stitch_simple",
)

ROWS, DIM = 13, 10


def filled(values: Any, place: Path | None = None, **options: Any) -> bb.Table:
    """Return a table with these rows, in five shards if it has a path."""
    values = np.asarray(values, np.float32)
    options = {"optimizer": bb.SGD(lr=1.0), "num_rows": len(values), "dim": values.shape[1], **options}
    if place is None:
        table = bb.create(None, **options)
    else:
        table = bb.ShardedTable.create(place, ram="8MiB", shards=5, **options)
    table.set(np.arange(len(values)), values)
    return table


def _max_norm() -> Any:
    return embedding_lookup(filled([[2.0, 4.0]]), [0], trainable=False, max_norm=1.0)  # type: ignore[call-arg]


def _safe(rank: int) -> Callable[[], Any]:
    """Return a lookup with ids of -1, which TensorFlow's safe lookup leaves out."""
    places = [[0, 0], [0, 1], [1, 0]] if rank == 2 else [[0, 0, 0], [0, 0, 1], [1, 0, 0]]
    shape = [5, 4] if rank == 2 else [2, 3, 4]
    return lambda: Embedding(4, 4, combiner="mean")(tf.SparseTensor(places, [0, -1, 2], shape))


_NO_MAX_NORM = (_max_norm, TypeError, "unexpected keyword argument 'max_norm'")
_NO_BAD_IDS = (_safe(2), IndexError, r"id -1 at position 1 is outside \[0, 4\)")
_NO_RANK_3 = (_safe(3), ValueError, r"sparse ids of a combiner must be \[B, L\], got \(2, 3, 4\)")

#: What is refused. `test_max_norm_of_the_output` and `test_bad_ids_are_left_out_before` show what to do.
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "max_norm": _NO_MAX_NORM,
    "max_norm_nontrivial": _NO_MAX_NORM,
    "higher_rank_max_norm": _NO_MAX_NORM,
    "transform": _NO_MAX_NORM,
    "ragged_max_norm": _NO_MAX_NORM,
    "safe_embedding_lookup_sparse_return_zero_vector": _NO_BAD_IDS,
    "safe_embedding_lookup_sparse_return_special_vector": _NO_BAD_IDS,
    "safe_embedding_lookup_sparse_no_weights": _NO_BAD_IDS,
    "safe_embedding_lookup_sparse_partitioned": _NO_BAD_IDS,
    "safe_embedding_lookup_sparse_3d_return_zero_vector": _NO_RANK_3,
    "safe_embedding_lookup_sparse_3d_return_special_vector": _NO_RANK_3,
    "safe_embedding_lookup_sparse_3d_no_weights": _NO_RANK_3,
    "safe_embedding_lookup_sparse_3d_partitioned": _NO_RANK_3,
}

_OTHER_OP = "tests tf.dynamic_stitch, which looks no rows up"
_ONE_DTYPE = "gives the parts of the weights different dtypes; a table has one dtype"

NOT_APPLICABLE = {
    "safe_embedding_lookup_sparse_partitioned_inconsistent_weights": _ONE_DTYPE,
    "safe_embedding_lookup_sparse_3d_partitioned_inconsistent_weights": _ONE_DTYPE,
    "dynamic_stitch_cint32_cpu": _OTHER_OP,
    "dynamic_stitch_cint32_gpu": _OTHER_OP,
    "dynamic_stitch_int32_cpu": _OTHER_OP,
    "dynamic_stitch_int32_gpu": _OTHER_OP,
    "dynamic_stitch_sum_grad_args": _OTHER_OP,
    "dynamic_stitch_order": _OTHER_OP,
    "parallel_dynamic_stitch_cint32_cpu": _OTHER_OP,
    "parallel_dynamic_stitch_int32_cpu": _OTHER_OP,
    "parallel_dynamic_stitch_simple": _OTHER_OP,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        call()


# ---- Scatter: what an SGD step of rate 1 does


def scatter(shape: list[int], ids: list[int], sign: float) -> None:
    chance = np.random.default_rng(len(ids))
    rows = chance.random((shape[0], int(np.prod(shape[1:]))), np.float32)
    values = chance.random((len(ids), rows.shape[1]), np.float32)
    table = filled(rows)
    table.update(np.array(ids), -sign * values)
    wanted = rows.copy()
    for place, row in enumerate(ids):
        wanted[row] += np.float32(sign) * values[place]
    found = table.get(np.arange(len(rows)))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    others = np.setdiff1d(np.arange(len(rows)), ids)
    np.testing.assert_array_equal(found[others], rows[others])


def test_scatter_no_repetitions() -> None:
    scatter([2, 2], [1], 1)
    scatter([4, 4, 4], [2, 0], 1)
    scatter([43, 20, 10, 10], [42, 5, 6, 1, 3, 7, 9], 1)


def test_scatter_with_repetitions() -> None:
    scatter([2, 2], [1, 1], 1)
    scatter([5, 3, 9, 5], [2, 0, 4, 1, 3, 1, 4, 0, 4, 3], 1)
    scatter([32, 4, 4], [31] * 8, 1)


def _scatter_random(seed: int, sign: float) -> None:
    chance = np.random.default_rng(seed)
    shape = chance.integers(1, 20, 4).tolist()
    scatter(shape, chance.integers(0, shape[0], 2 * shape[0]).tolist(), sign)


def test_scatter_random() -> None:
    for seed in range(5):
        _scatter_random(seed, 1)


def test_scatter_sub_random() -> None:
    for seed in range(5):
        _scatter_random(seed, -1)


def test_scatter_wrong_shape() -> None:
    table = filled(np.zeros((1024, 64)))
    with pytest.raises(ValueError, match=r"grads must be float32\[32, 64\], got float32\[33, 64\]"):
        table.update(np.arange(32), np.zeros((33, 64), np.float32))
    with pytest.raises(ValueError, match=r"grads must be float32\[32, 64\], got float32\[32, 63\]"):
        table.update(np.arange(32), np.zeros((32, 63), np.float32))


# ---- Lookups, of a table in RAM and of one in five shards


def look_up(ids: Any, dtype: str, place: Path | None, *, in_graph: bool = False, hide_shape: bool = False) -> None:
    """Compare a lookup with `tf.nn.embedding_lookup`, to the bit."""
    values = np.random.default_rng(0).random((ROWS, DIM), np.float32) + 1
    with filled(values, place) as table:
        given = tf.constant(ids, dtype)

        def call(given: Any) -> Any:
            return embedding_lookup(table, given, trainable=False)

        if in_graph:
            shape = None if hide_shape else given.shape
            call = tf.function(call, input_signature=[tf.TensorSpec(shape, dtype)])
        found, wanted = call(given), tf.nn.embedding_lookup(tf.constant(values), given)
        assert found.shape == wanted.shape
        np.testing.assert_array_equal(found, wanted)


MANY = np.random.default_rng(1).integers(0, ROWS, 30)  # more than there are rows, so some come again


def test_simple_sharded(tmp_path: Path) -> None:
    look_up([0, 0], "int32", tmp_path / "table")


def _look_up_variable(dtype: str, tmp_path: Path) -> None:
    look_up([0, 0], dtype, tmp_path / dtype, in_graph=True)


def test_simple_sharded_partitioned_variable(tmp_path: Path) -> None:
    _look_up_variable("int32", tmp_path)


def test_simple_sharded_partitioned_resource_variable(tmp_path: Path) -> None:
    _look_up_variable("int64", tmp_path)


def test_sharded_mod_partitioning_int32_ids(tmp_path: Path) -> None:
    look_up(MANY, "int32", tmp_path / "table")


def test_sharded_mod_partitioning_int64_ids(tmp_path: Path) -> None:
    look_up(MANY, "int64", tmp_path / "table")


def test_sharded_div_partitioning_int32_ids(tmp_path: Path) -> None:
    look_up(MANY, "int32", tmp_path / "table", in_graph=True)


def test_sharded_div_partitioning_int32_ids_partitioned_variable() -> None:
    look_up(MANY, "int32", None, in_graph=True)


def test_sharded_div_partitioning_int64_ids(tmp_path: Path) -> None:
    look_up(MANY, "int64", tmp_path / "table", in_graph=True)


def test_sharded_div_partitioning_unknown_param_shape(tmp_path: Path) -> None:
    look_up(MANY, "int64", tmp_path / "table", in_graph=True, hide_shape=True)


def learned(look_up: Callable[[Any], Any], weights: Any, targets: Any) -> Any:
    """Return the gradient of a scalar function of what is looked up."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(look_up(weights) * targets)
    return tape.gradient(loss, weights)


def gradients(change: Callable[[Any], Any], ids: Any, place: Path | None) -> None:
    values = np.random.default_rng(2).random((9, 2), np.float32) + 1
    targets = np.random.default_rng(3).standard_normal((*np.shape(ids), 2)).astype(np.float32)
    with filled(values, place) as table:
        token = token_of(table)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(change(embedding_lookup(table, ids)) * targets)
        token.assign(tape.gradient(loss, token.value))
        moved = values - table.get(np.arange(9))
    variable = tf.Variable(values)
    wanted = learned(lambda weights: tf.nn.embedding_lookup(change(weights), ids), variable, targets)
    np.testing.assert_allclose(moved, tf.convert_to_tensor(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(10,), (2, 5)])
@pytest.mark.parametrize("in_shards", [False, True])
def test_gradients_embedding_lookup(shape: tuple[int, ...], in_shards: bool, tmp_path: Path) -> None:
    ids = np.random.default_rng(4).integers(0, 9, shape)
    gradients(tf.identity, ids, tmp_path / "table" if in_shards else None)


@pytest.mark.parametrize("in_shards", [False, True])
def test_gradients_embedding_lookup_with_computed_params(in_shards: bool, tmp_path: Path) -> None:
    ids = np.random.default_rng(5).integers(0, 9, 5)
    gradients(tf.square, ids, tmp_path / "table" if in_shards else None)


def test_construction_non_sharded() -> None:
    look_up([0, 1, 1, 7], "int32", None, in_graph=True)


def test_construction_sharded(tmp_path: Path) -> None:
    look_up([0, 1, 1, 12], "int32", tmp_path / "table", in_graph=True)


@pytest.mark.parametrize("shape", [(3, 2), (4, 3), (), (2, 3, 4)])
@pytest.mark.parametrize("width", [1, 3])
def test_higher_rank(shape: tuple[int, ...], width: int, tmp_path: Path) -> None:
    values = np.random.default_rng(8).standard_normal((12, width)).astype(np.float32)
    ids = np.random.default_rng(9).integers(0, 12, shape)
    for place in (None, tmp_path / "table"):
        with filled(values, place) as table:
            np.testing.assert_array_equal(embedding_lookup(table, ids, trainable=False), tf.gather(values, ids))


def test_max_norm_of_the_output() -> None:
    values = np.array([[2.0, 4.0], [3.0, 1.0], [0.5, 0.5]], np.float32)
    table = filled(values)
    for ids in (tf.constant([0, 1, 2]), tf.constant([[2, 0], [1, 1]])):
        found = tf.clip_by_norm(embedding_lookup(table, ids, trainable=False), 2.0, axes=[-1])
        np.testing.assert_allclose(found, tf.nn.embedding_lookup(values, ids, max_norm=2.0), rtol=1e-6)
    ragged = tf.ragged.constant([[0, 0], [], [1]])
    found = embedding_lookup(table, ragged, trainable=False)
    found = found.with_flat_values(tf.clip_by_norm(found.flat_values, 2.0, axes=[-1]))
    wanted = tf.nn.embedding_lookup(values, ragged, max_norm=2.0)
    np.testing.assert_allclose(found.flat_values, wanted.flat_values, rtol=1e-6)
    with pytest.raises(TypeError, match=r"sparse ids have no rows where there is no id; give tf\.sparse\.to_dense"):
        embedding_lookup(table, ragged.to_sparse(), trainable=False)


# ---- Lookups that pool


def bags(seed: int, rows: int, count: int) -> tuple[Any, Any]:
    """Return sparse ids and weights of `count` bags of 1 to 5 ids."""
    chance = np.random.default_rng(seed)
    lengths = chance.integers(1, 6, count)
    places = [[bag, place] for bag, length in enumerate(lengths) for place in range(length)]
    ids, weights = chance.integers(0, rows, len(places)), 1 + chance.random(len(places), np.float32)
    return tf.SparseTensor(places, ids, (count, 6)), tf.SparseTensor(places, weights, (count, 6))


COMBINERS = list(itertools.product(["sum", "mean", "sqrtn"], [False, True]))


@pytest.mark.parametrize(("combiner", "has_weights"), COMBINERS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_embedding_lookup_sparse(combiner: str, has_weights: bool, dtype: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((ROWS, DIM), np.float32) + 1
    ids, weights = bags(1, ROWS, 10)
    for place in (None, tmp_path / "table"):
        with filled(values, place, dtype=dtype) as table:
            layer = Embedding(ROWS, DIM, combiner=combiner, table=table)
            found = layer(ids, weights) if has_weights else layer(ids)
            wanted = tf.nn.embedding_lookup_sparse(
                tf.constant(table.get(np.arange(ROWS))), ids, weights if has_weights else None, combiner=combiner
            )
            assert layer.compute_output_shape((None, None)) == (None, DIM)
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="dtype must be one of float32"):
        bb.create(None, dim=DIM, dtype="float64")


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_missing_in_sparse_ids(combiner: str) -> None:
    layer = Embedding(4, 5, combiner=combiner, weights=np.ones((4, 5)), optimizer=bb.SGD(1.0))
    ids = tf.SparseTensor([[1, 0], [3, 0]], [0, 2], (4, 1))
    wanted = np.repeat([[0.0], [1], [0], [1]], 5, axis=1)
    for weights in (None, tf.SparseTensor([[1, 0], [3, 0]], [1.0, 1.0], (4, 1))):
        np.testing.assert_array_equal(layer(ids, weights), wanted)


def trained(combiner: str, values: Any, ids: Any, weights: Any, targets: Any, place: Path | None) -> Any:
    """Return what an SGD step of rate 1 subtracts from the rows."""
    with filled(values, place) as table:
        layer = Embedding(*values.shape, combiner=combiner, table=table)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids, weights) * targets)
        layer.token.assign(tape.gradient(loss, layer.token.value))
        return values - table.get(np.arange(len(values)))


@pytest.mark.parametrize(("combiner", "has_weights"), COMBINERS)
@pytest.mark.parametrize("in_shards", [False, True])
def test_gradients_embedding_lookup_sparse(combiner: str, has_weights: bool, in_shards: bool, tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((12, 6), np.float32) + 1
    targets = np.random.default_rng(1).standard_normal((4, 6)).astype(np.float32)
    ids, weights = bags(2, 12, 4)
    weights = weights if has_weights else None
    moved = trained(combiner, values, ids, weights, targets, tmp_path / "table" if in_shards else None)
    wanted = learned(
        lambda rows: tf.nn.embedding_lookup_sparse(rows, ids, weights, combiner=combiner), tf.Variable(values), targets
    )
    np.testing.assert_allclose(moved, tf.convert_to_tensor(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_weights_that_sum_to_0(combiner: str) -> None:
    """TensorFlow divides by 0 to 0, in the lookup and in its gradient."""
    values = np.random.default_rng(0).random((4, 2), np.float32) + 1
    targets = np.ones((3, 2), np.float32)
    places = [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2], [2, 0]]
    ids = tf.SparseTensor(places, [0, 1, 1, 2, 2, 3], (3, 3))
    weights = tf.SparseTensor(places, [0.0, 0.0, 0.1, 0.2, -0.3, 2.0], (3, 3))
    wanted = tf.nn.embedding_lookup_sparse(tf.constant(values), ids, weights, combiner=combiner)
    layer = Embedding(4, 2, combiner=combiner, weights=values, optimizer=bb.SGD(1.0))
    np.testing.assert_allclose(layer(ids, weights)[::2], wanted[::2], rtol=1e-6)
    assert not np.asarray(wanted)[0].any()
    moved = trained(combiner, values, ids, weights, targets, None)
    assert not moved[0].any() and moved[3].any() and np.isfinite(moved).all()


def test_incompatible_shapes() -> None:
    layer = Embedding(10, 2, combiner="mean", optimizer=bb.SGD(1.0))
    places, others = [[0, 0], [0, 1], [1, 0]], [[0, 0], [1, 0], [1, 1]]
    ids = tf.SparseTensor(places, [0, 1, 2], (2, 2))
    why = "the weights must have the shape of the ids, one for each id at its place"
    fewer = tf.SparseTensor(places[:2], [12.0, 5.0], (1, 2))
    elsewhere = tf.SparseTensor(others, [1.0, 2.0, 3.0], (2, 2))
    ragged = tf.ragged.constant([[0, 1], [2]]), tf.ragged.constant([[0.5], [1.0, 2.0]])
    dense = tf.zeros((2, 3), tf.int32), tf.zeros((3, 2))
    for call in (layer, tf.function(layer.__call__)):
        for given, weights in ((ids, fewer), (ids, elsewhere), ragged, dense):
            with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=why):
                call(given, weights)
    hidden = tf.function(layer.__call__, input_signature=[tf.TensorSpec([None, None], tf.int32), tf.TensorSpec(None)])
    with pytest.raises(tf.errors.InvalidArgumentError, match=why):
        hidden(*dense)


def test_bad_ids_are_left_out_before() -> None:
    """Without the ids that are none, a bag may be empty: it is zeros, as TensorFlow's safe lookup gives it."""
    values = np.random.default_rng(0).random((4, 4), np.float32)
    layer = Embedding(4, 4, combiner="mean", weights=values, optimizer=bb.SGD(1.0))
    places = [[0, 0], [0, 1], [0, 2], [1, 0], [3, 0], [4, 0], [4, 1]]
    ids = tf.SparseTensor(places, tf.constant([0, 1, -1, -1, 2, 0, 1], tf.int64), (5, 4))
    weights = tf.SparseTensor(places, [1.0, 2.0, 1.0, 1.0, 3.0, 0.0, -0.5], (5, 4))
    kept = (ids.values >= 0) & (weights.values > 0)
    found = layer(tf.sparse.retain(ids, kept), tf.sparse.retain(weights, kept))
    wanted = tf.nn.safe_embedding_lookup_sparse(tf.constant(values), ids, weights, combiner="mean")
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
