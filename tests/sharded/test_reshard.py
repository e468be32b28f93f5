"""`bb.reshard`: the same bits with another number of shards, and a whole table after a kill at any point."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bunkbed as bb
from bunkbed import _native
from bunkbed.testing.compare import assert_same_bits
from sharded_setup import EVERY, FACTS, ROWS, assert_same_tables, make, reshard_and_die, train


def _facts(table: Any) -> tuple[Any, ...]:
    return (table.uuid, table.epoch, table.step, table.meta, table.snapshots(), table.seed, table.init, table.dtype,
            table.num_rows, table.optimizer)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "optimizer",
    [bb.SGD(), bb.Adagrad(), bb.RowwiseAdagrad(), bb.Adam(lr=0.02), bb.Adam(state_dtype="bfloat16")],
    ids=repr,
)
def test_one_four_three_one_shards_have_the_same_bits(tmp_path: Path, dtype: str, optimizer: Any) -> None:
    facts = {**FACTS, "dtype": dtype, "optimizer": optimizer}
    one = bb.create(None, **facts)
    with bb.create(tmp_path / "t", ram="32MiB", **facts) as plain:
        train(plain, one)
        plain.commit(meta={"at": 5}, keep="best")
        before = _facts(plain)
    for shards in (1, 4, 3, 1):
        done = bb.reshard(tmp_path / "t", shards=shards, ram="64MiB")
        assert (done.shards, done.epoch, done.rows) == (shards, 1, len(one))
        assert bb.check(tmp_path / "t") == []
        with bb.open(tmp_path / "t", ram="32MiB") as table:
            assert isinstance(table, bb.ShardedTable) and table.num_shards == shards and _facts(table) == before
            assert_same_tables(table, one)
    with bb.open(tmp_path / "t", ram="32MiB") as table:
        train(table, one, seed=1)
        assert_same_bits(table.lookup(EVERY), one.lookup(EVERY))
        assert table.commit() == 2
    assert bb.reshard(tmp_path / "t", shards=1).rows == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["t"]


def test_bad_input_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with make(path, 2) as table:
        train(table)
        table.commit(keep="early")
        train(table, seed=1)
        with pytest.raises(bb.TableLockedError, match="open for writing in this process"):
            bb.reshard(path, shards=3)
    with bb.Run(tmp_path / "run", ram="32MiB") as run:
        run.table("t", create=FACTS)
        run.commit()
    (tmp_path / "empty").mkdir()
    (tmp_path / "workers" / "shard-0000-of-0002").mkdir(parents=True)
    make(tmp_path / "out", 2, directories=[tmp_path / "ssd"]).close()
    cases: list[tuple[type[Exception], str, Path, int]] = [
        (ValueError, "shards must be in .*1.*1024.*0", path, 0),
        (ValueError, "shards must be in .*1025", path, 1025),
        (FileNotFoundError, "no table at", tmp_path / "none", 2),
        (bb.FormatError, "holds no table; give", tmp_path / "empty", 2),
        (bb.FormatError, "several workers", tmp_path / "workers", 2),
        (bb.FormatError, "table of a run", tmp_path / "run" / "tables" / "t", 2),
        (ValueError, "outside the table's folder", tmp_path / "out", 3),
        (ValueError, "snapshots of earlier commits.*'early'.*drop_snapshots=True", path, 3),
    ]
    for kind, text, place, shards in cases:
        with pytest.raises(kind, match=text):
            bb.reshard(place, shards=shards)
    with pytest.raises(MemoryError, match="too small"):
        bb.reshard(path, shards=3, ram="1MiB", drop_snapshots=True)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="notes"):
        bb.reshard(path, shards=3, drop_snapshots=True)
    (path / "notes.txt").unlink()
    assert bb.snapshots(path) == {"early": 1} and not list(tmp_path.glob(".*"))
    assert bb.reshard(path, shards=3, drop_snapshots=True, ram="64MiB").shards_before == 2
    assert bb.snapshots(path) == {} and bb.check(path) == []


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_table_that_another_process_writes_is_refused(tmp_path: Path, is_sharded: bool) -> None:
    path = tmp_path / "t"
    (make(path, 2) if is_sharded else bb.create(path, ram="32MiB", **FACTS)).close()
    code = f"import bunkbed as bb; table = bb.open({str(path)!r}); print('open', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"open\n"
        with pytest.raises(bb.TableLockedError, match=f"process {other.pid}"):
            bb.reshard(path, shards=3)
        other.communicate(b"\n")


def _after_a_kill(path: Path, one: Any, shards: set[int]) -> None:
    with bb.open(path, ram="64MiB") as table:
        assert isinstance(table, bb.ShardedTable) and table.num_shards in shards
        assert_same_tables(table, one)
        assert table.meta == {"at": 5}
    assert bb.check(path) == []
    bb.reshard(path, shards=2, ram="64MiB")
    bb.reshard(path, shards=4, ram="64MiB")
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    with bb.open(path, mode="r", ram="64MiB") as table:
        assert_same_tables(table, one)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, Any]:
    one = bb.create(None, **FACTS)
    with make(tmp_path / "t", 2) as table:
        train(table, one)
        table.commit(meta={"at": 5})
    return tmp_path / "t", one


@pytest.mark.parametrize(
    ("name", "nth", "shards"),
    [
        ("manifest.durable", 1, 2),
        ("manifest.durable", 5, 2),
        ("run.tables", 1, 2),
        ("run.published", 1, 2),
        ("run.published", 3, 2),
        ("exchange", 1, 2),
        ("exchange", 2, 3),
    ],
)
def test_a_process_that_dies_leaves_the_old_table_or_the_new(
    trained: tuple[Path, Any], name: str, nth: int, shards: int
) -> None:
    path, one = trained
    reshard_and_die(path, name, nth)
    _after_a_kill(path, one, {shards})


def test_a_kill_at_any_time_leaves_a_whole_table(trained: tuple[Path, Any]) -> None:
    path, one = trained
    code = f"""
