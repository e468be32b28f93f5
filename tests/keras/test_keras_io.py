"""Keras's and TensorFlow's files: weights by name, bit for bit, and the state of a ``.keras`` file."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.io.formats import tensorflow_checkpoint
from io_setup import check_whole_or_not_at_all
from keras_setup import keras, tf

h5py = pytest.importorskip("h5py")

EVERY = np.arange(40)


@pytest.fixture
def table() -> Iterator[bb.Table]:
    with bb.create(None, dim=5, num_rows=40) as made:
        made.update(EVERY[::3], np.ones((14, 5), np.float32))
        yield made


@pytest.fixture
def empty() -> Iterator[bb.Table]:
    with bb.create(None, dim=5, num_rows=40, seed=9) as made:
        yield made


def model_of(*rows: int, optimizer: Any = None) -> Any:
    """Embeddings of 5 numbers, one after the other, trained a little where there is an optimizer."""
    inputs = [keras.Input((1,), dtype="int64") for _ in rows]
    outputs = [keras.layers.Embedding(count, 5)(one) for count, one in zip(rows, inputs, strict=True)]
    model = keras.Model(inputs, [keras.layers.Dense(1)(one) for one in outputs])
    model.compile(optimizer, ["mse"] * len(rows), run_eagerly=True)
    if optimizer is not None:
        ids = [np.arange(8)[:, None] % count for count in rows]
        for _ in range(3):
            model.train_on_batch(ids, [np.ones((8, 1, 1))] * len(rows))
    return model


def weights_of(model: Any) -> list[Any]:
    return [layer.get_weights()[0] for layer in model.layers if isinstance(layer, keras.layers.Embedding)]


@pytest.mark.parametrize("name", ["rows.weights.h5", "rows.index"])
def test_rows_come_back_bit_for_bit(table: bb.Table, empty: bb.Table, tmp_path: Path, name: str) -> None:
    assert bb.export_rows(table, tmp_path / name) == 40
    assert bb.import_rows(empty, tmp_path / name, chunk=7) == 40
    np.testing.assert_array_equal(empty.lookup(EVERY), table.lookup(EVERY))


def test_an_export_is_there_whole_or_not_at_all(table: bb.Table, tmp_path: Path) -> None:
    check_whole_or_not_at_all(table, tmp_path, "tensorflow")


def test_keras_loads_what_we_export(table: bb.Table, tmp_path: Path) -> None:
    bb.export_rows(table, tmp_path / "rows.weights.h5")
    model = keras.Sequential([keras.Input((1,), dtype="int64"), keras.layers.Embedding(40, 5)])
    model.load_weights(tmp_path / "rows.weights.h5")
    np.testing.assert_array_equal(weights_of(model)[0], table.lookup(EVERY))


def test_tensorflow_restores_what_we_export(table: bb.Table, empty: bb.Table, tmp_path: Path) -> None:
    bb.export_rows(table, tmp_path / "rows", format="tensorflow", name="user")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["rows.data-00000-of-00001", "rows.index"]
    variable = tf.Variable(tf.zeros((40, 5)))
    tf.train.Checkpoint(user=variable).read(str(tmp_path / "rows")).assert_consumed()
    np.testing.assert_array_equal(variable.numpy(), table.lookup(EVERY))
    with pytest.raises(FileExistsError, match=r"rows.data-00000-of-00001 exists already"):
        bb.export_rows(table, tmp_path / "rows.index")


def test_a_tensor_is_in_memory_once(
    table: bb.Table, empty: bb.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What TensorFlow writes are the rows that were gathered, not a copy; what it read is kept for the import."""
    gathered: list[Any] = []
    gather, load = tensorflow_checkpoint.gather, tf.train.load_checkpoint

    class Checkpoint(tf.train.Checkpoint):  # type: ignore[misc, name-defined]
        def write(self, *args: Any) -> Any:
            gathered[0][3] = 7
            return super().write(*args)

    monkeypatch.setattr(tf.train, "Checkpoint", Checkpoint)
    monkeypatch.setattr(tensorflow_checkpoint, "gather", lambda *args: (gathered.append(args[2]), gather(*args))[1])
    bb.export_rows(table, tmp_path / "rows.index")
    wanted = table.lookup(EVERY)
    wanted[3] = 7
    readings: list[str] = []

    def spied(prefix: str) -> Any:
        reader = load(prefix)
        return SimpleNamespace(
            get_variable_to_dtype_map=reader.get_variable_to_dtype_map,
            get_variable_to_shape_map=reader.get_variable_to_shape_map,
            get_tensor=lambda name: (readings.append(name), reader.get_tensor(name))[1],
        )

    monkeypatch.setattr(tf.train, "load_checkpoint", spied)
    bb.import_rows(empty, tmp_path / "rows.index", chunk=7)
    np.testing.assert_array_equal(empty.lookup(EVERY), wanted)
    assert len(readings) == 1


def test_one_of_two_files_that_appears_meanwhile_stops_both(table: bb.Table, tmp_path: Path) -> None:
    index = tmp_path / "rows.index"
    with pytest.raises(FileExistsError, match=r"rows.index exists already"):
        bb.export_rows(table, index, progress=lambda *at: index.write_bytes(b"theirs"))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.index"] and index.read_bytes() == b"theirs"


