"""`ShardedTable`: one table whose rows are divided among several directories, for instance one on each SSD."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import ArrayLike

from bunkbed import _native
from bunkbed.core import init as _init
from bunkbed.core import optim as _optim
from bunkbed.core.arguments import Floats, Ids, as_ids
from bunkbed.core.budget import Budget, format_bytes, parse_bytes
from bunkbed.core.typed import typed
from bunkbed.core.types import Json
from bunkbed.errors import BunkbedError, CorruptionError, FormatError
from bunkbed.files.run_files import RunFiles, RunManifest
from bunkbed.files.sharding import MAX_SHARDS, Sharding, shard_name, shards_of
from bunkbed.machine.rates import Machine, remembered
from bunkbed.run.run import Run
from bunkbed.sharded.base.rows import ShardedBatch
from bunkbed.sharded.core import ShardedCore
from bunkbed.table import opening
from bunkbed.table.definition import Definition
from bunkbed.table.room import warn_if_small
from bunkbed.table.table import Table
from bunkbed.table.uncommitted import warn_when_it_goes

_Path = str | os.PathLike[str]
#: How often a reader tries to open the newest commit; the writer may collect it in between.
_ATTEMPTS = 10


class ShardedTable(Table):
    """One table divided by a hash of the id over several directories, for instance one on each SSD.

    Made by `ShardedTable.create`, `ShardedTable.open` and, for the path of a sharded table, `bunkbed.open`. Has the
    methods of `bunkbed.Table`, with the same bits: the values of a row do not depend on its shard. Each row is in one
    shard. Large batches are looked up and updated in all shards in parallel.

    The directory holds a parent manifest, which names the commit of every shard. All shards commit, open, rewind and
    are copied together, and after a crash all are at the parent's last commit. Every update is a step of all shards,
    also of shards without a row in the batch, so there is one step count.

    An update changes all shards or none. A bad batch, a shard that cannot be written and a full `disk` limit are
    found before any shard changes. A shard may still fail after other shards applied their part (a stored record
    cannot be read, no memory for the directory). The shards then no longer agree. That call and every later one, also
    a commit, raise `BunkbedError`, until `rewind`, or closing with ``commit=False`` and opening again, goes back to a
    commit. A part of a step is never looked up or committed.

    In addition to `ram`, a call takes memory in proportion to its batch: a copy divided by shard, and the sums of its
    gradients. Owns the shards' files, the RAM budget that the shards share, and threads. Thread-safety, durability and
    closing: see `Table`.

    >>> import bunkbed as bb, numpy as np, tempfile
    >>> path = tempfile.mkdtemp() + "/user"
    >>> with bb.ShardedTable.create(path, shards=2, dim=2, num_rows=10, init=bb.Zeros(), ram="32MiB") as table:
    ...     table.update(np.array([3, 4]), np.ones((2, 2), np.float32))
    ...     epoch = table.commit(keep="first")
    >>> bb.open(path, mode="r")
    <bunkbed.ShardedTable 'user' at ...: 2 shards, 10 rows x 2 float32, Adam, step 1, commit 1>
    """

    core: ShardedCore
    _shards: tuple[Path, ...]

    # ---- Making and opening

    @classmethod
    @typed
    def create(
        cls,
        path: _Path,
        *,
        dim: int,
        shards: int | None = None,
        directories: Sequence[_Path] | None = None,
        num_rows: int | None = None,
        optimizer: _optim.Optimizer | None = None,
        init: _init.Initializer | None = None,
        seed: int = 0,
        dtype: str = "float32",
        ram: float | str | Budget | None = None,
        disk: float | str | None = None,
        expire: int | None = None,
        clock: Literal["step", "event"] = "step",
        max_rows: int | None = None,
        evict: Literal["oldest", "rarest", "smallest"] = "oldest",
        keep: int = 0,
        admit: float | None = None,
    ) -> Self:
        """Create a sharded table. Takes the same short time for any number of rows.

        Args:
            path: directory of the table: the parent manifest, and the shards where no `directories` are given.
            shards: number of shards, 1 to 1024; `bunkbed.reshard` changes it. Default: one for each of `directories`.
            directories: directories for the shards, used in turn; made when missing. Each shard gets a new folder
                ``shard-NNNN``. The manifest stores absolute paths, but relative ones below `path`, which may move.
            dim, num_rows, optimizer, init, seed, dtype: see `bunkbed.create`.
            ram: hard budget in bytes for all shards together, as ``"2GiB"``, or a shared `Budget`; default 1 GiB.
            disk: maximum bytes of the files of all shards, divided evenly; see `bunkbed.create`, where the facts for a
                table of a `Run` apply.
            expire, clock, max_rows, evict, keep: which rows `sweep` removes; see `Retention`. The bounds are those of
                the whole table.
            admit: see `Retention`. A row is admitted alike for every number of shards.

        Returns:
            The open table; this process is its writer.

        Raises:
            FileExistsError: a table is at `path`, or a shard's directory is not empty. ValueError, TypeError: an
            argument out of range. MemoryError: `ram` is too small for the shards; says how much is needed.
        """
        place = opening.resolve(path)
        with opening.path_lock(place):
            places = _new_places(place, shards, directories)
            disk_bytes = 0 if disk is None else parse_bytes(disk)
            definition = Definition(
                dim, num_rows, optimizer, init, seed, dtype, "durable", expire, clock, max_rows, evict, keep, admit
            )
            spec = definition.spec(belongs_to_run=True)
            facts = {**definition.arguments(), **_limit_of_each(disk_bytes, len(places))}
            budget = ram if isinstance(ram, Budget) else Budget(opening.DEFAULT_RAM if ram is None else ram)
            _require_room(place.name, budget, spec, len(places))
            _require_free(place, places)
            warn_if_small(place.name, spec, budget.free_bytes(), shards=len(places))
            is_new = not place.exists()
            run = Run(place, budget, _shards_of=place.name)
            made: list[Path] = []
            try:
                _require_free(place, places)  # again, because the run now has the writer's lock
                run.folder.places = _records_of(place, places)
                for index, shard in enumerate(places):
                    _native.make_directories(str(shard.parent))
                    run.table(shard_name(index), create=facts)
                    made.append(shard)
                tables = run.tables
                sharding = Sharding.new([table.uuid for table in tables.values()])
                # The first parent manifest: from here on the table can be opened.
                epochs = {name: table.epoch for name, table in tables.items()}
                run.publish(RunManifest(tables=epochs, places=run.folder.places, sharding=sharding))
                return cls._of(run, sharding, disk_bytes, ram)
            except BaseException:
                run.close(commit=False)
                for folder in [*made, *([place] if is_new else [])]:
                    shutil.rmtree(folder, ignore_errors=True)
                raise

    @classmethod
    @typed
    def open(
        cls,
        path: _Path,
        *,
        mode: Literal["w", "r"] = "w",
        ram: float | str | Budget | None = None,
        snapshot: str | None = None,
        create: Json | None = None,
        optimizer: _optim.Optimizer | None = None,
        disk: float | str | None = None,
        directories: Sequence[_Path] | None = None,
    ) -> Self:
        """Open a sharded table at its last commit.

        Opening a path that this process already writes returns the same table; each opening needs its own `close`.

        Args:
            path: directory of the table.
            mode, ram, snapshot, optimizer, disk: see `bunkbed.open`.
            create: arguments of `ShardedTable.create`, used if there is no table; otherwise each given value but
                `directories` must be the table's.
            directories: the new directories of moved shards, in the order of `create`. A writer stores them.

        Returns:
            The open table.

        Raises:
            FileNotFoundError: `path` does not exist, or a shard's directory is missing (names it). FormatError: `path`
            is not a sharded table, or a directory does not hold its shard. TableLockedError, CorruptionError,
            ValueError: see `bunkbed.open`.
        """
        place = opening.resolve(path)
        if mode not in ("w", "r"):
            raise ValueError(f'mode must be "w" or "r", got {mode!r}')
        writable = mode == "w" and snapshot is None
        wanted = dict(create or {})
        if optimizer is not None:
            wanted.setdefault("optimizer", optimizer)
        ram = wanted.pop("ram", None) if ram is None else ram
        disk = wanted.pop("disk", None) if disk is None else disk
        disk_bytes = opening.parse_disk(disk, "w" if writable else "r")
        with opening.path_lock(place if writable else None):
            files = RunFiles(place, "sharded table")
            if not files.epochs():
                if create is not None and writable and not opening.is_table(place):
                    return cls.create(place, ram=ram, disk=disk, **wanted)
                if place.exists():
                    raise FormatError(f"{place} is not a sharded table; open a plain one with bb.open")
                raise FileNotFoundError(f"no sharded table at {place}; make one with bb.ShardedTable.create")
            sharding = files.load_newest().sharding
            if sharding is None:
                raise FormatError(f"{place} is a run of tables, not one sharded table; open it with bb.Run")
            shards = wanted.pop("shards", None)
            if shards not in (None, len(sharding.shards)):
                raise ValueError(f"table '{place.name}': it has {len(sharding.shards)} shards, {shards} was asked for")
            wanted.pop("directories", None)
            present = opening.open_writer(place) if writable else None
            if present is not None:
                if not isinstance(present, cls):
                    raise BunkbedError(
                        f"{place} is open in this process as a table that several processes train; use the `table` of "
                        'its layer, or open it with mode="r"'
                    )
                opening.open_again(present, {**wanted, "disk": disk}, optimizer)
                return present
            for attempt in range(_ATTEMPTS):
                run = Run(place, ram, mode=mode, snapshot=snapshot, _shards_of=place.name)
                try:
                    _open_shards(run, directories, disk_bytes)
                    table = cls._of(run, sharding, disk_bytes, ram)
                    break
                except BaseException as error:
                    run.close(commit=False)
                    # A concurrent writer may have collected the commit: there is a newer commit.
                    was_collected = isinstance(error, FileNotFoundError) and run.epoch not in files.epochs()
                    if not was_collected or attempt == _ATTEMPTS - 1:
                        raise
            try:
                opening.compare_with(table, wanted, optimizer)
            except BaseException:
                table.release()
                raise
            return table

    @classmethod
    def _of(cls, run: Run, sharding: Sharding, disk_bytes: int, ram: float | str | Budget | None) -> Self:
        """Return the table of a run whose shards are open."""
        core = ShardedCore(run.path.name, run, sharding, disk_bytes)
        table = cls(core.tables()[0].spec, run.path, run.mode)
        table._begin(core, run, ram)
        return table

    def _begin(self, core: ShardedCore, run: Run, ram: float | str | Budget | None) -> None:
        shards = core.tables()
        self._shards = tuple(shard.path for shard in shards if shard.path is not None)
        for shard in shards:
            shard.warns_of_loss = False  # the sharded table warns instead
        self._ram_bytes = 0 if isinstance(ram, Budget) else run.budget.total_bytes
        self._looked_s, self._seen = run._looked_s, run._seen
        self._start(core)
        if run.mode == "w":
            opening.register_writer(self)

    _batch_class = ShardedBatch

    # ---- Facts of its own

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self._shards)

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directory of each shard."""
        return self._shards

    @property
    def ram_bytes(self) -> int:
        """The RAM budget in bytes; with a shared `Budget`, the present shares of the shards."""
        return self._ram_bytes or sum(shard.ram_bytes for shard in self.core.tables())

    # Internal: the counters of each shard, in the order of `directories`.
    def shard_stats(self) -> list[dict[str, int | float]]:
        return [shard.stats() for shard in self.core.tables()]

    def shards_of(self, ids: ArrayLike) -> Ids:
        """Return the number of the shard that has each row. ids: int64[...]; returns int64[...].

        Raises:
            IndexError, TypeError: see `lookup`.
        """
        array = as_ids(ids, table=f"table '{self._name}'")
        self.core.check_ids(array.reshape(-1))
        return shards_of(array, self.num_shards).astype(np.int64)

    def __repr__(self) -> str:
        text = super().__repr__().replace("bunkbed.Table", "bunkbed.ShardedTable", 1)
        return (
            text
            if self._closed
            else text.replace(f"at {self._path}:", f"at {self._path}: {self.num_shards} shards,", 1)
        )

    def _newest(self) -> int:
        self._reader_label()
        return self.core.newest()

    def _file_of(self, number: int) -> Path:
        return self.core.file_of(number)

    def _scan(self, fields: Sequence[tuple[int, int]], chunk: int) -> Iterator[tuple[Ids, list[Floats]]]:
        with self._reading():
            scans = self.core.scans([index for index, _ in fields])
        for scan in scans:
            yield from self._rows_of(scan, fields, chunk)

    def _machine(self) -> Machine | None:
        """Return the rates of all disks together. The disk with the most shards for its speed sets the limit."""
        disks: dict[int, list[Path]] = {}
        for shard in self._shards:
            disks.setdefault(shard.stat().st_dev, []).append(shard)
        found = [(remembered(places[0]), len(places) / self.num_shards) for places in disks.values()]
        known = [(machine, share) for machine, share in found if machine is not None]
        if len(known) < len(found):
            return None

        def together(rates: list[tuple[float | None, float]]) -> float | None:
            return (
                None if any(rate is None for rate, _ in rates) else min((rate or 0.0) / share for rate, share in rates)
            )

        return replace(
            known[0][0],
            read_iops=together([(machine.read_iops, share) for machine, share in known]),
            read_bytes_per_s=together([(machine.read_bytes_per_s, share) for machine, share in known]),
            write_bytes_per_s=together([(machine.write_bytes_per_s, share) for machine, share in known]),
        )

    def __del__(self) -> None:
        if sys.is_finalizing() or self.core is None:
            return
        warn_when_it_goes(self)
        if (
            not self._closed
        ):  # run and tables are a reference cycle, so their files would stay locked until Python's garbage collection
            with contextlib.suppress(Exception):
                self.core.close()


