"""Forks, and programs that end without a commit."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.table.uncommitted import warn_of_loss

IDS = np.arange(200)
ONES = np.ones((200, 4), np.float32)


def create(path: Path | None, **kwargs: Any) -> bb.Table:
    return bb.create(path, dim=4, num_rows=1000, ram="8MiB", **kwargs)


def in_child(work: Callable[[], str]) -> str:
    """What `work` returns in a forked child."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a process with threads forks
        pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            os.write(writing, work().encode())
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(pid, 0)
    return answer


def answers_of(calls: dict[str, Callable[[], Any]]) -> str:
    """One line for each call that was not refused for the right reason."""
    wrong = []
    for name, call in calls.items():
        try:
            call()
        except bb.TableClosedError as error:
            if "before this process was forked" not in str(error):
                wrong.append(f"{name}: {error}")
        except BaseException as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{name} was answered")
    return "\n".join(wrong)


def table_calls(table: bb.Table) -> dict[str, Callable[[], Any]]:
    calls: dict[str, Callable[[], Any]] = {
        "lookup": lambda: table.lookup([1]),
        "lookup out of range": lambda: table.lookup([10**9]),
        "lookup_bags": lambda: table.lookup_bags([1, 2], [0, 1]),
        "batch": lambda: table.batch(IDS),
        "stage": lambda: table.stage(IDS),
        "get": lambda: table.get(IDS),
        "contains": lambda: table.contains(IDS),
        "scan": lambda: list(table.scan()),
        "topk": lambda: table.topk(np.ones(4, np.float32), 3),
        "stats": table.stats,
        "explain": table.explain,
        "len": lambda: len(table),
        "step": lambda: table.step,
        "epoch": lambda: table.epoch,
        "meta": lambda: table.meta,
        "is_dirty": lambda: table.is_dirty,
        "snapshots": table.snapshots,
        "apply_share": lambda: table.apply_share(8 << 20),
    }
    if table.mode == "r":
        return calls | {"refresh": table.refresh, "close": table.close}
    return calls | {
        "update": lambda: table.update(IDS, ONES),
        "set": lambda: table.set(IDS, ONES),
        "commit": table.commit,
        "commit(keep)": lambda: table.commit(keep="x"),
        "rewind": lambda: table.rewind("kept"),
        "drop": lambda: table.drop("kept"),
        "compact": table.compact,
        "optimizer": lambda: setattr(table, "optimizer", bb.Adam(lr=2.0)),
        "close": table.close,
    }


def test_every_door_of_a_table_is_shut_in_a_child(tmp_path: Path) -> None:
    with create(tmp_path / "t") as table, create(None) as in_ram:
        for one in (table, in_ram):
            one.update(IDS, ONES)
            one.commit(keep="kept")
            one.update(IDS, ONES)
        with bb.open(tmp_path / "t", mode="r", ram="8MiB") as reader:
            for one in (table, in_ram, reader):
                assert in_child(lambda one=one: answers_of(table_calls(one))) == ""  # type: ignore[misc]
            scan = table.scan(chunk=10)
            next(scan)
            assert in_child(lambda: answers_of({"a scan started before": lambda: next(scan)})) == ""
            expected = table.lookup(IDS)
            assert reader.lookup(IDS).tobytes() != expected.tobytes()
        assert table.commit() == 2
    assert bb.check(tmp_path / "t") == []
    with bb.open(tmp_path / "t", ram="8MiB") as again:
        assert again.lookup(IDS).tobytes() == expected.tobytes()


