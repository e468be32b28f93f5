"""Sharded tables of which one shard fails: all shards change or none, or nothing goes on."""

from __future__ import annotations

import _thread
import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed import _native
from bunkbed.testing import ReferenceTable
from bunkbed.testing.compare import assert_same_rows

ROWS = 6_000
FACTS: dict[str, Any] = {
    "dim": 16,
    "num_rows": ROWS,
    "optimizer": bb.Adam(lr=0.01),
    "init": bb.Normal(0.1),
    "seed": 3,
}
EVERY = np.arange(ROWS)
RAM = "840KiB"  # three shards of fewer frames than rows


@pytest.fixture
def faulty():
    """A filesystem that can fail, under everything opened in the test."""
    vfs = _native.FaultVfs()
    _native.use_vfs(vfs)
    yield vfs
    vfs.heal()
    _native.use_vfs(None)
    _native.disarm_failpoints()


class Trial:
    """A table with every row stored and committed as ``"good"``, and its oracle."""

    def __init__(self, path: Path, **kwargs: Any) -> None:
        self.path = path
        self.table = bb.ShardedTable.create(path, **{"shards": 3, "ram": RAM, **FACTS, **kwargs})
        self.oracle = ReferenceTable(**FACTS)
        self.train(1)
        self.table.commit(keep="good")
        self.oracle.commit(keep="good")

    def train(self, seed: int, *, oracle: bool = True) -> None:
        grads = np.random.default_rng(seed).standard_normal((ROWS, 16)).astype(np.float32)
        self.table.update(EVERY, grads)
        if oracle:
            self.oracle.update(EVERY, grads)

    def check(self) -> None:
        assert_same_rows(self.table, self.oracle, EVERY)
        assert {core.step() for core in self.table.core._cores} == {self.oracle.step}


class Failing:
    """A shard's core of which one method fails, or does something first."""

    def __init__(self, core: Any, method: str, error: Exception | None = None, first: Any = None) -> None:
        self.core, self.method, self.error, self.first = core, method, error, first

    def __getattr__(self, name: str) -> Any:
        if name != self.method:
            return getattr(self.core, name)

        def call(*arguments: Any) -> Any:
            if self.first is not None:
                self.first()
            if self.error is not None:
                raise self.error
            return getattr(self.core, name)(*arguments)

        return call


def refused(table: bb.ShardedTable, message: str) -> None:
    """Everything that would use rows is refused, and says why and what to do."""
    ones = np.ones((1, 16), np.float32)
    for call in (
        lambda: table.lookup([1]),
        lambda: table.lookup_bags([1], [0]),
        lambda: table.get([1]),
        lambda: table.contains([1]),
        lambda: table.batch([1]),
        lambda: table.stage([1]),
        lambda: list(table.scan()),
        lambda: table.update([1], ones),
        lambda: table.set([1], ones),
        lambda: table.commit(),
        lambda: table.begin_commit(),
        lambda: table.commit(keep="torn"),
        lambda: table.drop("good"),
        lambda: table.close(),
    ):
        with pytest.raises(
            bb.BunkbedError, match=rf"table 'user' refuses use: {message}.*rewind\(\).*close\(commit=False\)"
        ):
            call()
    assert not table.closed and table.is_dirty


@pytest.mark.parametrize("way", ["rewind", "reopen"])
def test_a_read_that_fails_in_one_shard_stops_the_table_until_it_is_at_a_commit(
    way: str, faulty: Any, tmp_path: Path, native_defaults: None
) -> None:
    bb.set_num_threads(1)  # shards one after another: what the k-th operation is does not vary
    _native.set_io("threads")
    torn = 0
    for at in (1, 2, 10, 100, 200):
        trial = Trial(tmp_path / f"{at}" / "user")
        faulty.set_fault(at, "error", errno.EIO)
        faulty.repeat_every(1, 2)  # where a read of several records fails, the core reads the first alone
        try:
            trial.train(2, oracle=False)
        except OSError:  # in the first shard's preparing, or in all: nothing changed
            faulty.heal()
            trial.check()
        except bb.BunkbedError:
            torn += 1
            faulty.heal()
            refused(trial.table, "step 2 failed in shard [012] of 3 after other shards had taken their part")
            if way == "rewind":
                try:
                    trial.table.rewind("good")
                except bb.BunkbedError as error:  # a shard that failed within its part must be opened again
                    assert "until it is reopened" in str(error)
                    with pytest.raises(bb.BunkbedError, match="refuses use"):
                        trial.table.lookup([1])
                    trial.table.close(commit=False)
                    trial.table = bb.open(trial.path, ram=RAM)  # type: ignore[assignment]
            else:
                trial.table.close(commit=False)
                trial.table = bb.open(trial.path, ram=RAM)  # type: ignore[assignment]
            trial.check()
        else:
            trial.table.close(commit=False)
            continue
        trial.train(3)
        trial.check()
        trial.table.close()
        assert bb.check(trial.path) == []
    assert torn >= 2


