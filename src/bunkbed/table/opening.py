"""Make and open tables: check the arguments, join a budget, keep one writer for each path."""

from __future__ import annotations

import atexit
import errno
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from bunkbed import _native
from bunkbed.core import init as _init
from bunkbed.core import optim as _optim
from bunkbed.core.budget import COUNTED_BYTES, Budget, parse_bytes
from bunkbed.core.retention import Retention
from bunkbed.core.typed import typed
from bunkbed.core.types import Json
from bunkbed.errors import BunkbedError, FormatError, ReadOnlyError
from bunkbed.files.run_files import is_sharded
from bunkbed.machine.rates import remembered
from bunkbed.table.definition import Definition
from bunkbed.table.room import warn_if_small
from bunkbed.table.table import Table
from bunkbed.table.uncommitted import warn_when_it_goes

DEFAULT_RAM = "1GiB"

#: The tables that this process writes, by resolved path: opening a path again returns the same object.
_writers: weakref.WeakValueDictionary[tuple[int, str], Table] = weakref.WeakValueDictionary()
#: The path locks by resolved path: each guards looking for, making, opening and closing a writer. A path lock comes
#: before every other lock, and that of a sharded table before those of its shards.
_path_locks: weakref.WeakValueDictionary[tuple[int, str], Any] = weakref.WeakValueDictionary()
_writers_lock = threading.Lock()  # guards both


@atexit.register
def _shut_down() -> None:
    """Keep daemon threads out of the core while the interpreter exits; then warn of changes that are lost."""
    _native.close_door()
    while _native.num_inside():
        time.sleep(0.001)
    for table in list(_writers.values()):
        warn_when_it_goes(table)


