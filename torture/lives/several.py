"""Several operations fail in one life, then the same process continues without faults.

As `faults`, with two or three failures: a repeated call fails again, or the reopening after a failure fails. Reads and
opens fail too. Afterwards the rows are those of a commit, and no lock, descriptor or thread of a failed call is left.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from bunkbed import _native
from torture.lives import scenario, table_scenario
from torture.lives.faults import FAULTS, LONGEST_S, Stumbler
from torture.lives.scenario import COMPACTION_SLACK, State, Violation
from torture.parts import Clock, Progress, Result, Size, folder, in_processes

#: Most operations between two failures: enough for a retry, and for all operations of a commit or an opening.
FURTHEST = 60
NAMES = ("EIO", "ENOSPC")


class Unlucky(Stumbler):
    """Stumbler whose reads fail too, but only within actions; comparisons of rows read without faults."""

    def __init__(self, story: ModuleType, path: Path, states: list[State], faulty: Any) -> None:
        super().__init__(story, path, states)
        self.faulty = faulty
        faulty.count_reads(False)

    def _try(self, action: Callable[[], Any], at: int, changes: str | None) -> int | None:
        return super()._try(lambda: self._with_reads(action), at, changes)

    def _open_again(self, allowed: set[int]) -> None:
        try:
            self._with_reads(lambda: super(Unlucky, self)._open_again(allowed))
        except OSError:
            self._close()
            raise

    def _is_done(self, at: int, error: Exception) -> bool:
        try:
            return super()._is_done(at, error)
        except OSError:  # `_is_done` may open a table, which can fail
            return False

    def _with_reads(self, action: Callable[[], Any]) -> None:
        self.faulty.count_reads(True)
        try:
            action()
        finally:
            self.faulty.count_reads(False)


def held() -> tuple[int, int]:
    """Return the numbers of open file descriptors and of Python threads."""
    files = 0
    for name in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread has just closed it
            files += str(name.readlink()).startswith("/")
    return files, threading.active_count()


def require_no_more(before: tuple[int, int], when: str) -> None:
    """Check for leaks, with retries: read threads close their files a moment after the table."""
    for _ in range(100):
        if all(now <= then for now, then in zip(held(), before, strict=True)):
            return
        time.sleep(0.05)
    raise Violation(f"descriptors and threads were {before}, are {held()} {when}")


def live(story: ModuleType, states: list[State], at: int, every: int, times: int, name: str) -> int:
    """Run one life in which `times` operations `at`, `at + every`, ... fail; return how many failed.

    Raises:
        Violation: a promise did not hold.
    """
    fault, number = FAULTS[name]
    faulty = _native.FaultVfs()
    faulty.set_fault(at, fault, number)
    faulty.repeat_every(every, times)
    _native.set_compaction_slack(COMPACTION_SLACK)
    _native.set_index_snapshots(1, in_line=True)
    before = held()
    with folder() as root:
        unlucky = Unlucky(story, root / "it", states, faulty)
        _native.use_vfs(faulty)
        try:
            unlucky.live()
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error
        finally:
            _native.use_vfs(None)
            unlucky._close()
        require_no_more(before, "when all is closed")
        story.check_recovered(root / "it", states, {len(states) - 1}, thorough=True)
        require_no_more(before, "after going on")
    return int(faulty.struck())


def operations(story: ModuleType, states: list[State]) -> int:
    """Return the number of operations of a life without faults."""
    faulty = _native.FaultVfs()
    faulty.set_fault(0)
    _native.set_compaction_slack(COMPACTION_SLACK)
    _native.set_index_snapshots(1, in_line=True)
    with folder() as root:
        unlucky = Unlucky(story, root / "it", states, faulty)
        _native.use_vfs(faulty)
        try:
            unlucky.live()
        finally:
            _native.use_vfs(None)
            unlucky._close()
    return int(faulty.count())


def run(size: Size) -> list[Result]:
    """Run lives with random first failures and distances."""

    def work(index: int, send: Callable[[Any], None]) -> Any:
        clock, chance = Clock(size.seconds), random.Random(f"{size.seed} {index}")
        result = Result("several operations fail, then the same process")
        states = {story: story.expected(story.ACTIONS) for story in (scenario, table_scenario)}
        there_are = {story: operations(story, states[story]) for story in states}
        lives, struck = size.of(6000, least=8) // size.processes, 0
        progress = Progress("several, lives", lives, index)
        for number in range(lives):
            if clock.is_over:
                break
            progress.show(number)
            story = chance.choice([scenario, table_scenario])
            at, times = chance.randint(1, there_are[story]), chance.randint(2, 3)
            every, name = chance.choice([1, 1, 2, chance.randint(1, FURTHEST)]), chance.choice(NAMES)
            what = f"{times} operations, {at} and each {every}th after it, of {story.__name__}: {name}"
            send(what)
            signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
            result.tried += 1
            try:
                struck += live(story, states[story], at, every, times, name)
                result.passed += 1
            except Violation as violation:
                result.fail(f"{what}: {violation}")
        signal.setitimer(signal.ITIMER_REAL, 0)
        return result, struck

    total, struck = Result("several operations fail, then the same process"), 0
    for result, times in in_processes(work, size.processes, size.seconds + 120):
        total.add(result)
        struck += times
    total.note = f"{struck:,} operations failed"
    return [total]
