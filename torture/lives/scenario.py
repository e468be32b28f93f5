"""Actions of a tortured run, and the oracle: the exact state of each commit.

A scenario is a list of actions on a run of three tables. `expected` carries it out on `ReferenceTable`s in memory,
`drive` on files. Both number commits equally, so a state after a failure can be identified.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from bunkbed import _native
from bunkbed.table.definition import Definition
from bunkbed.testing import ReferenceTable
from bunkbed.testing.compare import counts_of, usage_of

#: Arguments of the tables; small, so that a hundred thousand disks can be checked. The last table is made late.
TABLES: dict[str, dict[str, Any]] = {
    "user": {"dim": 48, "num_rows": 64, "optimizer": bb.Adam(lr=0.05), "init": bb.Normal(std=0.1), "seed": 3},
    "item": {
        "dim": 24,
        "num_rows": 40,
        "optimizer": bb.RowwiseAdagrad(lr=0.1),
        "init": bb.Zeros(),
        "seed": 4,
        "dtype": "bfloat16",
    },
    "late": {"dim": 8, "num_rows": 24, "optimizer": bb.SGD(lr=0.5), "init": bb.Uniform(-1.0, 1.0), "seed": 5},
    # Without a run: rows of any id come and go by rules.
    "visitor": {
        "dim": 384,
        "num_rows": None,
        "optimizer": bb.Adam(lr=0.05),
        "init": bb.Normal(std=0.1),
        "seed": 3,
        "expire": 7,
        "max_rows": 45,
        "evict": "rarest",
        "admit": 0.7,
    },
}
#: The tables of the run.
RUN_TABLES = ("user", "item", "late")
#: Ids of a table of any id.
ANY = 64
#: The tables take index snapshots when due, within a commit (`_native.set_index_snapshots`).
#: Compaction of these small tables starts at so many dead bytes, not at 256 KiB.
COMPACTION_SLACK = 24 << 10
BATCH_IDS = 16

#: u: a step of every table. v: only of the first. i: rows of every table are set and written to the log at once, as in
#: an import. c: commit with a new dense file. d: without a dense file. k: commit and keep as "a". l: as "b". A: start
#: a commit. W: wait for the commit. n: make the late table. m: compact. r: rewind to "a". x: close without a commit
#: and reopen.
ACTIONS = "uucuvuiukuuAvuimuWduulnuukuiuuxuAiuuWcmuurucuiuAuuuWmdvcuuAuiuWc"
#: Least time of a background commit, so that rows change and are evicted meanwhile.
SLOW_S = 0.002


@dataclass(frozen=True)
class State:
    """State of a commit."""

    tables: dict[str, bytes]
    after: dict[str, bytes]  # the tables after some more steps
    files: dict[str, bytes]
    snapshots: dict[str, int]  # name -> number of the commit


def batch(name: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids with duplicates, and gradients of a step; skewed, so that some rows are stored and some new."""
    rng = np.random.default_rng([step, *name.encode()])
    rows = TABLES[name]["num_rows"] or ANY
    ids = (rows * rng.random(BATCH_IDS) ** 1.5).astype(np.int64)
    return ids, rng.standard_normal((BATCH_IDS, TABLES[name]["dim"]), dtype=np.float32)


def train(tables: dict[str, Any], step: int, only: str | None = None) -> None:
    for name, table in tables.items():
        if only is None or name == only:
            table.update(*batch(name, step))


def set_rows(tables: dict[str, Any], step: int) -> None:
    for name, table in tables.items():
        table.set(*batch(name, step))


def delete_rows(tables: dict[str, Any], step: int) -> None:
    for name, table in tables.items():
        table.delete(batch(name, step)[0])


def sweep_rows(tables: dict[str, Any], step: int) -> None:
    for table in tables.values():
        table.sweep()


def bring_in(tables: dict[str, Any], step: int) -> None:
    """Set rows as in an import."""
    set_rows(tables, step)
    for table in tables.values():
        table.core.write_dirty()


def train_on(tables: dict[str, Any]) -> None:
    """Do the steps between `State.tables` and `State.after`."""
    for step in (1_000_001, 1_000_002):
        train(tables, step)


