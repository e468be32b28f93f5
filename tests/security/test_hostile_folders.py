"""Folders made to harm, of runs, sharded tables and tables: calls are errors or right, and nothing outside changes.

Generated: each entry of a folder in turn is replaced (by links to files and folders outside, pipes, folders, nothing),
manifests are edited under sound checksums, and stray names are put in. Each such folder meets every public call.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb

TABLE: dict[str, Any] = {"dim": 2, "num_rows": 16, "init": bb.Zeros(), "optimizer": bb.SGD(lr=1.0)}
IDS = np.arange(16)
RAM = "16MiB"
#: What a call may raise. Anything else, a hang, and the end of the process are failures.
CLEAN = (bb.BunkbedError, OSError, ValueError, MemoryError)
BASES = ("run", "sharded", "table")


def rows() -> np.ndarray:
    return np.arange(32, dtype=np.float32).reshape(16, 2)


def make(root: Path) -> None:
    """Of each kind one, whose commits all hold `rows()`: whatever commit opens, they are right."""
    with bb.Run(root / "run", ram=RAM) as run:
        run.table("user", create=TABLE).update(IDS, -rows())
        run.commit(files={"dense.pt": b"dense"}, keep="a")
        run.commit(meta={"at": 2})
        run.commit(meta={"at": 3})
    with bb.ShardedTable.create(root / "sharded", shards=2, ram=RAM, **TABLE) as table:
        table.update(IDS, -rows())
        table.commit(keep="a")
        table.commit(meta={"at": 2})
    with bb.create(root / "table", ram=RAM, **TABLE) as table:
        table.update(IDS, -rows())
        table.commit(keep="a")
        table.commit(meta={"at": 2})


def make_outside(root: Path) -> None:
    """What must stay as it is: a user's files, with names that a run would remove, and their own tables."""
    root.mkdir()
    for name in ("thesis.txt", "file-0000000000000009", "segment-0000000000000009", "run-0000000000000009"):
        (root / name).write_text("five years")
    with bb.Run(root / "own", ram=RAM) as run:
        for _ in range(3):
            run.table("user", create=TABLE).update(IDS, rows())
            run.commit()
    with bb.create(root / "own-table", ram=RAM, **TABLE) as table:
        for name in ("x", "y"):
            table.update(IDS, rows())
            table.commit(keep=name)


def everything(folder: Path) -> dict[str, tuple[Any, ...]]:
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        about = path.stat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (about.st_mode, about.st_mtime_ns, about.st_nlink, content)
    return found


# ---- What is done to a folder

Harm = Callable[[Path, Path], None]


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def in_place(kind: str, name: str) -> Harm:
    """One entry of the folder is something else."""

    def harm(folder: Path, outside: Path) -> None:
        path = folder / name
        remove(path)
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "link to a file":
            path.symlink_to(outside / "thesis.txt")
        elif kind == "link to a folder":
            path.symlink_to(outside)
        elif kind == "link to a run":
            path.symlink_to(outside / "own")
        elif kind == "link to a table":
            path.symlink_to(outside / "own" / "tables" / "user")
        elif kind == "link to nothing":
            path.symlink_to(outside / "new")

    return harm


