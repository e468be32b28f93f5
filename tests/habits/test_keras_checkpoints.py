"""Checkpoints of Keras models as people write them: of every epoch, the best one, a backup; of tables in RAM, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import bunkbed as bb
from bunkbed.adapters import references
from bunkbed.keras import Embedding
from log_records import our_records

ROWS, DIM = 40, 4


def keras_model(layer: Any) -> Any:
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


def fit(model: Any, epochs: int = 1, **arguments: Any) -> Any:
    ids = np.array([[1, 2], [3, 3], [7, 1]])
    return model.fit(ids, np.ones((3, 2, 1), np.float32), epochs=epochs, verbose=0, shuffle=False, **arguments)


@pytest.mark.parametrize("way", ["model.keras", "model.weights.h5"])
@pytest.mark.parametrize("optimizer", [None, bb.Adagrad(0.1)])
def test_a_keras_model_in_ram_is_saved_with_its_rows(way: str, optimizer: Any, tmp_path: Path) -> None:
    model = keras_model(Embedding(ROWS, DIM, optimizer=optimizer, seed=1))
    fit(model, 3)
    everything = np.arange(ROWS).reshape(-1, 2)
    outputs, table = model.predict(everything, verbose=0), model.layers[0].table
    if way == "model.keras":
        model.save(tmp_path / way)
        loaded = keras.models.load_model(tmp_path / way)
    else:
        model.save_weights(tmp_path / way)
        loaded = keras_model(Embedding(ROWS, DIM, optimizer=optimizer, seed=2))
        loaded.load_weights(tmp_path / way)
    np.testing.assert_array_equal(loaded.predict(everything, verbose=0), outputs)
    made = loaded.layers[0].table
    assert made is not table and made.step == table.step == 3 and made.optimizer == table.optimizer
    for slot in table.slots:
        np.testing.assert_array_equal(made.get(np.arange(ROWS), slot), table.get(np.arange(ROWS), slot))
    fit(loaded)
    assert made.step == 4


def test_keras_rows_that_do_not_fit(tmp_path: Path) -> None:
    model = keras_model(Embedding(ROWS, DIM, optimizer=bb.Adagrad(0.1)))
    fit(model)
    model.save_weights(tmp_path / "m.weights.h5")
    for layer, message in (
        (Embedding(5, DIM, optimizer=bb.Adagrad(0.1)), r"a row with id 7 was saved"),
        (Embedding(ROWS, DIM, optimizer=bb.SGD(0.1)), r"have the state of SGD\("),
    ):
        other = keras_model(layer)
        with pytest.raises(ValueError, match=message):
            other.load_weights(tmp_path / "m.weights.h5")


def test_rows_that_do_not_fit_make_no_table(tmp_path: Path) -> None:
    model = keras_model(Embedding(ROWS, DIM))
    fit(model)
    model.save_weights(tmp_path / "m.weights.h5")
    layer = Embedding(5, DIM, path=tmp_path / "user", ram="8MiB")
    with pytest.raises(ValueError, match="a row with id 7 was saved"):
        keras_model(layer).load_weights(tmp_path / "m.weights.h5")
    assert not (tmp_path / "user").exists() and not layer._shared.has_table


def test_copies_of_a_table_in_ram_that_take_much_are_warned_of(caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(references, "_MANY_BYTES", 256)
    model = keras_model(Embedding(ROWS, DIM))
    shown = []
    for _ in range(9):
        fit(model)
        caplog.clear()
        model.get_weights()
        shown.append([one.getMessage() for one in our_records(caplog)])
    (line,) = next(lines for lines in shown if lines)
    assert "commits that a saved model may refer to" in line and "table.drop(NAME)" in line
    assert shown[0] == [] and sum(map(len, shown)) <= 4


@pytest.mark.parametrize("in_ram", [False, True])
def test_keras_model_checkpoints_of_every_epoch_load(in_ram: bool, tmp_path: Path) -> None:
    model = keras_model(Embedding(ROWS, DIM, path=None if in_ram else tmp_path / "user", ram="64MiB"))
    outputs = []
    ids = np.arange(ROWS).reshape(-1, 2)
    record = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: outputs.append(model.predict(ids, verbose=0))
    )
    saver = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    best = keras.callbacks.ModelCheckpoint(
        tmp_path / "best.weights.h5", save_best_only=True, save_weights_only=True, monitor="loss"
    )
    history = fit(model, 6, callbacks=[record, saver, best])
    for epoch in (1, 3, 6):
        loaded = keras.models.load_model(tmp_path / f"{epoch}.keras")
        np.testing.assert_array_equal(loaded.predict(ids, verbose=0), outputs[epoch - 1])
    model.load_weights(tmp_path / "best.weights.h5")
    place = int(np.argmin(history.history["loss"]))
    np.testing.assert_array_equal(model.predict(ids, verbose=0), outputs[place])


def test_keras_backup_and_restore(tmp_path: Path) -> None:
    def make() -> Any:
        keras.utils.set_random_seed(3)
        return keras_model(Embedding(ROWS, DIM, path=tmp_path / "user", ram="64MiB", seed=1))

    class Stops(keras.callbacks.Callback):  # type: ignore[misc]  # keras is untyped here
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    whole = keras_model(Embedding(ROWS, DIM, seed=1))
    model = make()
    whole.layers[1].set_weights(model.layers[1].get_weights())
    fit(whole, 5)
    backup = tmp_path / "backup"
    with pytest.raises(KeyboardInterrupt):
        fit(model, 5, callbacks=[Stops(), keras.callbacks.BackupAndRestore(backup)])
    model.layers[0].table.close()
    again = make()
    fit(again, 5, callbacks=[keras.callbacks.BackupAndRestore(backup)])
    np.testing.assert_array_equal(
        again.layers[0].table.get(np.arange(ROWS)), whole.layers[0].table.get(np.arange(ROWS))
    )
    again.layers[0].table.close()
