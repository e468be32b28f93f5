"""`bunkbed.changes`: what a consumer gets from tables, sharded tables and runs, and what it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed import _native
from bunkbed.testing import ReferenceTable

FACTS: dict[str, Any] = {"dim": 3, "num_rows": 500, "optimizer": bb.Adam(lr=0.1), "init": bb.Normal(std=0.1), "seed": 5}
Made = tuple[bb.Table, Callable[[], int], dict[str, Any]]


@pytest.fixture(params=["table", "any id", "sharded", "in a run", "sharded in a run"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Made]:
    """A table, its commit, and the arguments that name it to `changes`."""
    path, facts = tmp_path / "t", dict(FACTS)
    if request.param == "any id":
        facts["num_rows"] = None
    _native.set_compaction_slack(4 << 10)
    _native.set_index_snapshots(50, in_line=True)
    try:
        if "run" in request.param:
            with bb.Run(path) as run:
                run.table("other", create=FACTS).update([1], np.ones((1, 3), np.float32))
                shards = {"shards": 3} if "sharded" in request.param else {}
                table = run.table("mine", create={**facts, **shards})
                run.commit()
                yield table, run.commit, {"path": path, "table": "mine"}
        elif request.param == "sharded":
            with bb.ShardedTable.create(path, shards=3, **facts) as table:
                table.commit()
                yield table, table.commit, {"path": path}
        else:
            with bb.create(path, **facts) as table:
                table.commit()
                yield table, table.commit, {"path": path}
    finally:
        _native.set_compaction_slack(256 << 10)
        _native.set_index_snapshots()


def step(table: bb.Table, oracle: ReferenceTable, rng: np.random.Generator) -> None:
    ids, grads = rng.integers(0, 500, 80), rng.standard_normal((80, 3), dtype=np.float32)
    gone = rng.integers(0, 500, 40)
    for one in (table, oracle):
        one.update(ids, grads)
        one.delete(gone)


def take(rows: dict[int, bytes], changes: bb.Changes) -> int:
    """Apply changes to rows; return how many there were."""
    count, seen = 0, set()
    for change in changes:
        assert change.version == changes.version and change.rows.dtype == np.float32
        for row, weights in zip(change.ids.tolist(), change.rows, strict=True):
            rows[row] = weights.tobytes()
        for row in change.deleted.tolist():
            rows.pop(row, None)
        named = [*change.ids.tolist(), *change.deleted.tolist()]
        assert not seen.intersection(named)
        seen.update(named)
        count += len(named)
    return count


def rows_of(oracle: ReferenceTable) -> dict[int, bytes]:
    return {row: oracle.get([row])[0].tobytes() for row in oracle._places}


def test_a_consumer_has_the_rows_of_each_commit(made: Made) -> None:
    table, commit, where = made
    oracle = ReferenceTable(**{**FACTS, "num_rows": table.num_rows})
    rng = np.random.default_rng(3)
    rows: dict[int, bytes] = {}
    named: dict[int, bytes] = {}
    since = 0
    for number in range(40):
        step(table, oracle, rng)
        version = commit()
        changes = bb.changes(since=since, chunk=7, **where)
        assert (changes.since, changes.version, changes.dim) == (since, version, 3)
        take(rows, changes)
        assert rows == rows_of(oracle)
        since = version
        if number % 5 == 4:
            take(named, bb.changes(since="rarely", ram="1KiB", **where))
            assert named == rows_of(oracle)
            assert bb.cursors(**where) == {"rarely": version}
    assert take(rows, bb.changes(since=since, **where)) == 0
    assert bb.check(where["path"]) == []


def test_rows_that_compaction_moved_did_not_change(tmp_path: Path) -> None:
    _native.set_compaction_slack(0)
    try:
        with bb.create(tmp_path / "t", **{**FACTS, "dim": 32, "num_rows": 20_000}) as table:
            every = np.arange(20_000)
            table.update(every, np.ones((20_000, 32), np.float32))
            since = table.commit(keep="before")
            moved = table.stats()["compacted_records"]
            rng, touched = np.random.default_rng(0), set()
            for _ in range(12):
                ids = rng.choice(every[::2], 3000, replace=False)
                touched.update(ids.tolist())
                table.update(ids, np.ones((3000, 32), np.float32))
                table.commit()
                table.compact()
            assert table.stats()["compacted_records"] > moved + 5000
            found = [change.ids for change in bb.changes(tmp_path / "t", since)]
    finally:
        _native.set_compaction_slack(256 << 10)
    assert sorted(np.concatenate(found).tolist()) == sorted(touched)


def test_a_cursor_moves_when_the_loop_has_ended_and_not_before(made: Made) -> None:
    table, commit, where = made
    table.update([1, 2], np.ones((2, 3), np.float32))
    version = commit()
    with pytest.raises(ZeroDivisionError):
        for _ in bb.changes(since="a", **where):
            1 / 0  # noqa: B018
    assert take({}, bb.changes(since="a", **where)) == 2
    assert bb.cursors(**where) == {"a": version}
    table.delete([1])
    later = commit()
    changes = bb.changes(since="a", **where)
    list(changes)
    with pytest.raises(RuntimeError, match="iterated over before"):
        list(changes)
    assert bb.cursors(**where) == {"a": later}
    assert take({}, bb.changes(since="b", **where)) == 1, "each consumer has its own cursor"
    bb.drop_cursor(name="a", **where)
    assert bb.cursors(**where) == {"b": later}
    assert take({}, bb.changes(since="a", **where)) == 1, "it starts again"


def test_a_first_read_that_ends_early_may_be_repeated(made: Made) -> None:
    table, commit, where = made
    table.update(np.arange(100), np.ones((100, 3), np.float32))
    commit()
    rows: dict[int, bytes] = {}
    for change in bb.changes(since="c", chunk=30, **where):
        rows |= dict(zip(change.ids.tolist(), [one.tobytes() for one in change.rows], strict=True))
        if len(rows) > 50:
            break
    assert bb.cursors(**where) == {"c": 0}
    for first in range(0, 60, 20):
        table.delete(np.arange(first, first + 20))
        table.update([first + 200], np.ones((1, 3), np.float32))
        commit()
    take(rows, bb.changes(since="c", **where))
    assert sorted(rows) == [*range(60, 100), 200, 220, 240]


def test_going_back_during_a_first_read(tmp_path: Path) -> None:
    with bb.create(tmp_path / "t", **FACTS) as table:
        table.update([1], np.ones((1, 3), np.float32))
        table.commit(keep="good")
        next(iter(bb.changes(tmp_path / "t", "c")))
        table.update([2], np.ones((1, 3), np.float32))
        table.commit()
        next(iter(bb.changes(tmp_path / "t", "c", chunk=1)))
        table.rewind("good")
        with pytest.raises(ValueError, match=r"where the first read began.*went back to commit .*drop cursor 'c'"):
            bb.changes(tmp_path / "t", "c")
        bb.drop_cursor(tmp_path / "t", "c")
        assert take({}, bb.changes(tmp_path / "t", "c")) == 1


def test_what_cannot_be_known_is_refused(made: Made) -> None:
    table, commit, where = made
    table.update([1], np.ones((1, 3), np.float32))
    first = commit()
    with pytest.raises(ValueError, match=rf"commit {first + 1} is in the future; the newest one is {first}"):
        bb.changes(since=first + 1, **where)
    for number in range(3):
        table.update([number], np.ones((1, 3), np.float32))
        commit()
    with pytest.raises(ValueError, match=rf"(commit {first} is gone|has no commit {first}).*commits that remain"):
        bb.changes(since=first, **where)
    for wrong, why in ((-1, r"since must be in \[0, "), ("", "name of a cursor"), ("41", "a whole number")):
        with pytest.raises(ValueError, match=why):
            bb.changes(since=wrong, **where)
    with pytest.raises(ValueError, match="no cursor 'a'; it has: none"):
        bb.drop_cursor(name="a", **where)
    with pytest.raises(ValueError, match=r"chunk must be in \[1, "):
        bb.changes(chunk=0, **where)


def test_a_new_cursor_must_not_have_the_name_of_a_snapshot(made: Made) -> None:
    """It would give every row, where the changes since the snapshot were meant."""
    table, commit, where = made
    table.update([1, 2], np.ones((2, 3), np.float32))
    commit()
    assert take({}, bb.changes(since="mine", **where)) == 2
    table.update([2], np.ones((1, 3), np.float32))
    kept = commit(keep="yesterday")
    table.update([3], np.ones((1, 3), np.float32))
    commit(keep="mine")  # after the cursor
    with pytest.raises(ValueError, match=f"'yesterday' is a snapshot, .*the number of its commit, {kept}, or give"):
        bb.changes(since="yesterday", **where)
    assert list(bb.cursors(**where)) == ["mine"]
    assert take({}, bb.changes(since=kept, **where)) == 1
    assert take({}, bb.changes(since="mine", **where)) == 2


def test_going_back_undoes_commits_and_cursors(made: Made) -> None:
    table, _, where = made
    if "table" in where:
        pytest.skip("a run goes back in a test of its own")
    table.update([1], np.ones((1, 3), np.float32))
    table.commit(keep="good")
    kept = bb.changes(since="before", **where)
    list(kept)
    table.update([2], np.ones((1, 3), np.float32))
    table.commit()
    list(bb.changes(since="after", **where))
    table.rewind("good")
    with pytest.raises(ValueError, match="was undone: the table went back to commit"):
        bb.changes(since="after", **where)
    assert take({}, bb.changes(since="before", **where)) == 0
    table.update([3], np.ones((1, 3), np.float32))
    table.commit()
    assert take({}, bb.changes(since="before", **where)) == 1


def test_a_consumer_in_its_loop_while_the_table_goes_back(tmp_path: Path) -> None:
    with bb.create(tmp_path / "t", **FACTS) as table:
        table.update([1, 2], np.ones((2, 3), np.float32))
        good = table.commit()
        table.update([1], np.ones((1, 3), np.float32))
        table.commit()
        loop = iter(bb.changes(tmp_path / "t", "c"))
        next(loop)
        bb.copy(tmp_path / "t", tmp_path / "copy")
        list(bb.changes(tmp_path / "copy", "c"))
        table.rewind(good)
        for _ in range(4):
            table.update([3], np.ones((1, 3), np.float32))
            table.commit()
        assert not list(loop)
        bb.copy(tmp_path / "t", tmp_path / "copy")
    for name in ("t", "copy"):
        with pytest.raises(ValueError, match=rf"was undone: the table went back to commit {good}.*drop cursor 'c'"):
            bb.changes(tmp_path / name, "c")


def test_a_table_of_a_run_with_a_dot_in_its_name(tmp_path: Path) -> None:
    with bb.Run(tmp_path / "r") as run:
        for name in ("a", "a.b"):
            run.table(name, create=FACTS).update([1], np.ones((1, 3), np.float32))
        run.commit()
    list(bb.changes(tmp_path / "r", "x", table="a.b"))
    assert bb.cursors(tmp_path / "r", table="a.b") == {"x": 1} and bb.cursors(tmp_path / "r", table="a") == {}
    bb.drop_cursor(tmp_path / "r", "x", table="a.b")
    assert not list((tmp_path / "r").rglob("cursor-*"))


def test_very_many_rewinds(tmp_path: Path) -> None:
    with bb.create(tmp_path / "t", **FACTS) as table:
        table.commit(keep="good")
        kept = table.epoch
        for _ in range(1010):
            table.rewind("good")
        table.update([1], np.ones((1, 3), np.float32))
        table.commit()
        assert [change.ids.tolist() for change in bb.changes(tmp_path / "t", since=kept)] == [[1]]
    with bb.open(tmp_path / "t") as table:
        assert table.contains([1]).all()


def test_a_run_that_went_back(tmp_path: Path) -> None:
    with bb.Run(tmp_path / "r") as run:
        table = run.table("t", create=FACTS)
        table.update([1], np.ones((1, 3), np.float32))
        run.commit(keep="good")
        table.update([2], np.ones((1, 3), np.float32))
        run.commit()
        list(bb.changes(tmp_path / "r", "c"))
        run.rewind("good")
        with pytest.raises(ValueError, match="was undone"):
            bb.changes(tmp_path / "r", "c")


def test_a_run_whose_tables_have_other_numbers(tmp_path: Path) -> None:
    with bb.Run(tmp_path / "r") as run:
        busy = run.table("busy", create=FACTS)
        rare = run.table("rare", create={**FACTS, "shards": 2})
        rare.update([1, 2], np.ones((2, 3), np.float32))
        for number in range(5):  # a table that did not change has no new commit
            busy.update([number], np.ones((1, 3), np.float32))
            since = run.commit()
        rare.update([2], np.ones((1, 3), np.float32))
        busy.update([7], np.ones((1, 3), np.float32))
        run.commit()
    assert take({}, bb.changes(tmp_path / "r", since, table="rare")) == 1
    assert take({}, bb.changes(tmp_path / "r", since, table="busy")) == 1
    assert take({}, bb.changes(tmp_path / "r", table="rare")) == 2


def test_paths_that_have_no_such_table(tmp_path: Path) -> None:
    with bb.Run(tmp_path / "r") as run:
        for name in ("a", "b"):
            run.table(name, create=FACTS)
        run.commit()
    with pytest.raises(ValueError, match="has the tables a, b; say which one with table="):
        bb.changes(tmp_path / "r")
    with pytest.raises(ValueError, match="it has no table 'c'"):
        bb.changes(tmp_path / "r", table="c")
    with pytest.raises(ValueError, match=r"is a table of the run at .*table='a'"):
        bb.changes(tmp_path / "r" / "tables" / "a")
    with pytest.raises(FileNotFoundError):
        bb.changes(tmp_path / "none")
    bb.create(tmp_path / "t", **FACTS).close()
    bb.ShardedTable.create(tmp_path / "sharded", shards=2, **FACTS).close()
    for name in ("t", "sharded"):
        with pytest.raises(ValueError, match="leave table= out"):
            bb.changes(tmp_path / name, table="t")
    with (
        bb.create(tmp_path / "s", durability="scratch", **FACTS),
        pytest.raises(ValueError, match="scratch table, of which nothing is kept"),
    ):
        bb.changes(tmp_path / "s")


def test_a_cursor_of_another_table_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with bb.create(tmp_path / name, **FACTS) as table:
            table.update([1], np.ones((1, 3), np.float32))
    list(bb.changes(tmp_path / "one", "c"))
    data = (tmp_path / "one" / "cursor-c").read_bytes()
    (tmp_path / "two" / "cursor-c").write_bytes(data)
    with pytest.raises(bb.CorruptionError, match="belongs to another table; remove the file"):
        bb.changes(tmp_path / "two", "c")
    (tmp_path / "one" / "cursor-c").write_bytes(data[:-1] + b"x")
    assert take({}, bb.changes(tmp_path / "one", "other")) == 1  # another consumer is not disturbed
    with pytest.raises(bb.CorruptionError, match="is damaged; remove the file"):
        bb.changes(tmp_path / "one", "c")


def test_cursors_are_not_copied_and_stop_a_reshard(tmp_path: Path) -> None:
    with bb.ShardedTable.create(tmp_path / "t", shards=2, **FACTS) as table:
        table.update([1], np.ones((1, 3), np.float32))
        table.commit()
    list(bb.changes(tmp_path / "t", "c"))
    bb.copy(tmp_path / "t", tmp_path / "copy")
    assert bb.cursors(tmp_path / "copy") == {}
    list(bb.changes(tmp_path / "copy", "d"))
    bb.copy(tmp_path / "t", tmp_path / "copy")
    with pytest.raises(ValueError, match="has the cursor 'c' of its change feed, which other shards cannot keep"):
        bb.reshard(tmp_path / "t", shards=3)
    bb.drop_cursor(tmp_path / "t", "c")
    bb.reshard(tmp_path / "t", shards=3)
    with bb.Run(tmp_path / "r") as run:
        run.table("t", create=FACTS).update([1], np.ones((1, 3), np.float32))
        run.commit()
    list(bb.changes(tmp_path / "r", "c"))
    bb.reshard(tmp_path / "r", shards=2)
    with pytest.raises(ValueError, match="divided into other shards after cursor 'c' was saved"):
        bb.changes(tmp_path / "r", "c")
    bb.drop_cursor(tmp_path / "r", "c")
    assert take({}, bb.changes(tmp_path / "r", "c")) == 1
