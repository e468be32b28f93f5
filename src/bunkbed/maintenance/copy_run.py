"""Copy a run: its tables, dense files and manifest, and the other files in its folder."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bunkbed import _native
from bunkbed.core import optim as _optim
from bunkbed.errors import TableLockedError
from bunkbed.files.durable import make_file, require_real, sync_directory
from bunkbed.files.run_files import RunFiles, RunManifest
from bunkbed.maintenance.rewriting import Rewritten, rewrite_rows, rewritten_definition
from bunkbed.run.run import Run
from bunkbed.sharded.base.shards import Shards

Progress = Callable[[int, int], None]

_OWN = ("run-", "new-run-", "cursor-")
_FOLDERS = ("files", "tables", "lock")


def copy_run(
    files: RunFiles, target: Path, snapshot: str | None, link: bool, progress: Progress | None
) -> tuple[int, int, int, int]:
    """Copy a commit; return (epoch, bytes linked, bytes copied, bytes present before)."""
    is_new = not target.exists()
    try:
        for attempt in range(10):
            manifest = files.load_newest() if snapshot is None else files.find(snapshot)
            try:
                return _copy_commit(files, manifest, target, link, progress)
            except FileNotFoundError:
                # The writer collected the commit during the copy. Try again with the newest.
                if files.manifest_path(manifest.epoch).exists() or attempt == 9:
                    raise
    except BaseException:
        if is_new:
            shutil.rmtree(target, ignore_errors=True)
        raise
    raise AssertionError("unreachable")


def _copy_commit(
    files: RunFiles, manifest: RunManifest, target: Path, link: bool, progress: Progress | None
) -> tuple[int, int, int, int]:
    there = RunFiles(target)
    if target.exists() and not there.epochs():
        strangers = sorted(entry.name for entry in target.iterdir() if entry.name not in _FOLDERS)
        if strangers:
            raise FileExistsError(f"cannot copy {files.directory} to {target}: it holds {strangers[0]}, and is no copy")
    there.files.mkdir(parents=True, exist_ok=True)
    (target / "tables").mkdir(exist_ok=True)
    try:
        lock = there.lock()
    except TableLockedError as error:
        raise TableLockedError(f"cannot copy {files.directory} to {target}: {error}") from None
    try:
        _meet(files, manifest, there)
        sums = [0, 0, 0]
        for name, epoch in manifest.tables.items():
            table, copied = files.own_table(name), target / "tables" / name
            require_real(copied)
            parts = _native.copy_table(str(table), str(copied), "", epoch, True, link, progress)
            sums = [one + other for one, other in zip(sums, parts[1:], strict=True)]
        for name in manifest.files:
            _copy_file(files, there, name, manifest, link, sums)
        sync_directory(there.files)
        _copy_beside(files.directory, target)
        if manifest.epoch not in there.epochs():
            there.publish(replace(manifest, copied=True, places={}))  # the copy has every table in its own directory
        for name, pinned in there.collect()[0].items():
            _native.collect_commits(str(target / "tables" / name), pinned)
    finally:
        there.unlock(lock)
    return manifest.epoch, *sums  # type: ignore[return-value]


def _meet(files: RunFiles, manifest: RunManifest, there: RunFiles) -> None:
    """Raise unless the destination is empty, or an earlier copy of this run without commits of its own."""
    epochs = there.epochs()
    if not epochs:
        return

    def refuse(why: str) -> ValueError:
        return ValueError(f"cannot copy {files.directory} to {there.directory}: {why}; nothing was changed")

    newest = there.load_newest()
    if not newest.copied:
        raise refuse(
            f"it was written since it was copied, and went its own way with commit {newest.epoch}; "
            "copy to another folder"
        )
    if newest.epoch > manifest.epoch:
        raise refuse(f"it holds commit {newest.epoch} already, which is newer than {manifest.epoch}")
    if newest.epoch in files.epochs() and replace(newest, copied=False) != replace(
        files.load(newest.epoch), copied=False, places={}
    ):
        raise refuse(
            f"its commit {newest.epoch} is not the one the source had under that number; copy to another folder"
        )


def _copy_file(files: RunFiles, there: RunFiles, name: str, manifest: RunManifest, link: bool, sums: list[int]) -> None:
    number, size, _ = manifest.files[name]
    source, target = files.file_path(number), there.file_path(number)
    if target.exists():
        if any(number == entry[0] for epoch in there.epochs() for entry in there.load(epoch).files.values()):
            there.read_file(name, manifest)  # raises unless it has the checksum of the source's file
            sums[2] += size
            return
        target.unlink()  # left by a copy that did not finish
    if link:
        try:
            os.link(source, target)
            there.read_file(name, manifest)
            sums[0] += size
            return
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                raise
    there.write_file(number, files.read_file(name, manifest))
    sums[1] += size


def _copy_bytes(source: Path, target: Path) -> None:
    """Copy a file with its times. The file gets its name when it is complete."""
    temporary = target.with_name(f".{target.name}.part")
    with source.open("rb") as content, make_file(temporary) as file:
        shutil.copyfileobj(content, file)
        file.flush()
        os.fsync(file.fileno())
    shutil.copystat(source, temporary)
    temporary.replace(target)


def _copy_beside(source: Path, target: Path) -> None:
    """Copy the other files of a run's folder, such as configuration and data of ``bunkbed train``."""
    for entry in sorted(source.rglob("*")):
        place = entry.relative_to(source)
        if place.parts[0] in _FOLDERS or place.parts[0].startswith(_OWN) or entry.is_symlink() or not entry.is_file():
            continue
        copied = target / place
        for parent in place.parents:
            require_real(target / parent)
        about = entry.stat()
        if copied.exists() and (copied.stat().st_size, copied.stat().st_mtime_ns) == (about.st_size, about.st_mtime_ns):
            continue
        copied.parent.mkdir(parents=True, exist_ok=True)
        _copy_bytes(entry, copied)


def rewrite_run(
    source: Path,
    part: Path,
    snapshot: str | None,
    dtype: str | None,
    optimizer: _optim.Optimizer | None,
    ram_bytes: int,
    progress: Progress | None,
) -> Rewritten:
    """Rewrite every table and copy the dense files unchanged, in one commit."""
    half = ram_bytes // 2
    with (
        Run(source, half, mode="r", snapshot=snapshot) as run,
        Run(part, ram_bytes - half) as copied,
    ):
        tables = {name: run.table(name) for name in run.table_names}
        definitions = {name: rewritten_definition(table, dtype, optimizer) for name, table in tables.items()}
        rows = 0
        for name, table in tables.items():
            shards = {"shards": table.num_shards} if isinstance(table, Shards) else {}
            create = {**definitions[name].arguments(), **shards}
            rows += rewrite_rows(table, copied.table(name, create=create), progress)
        if run.sharding is not None:
            copied.become_sharded(run.sharding.names())
        copied.commit(files={name: run.read(name) for name in run.files}, meta=run.meta, keep=snapshot)
        _copy_beside(source, part)
        return Rewritten(run.epoch, rows)