@pytest.mark.parametrize("method", ["update_batch", "set", "set_optimizer"])
def test_a_change_that_fails_in_one_shard_is_never_looked_up_or_committed(method: str, tmp_path: Path) -> None:
    trial = Trial(tmp_path / "user")
    table, cores = trial.table, trial.table.core._cores
    sound = cores[1]
    cores[1] = Failing(sound, method, OSError(errno.ENOSPC, "no space"))
    what = {"update_batch": "step 2", "set": r"set\(\)", "set_optimizer": "new hyperparameters"}[method]
    message = rf"{what} failed in shard 1 of 3 after other shards had taken their part \(.*no space\)"
    with pytest.raises(bb.BunkbedError, match=message) as error:
        if method == "update_batch":
            trial.train(2, oracle=False)
        elif method == "set":
            table.set(EVERY, np.ones((ROWS, 16), np.float32))
        else:
            table.optimizer = bb.Adam(lr=0.5)
    assert isinstance(error.value.__cause__, OSError)
    cores[1] = sound
    if method != "set_optimizer":
        refused(table, message)
    table.rewind("good")
    table.optimizer = FACTS["optimizer"]
    trial.check()
    trial.train(3)
    trial.check()
    table.close()
    trial.table = bb.open(trial.path, ram=RAM)  # type: ignore[assignment]
    trial.check()
    trial.table.close()


def test_an_update_that_fails_in_every_shard_changed_nothing(tmp_path: Path) -> None:
    trial = Trial(tmp_path / "user")
    cores = list(trial.table.core._cores)
    trial.table.core._cores[:] = [Failing(core, "update_batch", OSError(errno.EIO, "gone")) for core in cores]
    with pytest.raises(OSError, match="gone"):
        trial.train(2, oracle=False)
    trial.table.core._cores[:] = cores
    trial.check()
    trial.train(3)
    trial.check()
    trial.table.close()


def test_a_shard_that_cannot_be_written_is_found_before_another_changes(tmp_path: Path) -> None:
    trial = Trial(tmp_path / "user")
    ones = np.ones((ROWS, 16), np.float32)
    with bb.open(trial.path, mode="r", ram="8MiB") as reader:
        core = reader.core._cores[2]  # as after a failed sync: the shard itself refuses
        trial.table.core._cores[2], own = core, trial.table.core._cores[2]
        for call in (lambda: trial.train(2, oracle=False), lambda: trial.table.set(EVERY, ones)):
            with pytest.raises(bb.ReadOnlyError, match="table 'user/shard-0002' is open for reading"):
                call()
        trial.table.core._cores[2] = own
    trial.check()
    trial.train(2)
    trial.check()
    trial.table.close()


def test_rows_beyond_a_disk_limit_change_no_shard(tmp_path: Path) -> None:
    table = bb.ShardedTable.create(
        tmp_path / "user", **{**FACTS, "num_rows": 200_000}, shards=2, ram="10MiB", disk="56MiB"
    )
    ids = np.arange(200_000)
    stored = 0
    for begin in range(0, ids.size, 10_000):
        part = ids[begin : begin + 10_000]
        before = table.step
        try:
            table.update(part, np.ones((part.size, 16), np.float32))
        except OSError as error:
            assert error.errno == errno.ENOSPC and "table 'user/shard-" in str(error)
            assert {core.step() for core in table.core._cores} == {before}
            assert not table.contains(part).any()
            break
        stored += part.size
        table.commit()
    else:
        pytest.fail("the limit bound nothing")
    assert len(table) == stored
    table.update(ids[:100], np.ones((100, 16), np.float32))
    table.close()


