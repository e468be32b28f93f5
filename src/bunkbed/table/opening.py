"""Making and opening tables: arguments, budgets, and the one writer a path has."""

from __future__ import annotations

import atexit
import errno
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from bunkbed import _native
from bunkbed.core import init as _init
from bunkbed.core import optim as _optim
from bunkbed.core.arguments import as_whole
from bunkbed.core.budget import Budget, parse_bytes
from bunkbed.core.typed import typed
from bunkbed.errors import BunkbedError, FormatError, ReadOnlyError
from bunkbed.files.run_files import is_sharded
from bunkbed.table.facts import DTYPES
from bunkbed.table.table import Table
from bunkbed.table.uncommitted import warn_when_it_goes

DEFAULT_RAM = "1GiB"
_MAX_DIM = 1 << 24
_LARGEST = {"float32": 3.4028e38, "bfloat16": 3.3895e38, "float16": 65504.0}

#: The tables this process writes, by resolved path: opening one again gives the same object.
_writers: weakref.WeakValueDictionary[tuple[int, str], Table] = weakref.WeakValueDictionary()
#: By resolved path, a lock held while a writer there is looked for, made, opened or closed. Taken before every other
#: lock, that of a sharded table before those of its shards.
_path_locks: weakref.WeakValueDictionary[tuple[int, str], Any] = weakref.WeakValueDictionary()
_writers_lock = threading.Lock()  # guards both


@atexit.register
def _shut_down() -> None:
    """Let no daemon thread be in the core, or come to it, while the interpreter goes; then warn of what is lost."""
    _native.close_door()
    while _native.num_inside():
        time.sleep(0.001)
    for table in list(_writers.values()):
        warn_when_it_goes(table)


def make_spec(
    dim: int,
    num_rows: int | None,
    optimizer: _optim.Optimizer | None,
    init: _init.Initializer | None,
    seed: int,
    dtype: str,
    belongs_to_run: bool,
    is_scratch: bool = False,
) -> _native.TableSpec:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    definition = _optim.require_optimizer(_optim.Adam() if optimizer is None else optimizer)
    initializer = _init.require_initializer(_init.Normal(std=0.01) if init is None else init)
    kind, a, b = initializer.native()
    # Largest magnitudes that the initialiser gives, and that the dtype takes; Normal's is 5.77 std.
    largest = 5.77 * a if kind == "normal" else max(abs(a), abs(b))
    if largest >= _LARGEST[dtype]:
        raise ValueError(
            f"init={initializer!r} gives values up to {largest:.6g}, beyond the largest {dtype}, {_LARGEST[dtype]:.6g}"
        )
    return _native.TableSpec(
        num_rows=-1 if num_rows is None else as_whole(num_rows, what="num_rows", low=1, high=2**63 - 1),
        dim=as_whole(dim, what="dim", low=1, high=_MAX_DIM),
        dtype=DTYPES.index(dtype),
        init_kind=kind,
        init_a=a,
        init_b=b,
        seed=as_whole(seed, what="seed", low=0, high=2**64 - 1),
        optimizer=definition.native(),
        belongs_to_run=belongs_to_run,
        is_scratch=is_scratch,
    )


