"""`block_dataset`: the batches of a `BlockOrder` in tf.data and in fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.keras import Embedding, block_dataset, lookahead
from keras_setup import ADAM, DIM, ROWS, SEED, all_rows, keras, mse_gradient, reference, row_model, tf

SAMPLES, SIZE = 2_000, 20


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, ROWS, SAMPLES)


@pytest.fixture(scope="module")
def targets() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((SAMPLES, DIM)).astype(np.float32)


def test_each_iteration_is_the_next_epoch(ids: np.ndarray) -> None:
    order = bb.BlockOrder([ids, ids[::-1]], blocks=3, seed=2)
    names = np.array([f"user {one}" for one in ids])
    dataset = block_dataset(order, ({"id": ids, "name": names}, np.arange(SAMPLES, dtype=np.float32)), SIZE)
    for epoch in range(3):
        found, expected = list(dataset), list(order.batches(epoch, SIZE))
        assert len(found) == len(expected) == len(dataset)
        for (x, y), batch in zip(found, expected, strict=True):
            assert np.array_equal(y, batch.indices) and np.array_equal(x["id"], ids[batch.indices])
            assert [one.decode() for one in x["name"].numpy()] == names[batch.indices].tolist()
    assert dataset.element_spec[0]["id"].dtype == tf.int64


def test_a_resumed_run_starts_with_a_later_epoch(ids: np.ndarray) -> None:
    order = bb.BlockOrder([ids], blocks=3)
    dataset = block_dataset(order, np.arange(SAMPLES), SIZE, epoch=5)
    for epoch in (5, 6):
        found = np.concatenate([batch.numpy() for batch in dataset])
        assert np.array_equal(found, np.concatenate([batch.indices for batch in order.batches(epoch, SIZE)]))


def test_a_look_at_the_first_batches_is_no_epoch(ids: np.ndarray) -> None:
    order = bb.BlockOrder([ids], blocks=3)
    dataset = block_dataset(order, np.arange(SAMPLES), SIZE)
    ahead = dataset.prefetch(30)
    for _ in range(3):
        assert np.array_equal(next(iter(ahead)), next(order.batches(0, SIZE)).indices)
    for count, epoch in ((63, 0), (64, 0), (1, 1)):  # of 100 and more batches
        found = [batch.numpy() for batch in dataset.take(count)]
        assert np.array_equal(found[0], next(order.batches(epoch, SIZE)).indices)


def expected_rows(order: bb.BlockOrder, ids: np.ndarray, targets: np.ndarray, epochs: int) -> np.ndarray:
    table = reference(ADAM)
    for epoch in range(epochs):
        for batch in order.batches(epoch, SIZE):
            rows = ids[batch.indices]
            table.update(rows, mse_gradient(table.lookup(rows), targets[batch.indices]))
    return all_rows(table)


@pytest.mark.parametrize("ahead", [False, True])
def test_fit_trains_every_sample_of_every_epoch(ids: np.ndarray, targets: np.ndarray, ahead: bool) -> None:
    order = bb.BlockOrder([ids], blocks=5)
    layer = Embedding(ROWS, DIM, seed=SEED)
    model = row_model(layer)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    dataset = block_dataset(order, (ids, targets), SIZE)
    model.fit(lookahead(dataset, model) if ahead else dataset, epochs=3, verbose=0)
    assert layer.table.step == 3 * order.num_batches(0, SIZE)
    np.testing.assert_allclose(all_rows(layer.table), expected_rows(order, ids, targets, 3), rtol=0, atol=1e-6)


def test_a_model_that_fit_builds_first_starts_with_the_first_epoch(ids: np.ndarray, targets: np.ndarray) -> None:
    order = bb.BlockOrder([ids], blocks=5)
    layer = Embedding(ROWS, DIM, seed=SEED)

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def call(self, ids: Any) -> Any:
            return self.layer(ids)

    model = Model()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(block_dataset(order, (ids, targets), SIZE), epochs=2, verbose=0)
    np.testing.assert_allclose(all_rows(layer.table), expected_rows(order, ids, targets, 2), rtol=0, atol=1e-6)


def test_a_table_larger_than_its_ram_reads_little(tmp_path: Path) -> None:
    rows, dim, samples = 4_000, 64, 16_000
    with bb.create(tmp_path / "rows", dim=dim, num_rows=rows, optimizer=bb.Adam(0.01), ram="64MiB") as table:
        table.set(np.arange(rows), np.zeros((rows, dim), np.float32))
        suggested = bb.suggest_blocks([table], ram="1MiB")
    ids = np.random.default_rng(0).integers(0, rows, samples)
    missed = {}
    for blocks in (1, suggested):
        layer = Embedding(rows, dim, path=tmp_path / "rows", ram="1MiB", optimizer=bb.Adam(0.01))
        model = row_model(layer)
        model.compile(keras.optimizers.Adam(0.01), "mse")
        order = bb.BlockOrder([ids], blocks)
        model.fit(block_dataset(order, (ids, np.ones((samples, dim), np.float32)), 200), verbose=0)
        missed[blocks] = layer.table.stats()["misses"]
        layer.table.close(commit=False)
    assert missed[suggested] < 1.3 * rows < 0.5 * missed[1]


@pytest.mark.parametrize(
    ("order", "arrays", "size", "epoch", "error", "message"),
    [
        ([1], np.arange(4), 2, 0, TypeError, "block_dataset: order must be a bunkbed.BlockOrder, got list"),
        (None, np.arange(4), 0, 0, ValueError, "block_dataset: batch_size must be in [1, "),
        (None, np.arange(4), 2, -1, ValueError, "block_dataset: epoch must be in [0, "),
        (None, (np.arange(4), np.zeros((3, 2))), 2, 0, ValueError, "array 1 must have one entry for each of the 4 sam"),
        (
            None,
            {"a": 3},
            2,
            0,
            ValueError,
            "array 0 must have one entry for each of the 4 samples of the order, got int64[]",
        ),
        (None, [np.arange(4), np.arange(5)], 2, 0, ValueError, "array 1 must have one entry for each"),
    ],
)
def test_bad_arguments_are_refused(
    order: Any, arrays: Any, size: int, epoch: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        block_dataset(order or bb.BlockOrder([np.arange(4)], 2), arrays, size, epoch=epoch)