def content(table: Any) -> bytes:
    """Return every bit of a table: weights and slots of all rows, the stored ids, ages and counts, the step."""
    ids = np.arange(table.num_rows or ANY, dtype=np.int64)
    parts = [np.ascontiguousarray(table.get(ids, slot=slot)).tobytes() for slot in ("weight", *table.slots)]
    usage = usage_of(table, ids).tobytes() if table.num_rows is None else b""
    counts = counts_of(table).tobytes() if table.num_rows is None else b""
    step = int(table.step).to_bytes(8, "little")
    return b"".join([*parts, usage, counts, table.contains(ids).tobytes(), step])


def ram(names: Any) -> int:
    """Return about the smallest budget for such a run, so that every batch evicts."""
    specs = [Definition(**TABLES[name]).spec(belongs_to_run=True) for name in names]
    return sum(spec.minimum_ram(64, True) + 2048 for spec in specs)


def file_of(number: int) -> bytes:
    """Return the dense file of commit `number`."""
    return np.random.default_rng(number).bytes(700 + number)


def expected(actions: str) -> list[State]:
    """Return the states of commits 0, 1, 2, ...; commit 0, before the first commit, is empty."""
    tables = {name: ReferenceTable(**TABLES[name]) for name in ("user", "item")}
    states = [State({}, {}, {}, {})]
    saved: dict[int, dict[str, ReferenceTable]] = {}
    files: dict[str, bytes] = {}
    snapshots: dict[str, int] = {}
    for step, action in enumerate(actions):
        if action in "uv":
            train(tables, step, "user" if action == "v" else None)
        elif action == "i":
            set_rows(tables, step)
        elif action == "n":
            tables["late"] = ReferenceTable(**TABLES["late"])
        elif action == "x":
            tables = copy.deepcopy(saved[len(states) - 1])
        elif action in "cdklrA":
            number = len(states)
            if action == "r":
                tables = copy.deepcopy(saved[snapshots["a"]])
                files = states[snapshots["a"]].files
            if action in "cklA":
                files = {**files, "dense.pt": file_of(number)}
            if action in "kl":
                snapshots = {**snapshots, {"k": "a", "l": "b"}[action]: number}
            saved[number] = copy.deepcopy(tables)
            later = copy.deepcopy(tables)
            train_on(later)
            states.append(
                State(
                    {name: content(table) for name, table in tables.items()},
                    {name: content(table) for name, table in later.items()},
                    files,
                    snapshots,
                )
            )
    return states


class Commit:
    """A commit of a process: the moment of its start, and of its acknowledgement (None: never)."""

    def __init__(self, number: int, begin: int) -> None:
        self.number = number
        self.begin = begin
        self.end: int | None = None


def drive(
    actions: str,
    path: Path,
    now: Callable[[], int],
    report: Callable[[Commit], None] | None = None,
    slow: bool = True,
) -> list[Commit]:
    """Carry out the actions on files.

    Args:
        actions: a scenario.
        path: the run's folder.
        now: returns the current moment, for `Commit`.
        report: called when a commit starts and when it is acknowledged.
        slow: slow down background commits, with a failpoint.
    """
    _native.set_compaction_slack(COMPACTION_SLACK)
    _native.set_index_snapshots(1, in_line=True)
    budget = ram(TABLES)
    commits: list[Commit] = []
    pending: Any = None

    def acknowledge() -> None:
        commits[-1].end = now()
        if report is not None:
            report(commits[-1])

    def open_run(names: list[str]) -> bb.Run:
        run = bb.Run(path, ram=budget)
        for name in names:
            run.table(name, create=TABLES[name])
        return run

    run = open_run(["user", "item"])
    try:
        for step, action in enumerate(actions):
            if action in "uv":
                train(run.tables, step, "user" if action == "v" else None)
            elif action == "i":
                bring_in(run.tables, step)
            elif action == "m":
                for table in run.tables.values():
                    table.compact()
            elif action == "n":
                run.table("late", create=TABLES["late"])
            elif action == "x":
                names = list(run.tables)
                run.close(commit=False)
                run = open_run(names)
            elif action == "W":
                pending.wait()
                _native.disarm_failpoints()
                acknowledge()
            elif action in "cdklrA":
                commit = Commit(run.epoch + 1, now())
                commits.append(commit)
                if report is not None:
                    report(commit)
                files = {"dense.pt": file_of(commit.number)} if action in "cklA" else None
                if action == "A":
                    if slow:
                        _native.arm_failpoint("commit.frozen", 0, "delay", SLOW_S)
                    pending = run.begin_commit(files=files)
                    continue
                if action == "r":
                    run.rewind("a")
                else:
                    run.commit(files=files, keep={"k": "a", "l": "b"}.get(action))
                acknowledge()
    finally:
        run.close(commit=False)
    return commits


