"""`bb.reshard` of the folders of Keras's workers: the same bits with another number, to and from a sharded table."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed import _native
from bunkbed.files.sharding import shards_of
from bunkbed.files.workers import folder_of_worker, folders_of_workers
from sharded_setup import EVERY, FACTS, assert_same_tables, batches, make, reshard_and_die, train


def _folder(path: Path, index: int, count: int) -> Path:
    return path / folder_of_worker("sharded", index, count)


@contextlib.contextmanager
def _opened(path: Path, count: int, mode: str = "r") -> Any:
    with contextlib.ExitStack() as held:
        yield [held.enter_context(bb.open(_folder(path, i, count), mode=mode, ram="16MiB")) for i in range(count)]


def _make(path: Path, count: int, **facts: Any) -> list[bb.Table]:
    return [bb.create(_folder(path, i, count), ram="16MiB", **{**FACTS, **facts}) for i in range(count)]


def _train(tables: list[bb.Table], one: bb.Table | None = None, seed: int = 0) -> None:
    """Train each row in the table of its worker, as the layer does; every step is one of all tables."""
    for ids, grads in batches(5, seed=seed):
        owner = shards_of(ids, len(tables))
        for index, table in enumerate(tables):
            table.update(ids[owner == index], grads[owner == index])
        if one is not None:
            one.update(ids, grads)


def _assert_rows(path: Path, count: int, one: bb.Table, ids: np.ndarray = EVERY) -> None:
    owner = shards_of(ids, count)
    with _opened(path, count) as tables:
        assert sum(map(len, tables)) == len(one)
        for index, table in enumerate(tables):
            assert table.step == one.step
            own = ids[owner == index]
            for slot in ("weight", *one.slots):
                np.testing.assert_array_equal(table.get(own, slot), one.get(own, slot))
            assert table.contains(own).tolist() == one.contains(own).tolist()
            assert not table.contains(ids[owner != index]).any()


def _commits(path: Path, count: int) -> list[tuple[Any, ...]]:
    with _opened(path, count) as tables:
        return [(table.uuid, table.epoch, table.meta, table.snapshots()) for table in tables]


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, bb.Table]:
    """The folders of two workers, each with a commit that a saved model refers to, and the same rows in one table."""
    one, tables = bb.create(None, **FACTS), _make(tmp_path / "t", 2)
    _train(tables, one)
    tables[1].commit()  # so that the numbers of commits differ
    for index, table in enumerate(tables):
        table.commit(meta={"worker": index}, keep="keras-000001")
        table.close()
    return tmp_path / "t", one


def test_workers_become_more_and_fewer_and_one_process_and_workers_again(trained: tuple[Path, bb.Table]) -> None:
    path, one = trained
    old = _commits(path, 2)
    assert [each[1] for each in old] == [1, 2]
    for count, before in ((3, 2), (2, 3), (5, 2)):
        done = bb.reshard(path, shards=count, ram="256MiB")
        assert (done.epoch, done.shards, done.shards_before, done.rows) == (1, count, before, len(one))
        assert folders_of_workers(path) == [_folder(path, i, count).name for i in range(count)]
        _assert_rows(path, count, one)
        assert _commits(path, count) == [old[index % 2] for index in range(count)]  # what saved models refer to
        assert all(bb.check(_folder(path, i, count)) == [] for i in range(count))
    assert bb.reshard(path, shards=5).rows == 0
    with _opened(path, 5, "w") as tables:
        _train(tables, one, seed=1)
        assert [table.commit() for table in tables] == [old[index % 2][1] + 1 for index in range(5)]
        for table in tables:
            table.drop("keras-000001")
    _assert_rows(path, 5, one)

    done = bb.reshard(path, shards=1, ram="256MiB")  # one process opens this
    assert (done.shards, done.shards_before) == (1, 5)
    with bb.open(path, ram="64MiB") as table:
        assert isinstance(table, bb.ShardedTable) and (table.uuid, table.epoch) == (old[0][0], 2)
        assert_same_tables(table, one)
        train(table, one, seed=2)
    done = bb.reshard(path, shards=4, workers=True, ram="256MiB")
    assert (done.shards, done.shards_before) == (4, 1)
    _assert_rows(path, 4, one)
    assert {each[:2] for each in _commits(path, 4)} == {(old[0][0], 3)}
    bb.reshard(path, shards=4, workers=False, ram="256MiB")
    with bb.open(path, ram="64MiB") as table:
        assert isinstance(table, bb.ShardedTable) and table.num_shards == 4
        assert_same_tables(table, one)
    assert [entry.name for entry in path.parent.iterdir()] == ["t"]


def test_a_table_of_one_process_becomes_one_of_workers(tmp_path: Path) -> None:
    one = bb.create(None, **FACTS)
    with bb.create(tmp_path / "t", ram="32MiB", **FACTS) as table:
        train(table, one)
        table.commit(meta={"at": 5}, keep="best")
        facts = (table.uuid, table.epoch, table.meta, table.snapshots())
    assert bb.reshard(tmp_path / "t", shards=3, workers=True, ram="128MiB").shards_before == 0
    _assert_rows(tmp_path / "t", 3, one)
    assert _commits(tmp_path / "t", 3) == [facts] * 3


@pytest.mark.parametrize("rules", [{"expire": 6}, {"admit": 3}], ids=str)
def test_ages_and_counts_of_ids_move_to_their_workers(tmp_path: Path, rules: dict[str, Any]) -> None:
    one, tables = (
        bb.create(None, **{**FACTS, "num_rows": None, **rules}),
        _make(tmp_path / "t", 2, num_rows=None, **rules),
    )
    _train(tables, one)
    for table in tables:
        table.close()
    bb.reshard(tmp_path / "t", shards=3, ram="128MiB")
    with _opened(tmp_path / "t", 3, "w") as tables:
        assert sum(int(table.stats()["counted_ids"]) for table in tables) == int(one.stats()["counted_ids"])
        assert ("admit" in rules) == (int(one.stats()["counted_ids"]) > 0)
        _train(tables, one, seed=1)  # stores what was named before the move
        if "expire" in rules:
            gone = one.sweep().expired
            assert gone > 0 and sum(table.sweep().expired for table in tables) == gone
    _assert_rows(tmp_path / "t", 3, one)


def test_a_table_of_workers_without_a_row_or_a_commit(tmp_path: Path) -> None:
    for table in _make(tmp_path / "t", 2):
        table.close()
    assert bb.reshard(tmp_path / "t", shards=3, ram="128MiB").epoch == 1
    _assert_rows(tmp_path / "t", 3, bb.create(None, **FACTS))


def test_what_cannot_become_another_number_of_workers_stays(trained: tuple[Path, bb.Table], tmp_path: Path) -> None:
    path, one = trained
    first, second = _folder(path, 0, 2), _folder(path, 1, 2)

    def refused(kind: type[Exception], text: str, **arguments: Any) -> None:
        with pytest.raises(kind, match=text):
            bb.reshard(**{"path": path, "shards": 3, "ram": "128MiB", **arguments})

    refused(ValueError, "workers=True is for two workers or more", shards=1, workers=True)
    away = tmp_path / "away"
    second.rename(away)
    refused(bb.FormatError, "no shard-0001-of-0002; bring the folders of all workers together")
    second.mkdir()
    refused(bb.FormatError, "no table of a worker in shard-0001-of-0002")
    second.rmdir()
    shutil.copytree(first, second)
    refused(bb.CorruptionError, "shard 1 of 2 has id .* which is another shard's")
    shutil.rmtree(second)
    away.rename(second)
    (path / "shard-0000-of-0003").mkdir()
    refused(bb.FormatError, "and shard-0000-of-0003, of another table")
    (path / "shard-0000-of-0003").rmdir()
    (path / "notes.txt").write_text("mine")
    refused(ValueError, "notes.txt.* would be lost")
    (path / "notes.txt").unlink()
    with bb.open(second):
        refused(bb.TableLockedError, "shard-0001-of-0002 is open for writing in this process")
    code = f"import bunkbed as bb; table = bb.open({str(first)!r}); print('open', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"open\n"
        refused(bb.TableLockedError, f"process {other.pid}")
        other.communicate(b"\n")
    with pytest.raises(MemoryError, match="too small to read 2 tables and to write 3; it needs at least ram=") as small:
        bb.reshard(path, shards=3, ram="1MiB")
    enough = int(str(small.value).rpartition("=")[2])
    refused(MemoryError, "too small", ram=enough - 1)
    refused(bb.FormatError, "is the table of one of several workers; give the folder above it", path=first)
    link = tmp_path / "elsewhere"
    first.rename(link)
    first.symlink_to(link)
    refused(bb.FormatError, "symbolic link")
    first.unlink()
    link.rename(first)
    _assert_rows(path, 2, one)
    with bb.open(second) as table:
        table.commit(keep="later")
    refused(ValueError, "snapshots of earlier commits.*'keras-000001'.*drop_snapshots=True")
    with bb.open(second) as table:
        table.update([], np.empty((0, FACTS["dim"]), np.float32))
    refused(ValueError, "is at step 5, and .*shard-0001-of-0002 at step 6; load the last")
    with bb.open(first, optimizer=bb.Adam(lr=0.5, state_dtype="bfloat16")) as table:
        table.update([], np.empty((0, FACTS["dim"]), np.float32))
    refused(ValueError, r"has optimizer=Adam\(lr=0.5.*workers of one table")
    assert [entry.name for entry in path.parent.iterdir()] == ["t"]

    bounded = tmp_path / "bounded"
    for table in _make(bounded, 2, num_rows=None, max_rows=100):
        table.close()
    with pytest.raises(ValueError, match=r"max_rows=100, which bounds.*table\.retention"):
        bb.reshard(bounded, shards=3, ram="128MiB")

    replicas = tmp_path / "replicas"
    bb.create(replicas / "replica-0000-of-0002", **FACTS).close()
    with pytest.raises(bb.FormatError, match=r"each with all rows.*bunkbed copy"):
        bb.reshard(replicas, shards=3)
    with bb.Run(tmp_path / "run", ram="32MiB") as run:
        run.table("t", create=FACTS)
        run.commit()
    with pytest.raises(ValueError, match="is a run, whose tables Keras workers do not train"):
        bb.reshard(tmp_path / "run", shards=3, workers=True)


def test_workers_that_went_back_to_what_they_saved_keep_its_number(trained: tuple[Path, bb.Table]) -> None:
    """A saved model refers to the commit that was kept, also after the table went back to it."""
    path, one = trained
    saved = _commits(path, 2)
    with _opened(path, 2, "w") as tables:
        _train(tables, seed=1)
        for table in tables:
            table.commit()
            table.rewind("keras-000001")
        assert [table.epoch for table in tables] == [each[1] + 2 for each in saved]
    bb.reshard(path, shards=3, ram="128MiB")
    _assert_rows(path, 3, one)
    assert _commits(path, 3) == [saved[index % 2] for index in range(3)]
    # Nothing is left under a number that the old tables had.
    assert [[commit["epoch"] for commit in _native.commits(str(_folder(path, i, 3)))] for i in range(3)] == [
        [0, 1],  # as a new table
        [2],
        [0, 1],
    ]
    with _opened(path, 3, "w") as tables:
        _train(tables, one, seed=2)
        tables[0].commit(keep="mine")  # not what was saved
        for table in tables[1:]:
            table.commit()
    with pytest.raises(ValueError, match=r"snapshots of earlier commits.*'keras-000001'"):
        bb.reshard(path, shards=2, ram="128MiB")
    bb.reshard(path, shards=2, ram="128MiB", drop_snapshots=True)
    _assert_rows(path, 2, one)


@pytest.mark.parametrize("shards", [0, 2])
def test_a_table_that_went_back_keeps_the_number_of_its_snapshot(tmp_path: Path, shards: int) -> None:
    path, one = tmp_path / "t", bb.create(None, **FACTS)
    with make(path, shards) if shards else bb.create(path, ram="32MiB", **FACTS) as table:
        train(table, one)
        table.commit(keep="early")
        train(table, seed=1)
        table.commit()
        table.rewind("early")
        assert table.epoch == 3
    assert bb.reshard(path, shards=3, ram="128MiB").epoch == 1
    with bb.open(path, mode="r") as table:
        assert (table.epoch, table.snapshots()) == (1, {"early": 1})
        assert_same_tables(table, one)


@pytest.mark.parametrize(
    ("name", "nth", "count"),
    [("manifest.durable", 1, 2), ("manifest.durable", 6, 2), ("exchange", 1, 2), ("exchange", 2, 3)],
)
def test_a_process_that_dies_leaves_the_old_workers_or_the_new(
    trained: tuple[Path, bb.Table], name: str, nth: int, count: int
) -> None:
    path, one = trained
    reshard_and_die(path, name, nth)
    assert [entry.name for entry in path.parent.iterdir()] != ["t"]
    assert len(folders_of_workers(path)) == count
    _assert_rows(path, count, one)
    bb.reshard(path, shards=4, ram="128MiB")
    _assert_rows(path, 4, one)
    assert [entry.name for entry in path.parent.iterdir()] == ["t"]


def test_a_new_record_of_a_worker_that_is_damaged_is_found(
    trained: tuple[Path, bb.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, one = trained
    close = bb.Table.close

    def close_and_damage(table: Any, *args: Any, **kwargs: Any) -> None:
        was_open = not table.closed
        close(table, *args, **kwargs)
        if was_open and table.path is not None and table.path.name == "shard-0001-of-0003":
            segment = max(table.path.glob("segment-*"), key=lambda file: file.stat().st_size)
            data = bytearray(segment.read_bytes())
            data[len(data) // 2] ^= 255
            segment.write_bytes(data)

    monkeypatch.setattr(bb.Table, "close", close_and_damage)
    with pytest.raises(bb.CorruptionError, match="the old table stays"):
        bb.reshard(path, shards=3, ram="128MiB")
    monkeypatch.undo()
    _assert_rows(path, 2, one)
    assert [entry.name for entry in path.parent.iterdir()] == ["t"]


def test_a_table_that_replaces_another_has_its_uuid_and_number(tmp_path: Path) -> None:
    table = bb.create(tmp_path / "t", ram="8MiB", _identity=(bytes(range(16)), 7), **FACTS)  # type: ignore[call-arg]
    assert (table.uuid, table.epoch) == (bytes(range(16)).hex(), 6)
    train(table)
    assert table.commit() == 7
    table.close()
    with bb.open(tmp_path / "t") as table:
        assert (table.uuid, table.epoch) == (bytes(range(16)).hex(), 7)
    for wrong in ((b"short", 7), (bytes(16), 0)):
        with pytest.raises(ValueError, match="no uuid and number of a commit"):
            bb.create(tmp_path / "u", ram="8MiB", _identity=wrong, **FACTS)  # type: ignore[call-arg]
    assert not (tmp_path / "u").exists() and _native.num_inside() == 0


def test_the_command_makes_folders_of_workers(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with make(path, 2) as table:
        train(table)
    command = [sys.executable, "-m", "bunkbed", "reshard", str(path), "--shards", "3"]
    ended = subprocess.run([*command, "--workers"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "3 workers" in ended.stdout, ended
    assert len(folders_of_workers(path)) == 3
    ended = subprocess.run([*command, "--no-workers"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "3 shards" in ended.stdout, ended
    with bb.open(path, mode="r") as table:
        assert isinstance(table, bb.ShardedTable)
