"""What the tests of `keras.layers.Embedding` and of keras-rs's embedding layers ask for, asked of ours.

The names are those of ``keras/src/layers/core/embedding_test.py`` of keras-team/keras (commit 0d1f11f8), and of
``embed_reduce_test.py`` and ``distributed_embedding_test.py`` of keras-team/keras-rs (commits 16dd280a, 0c6d665a; with
the prefixes ``embed_reduce_`` and ``distributed_``). keras-rs's layer of several tables is here one layer for each. See
`test_torch_suite` for the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.keras import Embedding
from keras_setup import keras, tf

NAMES = (
    "embedding_quantize_config",
    "embedding_basics",
    "sparse",
    "ragged",
    "correctness",
    "correctness_sparse",
    "masking",
    "compute_mask_no_masking",
    "embedding_constraints",
    "weights_constructor_arg",
    "enable_lora",
    "enable_lora_with_alpha",
    "lora_rank_argument",
    "enable_lora_with_embeddings_constraint",
    "enable_lora_when_already_enabled",
    "quantize_int",
    "quantize_on_unbuilt_layer",
    "quantize_on_subclass",
    "quantize_when_already_quantized",
    "quantize_by_setting_dtype_policy",
    "quantize_invalid_mode",
    "quantize_dtype_argument",
    "quantize_lora_integration",
    "legacy_load_own_variables",
    "embed_reduce_call",
    "embed_reduce_symbolic_call",
    "embed_reduce_predict",
    "embed_reduce_serialization",
    "embed_reduce_model_saving",
    "distributed_basics",
    "distributed_model_fit",
    "distributed_correctness",
    "distributed_shared_table",
    "distributed_save_load_model",
)

MATRIX = np.array([[0, 0], [2, 2], [3, 3]], np.float32)


def filled(**options: Any) -> Any:
    layer = Embedding(3, 2, **options)
    layer.build()
    layer.set_weights([MATRIX])
    return layer


def _with_policy() -> None:
    filled().dtype_policy = "int8_from_float32"


def _of_a_subclass() -> None:
    class Mine(Embedding):  # type: ignore[misc]  # keras is untyped here
        pass

    Mine(10, 16, seed=0).quantize("int8")


_NO_LORA = lambda: Embedding(3, 2, lora_rank=2)  # noqa: E731
_NOT_QUANTIZED = "does not have a `quantize` method"

#: What is refused, and the message. LoRA and quantization change every row, or need all rows at once.
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "embedding_quantize_config": (lambda: filled().quantize("int8"), NotImplementedError, _NOT_QUANTIZED),
    "embedding_constraints": (
        lambda: Embedding(3, 2, embeddings_constraint="non_neg"),
        ValueError,
        "embeddings_constraint= is not supported",
    ),
    "enable_lora": (lambda: filled().enable_lora(4), AttributeError, "no attribute 'enable_lora'"),
    "enable_lora_with_alpha": (
        lambda: Embedding(3, 2, lora_rank=2, lora_alpha=3.0),
        ValueError,
        "lora_rank= is not supported",
    ),
    "lora_rank_argument": (_NO_LORA, ValueError, "lora_rank= is not supported"),
    "enable_lora_with_embeddings_constraint": (
        lambda: Embedding(3, 2, embeddings_constraint="max_norm"),
        ValueError,
        "embeddings_constraint= is not supported",
    ),
    "enable_lora_when_already_enabled": (_NO_LORA, ValueError, "lora_rank= is not supported"),
    "quantize_int": (lambda: filled().quantize("int4"), NotImplementedError, _NOT_QUANTIZED),
    "quantize_on_unbuilt_layer": (lambda: Embedding(3, 2).quantize("int8"), NotImplementedError, _NOT_QUANTIZED),
    "quantize_on_subclass": (_of_a_subclass, NotImplementedError, _NOT_QUANTIZED),
    "quantize_when_already_quantized": (
        lambda: Embedding(3, 2, dtype="int4_from_float32"),
        ValueError,
        'quantizes weights, which rows are not; give dtype="bfloat16"',
    ),
    "quantize_by_setting_dtype_policy": (_with_policy, NotImplementedError, _NOT_QUANTIZED),
    "quantize_invalid_mode": (lambda: filled().quantize("int7"), ValueError, "Invalid quantization mode"),
    "quantize_dtype_argument": (
        lambda: Embedding(3, 2, dtype="int8_from_mixed_bfloat16"),
        ValueError,
        "dtype='int8_from_mixed_bfloat16' quantizes weights, which rows are not",
    ),
    "quantize_lora_integration": (_NO_LORA, ValueError, "lora_rank= is not supported"),
}

NOT_APPLICABLE: dict[str, str] = {}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        call()


# ---- keras.layers.Embedding


@pytest.mark.parametrize(("shape", "dtype", "mask"), [((2,), "int32", False), ((2, 3), "int64", True)])
def test_embedding_basics(shape: tuple[int, ...], dtype: str, mask: bool, tmp_path: Path) -> None:
    layer = Embedding(5, 4, mask_zero=mask)
    assert layer.supports_masking is mask and len(layer.trainable_weights) == 1 and not layer.losses
    ids = np.random.default_rng(0).integers(0, 5, (8, *shape)).astype(dtype)
    model = keras.Sequential([keras.Input(shape, dtype=dtype), layer])
    assert model.output_shape == (None, *shape, 4) and model(ids).shape == (8, *shape, 4)
    model.compile("sgd", "mse")
    before = model.predict(ids, verbose=0)
    model.fit(ids, np.ones((8, *shape, 4), np.float32), verbose=0)
    assert (model.predict(ids, verbose=0) != before).any()
    assert keras.layers.deserialize(keras.layers.serialize(layer)).get_config() == layer.get_config()
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.predict(ids, verbose=0), model.predict(ids, verbose=0))


def _sparse() -> Any:
    return tf.SparseTensor([[0, 0], [1, 2]], [2, 1], (2, 3))


def test_sparse() -> None:
    inputs = keras.Input((3,), dtype="int32", sparse=True)
    layer = filled()
    model = keras.Model(inputs, layer(inputs))
    assert model.output_shape == (None, 3, 2)
    model.compile("sgd", "mse")
    model.fit(_sparse(), np.ones((2, 3, 2), np.float32), verbose=0)
    moved = (layer.table.get([0, 1, 2]) != MATRIX).any(axis=1)
    assert moved.all()  # id 0 is where there is none, as in Keras


def test_ragged() -> None:
    ids = tf.ragged.constant([[2], [1, 0, 2], []], dtype=tf.int32)
    out = filled()(ids)
    assert isinstance(out, tf.RaggedTensor) and out.shape == (3, None, 2)
    np.testing.assert_array_equal(out.flat_values.numpy(), MATRIX[[2, 1, 0, 2]])


def test_correctness() -> None:
    np.testing.assert_array_equal(filled()(np.array([2, 1, 0])), MATRIX[[2, 1, 0]])


def test_correctness_sparse() -> None:
    wanted = keras.layers.Embedding(3, 2, weights=MATRIX)(_sparse())
    np.testing.assert_array_equal(filled()(_sparse()), wanted)


def test_masking() -> None:
    assert filled(mask_zero=True).compute_mask(np.array([2, 1, 0])).numpy().tolist() == [True, True, False]


def test_compute_mask_no_masking() -> None:
    assert filled().compute_mask(np.array([2, 1, 0])) is None


@pytest.mark.parametrize("weights", [np.ones((3, 4)), [np.ones((3, 4))]])
def test_weights_constructor_arg(weights: Any) -> None:
    np.testing.assert_array_equal(Embedding(3, 4, weights=weights)(np.arange(3)), np.ones((3, 4)))


def test_legacy_load_own_variables() -> None:
    """A float matrix is imported. With the scales of a quantized layer it is no matrix of rows."""
    layer = Embedding(3, 2)
    layer.load_own_variables({"0": MATRIX})
    np.testing.assert_array_equal(layer(np.arange(3)), MATRIX)
    for width in (2, 1):
        stored = {"0": np.ones((3, width), np.int8), "1": np.ones(3, np.float32)}
        with pytest.raises(ValueError, match=r"has '1' next to its matrix, as quantized layers have; save the layer"):
            layer.load_own_variables(stored)
    np.testing.assert_array_equal(layer(np.arange(3)), MATRIX)


# ---- keras-rs


KINDS = list(itertools.product(["sum", "mean", "sqrtn"], ["dense", "ragged", "sparse"], [False, True]))


def bags_of(kind: str) -> tuple[Any, Any, list[list[int]], list[list[float]]]:
    """Return ids and weights of a kind of tensor, and as lists."""
    ids, weights = [[1], [2, 3, 4, 5]], [[1.0], [1.0, 2.0, 3.0, 4.0]]
    if kind == "dense":
        ids, weights = [[1, 2], [3, 4]], [[1.0, 2.0], [3.0, 4.0]]
        return tf.constant(ids), tf.constant(weights), ids, weights
    given = tf.ragged.constant(ids), tf.ragged.constant(weights)
    if kind == "sparse":
        given = given[0].to_sparse(), given[1].to_sparse()
    return *given, ids, weights


def pooled(rows: Any, ids: list[list[int]], weights: list[list[float]] | None, combiner: str) -> Any:
    """Return what the combiner makes of rows, by hand."""
    out = []
    for number, bag in enumerate(ids):
        factors = np.array([1.0] * len(bag) if weights is None else weights[number])
        divisor = {"sum": 1.0, "mean": factors.sum(), "sqrtn": np.sqrt((factors**2).sum())}[combiner]
        out.append((rows[bag] * factors[:, None]).sum(0) / divisor)
    return np.array(out)


def check_bags(combiner: str, kind: str, has_weights: bool, in_graph: bool) -> None:
    layer = Embedding(10, 20, combiner=combiner, seed=0, optimizer=bb.SGD(0.1))
    ids, weights, bags, factors = bags_of(kind)
    call = tf.function(layer.__call__) if in_graph else layer
    out = call(ids, weights) if has_weights else call(ids)
    wanted = pooled(layer.table.get(np.arange(10)), bags, factors if has_weights else None, combiner)
    assert out.shape == (2, 20)
    np.testing.assert_allclose(out.numpy(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("combiner", "kind", "has_weights"), KINDS)
def test_embed_reduce_call(combiner: str, kind: str, has_weights: bool) -> None:
    check_bags(combiner, kind, has_weights, in_graph=False)
    layer = Embedding(10, 20, combiner=combiner)
    with pytest.raises(ValueError, match=r"ids of a combiner must be \[..., L\], got \[2\]; give ids\[:, None\]"):
        layer(tf.constant([1, 2]))
    assert layer(tf.constant([1, 2])[:, None]).shape == (2, 20)


@pytest.mark.parametrize(("kind", "has_weights"), list(itertools.product(["dense", "ragged", "sparse"], [False, True])))
def test_embed_reduce_symbolic_call(kind: str, has_weights: bool) -> None:
    options = {"sparse": kind == "sparse", "ragged": kind == "ragged"}
    given = [keras.Input((2,), dtype="int32", **options)]
    if has_weights:
        given.append(keras.Input((2,), dtype="float32", **options))
    out = Embedding(10, 20, combiner="mean")(*given)
    assert (out.shape, out.dtype, out.sparse, out.ragged) == ((None, 20), "float32", False, False)
    with pytest.raises(ValueError, match=r"ids of a combiner must be \[..., L\], got \[None\]"):
        Embedding(10, 20, combiner="mean")(keras.Input((), dtype="int32"))


def test_embed_reduce_predict() -> None:
    ids = np.random.default_rng(0).integers(0, 10, (5, 7))
    model = keras.Sequential([Embedding(10, 20, combiner="mean", optimizer=bb.SGD(0.1))])
    assert model.predict(ids, batch_size=2, verbose=0).shape == (5, 20)


def test_embed_reduce_serialization() -> None:
    layer = Embedding(10, 20, combiner="sqrtn")
    assert keras.layers.deserialize(keras.layers.serialize(layer)).get_config() == layer.get_config()


def test_embed_reduce_model_saving(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 10, (5, 7))
    model = keras.Sequential([keras.Input((7,), dtype="int64"), Embedding(10, 20, combiner="mean")])
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.predict(ids, verbose=0), model.predict(ids, verbose=0))


class Features(keras.Model):  # type: ignore[misc]  # keras is untyped here
    """A layer for each feature; features of one table share it."""

    def __init__(self, tables: dict[str, str]) -> None:
        super().__init__()
        self.embeddings: dict[str, Any] = {}
        for feature, table in tables.items():
            other = self.embeddings.get(table)
            self.embeddings[feature] = Embedding(23, 7, combiner="mean") if other is None else other
        self.all_layers = list(self.embeddings.values())

    def call(self, inputs: Any) -> Any:
        return {
            name: layer(*inputs[name]) if isinstance(inputs[name], tuple) else layer(inputs[name])
            for name, layer in self.embeddings.items()
        }


@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_distributed_basics(kind: str) -> None:
    ids = bags_of(kind)[0]
    model = Features({"one": "", "two": ""})
    out = tf.function(model.__call__)({"one": ids, "two": ids})
    assert len(model.trainable_variables) == 2
    assert {name: value.shape for name, value in out.items()} == {"one": (2, 7), "two": (2, 7)}


@pytest.mark.parametrize(("kind", "has_weights"), list(itertools.product(["dense", "ragged", "sparse"], [False, True])))
def test_distributed_model_fit(kind: str, has_weights: bool) -> None:
    ids, weights, *_ = bags_of(kind)
    given = dict.fromkeys(("one", "two"), (ids, weights) if has_weights else ids)
    model = Features({"one": "", "two": ""})
    model.compile("adam", "mse")
    before = {name: value.numpy() for name, value in model(given).items()}
    labels = {name: np.ones((2, 7), np.float32) for name in given}
    model.fit(tf.data.Dataset.from_tensors((given, labels)), verbose=0)
    for name, value in model(given).items():
        assert (value.numpy() != before[name]).all()


@pytest.mark.parametrize(("combiner", "kind", "has_weights"), KINDS)
def test_distributed_correctness(combiner: str, kind: str, has_weights: bool) -> None:
    check_bags(combiner, kind, has_weights, in_graph=True)


def test_distributed_shared_table() -> None:
    ids = bags_of("dense")[0]
    model = Features({"one": "", "two": "one", "three": "one"})
    out = model({"one": ids, "two": ids, "three": ids})
    assert len(model.trainable_variables) == 1
    np.testing.assert_array_equal(out["one"], out["three"])


def test_distributed_save_load_model(tmp_path: Path) -> None:
    inputs = {name: keras.Input((2,), dtype="int32") for name in ("one", "two")}
    layers = {name: Embedding(23, 7, combiner="mean") for name in inputs}
    model = keras.Model(inputs, {name: layers[name](value) for name, value in inputs.items()})
    ids = {name: bags_of("dense")[0] for name in inputs}
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    for name, value in model(ids).items():
        np.testing.assert_array_equal(again(ids)[name], value)
