"""List and drop snapshots of tables and runs, from their files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from bunkbed import _native
from bunkbed.core.typed import typed
from bunkbed.core.types import Json
from bunkbed.files.run_files import RunFiles, kept_commits
from bunkbed.run.run import Run
from bunkbed.table.opening import open_writer, path_lock, resolve


@dataclass(frozen=True)
class Snapshot:
    """A commit that is kept by name.

    Attributes:
        name: the argument `keep` of the commit.
        epoch: number of the commit.
        time: when the commit's manifest was written, by the file system: the time of the commit, or of a copy that was
            made by a program that does not keep times.
        step: optimizer steps at the commit; None for a run whose tables differ.
        stored_rows: stored rows at the commit, in all tables.
        bytes: bytes of the files that the commit names.
        own_bytes: the part of `bytes` that neither the newest commit nor another snapshot names. Dropping the snapshot
            frees these bytes, at the next commit at the latest.
    """

    name: str
    epoch: int
    time: datetime
    step: int | None
    stored_rows: int
    bytes: int
    own_bytes: int

    def as_dict(self) -> Json:
        """Return the attributes, for JSON; the time in ISO 8601."""
        return {**vars(self), "time": self.time.isoformat(timespec="seconds")}


@typed
def snapshots(path: str | os.PathLike[str]) -> dict[str, int]:
    """Return the kept commits of the table or run at `path`: name -> epoch, oldest first.

    Raises:
        FileNotFoundError, FormatError: `path` has neither a table nor a run.
    """
    return kept_commits(resolve(path))


@typed
def describe_snapshots(path: str | os.PathLike[str]) -> list[Snapshot]:
    """Return the kept commits of the table or run at `path`, with their sizes, oldest first.

    Raises:
        FileNotFoundError, FormatError: `path` has neither a table nor a run.

    >>> import bunkbed as bb, numpy as np, tempfile
    >>> path = tempfile.mkdtemp() + "/user"
    >>> with bb.create(path, dim=4, num_rows=100, ram="8MiB") as table:
    ...     table.update(np.arange(10), np.ones((10, 4), np.float32))
    ...     epoch = table.commit(keep="best")
    >>> [(kept.name, kept.epoch, kept.step, kept.stored_rows) for kept in bb.describe_snapshots(path)]
    [('best', 1, 1, 10)]
    """
    return _kept(path).described()


def held_bytes(path: str | os.PathLike[str]) -> int:
    """Return the bytes that the snapshots of the table or run at `path` hold together, beyond the newest commit."""
    return _kept(path).held_bytes()


@typed
def drop_snapshot(path: str | os.PathLike[str], name: str) -> None:
    """Drop a snapshot of the table or run at `path`; its space is freed where no other commit needs it.

    Reads no rows. If this process has the table open for writing, calls its `Table.drop`.

    Raises:
        ValueError: no such snapshot; lists the snapshots. TableLockedError: another process writes the table or run.
        ReadOnlyError: a table of a run, whose snapshots are of all its tables together; give the run's path.
        FileNotFoundError, FormatError: `path` has neither a table nor a run.
    """
    place = Path(path).expanduser().absolute()
    files = RunFiles(place)
    if files.epochs():
        files.find(name)  # before anything is locked or opened
    with path_lock(place):
        present = open_writer(place)
        if present is not None:  # a plain table; for a run's path, a sharded table
            present.drop(name)
        elif files.epochs():
            with Run(place, _shards_of=None if files.load_newest().sharding is None else place.name) as run:
                run.drop(name)
        else:
            _native.drop_snapshot(str(place), name)


def _when(file: Path) -> datetime:
    return datetime.fromtimestamp(file.stat().st_mtime, UTC)


#: The files that a commit names: (folder, number) -> bytes.
_Parts = dict[tuple[str, int], int]


class _Kept(NamedTuple):
    """Snapshots by name: (epoch, manifest, step, rows); what each commit names; and the newest commit."""

    kept: dict[str, tuple[int, Path, int | None, int]]
    parts: dict[int, _Parts]
    newest: int

    def described(self) -> list[Snapshot]:
        wanted = {epoch for epoch, *_ in self.kept.values()} | {self.newest}
        found = []
        for name, (epoch, file, step, rows) in sorted(self.kept.items(), key=lambda item: item[1][0]):
            others = set().union(*(self.parts[other] for other in wanted if other != epoch and other in self.parts))
            sizes = self.parts[epoch]
            own = 0 if epoch == self.newest else sum(size for part, size in sizes.items() if part not in others)
            found.append(Snapshot(name, epoch, _when(file), step, rows, sum(sizes.values()), own))
        return found

    def held_bytes(self) -> int:
        every = {part: size for epoch, *_ in self.kept.values() for part, size in self.parts[epoch].items()}
        return sum(size for part, size in every.items() if part not in self.parts.get(self.newest, {}))


def _kept(path: str | os.PathLike[str]) -> _Kept:
    place = Path(path).expanduser().absolute()
    files = RunFiles(place)
    return _of_run(files) if files.epochs() else _of_table(place)


def _of_table(place: Path) -> _Kept:
    commits = _native.commits(str(place))
    parts = {c["epoch"]: {("", number): size for number, size in c["segments"].items()} for c in commits}
    kept = {
        c["keep"]: (c["epoch"], place / f"manifest-{c['epoch']:016d}", c["step"], c["stored_rows"])
        for c in commits
        if c["keep"]
    }
    return _Kept(kept, parts, commits[-1]["epoch"] if commits else 0)


def _of_run(files: RunFiles) -> _Kept:
    newest = files.load_newest()
    names = files.snapshots()
    tables: dict[str, dict[int, Any]] = {}
    parts: dict[int, _Parts] = {}
    kept: dict[str, tuple[int, Path, int | None, int]] = {}
    for name, epoch in [*names.items(), ("", newest.epoch)]:
        manifest = files.load(epoch)
        parts[epoch] = {("files", number): size for number, size, _ in manifest.files.values()}
        steps, rows = set(), 0
        for table, number in manifest.tables.items():
            if table not in tables:
                commits = _native.commits(str(files.table_path(table)))
                tables[table] = {c["epoch"]: c for c in commits}
            commit = tables[table].get(number)
            if commit is None:
                continue  # missing or damaged, which check() reports
            steps.add(commit["step"])
            rows += commit["stored_rows"]
            parts[epoch].update({(f"tables/{table}", segment): size for segment, size in commit["segments"].items()})
        if name:
            kept[name] = (epoch, files.manifest_path(epoch), steps.pop() if len(steps) == 1 else None, rows)
    return _Kept(kept, parts, newest.epoch)