def test_the_doors_of_runs_and_budgets_too(tmp_path: Path) -> None:
    budget = bb.Budget("32MiB")
    with bb.Run(tmp_path / "run", ram=budget) as run:
        user = run.table("user", create={"dim": 4, "num_rows": 1000})
        user.update(IDS, ONES)
        run.commit(files={"dense": b"1"}, keep="kept")
        calls: dict[str, Callable[[], Any]] = {
            "table": lambda: run.table("user"),
            "new table": lambda: run.table("item", create={"dim": 4}),
            "read": lambda: run.read("dense"),
            "commit": lambda: run.commit(files={"dense": b"2"}),
            "rewind": lambda: run.rewind("kept"),
            "drop": lambda: run.drop("kept"),
            "close": run.close,
            "close without a commit": lambda: run.close(commit=False),
            "table in the parent's budget": lambda: bb.create(None, dim=4, ram=budget),
            "used_bytes": lambda: budget.used_bytes,
        }
        assert in_child(lambda: answers_of(calls)) == ""
        other = subprocess.run(
            [sys.executable, "-c", f"import bunkbed as bb; bb.Run({str(tmp_path / 'run')!r})"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "TableLockedError" in other.stderr, "the child gave the parent's lock away"
        user.update(IDS, ONES)
        assert run.commit() == 2 and run.read("dense") == b"1"
    assert bb.check(tmp_path / "run") == []


def test_a_run_without_open_tables_keeps_its_lock_too(tmp_path: Path) -> None:
    with bb.Run(tmp_path / "run", ram="8MiB") as run:
        run.commit(files={"dense": b"1"})
        assert in_child(lambda: answers_of({"close": run.close, "commit": run.commit})) == ""
        with pytest.raises(bb.TableLockedError):
            bb.Run(tmp_path / "run", ram="8MiB")


def test_a_child_opens_what_it_needs_itself(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, 100_000)
    with bb.create(tmp_path / "t", dim=16, num_rows=50_000, ram="4MiB") as table:
        table.update(np.arange(50_000), np.ones((50_000, 16), np.float32))
        table.commit()
        expected = table.lookup(ids)  # the parent's threads are up

        def work() -> str:
            with bb.open(tmp_path / "t", mode="r", ram="4MiB") as reader:
                same = reader.lookup(ids).tobytes() == expected.tobytes()
            with bb.create(tmp_path / "own", dim=16, num_rows=50_000, ram="4MiB") as own:
                own.update(np.arange(50_000), np.ones((50_000, 16), np.float32))
                return f"{same} {own.lookup(ids).tobytes() == expected.tobytes()}"

        assert in_child(work) == "True True"
        assert table.lookup(ids).tobytes() == expected.tobytes()
    assert bb.check(tmp_path / "own") == []


def test_a_child_that_ends_says_and_does_nothing(tmp_path: Path) -> None:
    code = f"""
import os, sys
import numpy as np, bunkbed as bb
table = bb.create({str(tmp_path / "t")!r}, dim=4, num_rows=1000, ram="8MiB")
table.update(np.arange(7), np.ones((7, 4), np.float32))
pid = os.fork()
if pid == 0:
    sys.exit(0)  # atexit runs here too
os.waitpid(pid, 0)
table.close()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    with bb.open(tmp_path / "t", mode="r", ram="8MiB") as table:
        assert len(table) == 7


# ---- programs that end, and tables that are released


def test_a_program_that_ends_without_a_commit_says_what_is_lost(tmp_path: Path) -> None:
    code = f"""
import numpy as np, bunkbed as bb
table = bb.create({str(tmp_path / "t")!r}, dim=4, num_rows=1000, ram="8MiB")
table.commit(meta={{"x": 1}})
for _ in range(3):
    table.update(np.arange(7), np.ones((7, 4), np.float32))
silent = bb.create({str(tmp_path / "silent")!r}, dim=4, num_rows=1000, ram="8MiB")
silent.update(np.arange(7), np.ones((7, 4), np.float32))
silent.commit()
reader = bb.open({str(tmp_path / "silent")!r}, mode="r", ram="8MiB")
in_ram = bb.create(None, dim=4)
in_ram.update(np.arange(7), np.ones((7, 4), np.float32))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr.count("Warning") == 1, done.stderr
    place = tmp_path / "t"
    assert (
        f"UncommittedWarning: table 't' at {place} was left open: 7 changed rows of 3 steps since commit 1 are lost; "
        "call close() or use a with block" in done.stderr
    )
    assert bb.check(place) == []
    with bb.open(place, ram="8MiB") as table:
        assert (len(table), table.step) == (0, 0)


def test_where_warnings_are_errors_the_text_is_shown(tmp_path: Path) -> None:
    code = f"""
import numpy as np, bunkbed as bb
def leave(name):
    table = bb.create({str(tmp_path)!r} + "/" + name, dim=4, num_rows=1000, ram="8MiB")
    table.update(np.arange(7), np.ones((7, 4), np.float32))
    return table
leave("collected")
at_exit = leave("at exit")
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    first, second = done.stderr.splitlines()
    assert "UncommittedWarning: table 'collected' at" in first and "7 changed rows of 1 step" in first
    assert "UncommittedWarning: table 'at exit' at" in second
    assert done.returncode == 0


def test_a_table_that_is_let_go_of_says_so_once(tmp_path: Path) -> None:
    table = create(tmp_path / "t", optimizer=bb.SGD())
    table.update(IDS[:1], ONES[:1])
    with pytest.warns(bb.UncommittedWarning, match=r"1 changed row of 1 step since commit 0 is lost") as caught:
        warn_of_loss(table)
        del table
        gc.collect()
    assert len(caught) == 1
    table = bb.open(tmp_path / "t", ram="8MiB")  # the lock went with the first
    table.set(IDS[:9], ONES[:9])
    with pytest.warns(bb.UncommittedWarning, match=r"9 changed rows since commit 0 are lost"):
        warn_of_loss(table)
    table.close(commit=False)


def test_rows_that_left_ram_are_counted_too(tmp_path: Path) -> None:
    table = bb.create(tmp_path / "t", dim=64, num_rows=50_000, ram="4MiB")
    table.commit(meta={"x": 1})
    for begin in range(0, 50_000, 5000):
        table.update(np.arange(begin, begin + 5000), np.ones((5000, 64), np.float32))
    with pytest.warns(bb.UncommittedWarning, match=r"up to 50,000 changed rows of 10 steps since commit 1"):
        warn_of_loss(table)
    table.close(commit=False)


def test_a_run_that_is_let_go_of_says_so(tmp_path: Path) -> None:
    run = bb.Run(tmp_path / "run", ram="8MiB")
    run.table("user", create={"dim": 4, "num_rows": 1000}).update(IDS, ONES)
    with pytest.warns(bb.UncommittedWarning, match=r"200 changed rows of 1 step.*call run.close\(\)"):
        warn_of_loss(run.table("user"))
    run.close(commit=False)


def test_nothing_is_said_where_nothing_is_lost_unsaid(tmp_path: Path) -> None:
    class Left(Exception):
        pass

    with warnings.catch_warnings():
        warnings.simplefilter("error", bb.UncommittedWarning)
        with pytest.raises(Left), create(tmp_path / "left") as table:
            table.update(IDS, ONES)
            raise Left
        warn_of_loss(table)
        closed = create(tmp_path / "closed")
        closed.update(IDS, ONES)
        closed.close(commit=False)
        warn_of_loss(closed)
        committed = create(tmp_path / "committed")
        committed.update(IDS, ONES)
        committed.commit()
        warn_of_loss(committed)
        reader = bb.open(tmp_path / "committed", mode="r", ram="8MiB")
        warn_of_loss(reader)
        in_ram = create(None)
        in_ram.update(IDS, ONES)
        warn_of_loss(in_ram)
        reader.close()
        committed.close()
