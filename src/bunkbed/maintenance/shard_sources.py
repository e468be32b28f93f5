"""The tables that `bunkbed.reshard` takes: which they are, and why some are refused."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from bunkbed import _native
from bunkbed.core.budget import Budget
from bunkbed.core.types import Json
from bunkbed.errors import FormatError, TableLockedError
from bunkbed.files.durable import require_real
from bunkbed.files.run_files import RunFiles
from bunkbed.files.workers import folder_of_worker, folders_of_workers
from bunkbed.sharded.opening import open
from bunkbed.table.definition import Definition
from bunkbed.table.opening import is_table, open_writer, path_lock
from bunkbed.table.table import Table

OF_A_TABLE = re.compile(r"lock|new-.*|(manifest|segment|directory)-\d{16}")
OF_A_SHARDED_TABLE = re.compile(r"lock|files|tables|run-\d{16}|new-run-.*")


def shards_of_workers(place: Path) -> list[Path]:
    """Return the folders of the shards of a table that several Keras workers trained, in order; none for other folders.

    Raises:
        FormatError: they are replicas, or of two numbers of workers, or one is missing or a symbolic link; the path is
            that of one worker.
    """
    if place.name in folders_of_workers(place.parent) and place.name.startswith("shard-"):
        raise FormatError(f"{place} is the table of one of several workers; give the folder above it, {place.parent}")
    found = folders_of_workers(place)
    if not found or is_table(place) or RunFiles(place).epochs():
        return []
    of_workers = f"{place} holds {found[0]}, of a table that several workers trained"
    if found[0].startswith("replica-"):
        raise FormatError(
            f"{of_workers}, each with all rows; for another number of workers copy a replica to the folder of each: "
            f"bunkbed copy {place / found[0]} PATH/replica-0000-of-NNNN"
        )
    count = int(found[0][-4:])
    wanted = [folder_of_worker("sharded", index, count) for index in range(count)]
    strange = [name for name in found if name not in wanted]
    if strange:
        raise FormatError(f"{of_workers}, and {strange[0]}, of another table; move the folders of one away")
    for name in wanted:
        if name not in found:
            raise FormatError(f"{of_workers}, and no {name}; bring the folders of all workers together first")
        if not is_table(place / name):
            raise FormatError(f"{of_workers}, and no table of a worker in {name}")
        require_real(place / name)
    return [place / name for name in wanted]


@contextlib.contextmanager
def locked(folders: list[Path]) -> Iterator[None]:
    """Hold the writer's locks of tables.

    Raises:
        TableLockedError: one is open for writing, in this or another process.
    """
    with contextlib.ExitStack() as held:
        for folder in folders:
            held.enter_context(path_lock(folder))
            if open_writer(folder) is not None:
                raise TableLockedError(f"table {folder} is open for writing in this process; close it first")
            files = RunFiles(folder, "table")
            held.callback(files.unlock, files.lock())
        yield


@dataclass(frozen=True)
class LastCommit:
    """What of a table's last commit stays: the table's uuid, its number, its snapshot name or none, and its meta."""

    uuid: str
    epoch: int
    keep: str
    meta: Json


@contextlib.contextmanager
def last_commits(
    folders: list[Path], ram_bytes: int, drop_snapshots: bool
) -> Iterator[tuple[list[Table], list[LastCommit]]]:
    """Open a table, or the tables of several workers, and yield them with their last commits.

    Raises:
        ValueError: see `require_movable`; the tables of the workers are at different steps, or not alike.
    """
    with contextlib.ExitStack() as opened:
        budget = Budget(ram_bytes)
        tables = [opened.enter_context(open(folder, mode="r", ram=budget)) for folder in folders]
        _require_alike(tables)
        yield tables, [require_movable(table, drop_snapshots) for table in tables]


def _require_alike(tables: list[Table]) -> None:
    first = tables[0]
    for table in tables[1:]:
        for what, ours, theirs in (("step", first.step, table.step), ("clock", first.clock, table.clock)):
            if ours != theirs:
                raise ValueError(
                    f"table {first.path} is at {what} {ours}, and {table.path} at {what} {theirs}; load the last saved "
                    "model on all workers, which takes their tables back to it, and end them"
                )
        one, other = Definition.of(first).arguments(), Definition.of(table).arguments()
        for name, value in one.items():
            if other[name] != value:
                raise ValueError(
                    f"table {first.path} has {name}={value!r}, and {table.path} {name}={other[name]!r}; workers of "
                    "one table have the same"
                )


def require_no_bound(table: Table) -> None:
    """Raise ValueError if the table has a bound of its rows, which each worker would apply to its own rows."""
    if table.retention.max_rows is not None:
        raise ValueError(
            f"table {table.path} has max_rows={table.retention.max_rows}, which bounds the rows of each worker's table "
            "or of the whole of another: assign table.retention without it, and with the new bound afterwards"
        )


def require_ram(folders: list[Path], shards: int, ram_bytes: int) -> None:
    """Raise MemoryError if a budget is too small to read these tables and write so many, half of it each."""
    places = [folder for place in folders for folder in (sorted((place / "tables").glob("shard-*")) or [place])]
    cores = [place for place in places if is_table(place)]
    if not cores:
        return  # the shards of a table are elsewhere
    facts = [_native.read_spec(str(core), "", None) for core in cores]
    spec, rows = facts[0][0], sum(stored for _, stored, _ in facts)
    read = sum(spec.minimum_ram(stored, True) for _, stored, _ in facts)
    # A directory may take another form while it grows, which takes up to a fifth more.
    needed = 5 * max(read, shards * spec.minimum_ram(rows // shards + rows // (8 * shards) + 1, True)) // 2
    if ram_bytes < needed:
        raise MemoryError(
            f"ram={ram_bytes} is too small to read {len(cores)} tables and to write {shards}; it needs at least "
            f"ram={needed}"
        )


def require_known(files: RunFiles) -> None:
    """Raise unless the folder has a run, a sharded table or a table that belongs to no run."""
    place = files.directory
    if files.epochs():
        return
    if not is_table(place):
        raise FormatError(f"{place} holds no table; give the folder of a table or of a sharded table")
    if any(commit["belongs_to_run"] for commit in _native.commits(str(place))):
        raise FormatError(f"{place} is a table of a run, which commits it; give the folder of the run")


def require_movable(table: Table, drop_snapshots: bool) -> LastCommit:
    """Return the last commit of a table that is open for reading; or a snapshot that it went back to, whose number a
    checkpoint has. Requires: the lock held.

    Raises:
        ValueError: something of the table cannot be kept; says what to do.
    """
    assert table.path is not None
    place, pattern = table.path, OF_A_TABLE
    files, epoch = RunFiles(place, "table"), table.epoch
    if files.epochs():
        newest = files.load_newest()
        pattern, kept = OF_A_SHARDED_TABLE, files.snapshots()
        if newest.places:
            name, where = next(iter(newest.places.items()))
            raise ValueError(
                f"table {place}: {name} is outside the table's folder, at {where}; bb.copy makes a copy with every "
                "shard in its own folder, which can be resharded"
            )
    else:
        kept = dict(_native.snapshots(str(place)))
    cursor = next(iter(sorted(place.glob("cursor-*"))), None)
    if cursor is not None:
        name = cursor.name.removeprefix("cursor-")
        raise ValueError(
            f"table {place} has the cursor {name!r} of its change feed, which other shards cannot keep; let its "
            f"consumer read the changes, then drop it: bunkbed changes {place} --drop-cursor {name}"
        )
    require_no_strangers(place, pattern)
    if kept and epoch not in kept.values():
        contents = _contents(files, {epoch, *kept.values()})
        epoch = max((at for at in kept.values() if contents[at] == contents[epoch]), default=epoch)
    earlier = [name for name, at in kept.items() if at != epoch]
    if earlier and not drop_snapshots:
        raise ValueError(
            f"table {place} has snapshots of earlier commits, which new shards cannot keep: "
            f"{', '.join(map(repr, earlier))}; copy them with bb.copy(snapshot=), then give drop_snapshots=True "
            "(--drop-snapshots)"
        )
    return LastCommit(table.uuid, epoch, next((name for name, at in kept.items() if at == epoch), ""), table.meta)


def _contents(files: RunFiles, epochs: Collection[int]) -> dict[int, list[object]]:
    """Return for commits of a table what decides its rows: the segments with their lengths, and the step, by shard."""
    if not files.epochs():
        rows = _rows_of_commits(files.directory)
        return {epoch: [rows[epoch]] for epoch in epochs}
    commits = {epoch: files.load(epoch).tables for epoch in epochs}
    rows_of = {name: _rows_of_commits(files.own_table(name)) for name in next(iter(commits.values()))}
    return {epoch: [rows_of[name][tables[name]] for name in rows_of] for epoch, tables in commits.items()}


def _rows_of_commits(place: Path) -> dict[int, object]:
    return {commit["epoch"]: (commit["segments"], commit["step"]) for commit in _native.commits(str(place))}


def require_no_strangers(place: Path, pattern: re.Pattern[str]) -> None:
    """Raise ValueError if a folder has a file whose name does not match."""
    strangers = sorted(entry.name for entry in place.iterdir() if not pattern.fullmatch(entry.name))
    if strangers:
        raise ValueError(f"table {place}: {strangers[0]!r} is no file of the table and would be lost; move it away")