def test_a_checkpoint_of_tensorflow_comes_in_by_name(empty: bb.Table, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((2, 40, 5)).astype(np.float32)
    half = tf.cast(tf.constant(values[0]), tf.bfloat16)
    saved = tf.train.Checkpoint(user=tf.Variable(values[0]), item=tf.Variable(values[1]), half=tf.Variable(half))
    prefix = saved.save(str(tmp_path / "ckpt"))
    with pytest.raises(ValueError, match=r"has 3 matrices, say which one with name=: half \[40, 5\], item"):
        bb.import_rows(empty, f"{prefix}.index")
    bb.import_rows(empty, f"{prefix}.index", name="item", chunk=7)
    np.testing.assert_array_equal(empty.lookup(EVERY), values[1])
    bb.import_rows(empty, prefix, format="tensorflow", name="half")
    np.testing.assert_array_equal(empty.lookup(EVERY), tf.cast(half, tf.float32).numpy())
    with pytest.raises(ValueError, match=r"has no variable 'users'; its matrices are: half"):
        bb.import_rows(empty, f"{prefix}.index", name="users")
    with pytest.raises(FileNotFoundError, match=r"No such checkpoint: .*none.index"):
        bb.import_rows(empty, tmp_path / "none", format="tensorflow")
    Path(f"{prefix}.index").write_bytes(b"no index")
    with pytest.raises(ValueError, match="is not a TensorFlow checkpoint"):
        bb.import_rows(empty, f"{prefix}.index")


@pytest.mark.parametrize("kind", ["Adam", "Adagrad"])
def test_a_keras_file_comes_in_with_its_state(kind: str, tmp_path: Path) -> None:
    model = model_of(40, 30, optimizer=getattr(keras.optimizers, kind)(0.1))
    model.save(tmp_path / "model.keras")
    optimizer = bb.Adam() if kind == "Adam" else bb.Adagrad()
    weights = weights_of(model)
    state = [one.numpy() for one in model.optimizer.variables if tuple(one.shape) == (40, 5)]
    with bb.create(None, dim=5, num_rows=40, optimizer=optimizer) as table:
        with h5py.File(_extracted(tmp_path / "model.keras"), "r") as file:
            names: list[str] = []
            file.visititems(lambda name, one: names.append(name) if getattr(one, "shape", 0) == (40, 5) else None)
        (name,) = [one for one in names if not one.startswith("optimizer")]
        with pytest.raises(
            ValueError, match=r"has 4 matrices, say which one with name=: layers/dense/vars/0 \[5, 1\], "
        ):
            bb.import_rows(table, tmp_path / "model.keras")
        bb.import_rows(table, tmp_path / "model.keras", name=name, chunk=7)
        np.testing.assert_array_equal(table.lookup(EVERY), weights[0])
        assert len(state) == len(table.slots) and table.step == 3
        for slot, values in zip(table.slots, state, strict=True):
            np.testing.assert_array_equal(table.get(EVERY, slot), values)


def test_state_that_could_be_anothers_is_refused(empty: bb.Table, tmp_path: Path) -> None:
    model = model_of(40, 40, optimizer=keras.optimizers.Adam(0.1))
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    name = "layers/embedding_1/vars/0"
    with pytest.raises(ValueError, match="2 weights and 4 arrays of state have its shape; leave state out"):
        bb.import_rows(empty, tmp_path / "model.keras", name=name)
    assert len(empty) == 0
    bb.import_rows(empty, tmp_path / "model.keras", name=name, slots=("weight",))
    np.testing.assert_array_equal(empty.lookup(EVERY), weights_of(model)[1])
    bb.import_rows(empty, tmp_path / "model.weights.h5", name=name.replace("_1", ""))
    np.testing.assert_array_equal(empty.lookup(EVERY), weights_of(model)[0])
    assert empty.step == 0 and not empty.get(EVERY, "exp_avg").any()


def test_what_is_no_such_file_is_named(empty: bb.Table, tmp_path: Path) -> None:
    (tmp_path / "a.weights.h5").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"a.weights.h5 is not an HDF5 file"):
        bb.import_rows(empty, tmp_path / "a.weights.h5")
    (tmp_path / "a.keras").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"a.keras is not a .keras file"):
        bb.import_rows(empty, tmp_path / "a.keras")
    with zipfile.ZipFile(tmp_path / "b.keras", "w") as archive:
        archive.writestr("config.json", "{}")
    with pytest.raises(ValueError, match=r"b.keras has no model.weights.h5; it has: config.json"):
        bb.import_rows(empty, tmp_path / "b.keras")
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["w"] = np.zeros((3, 5))
    with pytest.raises(TypeError, match=r"w must be float32\[N, 5\], got float64\[3, 5\]"):
        bb.import_rows(empty, tmp_path / "c.h5")
    with pytest.raises(ValueError, match=r"has no array 'v'; its matrices are: w \[3, 5\]"):
        bb.import_rows(empty, tmp_path / "c.h5", name="v")
    with pytest.raises(ValueError, match="the format keras is only imported; export to one of npy"):
        bb.export_rows(empty, tmp_path / "d.keras")


def _extracted(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        return os.fspath(archive.extract("model.weights.h5", path.parent / "extracted"))
