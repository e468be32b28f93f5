"""Change the number of shards of a table, or of the tables of a run: the rows are rewritten into a new folder, which
then replaces the old one.

Protocol. A process that is killed at any point leaves the old or the new table at the path, whole:

1. The writer's lock of the table is taken, so its last commit stays the last.
2. The new table is made in ``.NAME.reshard`` next to the path, after the removal of a folder that an earlier process
   left there. Every stored row is streamed into it with every slot, then it commits.
3. Every record of the new table is read from its files and its checksum verified. The manifest of the new table gets
   the epoch, the snapshot name and the uuid of the old table's last commit. The folder is synced.
4. One system call exchanges the two folders, and their parent folder is synced. From then on the new table exists.
5. The old table, now at ``.NAME.reshard``, is removed.

A run goes the same way, with all its tables and dense files. Each kept commit is written too, from the first to the
last, and its manifest gets its number back. Other files in the folder of a run, such as those of ``bunkbed train``, are
in the new folder under a second name (a hard link) before step 4.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from bunkbed import _native
from bunkbed.core.arguments import Floats, Ids, as_whole
from bunkbed.core.budget import parse_bytes
from bunkbed.core.typed import typed
from bunkbed.errors import CorruptionError, FormatError, TableLockedError
from bunkbed.files.durable import link, link_folder, replacing, require_real, sync_directory
from bunkbed.files.run_files import RunFiles, RunManifest
from bunkbed.files.sharding import MAX_SHARDS, Split
from bunkbed.maintenance.check import check
from bunkbed.maintenance.rewriting import forget_counts, move_counts, set_time
from bunkbed.run.run import Run
from bunkbed.sharded.base.rows import ShardedRows
from bunkbed.sharded.opening import open
from bunkbed.sharded.table import ShardedTable
from bunkbed.table.definition import Definition
from bunkbed.table.opening import is_table, open_writer, path_lock, resolve
from bunkbed.table.table import Table

#: Called with (rows done, rows in all), a few times a second.
Progress = Callable[[int, int], None]

_CHUNK_BYTES = 8 << 20
#: Most shards that are written at the same time.
_MOST_THREADS = 8
_OF_A_TABLE = re.compile(r"lock|new-.*|(manifest|segment|directory)-\d{16}")
_OF_A_SHARDED_TABLE = re.compile(r"lock|files|tables|run-\d{16}|new-run-.*")


@dataclass(frozen=True)
class Resharded:
    """The result of `reshard`.

    Attributes:
        epoch: number of the table's last commit, the same as before.
        shards: number of shards now.
        shards_before: number of shards before; 0 for a table that was not sharded.
        rows: number of rows rewritten; 0 if the table had this number of shards already.

    Of a run, `shards_before` is the fewest of a table that had another number, and `rows` counts those of every kept
    commit.
    """

    epoch: int
    shards: int
    shards_before: int
    rows: int


@typed
def reshard(
    path: str | os.PathLike[str],
    *,
    shards: int,
    drop_snapshots: bool = False,
    ram: float | str = "1GiB",
    progress: Progress | None = None,
) -> Resharded:
    """Change the number of shards of a `ShardedTable` or of all tables of a `Run`, or make tables sharded ones.

    Streams every stored row with every optimizer slot into new shards, verifies every record that it wrote, and then
    exchanges the folders in one step. Rows, slots, step, seed, init, dtype, num_rows, the optimizer's values and uuid
    stay the same, and so do epoch, meta and snapshot name of the last commit: a checkpoint that refers to it can be
    loaded. Earlier commits and their snapshots are not kept, but those of a run are. A killed process leaves the old
    table or the new one at `path`, whole. It may also leave a folder ``.NAME.reshard`` next to `path`; the next call
    removes that.

    Needs space for a second copy of the rows on the same filesystem. Readers must open the table again afterwards.

    Args:
        path: folder of a run, of a sharded table, or of a table that belongs to no run. No process may have it open for
            writing.
        shards: new number of shards, 1 to 1024. The present number changes nothing.
        drop_snapshots: True: drop the snapshots of earlier commits. False: raise an error if there are any, or for a
            run, if they cannot be kept because rows were removed after one or the run went back.
        ram: budget: half for reading, half for writing. The arrays of two chunks take up to 100 MiB more.
        progress: called with (rows done, rows in all), a few times a second.

    Raises:
        FileNotFoundError, FormatError: `path` has no table that can be divided. ValueError: `shards` out of range,
        snapshots of earlier commits (lists their names), shards or files outside the table's own folder.
        TableLockedError: the table is open for writing, here or in another process. MemoryError: `ram` is too small;
        says how much is needed. CorruptionError: a record fails its checksum. OSError: the disk is full or failing,
        or the filesystem cannot exchange two folders. After an error the table is as it was.

    >>> import bunkbed as bb, numpy as np, tempfile
    >>> path = tempfile.mkdtemp() + "/user"
    >>> with bb.create(path, dim=4, num_rows=100, ram="8MiB") as table:
    ...     table.update(np.arange(10), np.ones((10, 4), np.float32))
    >>> bb.reshard(path, shards=4)
    Resharded(epoch=1, shards=4, shards_before=0, rows=10)
    >>> bb.reshard(path, shards=3).shards_before
    4
    """
    as_whole(shards, what="shards", low=1, high=MAX_SHARDS)
    ram_bytes = parse_bytes(ram)
    place = resolve(path).resolve()
    if not place.exists():
        raise FileNotFoundError(f"no table at {place}")
    files = RunFiles(place, "table")
    with path_lock(place):
        _require_known(files)
        if open_writer(place) is not None:
            raise TableLockedError(f"table {place} is open for writing in this process; close it first")
        lock = files.lock()
        try:
            part = place.with_name(f".{place.name}.reshard")
            newest = files.load_newest()
            is_run = bool(newest.epoch) and newest.sharding is None
            before, keep = (_fewest(newest, shards), "") if is_run else _require_movable(files, shards, drop_snapshots)
            if before == shards:
                require_real(part)
                shutil.rmtree(part, ignore_errors=True)
                return Resharded(newest.epoch, shards, before, 0)
            with replacing(place, part):
                if is_run:
                    done = _rewrite_run(files, part, shards, before, drop_snapshots, ram_bytes, progress)
                else:
                    done = _rewrite(files, part, shards, before, keep, ram_bytes, progress)
            return done
        finally:
            files.unlock(lock)


def _require_known(files: RunFiles) -> None:
    """Raise unless the folder has a run, a sharded table or a table that belongs to no run."""
    place = files.directory
    if files.epochs():
        return
    if not is_table(place):
        found = sorted(entry.name for entry in place.glob("shard-*-of-*"))
        raise FormatError(
            f"{place} holds no table{f' but {found[0]}, of a table that several workers trained' if found else ''}; "
            "give the folder of a table or of a sharded table"
        )
    elif any(commit["belongs_to_run"] for commit in _native.commits(str(place))):
        raise FormatError(f"{place} is a table of a run, which commits it; give the folder of the run")


def _fewest(run: RunManifest, shards: int) -> int:
    """Return the fewest shards of a run's tables that have not `shards`, 0 if not sharded; `shards` if all have."""
    counts = [len(run.sharded[name].shards) if name in run.sharded else 0 for name in run.table_names()]
    return min((count for count in counts if count != shards), default=shards)


