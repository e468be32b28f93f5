"""Check and repair a run: its manifests, its dense files, and every table that it names."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bunkbed import _native
from bunkbed.core.types import Json
from bunkbed.errors import BunkbedError
from bunkbed.files.durable import sync_directory
from bunkbed.files.run_files import RunFiles, RunManifest
from bunkbed.maintenance.problems import Problem, Report, how_to_go_back, numbered, problems_of_table


class _RunCheck:
    """One check of a run: every manifest, dense file and table, each read once."""

    def __init__(self, files: RunFiles, ram_bytes: int, progress: Callable[[int, int], None] | None) -> None:
        self.files = files
        self.place = files.directory
        self.ram_bytes, self.progress = ram_bytes, progress
        self.epochs = files.epochs()
        self.manifests: dict[int, RunManifest] = {}
        self.damaged: set[int] = set()
        self.problems: list[tuple[str, Path, str, str, list[int]]] = []
        self.tables: dict[str, Json] = {}
        for epoch in self.epochs:
            self._load(epoch)
        self._read_files()

    def _load(self, epoch: int) -> None:
        path = self.files.manifest_path(epoch)
        try:
            self.manifests[epoch] = self.files.load(epoch)
        except FileNotFoundError:
            self.epochs = [number for number in self.epochs if number != epoch]  # collected by the run's writer
        except (BunkbedError, OSError) as error:
            self._report("manifest", path, str(error), f"commit {epoch} of the run cannot be opened", [epoch])

    def _report(self, kind: str, file: Path, found: str, meaning: str, epochs: list[int]) -> None:
        self.damaged.update(epochs)
        self.problems.append((kind, file, found, meaning, epochs))

    def _read_files(self) -> None:
        users: dict[tuple[str, int], list[int]] = {}
        for epoch, manifest in self.manifests.items():
            for name, entry in manifest.files.items():
                users.setdefault((name, entry[0]), []).append(epoch)
        for (name, number), epochs in users.items():
            try:
                self.files.read_file(name, self.manifests[epochs[-1]])
            except (BunkbedError, OSError) as error:
                epochs = [epoch for epoch in epochs if self.files.manifest_path(epoch).exists()]
                if epochs:
                    meaning = f"file {name!r} is lost to {numbered('commit', epochs)} of the run"
                    self._report("file", self.files.file_path(number), str(error), meaning, epochs)

    def named(self) -> dict[str, dict[int, list[int]]]:
        """Return table -> commit of the table -> the run's commits that name it."""
        found: dict[str, dict[int, list[int]]] = {}
        for epoch, manifest in self.manifests.items():
            for table, number in manifest.tables.items():
                found.setdefault(table, {}).setdefault(number, []).append(epoch)
        return found

    def check_tables(self, work: Callable[[str, Path], Json]) -> None:
        """Call `work` for every table that a commit names; report the run's commits that its damage affects."""
        for name, numbers in sorted(self.named().items()):
            path = self.files.table_path(name)
            try:
                checked = work(name, self.files.own_table(name))
            except (FileNotFoundError, NotADirectoryError, BunkbedError) as error:
                checked = {"epochs": [], "sound": [], "problems": [], "leftovers": [], "bytes": 0}
                every = sorted({epoch for users in numbers.values() for epoch in users})
                self._report("table", path, str(error), f"table {name!r} is lost to the run", every)
                numbers = {}
            self.tables[name] = checked
            for number, users in numbers.items():
                users = [epoch for epoch in users if self.files.manifest_path(epoch).exists()]
                if number in checked["sound"] or not users:
                    continue
                state = "is damaged" if number in checked["epochs"] else "is missing"
                found = f"commit {number} of table {name!r} {state}"
                meaning = f"{numbered('commit', users)} of the run cannot be opened in full"
                self._report("table", path, f"{found}, which the run names", meaning, users)

    def places(self) -> dict[str, str]:
        """Return the paths of the tables that are outside the run's directory."""
        return self.manifests[max(self.manifests)].places

    def shard(self, name: str) -> tuple[int, int]:
        """Return (shard, number of shards) of a table; (0, 1) for a table that is not a shard."""
        shard = self.manifests[max(self.manifests)].shard(name) if self.manifests else None
        return (0, 1) if shard is None else (shard.index, shard.count)

    def sound(self) -> list[int]:
        return [epoch for epoch in self.epochs if epoch not in self.damaged]

    def report(self) -> Report:
        report = Report([self._problem(*problem) for problem in self.problems])
        for name, checked in self.tables.items():
            of_table = problems_of_table(self.files.table_path(name), checked, self.place)
            report.extend(of_table)
            report.leftovers += of_table.leftovers
            report.bytes_read += of_table.bytes_read
        wanted = {entry[0] for manifest in self.manifests.values() for entry in manifest.files.values()}
        if len(self.manifests) == len(self.epochs):
            report.leftovers += [(path, path.stat().st_size) for path in leftover_files(self.files, wanted)]
        report.epochs, report.sound_epochs = list(self.epochs), self.sound()
        return report

    def _problem(self, kind: str, file: Path, found: str, meaning: str, epochs: list[int]) -> Problem:
        if self.epochs[-1] in epochs:
            remedy = how_to_go_back(self.place, self.epochs, self.sound())
        else:
            meaning += f"; the newest, {self.epochs[-1]}, is not touched by it"
            remedy = (
                "if it is a snapshot, drop it with bunkbed snapshots --drop; otherwise it goes with: "
                f"bunkbed check {shlex.quote(str(self.place))} --repair"
            )
        return Problem(kind, file, found, meaning, remedy, epochs=epochs)


