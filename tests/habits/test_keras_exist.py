"""What a Keras layer does where a table is at its path already, and what it says about it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import bunkbed as bb
from bunkbed.keras import Embedding, moved
from log_records import our_records

ROWS, DIM = 40, 4


def model_of(layer: Any) -> Any:
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer])
    model.compile(optimizer=keras.optimizers.SGD(0.5), loss="mse")
    return model


def train(model: Any) -> float:
    ids = np.array([[1, 2], [3, 3]])
    history = model.fit(ids, np.ones((2, 2, DIM), np.float32), epochs=3, verbose=0)
    return float(history.history["loss"][-1])


def test_opening_stored_rows_is_one_line(caplog: Any, tmp_path: Path) -> None:
    path = tmp_path / "user"
    layer = Embedding(ROWS, DIM, path=path, ram="8MiB")
    train(model_of(layer))
    layer.table.close()
    with caplog.at_level(logging.INFO, logger="bunkbed"):
        again = Embedding(ROWS, DIM, path=path, ram="8MiB")
        Embedding(ROWS, DIM, path=path, ram="8MiB")
    lines = [record.getMessage() for record in our_records(caplog)]
    assert lines == [f"opened {path}: 3 rows, step 3", f"shares the open table {path}: 3 rows, step 3"]
    again.table.close()


def test_exist_error_and_new(tmp_path: Path) -> None:
    path = tmp_path / "user"
    losses = []
    for _ in range(2):
        layer = Embedding(ROWS, DIM, path=path, ram="8MiB", seed=1, exist="new")
        losses.append(train(model_of(layer)))
        layer.table.commit()
    assert losses[0] == losses[1]
    with pytest.raises(FileExistsError, match="there is a table"):
        Embedding(ROWS, DIM, path=path, ram="8MiB", exist="error")
    other = Embedding(ROWS, DIM + 1, path=path, ram="8MiB", optimizer=bb.SGD(1.0), exist="new")
    with pytest.raises(bb.TableClosedError):
        layer(np.array([1]))
    assert other.table.step == 0
    other.table.close()
    with pytest.raises(ValueError, match='exist must be "open", "error" or "new", got \'no\''):
        Embedding(ROWS, DIM, exist="no")  # type: ignore[arg-type]


def test_a_saved_model_opens_its_table(tmp_path: Path) -> None:
    layer = Embedding(ROWS, DIM, path=tmp_path / "user", ram="8MiB", exist="error")
    model = model_of(layer)
    train(model)
    rows = layer(np.arange(5))
    model.save(tmp_path / "model.keras")
    layer.table.close()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.layers[0](np.arange(5)), rows)
    loaded.layers[0].table.close()


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_clone_that_shares_rows_warns(is_trained: bool, caplog: Any, tmp_path: Path) -> None:
    layer = Embedding(ROWS, DIM, path=tmp_path / "user", ram="8MiB")
    model = model_of(layer)
    if is_trained:
        train(model)
    with caplog.at_level(logging.WARNING, logger="bunkbed"):
        clone = keras.models.clone_model(model)
    assert [
        record.getMessage() for record in our_records(caplog) if "shares the rows of its table" in record.getMessage()
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="bunkbed"), moved({tmp_path / "user": tmp_path / "other"}):
        other = keras.models.clone_model(model)
    assert not our_records(caplog)
    assert other.layers[0]._shared is not layer._shared and clone.layers[0]._shared is layer._shared
