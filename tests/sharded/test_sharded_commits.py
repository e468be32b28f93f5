"""`bb.ShardedTable`: commits, readers and copies of all shards as one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest

import bunkbed as bb
from bunkbed import _native
from bunkbed.files.run_files import RunFiles
from bunkbed.testing.compare import assert_same_bits
from sharded_setup import EVERY, FACTS, ROWS, assert_same_tables, batches, make, train


def test_every_shard_opens_at_the_commit_before_one_that_failed_half_way(tmp_path: Path) -> None:
    one = bb.create(None, **FACTS)
    train(one)
    for name, nth in [("manifest.durable", 1), ("manifest.durable", 2), ("manifest.durable", 3), ("run.tables", 1)]:
        path = tmp_path / f"{name}-{nth}"
        table = make(path)
        train(table)
        table.commit(keep="good", meta={"at": 5})
        train(table, seed=1)
        _native.arm_failpoint(name, nth, "error")
        with pytest.raises(OSError, match="injected"):
            table.commit(meta={"at": 10})
        _native.disarm_failpoints()
        table.close(commit=False)
        with bb.open(path) as again:
            assert (again.epoch, again.meta) == (1, {"at": 5})
            assert {core.step() for core in again.core._cores} == {5}
            assert_same_tables(again, one)
            train(again, seed=1)
            assert again.commit() == 2
        assert bb.check(path) == []


def test_what_a_failed_commit_held_is_in_the_next_one(tmp_path: Path) -> None:
    table = make(tmp_path / "user")
    train(table)
    _native.arm_failpoint("run.tables", 1, "error")
    with pytest.raises(OSError, match="injected"):
        table.commit(meta={"at": 5})
    _native.disarm_failpoints()
    assert table.epoch == 0
    table.close()
    with bb.open(tmp_path / "user", mode="r") as reader:
        assert (reader.epoch, reader.step, reader.meta) == (1, 5, {"at": 5})


def test_a_commit_is_of_one_step_while_others_train(tmp_path: Path) -> None:
    table = make(tmp_path / "user")
    stop = threading.Event()

    def work() -> None:
        for ids, grads in batches(40):
            table.update(ids, grads)
        stop.set()

    thread = threading.Thread(target=work)
    thread.start()
    seen = set()
    while not stop.is_set():
        table.commit()
        with bb.open(tmp_path / "user", mode="r", ram="8MiB") as reader:
            seen.add(reader.step)  # opening checks that all shards agree
    thread.join()
    table.close()
    assert len(seen) > 1
    one = bb.create(None, **FACTS)
    train(one, steps=40)
    with bb.open(tmp_path / "user") as again:
        assert_same_tables(again, one)


def test_a_lookup_sees_all_of_a_step_or_none_of_it(tmp_path: Path) -> None:
    facts = {"dim": 4, "num_rows": ROWS, "optimizer": bb.SGD(lr=1.0), "init": bb.Zeros(), "dtype": "float32"}
    table = bb.ShardedTable.create(tmp_path / "user", shards=3, ram="32MiB", **facts)
    stop = threading.Event()

    def work() -> None:
        for _ in range(100):
            table.update(EVERY, np.ones((ROWS, 4), np.float32))
        stop.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not stop.is_set():
        assert np.unique(table.lookup(EVERY)).size == 1
    thread.join()
    assert table.lookup([0])[0, 0] == -100
    table.close()


def test_a_reader_moves_all_shards_together(tmp_path: Path) -> None:
    table = make(tmp_path / "user")
    one = bb.create(None, **FACTS)
    reader = bb.open(tmp_path / "user", mode="r", ram="8MiB")
    train(table, one)
    assert (table.commit(), reader.refresh(), reader.epoch) == (1, 1, 1)
    assert_same_bits(reader.lookup(EVERY), one.lookup(EVERY))
    assert reader.stats()["indexed_records"] > 0
    train(table, one, seed=1)
    table.commit(keep="ten")
    frozen = bb.open(tmp_path / "user", snapshot="ten", ram="8MiB")
    train(table, seed=2)
    # Shards are durable, the parent does not name them: the reader may not see them.
    _native.arm_failpoint("run.tables", 1, "error")
    with pytest.raises(OSError, match="injected"):
        table.commit()
    _native.disarm_failpoints()
    assert reader.refresh() == 2
    assert reader.step == 10
    assert_same_bits(reader.lookup(EVERY), one.lookup(EVERY))
    train(one, seed=2)
    table.commit()
    assert reader.refresh() == 3 and reader.step == 15
    assert_same_bits(reader.lookup(EVERY), one.lookup(EVERY))
    assert (frozen.refresh(), frozen.epoch, frozen.step) == (2, 2, 10)
    table.rewind("ten")
    reader.refresh()
    assert_same_bits(reader.lookup(EVERY), frozen.lookup(EVERY))
    for t in (frozen, reader, table):
        t.close()


def test_a_reader_whose_refresh_failed_refuses_use_until_one_succeeds(tmp_path: Path) -> None:
    table = make(tmp_path / "user")
    reader = bb.open(tmp_path / "user", mode="r")
    train(table)
    table.commit()
    hidden = tmp_path / "hidden"
    table.directories[2].rename(hidden)
    with pytest.raises((OSError, bb.BunkbedError)):
        reader.refresh()
    with pytest.raises(bb.BunkbedError, match=r"table 'user' refuses use: moving to commit 1 failed.*refresh\(\)"):
        reader.lookup([1])
    hidden.rename(table.directories[2])
    assert reader.refresh() == 1
    assert_same_bits(reader.lookup(EVERY), table.lookup(EVERY))
    reader.close()
    table.close()


def test_snapshots_checks_and_copies_know_it(tmp_path: Path) -> None:
    path, copied = tmp_path / "user", tmp_path / "copy"
    with make(path, None, directories=[tmp_path / "a", tmp_path / "b"]) as table:
        train(table)
        table.commit(keep="five", meta={"at": 5})
        assert bb.copy(path, copied).epoch == 1
        train(table, seed=1)
        table.commit(keep="ten")
        assert table.snapshots() == bb.snapshots(path) == {"five": 1, "ten": 2}
        assert [(s.name, s.step, s.stored_rows) for s in bb.describe_snapshots(path)][1] == ("ten", 10, len(table))
        assert bb.copy(path, copied).present_bytes > 0
        bb.drop_snapshot(path, "five")  # of the table that is open
        assert table.snapshots() == {"ten": 2}
        rows, uuid = table.lookup(EVERY), table.uuid
        assert len(table.explain().counts) > 10
    bb.drop_snapshot(path, "ten")
    assert bb.snapshots(path) == {} and bb.check(path) == [] == bb.check(copied)
    with bb.open(copied) as other:
        assert other.uuid == uuid and other.directories[1] == copied / "tables" / "shard-0001"
        assert_same_bits(other.lookup(EVERY), rows)
        train(other, seed=2)
    bb.copy(path, tmp_path / "small", dtype="float32", optimizer=bb.SGD(lr=1.0))
    with bb.open(tmp_path / "small") as small:
        assert isinstance(small, bb.ShardedTable) and small.uuid != uuid and small.step == 10
        stored = small.contains(EVERY)
        assert_same_bits(small.lookup(EVERY[stored]), rows[stored])


def test_check_finds_what_is_wrong_with_a_shard_and_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "user"
    with make(path, None, directories=[tmp_path / "a", tmp_path / "b"]) as table:
        train(table)
        table.commit()
        rows = table.lookup(EVERY)
        train(table, seed=1)
    newest = max((tmp_path / "b" / "shard-0001").glob("manifest-*"))
    data = bytearray(newest.read_bytes())
    data[60] ^= 1
    newest.write_bytes(data)
    problems = bb.check(path)
    assert problems and any(str(tmp_path / "b" / "shard-0001") in str(problem) for problem in problems)
    assert bb.check(path, repair=True, epoch=1) == []
    with bb.open(path) as table:
        assert table.step == 5 and table.directories[1] == tmp_path / "b" / "shard-0001"
        assert_same_bits(table.lookup(EVERY), rows)
    shutil.rmtree(tmp_path / "b")
    assert any("shard-0001' is lost to the run" in str(problem) for problem in bb.check(path))
    with pytest.raises(FileNotFoundError, match="shard-0001"):
        bb.open(path)


def test_rows_left_uncommitted_are_told_once_by_the_whole(tmp_path: Path) -> None:
    table = make(tmp_path / "user")
    train(table)
    with pytest.warns(bb.UncommittedWarning) as warned:
        del table
    assert len(warned) == 1
    assert "table 'user' at" in str(warned[0].message) and "of 5 steps since commit 0" in str(warned[0].message)
    bb.open(tmp_path / "user").close()  # nothing holds its lock


def test_a_program_that_ends_tells_of_uncommitted_rows_once(tmp_path: Path) -> None:
    code = f"""
        import numpy as np, bunkbed as bb
        table = bb.ShardedTable.create({str(tmp_path / "user")!r}, shards=3, dim=2, num_rows=100, ram="32MiB")
        table.update(np.arange(100), np.ones((100, 2), np.float32))
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.count("UncommittedWarning: table") == 1, done.stderr
    assert "table 'user' at" in done.stderr and "100 changed rows of 1 step" in done.stderr


