"""Rows in and out: what holds for every format, and the errors for a file that does not fit."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.io.formats import FORMATS, dense
from io_setup import check_whole_or_not_at_all

safetensors_numpy = pytest.importorskip("safetensors.numpy")
parquet = pytest.importorskip("pyarrow.parquet")
pa = pytest.importorskip("pyarrow")

EVERY = np.arange(500)
SLOTS = ("weight", "exp_avg", "exp_avg_sq")
#: Formats that hold stored rows with their ids, state and step.
RECORDS = [".parquet", ".arrow", ".safetensors"]
#: Formats whose library other tests ask for.
WRITTEN = [one.name for one in FORMATS if one.can_export and one.name not in ("tensorflow", "usearch")]


@pytest.fixture
def table(tmp_path: Path) -> Iterator[bb.Table]:
    """Rows trained in no order, of which not all are stored."""
    rng = np.random.default_rng(0)
    table = bb.create(tmp_path / "from", dim=6, num_rows=500, ram="1MiB")
    for _ in range(3):
        ids = rng.integers(0, 500, 200)
        table.update(ids, rng.standard_normal((200, 6)).astype(np.float32))
    yield table
    table.close(commit=False)


@pytest.fixture
def other() -> Iterator[bb.Table]:
    """A table to import into; untouched rows differ from those of `table`."""
    with bb.create(None, dim=6, num_rows=500, seed=9) as made:
        yield made


@pytest.mark.parametrize("suffix", RECORDS)
def test_records_come_back_bit_for_bit(table: bb.Table, other: bb.Table, tmp_path: Path, suffix: str) -> None:
    seen: list[tuple[int, int]] = []
    checked: list[tuple[int, int]] = []
    file = tmp_path / f"rows{suffix}"
    assert bb.export_rows(table, file, slots=SLOTS, chunk=64, progress=lambda *at: seen.append(at)) == len(table)
    assert seen[-1] == (len(table), len(table)) and len(seen) > 4
    done = bb.import_rows(other, file, chunk=50, checking=lambda *at: checked.append(at))
    assert done == len(table) and checked[-1] == (done, done)
    np.testing.assert_array_equal(other.contains(EVERY), table.contains(EVERY))
    stored = EVERY[table.contains(EVERY)]
    for slot in SLOTS:
        np.testing.assert_array_equal(other.get(stored, slot), table.get(stored, slot))
    assert other.step == table.step == 3
    # Training goes on with the same bits: state and step are whole.
    for one in (table, other):
        one.update(stored, np.ones((len(stored), 6), np.float32))
    np.testing.assert_array_equal(other.lookup(stored), table.lookup(stored))


@pytest.mark.parametrize("suffix", RECORDS)
def test_16_bit_records_come_back_bit_for_bit(tmp_path: Path, suffix: str) -> None:
    narrow: dict[str, Any] = {"dtype": "bfloat16", "optimizer": bb.Adam(state_dtype="bfloat16")}
    rng = np.random.default_rng(0)
    with (
        bb.create(tmp_path / "from", dim=5, num_rows=90, **narrow) as table,
        bb.create(None, dim=5, num_rows=90, **narrow) as other,
        bb.create(None, dim=5, num_rows=90) as wide,
    ):
        for _ in range(3):
            table.update(np.arange(50), rng.standard_normal((50, 5)).astype(np.float32))
        bb.export_rows(table, tmp_path / f"rows{suffix}", slots=SLOTS)
        for copy in (other, wide):
            bb.import_rows(copy, tmp_path / f"rows{suffix}")
            for slot in SLOTS:
                np.testing.assert_array_equal(copy.get(np.arange(50), slot), table.get(np.arange(50), slot))


@pytest.mark.parametrize("region_bytes", [1 << 20, 700, 5000])
@pytest.mark.parametrize("slot", ["weight", "exp_avg"])
def test_npy_holds_every_id(
    table: bb.Table, tmp_path: Path, region_bytes: int, slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has any number of regions, and the rows are in the log in another order."""
    monkeypatch.setattr(dense, "_REGION_BYTES", region_bytes)
    monkeypatch.setattr(dense, "_LEAST_ROWS", 7)
    seen: list[tuple[int, int]] = []
    file = tmp_path / "rows.npy"
    assert bb.export_rows(table, file, slots=(slot,), progress=lambda *at: seen.append(at)) == 500
    assert seen[-1] == (500, 500)
    rows = np.load(file)
    np.testing.assert_array_equal(rows, table.get(EVERY, slot))
    with bb.create(None, dim=6, num_rows=1000) as other:
        bb.import_rows(other, file, ids=EVERY + 500, chunk=33)
        np.testing.assert_array_equal(other.lookup(EVERY + 500), rows)