def open_all(path: Path, state: State) -> None:
    """Open every table for writing and close it."""
    run = bb.Run(path, ram=ram(TABLES))
    try:
        for name in state.tables:
            run.table(name)
    finally:
        run.close(commit=False)


class Violation(Exception):
    """A promise that did not hold."""


def check_recovered(path: Path, states: list[State], allowed: set[int], *, thorough: bool) -> int:
    """Open a run after a failure as in a new process, and continue it. Returns the commit that it was at.

    Args:
        path: the run's folder; it may be missing if commit 0 is allowed.
        states: states of all commits.
        allowed: the commits that it may be at.
        thorough: also opens snapshots, commits, opens again and checks every file.

    Raises:
        Violation: it is at another commit, does not open, has other bits, or trains differently.
    """
    try:
        number = _check_recovered(path, states, allowed, thorough)
    except Violation:
        raise
    except Exception as error:
        raise Violation(f"{type(error).__name__}: {error}") from error
    return number


def _check_recovered(path: Path, states: list[State], allowed: set[int], thorough: bool) -> int:
    budget = ram(TABLES)
    run = bb.Run(path, ram=budget)
    try:
        number = run.epoch
        if number not in allowed:
            raise Violation(f"the run is at commit {number}, not at one of {sorted(allowed)}")
        state = states[number]
        _compare_names(run, state)
        if number == 0:
            # No commit was promised; a new run can be started here.
            tables: dict[str, Any] = {name: run.table(name, create=TABLES[name]) for name in ("user", "item")}
            train(tables, 0)
            run.commit()
            return 0
        tables = {name: run.table(name) for name in state.tables}
        _compare(tables, state.tables, "")
        train_on(tables)
        _compare(tables, state.after, " after training on")
        if thorough:
            run.commit(files={"dense.pt": b"after"})
    finally:
        run.close(commit=False)
    if thorough:
        _check_again(path, states, number, budget)
    return number


def _compare_names(run: bb.Run, state: State) -> None:
    if run.table_names != sorted(state.tables):
        raise Violation(f"the run has tables {run.table_names}, not {sorted(state.tables)}")
    if run.snapshots() != state.snapshots:
        raise Violation(f"the run has snapshots {run.snapshots()}, not {state.snapshots}")
    found = {name: run.read(name) for name in run.files}
    if found != state.files:
        raise Violation(f"the run has other files than {sorted(state.files)}, or they hold other bytes")


def _compare(tables: dict[str, Any], contents: dict[str, bytes], when: str) -> None:
    for name, table in tables.items():
        found, wanted = content(table), contents[name]
        if found != wanted:
            differ = sum(a != b for a, b in zip(found, wanted, strict=True))
            raise Violation(f"table {name!r}{when}: {differ} of {len(wanted)} bytes differ")


def _check_again(path: Path, states: list[State], number: int, budget: int) -> None:
    state = states[number]
    with bb.Run(path, ram=budget, mode="r") as run:
        if run.epoch != number + 1 or run.read("dense.pt") != b"after":
            raise Violation(f"a commit after the failure is {run.epoch}, not {number + 1}")
        readers = {name: run.table(name) for name in state.tables}
        _compare(readers, state.after, " committed after the failure and opened again")
    for name, kept in state.snapshots.items():
        with bb.Run(path, ram=budget, mode="r", snapshot=name) as run:
            _compare({t: run.table(t) for t in states[kept].tables}, states[kept].tables, f" of snapshot {name!r}")
    for name in state.tables:
        problems = bb.check(path / "tables" / name)
        if problems:
            raise Violation(f"table {name!r} has problems: {problems[0]}")
