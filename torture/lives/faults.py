"""One operation fails, for every operation of a life. A call that raises has changed nothing and succeeds if repeated,
or says that the table must be reopened, which then has a commit's rows. Short and interrupted calls raise no error.
"""

from __future__ import annotations

import errno
import random
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import bunkbed as bb
from bunkbed import _native
from torture.lives import scenario, table_scenario
from torture.lives.scenario import (
    COMPACTION_SLACK,
    RUN_TABLES,
    SLOW_S,
    TABLES,
    State,
    Violation,
    content,
    delete_rows,
    ram,
    set_rows,
    sweep_rows,
    train,
)
from torture.lives.table_scenario import NAME
from torture.parts import Clock, Progress, Result, Size, folder, in_processes

#: name -> (action of the backend, errno)
FAULTS = {
    "EIO": ("error", errno.EIO),
    "ENOSPC": ("error", errno.ENOSPC),
    "EINTR": ("interrupt", 0),
    "short": ("short", 0),
}
SILENT = ("EINTR", "short")
#: Errors of a table or run that must be reopened.
REFUSALS = (bb.ReadOnlyError, bb.BunkbedError)
LONGEST_S = 30.0
#: Interrupted and short calls are harmless, so one life has such a fault at every STRIDE-th operation. STRIDE lives,
#: each starting one operation later, have a fault at every operation once.
STRIDE = 61
#: A story, the operation that fails, the fault.
Case = tuple[ModuleType, int, str]


