"""Power loss at every operation of a run's life, with every variant of `csrc/vfs/powerloss.h`.

One traced life has thousands of moments, and each moment many possible disks. Disks with equal bytes are checked once.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from bunkbed import _native
from torture.lives import scenario, table_scenario
from torture.lives.scenario import Commit, State, Violation
from torture.parts import Clock, Progress, Result, Size, folder, in_processes

#: (names, sectors) of the disks of one moment; random variants are repeated with other seeds.
SURE = [("all", "kept"), ("none", "dropped"), ("none", "kept"), ("all", "dropped"), ("all", "trashed")]
CHANCE = [
    ("subset", "mixed"),
    ("prefix", "mixed"),
    ("subset", "kept"),
    ("prefix", "kept"),
    ("subset", "dropped"),
    ("all", "mixed"),
    ("prefix", "dropped"),
    ("subset", "trashed"),
]
THOROUGH_EVERY = 6
TWICE_EVERY = 150

Ignored = list[tuple[str, str]]
#: A run of three tables, and a table by itself.
STORIES: list[ModuleType] = [scenario, table_scenario]


class Life:
    """A traced run: the history of its disk, its commits and the state of each commit."""

    def __init__(self, root: Path, story: ModuleType = scenario) -> None:
        self.story = story
        self.states: list[State] = story.expected(story.ACTIONS)
        self.disk = _native.PowerlossVfs(str(root))
        self.commits: list[Commit] = []
        _native.use_vfs(self.disk)
        try:
            story.drive(story.ACTIONS, root / "it", self.disk.now, self._note)
        finally:
            _native.use_vfs(None)

    def _note(self, commit: Commit) -> None:
        if commit.end is None:
            self.commits.append(commit)

    def allowed(self, moment: int) -> set[int]:
        """Return the commits that a run may be at after power loss: the last acknowledged, and the one in flight."""
        done = [commit.number for commit in self.commits if commit.end is not None and commit.end <= moment]
        flying = [c.number for c in self.commits if c.begin < moment and (c.end is None or moment < c.end)]
        return {max(done, default=0), *flying}

    def kinds(self, seed: int) -> Iterator[tuple[int, str, str, int]]:
        """Yield (moment, names, sectors, seed) endlessly: first the fixed variants, then random ones."""
        moments = list(range(self.disk.now() + 1))
        order = random.Random(seed)
        for names, sectors in SURE:
            yield from ((moment, names, sectors, seed) for moment in moments)
        while True:
            for names, sectors in CHANCE:
                seed += 1
                order.shuffle(moments)
                yield from ((moment, names, sectors, seed) for moment in moments)


class Losses:
    """Maker and checker of disks; each disk is checked once."""

    def __init__(self, life: Life, work: Path, ignored: Ignored | None = None) -> None:
        self.life = life
        self.work = work / "disk"
        self.ignored = ignored or []
        self.seen: set[int] = set()
        self.states = 0
        self.twice = 0
        self.result = Result("states after a loss of power")

    def lose(self, moment: int, names: str, sectors: str, seed: int) -> bool:
        """Check one disk; return False if a promise did not hold."""
        crash = self.life.disk.crash(moment, names, sectors, seed, self.ignored)
        self.result.tried += 1
        if crash.digest() in self.seen:
            self.result.passed += 1
            return True
        self.seen.add(crash.digest())
        thorough = len(self.seen) % THOROUGH_EVERY == 0
        try:
            crash.write(str(self.work))
            number = self.life.story.check_recovered(
                self.work / "it", self.life.states, self.life.allowed(moment), thorough=thorough
            )
            if len(self.seen) % TWICE_EVERY == 0:
                self._lose_twice(crash, number, seed)
            self.result.passed += 1
            return True
        except Violation as violation:
            where = (
                f"moment {moment} ({self.life.disk.describe(moment)}), names {names}, sectors {sectors}, seed {seed}"
            )
            self.result.fail(f"{where}: {violation}")
            return False
        finally:
            shutil.rmtree(self.work, ignore_errors=True)

    def _lose_twice(self, crash: Any, number: int, seed: int) -> None:
        """Lose power again during the opening of a run: its commit must not change."""
        shutil.rmtree(self.work)
        crash.write(str(self.work))
        disk = _native.PowerlossVfs(str(self.work))
        _native.use_vfs(disk)
        try:
            self.life.story.open_all(self.work / "it", self.life.states[number])
        finally:
            _native.use_vfs(None)
        chance = random.Random(seed)
        for _ in range(8):
            shutil.rmtree(self.work)
            names, sectors = chance.choice(SURE + CHANCE)
            disk.crash(chance.randrange(disk.now() + 1), names, sectors, seed).write(str(self.work))
            self.life.story.check_recovered(self.work / "it", self.life.states, {number}, thorough=False)
            self.twice += 1


def run(size: Size) -> list[Result]:
    """Check disks of each story, in several processes."""
    wanted = size.of(100_000, least=200) // (len(STORIES) * size.processes)

    def work(index: int, send: Callable[[Any], None]) -> Any:
        return [_lose(story, index, wanted, size) for story in STORIES]

    result = Result("states after a loss of power")
    distinct = twice = 0
    moments = [0] * len(STORIES)
    for stories in in_processes(work, size.processes, 2 * size.seconds + 120):
        for number, (part, seen, again, ticks) in enumerate(stories):
            result.add(part)
            distinct += seen
            twice += again
            moments[number] = ticks
    result.note = (
        f"{distinct:,} distinct; a run's life has {moments[0]} moments, a table's {moments[1]}; "
        f"{twice:,} more where power goes again while it is opened"
    )
    return [result]


def _lose(story: ModuleType, index: int, wanted: int, size: Size) -> tuple[Result, int, int, int]:
    clock = Clock(size.seconds / len(STORIES))
    with folder() as root:
        live = root / "live"
        live.mkdir()
        life = Life(live, story)
        losses = Losses(life, root / "disks")
        progress = Progress(f"powerloss, {story.__name__}", wanted, index)
        for number, (moment, names, sectors, seed) in enumerate(life.kinds(1000 * index + size.seed)):
            if losses.result.tried >= wanted or clock.is_over:
                break
            if (names, sectors) in SURE and number % size.processes != index:
                continue  # fixed variants are the same in all processes: another one checks it
            losses.lose(moment, names, sectors, seed)
            progress.show(losses.result.tried)
        return losses.result, len(losses.seen), losses.twice, life.disk.now()
