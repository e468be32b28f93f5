"""Scratch tables: they have the bits of a durable table, and nothing is kept."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.cases.exactness import smallest_ram

import bunkbed as bb
from bunkbed import _native
from bunkbed.testing import ReferenceTable
from bunkbed.testing.compare import assert_same_bits, assert_same_rows

TABLE: dict[str, Any] = {"dim": 64, "num_rows": 20_000, "optimizer": bb.Adam(lr=0.01), "seed": 3}


def scratch(path: Path, **kwargs: Any) -> bb.Table:
    return bb.create(path, durability="scratch", **{"ram": "2MiB", **TABLE, **kwargs})


def churn(table: Any, steps: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids = rng.integers(0, 20_000, 400)
        table.lookup(ids)
        table.update(ids, rng.standard_normal((400, 64)).astype(np.float32))


@pytest.fixture
def faulty() -> Iterator[Any]:
    vfs = _native.FaultVfs()
    _native.use_vfs(vfs)
    yield vfs
    _native.use_vfs(None)


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_it_overflows_compacts_and_has_the_bits_of_a_table_that_does_neither(tmp_path: Path) -> None:
    kept = bb.create(None, **TABLE)
    table = scratch(
        tmp_path / "scratch", ram=smallest_ram(lambda ram: bb.create(tmp_path / f"{ram}", ram=ram, **TABLE))
    )
    for seed in range(4):
        for t in (kept, table):
            churn(t, 40, seed)
            t.commit(meta={"seed": seed})
    stats = table.stats()
    assert stats["evictions"] > 40_000 and stats["compactions"] >= 3, stats
    # No commit names its segments: compaction removes an emptied one at once, and about two thirds of the rest is live.
    assert stats["disk_bytes"] < 1.7 * stats["live_bytes"] + (4 << 20)
    ids = np.arange(20_000)
    for slot in ("weight", *table.slots):
        assert_same_bits(table.get(ids, slot), kept.get(ids, slot), slot)
    assert table.step == kept.step and table.meta == kept.meta == {"seed": 3}
    kept.close()
    table.close()


def test_its_commits_write_and_sync_nothing(tmp_path: Path, faulty: Any) -> None:
    table = scratch(tmp_path / "t")
    faulty.fail_all("sync", errno.EIO)
    churn(table, 20)
    before, written = names(table.path), table.stats()["written_bytes"]  # type: ignore[arg-type]
    assert table.commit(meta={"step": 20}) == 1 == table.epoch
    assert table.begin_commit().wait() == 1, "nothing changed: no new epoch"
    assert table.meta == {"step": 20} and not table.is_dirty
    churn(table, 1)
    assert table.is_dirty and table.begin_commit(meta={"step": 21}).wait() == 2 and table.meta == {"step": 21}
    assert names(table.path) == before == ["lock", "manifest-0000000000000000"]  # type: ignore[arg-type]
    assert table.stats()["written_bytes"] - written < 2 << 20  # what the step evicted; 20,000 rows would be 15 MB
    table.close()


def test_what_needs_a_kept_commit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    table = scratch(tmp_path / "t")
    churn(table, 3)
    rows = table.get(np.arange(20_000))
    for call in (
        lambda: table.commit(keep="best", meta={"a": 1}),
        lambda: table.begin_commit(keep="best"),
        lambda: table.rewind("best"),
        lambda: table.rewind(0),
        lambda: table.drop("best"),
    ):
        with pytest.raises(ValueError, match=r"table 't' is a scratch table.*nothing is kept.*durability=\"durable\""):
            call()
    assert table.snapshots() == bb.snapshots(table.path) == {}  # type: ignore[arg-type]
    with pytest.raises(bb.FormatError, match="scratch table"):
        bb.open(table.path, mode="r")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"scratch table.*nothing to copy"):
        bb.copy(table.path, tmp_path / "copy")  # type: ignore[arg-type]
    assert bb.check(table.path) == []  # type: ignore[arg-type]
    assert table.epoch == 0 and table.meta == {} and table.is_dirty
    assert_same_bits(table.get(np.arange(20_000)), rows)
    table.close()


def test_where_one_was_nothing_opens_and_a_new_table_may_begin(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with scratch(path) as table:
        churn(table, 10)
        assert bb.open(path) is table and bb.open(path, create={**TABLE, "durability": "scratch"}) is table
        with pytest.raises(ValueError, match="durability is 'scratch' in the table, 'durable' was asked for"):
            bb.open(path, create={"durability": "durable"})
        table.close()
        table.close()
        with pytest.raises(FileExistsError, match="in use"):
            scratch(path)
    assert table.closed and names(path) == ["lock", "manifest-0000000000000000"]
    for arguments in ({}, {"mode": "r"}, {"mode": "r", "create": {**TABLE, "durability": "scratch"}}):
        with pytest.raises(bb.FormatError, match=r"'t' at .* is a scratch table.*begins an empty one"):
            bb.open(path, **arguments)
    with bb.open(path, create={**TABLE, "durability": "scratch"}) as again:
        assert len(again) == 0 and again.step == 0 and again.durability == "scratch" and again.uuid != table.uuid
        churn(again, 1)
    # Its place is free for a table that is kept, and then it is that table's.
    with bb.create(path, **TABLE) as kept:
        assert kept.durability == "durable" and len(kept) == 0
        churn(kept, 1)
    with pytest.raises(FileExistsError, match="a table exists already"):
        scratch(path)
    with pytest.raises(ValueError, match="durability is 'durable' in the table, 'scratch' was asked for"):
        bb.open(path, create={"durability": "scratch"})
    with bb.open(path) as kept:
        assert kept.step == 1
    assert bb.check(path) == []


def test_only_its_own_files_give_way(tmp_path: Path) -> None:
    path = tmp_path / "t"
    scratch(path).close()
    (path / "notes.txt").write_text("mine")
    (path / "segment-0000000000000007").write_bytes(b"of a process killed between making and unnaming it")
    (path / "new-manifest-0000000000000000").write_bytes(b"")
    with scratch(path):
        assert names(path) == ["lock", "manifest-0000000000000000", "notes.txt"]
    assert (path / "notes.txt").read_text() == "mine"


KILLED = """
import sys
sys.path.insert(0, {tests!r})
import numpy as np
from pathlib import Path
from test_scratch import churn, scratch
table = scratch(Path({path!r}))
churn(table, 60)
assert table.stats()["disk_bytes"] > 8 << 20
print("full", flush=True)
sys.stdin.read()
"""


def test_a_killed_process_leaves_no_row(tmp_path: Path) -> None:
    path = tmp_path / "t"
    code = KILLED.format(tests=str(Path(__file__).parent), path=str(path))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "full\n"
        with pytest.raises(FileExistsError, match=f"scratch table exists.*process {process.pid}"):
            scratch(path)
        with pytest.raises(FileExistsError, match="in use"):
            bb.open(path, create={**TABLE, "durability": "scratch"})
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    assert names(path) == ["lock", "manifest-0000000000000000"]
    with pytest.raises(bb.FormatError, match="scratch table"):
        bb.open(path)
    with scratch(path) as table:
        assert len(table) == 0


def test_closing_it_takes_no_index_snapshot(tmp_path: Path) -> None:
    _native.set_index_snapshots(1, in_line=True)
    _native.arm_failpoint("", 0, "count")
    try:
        with scratch(tmp_path / "t") as table:
            churn(table, 60)
            table.commit()
        # Not even one that is removed again.
        assert dict(_native.failpoint_counts())["index_snapshot.started"] == 0
    finally:
        _native.disarm_failpoints()
        _native.set_index_snapshots()
    assert names(tmp_path / "t") == ["lock", "manifest-0000000000000000"]


def test_letting_go_of_it_warns_of_nothing(tmp_path: Path) -> None:
    table = scratch(tmp_path / "t")
    churn(table, 2)
    del table  # warnings are errors


def test_bad_arguments_make_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='durability must be "durable" or "scratch", got \'none\''):
        bb.create(tmp_path / "t", durability="none", **TABLE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a path"):
        bb.create(None, durability="scratch", **TABLE)
    with bb.Run(tmp_path / "run") as run, pytest.raises(ValueError, match="a run's tables are committed together"):
        run.table("t", create={**TABLE, "durability": "scratch"})
    assert not (tmp_path / "t").exists()


def test_its_mark_is_the_reader_flag_of_the_format(tmp_path: Path) -> None:
    scratch(tmp_path / "t").close()
    manifest = (tmp_path / "t" / "manifest-0000000000000000").read_bytes()
    assert int.from_bytes(manifest[24:32], "little") == 2


def test_layers_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from bunkbed.torch import Embedding, EmbeddingBag, Optimizer

    for _ in range(2):  # the second starts with an empty table
        layer = Embedding(100, 4, path=tmp_path / "t", durability="scratch", ram="2MiB")
        optimizer = Optimizer(layer)
        layer(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        assert len(layer.table) == 2 and layer.table.durability == "scratch"
        with pytest.raises(ValueError, match="scratch table"):
            layer.state_dict()
        bag = EmbeddingBag(100, 4, path=tmp_path / "t", durability="scratch")
        assert bag.table is layer.table
        del layer, optimizer, bag
    with pytest.raises(bb.FormatError, match="scratch table"):
        Embedding(100, 4, path=tmp_path / "t")
    Embedding(100, 4, path=tmp_path / "kept", ram="2MiB")
    with pytest.raises(ValueError, match="durability='scratch' was given, but table 'kept' has 'durable'"):
        Embedding(100, 4, path=tmp_path / "kept", durability="scratch")


@pytest.mark.parametrize("operation", ["write", "create", "remove"])
def test_a_failing_disk_is_the_updates_error_and_no_row_is_lost(tmp_path: Path, faulty: Any, operation: str) -> None:
    table, oracle = scratch(tmp_path / "t"), ReferenceTable(**TABLE)
    churn(table, 5)
    churn(oracle, 5)
    faulty.fail_all(operation, errno.ENOSPC)
    rng = np.random.default_rng(1)
    with pytest.raises(OSError, match="No space left"):
        for _ in range(1000):
            ids, grads = rng.integers(0, 20_000, 400), rng.standard_normal((400, 64)).astype(np.float32)
            table.update(ids, grads)
            oracle.update(ids, grads)
    assert table.step == oracle.step
    faulty.heal()
    table.update(ids, grads)
    oracle.update(ids, grads)
    churn(table, 5, 2)
    churn(oracle, 5, 2)
    assert_same_rows(table, oracle, np.arange(20_000))
    table.close()
    assert names(tmp_path / "t")[:2] == ["lock", "manifest-0000000000000000"]
