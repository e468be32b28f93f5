"""Every argument of every public call, given values of the wrong type and size: an error, and nothing changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb

IDS = np.array([3, 1], np.int64)
ONES = np.ones((2, 4), np.float32)
FACTS: dict[str, Any] = {"dim": 4, "num_rows": 10, "optimizer": bb.Adam()}

#: Of every kind that a caller may hand in by mistake; those that an argument takes are no error.
WRONG: list[Any] = [
    None,
    True,
    "a",
    "\0",
    "\udc80",
    "",
    b"a",
    1.5,
    float("nan"),
    float("inf"),
    -1,
    0,
    2**31,
    2**53,
    2**62,
    2**63 - 1,
    2**64,
    10**30,
    10**400,
    -(2**63) - 1,
    1j,
    [],
    [None],
    ["a"],
    [[1], [2, 3]],
    (),
    {},
    {"a": object()},
    {1},
    object(),
    int,
    len,
    np.float32(1.5),
    np.int8(-1),
    np.array("a"),
    np.zeros((2, 2, 2)),
    np.array([None]),
]
#: What is in no message of ours.
FOREIGN = (
    "nanobind",
    "incompatible function arguments",
    "Invoked with",
    "std::",
    "bad_alloc",
    "vector::",
    "NoneType' object",
)
ALLOWED = (TypeError, ValueError, IndexError, OSError, MemoryError, bb.BunkbedError)


def check(where: str, call: Callable[..., Any], valid: dict[str, Any], skip: tuple[str, ...] = ()) -> Iterator[str]:
    """Calls with one argument wrong at a time; yields what was wrong with an error."""
    for name in inspect.signature(call).parameters:
        if name in skip or name.startswith("_"):
            continue
        for value in WRONG:
            given = {**valid, name: value}
            shown = f"{where}({name}={str(value)[:40] if not isinstance(value, int) or abs(value) < 2**70 else 'huge'})"
            try:
                found = call(**given)
                if inspect.isgenerator(found):
                    list(found)
            except ALLOWED as error:
                text = str(error)
                if not text or any(one in text for one in FOREIGN):
                    yield f"{shown}: {type(error).__name__}: {text[:200]}"
            except BaseException as error:
                yield f"{shown}: {type(error).__name__}: {str(error)[:200]}"


def state(table: bb.Table) -> Any:
    every = np.arange(10)
    return (
        table.step,
        table.epoch,
        table.meta,
        len(table),
        table.optimizer,
        {slot: table.get(every, slot).tobytes() for slot in ("weight", *table.slots)},
    )


def made(kind: str, tmp_path: Path) -> bb.Table:
    if kind == "ram":
        return bb.create(None, **FACTS)
    if kind == "disk":
        return bb.create(tmp_path / "t", ram="16MiB", **FACTS)
    return bb.ShardedTable.create(tmp_path / "s", shards=2, ram="64MiB", **FACTS)


@pytest.mark.parametrize("kind", ["ram", "disk", "sharded"])
def test_methods_of_a_table(tmp_path: Path, kind: str) -> None:
    with made(kind, tmp_path) as table:
        table.update(IDS, ONES)
        batch = table.batch(IDS)
        reads: dict[str, dict[str, Any]] = {
            "lookup": {"ids": IDS},
            "lookup_bags": {"ids": IDS, "offsets": [0]},
            "lookup_batch": {"batch": batch, "size": 2},
            "batch": {"ids": IDS},
            "get": {"ids": IDS},
            "contains": {"ids": IDS},
            "scan": {},
            "topk": {"queries": ONES, "k": 2},
            "stage": {"ids": IDS},
            "explain": {},
        }
        if kind == "sharded":
            reads["shards_of"] = {"ids": IDS}
        before, bad = state(table), []
        for name, valid in reads.items():
            bad += check(name, getattr(table, name), valid)
            assert state(table) == before, f"{name} changed the table"
        writes: dict[str, dict[str, Any]] = {
            "update": {"ids": IDS, "grads": ONES},
            "update_batch": {"batch": batch, "sums": ONES},
            "set": {"ids": IDS, "values": ONES},
            "delete": {"ids": IDS},
            "sweep": {},
            "commit": {},
            "begin_commit": {},
            "drop": {"name": "none"},
            "rewind": {"to": "none"},
        }
        for name, valid in writes.items():
            bad += check(name, failing_without_change(table, name), valid)
        assert not bad, "\n".join(bad)
        tested = {*reads, *writes, "close", "compact", "refresh", "snapshots", "stats", "watch", "pinned"}
        internal = {"wanted_bytes", "minimum_bytes", "apply_share", "reserve_ram", "create", "open"}
        internal |= {"put_above", "share_pins", "at_one_commit", "field", "release", "shard_stats"}
        internal |= {"scan_slots", "scan_fields", "put", "spare", "sweep_rules", "swept_by"}
        internal |= {"commit_in_run", "begin_commit_in_run", "rewind_in_run"}
        public = {n for n, _ in inspect.getmembers(type(table), inspect.isfunction) if not n.startswith("_")}
        assert public <= tested | internal, "a method that this test does not know"
        for value in WRONG:
            with pytest.raises(TypeError, match="optimizer must be one of"):
                table.optimizer = value
            with pytest.raises(TypeError, match="retention must be a"):
                table.retention = value
            with pytest.raises((TypeError, ValueError), match="clock"):
                table.clock = value
        table.update(IDS, ONES)  # usable
        assert np.isfinite(table.lookup(IDS)).all()


def failing_without_change(table: bb.Table, name: str) -> Any:
    method = getattr(table, name)

    def call(**given: Any) -> Any:
        before = state(table)
        try:
            found = method(**given)
            return found.wait() if name == "begin_commit" else found
        except BaseException:
            assert state(table) == before, f"{name} failed and changed the table"
            raise

    call.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return call


@pytest.mark.filterwarnings("ignore:.* has room for")
def test_making_and_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bad: list[str] = []

    def closing(function: Callable[..., Any], *, fresh: bool = False) -> Any:
        def call(**given: Any) -> None:
            if fresh and given.get("path") == "new":
                given["path"] = f"new-{next(numbers)}"
            function(**given).close(False)

        call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return call

    numbers = iter(range(10**6))
    with bb.create("t", ram="16MiB", **FACTS) as table:
        table.update(IDS, ONES)
    with bb.ShardedTable.create("s", shards=2, ram="64MiB", **FACTS) as table:
        table.update(IDS, ONES)
    bad += check("create", closing(bb.create, fresh=True), {"path": None, **FACTS})
    bad += check("create on disk", closing(bb.create, fresh=True), {"path": "new", "ram": "16MiB", **FACTS}, ("path",))
    bad += check("open", closing(bb.open), {"path": "t", "ram": "16MiB"})
    bad += check("open to read", closing(bb.open), {"path": "t", "ram": "16MiB", "mode": "r"})
    bad += check("ShardedTable.open", closing(bb.ShardedTable.open), {"path": "s", "ram": "64MiB"})
    given = {"path": "new", "shards": 1, "ram": "32MiB", **FACTS}
    bad += check("ShardedTable.create", closing(bb.ShardedTable.create, fresh=True), given, ("path",))
    bad += check("Run", closing(bb.Run), {"path": "r", "ram": "16MiB"})
    assert not bad, "\n".join(bad)
    with bb.open("t", ram="16MiB") as table:
        assert table.step == 1


def test_methods_of_a_run(tmp_path: Path) -> None:
    bad: list[str] = []
    with bb.Run(tmp_path / "r", ram="64MiB") as run:
        run.table("user", create=FACTS).update(IDS, ONES)
        run.commit(files={"a": b"b"}, keep="first")
        for name, valid in (
            ("table", {"name": "user"}),
            ("read", {"name": "a"}),
            ("commit", {}),
            ("begin_commit", {}),
            ("rewind", {"to": "none"}),
            ("drop", {"name": "none"}),
        ):
            bad += check(f"Run.{name}", getattr(run, name), valid)
        assert not bad, "\n".join(bad)
        assert run.table("user").step == 1 and run.read("a") == b"b"


def test_definitions_and_settings(native_defaults: None) -> None:
    bad: list[str] = []
    classes = (bb.SGD, bb.Adagrad, bb.RowwiseAdagrad, bb.Adam, bb.Zeros, bb.Normal, bb.Uniform)

    def used(kind: Any) -> Any:
        def call(**given: Any) -> None:
            made = kind(**given)
            which = "init" if kind in classes[-3:] else "optimizer"
            bb.create(None, dim=2, num_rows=4, **{which: made}).close()

        call.__signature__ = inspect.signature(kind)  # type: ignore[attr-defined]
        return call

    for kind in classes:
        bad += check(kind.__name__, used(kind), {})
    bad += check("Budget", bb.Budget, {"total": 1})
    bad += check("set_num_threads", bb.set_num_threads, {"num_threads": 1})
    assert not bad, "\n".join(bad)


def test_functions_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bad: list[str] = []
    with bb.create("t", ram="16MiB", **FACTS) as table:
        table.update(IDS, ONES)
        table.commit(keep="first")
    np.save("rows.npy", np.ones((10, 4), np.float32))
    copies = iter(range(10**6))

    def copied(**given: Any) -> Any:
        return bb.copy(**{**given, "dst": f"copy-{next(copies)}" if given["dst"] == "copy" else given["dst"]})

    copied.__signature__ = inspect.signature(bb.copy)  # type: ignore[attr-defined]
    bad += check("check", bb.check, {"path": "t"})
    bad += check("copy", copied, {"src": "t", "dst": "copy"})
    bad += check("snapshots", bb.snapshots, {"path": "t"})
    bad += check("describe_snapshots", bb.describe_snapshots, {"path": "t"})
    bad += check("drop_snapshot", bb.drop_snapshot, {"path": "t", "name": "none"})
    with bb.create(None, **FACTS) as table:
        table.update(IDS, ONES)
        bad += check("neighbors", bb.neighbors, {"table": table, "ids": IDS})
        bad += check("export_rows", bb.export_rows, {"table": table, "path": "out.npy", "overwrite": True})
        bad += check("import_rows", bb.import_rows, {"table": table, "path": "rows.npy"})
        assert table.step == 1
    assert not bad, "\n".join(bad)
    assert bb.check("t") == [] and bb.snapshots("t") == {"first": 1}


def test_memory_that_the_system_has_not_is_named() -> None:
    with bb.create(None, dim=2**24) as table:
        ids = np.zeros(2**22, np.int64)
        for call in (table.lookup, table.get):
            with pytest.raises(MemoryError, match=r"cannot allocate \d+ bytes|Unable to allocate .* for an array"):
                call(ids)
