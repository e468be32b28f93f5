"""Removal of a table's directory that a process left before the run committed the table.

``Run.table(name, create=...)`` replaces the directory of a table that no commit of the run names. The directory may
still hold committed rows: of a run whose manifests are missing (a partial copy, a restored backup), or of a table that
was made there without the run. So the directory is removed only if one of these conditions proves that it has no such
rows:

1. The directory has no table: it holds at most a lock and unfinished files.
2. The table belongs to a run, and its only commit is that of its creation, without a row.
3. The table belongs to a run, and the file ``new-run-table-NAME`` in the run's directory has its uuid. The run writes
   this file, durably, before the first commit of a new table. It removes the file once its own commit of the table is
   durable.

Files of a table are removed one by one, so that a symbolic link is never followed.
"""

from __future__ import annotations

import re
from pathlib import Path

from bunkbed import _native
from bunkbed.core.types import Json
from bunkbed.errors import BunkbedError
from bunkbed.files.durable import sync_directory, write_durably
from bunkbed.files.run_files import RunFiles

_PREFIX = "new-run-table-"
_UNFINISHED = re.compile(r"lock|new-.*")
_PARTS = re.compile(r"(manifest|segment|directory)-\d{16}")


def _mark(files: RunFiles, name: str) -> Path:
    return files.directory / f"{_PREFIX}{name}"


def mark_new(files: RunFiles, uuids: dict[str, str]) -> None:
    """Record durably that no commit of the run names these tables (name -> uuid) yet."""
    for name, uuid in uuids.items():
        _native.remove_file(str(_mark(files, name)))
        write_durably(_mark(files, name), uuid.encode())
    if uuids:
        sync_directory(files.directory)


def forget_marks(files: RunFiles, committed: set[str]) -> None:
    """Remove the marks of tables that a durable commit of the run names."""
    for path in files.directory.glob(f"{_PREFIX}*"):
        if path.name.removeprefix(_PREFIX) in committed:
            _native.remove_file(str(path))


def remove_leftover(files: RunFiles, name: str, path: Path) -> None:
    """Remove the directory at `path`, where the run will make the table `name`. Requires: the run's lock held.

    Raises:
        FileExistsError: no condition proves that the table was never committed. Nothing was changed.
    """
    why = _why_it_stays(files, name, path)
    if why:
        raise FileExistsError(
            f"{files.label}: no commit of it names a table {name!r}, but {path} {why}; nothing was changed; if files "
            "of the run are missing (run-*, as after a partial copy), put them back; otherwise move that directory "
            "away, or remove it if nothing needs it"
        )
    # Manifests are removed last, so that after an interrupted removal the condition still holds.
    for entry in sorted(path.iterdir(), key=lambda entry: (entry.name.startswith("manifest-"), entry.name)):
        _native.remove_file(str(entry))
    path.rmdir()
    _native.remove_file(str(_mark(files, name)))


def _why_it_stays(files: RunFiles, name: str, path: Path) -> str:
    """Return the reason why the directory must stay; empty where one of the conditions holds."""
    if path.is_symlink() or not path.is_dir():
        return "is not a directory"
    entries = sorted(path.iterdir())
    for entry in entries:
        is_own = _UNFINISHED.fullmatch(entry.name) or _PARTS.fullmatch(entry.name)
        if not is_own or (entry.is_dir() and not entry.is_symlink()):
            return f"holds {entry.name!r}, which is no file of a table"
    parts = [entry.name for entry in entries if _PARTS.fullmatch(entry.name)]
    if not parts:
        return ""
    manifests = [part for part in parts if part.startswith("manifest-")]
    commits = _native.commits(str(path)) if manifests else []
    if not commits or len(commits) < len(manifests):
        return "holds a table of which a manifest is missing or damaged"
    if not all(commit["belongs_to_run"] for commit in commits):
        return "holds a table of its own, which belongs to no run"
    newest = commits[-1]
    is_as_made = len(commits) == 1 and (newest["epoch"], newest["step"], newest["stored_rows"]) == (0, 0, 0)
    return (
        "" if is_as_made or _is_marked(files, name, commits) else f"holds a table with commits, up to {newest['epoch']}"
    )


def _is_marked(files: RunFiles, name: str, commits: list[Json]) -> bool:
    try:
        uuid = _native.read_file(str(_mark(files, name)))
    except (OSError, BunkbedError):
        return False
    return all(commit["uuid"].hex().encode() == uuid for commit in commits)
