"""Copy tables and runs: incrementally with verification, or rewritten for serving."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bunkbed import _native
from bunkbed.core import optim as _optim
from bunkbed.core.budget import parse_bytes
from bunkbed.core.typed import typed
from bunkbed.files.durable import appearing
from bunkbed.files.run_files import RunFiles
from bunkbed.maintenance.copy_run import copy_run, rewrite_run
from bunkbed.maintenance.rewriting import Rewritten, rewrite_rows, rewritten_definition
from bunkbed.sharded.opening import open
from bunkbed.table.facts import DTYPES
from bunkbed.table.opening import create

#: Called with (done, in all), a few times a second: bytes of files, or rows where rows are rewritten.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Copied:
    """The result of a copy.

    Attributes:
        epoch: the number of the copied commit in the source.
        linked_bytes: bytes of files that source and copy now share.
        copied_bytes: bytes of files that were written.
        present_bytes: bytes of files that an earlier copy had written.
        rows: number of rows where rows were rewritten, otherwise 0.
    """

    epoch: int
    linked_bytes: int = 0
    copied_bytes: int = 0
    present_bytes: int = 0
    rows: int = 0


@typed
def copy(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    snapshot: str | None = None,
    dtype: str | None = None,
    optimizer: _optim.Optimizer | None = None,
    link: bool = True,
    ram: float | str = "1GiB",
    progress: Progress | None = None,
) -> Copied:
    """Copy a commit of a table or run to another folder and verify every record.

    Without `dtype` and `optimizer` files are copied; a second copy into the same folder copies only new files. Where
    both folders are on one filesystem, hard links share the files that never change again. Such a copy takes no space
    until the source changes. It survives any change or removal of the source, but not a damaged disk. The commit
    appears in one step: an interrupted copy leaves the folder as it was. The source may be written during the copy;
    its last commit is copied.

    A copy has its table's uuid, because every checksum contains the uuid; only the paths distinguish copies. A copy
    that was opened for writing and has commits of its own is no longer a destination.

    With `dtype` or `optimizer` the rows are rewritten into a new table, in chunks. Weights are rounded to nearest.
    Slots that both optimizers have are copied; the others are initial. ``dtype="bfloat16", optimizer=bb.SGD()`` is
    the smallest form for serving.

    Args:
        src: folder of a table or of a run.
        dst: folder to make, or an earlier copy of the same table or run; for rewriting it must not exist.
        snapshot: the kept commit to copy; default: the last commit.
        dtype: dtype of the weights in the copy; default: that of the source.
        optimizer: optimizer of the copy; default: the source's, with its state.
        link: False: write all bytes, without hard links, as on another disk.
        ram: budget for rewriting rows: half for reading, half for writing.
        progress: called with (done, in all), a few times a second: bytes, or rows where rows are rewritten.

    Raises:
        FileNotFoundError, FormatError: `src` has neither a table nor a run. FileExistsError: `dst` is not a copy.
        ValueError: no such snapshot (lists the snapshots); `dst` is of another table or has commits of its own.
        CorruptionError: a record of the source fails its checksum. TableLockedError: another process writes `dst`.
        MemoryError: `ram` is too small to rewrite rows; says how much is needed. OSError: the disk is full or failing.
        After an error `dst` is as it was.

    >>> import bunkbed as bb, numpy as np, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with bb.create(folder + "/user", dim=4, num_rows=100, ram="8MiB") as table:
    ...     table.update(np.arange(10), np.ones((10, 4), np.float32))
    ...     epoch = table.commit(keep="best")
    >>> copied = bb.copy(folder + "/user", folder + "/backup", snapshot="best")
    >>> bb.copy(folder + "/user", folder + "/backup", snapshot="best").present_bytes == copied.linked_bytes
    True
    >>> bb.copy(folder + "/user", folder + "/serving", dtype="bfloat16", optimizer=bb.SGD()).rows
    10
    """
    source, target = _places(src, dst)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if optimizer is not None:
        _optim.require_optimizer(optimizer)
    files = RunFiles(source)
    is_run = bool(files.epochs())
    if dtype is None and optimizer is None:
        if is_run:
            return Copied(*copy_run(files, target, snapshot, link, progress))
        return Copied(*_copy_table(source, target, snapshot, link, progress))
    if target.exists():
        raise FileExistsError(f"{target} exists already; rows are rewritten into a new folder: give another one")
    ram_bytes = parse_bytes(ram)
    with appearing(target) as part:
        rewrite = rewrite_run if is_run else _rewrite_table
        rewritten = rewrite(source, part, snapshot, dtype, optimizer, ram_bytes, progress)
    return Copied(rewritten.epoch, rows=rewritten.rows)


def _places(src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> tuple[Path, Path]:
    source, target = Path(src).expanduser().absolute(), Path(dst).expanduser().absolute()
    if not source.exists():
        raise FileNotFoundError(f"no table and no run at {source}")
    inner, outer = target.resolve(), source.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise ValueError(f"cannot copy {source} to {target}: one lies within the other; give another folder")
    return source, target


def _copy_table(
    source: Path, target: Path, snapshot: str | None, link: bool, progress: Progress | None
) -> tuple[int, int, int, int]:
    is_new = not target.exists()
    try:
        done: tuple[int, int, int, int] = _native.copy_table(
            str(source), str(target), snapshot or "", None, False, link, progress
        )
    except BaseException:
        if is_new:
            shutil.rmtree(target, ignore_errors=True)  # a folder without a commit would make the next copy fail
        raise
    return done


def _rewrite_table(
    source: Path,
    part: Path,
    snapshot: str | None,
    dtype: str | None,
    optimizer: _optim.Optimizer | None,
    ram_bytes: int,
    progress: Progress | None,
) -> Rewritten:
    with open(source, mode="r", snapshot=snapshot, ram=ram_bytes // 2) as table:
        definition = rewritten_definition(table, dtype, optimizer)
        with create(part, ram=ram_bytes - ram_bytes // 2, **definition.arguments()) as copied:
            rows = rewrite_rows(table, copied, progress)
            copied.commit(meta=table.meta, keep=snapshot)
        return Rewritten(table.epoch, rows)