import itertools
import bunkbed as bb
print("ready", flush=True)
for shards in itertools.cycle((3, 4, 2)):
    bb.reshard({str(path)!r}, shards=shards, ram="64MiB")
"""
    moments = random.Random(0)
    for _ in range(20):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
            assert other.stdout is not None and other.stdout.readline() == b"ready\n"
            time.sleep(moments.uniform(0, 0.3))
            other.send_signal(signal.SIGKILL)
        _after_a_kill(path, one, {2, 3, 4})


def test_a_failure_before_the_exchange_leaves_the_old_table(
    trained: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, one = trained
    _native.arm_failpoint("run.published", 2, "error")
    with pytest.raises(OSError, match="injected"):
        bb.reshard(path, shards=3, ram="64MiB")
    _native.disarm_failpoints()
    with bb.open(path) as table:
        assert_same_tables(table, one)
    assert [entry.name for entry in path.parent.iterdir()] == ["t"]


def test_a_new_record_that_is_damaged_is_found(trained: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    path, one = trained
    publish: Callable[..., None] = bb.ShardedTable.close

    def close_and_damage(table: Any, *args: Any, **kwargs: Any) -> None:
        publish(table, *args, **kwargs)
        if re.match(r"\..*\.reshard", table.path.name):
            segment = max(table.path.glob("tables/shard-0001/segment-*"), key=lambda file: file.stat().st_size)
            data = bytearray(segment.read_bytes())
            data[len(data) // 2] ^= 255
            segment.write_bytes(data)

    monkeypatch.setattr(bb.ShardedTable, "close", close_and_damage)
    with pytest.raises(bb.CorruptionError, match="the old table stays"):
        bb.reshard(path, shards=3, ram="64MiB")
    monkeypatch.undo()
    with bb.open(path) as table:
        assert table.num_rows == ROWS
        assert_same_tables(table, one)
