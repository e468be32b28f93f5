"""Change the number of shards of a table, or of the tables of a run: the rows are rewritten into a new folder, which
then replaces the old one.

Protocol. A process that is killed at any point leaves the old or the new table at the path, whole:

1. The writer's lock of the table is taken, so its last commit stays the last. A table of several Keras workers is one
   folder with the table of each worker: the lock of each is taken.
2. The new table is made in ``.NAME.reshard`` next to the path, after the removal of a folder that an earlier process
   left there. Every stored row is streamed into it with every slot, then it commits.
3. Every record of the new table is read from its files and its checksum verified. The manifest of the new table gets
   the epoch, the snapshot name and the uuid of the old table's last commit. The folder is synced. The tables of
   workers get them when they are made: worker i those of the old worker i, modulo the number of old workers, so a
   saved model that refers to the old workers' last commits loads.
4. One system call exchanges the two folders, and their parent folder is synced. From then on the new table exists.
5. The old table, now at ``.NAME.reshard``, is removed.

A run goes the same way, with all its tables and dense files. Each kept commit is written too, from the first to the
last, and its manifest gets its number back. Other files in the folder of a run, such as those of ``bunkbed train``, are
in the new folder under a second name (a hard link) before step 4.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from bunkbed import _native
from bunkbed.core.arguments import as_whole
from bunkbed.core.budget import Budget, parse_bytes
from bunkbed.core.typed import typed
from bunkbed.core.types import Json
from bunkbed.errors import CorruptionError
from bunkbed.files.durable import replacing, require_real, sync_directory
from bunkbed.files.run_files import RunFiles
from bunkbed.files.sharding import MAX_SHARDS
from bunkbed.files.workers import folder_of_worker
from bunkbed.maintenance.check import check
from bunkbed.maintenance.problems import Report, problems_of_table
from bunkbed.maintenance.shard_rows import Progress, copy_rows
from bunkbed.maintenance.shard_runs import fewest_shards, rewrite_run
from bunkbed.maintenance.shard_sources import (
    LastCommit,
    last_commits,
    locked,
    require_known,
    require_no_bound,
    require_no_strangers,
    require_ram,
    shards_of_workers,
)
from bunkbed.sharded.table import ShardedTable
from bunkbed.table.definition import Definition
from bunkbed.table.opening import create, path_lock, resolve
from bunkbed.table.table import Table


@dataclass(frozen=True)
class Resharded:
    """The result of `reshard`.

    Attributes:
        epoch: number of the table's last commit, the same as before; or of the snapshot that it went back to last.
        shards: number of shards now.
        shards_before: number of shards before; 0 for a table that was not sharded.
        rows: number of rows rewritten; 0 if the table had this number of shards already.
        workers: whether each shard is now the table of a Keras worker.

    Of a run, `shards_before` is the fewest of a table that had another number, and `rows` counts those of every kept
    commit.
    """

    epoch: int
    shards: int
    shards_before: int
    rows: int
    workers: bool = False


@typed
def reshard(
    path: str | os.PathLike[str],
    *,
    shards: int,
    workers: bool | None = None,
    drop_snapshots: bool = False,
    ram: float | str = "1GiB",
    progress: Progress | None = None,
) -> Resharded:
    """Change the number of shards of a table, of all tables of a `Run`, or of the workers that train a Keras layer.

    Streams every stored row with every optimizer slot into new shards, verifies every record that it wrote, and then
    exchanges the folders in one step. Rows, slots, step, seed, init, dtype, num_rows, the optimizer's values and uuid
    stay the same, and so do epoch, meta and snapshot name of the last commit, or of the snapshot that the table went
    back to last: a checkpoint that refers to it can be loaded. Other commits and snapshots are not kept, except in
    a run. A killed process leaves the old table or the new one at `path`, whole. It may also leave a folder
    ``.NAME.reshard`` next to `path`; the next call removes that.

    Several workers that train a `bunkbed.keras.Embedding` with ``placement="sharded"`` have a folder each below the
    path, ``shard-0000-of-0002`` and so on. Bring the folders of all hosts together, call this, and give each of the new
    workers its folder. A saved model that refers to the last commits loads.

    Needs space for a second copy of the rows on the same filesystem. Readers must open the table again afterwards.

    Args:
        path: folder of a run, of a table that belongs to no run, sharded or not, or with the folders of workers. No
            process may have it open for writing.
        shards: new number of shards, 1 to 1024. The present number changes nothing.
        workers: True: make a folder for each of `shards` Keras workers. False: make a sharded table, which one process
            or ranks of torch open. None: as it is now; of workers' folders ``shards=1`` makes a sharded table.
        drop_snapshots: True: drop the snapshots of earlier commits. False: raise an error if there are any, or for a
            run, if they cannot be kept because rows were removed after one or the run went back.
        ram: budget: half for reading, half for writing. The arrays of two chunks take up to 100 MiB more.
        progress: called with (rows done, rows in all), a few times a second.

    Raises:
        FileNotFoundError, FormatError: `path` has no table that can be divided. ValueError: `shards` out of range,
        snapshots of earlier commits (lists their names), shards or files outside the table's own folder, tables of
        workers at different steps, ``workers=True`` for a run or one worker. TableLockedError: the table is open for
        writing, here or in another process. MemoryError: `ram` is too small; says how much is needed. CorruptionError:
        a record fails its checksum, or is in a shard that is not its own. OSError: the disk is full or failing, or the
        filesystem cannot exchange two folders. After an error the table is as it was.

    >>> import bunkbed as bb, numpy as np, tempfile
    >>> path = tempfile.mkdtemp() + "/user"
    >>> with bb.create(path, dim=4, num_rows=100, ram="8MiB") as table:
    ...     table.update(np.arange(10), np.ones((10, 4), np.float32))
    >>> bb.reshard(path, shards=4)
    Resharded(epoch=1, shards=4, shards_before=0, rows=10, workers=False)
    >>> bb.reshard(path, shards=3).shards_before
    4
    """
    as_whole(shards, what="shards", low=1, high=MAX_SHARDS)
    ram_bytes = parse_bytes(ram)
    place = resolve(path).resolve()
    if not place.exists():
        raise FileNotFoundError(f"no table at {place}")
    if workers and shards == 1:
        raise ValueError("workers=True is for two workers or more; one process opens a sharded table (workers=False)")
    files, part = RunFiles(place, "table"), place.with_name(f".{place.name}.reshard")
    with path_lock(place):
        of_workers = shards_of_workers(place)
        if not of_workers:
            require_known(files)
        with locked(of_workers or [place]):
            newest = files.load_newest()
            is_run = not of_workers and bool(newest.epoch) and newest.sharding is None
            if is_run:
                if workers:
                    raise ValueError(f"{place} is a run, whose tables Keras workers do not train: leave workers= out")
                before = fewest_shards(newest, shards)
            else:
                before = len(of_workers) or (len(newest.sharding.shards) if newest.sharding is not None else 0)
            for_workers = bool(of_workers) and shards > 1 if workers is None else workers
            if before == shards and for_workers == bool(of_workers):
                require_real(part)
                shutil.rmtree(part, ignore_errors=True)
                return Resharded(_epoch(of_workers, files), shards, before, 0, for_workers)
            with replacing(place, part):
                if is_run:
                    rows = rewrite_run(files, part, shards, drop_snapshots, ram_bytes, progress)
                    return Resharded(newest.epoch, shards, before, rows)
                require_ram(of_workers or [place], shards, ram_bytes)
                if of_workers:
                    require_no_strangers(place, re.compile("|".join(folder.name for folder in of_workers)))
                with last_commits(of_workers or [place], ram_bytes // 2, drop_snapshots) as (tables, commits):
                    if of_workers or for_workers:
                        require_no_bound(tables[0])
                    write = _write_for_workers if for_workers else _write_sharded
                    rows = write(part, shards, tables, commits, ram_bytes, progress)
                sync_directory(part.parent)
                epoch = max(1, commits[0].epoch) if for_workers else commits[0].epoch
                return Resharded(epoch, shards, before, rows, for_workers)


def _epoch(of_workers: list[Path], files: RunFiles) -> int:
    if not of_workers:
        return files.load_newest().epoch
    return int(max(commit["epoch"] for commit in _native.commits(str(of_workers[0]))))


def _write_sharded(
    part: Path,
    shards: int,
    tables: list[Table],
    commits: list[LastCommit],
    ram_bytes: int,
    progress: Progress | None,
) -> int:
    """Make the whole new sharded table in `part`, steps 2 and 3; return the number of its rows."""
    commit = commits[0]
    with ShardedTable.create(part, shards=shards, ram=ram_bytes - ram_bytes // 2, **_arguments(tables[0])) as made:
        rows = copy_rows(tables, [made], progress)
        made.commit(meta=commit.meta)
    _require_sound(tables[0], check(part, ram=ram_bytes))
    there = RunFiles(part)
    newest = there.load_newest()
    assert newest.sharding is not None
    for epoch in there.epochs():
        there.manifest_path(epoch).unlink()
    sharding = replace(newest.sharding, uuid=commit.uuid)
    there.publish(replace(newest, epoch=commit.epoch, keep=commit.keep, sharding=sharding))
    return rows


def _write_for_workers(
    part: Path,
    shards: int,
    tables: list[Table],
    commits: list[LastCommit],
    ram_bytes: int,
    progress: Progress | None,
) -> int:
    """Make the tables of `shards` workers in `part`, steps 2 and 3; return the number of their rows."""
    part.mkdir()
    folders = [part / folder_of_worker("sharded", index, shards) for index in range(shards)]
    budget = Budget(ram_bytes - ram_bytes // 2)
    with contextlib.ExitStack() as opened:
        made = []
        for folder, commit in zip(folders, itertools.cycle(commits), strict=False):
            identity = bytes.fromhex(commit.uuid), max(1, commit.epoch)
            table = create(folder, ram=budget, _identity=identity, _warns=False, **_arguments(tables[0]))
            opened.callback(table.close, commit=False)
            made.append(table)
        rows = copy_rows(tables, made, progress)
        for table, commit in zip(made, itertools.cycle(commits), strict=False):
            table.commit(meta=commit.meta, keep=commit.keep or None)
    for index, (folder, commit) in enumerate(zip(folders, itertools.cycle(commits), strict=False)):
        if commit.epoch > 1:  # the commit before the first one, of a number that the old table had, has no rows
            (folder / f"manifest-{commit.epoch - 1:016d}").unlink()
        _require_sound(
            tables[0], problems_of_table(folder, _native.check_table(str(folder), ram_bytes, None, index, shards))
        )
        sync_directory(folder)
    return rows


def _arguments(table: Table) -> Json:
    arguments = Definition.of(table).arguments()
    del arguments["durability"]
    return arguments


def _require_sound(table: Table, problems: Report) -> None:
    if problems:
        raise CorruptionError(f"table {table.path}: a new shard is damaged, the old table stays: {problems[0]}")
