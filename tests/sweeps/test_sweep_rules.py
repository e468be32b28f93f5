"""Rules by which rows go: their arguments, and where they are kept."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.table import sweeps
from bunkbed.testing import ReferenceTable


class Racing:
    """A core, and another thread that is quick."""

    def __init__(self, core: Any, removable: Any) -> None:
        self._core, self.removable = core, removable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


@pytest.mark.parametrize(
    ("rules", "kind", "message"),
    [
        ({"expire": 0}, ValueError, r"expire must be in \[1, "),
        ({"expire": 1.5}, TypeError, "expire must be an int"),
        ({"max_rows": 0}, ValueError, r"max_rows must be in \[1, "),
        ({"max_rows": 5, "keep": 6}, ValueError, "keep=6 is above max_rows=5"),
        ({"expire": 5, "keep": -1}, ValueError, r"keep must be in \[0, "),
        ({"keep": 5}, ValueError, "give one of these"),
        ({"clock": "event"}, ValueError, "give one of these"),
        ({"expire": 5, "clock": "wall"}, ValueError, "clock must be"),
        ({"expire": 5, "evict": "newest"}, ValueError, "evict must be"),
        ({"expire": 5, "evict": "rarest"}, ValueError, "give max_rows="),
        ({"expire": 5, "num_rows": 100}, ValueError, r"expire=5 is for a table of any id.*give num_rows=None"),
        ({"max_rows": 5, "num_rows": 100}, ValueError, "max_rows=5 is for a table of any id"),
    ],
)
def test_bad_rules(tmp_path: Path, rules: dict[str, Any], kind: type[Exception], message: str) -> None:
    for make in (bb.create, lambda path, **args: bb.ShardedTable.create(path, shards=2, **args)):
        with pytest.raises(kind, match=message):
            make(tmp_path / "table", dim=2, **rules)
    assert not (tmp_path / "table").exists()


def test_a_reader_sweeps_dry_only(tmp_path: Path) -> None:
    with bb.create(tmp_path / "table", dim=2, expire=1, ram="16MiB") as table:
        table.update([1, 2], np.ones((2, 2), np.float32))
        table.update([2], np.ones((1, 2), np.float32))
        with pytest.raises(TypeError, match="dry_run must be True or False"):
            table.sweep(dry_run=1)  # type: ignore[arg-type]
    with bb.open(tmp_path / "table", mode="r") as reader:
        assert reader.sweep(dry_run=True).expired == 1 and reader.clock == 2
        for _ in range(2):
            with pytest.raises(bb.ReadOnlyError, match=r"sweep\(dry_run=True\)"):
                reader.sweep()
        with pytest.raises(bb.ReadOnlyError):
            reader.retention = bb.Retention(expire=9)
        with pytest.raises(bb.ReadOnlyError, match="its rules cannot change"):
            bb.open(tmp_path / "table", mode="r", create={"expire": 9})
        assert len(reader) == 2


def test_opening_with_other_rules_changes_them(tmp_path: Path) -> None:
    create: dict[str, Any] = {"dim": 2, "expire": 5, "clock": "event"}
    bb.open(tmp_path / "table", create=create, ram="16MiB").close()
    with bb.open(tmp_path / "table", create={"max_rows": 7}) as table:
        assert table.retention == bb.Retention(expire=5, clock="event", max_rows=7)
        table.commit()
    with pytest.raises(ValueError, match="clock is 'event' in the table, 'step' was asked for"):
        bb.open(tmp_path / "table", create={"clock": "step"})
    with bb.open(tmp_path / "table", mode="r") as reader:
        assert reader.retention.max_rows == 7
        with bb.open(tmp_path / "table") as table:
            table.retention = bb.Retention(max_rows=3, clock="event")
            table.clock = 4
            table.commit()
        reader.refresh()
        assert (reader.retention.max_rows, reader.clock) == (3, 4)
    bb.create(tmp_path / "other", dim=2, ram="16MiB").close()
    with pytest.raises(ValueError, match="made without expire= and max_rows="):
        bb.open(tmp_path / "other", create={"expire": 5})


def test_counters(tmp_path: Path) -> None:
    table = bb.create(None, dim=2, expire=2, max_rows=2)
    for ids in ([1, 2], [2, 3, 4], [3, 4, 5]):
        table.update(ids, np.ones((len(ids), 2), np.float32))
    table.sweep(dry_run=True)
    assert (table.stats()["expired_rows"], table.stats()["evicted_rows"]) == (0, 0)
    table.sweep()
    assert (table.stats()["expired_rows"], table.stats()["evicted_rows"]) == (1, 2)
    assert "expired_rows" not in bb.create(None, dim=2).stats()


def test_a_change_of_another_thread_meanwhile_is_an_error(tmp_path: Path) -> None:
    for table in (
        bb.create(None, dim=2, expire=2),
        bb.ShardedTable.create(tmp_path / "table", shards=2, dim=2, expire=2, ram="32MiB"),
    ):
        for ids in ([1, 2, 3], [4], [4], [4]):
            table.update(ids, np.ones((len(ids), 2), np.float32))
        find = table.core.removable

        def find_then_change(*given: Any, table: bb.Table = table, find: Any = find) -> Any:
            found = find(*given)
            table.update([1], np.ones((1, 2), np.float32))
            return found

        core = table.core
        table.core = Racing(core, find_then_change)
        with pytest.raises(bb.BunkbedError, match="was changed while its rows to remove were searched"):
            table.sweep()
        table.core = core
        assert table.contains([1, 2, 3, 4]).all()
        assert table.sweep().expired == 2
        table.close(commit=False)


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("shards", [None, 2])
def test_a_change_between_two_reads_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int | None, dry_run: bool
) -> None:
    monkeypatch.setattr(sweeps, "most_at_once", lambda ram_bytes: 10)
    arguments: dict[str, Any] = {"dim": 2, "max_rows": 50}
    if shards is None:
        table = bb.create(None, **arguments)
    else:
        table = bb.ShardedTable.create(tmp_path / "table", shards=shards, ram="32MiB", **arguments)
    table.update(np.arange(100), np.ones((100, 2), np.float32))
    reads, core = itertools.count(), table.core

    def find_and_change(*given: Any) -> Any:
        if next(reads) == 2:
            table.update(np.arange(200, 300), np.ones((100, 2), np.float32))
        return core.removable(*given)

    table.core = Racing(core, find_and_change)
    with pytest.raises(bb.BunkbedError, match=f"during a sweep, after {0 if dry_run else 20} rows had gone"):
        table.sweep(dry_run)
    table.core = core
    assert table.sweep().removed == (150 if dry_run else 130) and len(table) == 50
    table.close(commit=False)


def test_an_open_that_fails_changes_no_rule(tmp_path: Path) -> None:
    with bb.create(tmp_path / "table", dim=2, expire=30, optimizer=bb.Adam(lr=0.1), ram="16MiB") as table:
        with pytest.raises(ValueError, match="SGD"):
            bb.open(tmp_path / "table", create={"expire": 1, "optimizer": bb.SGD(lr=0.1)})
        with pytest.raises(ValueError, match="clock is 'step' in the table"):
            bb.open(tmp_path / "table", create={"clock": "event", "optimizer": bb.Adam(lr=0.5)})
        assert (table.retention.expire, table.optimizer) == (30, bb.Adam(lr=0.1))


def test_the_oracle_of_norms_orders_by_the_square() -> None:
    """Two norms may be equal where their squares are not; the lower square goes first, whatever its id."""
    arguments: dict[str, Any] = {"dim": 2, "max_rows": 1, "evict": "smallest", "init": bb.Zeros()}
    table, oracle = bb.create(None, **arguments), ReferenceTable(**arguments)
    big = np.float32(1.0)
    values = np.array([[big, np.float32(2e-8)], [big, np.float32(1e-8)]], np.float32)
    for one in (table, oracle):
        one.set([1, 2], values)
        one.sweep()
    assert table.contains([1, 2]).tolist() == oracle.contains([1, 2]).tolist()