def leftover_files(files: RunFiles, wanted: set[int]) -> list[Path]:
    """Return the files of a run that no manifest names; `wanted` are the numbers that manifests name."""
    found = [path for path in files.directory.glob("new-run-[0-9]*") if path.is_file()]
    return found + [path for number, path in files.dense_files() if number not in wanted]


def check_run(
    files: RunFiles,
    repair: bool,
    epoch: int | None,
    ram_bytes: int,
    progress: Callable[[int, int], None] | None,
) -> Report:
    """Check a run; see `bunkbed.check`."""
    if not repair:
        look = _RunCheck(files, ram_bytes, progress)
        look.check_tables(lambda name, path: _native.check_table(str(path), ram_bytes, progress, *look.shard(name)))
        return look.report()
    lock = files.lock()
    try:
        return _repair(files, epoch, ram_bytes, progress)
    finally:
        files.unlock(lock)


def _repair(files: RunFiles, epoch: int | None, ram_bytes: int, progress: Any) -> Report:
    """Repair the tables, then the run, whose manifest may only name durable commits. Requires: the run's lock held."""
    look = _RunCheck(files, ram_bytes, progress)
    look.check_tables(lambda name, path: _native.check_table(str(path), ram_bytes, progress, *look.shard(name)))
    done: list[str] = []
    if epoch is not None:
        _require_sound(look, epoch)
    newest = look.epochs[-1]
    if epoch is None and newest in look.damaged:
        return look.report()  # the caller must choose a commit with `epoch` first, so nothing is removed
    keep = [number for number in look.epochs if number not in look.damaged]
    keep += [number for number in look.damaged if number in look.manifests and look.manifests[number].keep]
    pinned = {
        name: {look.manifests[number].tables[name] for number in keep if name in look.manifests[number].tables}
        for name in look.named()
    }
    target = look.manifests[epoch] if epoch is not None and epoch != newest else None
    tables: dict[str, int] = {}
    repaired: dict[str, Json] = {}
    for name in look.tables:
        path = files.table_path(name)
        if not look.tables[name]["epochs"]:
            continue  # reported as missing, or as a table that is not of this run
        back_to = target.tables.get(name) if target is not None else None
        checked, lines = _native.repair_table(
            str(path), ram_bytes, back_to, pinned[name], True, progress, *look.shard(name)
        )
        done += [f"table {name!r}: {line}" for line in lines]
        repaired[name] = checked
        if back_to is not None:
            tables[name] = checked["epochs"][-1]
    if target is not None:
        numbers = [number for number, _ in files.dense_files()]
        next_file = max([*numbers, *(manifest.next_file - 1 for manifest in look.manifests.values())], default=0) + 1
        files.publish(
            replace(
                target,
                epoch=newest + 1,
                keep="",
                tables=tables,
                next_file=next_file,
                copied=False,
                places=look.places(),
            )
        )
        done.append(f"the run went back to commit {epoch}, which is now also commit {newest + 1}, the newest")
    gone = [number for number in look.epochs if number not in keep]
    for number in gone:
        files.manifest_path(number).unlink(missing_ok=True)
        done.append(f"removed commit {number} of the run, which is damaged")
    if gone:
        sync_directory(files.directory)
    after = _RunCheck(files, ram_bytes, progress)
    wanted = {entry[0] for manifest in after.manifests.values() for entry in manifest.files.values()}
    for path in leftover_files(files, wanted):
        done.append(f"removed {path.name}, which no commit names ({path.stat().st_size} bytes)")
        path.unlink()
    # The reports of the repaired tables are still valid, because this process has the writer's lock.
    after.check_tables(
        lambda name, path: repaired.get(name) or _native.check_table(str(path), ram_bytes, progress, *after.shard(name))
    )
    report = after.report()
    report.repaired = done
    return report


def _require_sound(look: _RunCheck, epoch: int) -> None:
    sound = look.sound()
    if epoch not in sound:
        state = "is damaged itself" if epoch in look.epochs else "is not there"
        listed = f"sound ones: {', '.join(map(str, sound))}" if sound else "no commit is sound"
        raise ValueError(f"run {look.place}: commit {epoch} {state}; {listed}; nothing was changed")
    if look.epochs[-1] in sound and epoch != look.epochs[-1]:
        raise ValueError(
            f"run {look.place}: commit {look.epochs[-1]}, the newest, is sound, so there is nothing to fall back from; "
            f"to go back all the same, open the run and call rewind({epoch}); nothing was changed"
        )
