"""Saved Keras models refer to kept epochs of the table; loading goes back to them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.adapters import ram_rows
from bunkbed.keras import Embedding, moved
from keras_setup import BATCH, DIM, ROWS, SEED, all_rows, batches, keras, row_model, tf


def model_on(path: Path | None, **arguments):
    layer = Embedding(ROWS, DIM, seed=SEED, path=path, name="rows", **arguments)
    model = row_model(layer)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return layer, model


def fit(model, seed: int = 0) -> None:
    ids, targets = batches(4, seed)
    model.fit(ids, targets, batch_size=BATCH, shuffle=False, verbose=0)


@pytest.mark.parametrize("in_ram", [False, True])
@pytest.mark.parametrize("way", ["weights.h5", "weights", "checkpoint"])
def test_loading_goes_back_to_the_saved_epoch_optimizer_state_too(tmp_path: Path, way: str, in_ram: bool) -> None:
    layer, model = model_on(None if in_ram else tmp_path / "user")
    fit(model)
    rows, slot = all_rows(layer.table), layer.table.get(np.arange(ROWS), "exp_avg_sq")
    if way == "weights.h5":
        model.save_weights(tmp_path / "m.weights.h5")
        back = lambda: model.load_weights(tmp_path / "m.weights.h5")  # noqa: E731
    elif way == "weights":
        kept = model.get_weights()
        back = lambda: model.set_weights(kept)  # noqa: E731
    else:
        saved = tf.train.Checkpoint(model=model).save(tmp_path / "ckpt")
        back = lambda: tf.train.Checkpoint(model=model).restore(saved)  # noqa: E731
    fit(model, 1)
    assert np.abs(all_rows(layer.table) - rows).max() > 1e-3
    back()
    np.testing.assert_array_equal(all_rows(layer.table), rows)
    np.testing.assert_array_equal(layer.table.get(np.arange(ROWS), "exp_avg_sq"), slot)

    fit(model, 1)  # goes on as the first time
    again = all_rows(layer.table)
    back()
    fit(model, 1)
    np.testing.assert_array_equal(all_rows(layer.table), again)


def test_early_stopping_restores_the_best_epoch(tmp_path: Path) -> None:
    layer, model = model_on(tmp_path / "user")
    ids, targets = batches(4)
    losses = []

    class Worse(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            losses.append(all_rows(layer.table))
            logs["val"] = [3.0, 1.0, 2.0, 4.0][epoch]

    stop = keras.callbacks.EarlyStopping("val", patience=2, restore_best_weights=True, mode="min")
    model.fit(ids, targets, batch_size=BATCH, verbose=0, epochs=9, callbacks=[Worse(), stop])
    assert len(losses) == 4
    np.testing.assert_array_equal(all_rows(layer.table), losses[1])


def test_a_keras_file_is_loaded_by_another_process(tmp_path: Path) -> None:
    layer, model = model_on(tmp_path / "user", mask_zero=True)
    fit(model)
    model.save(tmp_path / "model.keras")
    rows = all_rows(layer.table)
    np.save(tmp_path / "rows.npy", rows)
    fit(model, 1)
    layer.table.close()
    code = f"""
        import numpy as np, keras
        import bunkbed.keras
        model = keras.models.load_model(r"{tmp_path}/model.keras")
        layer = model.get_layer("rows")
        assert layer.mask_zero and layer.table.step == 4 and layer.table.optimizer.betas == (0.9, 0.999)
        np.testing.assert_array_equal(layer.table.get(np.arange({ROWS})), np.load(r"{tmp_path}/rows.npy"))
        model.fit(np.arange(16), np.zeros((16, {DIM}), np.float32), verbose=0)
        assert layer.table.step == 5
        print("well")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.stdout == "well\n", done.stderr[-2000:]


def test_a_table_that_was_moved_is_found_where_it_is_said_to_be(tmp_path: Path) -> None:
    layer, model = model_on(tmp_path / "old")
    fit(model)
    rows = all_rows(layer.table)
    model.save(tmp_path / "model.keras")
    layer.table.close()
    (tmp_path / "old").rename(tmp_path / "new")
    with pytest.raises(ValueError, match=r"refers to the table at .*old, and there is none; if it was moved"):
        keras.models.load_model(tmp_path / "model.keras")
    assert not (tmp_path / "old").exists()
    with moved({tmp_path / "old": tmp_path / "new"}):
        loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(all_rows(loaded.get_layer("rows").table), rows)


