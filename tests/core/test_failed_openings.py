"""An opening that fails at any of its steps gives every lock back, while its error is still held."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed import _native

TABLE: dict[str, Any] = {"dim": 2, "num_rows": 10, "init": bb.Zeros(), "optimizer": bb.SGD(lr=1.0)}
SOURCES = str(Path(bb.__file__).parent)
#: These, and what they call, are not made to fail: nothing else could do their work.
GIVING_BACK = {"unlock", "_unlock", "close", "_close", "release", "__enter__", "__exit__", "__del__"}


class InjectedError(Exception):
    """What a call is made to raise."""


@contextlib.contextmanager
def failing_call(number: int) -> Iterator[list[str]]:
    """Within, call `number` of a function of the package raises; gives the names of those called."""
    called: list[str] = []

    def trace(frame: FrameType, event: str, _: Any) -> None:
        # A table that is not even initialised has nothing to give back. The arguments of close() are checked too.
        # A generator that is closed by its consumer cannot raise.
        is_check = frame.f_code.co_filename.endswith("typed.py") or frame.f_code.co_name == "<genexpr>"
        if not frame.f_code.co_filename.startswith(SOURCES) or is_check or frame.f_code.co_qualname == "Table.__init__":
            return
        above: FrameType | None = frame
        while above is not None:
            if above.f_code.co_name in GIVING_BACK:
                return
            above = above.f_back
        called.append(frame.f_code.co_qualname)
        if len(called) == number:
            raise InjectedError(frame.f_code.co_qualname)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield called
    finally:
        sys.settrace(before)


def make(root: Path) -> None:
    with bb.Run(root / "run", ram="16MiB") as run:
        run.table("user", create=TABLE).update(np.array([1]), np.ones((1, 2), np.float32))
        run.commit(files={"dense.pt": b"dense"}, keep="a")
        run.commit(files={"dense.pt": b"dense"}, keep="b")
    bb.ShardedTable.create(root / "sharded", shards=2, ram="16MiB", **TABLE).close()
    bb.create(root / "table", ram="16MiB", **TABLE).close()


def open_run_and_table(root: Path) -> None:
    run = bb.Run(root / "run", ram="16MiB")
    try:
        run.table("user")
        run.table("item", create=TABLE)
    finally:
        run.close(commit=False)


CALLS: dict[str, Callable[[Path], object]] = {
    "run": lambda root: bb.Run(root / "run").close(commit=False),
    "run of": open_run_and_table,
    "new run": lambda root: bb.Run(root / "new").close(commit=False),
    "sharded": lambda root: bb.open(root / "sharded", ram="16MiB").close(commit=False),
    "new sharded": lambda root: bb.ShardedTable.create(root / "new", shards=2, ram="16MiB", **TABLE).close(
        commit=False
    ),
    "table": lambda root: bb.open(root / "table", ram=bb.Budget("16MiB")).close(commit=False),
    "new table": lambda root: bb.create(root / "new", ram=bb.Budget("16MiB"), **TABLE).close(commit=False),
    "repair": lambda root: bb.check(root / "run", repair=True),
    "drop": lambda root: bb.drop_snapshot(root / "run", "a"),
    "copy": lambda root: bb.copy(root / "run", root / "new"),
}


def held_locks(root: Path) -> list[Path]:
    found = []
    for path in sorted(root.rglob("lock")):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(path)
    return found


@pytest.mark.parametrize("call", CALLS)
def test_no_lock_stays_after_a_failure(tmp_path: Path, call: str) -> None:
    made = tmp_path / "made"
    make(made)
    shutil.copytree(made, tmp_path / "0")
    with failing_call(0) as every:  # none
        CALLS[call](tmp_path / "0")
    # The first and the last call of each function.
    last = {name: number for number, name in enumerate(every, 1)}
    first = {name: number for number, name in reversed(list(enumerate(every, 1)))}
    leaks, failed = [], 0
    gc.disable()  # what only a collection gives back is not given back
    try:
        for number in sorted({*first.values(), *last.values()}):
            root = tmp_path / f"{number}"
            shutil.copytree(made, root)
            try:
                with failing_call(number):
                    CALLS[call](root)
            except InjectedError as error:
                failed += 1
                held = held_locks(root)  # while the error, and so every frame, is alive
                leaks += [f"{path.relative_to(root)} after {error}" for path in held]
            shutil.rmtree(root)
    finally:
        gc.enable()
    assert failed > 5
    assert leaks == []


@pytest.mark.parametrize("call", CALLS)
def test_no_lock_stays_after_a_failed_operation(tmp_path: Path, call: str) -> None:
    made = tmp_path / "made"
    make(made)
    vfs = _native.FaultVfs()
    _native.use_vfs(vfs)
    leaks = []
    try:
        for number in range(1, 200):
            root = tmp_path / f"{number}"
            shutil.copytree(made, root)
            vfs.set_fault(number)
            try:
                CALLS[call](root)
            except (OSError, bb.BunkbedError) as error:
                leaks += [f"{path.relative_to(root)} after {error}" for path in held_locks(root)]
            is_over = vfs.count() < number
            vfs.heal()
            shutil.rmtree(root)
            if is_over:
                break
    finally:
        vfs.heal()
        _native.use_vfs(None)
    assert leaks == []