def _require_movable(files: RunFiles, shards: int, drop_snapshots: bool) -> tuple[int, str]:
    """Return (number of shards, 0 if not sharded; snapshot name of the last commit). Requires: the lock held."""
    place, before, pattern = files.directory, 0, _OF_A_TABLE
    if files.epochs():
        newest = files.load_newest()
        assert newest.sharding is not None
        before, pattern, epoch, kept = len(newest.sharding.shards), _OF_A_SHARDED_TABLE, newest.epoch, files.snapshots()
        if newest.places:
            name, where = next(iter(newest.places.items()))
            raise ValueError(
                f"table {place}: {name} is outside the table's folder, at {where}; bb.copy makes a copy with every "
                "shard in its own folder, which can be resharded"
            )
    else:
        kept = dict(_native.snapshots(str(place)))
        with open(place, mode="r") as table:
            epoch = table.epoch
    cursor = next(iter(sorted(place.glob("cursor-*"))), None)
    if cursor is not None:
        name = cursor.name.removeprefix("cursor-")
        raise ValueError(
            f"table {place} has the cursor {name!r} of its change feed, which other shards cannot keep; let its "
            f"consumer read the changes, then drop it: bunkbed changes {place} --drop-cursor {name}"
        )
    strangers = sorted(entry.name for entry in place.iterdir() if not pattern.fullmatch(entry.name))
    if strangers:
        raise ValueError(f"table {place}: {strangers[0]!r} is no file of the table and would be lost; move it away")
    earlier = [name for name, at in kept.items() if at != epoch]
    if earlier and not drop_snapshots and before != shards:
        raise ValueError(
            f"table {place} has snapshots of earlier commits, which new shards cannot keep: "
            f"{', '.join(map(repr, earlier))}; copy them with bb.copy(snapshot=), then give drop_snapshots=True "
            "(--drop-snapshots)"
        )
    return before, next((name for name, at in kept.items() if at == epoch), "")