class Stumbler:
    """Carries out a story, repeats failed calls, and compares every row after each failure."""

    def __init__(self, story: ModuleType, path: Path, states: list[State]) -> None:
        self.story = story
        self.path = path
        self.states = states
        self.is_run = story is scenario
        self.names: list[str] = ["user", "item"] if self.is_run else ["user"]
        self.run: Any = None  # the run, or the table
        self.pending: Any = None  # a commit that was started and not waited for
        self.number = 0  # number of the last commit that was acknowledged or found
        self.now: dict[str, bytes] = {}
        self.failures = 0
        # Place in the story after commit n.
        self.after = {0: 0}
        # Steps that were in memory when commit n was made and are not in it: a drop does not commit steps.
        self.unsaved: dict[int, list[int]] = {0: []}
        steps: list[int] = []
        for at, action in enumerate(story.ACTIONS):
            if action in "uvits":
                steps.append(at)
            if action in "ncdklrexA" and not (self.is_run and action == "n"):
                if action not in "de" or self.is_run:
                    steps = []
                if action != "x":
                    self.unsaved[len(self.after)] = list(steps)
                    self.after[len(self.after)] = at + 1

    @property
    def tables(self) -> dict[str, Any]:
        if self.run is None:
            return {}
        return dict(self.run.tables) if self.is_run else {NAME: self.run}

    def live(self) -> None:
        actions = self.story.ACTIONS
        at = 0
        if self.is_run:
            self._try(self._open, 0, None)
        while at < len(actions):
            at = self._step(at, actions[at])
        self._compare("at the end")
        self._close()

    def _step(self, at: int, action: str) -> int:
        """Carry out one action, repeated as often as needed; return the next place in the story."""
        if action == "W":
            return self._wait(at)
        if action in "uvts":
            change = {"t": delete_rows, "s": sweep_rows}.get(action, train)
            for name in ["user"] if action == "v" else list(self.tables):
                went_back = self._try(lambda name=name: change({name: self.tables[name]}, at), at, name)
                if went_back is not None:
                    return went_back
            return at + 1
        if action == "i":
            for name, table in self.tables.items():
                for part in (lambda name=name: set_rows({name: self.tables[name]}, at), table.core.write_dirty):
                    went_back = self._try(part, at, name)
                    if went_back is not None:
                        return went_back
            return at + 1
        if action in "gp":
            table_scenario.set_admission(self.run, action)
            return at + 1
        if action == "m":
            for table in self.tables.values():
                went_back = self._try(table.compact, at, None)
                if went_back is not None:
                    return went_back
            return at + 1
        if action == "o":
            went_back = self._try(lambda: self.run.core.collect(1), at, None)
            return at + 1 if went_back is None else went_back
        if action == "x":
            self._close()
            went_back = self._try(self._open, at, None)
            self._remember()
            return at + 1 if went_back is None else went_back
        if action == "n" and self.is_run:
            went_back = self._try(self._make_late, at, None)
            return at + 1 if went_back is None else went_back
        went_back = self._try(lambda: self._commit(action), at, None)
        if went_back is not None:
            return went_back
        if action != "A":  # a started commit counts once it is durable
            self.number += 1
            self._remember()
        return at + 1

    def _wait(self, at: int) -> int:
        """Wait for the commit under way; return the next place in the story."""
        if self.pending is None:
            return at + 1  # reopened meanwhile, at this commit or before it
        pending, self.pending = self.pending, None
        _native.disarm_failpoints()
        try:
            pending.wait()
        except (OSError, *REFUSALS) as error:
            self.failures += 1
            self._is_as_before(self.now)  # raises if a row has changed
            # A commit now would contain the later steps, unlike the story's commit.
            return self._reopen(error)
        self.number += 1
        return at + 1

    def _commit(self, action: str) -> None:
        keep = {"k": "a", "l": "b"}.get(action)
        if action == "n":
            self.run = bb.create(self.path, ram=ram([NAME]), **TABLES[NAME])
        elif action == "r":
            self.run.rewind("a")
        elif action in "de" and not self.is_run:
            self.run.drop({"d": "a", "e": "b"}[action])
        elif self.is_run:
            files = {"dense.pt": scenario.file_of(self.number + 1)} if action in "cklA" else None
            if action == "A":
                self._begin(files=files)
            else:
                self.run.commit(files=files, keep=keep)
        elif action == "A":
            self._begin()
        else:
            self.run.commit(keep=keep)

    def _begin(self, **arguments: Any) -> None:
        _native.arm_failpoint("commit.frozen", 0, "delay", SLOW_S)
        self.pending = self.run.begin_commit(**arguments)

    def _make_late(self) -> None:
        self.run.table("late", create=TABLES["late"])
        if "late" not in self.names:
            self.names.append("late")

    def _open(self) -> None:
        if not self.is_run:
            self.run = bb.open(self.path, ram=ram([NAME]))
            return
        if self.run is None or self.run.closed:
            self.run = bb.Run(self.path, ram=ram(RUN_TABLES))
        for name in self.names:
            self.run.table(name, create=TABLES[name])

    def _close(self) -> None:
        _native.disarm_failpoints()
        self.pending = None
        if self.run is not None:
            self.run.close(commit=False)
            self.run = None

    def _remember(self) -> None:
        self.now = {name: content(table) for name, table in self.tables.items()}

    def _try(self, action: Callable[[], Any], at: int, changes: str | None) -> int | None:
        """Repeat until success and return None; after a reopening, return the place in the story of its commit."""
        for attempt in range(4):
            before = self.now
            try:
                action()
            except (OSError, *REFUSALS, ValueError, FileExistsError) as error:
                self.failures += 1
                if attempt > 0 and self._is_done(at, error):
                    self._remember()
                    return None
                if attempt == 3:
                    raise Violation(f"fails again and again: {type(error).__name__}: {error}") from error
                if not self._is_as_before(before):
                    return self._reopen(error)
            else:
                if changes is not None:
                    self.now = {**before, changes: content(self.tables[changes])}
                else:
                    self._remember()
                return None
        return None

    def _is_done(self, at: int, error: Exception) -> bool:
        """Return whether the error of a repetition shows that the first try was done and failed later."""
        if self.is_run:
            return False
        if self.story.ACTIONS[at] in "de":
            return isinstance(error, ValueError)
        if isinstance(error, FileExistsError):
            self.run = bb.open(self.path, ram=ram([NAME]))
            return True
        return False

    def _is_as_before(self, before: dict[str, bytes]) -> bool:
        """Return True if no table refuses and every bit is as before; False if a reopening is needed."""
        for name, table in self.tables.items():
            try:
                found = content(table)
            except (OSError, *REFUSALS):
                return False
            if name in before and found != before[name]:
                # A rewind may be done and fail afterwards; a reopening decides.
                if any(found == state.tables.get(name) for state in self.states):
                    return False
                raise Violation(f"table {name!r} changed though the call failed")
        return self._can_write()

    def _can_write(self) -> bool:
        try:
            if self.is_run and self.run is not None:
                self.run._require_open(write=True)
            for table in self.tables.values():
                table.core.collect()
        except OSError:
            return True
        except REFUSALS:
            return False
        return True

    def _reopen(self, error: Exception) -> int:
        self._close()
        allowed = {self.number, self.number + 1}
        for _ in range(3):
            try:
                self._open_again(allowed)
                break
            except OSError:
                continue
        else:
            raise Violation(f"cannot be opened after {error}") from error
        return self.after[self.number]

    def _open_again(self, allowed: set[int]) -> None:
        if self.is_run:
            self.run = bb.Run(self.path, ram=ram(RUN_TABLES))
            number = self.run.epoch
            if number not in allowed:
                raise Violation(f"opened at commit {number}, not at one of {sorted(allowed)}")
            self.number = number
            self.names = sorted(self.states[number].tables) or ["user", "item"]
            for name in self.names:
                self.run.table(name, create=TABLES[name])
        else:
            self.run = bb.open(self.path, ram=ram([NAME]))
            kept = sorted(self.run.snapshots())
            found = content(self.run)
            numbers = [
                n
                for n in sorted(allowed & set(range(len(self.states))))
                if self.states[n].tables.get(NAME) == found and sorted(self.states[n].snapshots) == kept
            ]
            if not numbers:
                raise Violation(f"opened at none of the commits {sorted(allowed)}")
            self.number = numbers[-1]
        self._remember()
        for name, wanted in self.states[self.number].tables.items():
            if self.now[name] != wanted:
                raise Violation(f"table {name!r} does not hold commit {self.number} when opened again")
        for step in self.unsaved[self.number]:
            {"i": set_rows, "t": delete_rows, "s": sweep_rows}.get(self.story.ACTIONS[step], train)(self.tables, step)
        self._remember()

    def _compare(self, when: str) -> None:
        for name, wanted in self.states[-1].tables.items():
            if content(self.tables[name]) != wanted:
                raise Violation(f"table {name!r} holds other bits {when}")


