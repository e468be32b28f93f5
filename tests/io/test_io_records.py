"""Fast paths of import and export change no bit of a row: whole records, one scan of all slots, one chunk ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.io.common.ahead import ahead
from bunkbed.io.setting import Setting

OPTIMIZERS = {
    "sgd": bb.SGD(),
    "adam": bb.Adam(),
    "adagrad": bb.Adagrad(initial_accumulator=0.1),
    "rowwise": bb.RowwiseAdagrad(),
    "half": bb.Adam(state_dtype="bfloat16"),
}
IDS = {
    "in order": np.arange(3, 303),
    "shuffled": np.random.default_rng(5).permutation(400)[:300],
    "repeated": np.random.default_rng(6).integers(0, 400, 300),
}


def random(rng: np.random.Generator, table: bb.Table, slot: str, count: int) -> Any:
    return rng.random((count, table.field(slot)[1]), np.float32)


@pytest.mark.parametrize("order", IDS)
@pytest.mark.parametrize(
    ("name", "brings"),
    [
        (name, brings)
        for name in OPTIMIZERS
        for brings in ("weight", "state", "all")
        if (name, brings) != ("sgd", "state")
    ],
)
def test_rows_are_set_as_table_set_does(tmp_path: Path, name: str, brings: str, order: str) -> None:
    """Rows that are new, in RAM or on disk; what their other slots hold stays."""
    rng = np.random.default_rng(1)
    kwargs: dict[str, Any] = {"dim": 3, "num_rows": 400, "optimizer": OPTIMIZERS[name], "ram": "256KiB"}
    with bb.create(tmp_path / "a", **kwargs) as ours, bb.create(tmp_path / "b", **kwargs) as theirs:
        every = tuple(ours.fields)
        brought = {"weight": every[:1], "state": every[1:], "all": every}[brings]
        for round_index in range(3):
            setting = Setting(ours, brought)
            for begin in range(0, 300, 70):
                ids = IDS[order][begin : begin + 70] if round_index else IDS[order][begin // 2 : begin // 2 + 70]
                values = {slot: random(rng, ours, slot, len(ids)) for slot in brought}
                setting.set(ids, values)
                for slot, rows in values.items():
                    theirs.set(ids, rows, slot)
            grads = rng.standard_normal((100, 3)).astype(np.float32)
            for table in (ours, theirs):
                table.update(np.arange(100), grads)
            ours.commit()
        everyone = np.arange(400)
        np.testing.assert_array_equal(ours.contains(everyone), theirs.contains(everyone))
        for slot in every:
            np.testing.assert_array_equal(ours.get(everyone, slot), theirs.get(everyone, slot))


def test_whole_records_are_taken_where_they_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above compares `Table.set` with itself."""
    rows = np.ones((10, 3), np.float32)
    with bb.create(tmp_path / "a", dim=3, num_rows=20, ram="1MiB") as table:
        monkeypatch.setattr(bb.Table, "set", lambda *args, **kwargs: pytest.fail("set row by row"))
        Setting(table, ("weight",)).set(np.arange(10), {"weight": rows})
        Setting(table, tuple(table.fields)).set(np.arange(10)[::-1], dict.fromkeys(table.fields, rows))
        np.testing.assert_array_equal(table.get(np.arange(10), "exp_avg"), rows)


def test_a_file_that_changes_after_it_was_checked_ends_the_import(tmp_path: Path) -> None:
    rows = np.ones((1000, 3), np.float32)
    np.save(tmp_path / "rows.npy", rows)
    rows[700, 1] = np.inf

    def spoil(done: int, total: int) -> None:
        if done == total:
            np.save(tmp_path / "rows.npy", rows)

    with bb.create(tmp_path / "a", dim=3, num_rows=1000, ram="1MiB") as table:
        with pytest.raises(ValueError, match="changed while it was imported: weight has values that are not finite"):
            bb.import_rows(table, tmp_path / "rows.npy", chunk=300, checking=spoil)
        assert not table.contains(np.arange(600, 1000)).any()
        table.close(commit=False)