def edited(change: Callable[[dict[str, Any], Path], None]) -> Harm:
    """The newest manifest of a run says something else, under a sound checksum."""

    def harm(folder: Path, outside: Path) -> None:
        newest = max(folder.glob("run-*"))
        values = json.loads(newest.read_bytes().splitlines()[0])
        change(values, outside)
        body = json.dumps(values, sort_keys=True).encode()
        newest.write_bytes(body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n")

    return harm


def edits(folder: Path) -> Iterator[tuple[str, Harm]]:
    own = "user" if folder.name == "run" else "shard-0000"

    def placed(name: str, where: str) -> Callable[[dict[str, Any], Path], None]:
        return lambda values, outside: values.update(places={name: where.format(outside)})

    for name in (own, "loot"):
        for where in ("{}", "{}/own/tables/user", "{}/own-table", "{}/new", "../outside", "../../outside", "/", "."):
            yield f"places {name} at {where}", edited(placed(name, where))
    for name in (own, "loot", "shard-0002"):
        for epoch in (1, 9, 2**62):
            yield (
                f"tables {name} at {epoch}",
                edited(lambda values, _, name=name, epoch=epoch: values["tables"].update({name: epoch})),
            )
    for number in (10**15 - 1, 10**15, 10**16 - 1, 2**62, 2**63 - 1):
        for key in ("epoch", "next_file"):
            yield f"{key} {number}", edited(lambda values, _, key=key, number=number: values.update({key: number}))
        yield (
            f"file {number}",
            edited(lambda values, _, number=number: values.update(files={"dense.pt": [number, 5, "0" * 64]})),
        )
    uuid = "0" * 32
    for shards in (1, 2, 1024):
        yield (
            f"{shards} shards",
            edited(
                lambda values, _, shards=shards: values.update(
                    sharding={"hash": 1, "uuid": uuid, "shards": [uuid] * shards},
                    tables={f"shard-{index:04d}": 1 for index in range(shards)},
                )
            ),
        )
    yield "no tables", edited(lambda values, _: values.update(tables={}))


def strays(folder: Path) -> Iterator[tuple[str, Harm]]:
    names = ["run-x", "run-0000000000000099", "new-run-0000000000000004", "new-run-table-user", "new-run-table-loot"]
    names += ["files/file-x", "files/file-0000000000000099", "tables/loot", "tables/user/thesis.txt"]
    names += ["tables/user/segment-9999999999999999", "tables/user/new-x", "manifest-x", "segment-0000000000000099"]
    for name in names:
        if not (folder / name).parent.is_dir():
            continue
        for kind in ("file", "folder", "pipe", "link to a file", "link to a folder", "link to a table"):

            def harm(folder: Path, outside: Path, name: str = name, kind: str = kind) -> None:
                (folder / name).write_bytes(b"stray")
                if kind != "file":
                    in_place(kind, name)(folder, outside)

            yield f"{name}: {kind}", harm


def losses(_: Path) -> Iterator[tuple[str, Harm]]:
    def lost(pattern: str, keep: int = 0) -> Harm:
        def harm(folder: Path, _: Path) -> None:
            found = sorted(folder.glob(pattern))
            for path in found[: len(found) - keep]:
                remove(path)

        return harm

    for pattern in ("run-*", "lock", "tables", "files", "tables/*/manifest-*", "tables/*/segment-*", "manifest-*"):
        yield f"no {pattern}", lost(pattern)
    yield "only the newest run manifest", lost("run-*", keep=1)


def replacements(folder: Path) -> Iterator[tuple[str, Harm]]:
    kinds = ["folder", "pipe", "link to a file", "link to a folder", "link to a table", "link to nothing"]
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        for kind in kinds + ["link to a run"] * path.is_dir():
            yield f"{name}: {kind}", in_place(kind, name)


# ---- What is called


def look(table: Any) -> None:
    """An error, or the rows that were committed."""
    np.testing.assert_array_equal(table.lookup(IDS), rows())


def read(path: Path, _: Path) -> None:
    with bb.open(path, mode="r", ram=RAM) as table:
        look(table)


def write(path: Path, _: Path) -> None:
    with bb.open(path, ram=RAM) as table:
        look(table)
        table.set(IDS, rows())
        table.commit()


def read_run(path: Path, _: Path) -> None:
    with bb.Run(path, ram=RAM, mode="r") as run:
        for name in run.files:
            assert run.read(name) == b"dense"
        if "user" in run.table_names:
            look(run.table("user"))


def write_run(path: Path, _: Path) -> None:
    run = bb.Run(path, ram=RAM)
    try:
        is_old = "user" in run.table_names
        with contextlib.suppress(*CLEAN):
            run.table("loot", create=TABLE).update(IDS, -rows())
        with contextlib.suppress(*CLEAN):
            table = run.table("user", create=TABLE)
            if is_old:
                look(table)
        run.commit(files={"dense.pt": b"dense"})
    finally:
        run.close(commit=False)


def drop(path: Path, _: Path) -> None:
    bb.drop_snapshot(path, "a")


def look_around(path: Path, _: Path) -> None:
    bb.snapshots(path)
    bb.describe_snapshots(path)


def create_there(path: Path, _: Path) -> None:
    for make_one in (bb.create, lambda path, **facts: bb.ShardedTable.create(path, shards=2, **facts)):
        with contextlib.suppress(*CLEAN):
            make_one(path, ram=RAM, **TABLE).close()


READS: dict[str, Callable[[Path, Path], object]] = {
    "read": read,
    "read run": read_run,
    "look around": look_around,
    "check": lambda path, _: bb.check(path),
    "copy": lambda path, work: bb.copy(path, work / "copy"),
    "rewrite": lambda path, work: bb.copy(path, work / "small", dtype="bfloat16", ram=RAM),
}
WRITES: dict[str, Callable[[Path, Path], object]] = {
    "write": write,
    "write run": write_run,
    "drop": drop,
    "create": create_there,
    "repair": lambda path, _: bb.check(path, repair=True),
    "copy into": lambda path, work: bb.copy(work.parent / "made" / path.name, path),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    make(root / "made")
    make_outside(root / "outside")
    return root


HARMS = {"replacements": replacements, "edits": edits, "strays": strays, "losses": losses}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", HARMS)
@pytest.mark.parametrize("base", BASES)
def test_a_hostile_folder_harms_nothing_outside(made: Path, base: str, kind: str) -> None:
    if base == "table" and kind == "edits":
        pytest.skip("manifests of a table are edited in torture/hostile.py")
    before = everything(made / "outside")
    cases = list(HARMS[kind](made / "made" / base))
    calls = 0
    for number, (what, harm) in enumerate(cases):
        writes = list(WRITES)[number % len(WRITES) :] + list(WRITES)[: number % len(WRITES)]
        work = made / "work"
        shutil.rmtree(work, ignore_errors=True)
        folder = work / base
        shutil.copytree(made / "made" / base, folder)
        with contextlib.suppress(FileNotFoundError):
            harm(folder, made / "outside")
        for name in [*READS, *writes]:
            calls += 1
            try:
                {**READS, **WRITES}[name](folder, work)
            except CLEAN:
                pass
            except Exception as error:
                raise AssertionError(f"{what}: {name} raised {type(error).__name__}: {error}") from error
            assert everything(made / "outside") == before, f"{what}: {name} changed something outside"
    assert calls >= 80