def resolve(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a string or a path, got {path!r}")
    return Path(path).expanduser().absolute()


def parse_disk(disk: float | str | None, mode: str | None) -> int:
    """Return the limit in bytes, 0 for none. `mode`: how the table is opened; None for a table in RAM only."""
    if disk is None:
        return 0
    if mode is None:
        raise ValueError("disk= limits a table's files, and a table in RAM only has none")
    if mode == "r":
        raise ValueError('disk= limits what a writer\'s files take; a reader (mode="r", snapshot=) writes none')
    return parse_bytes(disk)


def path_lock(place: Path | None) -> AbstractContextManager[object]:
    """Return the lock for making, opening and closing a writer at `place`; no lock for None (a table without files)."""
    if place is None:
        return nullcontext()
    key = os.getpid(), str(place.resolve())
    with _writers_lock:
        lock = _path_locks.get(key)
        if lock is None:
            lock = _path_locks[key] = threading.RLock()
        return lock


def _start(
    table: Table,
    ram: float | str | Budget | None,
    open_core: Callable[[int], _native.Table],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Open the core of `table` with its part of `ram`, and call `check`."""
    if isinstance(ram, Budget):
        table._ram_bytes = ram.reserve(table)
        table._budget = ram
    else:
        table._ram_bytes = _most_bytes(ram, table.path)
    try:
        if table.mode == "r":
            table._note_newest()
        table.core = open_core(table._ram_bytes)
    except BaseException:
        if table._budget is not None:
            table._budget.leave(table)
        raise
    try:
        _plan_reads(table)
        table._start(table.core)
        table._stored_hint = 0
        check()
        if table._budget is not None:
            table._budget.join(table)
        if table.mode == "w":
            register_writer(table)
    except BaseException:
        table.release()
        raise


def _most_bytes(ram: float | str | Budget | None, place: Path | None) -> int:
    """Return the bytes of a budget that a new member could have; 0: no bound."""
    if isinstance(ram, Budget):
        return ram.free_bytes()
    if ram is None:
        return 0 if place is None else parse_bytes(DEFAULT_RAM)
    return parse_bytes(ram)


def _plan_reads(table: Table) -> None:
    """Tell the core by which gap it reads records together, if the disk of the table was measured."""
    machine = None if table.path is None else remembered(table.path)
    if machine is not None and machine.read_gap is not None:
        table.plain_core.set_read_gap(machine.read_gap)


@typed
def create(
    path: str | os.PathLike[str] | None,
    *,
    dim: int,
    num_rows: int | None = None,
    optimizer: _optim.Optimizer | None = None,
    init: _init.Initializer | None = None,
    seed: int = 0,
    dtype: str = "float32",
    ram: float | str | Budget | None = None,
    durability: Literal["durable", "scratch"] = "durable",
    disk: float | str | None = None,
    expire: int | None = None,
    clock: Literal["step", "event"] = "step",
    max_rows: int | None = None,
    evict: Literal["oldest", "rarest", "smallest"] = "oldest",
    keep: int = 0,
    admit: float | None = None,
    _run: Any = None,
    _name: str | None = None,
    _make: Callable[..., Table] = Table,
    _warns: bool = True,
    _identity: tuple[bytes, int] | None = None,
) -> Table:
    """Create a table.

    Takes the same short time for any number of rows: an untouched row is a function of (seed, id), and is not written.

    Args:
        path: directory to make; None keeps the table in RAM only.
        dim: weights of a row, at least 1.
        num_rows: ids are in ``[0, num_rows)``; None: any non-negative int64.
        optimizer: `bunkbed.SGD`, `Adagrad`, `RowwiseAdagrad` or `Adam`; default ``Adam(lr=1e-3)``.
        init: `bunkbed.Zeros`, `Normal` or `Uniform`; default ``Normal(std=0.01)``.
        seed: of the initialiser and of stochastic rounding, in [0, 2**64).
        dtype: of the stored weights: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        ram: hard budget in bytes, as ``"2GiB"``, or a shared `Budget`; default 1 GiB, or no bound in RAM only. A
            warning says how many rows it has room for, where these are not all; see `minimum_ram`.
        durability: ``"scratch"``: a temporary table. Its files only hold rows that do not fit in RAM, and are not
            synced. `Table.commit` counts the epoch, keeps `meta` and writes nothing. There are no snapshots, readers
            or copies. Every row is lost when the table is closed or its process ends. The rows have the same bits as
            in a durable table. The directory is marked: opening it is an error, creating a table there again makes an
            empty one.
        disk: maximum bytes of the table's files while this writer has it open, as ``"20GiB"``; default: no limit. It
            must hold the packed rows twice and some more: for the last commit, and for the changes after it (four
            times for a table of a `Run`, once for a scratch table). Kept snapshots need space in addition. A limit of
            three times the rows or more costs no time; with less, steps and commits wait for compaction. See
            `Table.stats`: ``disk_bytes``, ``snapshot_bytes``.
        expire, clock, max_rows, evict, keep: which rows `Table.sweep` removes; see `Retention`. For a table of any id.
        admit: the probability with which a step stores a new row, or the number of steps that name a row until it is
            stored; see `Retention`. For a table of any id.

    Returns:
        The open table; this process is its writer.

    Raises:
        FileExistsError: `path` is neither an empty directory nor left from a scratch table. ValueError, TypeError: an
        argument out of range; a budget or limit that is too small for any work (the message says how much is needed).
    """
    disk_bytes = parse_disk(disk, None if path is None else "w")
    if durability not in ("durable", "scratch"):
        raise ValueError(f'durability must be "durable" or "scratch", got {durability!r}')
    if durability == "scratch" and path is None:
        raise ValueError('durability="scratch" needs a path to overflow to: a table in RAM only has nothing on disk')
    if durability == "scratch" and _run is not None:
        raise ValueError('a run\'s tables are committed together, and durability="scratch" keeps nothing: bb.create it')
    definition = Definition(
        dim, num_rows, optimizer, init, seed, dtype, durability, expire, clock, max_rows, evict, keep, admit
    )
    spec = definition.spec(belongs_to_run=_run is not None)
    place = None if path is None else resolve(path)
    if place is not None and _has_sharded(place):
        raise FileExistsError(
            errno.EEXIST, "there is a sharded table; open it with bunkbed.open, or give another path", str(place)
        )
    table = _make(spec, place, "w", name=_name, run=_run)
    if _warns:  # before anything is made, because a warning may be an error
        warn_if_small(table.name, spec, _most_bytes(ram, place), on_disk=place is not None)
    path = "" if place is None else str(place)
    with path_lock(place):
        _start(table, ram, lambda ram_bytes: _native.create(path, table.name, spec, ram_bytes, disk_bytes, _identity))
    return table


def register_writer(table: Table) -> None:
    """Make `open` return this table for a writer at its path, in this process. Requires: `path_lock` held."""
    if table.path is not None:
        table._opening = path_lock(table.path)
        with _writers_lock:
            _writers[(os.getpid(), str(table.path.resolve()))] = table


@dataclass(frozen=True)
class Wanted:
    """The checked arguments of `bunkbed.open`.

    Attributes:
        create: the arguments of `create` without `ram` and `disk`, which are in the fields `ram` and `disk`.
        disk_bytes: the limit in bytes, 0 for none.
    """

    mode: Literal["w", "r"]
    ram: float | str | Budget | None
    snapshot: str | None
    create: Json | None
    optimizer: _optim.Optimizer | None
    disk: float | str | None
    disk_bytes: int

    @classmethod
    def of(
        cls,
        mode: Literal["w", "r"],
        *,
        ram: float | str | Budget | None = None,
        snapshot: str | None = None,
        create: Json | None = None,
        optimizer: _optim.Optimizer | None = None,
        disk: float | str | None = None,
    ) -> Self:
        """Check the arguments of `bunkbed.open`.

        Raises:
            ValueError, TypeError: an unknown mode, a limit for a reader, an unknown argument in `create`.
        """
        if mode not in ("w", "r"):
            raise ValueError(f'mode must be "w" or "r", got {mode!r}')
        writable = mode == "w" and snapshot is None
        disk_bytes = parse_disk(disk, "w" if writable else "r")
        if create is not None:
            create = dict(create)
            own_ram = create.pop("ram", None)
            ram = own_ram if ram is None else ram
            own_disk = create.pop("disk", None)
            if disk is None and writable:
                disk, disk_bytes = own_disk, parse_disk(own_disk, "w")
            unknown = set(create) - {field.name for field in fields(Definition)}
            if unknown:
                raise TypeError(f"create= takes the arguments of bb.create, got {sorted(unknown)[0]!r}")
            if optimizer is not None:
                create.setdefault("optimizer", optimizer)
        return cls(mode, ram, snapshot, create, optimizer, disk, disk_bytes)

    @property
    def writable(self) -> bool:
        """True where the table is opened for writing."""
        return self.mode == "w" and self.snapshot is None


def open_table(
    place: Path,
    wanted: Wanted,
    *,
    run: Any = None,
    of_reader_run: bool = False,
    epoch: int | None = None,
    name: str | None = None,
    make: Callable[..., Table] = Table,
) -> Table:
    """Open the plain table at `place`; see `bunkbed.open`, which opens sharded ones too.

    Args:
        place: the table's directory, absolute.
        wanted: the arguments of `bunkbed.open`.
        run: the `bunkbed.Run` that commits the table.
        of_reader_run: whether a run for reading has the table, and moves it.
        epoch: the commit to open; default: the last one, or the snapshot's.
        name: the table's name in messages; default: the last part of its path.
        make: makes the object, with the arguments of `Table`; not called for a table that is open already.
    """
    with path_lock(place if wanted.writable else None):
        if wanted.create is not None and not is_table(place):
            if not wanted.writable:
                raise FileNotFoundError(f"no table at {place} to read")
            return create(place, ram=wanted.ram, disk=wanted.disk, _run=run, _name=name, **wanted.create)
        if wanted.writable:
            present = open_writer(place)
            if present is not None:
                open_again(present, {**(wanted.create or {}), "disk": wanted.disk}, wanted.optimizer)
                return present
        if not place.exists():
            remedy = "make one with bb.create, or give open() create=dict(dim=...)"
            raise FileNotFoundError(
                f"no table at {place}; "
                + (remedy if wanted.writable else "a reader waits until its writer has made it")
            )
        if not place.is_dir():
            raise FormatError(f"{place} is not a bunkbed table: it is not a directory")
        snapshot = wanted.snapshot or ""
        spec, stored_rows, counted = _native.read_spec(str(place), snapshot, epoch)
        if spec.is_scratch and wanted.writable and wanted.create is not None and epoch is None:
            return create(
                place, ram=wanted.ram, disk=wanted.disk, _run=run, _name=name, **wanted.create
            )  # raises while another process has the scratch table open
        table = make(spec, place, "w" if wanted.writable else "r", name=name, run=run)
        table._snapshot, table._is_of_reader_run = wanted.snapshot, of_reader_run
        table._stored_hint = spec.minimum_ram(stored_rows, True) + (COUNTED_BYTES * counted if wanted.writable else 0)
        _start(
            table,
            wanted.ram,
            lambda ram_bytes: _native.open(
                str(place),
                table.name,
                wanted.writable,
                ram_bytes,
                snapshot,
                epoch,
                run is not None,
                wanted.disk_bytes,
            ),
            lambda: compare_with(table, wanted.create, wanted.optimizer),
        )
        return table


def _has_sharded(place: Path) -> bool:
    """Return whether `place` has a sharded table; False where its files are damaged."""
    try:
        return is_sharded(place)
    except (BunkbedError, OSError):
        return False


def is_table(place: Path) -> bool:
    return place.is_dir() and any(entry.name.startswith("manifest-") for entry in place.iterdir())


def compare_with(table: Table, create: Json | None, optimizer: _optim.Optimizer | None) -> None:
    """Raise where a given value is not the table's; set the table's hyperparameters to those given."""
    wanted = dict(create or {})
    limit = parse_disk(wanted.get("disk"), "w")
    if limit not in (0, table.stats()["disk_limit_bytes"]):
        raise ValueError(
            f"table '{table.name}' is open already with disk={int(table.stats()['disk_limit_bytes'])} "
            f"(0: no limit), {limit} was asked for; close it first"
        )
    if optimizer is not None:
        wanted["optimizer"] = optimizer
    for key in ("dim", "num_rows", "dtype", "init", "seed", "durability"):
        if key in wanted and wanted[key] != getattr(table, key):
            raise ValueError(
                f"table '{table.name}': {key} is {getattr(table, key)!r} in the table, {wanted[key]!r} was asked for"
            )
    definition = wanted.get("optimizer")
    if definition is not None:
        _optim.check_same_slots(table.name, table.optimizer, _optim.require_optimizer(definition))
        if definition != table.optimizer and table.mode == "r":
            raise ReadOnlyError(f"table '{table.name}' is open for reading; its hyperparameters cannot change")
    _change_retention(table, wanted)
    if definition is not None and definition != table.optimizer:
        table.optimizer = definition


def _change_retention(table: Table, wanted: Json) -> None:
    given = {field.name: wanted[field.name] for field in fields(Retention) if field.name in wanted}
    present = table.retention
    if not given or (rules := replace(present, **given)) == present:
        return
    if table.mode == "r":
        raise ReadOnlyError(f"table '{table.name}' is open for reading; its rules cannot change")
    table.retention = rules


def open_again(present: Table, create: Json, optimizer: _optim.Optimizer | None) -> None:
    """Count one more opening of a table that `open_writer` found; see `compare_with`."""
    compare_with(present, create, optimizer)
    present._opens += 1


def is_shared(table: Table) -> bool:
    """Return whether two openings or more share a table."""
    return table._opens > 1


def open_writer(place: Path) -> Table | None:
    """Return the table at `place` if this process has it open for writing. Requires: `path_lock` held."""
    with _writers_lock:
        present = _writers.get((os.getpid(), str(place.resolve())))
    return None if present is None or present.closed else present
