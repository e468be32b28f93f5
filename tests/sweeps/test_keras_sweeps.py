"""Keras layers on tables whose rows go by rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.testing import ReferenceTable
from bunkbed.testing.compare import counts_of

keras = pytest.importorskip("keras", reason="keras is not installed")
pytest.importorskip("tensorflow", reason="tensorflow is not installed")
bk = pytest.importorskip("bunkbed.keras")


def test_a_layer_sweeps_and_comes_back_from_its_config(tmp_path: Path) -> None:
    rules = bb.Retention(expire=3, keep=2)
    layer = bk.Embedding(None, 4, path=tmp_path / "table", ram="16MiB", optimizer=bb.SGD(lr=0.1), retention=rules)
    model = keras.Sequential([keras.Input((1,), dtype="int64"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for first in range(0, 60, 10):
        model.fit(np.arange(first, first + 10).reshape(-1, 1), np.ones((10, 1)), batch_size=10, verbose=0)
    assert layer.table.sweep().expired == 30 and len(layer.table) == 30
    config = layer.get_config()
    assert config["retention"] == vars(rules)
    model.save(tmp_path / "model.keras")
    layer.table.close()
    again = keras.models.load_model(tmp_path / "model.keras")
    table = again.layers[0].table
    assert (table.retention, len(table), table.step) == (rules, 30, 6)
    table.close()


def test_a_layer_admits_rows(tmp_path: Path) -> None:
    rules = bb.Retention(admit=0.3)
    layer = bk.Embedding(None, 4, path=tmp_path / "table", ram="16MiB", optimizer=bb.SGD(lr=0.1), retention=rules)
    model = keras.Sequential([keras.Input((1,), dtype="int64"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.arange(400).reshape(-1, 1), np.ones((400, 1)), batch_size=100, shuffle=False, verbose=0)
    table = layer.table
    oracle = ReferenceTable(dim=4, seed=table.seed, admit=0.3, init=table.init)
    for first in range(0, 400, 100):
        oracle.update(np.arange(first, first + 100), np.ones((100, 4), np.float32))
    assert table.contains(np.arange(400)).tolist() == oracle.contains(np.arange(400)).tolist()
    assert layer.get_config()["retention"]["admit"] == 0.3
    model.save(tmp_path / "model.keras")
    table.close()
    again = keras.models.load_model(tmp_path / "model.keras").layers[0].table
    assert again.retention == rules and len(again) == len(oracle)
    again.close()


def test_a_loaded_model_keeps_the_rules_of_its_table(tmp_path: Path) -> None:
    where = {"path": tmp_path / "table", "ram": "16MiB", "optimizer": bb.SGD(lr=0.1)}
    layer = bk.Embedding(None, 4, retention=bb.Retention(max_rows=5), **where)
    model = keras.Sequential([keras.Input((1,), dtype="int64"), layer])
    layer.table.update(np.arange(20), np.ones((20, 4), np.float32))
    layer.table.retention = bb.Retention(max_rows=1000)
    layer.get_config()["retention"]["max_rows"] = 3
    model.save(tmp_path / "model.keras")
    layer.table.retention = bb.Retention(max_rows=2000)  # after the file was written
    layer.table.update([3], np.ones((1, 4), np.float32))
    layer.table.close()
    table = keras.models.load_model(tmp_path / "model.keras").layers[0].table
    assert table.retention == bb.Retention(max_rows=2000) and table.sweep().removed == 0
    table.close()


def test_weights_of_a_table_in_ram_have_ages(tmp_path: Path) -> None:
    rules = bb.Retention(expire=5, clock="event")

    def make() -> Any:
        layer = bk.Embedding(None, 2, seed=3, optimizer=bb.SGD(lr=0.1), retention=rules)
        return layer, keras.Sequential([keras.Input((1,), dtype="int64"), layer])

    layer, model = make()
    for day in range(20):
        layer.table.clock = day
        layer.table.update([day], np.ones((1, 2), np.float32))
    expected = layer.table.sweep(dry_run=True)
    model.save_weights(tmp_path / "model.weights.h5")
    other, again = make()
    again.load_weights(tmp_path / "model.weights.h5")
    assert other.table.clock == 19 and other.table.sweep(dry_run=True) == expected


def test_bad_rules_are_refused_before_training() -> None:
    with pytest.raises(ValueError, match=r"input_dim=100 was given.*give input_dim=None"):
        bk.Embedding(100, 4, retention=bb.Retention(expire=5))
    with pytest.raises(TypeError, match=r"retention must be a bunkbed\.Retention"):
        bk.Embedding(None, 4, retention={"expire": 5})


def test_weights_of_a_table_in_ram_have_counts(tmp_path: Path) -> None:
    def make() -> Any:
        layer = bk.Embedding(None, 4, optimizer=bb.SGD(lr=0.1), retention=bb.Retention(admit=3))
        return keras.Sequential([keras.Input((1,), dtype="int64"), layer])

    model, again = make(), make()
    table = model.layers[0].table
    for ids in ([1, 2, 3], [2, 3], [3, 4]):
        table.update(ids, np.ones((len(ids), 4), np.float32))
    model.save_weights(tmp_path / "model.weights.h5")
    again.load_weights(tmp_path / "model.weights.h5")
    other = again.layers[0].table
    assert other.contains([1, 2, 3, 4]).tolist() == [False, False, True, False]
    assert counts_of(other).tolist() == counts_of(table).tolist() == [[1, 1, 1], [2, 2, 2], [4, 1, 3]]