@pytest.mark.parametrize(("call", "admit"), [("update", None), ("set", None), ("set", 0.001)])
def test_rows_beyond_the_memory_of_one_shard_change_no_shard(call: str, admit: float | None, tmp_path: Path) -> None:
    facts = {**FACTS, "dim": 2, "num_rows": None, "admit": admit}
    table = bb.ShardedTable.create(tmp_path / "user", **facts, shards=2, ram="2MiB")
    ids = np.arange(1_000_000)
    owners = table.shards_of(ids)
    few, many = ids[owners == 0][:100], ids[owners == 1]
    for begin in range(0, many.size, 5_000):
        part = np.concatenate([few, many[begin : begin + 5_000]])
        before = table.step, table.get(few)
        try:
            getattr(table, call)(part, np.full((part.size, 2), begin + 1.0, np.float32))
        except MemoryError as error:
            assert "shard-0001" in str(error)
            break
    else:
        pytest.fail("the budget bound nothing")
    assert {core.step() for core in table.core._cores} == {before[0]}
    assert np.array_equal(table.get(few), before[1])
    table.update(few, np.ones((few.size, 2), np.float32))
    table.close()


def test_ctrl_c_within_an_update_leaves_the_shards_agreed(tmp_path: Path) -> None:
    trial = Trial(tmp_path / "user")
    cores = trial.table.core._cores
    sound = list(cores)
    for index in range(3):
        cores[index] = Failing(sound[index], "update_batch", first=_thread.interrupt_main)
        with pytest.raises(KeyboardInterrupt):
            trial.train(2 + index, oracle=False)
        cores[:] = sound
        grads = np.random.default_rng(2 + index).standard_normal((ROWS, 16)).astype(np.float32)
        trial.oracle.update(EVERY, grads)  # it came to its end all the same
        trial.check()
    trial.table.close()


def test_going_back_that_fails_in_one_shard_stops_the_table(tmp_path: Path) -> None:
    trial = Trial(tmp_path / "user")
    trial.train(2)
    trial.table.commit()
    _native.arm_failpoint("rewind.loaded", 2, "error")
    with pytest.raises(OSError, match="injected"):
        trial.table.rewind("good")
    _native.disarm_failpoints()
    with pytest.raises(bb.BunkbedError, match=r"table 'user' refuses use: going back to commit 'good' failed half-way"):
        trial.table.lookup([1])
    with pytest.raises(bb.BunkbedError, match="refuses use"):
        trial.table.close()
    trial.table.close(commit=False)
    trial.table = bb.open(trial.path, ram=RAM)  # type: ignore[assignment]
    trial.check()  # of the commit before going back
    trial.table.close()


def test_a_shard_written_on_its_own_is_noticed(tmp_path: Path) -> None:
    trial = Trial(tmp_path / "user")
    trial.table.close()
    run = bb.Run(trial.path, _shards_of="user")
    run.table("shard-0001").update([], np.empty((0, 16), np.float32))
    run.commit()
    run.close()
    with pytest.raises(bb.CorruptionError, match=r"its shards are at different steps \(1, 2, 1\) in commit 2"):
        bb.open(trial.path, ram=RAM)


@pytest.mark.parametrize("place", ["commit.drained", "manifest.linked", "run.tables", "run.published"])
def test_a_process_that_dies_within_a_commit_leaves_one_commit_in_all_shards(place: str, tmp_path: Path) -> None:
    trial = Trial(tmp_path / "user")
    trial.table.close()
    code = f"""
        import numpy as np, bunkbed as bb
        from bunkbed import _native

        table = bb.open({str(trial.path)!r}, ram="{RAM}")
        grads = np.random.default_rng(2).standard_normal(({ROWS}, 16)).astype(np.float32)
        table.update(np.arange({ROWS}), grads)
        _native.arm_failpoint({place!r}, {1 if place.startswith("run") else 2}, "die")
        table.commit()
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True)
    assert done.returncode != 0 and not done.stderr, done.stderr
    if place == "run.published":
        grads = np.random.default_rng(2).standard_normal((ROWS, 16)).astype(np.float32)
        trial.oracle.update(EVERY, grads)
    trial.table = bb.open(trial.path, ram=RAM)  # type: ignore[assignment]
    trial.check()
    trial.train(5)
    trial.check()
    trial.table.close()
    assert bb.check(trial.path) == []
