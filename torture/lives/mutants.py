"""Test of the oracle: it must catch protocols with one step missing or in the wrong place.

The power-loss backend simulates a missing sync by ignoring it. Other bugs are compiled into the core and switched on by
name, or patched into a run's Python code. Disks are checked until the bug breaks a promise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

from bunkbed import _native
from bunkbed.files.run_files import RunFiles, RunManifest
from bunkbed.table import opening
from torture.lives import scenario, table_scenario
from torture.lives.powerloss import CHANCE, SURE, Ignored, Life, Losses
from torture.parts import Clock, Progress, Result, Size, folder, in_processes


@contextmanager
def core_bug(name: str) -> Iterator[None]:
    _native.set_fault(name)
    try:
        yield
    finally:
        _native.set_fault(None)


@contextmanager
def tables_open_at_their_newest() -> Iterator[None]:
    original = opening.open_table
    with mock.patch.object(opening, "open_table", lambda *a, **k: original(*a, **{**k, "epoch": None})):
        yield


@contextmanager
def old_files_go_first() -> Iterator[None]:
    publish = RunFiles.publish

    def too_early(self: RunFiles, manifest: RunManifest) -> None:
        wanted = {entry[0] for entry in manifest.files.values()}
        for path in self.files.glob("file-*"):
            if int(path.name.removeprefix("file-")) not in wanted:
                _native.remove_file(str(path))
        publish(self, manifest)

    with mock.patch.object(RunFiles, "publish", too_early):
        yield


@contextmanager
def manifest_before_its_files() -> Iterator[None]:
    """Write the files of a commit after its manifest."""
    write = RunFiles.write_file
    publish = RunFiles.publish
    waiting: list[tuple[RunFiles, int, bytes]] = []

    def later(self: RunFiles, number: int, data: bytes) -> tuple[int, int, str]:
        entry = write(self, number, data)
        _native.remove_file(str(self.file_path(number)))
        waiting.append((self, number, data))
        return entry

    def first(self: RunFiles, manifest: RunManifest) -> None:
        publish(self, manifest)
        for files, number, data in waiting:
            write(files, number, data)
        waiting.clear()
        _native.sync_directory(str(self.files))

    with mock.patch.object(RunFiles, "write_file", later), mock.patch.object(RunFiles, "publish", first):
        yield


@dataclass(frozen=True)
class Mutant:
    """A bug: ignored syncs, or a patch while the run lives or while it is recovered."""

    name: str
    ignored: Ignored = field(default_factory=list)
    living: Callable[[], AbstractContextManager[Any]] = nullcontext
    recovering: Callable[[], AbstractContextManager[Any]] = nullcontext
    story: ModuleType = table_scenario


MUTANTS = [
    Mutant("no fdatasync of segments", [("", "segment-")]),
    Mutant("no fdatasync of a manifest", [("", "new-manifest-")]),
    Mutant("no directory fsync after link", [("link", "manifest-")]),
    Mutant("no directory fsync for a new segment", [("create", "segment-")]),
    Mutant("no directory fsync after removing manifests", [("remove", "manifest-")]),
    Mutant("no directory fsync for a table's folder", [("mkdir", "it")]),
    Mutant("collection before commit", living=lambda: core_bug("collect_before_commit")),
    Mutant("length recorded too long", living=lambda: core_bug("length_too_long")),
    Mutant("compaction without the still-current check", living=lambda: core_bug("move_dead_records")),
    Mutant("compaction chunk outranks a newer record", living=lambda: core_bug("move_outranks")),
    Mutant("a record that a commit has yet to write is changed first", living=lambda: core_bug("update_before_copy")),
    Mutant(
        "a record evicted during a commit counts into the old epoch", living=lambda: core_bug("evict_into_old_epoch")
    ),
    Mutant("index snapshot newer than its log", living=lambda: core_bug("index_snapshot_too_new")),
    Mutant("no fdatasync of an index snapshot", [("", "new-directory-")]),
    Mutant("a record that eviction writes is lost", living=lambda: core_bug("lost_write_back")),
    Mutant("a delete is not written to the log", living=lambda: core_bug("lost_tombstone")),
    Mutant("a step does not note that it named a row", living=lambda: core_bug("stale_usage")),
    Mutant("a row that a step refuses is refused by all", living=lambda: core_bug("admission_without_step")),
    Mutant("whether a row is admitted depends on its place", living=lambda: core_bug("admission_by_place")),
    Mutant("a count is not written to the log", living=lambda: core_bug("lost_count")),
    Mutant("a deleted id goes on from its count", living=lambda: core_bug("count_survives_delete")),
    Mutant("a sweep takes no count", living=lambda: core_bug("old_counts_stay")),
    Mutant("compaction drops counts", living=lambda: core_bug("counts_not_moved")),
    Mutant("compaction moves dead counts", living=lambda: core_bug("counts_outrank")),
    Mutant("a row expires one step early", living=lambda: core_bug("expires_early")),
    Mutant("run: no fdatasync of its manifest", [("", "new-run-")], story=scenario),
    Mutant("run: no directory fsync after link", [("link", "run-")], story=scenario),
    Mutant("run: no fdatasync of a dense file", [("", "file-")], story=scenario),
    Mutant("run: no directory fsync for a dense file", [("create", "file-")], story=scenario),
    Mutant("run: no directory fsync for its own folder", [("mkdir", "it")], story=scenario),
    Mutant("run: old dense files go before the commit", living=old_files_go_first, story=scenario),
    Mutant("run: the manifest comes before its dense files", living=manifest_before_its_files, story=scenario),
    Mutant("run: tables open at their newest commit", recovering=tables_open_at_their_newest, story=scenario),
]


#: Lives in which a bug may show. Compaction works in the background, so a bug that needs it between two operations
#: shows in most lives, not in all.
LIVES = 3


def hunt(mutant: Mutant, most: int, seed: int, seconds: float) -> tuple[bool, int, str]:
    """Return (caught, number of checked disks, violation)."""
    clock = Clock(seconds)
    with folder() as root:
        live = root / "live"
        live.mkdir()
        try:
            with mutant.living():
                life = Life(live, mutant.story)
        except Exception as error:
            return True, 0, f"while it ran: {type(error).__name__}: {error}"
        losses = Losses(life, root / "disks", mutant.ignored)
        chance = random.Random(seed)
        with mutant.recovering():
            end = life.disk.now()
            # Half of the moments are those at which a commit appears: some bugs show at few others.
            links = [moment for moment in range(end + 1) if "link " in life.disk.describe(moment)]
            ways = [(end, "all", "kept")]
            for number in range(most - 1):
                moment = chance.choice(links) if number % 2 else chance.randrange(end + 1)
                ways.append((moment, *chance.choice(SURE + CHANCE)))
            for index, (moment, names, sectors) in enumerate(ways):
                if not losses.lose(moment, names, sectors, index):
                    return True, len(losses.seen), losses.result.failures[0]
                if clock.is_over:
                    break
    return False, len(losses.seen), "not caught"


def run(size: Size) -> list[Result]:
    most = size.of(20_000, least=2000)

    def work(index: int, send: Callable[[Any], None]) -> Any:
        each = size.seconds * size.processes / len(MUTANTS)
        mine = MUTANTS[index :: size.processes]
        progress = Progress("mutants", len(mine), index)
        found = []
        for number, mutant in enumerate(mine):
            progress.show(number)
            caught, looked, how = False, 0, ""
            for life in range(LIVES):
                caught, more, how = hunt(mutant, most, size.seed + life, max(each, 20.0))
                looked += more
                if caught:
                    break
            found.append((mutant.name, caught, looked, how))
        return found

    result = Result("seeded bugs caught")
    found = [one for part in in_processes(work, size.processes, 2 * size.seconds + 120) for one in part]
    order = [mutant.name for mutant in MUTANTS]
    notes = []
    for name, caught, looked, how in sorted(found, key=lambda one: order.index(one[0])):
        result.tried += 1
        result.passed += caught
        notes.append(f"{name}: {f'after {looked} disks' if caught else 'NOT CAUGHT'} ({how})")
        if not caught:
            result.fail(f"{name}: not caught in {looked} disks")
    result.note = "\n".join(notes)
    return [result]