def test_a_dropped_epoch_is_an_error_that_lists_what_remains(tmp_path: Path) -> None:
    layer, model = model_on(tmp_path / "user", keep_checkpoints=2)
    fit(model)
    model.save_weights(tmp_path / "0.weights.h5")
    for number in (1, 2):
        fit(model, number)
        model.save_weights(tmp_path / f"{number}.weights.h5")
    rows = all_rows(layer.table)
    with pytest.raises(
        ValueError, match=r"commit 1 was dropped, .* copy; it keeps 'keras-000002' \(commit 2\), 'keras-000003'"
    ):
        model.load_weights(tmp_path / "0.weights.h5")
    np.testing.assert_array_equal(all_rows(layer.table), rows)
    model.load_weights(tmp_path / "1.weights.h5")


def test_saving_again_without_a_change_commits_nothing(tmp_path: Path) -> None:
    layer, model = model_on(tmp_path / "user")
    fit(model)
    for _ in range(5):
        model.save_weights(tmp_path / "m.weights.h5")
        model.get_weights()
    assert layer.table.epoch == 2 and layer.table.snapshots() == {"keras-000001": 1, "get_weights-000001": 2}


def test_weights_of_another_table_are_refused(tmp_path: Path) -> None:
    _, model = model_on(tmp_path / "user")
    fit(model)
    other, second = model_on(tmp_path / "other")
    fit(second)
    with pytest.raises(ValueError, match="refer to another table's epoch"):
        second.set_weights(model.get_weights())
    model.save_weights(tmp_path / "m.weights.h5")
    with pytest.raises(ValueError, match="but the layer has opened another one"):
        second.load_weights(tmp_path / "m.weights.h5")
    assert other.table.step == 4


def test_a_table_in_ram_beyond_the_bound_cannot_be_loaded_elsewhere(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(ram_rows, "MOST_BYTES", 100)
    _, model = model_on(None)
    fit(model)
    with pytest.warns(UserWarning, match=r"rows are not saved.*give the layer a path="):
        model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match=r"in RAM only, which ended with its process; give path="):
        keras.models.load_model(tmp_path / "model.keras")


def test_another_input_dim_on_load_is_an_error_that_names_both(tmp_path: Path) -> None:
    layer, model = model_on(tmp_path / "user")
    fit(model)
    with pytest.raises(ValueError, match=f"input_dim={ROWS + 1} was given, but table 'user' has {ROWS}"):
        Embedding(ROWS + 1, DIM, path=tmp_path / "user")
    with pytest.raises(ValueError, match=f"output_dim={DIM + 1} was given, but table 'user' has {DIM}"):
        Embedding(ROWS, DIM + 1, path=tmp_path / "user")
    layer.table.lookup([0])  # still open


def test_rows_of_a_keras_layers_embedding_are_taken_over(tmp_path: Path) -> None:
    plain = keras.layers.Embedding(ROWS, DIM, name="rows")
    source = row_model(plain)
    source.save_weights(tmp_path / "m.weights.h5")
    layer, model = model_on(tmp_path / "user")
    model.load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_array_equal(layer(np.arange(ROWS)).numpy(), plain.embeddings.numpy())
    fit(model)
    assert len(layer.table) == ROWS

    wrong = keras.layers.Embedding(ROWS + 1, DIM, name="rows")
    row_model(wrong).save_weights(tmp_path / "w.weights.h5")
    with pytest.raises(ValueError, match=r"weights must be float32\[50, 4\], got shape \[51, 4\]"):
        model_on(tmp_path / "second")[1].load_weights(tmp_path / "w.weights.h5")


def test_a_config_makes_the_same_layer(tmp_path: Path) -> None:
    layer = Embedding(
        ROWS, DIM, "random_normal", combiner="sqrtn", optimizer=bb.RowwiseAdagrad(0.2), dtype="bfloat16", ram="64MiB",
        path=tmp_path / "user", seed=9, keep_checkpoints=None,
    )  # fmt: skip
    again = Embedding.from_config(layer.get_config())
    assert again.table is layer.table and again.get_config() == layer.get_config()
    assert layer.table.dtype == "bfloat16" and layer.table.init == bb.Normal(0.05) and layer.table.seed == 9
    clone = keras.models.clone_model(row_model(Embedding(ROWS, DIM, path=tmp_path / "user2")))
    assert clone.layers[-1].get_config()["path"] == str(tmp_path / "user2")


def test_rows_that_are_in_no_table_yet_are_not_lost_by_saving(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).random((ROWS, DIM), np.float32)
    model = row_model(Embedding(ROWS, DIM, weights=weights, path=tmp_path / "follows", trainable=False))
    with pytest.raises(
        ValueError, match=r"the rows that were given are in no table yet.*or bunkbed.SGD\(0.0\) for rows"
    ):
        model.save(tmp_path / "model.keras")
    frozen = Embedding(ROWS, DIM, weights=weights, path=tmp_path / "own", trainable=False, optimizer=bb.SGD(0.0))
    model = row_model(frozen)
    model.save(tmp_path / "model.keras")
    frozen.table.close()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(np.arange(ROWS), verbose=0), weights)


