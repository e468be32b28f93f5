"""What a run may remove: only what is proved to be left of its own table that was never committed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed import _native

TABLE: dict[str, Any] = {"dim": 4, "num_rows": 10, "init": bb.Zeros(), "optimizer": bb.SGD(lr=1.0)}
OTHER = {**TABLE, "dim": 2}
ONE = np.array([1])


def train(table: Any) -> None:
    table.update(ONE, np.full((1, table.dim), -1.0, np.float32))


def make(path: Path, *, commits: int = 1, names: tuple[str, ...] = ("user",)) -> None:
    with bb.Run(path) as run:
        for _ in range(commits):
            for name in names:
                train(run.table(name, create=TABLE))
            run.commit()


def listing(folder: Path) -> dict[str, Any]:
    """Every file, link and directory below, with its content."""

    def content(path: Path) -> Any:
        if path.is_symlink():
            return str(path.readlink())
        return path.read_bytes() if path.is_file() else None

    return {str(path.relative_to(folder)): content(path) for path in folder.rglob("*")}


def without_lock(found: dict[str, Any]) -> dict[str, Any]:
    return {name: content for name, content in found.items() if not name.endswith("lock")}


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the newest manifest of a run, and its checksum with it."""
    newest = max(path.glob("run-*"))
    values = json.loads(newest.read_bytes().splitlines()[0])
    change(values)
    body = json.dumps(values, sort_keys=True).encode()
    newest.write_bytes(body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n")


# ---- Places in a manifest


@pytest.mark.parametrize("place", ["absolute", "up"])
@pytest.mark.parametrize("is_named", [True, False])
def test_the_manifest_of_a_plain_run_places_no_table(tmp_path: Path, place: str, is_named: bool) -> None:
    path, precious = tmp_path / "run", tmp_path / "precious"
    make(path)
    precious.mkdir()
    (precious / "thesis.txt").write_text("five years")
    target = str(precious) if place == "absolute" else "../precious"
    edit_manifest(path, lambda values: values.update(places={"user" if is_named else "loot": target}))
    with (
        pytest.raises(bb.CorruptionError, match=r"'places' names '(user|loot)', which is no shard"),
        bb.Run(path) as run,
    ):
        run.table("loot", create=TABLE)
    assert listing(precious) == {"thesis.txt": b"five years"}


@pytest.mark.parametrize("call", ["open", "table", "drop", "repair", "rewind", "reader", "copy", "directories"])
def test_a_place_that_holds_another_table_than_the_shard_is_left_alone(tmp_path: Path, call: str) -> None:
    path, victim = tmp_path / "user", tmp_path / "victim"
    with bb.ShardedTable.create(path, shards=2, ram="16MiB", **TABLE) as table:
        table.commit(keep="a")
        train(table)
        table.commit()
    with bb.ShardedTable.create(victim, shards=2, ram="16MiB", **TABLE) as other:
        for _ in range(4):
            train(other)
            other.commit(keep=f"kept {other.step}")
    before = without_lock(listing(victim))
    shards = {f"shard-000{i}": str(victim / "tables" / f"shard-000{i}") for i in range(2)}
    edit_manifest(path, lambda values: values.update(places=shards))
    if call == "directories":
        edit_manifest(path, lambda values: values.pop("places"))
    with pytest.raises(bb.FormatError, match=r"holds another table \(uuid") if call != "repair" else nothing():
        if call == "open":
            bb.open(path).close()
        elif call == "directories":
            bb.ShardedTable.open(path, directories=[victim / "tables"]).close()
        elif call == "table":
            with bb.Run(path, mode="r") as run:
                run.table("shard-0000")
        elif call == "drop":
            bb.drop_snapshot(path, "a")
        elif call == "repair":
            assert any("holds another table" in str(problem) for problem in bb.check(path, repair=True))
        elif call == "rewind":
            with bb.Run(path, _shards_of="user") as run:
                run.rewind("a")
        elif call == "reader":
            bb.open(path, mode="r").close()
        else:
            bb.copy(path, tmp_path / "copy")
    assert without_lock(listing(victim)) == before


def nothing() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def test_a_table_that_is_a_symbolic_link_is_neither_opened_nor_replaced(tmp_path: Path) -> None:
    path, victim = tmp_path / "run", tmp_path / "victim"
    make(path)
    make(victim, commits=3)
    before = without_lock(listing(victim))
    shutil.rmtree(path / "tables" / "user")
    for name in ("user", "loot"):  # one that the manifest names, one that it does not
        (path / "tables" / name).symlink_to(victim / "tables" / "user")
        with bb.Run(path) as run, pytest.raises(bb.FormatError, match=rf"tables/{name} is a symbolic link"):
            run.table(name, create=TABLE)
    assert without_lock(listing(victim)) == before


# ---- What a session left


def test_commits_whose_run_manifests_are_missing_are_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    make(path, commits=3)
    for manifest in path.glob("run-*"):
        manifest.unlink()
    before = without_lock(listing(path))
    with pytest.raises(
        FileExistsError, match=r"no commit of it names a table 'user', but .*tables/user holds a table "
    ):
        bb.Run(path).table("user", create=TABLE)
    assert without_lock(listing(path)) == before


@pytest.mark.parametrize("kind", ["missing", "empty", "scratch"])
def test_a_table_that_a_commit_names_is_not_made_anew(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run"
    make(path)
    shutil.rmtree(path / "tables" / "user")
    if kind == "empty":
        (path / "tables" / "user").mkdir()
    elif kind == "scratch":
        with bb.create(path / "tables" / "user", ram="16MiB", durability="scratch", **TABLE):
            shutil.copytree(path / "tables" / "user", tmp_path / "scratch")
        shutil.rmtree(path / "tables" / "user", ignore_errors=True)
        shutil.copytree(tmp_path / "scratch", path / "tables" / "user")
        edit_manifest(path, lambda values: values.update(tables={"user": 0}))
    before = without_lock(listing(path))
    with bb.Run(path) as run:
        with pytest.raises((FileNotFoundError, bb.BunkbedError), match="user"):
            run.table("user", create=TABLE)
        assert not run.is_behind()
    assert without_lock(listing(path)) == before


def test_a_table_newer_than_the_restored_manifests_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    make(path)
    shutil.copytree(path, tmp_path / "backup")
    make(path, names=("item",))
    for manifest in path.glob("run-*"):
        manifest.unlink()
    shutil.copytree(tmp_path / "backup", path, dirs_exist_ok=True)
    before = listing(path / "tables" / "item")
    with bb.Run(path) as run, pytest.raises(FileExistsError, match=r"put them back; otherwise move that directory"):
        run.table("item", create=TABLE)
    assert listing(path / "tables" / "item") == before


@pytest.mark.parametrize("kind", ["plain", "strange", "nested", "file", "segments", "damaged"])
def test_what_is_no_leftover_is_not_removed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run"
    place = path / "tables" / "user"
    bb.Run(path).close()
    if kind == "plain":
        bb.create(place, ram="16MiB", **TABLE).close()
    elif kind == "file":
        place.write_text("mine")
    else:
        run = bb.Run(path)
        run.table("user", create=TABLE)
        run.close(commit=False)
        if kind == "strange":
            (place / "thesis.txt").write_text("five years")
        elif kind == "nested":
            (place / "new-folder").mkdir()
        elif kind == "segments":
            (place / "manifest-0000000000000000").rename(place / "segment-0000000000000001")
        else:
            (place / "manifest-0000000000000000").write_bytes(b"damaged")
    before = without_lock(listing(path))
    with bb.Run(path) as run, pytest.raises(FileExistsError, match=r"user .*nothing was changed"):
        run.table("user", create=TABLE)
    assert without_lock(listing(path)) == before


@pytest.mark.parametrize("place", ["table made", "run.tables", "run.files", "no manifest", "twice"])
def test_what_a_session_left_before_the_first_commit_is_replaced(tmp_path: Path, place: str) -> None:
    path = tmp_path / "run"
    make(path, names=("item",))
    run = bb.Run(path)
    train(run.table("user", create=TABLE))
    for _ in range(0 if place == "table made" else 2 if place == "twice" else 1):
        train(run.table("user"))
        _native.arm_failpoint(place if place.startswith("run.") else "run.files", 1, "error")
        with pytest.raises(OSError, match="injected"):
            run.commit()
        _native.disarm_failpoints()
    run.close(commit=False)
    if place == "no manifest":
        for entry in (path / "tables" / "user").iterdir():
            entry.unlink()
        (path / "tables" / "user" / "new-manifest-0000000000000000").write_bytes(b"half")
    with bb.Run(path) as run:
        table = run.table("user", create=OTHER)  # nothing of the other one is left
        assert (table.dim, table.step, len(table)) == (2, 0, 0)
        train(table)
        run.commit()
    with bb.Run(path) as run:
        assert run.table("user").step == 1 and run.table("item").step == 1
    assert not list(path.glob("new-run-*"))


def test_a_removal_that_was_interrupted_can_be_made_again(tmp_path: Path) -> None:
    """Each operation of the removal fails in turn; the next session removes the rest."""
    vfs = _native.FaultVfs()
    vfs.count_reads(False)
    _native.use_vfs(vfs)
    try:
        for at in range(1, 9):
            path = tmp_path / f"run-{at}"
            run = bb.Run(path)
            train(run.table("user", create=TABLE))
            _native.arm_failpoint("run.files", 1, "error")
            with pytest.raises(OSError, match="injected"):
                run.commit()
            _native.disarm_failpoints()
            run.close(commit=False)
            with bb.Run(path) as run:
                vfs.set_fault(at)
                with contextlib.suppress(OSError):
                    run.table("user", create=OTHER)
                vfs.heal()
                run.close(commit=False)
            with bb.Run(path) as run:
                assert run.table("user", create=OTHER).dim == 2
    finally:
        _native.disarm_failpoints()
        _native.use_vfs(None)


def test_the_mark_of_a_new_table_goes_with_the_commit_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run = bb.Run(path)
    train(run.table("user", create=TABLE))
    run.begin_commit().wait()
    assert not list(path.glob("new-run-*"))
    uuid = run.table("user").uuid
    run.close()
    # Left by a session that died between its commit and removing the mark: it proves nothing any more.
    (path / "new-run-table-user").write_text(uuid)
    bb.Run(path).close()
    assert not list(path.glob("new-run-*"))