def test_npy_of_rows_in_order_is_written_as_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_REGION_BYTES", 1000)
    monkeypatch.setattr(dense, "_LEAST_ROWS", 7)
    rows = np.random.default_rng(1).standard_normal((500, 6)).astype(np.float32)
    np.save(tmp_path / "in.npy", rows)
    with bb.create(tmp_path / "t", dim=6, num_rows=500, optimizer=bb.SGD(), ram="1MiB") as table:
        bb.import_rows(table, tmp_path / "in.npy")

        def refuse(*args: Any) -> None:
            raise AssertionError("a row was set aside")

        monkeypatch.setattr(dense._Filling, "_complete", refuse)
        bb.export_rows(table, tmp_path / "out.npy", chunk=64)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), rows)


def test_npy_of_rows_in_order_some_of_which_were_trained_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their newest records lie at the end of the log, after their regions were written."""
    monkeypatch.setattr(dense, "_REGION_BYTES", 2000)
    monkeypatch.setattr(dense, "_SCAN_BYTES", 1000)
    monkeypatch.setattr(dense, "_LEAST_ROWS", 7)
    rows = np.random.default_rng(1).standard_normal((9000, 6)).astype(np.float32)
    np.save(tmp_path / "in.npy", rows)
    with bb.create(tmp_path / "t", dim=6, num_rows=9010, ram="1MiB") as table:
        bb.import_rows(table, tmp_path / "in.npy")
        table.commit()
        for ids in ([8000, 3, 4000, 77], [4001, 8001]):
            table.update(ids, np.ones((len(ids), 6), np.float32))
        table.commit()
        aside: list[int] = []
        complete = dense._Filling._complete

        def spy(filling: Any, region: int) -> None:
            aside.append(region in filling._written)
            complete(filling, region)

        monkeypatch.setattr(dense._Filling, "_complete", spy)
        bb.export_rows(table, tmp_path / "out.npy")
        np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), table.lookup(np.arange(9010)))
        assert any(aside), "no region was written before it was complete: the test tests nothing"


def test_a_sharded_table_goes_out_and_in(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    with (
        bb.ShardedTable.create(tmp_path / "s", shards=2, dim=6, num_rows=500, ram="32MiB") as table,
        bb.ShardedTable.create(tmp_path / "u", shards=3, dim=6, num_rows=500, ram="48MiB") as other,
    ):
        table.update(rng.integers(0, 500, 200), rng.standard_normal((200, 6)).astype(np.float32))
        bb.export_rows(table, tmp_path / "rows.safetensors", slots=SLOTS)
        bb.export_rows(table, tmp_path / "rows.npy")
        bb.import_rows(other, tmp_path / "rows.safetensors")
        np.testing.assert_array_equal(np.load(tmp_path / "rows.npy"), table.lookup(EVERY))
        stored = EVERY[table.contains(EVERY)]
        np.testing.assert_array_equal(other.get(stored, "exp_avg"), table.get(stored, "exp_avg"))
        assert other.step == 1


def test_other_libraries_read_and_write_the_files(table: bb.Table, tmp_path: Path) -> None:
    bb.export_rows(table, tmp_path / "rows.safetensors")
    tensors = safetensors_numpy.load_file(tmp_path / "rows.safetensors")
    np.testing.assert_array_equal(tensors["weight"], table.lookup(tensors["id"]))
    bb.export_rows(table, tmp_path / "rows.parquet")
    bb.export_rows(table, tmp_path / "rows.arrow")
    arrow = pa.ipc.open_file(str(tmp_path / "rows.arrow")).read_all()
    for columns in (parquet.read_table(tmp_path / "rows.parquet"), arrow):
        weights = np.array(columns["weight"].to_pylist(), np.float32)
        np.testing.assert_array_equal(weights, table.lookup(columns["id"].to_numpy()))
    values = np.ones((10, 6), np.float32)
    safetensors_numpy.save_file({"weight": values}, tmp_path / "plain.safetensors")
    bb.import_rows(table, tmp_path / "plain.safetensors")
    np.testing.assert_array_equal(table.lookup(np.arange(10)), values)
    lists = pa.table({"item": [7, 3], "vector": pa.array([[2.0] * 6, [4.0] * 6], pa.list_(pa.float32()))})
    parquet.write_table(lists, tmp_path / "lists.parquet")
    assert bb.import_rows(table, tmp_path / "lists.parquet", ids="item", name="vector") == 2
    np.testing.assert_array_equal(table.lookup([3, 7])[:, 0], [4.0, 2.0])


def test_16_bit_files_are_widened(other: bb.Table, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    rows = np.random.default_rng(0).standard_normal((20, 6)).astype(np.float16)
    for layout in (rows, np.asfortranarray(rows)):
        np.save(tmp_path / "half.npy", layout)
        bb.import_rows(other, tmp_path / "half.npy", chunk=6)
        np.testing.assert_array_equal(other.lookup(np.arange(20)), rows.astype(np.float32))
    brain = torch.randn(20, 6).bfloat16()
    save_file({"weight": brain}, tmp_path / "brain.safetensors")
    bb.import_rows(other, tmp_path / "brain.safetensors")
    np.testing.assert_array_equal(other.lookup(np.arange(20)), brain.float().numpy())


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
    with pytest.raises(ValueError, match=r"cannot tell the format of .*rows.txt; its name must end in one of .npy"):
        bb.import_rows(table, tmp_path / "rows.txt")
    with pytest.raises(ValueError, match="there is no format 'csv'; there are npy, parquet"):
        bb.import_rows(table, tmp_path / "rows.txt", format="csv")
    for name in ("bad.safetensors", "bad.parquet", "bad.arrow", "bad.npy"):
        (tmp_path / name).write_bytes(b"not one, though long enough")
        with pytest.raises(ValueError, match=rf"{name} is not a"):
            bb.import_rows(table, tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"none.npy"):
        bb.import_rows(table, tmp_path / "none.npy")
    with pytest.raises(ValueError, match="name='x' means nothing for the format npy"):
        bb.import_rows(table, tmp_path / "rows.npy", name="x")
    with pytest.raises(ValueError, match=r"holds no 'exp_avg'; it holds: weight"):
        bb.import_rows(table, tmp_path / "rows.npy", slots=("weight", "exp_avg"))
    with pytest.raises(ValueError, match="names no rows by words; leave vocab= out"):
        bb.import_rows(table, tmp_path / "rows.npy", vocab=tmp_path / "words")
    assert not (tmp_path / "words").exists()


@pytest.mark.parametrize(
    ("ids", "values", "message"),
    [
        ([1, 500, 2], 0.0, r"id 500 at position 1 is outside \[0, 500\) of table 'from'"),
        ([1, 2, -1], 0.0, "id -1 at position 2 is outside"),
        ([1, 2, 3], np.nan, r"weight of row 2 \(id 3\), element 4, is nan, which is not finite"),
        ([1, 2, 3], np.inf, r"weight of row 2 \(id 3\), element 4, is inf, which is not finite"),
    ],
)
@pytest.mark.parametrize("suffix", [".npy", *RECORDS])
def test_the_first_bad_id_or_value_is_named_and_nothing_changes(
    table: bb.Table, tmp_path: Path, suffix: str, ids: list[int], values: float, message: str
) -> None:
    rows = np.zeros((3, 6), np.float32)
    rows[2, 4] = values
    file = tmp_path / f"rows{suffix}"
    given = None
    if suffix == ".npy":
        np.save(file, rows)
        given = ids
    elif suffix == ".safetensors":
        safetensors_numpy.save_file({"id": np.array(ids), "weight": rows}, file)
    else:
        column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), 6)
        columns = pa.table({"id": pa.array(ids), "weight": column})
        if suffix == ".parquet":
            parquet.write_table(columns, file)
        else:
            with pa.ipc.new_file(str(file), columns.schema) as writer:
                writer.write_table(columns)
    before = table.get(EVERY)
    with pytest.raises((IndexError, ValueError), match=message + ".*; nothing was changed"):
        bb.import_rows(table, file, ids=given, chunk=1)
    np.testing.assert_array_equal(table.get(EVERY), before)


def test_values_beyond_16_bits_and_negative_squares_are_refused(other: bb.Table, tmp_path: Path) -> None:
    with bb.create(None, dim=6, num_rows=500, dtype="float16") as narrow:
        rows = np.full((2, 6), 65519.0, np.float32)
        np.save(tmp_path / "rows.npy", rows)
        bb.import_rows(narrow, tmp_path / "rows.npy")
        rows[1, 2] = -65520
        np.save(tmp_path / "rows.npy", rows)
        with pytest.raises(ValueError, match=r"row 1 \(id 1\), element 2, is -65520.0, beyond float16"):
            bb.import_rows(narrow, tmp_path / "rows.npy")
    squares = np.ones((2, 6), np.float32)
    squares[0, 5] = -1e-9
    safetensors_numpy.save_file({"weight": rows, "exp_avg_sq": squares}, tmp_path / "rows.safetensors")
    with pytest.raises(ValueError, match=r"exp_avg_sq of row 0 \(id 0\), element 5, is -.*, a sum of squares below 0"):
        bb.import_rows(other, tmp_path / "rows.safetensors")
    assert len(other) == 0


def test_tensors_that_do_not_fit_each_other_or_the_file_are_refused(other: bb.Table, tmp_path: Path) -> None:
    file, rows = tmp_path / "rows.safetensors", np.ones((3, 6), np.float32)
    safetensors_numpy.save_file({"weight": rows, "exp_avg": rows[:2]}, file)
    with pytest.raises(ValueError, match="exp_avg has 2 rows, weight has 3"):
        bb.import_rows(other, file)
    safetensors_numpy.save_file({"weight": rows, "id": np.arange(2)}, file)
    with pytest.raises(TypeError, match=r"id must be I64\[3\], got I64\[2\]"):
        bb.import_rows(other, file)
    safetensors_numpy.save_file({"weight": rows}, file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match="tensor 'weight' lies outside the file"):
        bb.import_rows(other, file)
    assert len(other) == 0


def test_a_file_that_is_cut_while_it_is_read_is_said(other: bb.Table, tmp_path: Path) -> None:
    file = tmp_path / "rows.npy"
    np.save(file, np.ones((300, 6), np.float32))
    with pytest.raises(ValueError, match=r"rows.npy ends after \d+ bytes, in the middle of its rows"):
        bb.import_rows(other, file, chunk=100, checking=lambda *at: os.truncate(file, 4000))
    assert len(other) == 0


def test_columns_that_hold_nulls_or_other_lists_are_refused(other: bb.Table, tmp_path: Path) -> None:
    good, kind = [1.0] * 6, pa.list_(pa.float32())
    for column, ids, message in (
        ([good, good[:5]], [1, 2], r"must hold lists of 6 values, that at position 1 has 5"),
        ([good, None], [1, 2], r"column 'weight' is null at position 1"),
        ([good, [*good[:5], None]], [1, 2], r"has a null in the list at position 1"),
        ([good, good], [1, None], r"column 'id' is null at position 1"),
    ):
        file = tmp_path / "rows.parquet"
        parquet.write_table(pa.table({"id": pa.array(ids, pa.int64()), "weight": pa.array(column, kind)}), file)
        with pytest.raises(ValueError, match=message + ".*; nothing was changed"):
            bb.import_rows(other, file, chunk=1)
    parquet.write_table(pa.table({"item": [1], "weight": pa.array([good], kind)}), file)
    with pytest.raises(ValueError, match=r"has no column 'id'; it has: item, weight; name another one with ids="):
        bb.import_rows(other, file)
    parquet.write_table(pa.table({"id": [1], "weight": pa.array([good], pa.list_(pa.float64()))}), file)
    with pytest.raises(TypeError, match=r"column 'weight' must be float32\[N, 6\], got float64"):
        bb.import_rows(other, file)
    assert len(other) == 0


def test_state_of_an_earlier_step_is_refused(table: bb.Table, other: bb.Table, tmp_path: Path) -> None:
    bb.export_rows(table, tmp_path / "rows.parquet", slots=SLOTS)
    for _ in range(4):
        other.update([1], np.ones((1, 6), np.float32))
    with pytest.raises(ValueError, match=r"state of step 3, table 'table' has taken 4.*slots=\(\"weight\",\)"):
        bb.import_rows(other, tmp_path / "rows.parquet")
    assert bb.import_rows(other, tmp_path / "rows.parquet", slots=("weight",)) == len(table)
    assert other.step == 4


def test_an_interrupted_import_says_what_is_in_and_commits_nothing(table: bb.Table, tmp_path: Path) -> None:
    bb.export_rows(table, tmp_path / "rows.parquet", chunk=100)
    path = tmp_path / "to"
    with bb.create(path, dim=6, num_rows=500, ram="1MiB") as other:
        other.set([499], np.ones((1, 6), np.float32))

    def stop(done: int, total: int) -> None:
        if done == 200:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught, bb.open(path, ram="1MiB") as other:
        bb.import_rows(other, tmp_path / "rows.parquet", chunk=100, progress=stop)
    assert "rows 0 to 100 of" in caught.value.__notes__[0] or "rows 0 to 200 of" in caught.value.__notes__[0]
    with bb.open(path, mode="r", ram="1MiB") as reader:
        assert len(reader) == 1 and reader.contains([499])[0]
        with pytest.raises(bb.ReadOnlyError, match="is a reader"):
            bb.import_rows(reader, tmp_path / "rows.parquet")


@pytest.mark.parametrize("name", WRITTEN)
def test_an_export_is_there_whole_or_not_at_all(table: bb.Table, tmp_path: Path, name: str) -> None:
    check_whole_or_not_at_all(table, tmp_path, name)


def test_what_a_killed_export_left_goes_and_a_second_one_is_refused(table: bb.Table, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    code = (
        "import os, sys, numpy as np, bunkbed as bb\n"
        "table = bb.create(None, dim=6, num_rows=50)\n"
        "bb.export_rows(table, sys.argv[1], progress=lambda *at: os._exit(9))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder / "rows.npy")])
    assert done.returncode == 9
    assert [path.name for path in folder.iterdir()] == [".rows.npy.part"]
    bb.export_rows(table, folder / "rows.npy")
    assert [path.name for path in folder.iterdir()] == ["rows.npy"]
    part = folder / ".more.npy.part"
    part.mkdir()
    held = os.open(part, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(OSError, match="another export to it is under way"):
        bb.export_rows(table, folder / "more.npy")
    os.close(held)


def test_a_file_that_appears_meanwhile_stays(table: bb.Table, tmp_path: Path) -> None:
    target = tmp_path / "rows.npy"
    with pytest.raises(FileExistsError, match="exists already"):
        bb.export_rows(table, target, progress=lambda *at: target.write_bytes(b"theirs"))
    assert target.read_bytes() == b"theirs"


def test_what_a_format_cannot_hold_is_said_before_anything_is_made(table: bb.Table, tmp_path: Path) -> None:
    with bb.create(None, dim=2) as any_id, pytest.raises(ValueError, match=r"takes any id, which .npy cannot name"):
        bb.export_rows(any_id, tmp_path / "any.npy")
    with pytest.raises(ValueError, match=r"npy holds one slot, got weight, exp_avg; export to one of .parquet"):
        bb.export_rows(table, tmp_path / "rows.npy", slots=("weight", "exp_avg"))
    with pytest.raises(ValueError, match=r"has no slot 'sum'; it has: weight, exp_avg, exp_avg_sq"):
        bb.export_rows(table, tmp_path / "rows.parquet", slots=("sum",))
    with pytest.raises(ValueError, match="names no rows by words; leave vocab= out"):
        bb.export_rows(table, tmp_path / "rows.npy", vocab=tmp_path / "words")
    assert [path.name for path in tmp_path.iterdir()] == ["from"]


def test_words_map_by_a_vocabulary(other: bb.Table, tmp_path: Path) -> None:
    rows = pa.array([[float(at)] * 6 for at in range(3)], pa.list_(pa.float32()))
    file, vocab = tmp_path / "rows.parquet", tmp_path / "words.txt"
    parquet.write_table(pa.table({"id": ["ann", "bob", "cy"], "weight": rows}), file)
    with pytest.raises(ValueError, match=r"names its rows by words, such as 'ann'; give vocab="):
        bb.import_rows(other, file)
    bb.import_rows(other, file, vocab=vocab, chunk=2)
    assert vocab.read_text() == "ann\nbob\ncy\n"
    parquet.write_table(pa.table({"id": ["cy", "ann", "bob"], "weight": rows}), file)
    bb.import_rows(other, file, vocab=vocab, chunk=2)
    assert other.lookup([0, 1, 2])[:, 0].tolist() == [1.0, 2.0, 0.0] and vocab.read_text() == "ann\nbob\ncy\n"
    parquet.write_table(pa.table({"id": ["cy", "dan", "bob"], "weight": rows}), file)
    with pytest.raises(ValueError, match=r"word 'dan' at position 1 is not among the 3 of .*words.txt; nothing"):
        bb.import_rows(other, file, vocab=vocab)
    parquet.write_table(pa.table({"id": ["cy", "dan", "cy"], "weight": rows}), file)
    with pytest.raises(ValueError, match=r"word 'cy' at position 2 stands at position 0 already; nothing"):
        bb.import_rows(other, file, vocab=tmp_path / "new.txt", chunk=1)
    assert not (tmp_path / "new.txt").exists()
    for bad in ("x", "", "-1", "1.0", " 8", "٣", str(2**63), "9" * 5_000):
        parquet.write_table(pa.table({"id": ["7", bad, "8"], "weight": rows}), file)
        with pytest.raises(ValueError, match=rf"'{bad}' at position 1 is no id; nothing"):
            bb.import_rows(other, file, ids="id")
    vocab.write_text("a\nb\na\n")
    with pytest.raises(ValueError, match=r"words.txt: word 'a' is in line 1 and in line 3"):
        bb.import_rows(other, file, vocab=vocab)


def test_the_pages_list_every_format() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "rows.md").read_text()
    lines = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `") and line.count("|") == 8}
    assert set(lines) == {one.name for one in FORMATS}
    for one in FORMATS:
        cells = [cell.strip() for cell in lines[one.name].split("|")]
        assert cells[2].replace("`", "").split() == list(one.suffixes) or not one.suffixes
        assert cells[4] == ("no" if not one.can_export else "every row" if one.every_row else "stored rows")
        assert cells[5].startswith("no") is not one.has_state
        assert ("words" in cells[6]) is (one.has_words or one.module == "arrow")


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        ("pyarrow", "rows.parquet", '"bunkbed[train]"'),
        ("torch", "rows.pt", '"bunkbed[torch]"'),
        ("h5py", "rows.weights.h5", "h5py"),
        ("tensorflow", "rows.index", '"bunkbed[keras]"'),
    ],
)
def test_a_missing_library_is_named_with_its_remedy(
    table: bb.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, hint: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(b"")
    match = rf"needs {module}; install it with: pip install {re.escape(hint)}"
    with pytest.raises(ImportError, match=match):
        bb.import_rows(table, tmp_path / name)
    with pytest.raises(ImportError, match=match):
        bb.export_rows(table, tmp_path / f"new-{name}")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["from", name])