def test_a_layer_on_a_stored_table_is_saved_as_the_table_is(tmp_path: Path) -> None:
    """Its initialiser and seed are the table's, not the layer's defaults."""
    bb.create(tmp_path / "user", dim=DIM, num_rows=ROWS, optimizer=bb.Adam(), init=bb.Normal(0.3), seed=77).close()
    layer = Embedding(ROWS, DIM, path=tmp_path / "user", name="rows")
    model = row_model(layer)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    fit(model)
    model.save(tmp_path / "model.keras")
    config = layer.get_config()
    layer.table.close()
    loaded = keras.models.load_model(tmp_path / "model.keras").get_layer("rows")
    assert (loaded.table.init, loaded.table.seed, loaded.table.step) == (bb.Normal(0.3), 77, 4)
    assert loaded.get_config() == config
    loaded.table.close()


def test_a_saved_model_is_refused_with_the_alternatives(tmp_path: Path) -> None:
    _, model = model_on(tmp_path / "user")
    fit(model)
    with pytest.raises(ValueError, match=r"table 'user' cannot be part of a SavedModel.*bunkbed\.keras\.export\(model"):
        model.export(tmp_path / "saved")


def served(path: Path, inputs) -> np.ndarray:
    """What another process gets of a SavedModel, which never imports bunkbed."""
    np.savez(path.parent / "in.npz", **inputs)
    code = f"""
        import sys, numpy as np, tensorflow as tf
        sys.modules["bunkbed"] = None
        model = tf.saved_model.load(r"{path}")
        inputs = np.load(r"{path.parent}/in.npz")
        arrays = [tf.constant(inputs[name]) for name in inputs]
        np.save(r"{path.parent}/out.npy", model.serve(arrays if len(arrays) > 1 else arrays[0]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]
    return np.load(path.parent / "out.npy")


@pytest.mark.parametrize("chunk_rows", [None, 7])
def test_export_copies_all_rows_of_a_small_table(tmp_path: Path, monkeypatch, chunk_rows: int | None) -> None:
    from bunkbed.keras import export as module

    if chunk_rows:
        monkeypatch.setattr(sys.modules["bunkbed.keras.export"], "_CHUNK_BYTES", chunk_rows * DIM * 4)
    layer = Embedding(ROWS, DIM, seed=SEED, path=tmp_path / "user")
    ids = keras.Input((3,), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(2)(keras.layers.Flatten()(layer(ids))))
    model.compile(keras.optimizers.Adam(0.1), "mse")
    bags = np.arange(ROWS - 2)[:, None] + np.arange(3)
    model.fit(bags[:20], np.ones((20, 2)), verbose=0)
    module(model, tmp_path / "saved", max_bytes="1MiB", verbose=False)
    np.testing.assert_allclose(served(tmp_path / "saved", {"x": bags}), model.predict(bags, verbose=0), atol=1e-6)
    with pytest.raises(ValueError, match=r"the rows take 800 bytes and max_bytes=100 allows 100; give what they take"):
        module(model, tmp_path / "second", max_bytes=100)


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_export_copies_the_used_rows_of_a_large_table(tmp_path: Path, combiner: str) -> None:
    from bunkbed.keras import export

    layer = Embedding(10**12, DIM, seed=SEED, path=tmp_path / "user", combiner=combiner, mask_zero=True)
    ids = keras.Input((3,), dtype="int64")
    model = keras.Model(ids, layer(ids))
    model.compile(keras.optimizers.Adam(0.1), "mse")
    used = np.random.default_rng(0).integers(1, 10**12, (40, 3))
    used[:5, 2] = 0  # padding
    model.fit(used, np.ones((40, DIM)), verbose=0)
    export(model, tmp_path / "saved", max_bytes="1MiB", verbose=False, untrained="zeros")
    np.testing.assert_allclose(served(tmp_path / "saved", {"x": used}), model.predict(used, verbose=0), atol=1e-6)
    new = np.array([[3, 5, 0]])  # two ids that were not trained, and padding
    assert not served(tmp_path / "saved", {"x": new}).any()
    export(model, tmp_path / "strict", max_bytes="1MiB", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "strict")
    with pytest.raises(tf.errors.InvalidArgumentError, match="never trained, so it is not part of this export"):
        loaded.serve(tf.constant(new))
    np.testing.assert_allclose(loaded.serve(tf.constant(used)), model.predict(used, verbose=0), atol=1e-6)


def test_printing_a_model_commits_nothing(tmp_path: Path) -> None:
    layer, model = model_on(tmp_path / "user")
    fit(model)
    model.summary(print_fn=lambda text: None)
    repr(model.weights)
    assert layer.table.epoch == 0


def test_weights_of_a_table_that_is_not_there_yet_are_set(tmp_path: Path) -> None:
    layer, model = model_on(None)
    model.set_weights(model.get_weights())
    fit(model)
    assert layer.table.step == 4
