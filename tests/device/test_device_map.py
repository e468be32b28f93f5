"""The id map of a device cache as a layer uses it: its arrays, its table, and an executor that follows its plans."""

from __future__ import annotations

import gc
import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed import _native

ROWS, DIM = 400, 4


def make(path: Path | None = None, *, ram: str | None = None, disk: str | None = None) -> bb.Table:
    return bb.create(path, dim=DIM, num_rows=ROWS, optimizer=bb.SGD(lr=1.0), ram=ram, disk=disk)


def int64(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


class Device:
    """A device cache in NumPy: frames of whole records, moved as the plans say, in order and at once."""

    def __init__(self, table: bb.Table, frames: int) -> None:
        self.core = table.core
        self.map = _native.DeviceMap(self.core, frames)
        self.records = np.zeros((frames, self.core.payload_bytes()), np.uint8)
        self.core.set_device_cache(self.map, self.write_back)

    def write_back(self) -> None:
        ids, frames = self.map.dirty()
        self.core.scatter_records(ids, self.records[frames])
        self.map.mark_clean(frames)

    def plan(self, batch: _native.Batch, number: int = 0) -> _native.DevicePlan | None:
        plan = self.map.plan(batch, number)
        if plan is None:
            return None
        self.core.scatter_records(plan.evict_ids, self.records[plan.evict_frames])
        loads = np.empty((len(plan.load_ids), self.records.shape[1]), np.uint8)
        self.core.gather_records(plan.load_ids, loads)
        self.records[plan.load_frames] = loads
        return plan

    def weights(self, frames: np.ndarray) -> np.ndarray:
        return self.records[frames, : 4 * DIM].view(np.float32)


def positions(plan: Any, batch: Any) -> np.ndarray:
    """The frame of each id of a plan's batch."""
    numbers = np.empty(plan.max_numbers(64), np.int64)
    plan.write_numbers(64, numbers)
    begin = plan.frames.size + plan.load_frames.size + plan.evict_frames.size
    return numbers[begin : begin + batch.num_ids()]


def test_a_batch_shows_how_it_was_deduped() -> None:
    table = make()
    ids = int64(7, 3, 7, 9, 3, 7)
    batch = table.core.batch(ids)
    assert batch.num_ids() == 6
    assert batch.unique().tolist() == [7, 3, 9]
    np.testing.assert_array_equal(batch.unique()[batch.inverse()], ids)
    assert batch.order().tolist() == [0, 2, 5, 1, 4, 3]
    assert batch.offsets().tolist() == [0, 3, 5, 6]
    assert {a.dtype for a in (batch.inverse(), batch.order(), batch.offsets())} == {np.dtype(np.int64)}


def test_arrays_outlive_the_plan_and_keep_no_pins() -> None:
    table = make()
    device = _native.DeviceMap(table.core, 4)
    batch = table.core.batch(int64(5, 6, 5))
    plan = device.plan(batch)
    out = positions(plan, batch)
    frames, load_ids = plan.frames, plan.load_ids
    assert device.stats()["pinned"] == 2
    plan.done()
    del plan
    gc.collect()
    assert device.stats()["pinned"] == 0
    assert load_ids.tolist() == [5, 6]
    assert out.tolist() == [frames[0], frames[1], frames[0]]
    assert device.find(int64(6, 7, 5)).tolist() == [frames[1], -1, frames[0]]


def test_all_numbers_of_a_batch_and_its_plan_are_one_array() -> None:
    """What a device needs for lookups and sums; rows that are in the batch more than `most` times come in pieces."""
    table = make()
    device = _native.DeviceMap(table.core, 8)
    first = device.plan(table.core.batch(np.arange(8)))
    first.mark_dirty()
    first.release()
    rng = np.random.default_rng(3)
    for ids in (int64(9), int64(9, 8), int64(9, 8, 9, 9, 8, 9, 10, 9, 9), rng.integers(8, 14, 200), int64()):
        batch = table.core.batch(ids)
        plan = device.plan(batch)
        for most in (1, 2, 3, 5, 64, ids.size + 1):
            bounds, order = batch.offsets(), batch.order()
            counts = -(-np.diff(bounds) // most)
            firsts = np.cumsum(counts) - counts
            pieces = [place for begin, end in itertools.pairwise(bounds) for place in range(begin, end, most)]
            cut = [firsts, pieces] if counts.size and counts.max() > 1 else []
            numbers = np.full(batch.max_numbers(most), -7)
            assert batch.write_numbers(most, numbers) == (len(pieces) if cut else 0)
            wanted = np.concatenate([batch.inverse(), order, bounds[:-1], *cut])
            np.testing.assert_array_equal(numbers[: wanted.size], wanted)
            assert (numbers[wanted.size :] == -7).all()

            where = plan.frames[batch.inverse()]
            wanted = np.concatenate([plan.frames, plan.load_frames, plan.evict_frames, where, order, bounds[:-1], *cut])
            numbers = np.full(plan.max_numbers(most), -7)
            assert plan.write_numbers(most, numbers) == (len(pieces) if cut else 0)
            np.testing.assert_array_equal(numbers[: wanted.size], wanted)
            assert (numbers[wanted.size :] == -7).all()
        plan.done()
        plan.release()
    batch = table.core.batch(int64(1, 1, 2))
    with pytest.raises(ValueError, match="an array of 11 has no room for 12 numbers"):
        batch.write_numbers(64, np.empty(11, np.int64))
    with pytest.raises(ValueError, match="a piece has at least one place, got 0"):
        batch.write_numbers(0, np.empty(99, np.int64))


def test_what_does_not_fit_now_is_told_from_what_never_does() -> None:
    table = make()
    device = _native.DeviceMap(table.core, 4)
    first = device.plan(table.core.batch(int64(1, 2, 3)))
    batch = table.core.batch(int64(3, 4, 5))
    number = device.expect(batch)
    assert device.plan(batch, number) is None
    assert device.stats()["misses"] == 3 and device.stats()["window_batches"] == 1
    first.release()
    assert device.plan(batch, number) is not None
    assert device.stats()["window_batches"] == 0
    with pytest.raises(ValueError, match="table 'table': a batch of 5 rows does not fit its device cache of 4 frames"):
        device.plan(table.core.batch(np.arange(5)))


def test_the_window_is_full_after_32_batches() -> None:
    table = make()
    device = _native.DeviceMap(table.core, 4)
    batch = table.core.batch(int64(1))
    numbers = [device.expect(batch) for _ in range(32)]
    assert len(set(numbers)) == 32
    assert device.expect(batch) == device.WINDOW_FULL
    device.forget(numbers[0])
    assert device.expect(batch) != device.WINDOW_FULL


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("lookahead", [0, 3])
def test_trained_above_is_trained(stored: bool, lookahead: int, tmp_path: Path) -> None:
    """Steps on the device's records, with commits, evaluation below and changes by others: the table's rows are those
    of a plain array."""
    table = make(tmp_path / "user", ram="1MiB") if stored else make()
    device = Device(table, 48)
    truth = table.get(np.arange(ROWS)).copy()
    rng = np.random.default_rng(3)
    coming = [rng.integers(0, ROWS, 60) // rng.integers(1, 12) for _ in range(160)]
    numbers: dict[int, int] = {}
    batches = [table.core.batch(ids) for ids in coming]
    for step, ids in enumerate(coming):
        for ahead in range(step + 1, min(step + 1 + lookahead, len(coming))):
            if ahead not in numbers:
                numbers[ahead] = device.map.expect(batches[ahead])
        if len(batches[step]) > device.map.frames:
            device.map.forget(numbers.get(step, 0))
            continue
        plan = device.plan(batches[step], numbers.get(step, 0))
        np.testing.assert_array_equal(device.weights(positions(plan, batches[step])), truth[ids])
        if step % 3:
            changed = device.weights(plan.frames) + np.float32(1)
            device.records[plan.frames, : 4 * DIM] = changed.view(np.uint8)
            plan.mark_dirty()
            truth[batches[step].unique()] += 1
        plan.release()
        if step % 40 == 11:
            table.commit()
            np.testing.assert_array_equal(table.get(np.arange(ROWS)), truth)
        if step % 17 == 5:  # another caller sets rows whose copies in the cache are clean
            device.write_back()
            table.set(ids[:5], np.full((5, DIM), step, np.float32))
            truth[ids[:5]] = step
    stats = device.map.stats()
    assert stats["write_backs"] > 50 and stats["evictions"] > stats["write_backs"]
    device.write_back()
    np.testing.assert_array_equal(table.get(np.arange(ROWS)), truth)
    table.close(commit=False)


def test_a_row_on_its_way_down_is_nobody_elses() -> None:
    table = make()
    device = Device(table, 2)
    plan = device.plan(table.core.batch(int64(1, 2)))
    plan.mark_dirty()
    plan.release()
    later = device.map.plan(table.core.batch(int64(3, 4)))  # whose write-backs are not carried out yet
    record = np.empty((1, device.records.shape[1]), np.uint8)
    assert sorted(later.evict_ids.tolist()) == [1, 2]
    for use in (
        lambda: table.get([2]),
        lambda: table.lookup([2]),
        lambda: table.set([2], np.zeros((1, DIM), np.float32)),
        lambda: table.core.gather_records(int64(2), record),
    ):
        with pytest.raises(bb.BunkbedError, match="id 2 at position 0 is held by a device cache"):
            use()
    assert table.contains([2, 3]).tolist() == [True, False]
    with pytest.raises(bb.BunkbedError, match="2 rows are still held by a device cache"):
        table.commit()
    table.core.scatter_records(later.evict_ids, device.records[later.evict_frames])
    table.get([2])
    table.commit()


def test_rows_in_use_above_are_not_changed_below() -> None:
    table = make()
    device = Device(table, 4)
    plan = device.plan(table.core.batch(int64(1, 2)))
    grads = np.ones((1, DIM), np.float32)
    for change in (lambda: table.update([2], grads), lambda: table.set([2], grads)):
        with pytest.raises(bb.BunkbedError, match="id 2 at position 0 is in use by a device cache"):
            change()
    with pytest.raises(bb.BunkbedError, match="is in use by a device cache"):
        table.core.scatter_records(int64(2), device.records[:1])
    before = table.get([2]).copy()
    table.update([3], grads)
    plan.release()
    table.update([2], grads)
    assert device.map.find(int64(1, 2)).tolist() == [plan.frames[0], -1]
    np.testing.assert_array_equal(device.weights(device.plan(table.core.batch(int64(2))).frames), before - 1)


def test_going_back_empties_the_cache(tmp_path: Path) -> None:
    table = make(tmp_path / "user", ram="1MiB")
    device = Device(table, 4)
    plan = device.plan(table.core.batch(int64(1, 2)))
    plan.mark_dirty()
    table.commit(keep="first")
    with pytest.raises(bb.BunkbedError, match="2 rows are in use by a device cache; end the step under way first"):
        table.rewind("first")
    plan.release()
    table.rewind("first")
    assert device.map.find(int64(1, 2)).tolist() == [-1, -1]
    table.close(commit=False)


def test_one_cache_at_a_time() -> None:
    table = make()
    Device(table, 4)
    with pytest.raises(ValueError, match="table 'table' has a device cache already"):
        Device(table, 4)
    table.core.set_device_cache(None, None)
    Device(table, 4)


def test_a_limit_of_the_files_has_room_for_the_cache(tmp_path: Path) -> None:
    """Attaching asks for the room; a row that is stored nowhere is not loaded where it could not be stored later."""

    def limited(disk: int) -> bb.Table:
        return bb.create(tmp_path / "user", dim=60, num_rows=100_000, optimizer=bb.SGD(), ram="4MiB", disk=disk)

    with pytest.raises(ValueError, match="it needs at least disk=") as error:
        limited(1)
    table = limited(int(str(error.value).rpartition("disk=")[2]) + (3 << 20))
    core = table.core
    with pytest.raises(OSError, match="no room for the 100000 rows of a device cache within disk="):
        core.set_device_cache(_native.DeviceMap(core, 1 << 30), None)
    core.set_device_cache(_native.DeviceMap(core, 1000), None)
    records = np.empty((500, core.payload_bytes()), np.uint8)
    values = np.ones((500, 60), np.float32)
    refused = "stored rows, those of its device cache included, are more than its limit"
    for begin in range(0, 100_000, 500):
        ids = np.arange(begin, begin + 500)
        try:
            core.gather_records(ids, records)
        except OSError as full:
            assert refused in str(full)
            break
        table.set(ids, values)
    assert 2000 < table.stats()["stored_rows"] == begin < 100_000
    with pytest.raises(OSError, match=refused):
        table.set(ids, values)
    core.gather_records(ids - 500, records)  # of rows that are stored there is no more to come
    core.set_device_cache(None, None)
    table.set(ids, values)
    table.close(commit=False)


def test_no_rows_at_all_advance_the_step() -> None:
    table = make()
    before = table.get(np.arange(ROWS)).copy()
    table.update(int64(), np.empty((0, DIM), np.float32))
    assert table.step == 1
    table.core.update(int64(), np.empty((0, DIM), np.float32), None, 70)
    assert table.step == 70
    np.testing.assert_array_equal(table.get(np.arange(ROWS)), before)
    assert table.stats()["stored_rows"] == 0


def test_records_move_beside_other_threads(tmp_path: Path) -> None:
    """Gathers and scatters of some rows while others are staged and looked up: every record arrives whole."""
    table = bb.create(tmp_path / "user", dim=16, num_rows=6000, optimizer=bb.SGD(), ram="1MiB")
    ids = np.arange(6000)
    table.set(ids, np.repeat(ids[:, None], 16, 1).astype(np.float32))
    table.commit()
    core, failures = table.core, []

    def move(seed: int) -> None:
        rng = np.random.default_rng(seed)
        own = np.arange(seed, 6000, 3)
        record = np.empty((500, core.payload_bytes()), np.uint8)
        for turn in range(30):
            some = rng.choice(own, 500, replace=False)
            core.gather_records(some, record)
            values = record.view(np.float32)
            if not (values % 6000 == some[:, None]).all():
                failures.append((seed, turn))
            values += 6000 * (turn % 2)
            core.scatter_records(some, record)

    def stage() -> None:
        rng = np.random.default_rng(9)
        for _ in range(60):
            core.stage(rng.integers(0, 6000, 300))

    threads = [threading.Thread(target=move, args=(seed,)) for seed in range(3)] + [threading.Thread(target=stage)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    values = table.get(ids)
    assert (values % 6000 == ids[:, None]).all()
    assert (values == values[:, :1]).all()
    repeated = np.empty((6, core.payload_bytes()), np.uint8)
    core.gather_records(int64(5, 5999, 5, 17, 5999, 5), repeated)
    assert (repeated.view(np.float32)[:, 0] % 6000).tolist() == [5, 5999, 5, 17, 5999, 5]
    table.close(commit=False)


def test_a_plan_that_was_not_carried_out_is_undone() -> None:
    table = make()
    device = _native.DeviceMap(table.core, 3)
    first = device.plan(table.core.batch(int64(1, 2, 3)))
    first.done()
    first.mark_dirty()
    first.release()
    for end in ("undo", "gone"):
        second = device.plan(table.core.batch(int64(2, 7, 8)))
        assert sorted(second.evict_ids.tolist()) == [1, 3]
        assert device.stats()["leaving"] == 2
        if end == "undo":
            second.undo()
        del second
        gc.collect()
        frames = device.find(int64(1, 2, 3, 7, 8)).tolist()
        assert sorted(frames[:3]) == [0, 1, 2] and frames[3:] == [-1, -1]
        assert frames[:3] == first.frames.tolist(), "each in the frame that has its record"
        stats = device.stats()
        assert (stats["dirty"], stats["leaving"], stats["pinned"]) == (3, 0, 0)
    third = device.plan(table.core.batch(int64(2, 7, 8)))
    device.arrived(third.evict_ids)  # the table got them; then something else failed
    third.undo()
    assert device.find(int64(1, 2, 3, 7, 8)).tolist()[3:] == [-1, -1]
    assert device.stats()["resident"] == 1
