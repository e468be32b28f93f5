"""Files and names that survive power loss, and the one rule about symbolic links."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from bunkbed import _native
from bunkbed.errors import FormatError


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    _native.sync_directory(str(path))


def sync_file(path: Path) -> None:
    """Make the bytes of a file that is written durable; of a directory its names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_file(path: Path) -> BinaryIO:
    """A new file, open for writing. What has its name goes first; a symbolic link there is removed, never followed."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def require_real(path: Path) -> None:
    """Nothing is written, or removed, through a symbolic link that came with a folder.

    Raises:
        FormatError: `path` is one.
    """
    if path.is_symlink():
        raise FormatError(
            f"{path} is a symbolic link, through which nothing is written; put what it leads to in its place"
        )


def put_in_place(made: Path, path: Path) -> None:
    """Give a file that was written beside `path` its name, durably. A reader finds the old file or the new one."""
    sync_file(made)
    made.replace(path)
    sync_directory(path.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file durably and all at once."""
    made = path.with_name(f"{path.name}.tmp")
    with make_file(made) as file:
        file.write(content)
    put_in_place(made, path)


def write_durably(path: Path, data: bytes) -> None:
    """A new file whose bytes are durable; its name is, once the directory is synced."""
    _native.write_file(str(path), data)
