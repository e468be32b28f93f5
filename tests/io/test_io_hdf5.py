"""HDF5 files of every layout: rows are read and written in place where possible, otherwise through h5py."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.io.formats import hdf5

h5py = pytest.importorskip("h5py")

EVERY = np.arange(400)
ROWS = np.random.default_rng(0).standard_normal((400, 5)).astype(np.float32)
#: Arguments of `File.create_dataset`, and whether the rows can be read in place.
LAYOUTS: dict[str, tuple[dict[str, Any], bool]] = {
    "contiguous": ({}, True),
    "16 bits": ({"dtype": "<f2"}, True),
    "big-endian": ({"dtype": ">f4"}, False),
    "16 bits big-endian": ({"dtype": ">f2"}, False),
    "chunked": ({"chunks": (64, 3)}, False),
    "compressed": ({"chunks": (64, 5), "compression": "gzip"}, False),
}


@pytest.fixture
def empty() -> Iterator[bb.Table]:
    with bb.create(None, dim=5, num_rows=400, seed=9) as made:
        yield made


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way rows were read."""
    ways: list[str] = []

    def spied(name: str) -> Any:
        read = getattr(hdf5, name)
        return lambda *args: (ways.append(name), read(*args))[1]

    for name in ("rows_of_file", "_rows_of"):
        monkeypatch.setattr(hdf5, name, spied(name))
    return ways


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("userblock", [0, 1024])
def test_every_layout_comes_in(empty: bb.Table, taken: list[str], tmp_path: Path, layout: str, userblock: int) -> None:
    given, is_in_place = LAYOUTS[layout]
    with h5py.File(tmp_path / "rows.h5", "w", userblock_size=userblock) as file:
        file["before"] = np.arange(7)
        file.create_dataset("w", **{"dtype": "<f4", **given}, shape=ROWS.shape)[:] = ROWS
    assert bb.import_rows(empty, tmp_path / "rows.h5", name="w", chunk=33) == 400
    wanted = ROWS.astype(given.get("dtype", "<f4")).astype(np.float32)
    np.testing.assert_array_equal(empty.lookup(EVERY).view(np.uint32), wanted.view(np.uint32))
    assert taken == ["rows_of_file" if is_in_place else "_rows_of"] * 2  # the check, then the import


def test_rows_that_were_never_written_or_are_few_come_in(empty: bb.Table, tmp_path: Path) -> None:
    """As HDF5 has them: the value they are filled with, or among what describes a small array."""
    compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    compact.set_layout(h5py.h5d.COMPACT)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("filled", ROWS.shape, "<f4", fillvalue=2.5)
        h5py.h5d.create(file.id, b"compact", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((400, 5)), compact)
        file["compact"][:] = ROWS
    for name, wanted in {"filled": np.full_like(ROWS, 2.5), "compact": ROWS}.items():
        bb.import_rows(empty, tmp_path / "rows.h5", name=name, chunk=90)
        np.testing.assert_array_equal(empty.lookup(EVERY), wanted)


def test_an_export_is_plain_hdf5(empty: bb.Table, tmp_path: Path) -> None:
    empty.update(EVERY[::-3], np.ones((134, 5), np.float32))
    bb.export_rows(empty, tmp_path / "rows.weights.h5", name="layers/user/vars/0")
    with h5py.File(tmp_path / "rows.weights.h5", "r") as file:
        dataset = file["layers/user/vars/0"]
        assert dataset.chunks is None and dataset.dtype == np.dtype("<f4")
        np.testing.assert_array_equal(dataset[:], empty.lookup(EVERY))
    cut = (tmp_path / "rows.weights.h5").read_bytes()[:-100]
    (tmp_path / "cut.h5").write_bytes(cut)
    with pytest.raises(ValueError, match=r"cut.h5 is not an HDF5 file: .*truncated"):
        bb.import_rows(empty, tmp_path / "cut.h5")


def keras_file(path: Path, compress_type: int, **given: Any) -> dict[str, Any]:
    """The layout of Keras, with the state of Adam, of which one array is made with `given`."""
    rng = np.random.default_rng(1)
    state = {slot: rng.random((400, 5), np.float32) for slot in ("exp_avg", "exp_avg_sq")}
    weights = io.BytesIO()
    with h5py.File(weights, "w") as file:
        file.create_dataset("layers/embedding/vars/0", data=ROWS)
        for at, value in enumerate([np.int64(7), np.float32(0.1)]):
            file.create_dataset(f"optimizer/vars/{at}", data=value)
        file.create_dataset("optimizer/vars/2", data=state["exp_avg"])
        file.create_dataset("optimizer/vars/3", data=state["exp_avg_sq"], **given)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", json.dumps({"compile_config": {"optimizer": {"class_name": "Adam"}}}))
        archive.writestr("model.weights.h5", weights.getbuffer(), compress_type)
    return {"weight": ROWS, **state}


@pytest.mark.parametrize("given", [{}, {"chunks": (50, 5), "compression": "gzip"}])
def test_a_keras_file_comes_in_from_its_archive(
    empty: bb.Table, taken: list[str], tmp_path: Path, given: dict[str, Any]
) -> None:
    wanted = keras_file(tmp_path / "rows.keras", zipfile.ZIP_STORED, **given)
    bb.import_rows(empty, tmp_path / "rows.keras", chunk=70)
    assert empty.step == 7
    for slot, rows in wanted.items():
        np.testing.assert_array_equal(empty.get(EVERY, slot), rows)
    assert taken == ["rows_of_file", "rows_of_file", "_rows_of" if given else "rows_of_file"] * 2


def test_a_keras_file_that_is_compressed_or_cut_is_named(empty: bb.Table, tmp_path: Path) -> None:
    keras_file(tmp_path / "a.keras", zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match=r"a.keras is compressed; extract its model.weights.h5 and import that"):
        bb.import_rows(empty, tmp_path / "a.keras")
    keras_file(tmp_path / "b.keras", zipfile.ZIP_STORED)
    with pytest.raises(ValueError, match=r"b.keras ends after \d+ bytes, in the middle of its rows"):
        bb.import_rows(
            empty, tmp_path / "b.keras", chunk=100, checking=lambda *at: os.truncate(tmp_path / "b.keras", 5000)
        )
    assert len(empty) == 0