def resolve(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a string or a path, got {path!r}")
    return Path(path).expanduser().absolute()


def parse_disk(disk: int | str | None, mode: str | None) -> int:
    """Bytes of the limit, 0 for none. `mode`: how the table is opened, None for one in RAM only."""
    if disk is None:
        return 0
    if mode is None:
        raise ValueError("disk= limits a table's files, and a table in RAM only has none")
    if mode == "r":
        raise ValueError('disk= limits what a writer\'s files take; a reader (mode="r", snapshot=) writes none')
    return parse_bytes(disk)


def path_lock(place: Path | None) -> AbstractContextManager[Any]:
    """Within, no other thread makes, opens or closes a writer of the table at `place`. None: not one with files."""
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
    ram: int | str | Budget | None,
    open_core: Callable[[int], _native.Table],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Open the core of a table with its bytes of `ram`, and `check` it."""
    if isinstance(ram, Budget):
        table._ram_bytes = ram.reserve(table)
        table._budget = ram
    elif ram is None:
        table._ram_bytes = 0 if table.path is None else parse_bytes(DEFAULT_RAM)
    else:
        table._ram_bytes = parse_bytes(ram)
    try:
        table._native = open_core(table._ram_bytes)
    except BaseException:
        if table._budget is not None:
            table._budget.leave(table)
        raise
    try:
        table._start(table._native)
        table._stored_hint = 0
        check()
        if table._budget is not None:
            table._budget.join(table)
        if table.mode == "w":
            register_writer(table)
    except BaseException:
        table._close()
        raise


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
    ram: int | str | Budget | None = None,
    durability: Literal["durable", "scratch"] = "durable",
    disk: int | str | None = None,
    _run: Any = None,
    _name: str | None = None,
) -> Table:
    """Create a table.

    Instant whatever the number of rows, and writes next to nothing: an untouched row is a function of (seed, id).

    Args:
        path: directory to make; None keeps the table in RAM only.
        dim: weights of a row, at least 1.
        num_rows: ids lie in ``[0, num_rows)``; None: any non-negative int64, a row comes into being when first trained.
        optimizer: `bunkbed.SGD`, `Adagrad`, `RowwiseAdagrad` or `Adam`; default ``Adam(lr=1e-3)``.
        init: `bunkbed.Zeros`, `Normal` or `Uniform`; default ``Normal(std=0.01)``.
        seed: of the initialiser and of stochastic rounding, in [0, 2**64).
        dtype: of the stored weights: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        ram: hard budget in bytes, as ``"2GiB"``, or a shared `Budget`; default 1 GiB, or no bound in RAM only.
        durability: ``"scratch"``: a table to throw away. The disk is only its overflow: no row is synced,
            `Table.commit` counts the epoch, remembers `meta` and writes nothing, there are no snapshots, readers or
            copies, and every row is gone once the table is closed or its process ends, however it ends. The bits are a
            durable table's. The directory is marked: opening it is an error, creating a table there again begins an
            empty one.
        disk: most bytes that the table's files may take while this writer has it open, as ``"20GiB"``; default: no
            limit. It must hold the rows twice, packed, and some more: for the last commit, and for what is written
            after it (four times for a table of a `Run`, once for a scratch table); kept snapshots come on top. With
            three times the rows or more it costs nothing; with less, steps and commits wait for compaction. See
            `Table.stats`: ``disk_bytes``, ``snapshot_bytes``.

    Returns:
        The open table; this process is its writer.

    Raises:
        FileExistsError: something is there already, other than what a scratch table left. ValueError, TypeError: an
        argument out of range; a budget or limit too small to work at all (says how much is needed).
    """
    disk_bytes = parse_disk(disk, None if path is None else "w")
    if durability not in ("durable", "scratch"):
        raise ValueError(f'durability must be "durable" or "scratch", got {durability!r}')
    is_scratch = durability == "scratch"
    if is_scratch and path is None:
        raise ValueError('durability="scratch" needs a path to overflow to: a table in RAM only has nothing on disk')
    if is_scratch and _run is not None:
        raise ValueError('a run\'s tables are committed together, and durability="scratch" keeps nothing: bb.create it')
    spec = make_spec(dim, num_rows, optimizer, init, seed, dtype, _run is not None, is_scratch)
    place = None if path is None else resolve(path)
    if place is not None and _has_sharded(place):
        raise FileExistsError(
            errno.EEXIST, "there is a sharded table; open it with bunkbed.open, or give another path", str(place)
        )
    table = Table(spec, place, "w")
    table._name = _name or table._name
    table._run = _run
    path = "" if place is None else str(place)
    with path_lock(place):
        _start(table, ram, lambda ram_bytes: _native.create(path, table.name, spec, ram_bytes, disk_bytes))
    return table


def register_writer(table: Table) -> None:
    """From now on opening its path for writing, in this process, gives this very table. Call under `path_lock`."""
    if table.path is not None:
        table._opening = path_lock(table.path)
        with _writers_lock:
            _writers[(os.getpid(), str(table.path.resolve()))] = table


@dataclass(frozen=True)
class Wanted:
    """What `bunkbed.open` is asked for, with its `create` taken apart.

    Attributes:
        create: arguments of `create` but for `ram` and `disk`, which are in `ram` and `disk`.
        disk_bytes: the limit in bytes, 0 for none.
    """

    mode: Literal["w", "r"]
    ram: int | str | Budget | None
    snapshot: str | None
    create: dict[str, Any] | None
    optimizer: _optim.Optimizer | None
    disk: int | str | None
    disk_bytes: int

    @classmethod
    def of(
        cls,
        mode: Literal["w", "r"],
        *,
        ram: int | str | Budget | None = None,
        snapshot: str | None = None,
        create: dict[str, Any] | None = None,
        optimizer: _optim.Optimizer | None = None,
        disk: int | str | None = None,
    ) -> Self:
        """The arguments of `bunkbed.open`, checked.

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
            unknown = set(create) - {"dim", "num_rows", "optimizer", "init", "seed", "dtype", "durability"}
            if unknown:
                raise TypeError(f"create= takes the arguments of bb.create, got {sorted(unknown)[0]!r}")
            if optimizer is not None:
                create.setdefault("optimizer", optimizer)
        return cls(mode, ram, snapshot, create, optimizer, disk, disk_bytes)

    @property
    def writable(self) -> bool:
        """Whether it is for a writer."""
        return self.mode == "w" and self.snapshot is None


def open_table(
    place: Path, wanted: Wanted, *, run: Any = None, epoch: int | None = None, name: str | None = None
) -> Table:
    """Open the plain table at `place`; see `bunkbed.open`, which opens sharded ones too.

    Args:
        place: the table's directory, absolute.
        wanted: what is asked for.
        run: the `bunkbed.Run` that commits it.
        epoch: the commit to open; default: the last one, or the snapshot's.
        name: what messages call it; default: the last part of its path.
    """
    with path_lock(place if wanted.writable else None):
        if wanted.create is not None and not is_table(place):
            if not wanted.writable:
                raise FileNotFoundError(f"no table at {place} to read")
            return create(place, ram=wanted.ram, disk=wanted.disk, _run=run, _name=name, **wanted.create)
        if wanted.writable:
            present = open_writer(place)
            if present is not None:
                compare_with(present, {**(wanted.create or {}), "disk": wanted.disk}, wanted.optimizer)
                present._opens += 1
                return present
        if not place.exists():
            raise FileNotFoundError(
                f"no table at {place}; make one with bb.create, or give open() create=dict(dim=...)"
            )
        if not place.is_dir():
            raise FormatError(f"{place} is not a bunkbed table: it is not a directory")
        snapshot = wanted.snapshot or ""
        spec, stored_rows = _native.read_spec(str(place), snapshot, epoch)
        if spec.is_scratch and wanted.writable and wanted.create is not None and epoch is None:
            return create(
                place, ram=wanted.ram, disk=wanted.disk, _run=run, _name=name, **wanted.create
            )  # an error while another process has it
        table = Table(spec, place, "w" if wanted.writable else "r")
        table._name = name or table._name
        table._run = run
        table._stored_hint = spec.minimum_ram(stored_rows, True)
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
    """`is_sharded`, of which damage is no concern."""
    try:
        return is_sharded(place)
    except (BunkbedError, OSError):
        return False


def is_table(place: Path) -> bool:
    return place.is_dir() and any(entry.name.startswith("manifest-") for entry in place.iterdir())


def compare_with(table: Table, create: dict[str, Any] | None, optimizer: _optim.Optimizer | None) -> None:
    """Each value given must be the table's; hyperparameters are taken over."""
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
    if definition is None:
        return
    _optim.check_same_slots(table.name, table.optimizer, _optim.require_optimizer(definition))
    if definition != table.optimizer:
        if table.mode == "r":
            raise ReadOnlyError(f"table '{table.name}' is open for reading; its hyperparameters cannot change")
        table.optimizer = definition


def open_writer(place: Path) -> Table | None:
    """The table at `place` if this process has it open for writing. Call under `path_lock`, for it to stay so."""
    with _writers_lock:
        present = _writers.get((os.getpid(), str(place.resolve())))
    return None if present is None or present.closed else present