def stumble(story: ModuleType, states: list[State], at: int, name: str, struck: Result) -> int:
    """Run one life in which operation `at` fails (of a silent fault also each `STRIDE`-th after it).

    Returns how many calls raised. `struck` counts failed operations as tried and, if the life succeeds, as passed.

    Raises:
        Violation: a promise did not hold.
    """
    fault, number = FAULTS[name]
    faulty = _native.FaultVfs()
    faulty.count_reads(name in SILENT)
    faulty.set_fault(at, fault, number)
    if name in SILENT:
        faulty.repeat_every(STRIDE)
    _native.set_compaction_slack(COMPACTION_SLACK)
    _native.set_index_snapshots(1, in_line=True)
    with folder() as root:
        stumbler = Stumbler(story, root / "it", states)
        _native.use_vfs(faulty)
        try:
            stumbler.live()
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error
        finally:
            _native.use_vfs(None)
            stumbler._close()
            struck.tried += faulty.struck()
        if name in SILENT and stumbler.failures:
            raise Violation("a call raised")
        story.check_recovered(root / "it", states, {len(states) - 1}, thorough=at % 8 == 0)
    struck.passed += faulty.struck()
    return stumbler.failures


def operations(story: ModuleType, states: list[State], *, count_reads: bool) -> int:
    """Return the number of operations of a life without faults, including those of comparisons."""
    faulty = _native.FaultVfs()
    faulty.count_reads(count_reads)
    faulty.set_fault(0)
    _native.set_compaction_slack(COMPACTION_SLACK)
    _native.set_index_snapshots(1, in_line=True)
    with folder() as root:
        stumbler = Stumbler(story, root / "it", states)
        _native.use_vfs(faulty)
        try:
            stumbler.live()
        finally:
            _native.use_vfs(None)
            stumbler._close()
    return int(faulty.count())


def _sample(cases: list[Case], most: int, seed: int) -> list[Case]:
    """Return about `most` cases: a share of each fault, at least one case each."""
    chance = random.Random(seed)
    sample: list[Case] = []
    for name in FAULTS:
        of_it = [case for case in cases if case[2] == name]
        sample += chance.sample(of_it, min(len(of_it), max(1, most * len(of_it) // len(cases))))
    return sample


def run(size: Size) -> list[Result]:
    """Run every operation with each fault; each life must end within seconds."""

    def work(index: int, send: Callable[[Any], None]) -> Any:
        clock = Clock(size.seconds)
        results = {name: Result(f"operation fails: {name}") for name in FAULTS}
        states = {story: story.expected(story.ACTIONS) for story in (scenario, table_scenario)}
        cases: list[Case] = []
        for story in states:
            for name in FAULTS:
                there_are = operations(story, states[story], count_reads=name in SILENT)
                results[name].wanted += there_are
                most = STRIDE if name in SILENT else there_are
                cases += [(story, at, name) for at in range(1, min(most, there_are) + 1)]
        mine = [case for case in cases if case[1] % size.processes == index]
        random.Random(size.seed).shuffle(mine)  # a run that ends early has tried every fault
        progress = Progress("faults, lives", len(mine), index)
        if size.factor < 1:
            mine = _sample(mine, size.of(4000, least=8) // size.processes, size.seed)
        raised = 0
        lives_of = dict.fromkeys(FAULTS, 0)
        for number, (story, at, name) in enumerate(mine):
            if clock.is_over:
                break
            progress.show(number)
            again = f" and every {STRIDE}th after it" if name in SILENT else ""
            what = f"operation {at}{again} of {story.__name__}: {name}"
            send(what)
            signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
            try:
                raised += stumble(story, states[story], at, name, results[name])
                lives_of[name] += 1
            except Violation as violation:
                results[name].fail(f"{what}: {violation}")
        signal.setitimer(signal.ITIMER_REAL, 0)
        return results, raised, lives_of, {name: sum(case[2] == name for case in cases) for name in FAULTS}

    total = {name: Result(f"operation fails: {name}") for name in FAULTS}
    raised = 0
    lives = dict.fromkeys(FAULTS, 0)
    parts = in_processes(work, size.processes, size.seconds + 120)
    for results, times, lives_of, _ in parts:
        raised += times
        for name, result in results.items():
            total[name].add(result)
            total[name].wanted = result.wanted
            lives[name] += lives_of[name]
    there_are = parts[0][3]
    for name, result in total.items():
        bytes_alone = " (reads and writes alone come up short)" if name == "short" else ""
        result.note = f"of {result.wanted:,}{bytes_alone}, in {lives[name]:,} of {there_are[name]:,} lives"
        if lives[name] == there_are[name]:
            # The number of operations varies with the timing of a background commit: all existing ones were tried.
            result.wanted = result.tried
    total["EIO"].note += f"; {raised:,} calls raised in all; 0 wrong rows, 0 lost commits, 0 hangs where all passed"
    return list(total.values())