def _new_places(place: Path, shards: int | None, directories: Sequence[_Path] | None) -> list[Path]:
    """Return the directory of each shard of a new table."""
    if isinstance(directories, (str, os.PathLike)):
        raise TypeError(f"directories must be a list of paths, got {directories!r}")
    if directories is not None and not directories:
        raise ValueError("directories is empty; leave it out to have all shards below the path")
    if shards is None and directories is None:
        raise ValueError("give shards=, a number, or directories=, where they are to lie")
    roots = None if directories is None else [opening.resolve(directory) for directory in directories]
    count = len(roots or ()) if shards is None else shards
    if not 1 <= count <= MAX_SHARDS:
        raise ValueError(f"shards must be in [1, {MAX_SHARDS}], got {count}")
    if roots is None:
        roots = [place / "tables"]
    if count < len(roots):
        raise ValueError(f"{count} shards leave {len(roots) - count} of {len(roots)} directories empty; give fewer")
    return [roots[index % len(roots)] / shard_name(index) for index in range(count)]


def _records_of(place: Path, shards: list[Path]) -> dict[str, str]:
    """Return the manifest's paths of shards that are not in ``tables/NAME``."""
    records = {}
    for index, shard in enumerate(shards):
        record = str(shard.relative_to(place) if shard.is_relative_to(place) else shard)
        if record != f"tables/{shard_name(index)}":
            records[shard_name(index)] = record
    return records


