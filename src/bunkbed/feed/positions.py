"""Cursors: how far the consumers of a change feed have come.

A cursor is a file in the table's folder, in each shard's of a sharded one (csrc/commit/cursors.h). A sharded table, and
a table of a run, have one more in the folder of the whole, with the number of its commit. It is made first, and then
written last, so it may be behind the others, never ahead: the rows between were delivered, and are not given again.
"""

from __future__ import annotations

import re
from pathlib import Path

from bunkbed import _native
from bunkbed.errors import CorruptionError
from bunkbed.feed.parts import Part, Parts
from bunkbed.files.durable import replace_file, sync_directory

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}")
_PREFIX = "cursor-"


def checked_name(name: str) -> str:
    """Return `name`, or raise ValueError where it is no name of a cursor."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"since must be a whole number, at least 0, or the name of a cursor: a letter and then letters, digits, _ "
            f"or -, at most 100 in all; got {name!r}"
        )
    return name


def names_in(parts: Parts) -> list[str]:
    """Return the names of the cursors of a table, sorted."""
    found = [path.name.removeprefix(_PREFIX).partition(".") for path in parts.home.glob(f"{_PREFIX}*")]
    names = [name for name, _, table in found if table == parts.table]
    return sorted(name for name in names if _NAME.fullmatch(name))


def position_of(part: Part, name: str) -> tuple[int, int, bool]:
    """Return (commit, next version) that the consumer has of a part; zeros where there is no cursor.

    The third is whether the consumer has not read everything yet; then they are those of the time when it came.
    """
    return _native.load_cursor(str(part.folder), name) or (0, 0, False)


def make(parts: Parts, name: str) -> None:
    """Make the cursor where it does not exist, so that the writer keeps what the consumer needs from now on."""
    if parts.commit is not None and not _of_the_whole(parts, name).exists():
        replace_file(_of_the_whole(parts, name), b"0\n")  # first: a cursor that is not listed could not be dropped
    for part in parts.parts:
        path = part.folder / f"{_PREFIX}{name}"
        if not path.exists():
            replace_file(path, _native.new_cursor(str(part.folder)))


def commit_of(parts: Parts, name: str) -> int:
    """Return the commit that a cursor stands at; 0 where there is none."""
    if parts.commit is None:
        commit, _, is_new = position_of(parts.parts[0], name)
        return 0 if is_new else commit
    path = _of_the_whole(parts, name)
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return 0
    if not re.fullmatch(r"[0-9]{1,15}\n", text):
        raise CorruptionError(f"cursor {path} is damaged; remove the file, and read the table from the start")
    return int(text)


def save(parts: Parts, name: str, files: list[bytes], commit: int) -> None:
    """Move a cursor, durably."""
    for part, file in zip(parts.parts, files, strict=True):
        replace_file(part.folder / f"{_PREFIX}{name}", file)
    if parts.commit is not None:
        replace_file(_of_the_whole(parts, name), f"{commit}\n".encode("ascii"))


def remove(parts: Parts, name: str) -> None:
    """Remove a cursor, durably: last the file that names the commit, so that an interrupted call can be repeated."""
    for part in parts.parts:
        (part.folder / f"{_PREFIX}{name}").unlink(missing_ok=True)
        sync_directory(part.folder)
    if parts.commit is not None:
        _of_the_whole(parts, name).unlink(missing_ok=True)
        sync_directory(parts.home)


def _of_the_whole(parts: Parts, name: str) -> Path:
    return parts.home / (f"{_PREFIX}{name}.{parts.table}" if parts.table else f"{_PREFIX}{name}")
