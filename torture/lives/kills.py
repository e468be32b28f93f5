"""Processes killed by SIGKILL: at every operation of a life, at every failpoint, and at random under load."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import bunkbed as bb
from bunkbed import _native
from torture.lives import scenario, table_scenario
from torture.lives.scenario import Commit, State, Violation
from torture.parts import Child, Clock, Progress, Result, Size, folder, in_processes

STORIES: list[ModuleType] = [scenario, table_scenario]


def allowed_after(sent: list[Any]) -> set[int]:
    """Return the commits that a run may be at, from the messages of its process."""
    started = [number for kind, number in sent if kind == "begin"]
    ended = [number for kind, number in sent if kind == "end"]
    return {max(ended, default=0), *(number for number in started if number > max(ended, default=0))}


def teller(send: Callable[[Any], None]) -> Callable[[Commit], None]:
    return lambda commit: send(("begin" if commit.end is None else "end", commit.number))


def _survives(
    story: ModuleType,
    states: list[State],
    arm: Callable[[], None],
    slow: bool,
    result: Result,
    what: str,
    number: int,
) -> None:
    """Carry out the story in a child that `arm` causes to die, and check the files that it left."""
    with folder() as root:

        def live(send: Callable[[Any], None]) -> None:
            arm()
            story.drive(story.ACTIONS, root / "it", lambda: 0, teller(send), slow)

        child = Child(live)
        status = child.wait()
        if status != -9:
            if status == 0:
                result.wanted -= 1  # a background commit may or may not get there, depending on timing
            if status != 0:
                result.tried += 1
                result.fail(f"{what}: the process ended with status {status}: {child.sent[-1:]}")
            return
        result.tried += 1
        try:
            story.check_recovered(root / "it", states, allowed_after(child.sent), thorough=number % 4 == 0)
            result.passed += 1
        except Violation as violation:
            result.fail(f"{what}: {violation}")


def operations(story: ModuleType, count_reads: bool = False) -> int:
    """Return the number of operations of a whole life."""
    faulty = _native.FaultVfs()
    faulty.count_reads(count_reads)
    faulty.set_fault(0)
    with folder() as root:
        _native.use_vfs(faulty)
        try:
            story.drive(story.ACTIONS, root / "it", lambda: 0)
        finally:
            _native.use_vfs(None)
    return int(faulty.count())


def failpoints(story: ModuleType) -> list[tuple[str, int]]:
    """Return (failpoint, times reached) of a whole life."""
    _native.arm_failpoint("", 0, "count")
    try:
        with folder() as root:
            story.drive(story.ACTIONS, root / "it", lambda: 0, slow=False)
        return [(name, count) for name, count in _native.failpoint_counts() if count]
    finally:
        _native.disarm_failpoints()


def at_every_operation(size: Size) -> list[Result]:
    """Kill at each operation, in a write also in the middle, and at each failpoint."""

    def work(index: int, send: Callable[[Any], None]) -> Any:
        clock = Clock(size.seconds)
        at_operations = Result("kill -9 at every operation of commits and compactions")
        at_points = Result("kill -9 at every failpoint")
        cases: list[tuple[ModuleType, list[State], Result, str, Any, Any]] = []
        for story in STORIES:
            states = story.expected(story.ACTIONS)
            for at in range(1, operations(story) + 1):
                for way in ("die", "die_within"):
                    cases.append((story, states, at_operations, f"operation {at} of {story.__name__}, {way}", at, way))
            for name, count in failpoints(story):
                for nth in range(1, count + 1):
                    cases.append((story, states, at_points, f"{name}, time {nth} of {story.__name__}", name, nth))
        mine = cases[index :: size.processes]
        random.Random(size.seed).shuffle(mine)  # where the time ends the part, it has cases of each story and kind
        if size.factor < 1:
            mine = mine[: size.of(2400, least=8) // size.processes]
        progress = Progress("kills", len(mine), index)
        for number, (story, states, result, what, first, second) in enumerate(mine):
            if clock.is_over:
                break
            progress.show(number)

            def arm(first: Any = first, second: Any = second) -> None:
                if isinstance(first, int):
                    faulty = _native.FaultVfs()
                    faulty.count_reads(False)
                    faulty.set_fault(first, second)
                    _native.use_vfs(faulty)
                else:
                    _native.arm_failpoint(first, second, "die")

            _survives(story, states, arm, isinstance(first, int), result, what, number)
        return [at_operations, at_points], [
            sum(case[2] is kind for case in cases) for kind in (at_operations, at_points)
        ]

    parts = in_processes(work, size.processes, size.seconds + 240)
    total: list[Result] = []
    for place, there_are in enumerate(parts[0][1]):
        mine = [results[place] for results, _ in parts]
        unreached = -sum(result.wanted for result in mine)
        total.append(Result(mine[0].name, wanted=there_are - unreached, note=f"of {there_are:,}"))
        if unreached:
            total[-1].note += f"; {unreached} were not reached this time"
        for result in mine:
            total[-1].add(result)
    return total


# ---- Under load


STEPS_PER_COMMIT = 3
LOADED = ["user", "item"]


class Load:
    """Endless run: commit n contains `STEPS_PER_COMMIT` more steps than commit n - 1, also after a restart."""

    def __init__(self) -> None:
        self.number = 0
        self.tables = {name: scenario.ReferenceTable(**scenario.TABLES[name]) for name in LOADED}
        self.contents = {0: {name: scenario.content(table) for name, table in self.tables.items()}}

    def at(self, number: int) -> dict[str, bytes]:
        while self.number < number:
            self.number += 1
            for k in range(STEPS_PER_COMMIT):
                scenario.train(self.tables, self.number * STEPS_PER_COMMIT + k)
            self.contents[self.number] = {name: scenario.content(table) for name, table in self.tables.items()}
        self.contents = {n: content for n, content in self.contents.items() if n >= number - 8}
        return self.contents[number]


def _work_hard(path: Path, send: Callable[[Any], None]) -> None:
    """Train and commit until killed, while another thread looks up rows."""
    _native.set_compaction_slack(scenario.COMPACTION_SLACK)
    _native.set_index_snapshots(1, in_line=True)
    run = bb.Run(path, ram=scenario.ram(LOADED))
    tables: dict[str, Any] = {name: run.table(name, create=scenario.TABLES[name]) for name in LOADED}

    def look() -> None:
        rng = np.random.default_rng(1)
        while True:
            for name, table in tables.items():
                table.lookup(rng.integers(0, scenario.TABLES[name]["num_rows"], 20))

    threading.Thread(target=look, daemon=True).start()

    def step(number: int) -> None:
        for k in range(STEPS_PER_COMMIT):
            scenario.train(tables, number * STEPS_PER_COMMIT + k)

    number = run.epoch + 1
    step(number)
    while True:
        files = {"dense.pt": scenario.file_of(number)}
        keep = "every tenth" if number % 10 == 0 else None
        send(("begin", number))
        if number % 2 == 0:
            run.commit(files=files, keep=keep)
            step(number + 1)
        else:
            pending = run.begin_commit(files=files, keep=keep)
            step(number + 1)  # during the commit
            pending.wait()
        send(("end", number))
        number += 1


def at_random(size: Size) -> list[Result]:
    """Kill one run repeatedly while it trains and commits."""
    wanted = size.of(600, least=6)

    def work(index: int, send: Callable[[Any], None]) -> Any:
        clock = Clock(size.seconds)
        result = Result("kill -9 at random under load")
        chance = random.Random(size.seed * 100 + index)
        load = Load()
        with folder() as root:
            number = 0
            progress = Progress("load", wanted // size.processes, index)
            while result.tried * size.processes < wanted and not clock.is_over:
                child = Child(lambda send: _work_hard(root / "run", send))
                for _ in child.receive():
                    break  # it has opened and trained
                time.sleep(chance.random() * 0.08)
                child.kill()
                child.wait()
                sent = [item for item in child.sent if isinstance(item, tuple)]
                result.tried += 1
                progress.show(result.tried)
                allowed = allowed_after([("end", number), *sent])
                try:
                    number = _check_load(root / "run", load, allowed)
                    result.passed += 1
                except Exception as error:
                    result.fail(f"kill {result.tried}: {type(error).__name__}: {error}")
                    break
        result.note = f"{number} commits, one run all along"
        return result

    parts = in_processes(work, size.processes, size.seconds + 120)
    total = Result("kill -9 at random under load", note=parts[0].note)
    for part in parts:
        total.add(part)
    return [total]


def _check_load(path: Path, load: Load, allowed: set[int]) -> int:
    if not path.exists() and 0 in allowed:
        return 0
    with bb.Run(path, ram=scenario.ram(LOADED)) as run:
        number = run.epoch
        if number not in allowed:
            raise Violation(f"the run is at commit {number}, not at one of {sorted(allowed)}")
        wanted = load.at(number)
        for name in LOADED if number else []:
            if scenario.content(run.table(name)) != wanted[name]:
                raise Violation(f"table {name!r} does not hold commit {number}")
        if number and run.read("dense.pt") != scenario.file_of(number):
            raise Violation(f"the dense file is not that of commit {number}")
        return number


def run(size: Size) -> list[Result]:
    return [*at_every_operation(size), *at_random(size)]