def _limit_of_each(disk_bytes: int, shards: int) -> dict[str, int]:
    return {"disk": max(1, disk_bytes // shards)} if disk_bytes else {}


def _require_room(name: str, budget: Budget, spec: _native.TableSpec, shards: int) -> None:
    least = shards * spec.minimum_ram(0, True)
    if budget.total_bytes < least:
        raise MemoryError(
            f"table '{name}': a budget of {format_bytes(budget.total_bytes)} is too small for {shards} shards; they "
            f"need at least {least} bytes ({format_bytes(least)})"
        )


def _require_free(place: Path, shards: list[Path]) -> None:
    if RunFiles(place).epochs() or opening.is_table(place):
        raise FileExistsError(f"a table exists already at {place}; open it with bb.open, or remove the directory")
    for shard in shards:
        if shard.exists() and (not shard.is_dir() or any(shard.iterdir())):
            raise FileExistsError(
                f"table '{place.name}': {shard} is there already; remove it if nothing needs it, or give another "
                "directory"
            )


def _require_shard(run: Run, name: str) -> None:
    place = run.folder.table_path(name)
    if not place.is_dir():
        raise FileNotFoundError(
            f"table '{run.path.name}' at {run.path}: the directory of {name}, {place}, is missing; mount or move it "
            "back, or say where the shards lie now: bb.ShardedTable.open(path, directories=[...])"
        )


def _open_shards(run: Run, directories: Sequence[_Path] | None, disk_bytes: int) -> None:
    """Open every shard at its path in the manifest, or in `directories`, which a writer stores in the manifest."""
    sharding = run.manifest.sharding
    if sharding is None:
        raise CorruptionError(f"{run.path}: commit {run.epoch} does not say that it is a sharded table, newer ones do")
    if directories is not None:
        run.folder.places = _records_of(run.path, _new_places(run.path, len(sharding.shards), directories))
    for name in sharding.names():
        _require_shard(run, name)
        run.table(name, create=_limit_of_each(disk_bytes, len(sharding.shards)) or None)
    places = run.folder.places
    if run.mode == "w" and places is not None and places != run.manifest.places:
        run.publish(replace(run.manifest, epoch=run.epoch + 1, keep="", copied=False, places=places))
