"""`export_rows`.

1. The arguments are checked against the table and the format; an existing target is an error.
2. A folder ``.NAME.part`` is made next to the target and locked: a second export to the same target is an error. Files
   that a killed export left in the folder are removed.
3. The format writes its files into that folder only.
4. The files are synced and published under their names, and the folder is removed. Without `overwrite` the files are
   linked, which fails if a file was made there in between; with `overwrite` they are renamed over existing files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bunkbed.core.typed import typed
from bunkbed.files.durable import sync_directory, sync_file
from bunkbed.io.common.source import Progress
from bunkbed.io.common.writing import Writing
from bunkbed.io.formats import FORMATS, Format, format_of
from bunkbed.table.neighbors import METRICS
from bunkbed.table.table import Table


@typed
def export_rows(
    table: Table,
    path: str | os.PathLike[str],
    *,
    slots: Sequence[str] = ("weight",),
    format: str | None = None,
    name: str | None = None,
    vocab: str | os.PathLike[str] | None = None,
    metric: str | None = None,
    overwrite: bool = False,
    chunk: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Write rows of `table` to a file, which is written whole or not at all.

    Args:
        table: an open table, also a reader.
        path: the file to make; its suffix decides the format.
        slots: what to write in addition to the ids. Optimizer state includes its step, if the format has both.
        format: a name of `bunkbed.io.formats.FORMATS`, if the suffix does not decide.
        name: name of the array, in a format with named arrays.
        vocab: for rows named by words: a file of one word per line, whose number from 0 is the id. Default: the ids; in
            Parquet and Arrow files, which always have the ids, no column ``word``.
        metric: of an index of nearest rows: ``"dot"`` (default, as in `Table.topk`) or ``"cosine"``.
        overwrite: replace an existing file.
        chunk: rows held in memory at a time; default: 4 MiB of rows.
        progress: called after each chunk with (rows done, rows in all).

    Returns:
        Rows written.

    Raises:
        FileExistsError: `path` exists; it is not changed.
        ValueError: an unknown suffix, slot or metric; a format that cannot hold so many slots, or any id; an id without
            a word. MemoryError: an index that does not fit the table's RAM budget.
        OSError: the disk is full, or another export to `path` is under way. ImportError: the format's library is
        missing. BunkbedError: the table was changed during the export. After any error, no new file is left.

    >>> import bunkbed as bb, numpy as np
    >>> with bb.create(None, dim=2, num_rows=3, init=bb.Zeros()) as table:
    ...     table.set([1], np.ones((1, 2), np.float32))
    ...     bb.export_rows(table, "rows.npy")
    3
    >>> np.load("rows.npy").tolist()
    [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    """
    target = Path(path).absolute()
    chosen = format_of(target, format)
    if not chosen.can_export:
        able = ", ".join(one.name for one in FORMATS if one.can_export)
        raise ValueError(f"{target}: the format {chosen.name} is only imported; export to one of {able}")
    if not slots or len(set(slots)) != len(slots):
        raise ValueError(f"slots must name at least one slot, each once, got {tuple(slots)!r}")
    if vocab is not None and not chosen.has_words:
        raise ValueError(f"{target}: the format {chosen.name} names no rows by words; leave vocab= out")
    if metric is not None and not chosen.has_metric:
        raise ValueError(f"{target}: the format {chosen.name} has no metric; leave metric= out")
    if metric not in (None, *METRICS):
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    words = None if vocab is None else Path(vocab)
    writing = Writing(table, target, chosen.name, slots, chunk, name, words, metric or METRICS[0], progress)
    if len(writing.lengths) > 1 and not chosen.has_state:
        holders = ", ".join(one.suffixes[0] for one in FORMATS if one.has_state and one.can_export)
        raise ValueError(f"{target}: {chosen.name} holds one slot, got {', '.join(slots)}; export to one of {holders}")
    return _write(chosen, writing, overwrite)


def _write(chosen: Format, writing: Writing, overwrite: bool) -> int:
    target = writing.target
    module = chosen.load()
    for path in module.targets(target) if hasattr(module, "targets") else (target,):
        _require_free(path, overwrite)
    with _staging(target) as folder:
        writing.out, writing.scratch = folder / "out", folder / "scratch"
        writing.out.mkdir()
        writing.scratch.mkdir()
        count: int = module.write(writing)
        made = sorted(writing.out.iterdir())
        for path in made:
            for file in [path, *path.rglob("*")]:
                sync_file(file)
        for path in made:  # check all before the first is published
            _require_free(target.parent / path.name, overwrite)
        for path in made:  # the index of a checkpoint comes last
            _publish(path, target.parent / path.name, overwrite)
        sync_directory(target.parent)
    return count


def _require_free(path: Path, overwrite: bool) -> None:
    if not overwrite and os.path.lexists(path):
        raise FileExistsError(
            f"{path} exists already and is as it was; give another name, or overwrite=True (--overwrite)"
        )


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    folder = target.with_name(f".{target.name}.part")
    descriptor = _lock(folder, target)
    try:
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _lock(folder: Path, target: Path) -> int:
    while True:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                if folder.stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            except FileNotFoundError:
                pass  # another export removed the folder after this one opened it
        except BlockingIOError:
            os.close(descriptor)
            raise OSError(errno.EBUSY, "another export to it is under way", str(target)) from None
        os.close(descriptor)


def _publish(path: Path, target: Path, overwrite: bool) -> None:
    _require_free(target, overwrite)
    if path.is_dir() and overwrite and target.is_dir():
        # A directory cannot be renamed over another: the old one is moved away first, and moved back after an error.
        aside = path.parent.parent / "old"
        target.rename(aside)
        try:
            path.rename(target)
        except BaseException:
            aside.rename(target)
            raise
    elif overwrite or path.is_dir():
        path.rename(target)
    else:
        try:
            os.link(path, target)
        except FileExistsError:
            _require_free(target, overwrite)
            raise
        except OSError:  # a file system without links
            path.rename(target)
