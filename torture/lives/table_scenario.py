"""As `scenario`, for a table without a run: the table must recover without the help of a run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bunkbed as bb
from bunkbed import _native
from bunkbed.testing import ReferenceTable
from torture.lives.scenario import (
    COMPACTION_SLACK,
    SLOW_S,
    TABLES,
    Commit,
    State,
    Violation,
    bring_in,
    content,
    delete_rows,
    ram,
    set_rows,
    sweep_rows,
    train,
    train_on,
)

#: u: a step. i: rows are set and written to the log at once. t: rows are deleted. s: rows go by the table's rules.
#: c: commit. k: commit and keep as "a". l: as "b". d: drop "a". e: drop "b". m: compact. o: collect the commit before
#: the last, as `disk=` does. r: rewind to "a". A: start a commit. W: wait for the commit. x: close without a commit and
#: reopen. n: make the table. g: from now on the third step that names a row stores it. p: each with a probability.
ACTIONS = "nuiutucutkuuusmtoulutdmuAitWcgutsouuukuiteuxutcusuruAtuuiuuWotsucuidmtuAusituWuptAuuistuuuWtscom"
NAME = "visitor"


def set_admission(table: Any, action: str) -> None:
    table.retention = replace(table.retention, admit=3 if action == "g" else TABLES[NAME]["admit"])


def expected(actions: str) -> list[State]:
    """Return states 0, 1, 2, ...: 0 is no table; the others follow creation, commits, rewinds and drops."""
    table: dict[str, ReferenceTable] = {}
    states = [State({}, {}, {}, {})]
    saved: dict[int, dict[str, ReferenceTable]] = {}
    snapshots: dict[str, int] = {}
    for step, action in enumerate(actions):
        number = len(states)
        if action == "u":
            train(table, step)
            continue
        if action == "i":
            set_rows(table, step)
            continue
        if action == "t":
            delete_rows(table, step)
            continue
        if action == "s":
            sweep_rows(table, step)
            continue
        if action in "gp":
            set_admission(table[NAME], action)
            continue
        if action in "moW":
            continue
        if action == "x":
            table = copy.deepcopy(saved[number - 1])
            continue
        if action == "n":
            table = {NAME: ReferenceTable(**TABLES[NAME])}
        elif action == "r":
            rules = table[NAME].retention  # which stay
            table = copy.deepcopy(saved[snapshots["a"]])
            table[NAME].retention = rules
        elif action in "kl":
            snapshots = {**snapshots, {"k": "a", "l": "b"}[action]: number}
        elif action in "de":
            snapshots = {name: kept for name, kept in snapshots.items() if name != {"d": "a", "e": "b"}[action]}
        # The commit of a drop does not contain updates since the last commit; they remain in memory.
        saved[number] = copy.deepcopy(saved[number - 1] if action in "de" else table)
        later = copy.deepcopy(saved[number])
        train_on(later)
        states.append(State({NAME: content(saved[number][NAME])}, {NAME: content(later[NAME])}, {}, snapshots))
    return states


def drive(
    actions: str,
    path: Path,
    now: Callable[[], int],
    report: Callable[[Commit], None] | None = None,
    slow: bool = True,
) -> list[Commit]:
    """As `scenario.drive`."""
    _native.set_compaction_slack(COMPACTION_SLACK)
    _native.set_index_snapshots(1, in_line=True)
    commits: list[Commit] = []
    table: Any = None
    pending: Any = None

    def acknowledge() -> None:
        commits[-1].end = now()
        if report is not None:
            report(commits[-1])

    try:
        for step, action in enumerate(actions):
            if action == "u":
                train({NAME: table}, step)
            elif action == "i":
                bring_in({NAME: table}, step)
            elif action == "t":
                delete_rows({NAME: table}, step)
            elif action == "s":
                sweep_rows({NAME: table}, step)
            elif action in "gp":
                set_admission(table, action)
            elif action == "m":
                table.compact()
            elif action == "o":
                table.core.collect(1)
            elif action == "x":
                table.close(commit=False)
                table = bb.open(path, ram=ram([NAME]))
            elif action == "W":
                pending.wait()
                _native.disarm_failpoints()
                acknowledge()
            else:
                commit = Commit(len(commits) + 1, now())
                commits.append(commit)
                if report is not None:
                    report(commit)
                if action == "A":
                    if slow:
                        _native.arm_failpoint("commit.frozen", 0, "delay", SLOW_S)
                    pending = table.begin_commit()
                    continue
                if action == "n":
                    table = bb.create(path, ram=ram([NAME]), **TABLES[NAME])
                elif action == "r":
                    table.rewind("a")
                elif action in "de":
                    table.drop({"d": "a", "e": "b"}[action])
                else:
                    table.commit(keep={"k": "a", "l": "b"}.get(action))
                acknowledge()
    finally:
        if table is not None:
            table.close(commit=False)
    return commits


def check_recovered(path: Path, states: list[State], allowed: set[int], *, thorough: bool) -> int:
    """As `scenario.check_recovered`."""
    try:
        return _check_recovered(path, states, allowed, thorough)
    except Violation:
        raise
    except Exception as error:
        raise Violation(f"{type(error).__name__}: {error}") from error


def _check_recovered(path: Path, states: list[State], allowed: set[int], thorough: bool) -> int:
    try:
        table = bb.open(path, ram=ram([NAME]))
    except (FileNotFoundError, bb.FormatError):
        if 0 not in allowed:
            raise
        table = bb.create(path, ram=ram([NAME]), **TABLES[NAME])
        allowed = {0}
    try:
        if allowed == {0}:
            train({NAME: table}, 0)
            table.commit()
            return 0
        found, kept = content(table), sorted(table.snapshots())
        numbers = [n for n in sorted(allowed - {0}) if states[n].tables[NAME] == found]
        if not numbers:
            raise Violation(f"the table holds none of the commits {sorted(allowed)}")
        numbers = [n for n in numbers if sorted(states[n].snapshots) == kept]
        if not numbers:
            raise Violation(f"the table has snapshots {kept}, not those of commits {sorted(allowed)}")
        number = numbers[-1]
        state = states[number]
        train_on({NAME: table})
        if content(table) != state.after[NAME]:
            raise Violation("the table does not train on as it should")
        if thorough:
            table.commit()
    finally:
        table.close(commit=False)
    if thorough:
        _check_again(path, states, state)
    return number


def _check_again(path: Path, states: list[State], state: State) -> None:
    with bb.open(path, ram=ram([NAME]), mode="r") as reader:
        if content(reader) != state.after[NAME]:
            raise Violation("what was committed after the failure is not there when opened again")
    for name, kept in state.snapshots.items():
        with bb.open(path, ram=ram([NAME]), snapshot=name) as reader:
            if content(reader) != states[kept].tables[NAME]:
                raise Violation(f"snapshot {name!r} holds something else")
    problems = bb.check(path)
    if problems:
        raise Violation(f"the table has problems: {problems[0]}")


def open_all(path: Path, state: State) -> None:
    """Open the table for writing, or make it if it was never made, and close it."""
    try:
        table = bb.open(path, ram=ram([NAME]))
    except (FileNotFoundError, bb.FormatError):
        if state.tables:
            raise
        table = bb.create(path, ram=ram([NAME]), **TABLES[NAME])
    table.close(commit=False)
