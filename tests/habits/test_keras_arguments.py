"""Initialisers, matrices of weights and summaries, as people use them with `keras.layers.Embedding`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import bunkbed as bb
from bunkbed.keras import Embedding

ROWS, DIM = 40, 4


@pytest.mark.parametrize(
    ("given", "value"),
    [("ones", 1.0), ("zeros", 0.0), (keras.initializers.Constant(0.1), 0.1), (keras.initializers.Constant(-3), -3.0)],
)
def test_constant_initialisers(given: Any, value: float) -> None:
    ours, theirs = Embedding(ROWS, DIM, given), keras.layers.Embedding(ROWS, DIM, given)
    ids = np.array([[1, 39]])
    np.testing.assert_array_equal(ours(ids), theirs(ids))
    assert float(np.asarray(ours(ids))[0, 0, 0]) == np.float32(value)
    again = Embedding.from_config(ours.get_config())
    np.testing.assert_array_equal(again(ids), theirs(ids))


@pytest.mark.parametrize(
    "given",
    [
        *("truncated_normal", "he_normal", "glorot_normal", "lecun_normal", "orthogonal"),
        keras.initializers.RandomNormal(mean=1.0),
        keras.initializers.Constant(np.ones((ROWS, DIM))),
    ],
)
def test_other_initialisers_are_refused_with_what_there_is(given: Any) -> None:
    with pytest.raises(ValueError, match=r"is not among those a table has.*give bunkbed.Zeros\(\), bunkbed.Normal"):
        Embedding(ROWS, DIM, given)


@pytest.mark.parametrize("optimizer", [None, bb.Adagrad(0.5)])
def test_a_matrix_may_be_set_before_and_after_training(optimizer: Any) -> None:
    layer = Embedding(ROWS, DIM, optimizer=optimizer)
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    ids = np.array([[1, 2], [3, 3]])
    for seed in (1, 2):
        matrix = np.random.default_rng(seed).random((ROWS, DIM), np.float32)
        layer.set_weights([matrix])
        np.testing.assert_array_equal(layer(np.arange(ROWS)), matrix)
        model.fit(ids, np.zeros((2, 2, DIM), np.float32), verbose=0)
        assert layer.table.step == seed
        moved = np.flatnonzero((np.asarray(layer(np.arange(ROWS))) != matrix).any(axis=1))
        assert moved.tolist() == [1, 2, 3]
    kept = layer.get_weights()
    layer.set_weights([matrix])
    layer.set_weights(kept)
    assert (np.asarray(layer(np.array([1]))) != matrix[1]).any()
    with pytest.raises(ValueError, match=r"weights must be float32\[40, 4\], got shape \[41, 4\]"):
        layer.set_weights([np.ones((ROWS + 1, DIM))])
    with pytest.raises(ValueError, match="weight list of length 3"):
        layer.set_weights([matrix] * 3)


def test_summaries_count_rows() -> None:
    layer = Embedding(10**9, DIM)
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer])
    lines: list[str] = []
    model.summary(print_fn=lines.append)
    assert layer.count_params() == 4 * 10**9 and "4,000,000,000" in "\n".join(lines)
    unbounded = Embedding(None, DIM, optimizer=bb.SGD(1.0))
    assert unbounded.count_params() == 0
    unbounded.table.set([7], np.ones((1, DIM), np.float32))
    assert unbounded.count_params() == DIM
    assert Embedding(None, DIM).count_params() == 0


def test_what_a_table_cannot_do_is_refused() -> None:
    for argument in ("embeddings_regularizer", "embeddings_constraint"):
        with pytest.raises(ValueError, match=f"{argument}= is not supported"):
            Embedding(ROWS, DIM, **{argument: "l2" if "reg" in argument else "non_neg"})
    with pytest.raises(ValueError, match="lora_rank= is not supported"):
        Embedding(ROWS, DIM, lora_rank=2)
    layer = Embedding(ROWS, DIM)
    with pytest.raises((NotImplementedError, ValueError)):
        layer.quantize("int8")
    with pytest.raises(ValueError, match=r"ids of a combiner must be \[..., L\], got \[2\]"):
        Embedding(ROWS, DIM, combiner="sum")(np.array([1, 2]))
