"""Write a run with other numbers of shards into a new folder; see `bunkbed.maintenance.resharding`."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from bunkbed.errors import CorruptionError
from bunkbed.files.durable import link, link_folder, sync_directory
from bunkbed.files.run_files import RunFiles, RunManifest
from bunkbed.maintenance.check import check
from bunkbed.maintenance.shard_rows import LaterHasLess, Progress, copy_rows
from bunkbed.maintenance.shard_sources import OF_A_SHARDED_TABLE
from bunkbed.run.run import Run
from bunkbed.table.definition import Definition


def fewest_shards(run: RunManifest, shards: int) -> int:
    """Return the fewest shards of a run's tables that have not `shards`, 0 if not sharded; `shards` if all have."""
    counts = [len(run.sharded[name].shards) if name in run.sharded else 0 for name in run.table_names()]
    return min((count for count in counts if count != shards), default=shards)


def rewrite_run(
    files: RunFiles,
    part: Path,
    shards: int,
    drop_snapshots: bool,
    ram_bytes: int,
    progress: Progress | None,
) -> int:
    """Make the whole new run in `part`: its kept commits, its last one, and the files of others in its folder.

    Returns:
        The number of rows written.

    Raises:
        ValueError: earlier snapshots cannot be kept. CorruptionError: a new record is damaged.
    """
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
                        done += copy_rows([table], [whole], one_of_all)
                    except LaterHasLess as error:
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
    return rows


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
        if OF_A_SHARDED_TABLE.fullmatch(entry.name) or entry.name in kept:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def link_others(place: Path, part: Path, left_out: Collection[str] = ()) -> None:
    """Give the files in a run's folder that are not the run's, nor `left_out`, a second name in `part`, durably."""
    for entry in place.iterdir():
        if OF_A_SHARDED_TABLE.fullmatch(entry.name) or entry.name in left_out:
            continue
        there = part / entry.name
        if entry.is_dir() and not entry.is_symlink():
            link_folder(entry, there)
        else:
            link(entry, there)
    sync_directory(part)
