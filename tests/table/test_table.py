"""Tests of tables in addition to the conformance suite: files, budgets, sharing, threads, sizes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.cases.exactness import smallest_ram

import bunkbed as bb
from bunkbed import _native
from bunkbed.testing import ReferenceTable
from bunkbed.testing.conformance import OPTIMIZERS, assert_same_bits, assert_same_rows, zipf_ids
from bunkbed.window import Window

KWARGS: dict[str, Any] = {
    "dim": 16,
    "num_rows": 5000,
    "optimizer": bb.Adam(lr=0.01),
    "init": bb.Normal(std=0.1),
    "seed": 11,
}


def train(*tables: Any, steps: int = 10, size: int = 500, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids = zipf_ids(rng, KWARGS["num_rows"], size)
        grads = rng.standard_normal((size, KWARGS["dim"])).astype(np.float32)
        for table in tables:
            table.update(ids, grads)


STATS = (
    "lookups", "updates", "ids", "unique_rows", "hits", "misses", "first_touches", "evictions",
    "written_back", "reads", "read_records", "single_records", "merged_records", "swept_records", "read_bytes",
    "written_bytes", "read_wait_s", "compactions", "compacted_records",
    "commits", "ram_bytes", "ram_budget_bytes", "frames", "frame_capacity", "dirty_rows", "stored_rows",
    "disk_bytes", "live_bytes", "segments", "open_files", "threads", "indexed_records",
)  # fmt: skip


def test_stats_have_every_key(tmp_path: Path) -> None:
    with bb.create(tmp_path / "user", ram="16MiB", **KWARGS) as table:
        train(table)
        assert set(table.stats()) >= set(STATS)
    with bb.create(None, **KWARGS) as table:
        assert set(table.stats()) >= set(STATS)


def test_names_and_paths(tmp_path: Path) -> None:
    with bb.create(tmp_path / "user", ram="16MiB", **KWARGS) as table:
        assert table.name == "user" and Path(table.path) == tmp_path / "user"
        assert table.ram_bytes == 16 << 20
        assert "user" in repr(table) and "5000" in repr(table).replace("_", "").replace(",", "")
    with bb.create(None, **KWARGS) as table:
        assert table.name == "table" and table.path is None


def test_paths_may_be_strings_and_parents_are_made(tmp_path: Path) -> None:
    with bb.create(str(tmp_path / "a" / "b" / "user"), **KWARGS) as table:
        train(table, steps=1)
    with bb.open(str(tmp_path / "a" / "b" / "user"), mode="r") as table:
        assert len(table) > 0


@pytest.mark.filterwarnings("ignore:.* has room for")
def test_a_new_table_is_small_and_instant_whatever_its_size(tmp_path: Path) -> None:
    before = time.perf_counter()
    bb.create(tmp_path / "huge", dim=64, num_rows=10**10, optimizer=bb.Adam(), init=bb.Normal(), ram="512MiB").close()
    assert time.perf_counter() - before < 30  # not a figure: that is benchmarks.cases.huge
    assert sum(p.stat().st_blocks * 512 for p in (tmp_path / "huge").rglob("*")) < 1 << 20


@pytest.mark.filterwarnings("ignore:.* has room for")
@pytest.mark.parametrize("exponent", [10, 12, 15, 18])
def test_huge_tables_train(tmp_path: Path, exponent: int) -> None:
    kwargs = {**KWARGS, "num_rows": 10**exponent}
    oracle = ReferenceTable(**kwargs)
    rng = np.random.default_rng(0)
    ids = np.append(rng.integers(0, 10**exponent, 3000), [0, 10**exponent - 1])
    grads = rng.standard_normal((ids.size, 16)).astype(np.float32)
    with bb.create(tmp_path / "huge", ram="16MiB", **kwargs) as table:
        for t in (table, oracle):
            t.update(ids, grads)
    with bb.open(tmp_path / "huge", ram="16MiB") as table:
        assert_same_rows(table, oracle, ids)
        with pytest.raises(IndexError, match=str(10**exponent)):
            table.lookup([10**exponent])


def test_a_folder_may_be_moved(tmp_path: Path) -> None:
    oracle = ReferenceTable(**KWARGS)
    with bb.create(tmp_path / "old", **KWARGS) as table:
        train(table, oracle)
        table.commit(keep="x")
    (tmp_path / "old").rename(tmp_path / "new")
    with bb.open(tmp_path / "new") as table:
        assert_same_rows(table, oracle, np.arange(5000))
        table.rewind("x")
    assert bb.check(tmp_path / "new") == []


def test_rows_larger_than_a_page(tmp_path: Path) -> None:
    kwargs = {**KWARGS, "dim": 3000, "num_rows": 400}  # 36 KB a record
    oracle = ReferenceTable(**kwargs)
    rng = np.random.default_rng(0)
    with bb.create(tmp_path / "wide", ram="24MiB", **kwargs) as table:
        for _ in range(6):
            ids = rng.integers(0, 400, 100)
            grads = rng.standard_normal((100, 3000)).astype(np.float32)
            for t in (table, oracle):
                t.update(ids, grads)
        assert_same_rows(table, oracle, np.arange(400))
    with bb.open(tmp_path / "wide", ram="24MiB") as table:
        assert_same_rows(table, oracle, np.arange(400))


def test_a_batch_larger_than_the_cache(tmp_path: Path) -> None:
    oracle = ReferenceTable(**KWARGS)
    with bb.create(tmp_path / "user", ram="2MiB", **KWARGS) as table:
        assert table.stats()["frame_capacity"] < 5000 or table.ram_bytes > 1 << 20
        train(table, oracle, steps=3, size=20_000)
        assert_same_rows(table, oracle, np.arange(5000))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_reopening_keeps_the_optimizer(tmp_path: Path, optimizer: Any) -> None:
    kwargs = {**KWARGS, "optimizer": optimizer}
    oracle = ReferenceTable(**kwargs)
    with bb.create(tmp_path / "user", **kwargs) as table:
        train(table, oracle, steps=3)
    with bb.open(tmp_path / "user") as table:
        assert table.optimizer == optimizer and table.init == kwargs["init"] and table.seed == 11
        train(table, oracle, steps=3, seed=1)
        assert_same_rows(table, oracle, np.arange(5000))


def test_a_seed_is_a_table(tmp_path: Path) -> None:
    rows = {}
    for seed in (0, 1, 2**63, 2**64 - 1):
        with bb.create(None, **{**KWARGS, "seed": seed}) as table:
            rows[seed] = table.lookup(np.arange(100))
            assert_same_bits(rows[seed], ReferenceTable(**{**KWARGS, "seed": seed}).lookup(np.arange(100)))
    assert len({array.tobytes() for array in rows.values()}) == 4


@pytest.mark.parametrize("init", [bb.Zeros(), bb.Normal(std=2.0), bb.Uniform(-0.25, 0.75)], ids=repr)
def test_initial_values_are_distributed_as_named(init: Any) -> None:
    with bb.create(None, dim=64, num_rows=10**6, init=init, seed=1) as table:
        values = table.lookup(np.arange(0, 10**6, 300)).astype(np.float64)
    if isinstance(init, bb.Zeros):
        assert not values.any()
    elif isinstance(init, bb.Normal):
        assert abs(values.mean()) < 0.02 and abs(values.std() - 2.0) < 0.02
        assert abs((np.abs(values) < 2.0).mean() - 0.6827) < 0.005
    else:
        assert values.min() >= -0.25 and values.max() < 0.75
        assert abs(values.mean() - 0.25) < 0.005 and abs(values.std() - 1 / np.sqrt(12)) < 0.005


def test_snapshots_outlive_later_training(tmp_path: Path) -> None:
    oracles = {}
    oracle = ReferenceTable(**KWARGS)
    with bb.create(tmp_path / "user", ram="4MiB", **KWARGS) as table:
        for epoch in range(4):
            train(table, oracle, seed=epoch)
            table.commit(keep=f"epoch-{epoch}")
            oracles[f"epoch-{epoch}"] = oracle.lookup(np.arange(5000))
            table.compact()
        assert sorted(bb.snapshots(tmp_path / "user")) == sorted(oracles)
        table.drop("epoch-1")
        table.compact()
    for name, rows in oracles.items():
        if name == "epoch-1":
            continue
        with bb.open(tmp_path / "user", mode="r", snapshot=name, ram="16MiB") as reader:
            assert_same_bits(reader.lookup(np.arange(5000)), rows)
    assert list(bb.snapshots(tmp_path / "user")) == ["epoch-0", "epoch-2", "epoch-3"]


def test_dropping_a_snapshot_between_update_and_commit(tmp_path: Path) -> None:
    """Found by the state machine: what was evicted before the drop belonged to an epoch that never came."""
    oracle = ReferenceTable(**KWARGS)
    ram = smallest_ram(lambda ram: bb.create(tmp_path / f"probe-{ram}", ram=ram, **KWARGS))
    with bb.create(tmp_path / "user", ram=ram, **KWARGS) as table:
        table.commit(keep="a")
        train(table, oracle, steps=2)
        assert table.stats()["evictions"] > 0
        table.drop("a")
        assert bb.snapshots(tmp_path / "user") == {}
        table.commit()
        train(table, oracle, steps=2, seed=1)
    assert bb.check(tmp_path / "user") == []
    with bb.open(tmp_path / "user") as table:
        assert_same_rows(table, oracle, np.arange(5000))


def test_compaction_gives_space_back_and_moves_no_value(tmp_path: Path) -> None:
    oracle = ReferenceTable(**KWARGS)
    with bb.create(tmp_path / "user", ram="4MiB", **KWARGS) as table:
        for seed in range(10):
            train(table, oracle, seed=seed)
            table.commit()
        before = table.stats()
        table.compact()
        table.commit()
        after = table.stats()
        assert after["disk_bytes"] <= before["disk_bytes"]
        assert_same_rows(table, oracle, np.arange(5000))
    with bb.open(tmp_path / "user", ram="4MiB") as table:
        assert_same_rows(table, oracle, np.arange(5000))
    assert bb.check(tmp_path / "user") == []


def test_a_reader_refreshes_while_the_writer_trains(tmp_path: Path) -> None:
    oracle = ReferenceTable(**KWARGS)
    with bb.create(tmp_path / "user", ram="8MiB", **KWARGS) as table:
        train(table, oracle)
        table.commit()
        with bb.open(tmp_path / "user", mode="r", ram="8MiB") as reader:
            for seed in range(1, 6):
                seen = oracle.lookup(np.arange(5000))
                assert_same_bits(reader.lookup(np.arange(5000)), seen)
                train(table, oracle, seed=seed)
                assert_same_bits(reader.lookup(np.arange(5000)), seen)  # not committed, not seen
                table.commit()
                table.compact()
                assert_same_bits(reader.lookup(np.arange(5000)), seen)  # committed, not refreshed, still there
                reader.refresh()
            assert reader.version == table.version == table.epoch and reader.step == table.step


def test_version_is_the_number_of_the_last_commit(tmp_path: Path) -> None:
    with bb.create(tmp_path / "user", ram="8MiB", **KWARGS) as table:
        assert table.version == table.epoch == 0
        train(table, steps=3)
        assert table.version == 0 and table.step == 3
        assert table.commit() == table.version == table.epoch == 1


def test_a_refresh_costs_what_changed(tmp_path: Path) -> None:
    oracle = ReferenceTable(**KWARGS)
    ids = np.arange(5000)
    with bb.create(tmp_path / "user", ram="8MiB", **KWARGS) as table:
        for rows in (table, oracle):
            rows.set(ids, np.ones((5000, KWARGS["dim"]), np.float32))
        table.commit()
        with bb.open(tmp_path / "user", mode="r", ram="8MiB") as reader:
            assert reader.stats()["indexed_records"] == 5000
            assert_same_bits(reader.lookup(ids), oracle.lookup(ids))
            for rows in (table, oracle):
                rows.set(ids[::100], np.zeros((50, KWARGS["dim"]), np.float32))
            table.commit()
            reader.refresh()
            assert reader.stats()["indexed_records"] == 5050
            assert_same_bits(reader.lookup(ids), oracle.lookup(ids))


def test_a_reader_in_another_process_never_sees_two_epochs(tmp_path: Path) -> None:
    """The writer makes every row equal to the step; whatever the reader sees must be one number."""
    code = """
        import sys, numpy as np, bunkbed as bb
        ids, seen = np.arange(4000), set()
        with bb.open(sys.argv[1], mode="r", ram="2MiB") as reader:
            print("ready", flush=True)
            for _ in range(1_000_000):
                rows = reader.lookup(ids, touch=len(seen) % 2 == 0)
                assert (rows == rows[0, 0]).all(), np.unique(rows)
                assert rows[0, 0] == reader.step, (rows[0, 0], reader.step)
                seen.add(reader.step)
                if reader.step == 25:
                    break
                reader.refresh()
        print(len(seen))
    """
    path = tmp_path / "user"
    with bb.create(path, dim=16, num_rows=4000, optimizer=bb.SGD(lr=1.0), init=bb.Zeros(), ram="512KiB") as table:
        table.commit()
        reader = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
        for step in range(25):
            table.update(np.arange(4000), -np.ones((4000, 16), np.float32))
            table.commit()
            if step % 5 == 4:
                table.compact()
        out, err = reader.communicate(timeout=120)
    assert reader.returncode == 0, err
    assert int(out) >= 2


@pytest.mark.parametrize("kill_after", [1, 4, 9])
def test_killed_while_it_evicts_it_opens_at_its_last_commit(tmp_path: Path, kill_after: int) -> None:
    code = """
        import sys, numpy as np, bunkbed as bb
        table = bb.create(
            sys.argv[1], dim=16, num_rows=5000, optimizer=bb.Adam(lr=0.01), init=bb.Normal(0.1), seed=11, ram="700KiB"
        )
        rng = np.random.default_rng(0)
        for step in range(1, 10_000):
            ids = rng.integers(0, 5000, 400)
            table.update(ids, rng.standard_normal((400, 16)).astype(np.float32))
            if step % 5 == 0:
                table.commit(meta={"step": step})
                print(step, flush=True)
    """
    path = tmp_path / "user"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(kill_after):
        process.stdout.readline()
    process.kill()
    process.stdout.close()
    process.wait()
    assert bb.check(path) == []
    oracle = ReferenceTable(**KWARGS)
    with bb.open(path, ram="700KiB") as table:
        assert table.meta["step"] == table.step >= 5 * kill_after
        rng = np.random.default_rng(0)
        for _ in range(table.step):
            ids = rng.integers(0, 5000, 400)
            oracle.update(ids, rng.standard_normal((400, 16)).astype(np.float32))
        assert_same_rows(table, oracle, np.arange(5000))
        train(table, oracle, steps=3)
        assert_same_rows(table, oracle, np.arange(5000))


def test_threads_take_turns(tmp_path: Path) -> None:
    """Any thread may use a table; updates are whole, lookups never see half of one."""
    with bb.create(
        tmp_path / "user", dim=32, num_rows=2000, optimizer=bb.SGD(lr=1.0), init=bb.Zeros(), ram="4MiB"
    ) as table:
        everything = np.arange(2000)
        stop = threading.Event()
        problems: list[str] = []

        def look() -> None:
            while not stop.is_set():
                rows = table.lookup(everything)
                if (rows != rows[0, 0]).any():
                    problems.append("half an update was seen")
                    return

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(30):
            table.update(everything, -np.ones((2000, 32), np.float32))
        stop.set()
        for thread in threads:
            thread.join()
        assert problems == [] and (table.lookup(everything) == 30).all()


@pytest.mark.usefixtures("native_defaults")
def test_thread_counts() -> None:
    bb.set_num_threads(3)
    assert bb.get_num_threads() == 3
    for bad, kind in ((0, ValueError), (-1, ValueError), (1.5, TypeError), ("2", TypeError)):
        with pytest.raises(kind, match=str(bad)):
            bb.set_num_threads(bad)
    assert bb.get_num_threads() == 3


@pytest.mark.usefixtures("native_defaults")
def test_simd_levels_by_name() -> None:
    with pytest.raises(ValueError, match=r"avx2.*sse9"):
        _native.set_simd("sse9")
    _native.set_simd("scalar")
    assert _native.simd() == "scalar"
    _native.set_simd("auto")
    assert _native.simd() in ("scalar", "avx2", "avx512")


@pytest.mark.usefixtures("native_defaults")
def test_io_by_name() -> None:
    with pytest.raises(ValueError, match=r"uring, threads, auto; got 'aio'"):
        _native.set_io("aio")
    _native.set_io("threads")
    assert _native.io() == "threads"
    _native.set_io("auto")
    assert _native.io() in ("uring", "threads")


@pytest.mark.usefixtures("native_defaults")
@pytest.mark.parametrize("rows_at_once", [40, 3000])
def test_io_set_later_serves_a_table_that_is_open(tmp_path: Path, rows_at_once: int) -> None:
    with bb.create(tmp_path / "t", dim=64, num_rows=40_000, ram="2MiB") as table:
        table.set(np.arange(table.num_rows), np.ones((table.num_rows, 64), np.float32))
        table.commit()
        ways = ["threads", *(["uring"] if _native.io() == "uring" else [])]
        for turn, way in enumerate([*ways, *ways]):
            _native.set_io(way)
            before = _native.io_counts()
            table.lookup(np.arange(rows_at_once) + turn * 5000)
            made = {name: count - before[name] for name, count in _native.io_counts().items()}
            assert made.pop(way) > 0
            assert not any(made.values())


def test_a_wrong_io_in_the_environment_is_an_error(tmp_path: Path) -> None:
    code = "import sys, bunkbed as bb; bb.create(sys.argv[1], dim=4, num_rows=9)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "t")],
        capture_output=True,
        text=True,
        env={**os.environ, "BUNKBED_IO": "fast"},
    )
    assert "ValueError: io must be one of uring, threads, auto; got 'fast' (BUNKBED_IO, set_io)" in done.stderr
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("size", [1000, 20_000])
@pytest.mark.parametrize("threads", [1, 3])
def test_sums_of_a_batch_are_the_reference(size: int, threads: int) -> None:
    from bunkbed.testing.arithmetic import sum_duplicates

    rng = np.random.default_rng(0)
    ids = rng.integers(0, size // 3, size)
    grads = rng.standard_normal((size, 7)).astype(np.float32)
    before = bb.get_num_threads()
    bb.set_num_threads(threads)
    try:
        with bb.create(None, dim=7, num_rows=size) as table:
            batch = table.batch(ids)
            sums, norm = batch.sum(grads)
    finally:
        bb.set_num_threads(before)
    expected, expected_sums = sum_duplicates(ids, grads)
    assert batch.unique().tolist() == expected.tolist() and len(batch) == len(expected)
    assert_same_bits(sums, expected_sums)
    assert norm == pytest.approx(float(np.linalg.norm(expected_sums.astype(np.float64))))
    with pytest.raises(ValueError, match=rf"a batch of {size} ids got {size - 1} gradients"):
        batch.sum(grads[1:])


@pytest.mark.parametrize("ram", ["smallest", "64MiB"])
@pytest.mark.parametrize("optimizer", [bb.Adam(lr=0.1), bb.RowwiseAdagrad(lr=0.1)])
def test_a_batch_is_looked_up_and_updated_as_its_ids(tmp_path: Path, ram: Any, optimizer: Any) -> None:
    """Rows in RAM, on disk and never trained; more rows in a batch than frames."""
    kwargs = {**KWARGS, "optimizer": optimizer}
    if ram == "smallest":
        ram = smallest_ram(lambda n: bb.create(tmp_path / f"probe{n}", ram=n, **kwargs))
    table = bb.create(tmp_path / "table", ram=ram, **kwargs)
    oracle = ReferenceTable(**kwargs)
    rng = np.random.default_rng(5)
    for size in (1, 50, 3000, 9000):
        ids = zipf_ids(rng, KWARGS["num_rows"], size)
        grads = rng.standard_normal((size, KWARGS["dim"])).astype(np.float32)
        for touch in (False, True):
            batch = table.batch(ids)
            assert_same_bits(table.lookup_batch(batch, size, touch=touch), oracle.lookup(ids))
        sums, _ = batch.sum(grads)
        table.update_batch(batch, sums, lr=0.05)
        oracle.update(ids, grads, lr=0.05)
        stats = table.stats()
        assert stats["hits"] + stats["misses"] + stats["first_touches"] == stats["unique_rows"]
    assert_same_rows(table, oracle, np.arange(KWARGS["num_rows"]))
    with pytest.raises(ValueError, match="lr must be finite"):
        table.update_batch(batch, sums, lr=-1.0)
    table.close()
    with pytest.raises(bb.TableClosedError, match="is closed"):
        table.update_batch(batch, sums)


def test_a_batch_names_the_first_bad_id() -> None:
    with (
        bb.create(None, dim=4, num_rows=10) as table,
        pytest.raises(IndexError, match=r"id 10 at position 2 is outside"),
    ):
        table.batch(np.array([1, 9, 10, -1]))
    with (
        bb.create(None, dim=4, num_rows=10) as table,
        pytest.raises(IndexError, match=r"id -1 at position 0 is outside"),
    ):
        table.batch(np.array([-1, -1, -1]))


def test_budget_shared_by_tables(tmp_path: Path) -> None:
    budget = bb.Budget("32MiB")
    tables = [bb.create(tmp_path / name, ram=budget, **KWARGS) for name in ("a", "b", "c")]
    oracle = ReferenceTable(**KWARGS)
    train(*tables, oracle)
    assert 0 < budget.used_bytes <= budget.total_bytes
    tables[1].close()
    train(tables[0], tables[2], oracle, seed=1)
    for table in (tables[0], tables[2]):
        assert_same_rows(table, oracle, np.arange(5000))
        table.close()
    with pytest.raises((MemoryError, ValueError), match=r"need"):
        tiny = bb.Budget(100_000)
        bb.create(tmp_path / "d", ram=tiny, **KWARGS)
    assert not (tmp_path / "d").exists()


def test_scan_fails_when_rows_change_below_it(tmp_path: Path) -> None:
    with bb.create(tmp_path / "user", ram="16MiB", **KWARGS) as table:
        train(table)
        scanning = table.scan(chunk=10)
        next(scanning)
        train(table, steps=1)
        with pytest.raises((RuntimeError, bb.BunkbedError), match=r"chang"):
            list(scanning)


def test_overflowing_gradient_sums_change_nothing(tmp_path: Path) -> None:
    with bb.create(tmp_path / "user", ram="16MiB", **KWARGS) as table:
        train(table)
        before = table.lookup([3])
        big = np.full((2, 16), 3e38, np.float32)  # each finite, their sum is not
        with pytest.raises(ValueError, match=r"3"):
            table.update([3, 3], big)
        assert_same_bits(table.lookup([3]), before)
        assert table.step == 10


def test_lookup_alone_keeps_a_table_as_it_was(tmp_path: Path) -> None:
    with bb.create(tmp_path / "user", ram="16MiB", **KWARGS) as table:
        train(table)
    before = {p.name: p.read_bytes() for p in (tmp_path / "user").rglob("*") if p.is_file()}
    with bb.open(tmp_path / "user", mode="r", ram="16MiB") as reader:
        reader.lookup(np.arange(5000))
    assert {p.name: p.read_bytes() for p in (tmp_path / "user").rglob("*") if p.is_file()} == before


def test_opening_to_create_takes_the_optimizer_that_open_is_given(tmp_path: Path) -> None:
    for options in ({}, {"durability": "scratch"}):
        path = tmp_path / f"t{len(options)}"
        with bb.open(path, create={"dim": 2, **options}, optimizer=bb.SGD(0.5)) as table:
            assert table.optimizer == bb.SGD(0.5)


def test_a_window_closes_after_a_rewind_that_failed(tmp_path: Path) -> None:
    ids = np.arange(40_000)
    table = bb.create(tmp_path / "t", dim=16, num_rows=len(ids), optimizer=bb.SGD(lr=1.0), ram="2MiB")
    table.update(ids, np.ones((len(ids), 16), np.float32))
    table.commit(keep="a")
    for _ in range(2):
        table.update(ids[:100], np.ones((100, 16), np.float32))
        table.commit()
    window = Window(table)
    window.push(ids[:500])
    window.push(ids[500:1000])
    window.advance()
    with min((tmp_path / "t").glob("segment-*")).open("r+b") as segment:
        segment.truncate(4096)
    with pytest.raises(bb.CorruptionError):
        table.rewind("a")
    window.close()  # there are no rows to give back any more
    with pytest.raises(bb.BunkbedError, match="refuses use until it is reopened"):
        table.lookup(ids)
    table.close(commit=False)
