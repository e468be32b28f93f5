"""Files and names that survive power loss, and the rule for symbolic links."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

from bunkbed import _native
from bunkbed.errors import FormatError


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    _native.sync_directory(str(path))


def sync_file(path: Path) -> None:
    """Make the bytes of a written file durable; for a directory, its names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_file(path: Path) -> BinaryIO:
    """Make a new file, open for writing. A file or symbolic link at `path` is removed first; no link is followed."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def require_real(path: Path) -> None:
    """Check that `path` is not a symbolic link: nothing is written or removed through a link in a copied folder.

    Raises:
        FormatError: `path` is a symbolic link.
    """
    if path.is_symlink():
        raise FormatError(
            f"{path} is a symbolic link, through which nothing is written; put what it leads to in its place"
        )


def put_in_place(made: Path, path: Path) -> None:
    """Rename `made`, in the same directory, to `path`, durably. A reader finds the old file or the new file."""
    sync_file(made)
    made.replace(path)
    sync_directory(path.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file durably; a reader never sees a part of it."""
    made = path.with_name(f"{path.name}.tmp")
    with make_file(made) as file:
        file.write(content)
    put_in_place(made, path)


@contextlib.contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Yield a path next to `target` where nothing is. What the block makes there appears at `target`, durably.

    After an error nothing is left. What an interrupted call left is removed.

    Raises:
        FormatError: the path is a symbolic link.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    require_real(part)
    try:
        yield part
        part.rename(target)
        sync_directory(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def replacing(target: Path, part: Path) -> Iterator[None]:
    """Put the folder that the block makes at `part` in the place of the folder `target`, in one step, durably.

    Both are in one folder. After an error `target` is as it was, and nothing is at `part`. A process that is killed
    leaves the old folder or the new one at `target`, whole; what it leaves at `part` the next call removes.

    Raises:
        FormatError: `part` is a symbolic link. OSError: see `exchange`.
    """
    require_real(part)
    shutil.rmtree(part, ignore_errors=True)
    try:
        yield
        sync_directory(part)
        exchange(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    _remove_old(target, part)


def take_place(part: Path, target: Path) -> None:
    """Put the folder `part` in the place of the folder `target`, in one step, durably, and remove the old one.

    A process that is killed leaves the old folder or the new one at `target`, whole; the other one may be at `part`.

    Raises:
        OSError: see `exchange`; both are where they were.
    """
    sync_directory(part)
    exchange(part, target)
    _remove_old(target, part)


def _remove_old(target: Path, part: Path) -> None:
    sync_directory(target.parent)
    if Path.cwd().is_relative_to(part):  # the folder that was here when this process entered it
        os.chdir(target)
    shutil.rmtree(part, ignore_errors=True)  # only now: until the sync, power loss could undo the exchange


def link_folder(folder: Path, there: Path, left_out: Collection[str] = ()) -> None:
    """Make a folder whose files are second names of those in `folder`, durably.

    Args:
        left_out: patterns of names.
    """
    there.mkdir()
    for entry in folder.iterdir():
        if any(fnmatch(entry.name, pattern) for pattern in left_out):
            continue
        if entry.is_dir() and not entry.is_symlink():
            link_folder(entry, there / entry.name, left_out)
        else:
            link(entry, there / entry.name)
    sync_directory(there)


def link(entry: str | Path, there: str | Path) -> None:
    """Give a file, or a symbolic link, a second name. The name is durable after `sync_directory`."""
    os.link(entry, there, follow_symlinks=False)


def exchange(one: Path, other: Path) -> None:
    """Exchange two folders of one filesystem in one step (``renameat2`` with ``RENAME_EXCHANGE``).

    The names are durable after `sync_directory` of the parent folders.

    Raises:
        OSError: filesystem or C library cannot do that, or the folders are on different filesystems. Nothing changed.
    """
    here, flag = -100, 2  # AT_FDCWD, RENAME_EXCHANGE; Python's `os` has no such call
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None or call(here, os.fsencode(one), here, os.fsencode(other), ctypes.c_uint(flag)) != 0:
        error = errno.ENOSYS if call is None else ctypes.get_errno()
        raise OSError(error, f"cannot exchange two folders, {os.strerror(error)}", str(one), None, str(other))


def write_durably(path: Path, data: bytes) -> None:
    """Make a file whose bytes are durable. Its name is durable after `sync_directory`."""
    _native.write_file(str(path), data)
