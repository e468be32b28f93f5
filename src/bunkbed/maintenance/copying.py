"""Copies of tables and runs: incremental and verified, or rewritten for serving."""

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
from bunkbed.files.durable import require_real, sync_directory
from bunkbed.files.run_files import RunFiles
from bunkbed.maintenance.copy_run import copy_run, rewrite_run
from bunkbed.maintenance.rewriting import Rewritten, rewrite_rows, rewritten_spec
from bunkbed.sharded.opening import open
from bunkbed.table.facts import DTYPES
from bunkbed.table.opening import create

#: (done, in all), a few times a second: bytes of files, or rows where rows are rewritten.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Copied:
    """What a copy did.

    Attributes:
        epoch: the commit that was copied, by its number in the source.
        linked_bytes: of files that both now share.
        copied_bytes: of files written anew.
        present_bytes: of files that were there from an earlier copy.
        rows: written anew where rows were rewritten, otherwise 0.
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
    ram: int | str = "1GiB",
    progress: Progress | None = None,
) -> Copied:
    """Copy a commit of a table or run to another folder, verifying every record.

    Without `dtype` and `optimizer` files are copied, and a second copy into the same folder brings only what is new.
    Files that never change again are shared through hard links where both folders are on one filesystem: such a copy
    costs no space until the source moves on, and outlives whatever is done to the source, but not a damaged disk.
    The commit is there all at once: a copy that is interrupted leaves the folder as it was. The source may be written
    meanwhile; its last commit is copied.

    A copy has its table's uuid, since every checksum contains it: copies are told apart by where they lie. One that
    is opened for writing and commits goes its own way, and is no longer copied into.

    With `dtype` or `optimizer` the rows are rewritten, streaming, into a table of its own: weights rounded to nearest,
    the slots both optimizers have carried over, the others new. ``dtype="bfloat16", optimizer=bb.SGD()`` is the
    smallest form for serving.

    Args:
        src: folder of a table or of a run.
        dst: folder to make, or an earlier copy of the same table or run; rewriting wants one that is not there.
        snapshot: the kept commit to copy; default: the last commit.
        dtype: of the weights in the copy; default: as in the source.
        optimizer: of the copy; default: the source's, with its state.
        link: False: always write bytes anew, as for another disk.
        ram: budget for rewriting rows; half of it reads, half writes.
        progress: called with (done, in all), a few times a second: bytes, or rows where rows are rewritten.

    Returns:
        What was copied.

    Raises:
        FileNotFoundError, FormatError: neither a table nor a run at `src`. FileExistsError: something else is at `dst`.
        ValueError: no such snapshot (lists those there are), or `dst` is a copy of something else or went its own way.
        CorruptionError: a record of the source fails its checksum. TableLockedError: somebody writes `dst`.
        MemoryError: `ram` is too small to rewrite rows; says how much is needed. OSError: the disk is full or failing.
        Whatever is raised, `dst` is as it was.

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
    part = _part_of(target)
    try:
        if is_run:
            rewritten = rewrite_run(source, part, snapshot, dtype, optimizer, ram_bytes, progress)
        else:
            rewritten = _rewrite_table(source, part, snapshot, dtype, optimizer, ram_bytes, progress)
        part.rename(target)
        sync_directory(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
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
            shutil.rmtree(target, ignore_errors=True)  # holds no commit: it would be in the way of the next try
        raise
    return done


def _part_of(target: Path) -> Path:
    """Where a rewritten copy grows until it is complete. What an interrupted one left there goes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    require_real(part)
    return part


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
        spec = rewritten_spec(table, dtype, optimizer)
        with create(part, ram=ram_bytes - ram_bytes // 2, **spec) as copied:
            rows = rewrite_rows(table, copied, progress)
            copied.commit(meta=table.meta, keep=snapshot)
        return Rewritten(table.epoch, rows)