def test_a_child_after_a_fork_is_refused(tmp_path: Path) -> None:
    table = make(tmp_path / "user")
    train(table)
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with table.core._lock:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)  # no thread releases this lock in the child
    thread.start()
    held.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork while threads run
        pid = os.fork()
    if pid == 0:
        code = 1
        signal.alarm(10)
        try:
            table.lookup(EVERY)
        except bb.TableClosedError as error:
            code = 0 if "table 'user' was opened before this process was forked" in str(error) else 2
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    over.set()
    thread.join()
    assert code == 0
    table.close()


def test_a_snapshot_opens_while_its_writer_removes_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that was listed may be gone when its manifest is read."""
    path = tmp_path / "table"
    with bb.ShardedTable.create(path, dim=4, num_rows=10, shards=2, ram="4MiB") as table:
        table.update(np.array([3]), np.ones((1, 4), np.float32))
        rows = table.get([3]).copy()
        table.commit(keep="best")
        for _ in range(3):
            table.update(np.array([3]), np.ones((1, 4), np.float32))
            newest = table.commit()
        listed = RunFiles.epochs
        assert newest - 2 not in listed(RunFiles(path))
        monkeypatch.setattr(RunFiles, "epochs", lambda files: sorted([*listed(files), newest - 2]))
        with bb.open(path, mode="r", snapshot="best") as reader:
            assert_same_bits(reader.get([3]), rows)
        monkeypatch.undo()
