"""Whole records, for a device cache: moved bit for bit, and never read while the cache has a newer value."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

import bunkbed as bb
from bunkbed import _native

IDS = np.array([5, 900, 17], np.int64)


def make(path: Path | None) -> bb.Table:
    table = bb.create(path, dim=8, num_rows=1000, optimizer=bb.Adam(), ram=None if path is None else "1MiB")
    rng = np.random.default_rng(0)
    for _ in range(3):
        table.update(rng.integers(0, 1000, 400), rng.standard_normal((400, 8)).astype(np.float32))
    return table


def test_records_move_bit_for_bit(tmp_path: Path) -> None:
    table, other = make(tmp_path / "user"), make(None)
    records = np.empty((3, table.core.payload_bytes()), np.uint8)
    table.core.gather_records(IDS, records)
    np.testing.assert_array_equal(records[:, :32].view(np.float32), table.get(IDS))
    other.core.scatter_records(IDS, records)
    for slot in ("weight", *table.slots):
        np.testing.assert_array_equal(other.get(IDS, slot), table.get(IDS, slot))
    with pytest.raises(ValueError, match="records name an id twice"):
        other.core.scatter_records(np.array([1, 1]), records[:2])
    table.close(commit=False)


def test_16_bit_records_move_as_they_are(tmp_path: Path) -> None:
    kwargs = {"dim": 5, "num_rows": 20, "optimizer": bb.Adam(state_dtype="bfloat16"), "dtype": "bfloat16"}
    table, other = bb.create(tmp_path / "user", **kwargs), bb.create(None, **kwargs)
    table.update([3, 4], np.full((2, 5), 0.3, np.float32))
    records = np.full((2, table.record_bytes), 0xEE, np.uint8)
    table.core.gather_records(np.array([3, 9]), records)
    assert records.shape == (2, 3 * 12)
    words = (table.get([3], slot="exp_avg_sq").view(np.uint32) >> 16).astype(np.uint16)
    assert records[0, 24:34].tobytes() == words.tobytes() and not records[:, [10, 11, 22, 23, 34, 35]].any()
    other.core.scatter_records(np.array([3, 9]), records)
    for slot in ("weight", *table.slots):
        np.testing.assert_array_equal(other.get([3, 9], slot), table.get([3, 9], slot))
    table.close(commit=False)


def test_held_rows_are_refused_until_written_back(tmp_path: Path) -> None:
    table = make(tmp_path / "user")
    records = np.empty((3, table.core.payload_bytes()), np.uint8)
    device = _native.DeviceMap(table.core, frames=4)
    written_back = False

    def write_back() -> None:
        if written_back:
            ids, frames = device.dirty()
            assert ids.tolist() == IDS.tolist()
            table.core.scatter_records(ids, records)
            device.mark_clean(frames)

    table.core.set_device_cache(device, write_back)
    plan = device.plan(table.core.batch(IDS))
    assert plan is not None
    table.core.gather_records(plan.load_ids, records)
    plan.mark_dirty()
    plan.release()
    for use in (table.lookup, table.get):
        with pytest.raises(bb.BunkbedError, match="id 900 at position 0 is held by a device cache"):
            use(np.array([900]))
    table.lookup(np.array([1]))
    with pytest.raises(bb.BunkbedError, match="3 rows are still held"):
        table.commit()

    records[:, :4] = np.frombuffer(np.float32(7).tobytes(), np.uint8)

    written_back = True
    table.commit()
    np.testing.assert_array_equal(bb.open(tmp_path / "user", mode="r").lookup(IDS)[:, 0], [7, 7, 7])


def test_a_closed_table_lets_go_of_its_holder() -> None:
    table = make(None)
    gone = weakref.ref(table)
    device = _native.DeviceMap(table.core, frames=4)
    table.core.set_device_cache(device, lambda table=table: table.step)  # refers to the table, as a device cache does
    table.close()
    del table
    gc.collect()
    assert gone() is None


def test_a_reader_gets_slots_from_the_log(tmp_path: Path) -> None:
    with make(tmp_path / "user") as table:
        expected = {slot: table.get(np.arange(1000), slot) for slot in ("weight", *table.slots)}
    with bb.open(tmp_path / "user", mode="r", ram="1MiB") as reader:
        reader.lookup(IDS)
        for slot, values in expected.items():
            np.testing.assert_array_equal(reader.get(np.arange(1000), slot), values)


def test_a_scan_returns_whole_records_which_another_table_appends(tmp_path: Path) -> None:
    facts = {"dim": 5, "num_rows": 2000, "optimizer": bb.Adam(state_dtype="bfloat16"), "dtype": "bfloat16"}
    table, other = (bb.create(tmp_path / name, ram="1MiB", **facts) for name in ("from", "to"))
    rng = np.random.default_rng(0)
    for one in (table, other):
        one.update(rng.integers(0, 2000, 1500), rng.standard_normal((1500, 5)).astype(np.float32))
    scan = _native.Scan(table.core, [])
    ids, records = np.empty(300, np.int64), np.empty((300, table.record_bytes), np.uint8)
    stored = other.contains(np.arange(2000))
    while count := scan.next_records(ids, records):
        other.core.append_records(ids[:count], records[:count])
    moved = np.flatnonzero(table.contains(np.arange(2000)))
    for slot in ("weight", *table.slots):
        np.testing.assert_array_equal(other.get(moved, slot), table.get(moved, slot))
    assert len(other) == len(table) + stored.sum() - stored[moved].sum()
    with pytest.raises(ValueError, match="records name an id twice"):
        other.core.append_records(np.array([1, 1]), records[:2])
    with pytest.raises(ValueError, match="a table in RAM only has no log"):
        make(None).core.append_records(IDS, np.empty((3, make(None).record_bytes), np.uint8))
    for one in (table, other):
        one.close(commit=False)
