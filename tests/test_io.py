"""Rows in and out: every format bit for bit, and what a file that does not fit is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bunkbed as bb

safetensors_numpy = pytest.importorskip("safetensors.numpy")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def table(tmp_path: Path) -> bb.Table:
    rng = np.random.default_rng(0)
    table = bb.create(tmp_path / "from", dim=6, num_rows=500, ram="1MiB")
    for _ in range(3):
        ids = rng.integers(0, 500, 200)
        table.update(ids, rng.standard_normal((200, 6)).astype(np.float32))
    return table


@pytest.mark.parametrize("suffix", [".parquet", ".safetensors"])
def test_records_come_back_bit_for_bit(table: bb.Table, tmp_path: Path, suffix: str) -> None:
    seen: list[tuple[int, int]] = []
    slots = ("weight", "exp_avg", "exp_avg_sq")
    file = tmp_path / f"rows{suffix}"
    assert bb.export_rows(table, file, slots=slots, chunk=64, progress=lambda *at: seen.append(at)) == len(table)
    assert seen[-1] == (len(table), len(table))
    other = bb.create(tmp_path / "to", dim=6, num_rows=500, ram="1MiB")
    assert bb.import_rows(other, file, chunk=50) == len(table)
    everything = np.arange(500)
    np.testing.assert_array_equal(other.contains(everything), table.contains(everything))
    for slot in slots:
        np.testing.assert_array_equal(other.get(everything, slot), table.get(everything, slot))


@pytest.mark.parametrize("suffix", [".parquet", ".safetensors"])
def test_16_bit_records_come_back_bit_for_bit(tmp_path: Path, suffix: str) -> None:
    narrow = {"dtype": "bfloat16", "optimizer": bb.Adam(state_dtype="bfloat16")}
    rng = np.random.default_rng(0)
    table, slots = bb.create(tmp_path / "from", dim=5, num_rows=90, **narrow), ("weight", "exp_avg", "exp_avg_sq")
    for _ in range(3):
        table.update(np.arange(50), rng.standard_normal((50, 5)).astype(np.float32))
    bb.export_rows(table, tmp_path / f"rows{suffix}", slots=slots)
    other = bb.create(None, dim=5, num_rows=90, **narrow)
    bb.import_rows(other, tmp_path / f"rows{suffix}")
    wide = bb.create(None, dim=5, num_rows=90)
    bb.import_rows(wide, tmp_path / f"rows{suffix}")
    for slot in slots:
        for copy in (other, wide):
            np.testing.assert_array_equal(copy.get(np.arange(50), slot), table.get(np.arange(50), slot))


def test_npy_holds_every_id(table: bb.Table, tmp_path: Path) -> None:
    file = tmp_path / "rows.npy"
    assert bb.export_rows(table, file, chunk=77) == 500
    rows = np.load(file)
    np.testing.assert_array_equal(rows, table.get(np.arange(500)))
    other = bb.create(None, dim=6, num_rows=1000)
    bb.import_rows(other, file, ids=np.arange(500) + 500)
    np.testing.assert_array_equal(other.lookup(np.arange(500) + 500), rows)


def test_other_libraries_read_and_write_the_files(table: bb.Table, tmp_path: Path) -> None:
    bb.export_rows(table, tmp_path / "rows.safetensors")
    tensors = safetensors_numpy.load_file(tmp_path / "rows.safetensors")
    np.testing.assert_array_equal(tensors["weight"], table.lookup(tensors["id"]))
    bb.export_rows(table, tmp_path / "rows.parquet")
    columns = parquet.read_table(tmp_path / "rows.parquet")
    weights = np.array(columns["weight"].to_pylist(), np.float32)
    np.testing.assert_array_equal(weights, table.lookup(columns["id"].to_numpy()))
    values = np.ones((10, 6), np.float32)
    safetensors_numpy.save_file({"weight": values}, tmp_path / "plain.safetensors")
    bb.import_rows(table, tmp_path / "plain.safetensors")
    np.testing.assert_array_equal(table.lookup(np.arange(10)), values)


def test_a_file_that_does_not_fit_is_named(table: bb.Table, tmp_path: Path) -> None:
    np.save(tmp_path / "wide.npy", np.zeros((3, 7), np.float32))
    with pytest.raises(ValueError, match=r"wide.npy: rows must be float32\[N, 6\], got float32\[3, 7\]"):
        bb.import_rows(table, tmp_path / "wide.npy")
    np.save(tmp_path / "double.npy", np.zeros((3, 6)))
    with pytest.raises(TypeError, match=r"must be float32\[N, 6\], got float64\[3, 6\]"):
        bb.import_rows(table, tmp_path / "double.npy")
    np.save(tmp_path / "rows.npy", np.zeros((3, 6), np.float32))
    with pytest.raises(ValueError, match="holds 3 rows, ids names 2"):
        bb.import_rows(table, tmp_path / "rows.npy", ids=[1, 2])
    before = table.get(np.arange(500))
    with pytest.raises(IndexError, match="id 500 at position 1 is outside"):
        bb.import_rows(table, tmp_path / "rows.npy", ids=[1, 500, 2], chunk=1)
    np.testing.assert_array_equal(table.get(np.arange(500)), before)
    with pytest.raises(ValueError, match=r"cannot tell the format of .*rows.txt; its name must end in one of .npy"):
        bb.import_rows(table, tmp_path / "rows.txt")
    (tmp_path / "bad.safetensors").write_bytes(b"not one")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        bb.import_rows(table, tmp_path / "bad.safetensors")


def test_an_export_that_fails_leaves_nothing(table: bb.Table, tmp_path: Path) -> None:
    target = tmp_path / "rows.parquet"
    target.write_bytes(b"before")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bb.export_rows(table, target, progress=stop)
    assert target.read_bytes() == b"before"
    assert not list(tmp_path.glob(".rows*"))
    with pytest.raises(ValueError, match=r"takes any id, which .npy cannot name"):
        bb.export_rows(bb.create(None, dim=2), tmp_path / "any.npy")
