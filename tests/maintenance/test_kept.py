"""Snapshots listed and dropped by path, without opening the table."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.files import run_files
from bunkbed.maintenance.snapshots import held_bytes

IDS = np.arange(4000)


def make(path: Path) -> Path:
    with bb.create(path, dim=8, num_rows=4000, optimizer=bb.SGD(lr=1.0), init=bb.Zeros(), ram="4MiB") as table:
        for name in ("a", "b", None):
            table.update(IDS, np.ones((4000, 8), np.float32))  # writes every row: commits share nothing
            table.commit(keep=name)
    return path


def value(path: Path, snapshot: str | None = None) -> float:
    with bb.open(path, mode="r", snapshot=snapshot, ram="4MiB") as reader:
        (found,) = set(reader.lookup(IDS).reshape(-1).tolist())
        return float(found)


def test_what_a_snapshot_is_and_costs(tmp_path: Path) -> None:
    path = make(tmp_path / "t")
    a, b = bb.describe_snapshots(path)
    assert (a.name, a.epoch, a.step, a.stored_rows) == ("a", 1, 1, 4000)
    assert (b.name, b.epoch, b.step) == ("b", 2, 2)
    assert abs(datetime.now(UTC) - a.time) < timedelta(minutes=5)
    assert a.own_bytes == a.bytes > 4000 * 40, "each commit has segments of its own"
    with bb.open(path, ram="4MiB") as table:
        table.commit(keep="now")
        assert bb.describe_snapshots(path)[-1].own_bytes == 0, "the newest commit holds the same"
        table.update(np.arange(10), np.ones((10, 8), np.float32))
    now = bb.describe_snapshots(path)[-1]
    assert now.name == "now" and 0 <= now.own_bytes < now.bytes, "what is shared is not its own"


def test_what_snapshots_hold_together(tmp_path: Path) -> None:
    path = make(tmp_path / "t")
    a, b = bb.describe_snapshots(path)
    assert held_bytes(path) == a.own_bytes + b.own_bytes > 0, "they share nothing"
    for name in "ab":
        bb.drop_snapshot(path, name)
    with bb.open(path, ram="4MiB") as table:
        table.commit(keep="c")
        table.commit(keep="d")
        assert held_bytes(path) == 0, "the newest commit holds the same"
        table.update(np.arange(4000), np.ones((4000, 8), np.float32))
    c, d = bb.describe_snapshots(path)
    assert c.own_bytes == d.own_bytes == 0, "each holds what the other holds"
    assert held_bytes(path) == c.bytes == d.bytes


def test_a_drop_frees_what_only_it_held(tmp_path: Path) -> None:
    path = make(tmp_path / "t")
    before = sum(file.stat().st_size for file in path.glob("segment-*"))
    own = bb.describe_snapshots(path)[0].own_bytes
    with pytest.raises(ValueError, match="has no snapshot 'c'; there are: 'a', 'b'"):
        bb.drop_snapshot(path, "c")
    bb.drop_snapshot(path, "a")
    assert bb.snapshots(path) == {"b": 2}
    assert sum(file.stat().st_size for file in path.glob("segment-*")) == before - own
    assert (value(path), value(path, "b")) == (-3.0, -2.0)
    assert bb.check(path) == []
    bb.drop_snapshot(path, "b")
    with pytest.raises(ValueError, match="it has none: keep one with commit"):
        bb.drop_snapshot(path, "b")
    with bb.open(path, ram="4MiB") as table:
        table.update(IDS, np.ones((4000, 8), np.float32))
    assert value(path) == -4.0 and bb.check(path) == []


def test_the_newest_commit_can_lose_its_name_and_nothing_else(tmp_path: Path) -> None:
    path = make(tmp_path / "t")
    with bb.open(path, ram="4MiB") as table:
        table.commit(keep="a", meta={"x": 1})
    assert bb.snapshots(path) == {"b": 2, "a": 4}
    bb.drop_snapshot(path, "a")
    assert bb.snapshots(path) == {"b": 2}
    with bb.open(path, ram="4MiB") as table:
        assert (table.epoch, table.step, table.meta) == (5, 3, {"x": 1})
    assert value(path) == -3.0 and bb.check(path) == []


def test_who_writes_is_asked(tmp_path: Path) -> None:
    path = make(tmp_path / "t")
    with bb.open(path, ram="4MiB") as table:
        table.update(IDS[:5], np.ones((5, 8), np.float32))
        bb.drop_snapshot(path, "a")
        assert table.snapshots() == {"b": 2} and table.is_dirty
        with bb.open(path, mode="r", snapshot="b", ram="4MiB") as reader:
            bb.drop_snapshot(path, "b")
            assert reader.lookup(IDS).max() == -2.0, "a reader keeps what it has open"


def make_run(path: Path) -> Path:
    with bb.Run(path, ram="8MiB") as run:
        kwargs = {"dim": 8, "num_rows": 4000, "optimizer": bb.SGD(lr=1.0), "init": bb.Zeros()}
        user, item = run.table("user", create=kwargs), run.table("item", create=kwargs)
        for number, name in enumerate(("a", "b", None, None), start=1):
            user.update(IDS, np.ones((4000, 8), np.float32))
            item.update(IDS, np.ones((4000, 8), np.float32))
            run.commit(files={"dense.pt": b"%d" % number * 5000}, keep=name)
    return path


def test_snapshots_of_a_run(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    a, b = bb.describe_snapshots(path)
    assert (a.name, a.epoch, a.step, a.stored_rows) == ("a", 1, 1, 8000) and a.own_bytes == a.bytes
    assert b.bytes > 2 * 4000 * 40 + 5000
    before = size_of(path)
    with pytest.raises(bb.ReadOnlyError, match=r"belongs to a run.*give the run's folder"):
        bb.drop_snapshot(path / "tables" / "user", "a")
    with pytest.raises(ValueError, match="has no snapshot 'c'; there are: 'a', 'b'"):
        bb.drop_snapshot(path, "c")
    bb.drop_snapshot(path, "a")
    assert [kept.name for kept in bb.describe_snapshots(path)] == ["b"]
    assert size_of(path) < before - a.own_bytes + 3 * 4096
    assert bb.check(path) == []
    with bb.Run(path, ram="8MiB") as run:
        run.table("user")
        run.commit(keep="now")
        run.drop("now")  # the newest carries it
        assert run.snapshots() == {"b": 2} and run.read("dense.pt") == b"4" * 5000
        run.rewind("b")
        assert run.table("item").lookup(IDS).max() == -2.0
        run.drop("b")
        with pytest.raises(ValueError, match="there are: none"):
            run.drop("b")
    assert bb.check(path) == []
    with bb.Run(path, mode="r", ram="8MiB") as run, pytest.raises(bb.ReadOnlyError):
        run.drop("b")


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*-*") if file.is_file())


def test_a_run_reads_each_manifest_a_fixed_number_of_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number does not depend on the number of snapshots: a commit or drop must not read all manifests again."""
    reads = 0
    decode = run_files.decode

    def counted(data: bytes, path: Path) -> run_files.RunManifest:
        nonlocal reads
        reads += 1
        return decode(data, path)

    monkeypatch.setattr(run_files, "decode", counted)
    count = 30
    with bb.Run(tmp_path / "run", ram="8MiB") as run:
        table = run.table("user", create={"dim": 2, "num_rows": 10})
        for number in range(count):
            table.update([1], np.ones((1, 2), np.float32))
            run.commit(keep=f"{number}", meta={"number": number})
        assert run.snapshots() == {f"{number}": number + 1 for number in range(count)}
        assert reads <= 2 * count
        reads = 0
        for number in range(count - 1):
            run.drop(f"{number}")
        assert reads <= 2 * count
        run.rewind(f"{count - 1}")
        assert run.meta == {"number": count - 1}
    bb.drop_snapshot(tmp_path / "run", f"{count - 1}")
    assert bb.snapshots(tmp_path / "run") == {}