def _rewrite(
    files: RunFiles, part: Path, shards: int, before: int, keep: str, ram_bytes: int, progress: Progress | None
) -> Resharded:
    """Make the whole new table in `part`: steps 2 and 3."""
    with open(files.directory, mode="r", ram=ram_bytes // 2) as table:
        arguments = Definition.of(table).arguments()
        del arguments["durability"]
        with ShardedTable.create(part, shards=shards, ram=ram_bytes - ram_bytes // 2, **arguments) as made:
            rows = _copy_rows(table, made, progress)
            made.commit(meta=table.meta)
        problems = check(part, ram=ram_bytes)
        if problems:
            raise CorruptionError(
                f"table {files.directory}: a new shard is damaged, the old table stays: {problems[0]}"
            )
        there = RunFiles(part)
        newest = there.load_newest()
        assert newest.sharding is not None
        for epoch in there.epochs():
            there.manifest_path(epoch).unlink()
        sharding = replace(newest.sharding, uuid=table.uuid)
        there.publish(replace(newest, epoch=table.epoch, keep=keep, sharding=sharding))
        sync_directory(part.parent)
        return Resharded(table.epoch, shards, before, rows)


def _rewrite_run(
    files: RunFiles,
    part: Path,
    shards: int,
    before: int,
    drop_snapshots: bool,
    ram_bytes: int,
    progress: Progress | None,
) -> Resharded:
    """Make the whole new run in `part`: its kept commits, its last one, and the files of others in its folder."""
    place, last = files.directory, files.load_newest().epoch
    every = {epoch: files.load(epoch) for epoch in files.epochs()}  # a damaged one may be a kept one
    kept = [] if drop_snapshots else [epoch for epoch in files.snapshots().values() if epoch != last]
    old = [every[epoch] for epoch in (*kept, last)]
    rows, uuids = 0, {}
    with Run(part, ram=ram_bytes - ram_bytes // 2) as made:
        for commit in old:
            snapshot = None if commit.epoch == last else commit.keep
            with Run(place, ram=ram_bytes // 2, mode="r", snapshot=snapshot) as run:
                tables = [run.table(name) for name in run.table_names]
                total, done = sum(map(len, tables)), 0
                for name, table in zip(run.table_names, tables, strict=True):
                    arguments = Definition.of(table).arguments()
                    del arguments["durability"]
                    whole = made.table(name, create={**arguments, "shards": shards})
                    ahead = done

                    def one_of_all(number: int, _: int, ahead: int = ahead, total: int = total) -> None:
                        if progress is not None:
                            progress(ahead + number, total)

                    try:
                        done += _copy_rows(table, whole, one_of_all)
                    except _LaterHasLess as error:
                        raise ValueError(
                            f"run {place}: {error} in commit {commit.epoch}, so its earlier snapshots "
                            f"({', '.join(map(repr, files.snapshots()))}) cannot be kept; copy them with "
                            "bb.copy(snapshot=), then give drop_snapshots=True (--drop-snapshots)"
                        ) from None
                    uuids[name] = table.uuid
                rows += done
                made.commit({name: run.read(name) for name in run.files}, run.meta, commit.keep or None)
    problems = check(part, ram=ram_bytes)
    if problems:
        raise CorruptionError(f"run {place}: a new shard is damaged, the old run stays: {problems[0]}")
    _number_as(old, RunFiles(part), uuids)
    link_others(place, part)
    return Resharded(last, shards, before, rows)


def _number_as(old: list[RunManifest], there: RunFiles, uuids: dict[str, str]) -> None:
    """Give each commit of the new run the number of the old one that it is, with its names."""
    new = [there.load(epoch) for epoch in there.epochs()]
    for manifest in new:
        there.manifest_path(manifest.epoch).unlink()
    for before, manifest in zip(old, new, strict=True):
        names = before.table_names()
        sharded = {name: replace(manifest.sharded[name], uuid=uuids[name]) for name in names}
        there.publish(
            replace(
                manifest,
                epoch=before.epoch,
                keep=before.keep,
                files={name: manifest.files[name] for name in before.files},
                tables={shard: manifest.tables[shard] for name in names for shard in sharded[name].names(name)},
                sharded=sharded,
            )
        )
    sync_directory(there.directory.parent)


def remove_others(part: Path, kept: Collection[str]) -> None:
    """Remove from a run's folder what is not the run's, nor `kept`."""
    for entry in part.iterdir():
        if _OF_A_SHARDED_TABLE.fullmatch(entry.name) or entry.name in kept:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def link_others(place: Path, part: Path, left_out: Collection[str] = ()) -> None:
    """Give the files in a run's folder that are not the run's, nor `left_out`, a second name in `part`, durably."""
    for entry in place.iterdir():
        if _OF_A_SHARDED_TABLE.fullmatch(entry.name) or entry.name in left_out:
            continue
        there = part / entry.name
        if entry.is_dir() and not entry.is_symlink():
            link_folder(entry, there)
        else:
            link(entry, there)
    sync_directory(part)


class _LaterHasLess(Exception):
    """A commit has fewer rows or steps than one before it."""


def _copy_rows(table: Table, made: Table, progress: Progress | None) -> int:
    """Copy every stored row with every slot, and the step; return the number of rows.

    Raises:
        _LaterHasLess: `made` has other rows, or more steps, from an earlier commit.
    """
    assert isinstance(made.core, ShardedRows)
    if made.step > table.step:
        raise _LaterHasLess(f"table '{table.name}' has {table.step} steps, fewer than before,")
    if made.clock > table.clock:
        raise _LaterHasLess(f"table '{table.name}' has the clock {table.clock}, an earlier one than before,")
    forget_counts(made)  # of an earlier commit
    slots = ("weight", *table.slots)
    fields = [made.field(slot) for slot in slots] + made.usage_fields
    shards = made.core.cores
    total, done = len(table), 0

    def write(shard: _native.Table, ids: Ids, values: list[Floats]) -> None:
        for (field, _), one in zip(fields, values, strict=True):
            shard.set(ids, field, one)

    chunk = max(256, min(65_536, _CHUNK_BYTES // (4 * table.dim)))
    with ThreadPoolExecutor(min(len(shards), _MOST_THREADS), "bunkbed-reshard") as threads:
        writes: list[Future[None]] = []  # of the chunk before: it is written while the next one is read
        for ids, values in table.scan_fields(fields, chunk):
            split = Split.by_shard(ids, len(shards))
            mine, sorted_values = split.take(ids), [split.take(one) for one in values]
            for each in writes:
                each.result()
            parts = [split.part(index) for index in range(len(shards))]
            writes = [
                threads.submit(write, shard, mine[part], [one[part] for one in sorted_values])
                for shard, part in zip(shards, parts, strict=True)
            ]
            done += len(ids)
            if progress is not None:
                progress(done, total)
        for each in writes:
            each.result()
    if len(made) > total:
        raise _LaterHasLess(f"table '{table.name}' has lost rows that it had before")
    if done != total or len(made) != total:
        raise CorruptionError(f"table {table.path}: {done} rows were read and {len(made)} written of {total}")
    set_time(made, table)
    move_counts(made, table)
    return done