def test_rows_go_to_the_log_while_others_are_set(tmp_path: Path) -> None:
    """So the commit has next to nothing to write; and without one the table is as it was."""
    rows = np.random.default_rng(3).standard_normal((50_000, 16), np.float32)
    np.save(tmp_path / "rows.npy", rows)
    seen: list[int] = []
    with bb.create(tmp_path / "a", dim=16, num_rows=50_000, ram="16MiB") as table:

        def look(done: int, total: int) -> None:
            seen.append(table.stats()["dirty_rows"])

        bb.import_rows(table, tmp_path / "rows.npy", chunk=5000, progress=look)
        assert len(seen) == 10
        table.close(commit=False)
    assert min(seen) < 5000
    with bb.open(tmp_path / "a", ram="16MiB") as table:
        assert len(table) == 0
        bb.import_rows(table, tmp_path / "rows.npy", chunk=5000)
        table.commit()
        np.testing.assert_array_equal(table.lookup(np.arange(50_000)), rows)
    with bb.open(tmp_path / "a", mode="r", ram="16MiB") as table:
        np.testing.assert_array_equal(table.lookup(np.arange(50_000)), rows)
        assert not bb.check(tmp_path / "a")


def test_a_16_bit_number_alone_takes_the_bytes_of_a_32_bit_one(tmp_path: Path) -> None:
    """And must not be taken for one."""
    with bb.create(None, dim=1, num_rows=4, dtype="bfloat16", optimizer=bb.SGD()) as table:
        Setting(table, ("weight",)).set(np.arange(2), {"weight": np.array([[1.5], [-2.0]], np.float32)})
        np.testing.assert_array_equal(table.lookup([0, 1]), [[1.5], [-2.0]])


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".safetensors"])
def test_a_large_table_goes_out_and_in(tmp_path: Path, suffix: str) -> None:
    """Many chunks of the log, trained in no order, with less memory than they take."""
    pytest.importorskip("pyarrow" if suffix != ".safetensors" else "safetensors")
    rng = np.random.default_rng(2)
    with bb.create(tmp_path / "a", dim=16, num_rows=20_000, ram="1MiB") as table:
        for _ in range(4):
            ids = rng.integers(0, 20_000, 6000)
            table.update(ids, rng.standard_normal((6000, 16)).astype(np.float32))
        every = np.arange(20_000)
        slots = tuple(table.fields)
        values = {slot: table.get(every, slot) for slot in slots}
        bb.export_rows(table, tmp_path / f"rows{suffix}", slots=slots, chunk=999)
        stored = table.contains(every)
    with bb.create(tmp_path / "b", dim=16, num_rows=20_000, ram="1MiB") as other:
        bb.import_rows(other, tmp_path / f"rows{suffix}", chunk=777)
        np.testing.assert_array_equal(other.contains(every), stored)
        for slot in slots:
            np.testing.assert_array_equal(other.get(every[stored], slot), values[slot][stored])


def test_items_come_in_order_one_ahead() -> None:
    asked: list[int] = []
    second = threading.Event()

    def items() -> Iterator[int]:
        for item in range(5):
            asked.append(item)
            if item == 1:
                second.set()
            yield item

    got = ahead(items())
    assert next(got) == 0
    assert second.wait(60)  # while the first is used
    assert next(got) == 1 and max(asked) <= 2  # arrays of the next but one may be the first's
    assert list(got) == [2, 3, 4]


def test_what_asking_raises_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("third")

    got = ahead(items())
    assert [next(got), next(got)] == [1, 2]
    with pytest.raises(KeyError, match="third"):
        next(got)


def test_nothing_is_under_way_once_it_is_closed() -> None:
    before = set(threading.enumerate())  # another test's may end meanwhile
    with closing(ahead(range(1000))) as got:
        next(got)
        assert len(set(threading.enumerate()) - before) == 1
    assert not set(threading.enumerate()) - before
