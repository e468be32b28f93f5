"""Removal of a table that a layer with ``exist="new"`` replaces."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

from bunkbed import _native
from bunkbed.files.run_files import RunFiles, is_sharded
from bunkbed.table.opening import is_table, open_writer, path_lock

#: What a table's directory has: its own files, those of a table with shards, and the folders of these.
_FILES = re.compile(r"lock|new-.*|(manifest|segment|directory|run|file)-\d{16}")
_FOLDERS = re.compile(r"files|tables|shard-\d{4}")


def is_taken(place: Path) -> bool:
    """Return whether there is anything at `place` but an empty directory."""
    return place.is_symlink() or (place.exists() and not (place.is_dir() and not any(place.iterdir())))


def require_removable(place: Path) -> None:
    """Raise FileExistsError, which names what else is there, unless `place` has a table and nothing else."""
    why = _why_it_stays(place)
    if why:
        raise FileExistsError(
            errno.EEXIST, f"a table is replaced only where nothing else would be removed, and this {why}", str(place)
        )


def close_writer(place: Path) -> None:
    """Close the table at `place` without a commit if this process writes it: its layers raise `TableClosedError`.

    In a loop over folds the model of the fold before still exists when the next one is made.
    """
    with path_lock(place):
        present = open_writer(place)
        if present is not None:
            present.release()


def remove_table(place: Path) -> None:
    """Remove the table at `place`, with its kept commits.

    Raises:
        FileExistsError: see `require_removable`. TableLockedError: another process writes the table. Nothing was
            changed.
    """
    with path_lock(place):
        require_removable(place)
        files = RunFiles(place, "table")
        lock = files.lock()
        try:
            away = place.with_name(f".{place.name}-removed-{os.getpid()}")
            place.rename(away)  # in one step: a table is there, or none
            shutil.rmtree(away)
        finally:
            files.unlock(lock)


def _why_it_stays(place: Path) -> str:
    """Return the reason why `place` must stay; empty where it is a table and nothing else."""
    if place.is_symlink() or not place.is_dir():
        return "is not a directory"
    if not is_table(place) and not is_sharded(place):
        return "holds none"
    for entry in place.rglob("*"):
        known = _FOLDERS if entry.is_dir() else _FILES
        if entry.is_symlink() or not known.fullmatch(entry.name):
            return f"also holds {entry.relative_to(place)}; move that away"
    if is_table(place):
        return "belongs to a run" if any(one["belongs_to_run"] for one in _native.commits(str(place))) else ""
    files = RunFiles(place, "table")
    others = [str(at) for at in map(Path, files.load(files.epochs()[-1]).places.values()) if at.is_absolute()]
    return f"has shards elsewhere, as {others[0]}; remove them and this by hand" if others else ""
