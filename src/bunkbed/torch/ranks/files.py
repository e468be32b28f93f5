"""`RankFiles`: a directory of tables whose shards are divided over ranks, as one rank has it open.

The directory is that of an ordinary `bunkbed.ShardedTable`, which `bunkbed.open` opens in one process, or that of a
`bunkbed.Run` with sharded tables. Shard s of S belongs to rank s * W // S, which opens it as a table of its own. Rank 0
has the lock of the directory, and publishes manifests.

Hosts need not share a disk. Where a rank does not see the directory that rank 0 has, the directory of the same path on
its own host has the shards of that host's ranks. The first rank there has its lock, and keeps copies of rank 0's
manifests in it: a commit is one once it is on the disk of rank 0, and the copies follow.

Opening has steps that all ranks make together. An error on one rank is raised on all, and what was opened or made is
closed or removed again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bunkbed import _native
from bunkbed.core.budget import Budget, parse_bytes
from bunkbed.core.optim import Adam, Optimizer
from bunkbed.core.types import Json
from bunkbed.errors import CorruptionError, FormatError
from bunkbed.files.run_files import RunFiles, RunManifest
from bunkbed.files.sharding import MAX_SHARDS, Sharding, shard_name
from bunkbed.run.leftovers import forget_marks, mark_new, remove_leftover
from bunkbed.sharded.base.shards import Shards, of_each
from bunkbed.table import opening
from bunkbed.table.definition import Definition
from bunkbed.table.table import Table
from bunkbed.torch.ranks.copies import Copies
from bunkbed.torch.ranks.group import Ranks
from bunkbed.torch.ranks.plan import shards_of_rank

log = logging.getLogger("bunkbed.torch")

_OPENING = "opening a table"
#: The part of a `Budget` of one host that this process may use, by the budget.
_parts: weakref.WeakKeyDictionary[Budget, Budget] = weakref.WeakKeyDictionary()
_parts_lock = threading.Lock()


def budget_of_rank(ram: float | str | Budget | None, ranks: Ranks) -> Budget:
    """Return the budget of this process, where `ram` is that of all processes of its host; default 1 GiB."""
    if not isinstance(ram, Budget):
        return Budget(max(1, parse_bytes(opening.DEFAULT_RAM if ram is None else ram) // ranks.local_world))
    with _parts_lock:
        if ram not in _parts:
            _parts[ram] = Budget(max(1, ram.total_bytes // ranks.local_world))
        return _parts[ram]


@dataclass(frozen=True)
class _Opening:
    """How a rank opens or makes its shards of one table.

    Attributes:
        names: of all shards, in order.
        labels: prefix of their names in messages.
        new: arguments of `bunkbed.create`, where the table is new.
        stored: arguments of `bunkbed.open`, where it is not.
    """

    names: Sequence[str]
    labels: str
    new: Json | None
    stored: opening.Wanted


class RankFiles:
    """A directory, open for writing. Owns this rank's shards, and on rank 0 the lock of the directory.

    Attributes:
        folder: its files.
        manifest: the last commit; `FileEpochs` keeps it up to date.
        copies: of the manifests and dense files, on hosts that do not share rank 0's disk.
        shards: this rank's shards, by name.
        tables: the names of this rank's shards, by table; "" is the table of a directory of one.
        shardings: the records of tables that were made after the last commit, by name.
        pins: epochs of each shard that commits name, and that kept commits name.
    """

    def __init__(self, place: Path, ranks: Ranks, kind: str) -> None:
        self.place = place
        self.folder = RunFiles(place, kind)
        self.shards: dict[str, Table] = {}
        self.tables: dict[str, list[str]] = {}
        self.shardings: dict[str, Sharding] = {}
        self.pins: dict[str, tuple[set[int], set[int]]] = {}
        self.manifest = RunManifest()
        self._ranks = ranks
        self._lock: int | None = None
        self.copies = Copies(self.folder, ranks)
        self._is_apart = False  # whether this rank is on another disk than rank 0
        self._made: list[Path] = []

    # ---- A directory of one table

    @classmethod
    def open(
        cls,
        place: Path,
        ranks: Ranks,
        definition: Definition,
        optimizer: Optimizer | None,
        *,
        shards: int | None,
        ram: float | str | Budget | None,
        disk: float | str | None,
    ) -> RankFiles:
        """Open the sharded table at `place`, or make it there. Collective.

        Args:
            place: the directory, absolute and equal on all ranks.
            ranks: the processes that share it.
            definition: of a new table.
            optimizer: of a new table, or new hyperparameters.
            shards: the number of shards; default: that of the files, or of a new table one for each rank.
            ram: budget of all processes of this host.
            disk: limit of all files, divided over the shards.

        Raises:
            ValueError: the files have another number of shards. FormatError, CorruptionError, TableLockedError: see
            `bunkbed.open`. RanksError: another rank failed.
        """
        files = cls(place, ranks, "sharded table")
        try:
            files.enter(lambda: files._require_table(shards), one_disk=False)
            sharding = files.manifest.sharding
            count = (shards or ranks.world) if sharding is None else len(sharding.shards)
            budget = budget_of_rank(ram, ranks)
            limit = {} if disk is None else of_each({"disk": disk}, count)
            made_by = Adam(lr=1e-3) if optimizer is None else optimizer
            how = _Opening(
                [shard_name(index) for index in range(count)],
                f"{place.name}/",
                {**definition.arguments(), "optimizer": made_by, "ram": budget, **limit} if sharding is None else None,
                opening.Wanted.of("w", ram=budget, create=limit or None, optimizer=optimizer),
            )
            made = files._open_shards("", how)
            if sharding is None:
                if files._is_apart:  # rank 0 may have published the manifest and fail then: `undo` could not see that
                    files._made.clear()
                first = ranks.gather(_OPENING, lambda: files._publish_first(made))[0]
                ranks.gather(_OPENING, lambda: files.copies.update(first, map(int, first)))
                files.manifest = files.folder.load_newest()
        except BaseException:
            files.undo()
            raise
        return files

    @property
    def sharding(self) -> Sharding:
        """How the rows of a directory of one table are divided."""
        assert self.manifest.sharding is not None
        return self.manifest.sharding

    def _require_table(self, shards: int | None) -> None:
        """On rank 0: raise unless the directory may be opened or made as a table with so many shards."""
        place, world, sharding = self.place, self._ranks.world, self.manifest.sharding
        if not self.folder.epochs():
            if opening.is_table(place):
                raise FormatError(
                    f"{place} is a table of one process; divide it with: bunkbed reshard {shlex.quote(str(place))} "
                    f"--shards {world if shards is None else shards}"
                )
            if shards is not None and shards > MAX_SHARDS:
                raise ValueError(f"shards must be in [1, {MAX_SHARDS}], got {shards}")
            return
        if sharding is None:
            raise FormatError(f"{place} is a run of tables, not one sharded table; open it with bb.Run")
        stored = len(sharding.shards)
        if stored != (world if shards is None else shards):
            other = f", or start {stored} processes" if stored < world else f", or give shards={stored}"
            raise ValueError(
                f"table '{place.name}' at {place} has {stored} shards, and {world} processes want "
                f"{'one each' if shards is None else f'shards={shards}'}; divide it with: bunkbed reshard "
                f"{shlex.quote(str(place))} --shards {world if shards is None else shards}{other}"
            )

    def _publish_first(self, made: Sharding) -> dict[str, str]:
        """On rank 0: publish the first manifest, and return its text; from here on the table can be opened."""
        if not self._ranks.is_first:
            return {}
        uuids = dict(zip(made.names(), made.shards, strict=True))
        mark_new(self.folder, uuids)
        self.folder.publish(RunManifest(tables=dict.fromkeys(uuids, 0), sharding=made))
        forget_marks(self.folder, set(uuids))
        return self.copies.commits()

    # ---- A directory of a run

    def open_table(self, name: str, *, create: Json | None, shards: int | None, budget: Budget) -> Sharding:
        """Open a sharded table of the run, or make it. Collective; the arguments are equal on all ranks.

        Args:
            name: of the table, which is not open.
            create: arguments of `bunkbed.create`, for a new table; each must be that of a stored one.
            shards: of the table; default: those it has, or one for each rank.
            budget: of this process.
        """
        stored, world = self.manifest.sharded.get(name), self._ranks.world
        if name in self.manifest.tables:
            raise ValueError(
                f"run {self.place}: table {name!r} is not sharded, and {world} processes want a shard each; divide it "
                f"with: {self._reshard_command()}"
            )
        if stored is None and create is None:
            known = ", ".join(self.manifest.table_names()) or "none"
            raise FileNotFoundError(
                f"run {self.place} has no table {name!r} (it has: {known}); give create=dict(dim=...) to make it"
            )
        count = len(stored.shards) if stored is not None else world if shards is None else shards
        if shards not in (None, count):
            raise ValueError(f"run {self.place}: table {name!r} has {count} shards, got shards={shards}")
        if not world <= count <= MAX_SHARDS:
            raise ValueError(
                f"run {self.place}: table {name!r} has {count} shards, and {world} processes want one each"
                + (
                    f"; divide it with: {self._reshard_command()}, or start at most {count} processes"
                    if count < world
                    else f"; at most {MAX_SHARDS} are possible"
                )
            )
        each = of_each(create or {}, count)
        how = _Opening(
            [f"{name}.{shard_name(index)}" for index in range(count)],
            "",
            {**each, "ram": budget} if stored is None else None,
            opening.Wanted.of("w", ram=budget, create=each),
        )
        try:
            made = self._open_shards(name, how)
        except BaseException:  # on every rank: the next commit must not hold some shards of the table
            self.tables.pop(name, None)
            for shard in set(how.names) & set(self.shards):
                self.shards.pop(shard).release()
            raise
        if stored is None:
            self.shardings[name] = made
        return stored or made

    def _reshard_command(self) -> str:
        return f"bunkbed reshard {shlex.quote(str(self.place))} --shards {self._ranks.world}"

    # ---- Opening

    def enter(self, check: Callable[[], None], *, one_disk: bool) -> None:
        """Take the lock of the directory and read its last commit. Collective; on rank 0 `check` may raise.

        Args:
            check: raises where rank 0 must not open the directory.
            one_disk: whether all ranks must see the directory of rank 0.
        """
        # Rank 0 alone, so that it has the lock before another rank reads or makes anything.
        first = self._ranks.gather(_OPENING, lambda: self._enter_first(check) if self._ranks.is_first else None)[0]
        waiting = self._without(first["mark"], range(self._ranks.world))
        self._is_apart = self._ranks.rank in waiting
        if waiting:
            commits = self._ranks.gather(_OPENING, lambda: self.copies.commits() if self._ranks.is_first else {})[0]
            while waiting:  # for a rank on their own disk to take its lock
                keeper = waiting[0]
                said = self._ranks.gather(_OPENING, partial(self._enter_other, commits, one_disk, keeper))
                self.copies.keepers.append(keeper)
                waiting = self._without(said[keeper], waiting)
            self._ranks.gather(_OPENING, lambda: self.copies.update(commits, map(int, commits)))
            self.copies.fetch_files()
        self._ranks.gather(_OPENING, lambda: self._enter(first))

    def _without(self, mark: str, ranks: Sequence[int]) -> list[int]:
        """Return the ranks that do not see the lock with this mark in the directory. Collective."""
        sees = self._ranks.gather(_OPENING, lambda: self.folder.mark() == mark)
        return [rank for rank in ranks if not sees[rank]]

    def _enter_first(self, check: Callable[[], None]) -> Json:
        is_new = not self.folder.epochs()
        if is_new:
            check()
            self._make_directories()
        mark = uuid.uuid4().hex
        self._lock = self.folder.lock(mark)
        self.manifest = self.folder.load_newest()
        if is_new:
            return {"mark": mark, "epoch": None, "named": {}, "kept": {}}
        check()
        named, kept = self.folder.collect()
        forget_marks(self.folder, set(self.manifest.tables))
        return {
            "mark": mark,
            "epoch": self.manifest.epoch,
            "named": {name: sorted(epochs) for name, epochs in named.items()},
            "kept": {name: sorted(epochs) for name, epochs in kept.items()},
        }

    def _make_directories(self) -> None:
        _native.make_directories(str(self.folder.files))
        _native.make_directories(str(self.place / "tables"))

    def _enter_other(self, commits: Mapping[str, str], one_disk: bool, keeper: int) -> str:
        """On rank `keeper`: take the lock of the directory on another disk than rank 0's; return its mark."""
        rank, place, newest = self._ranks.rank, self.place, max(map(int, commits), default=None)
        if rank != keeper:
            return ""
        if one_disk or not (newest is None or place.is_dir()):
            raise FileNotFoundError(
                f"rank {rank} does not see the directory that rank 0 has at {place}"
                + ("; the ranks of this run must share it" if one_disk else ", and its host has no directory there")
            )
        if newest is None and opening.is_table(place):
            raise FormatError(f"rank {rank}: {place} on its host is a table of one process; move it away")
        own = self.copies.commits()
        wrong = [epoch for epoch, text in own.items() if commits.get(epoch, text) != text]
        wrong += [epoch for epoch in own if newest is None or int(epoch) > newest]
        if wrong:
            raise FormatError(
                f"rank {rank}: {place} on its host has commit {wrong[0]}, which the directory of rank 0 does not have "
                f"({'it has none' if newest is None else f'its newest is {newest}'}); start the hosts in the "
                "order of the last time (torchrun --node-rank), or put back the folders of one time on all hosts"
            )
        self._make_directories()
        mark = uuid.uuid4().hex
        self._lock = self.folder.lock(mark)
        log.warning(
            "bunkbed: rank %d has another disk than rank 0: %s on its host has the shards of the ranks there",
            rank,
            place,
        )
        return mark

    def _enter(self, first: Json) -> None:
        if first["epoch"] is not None:
            self.manifest = self.folder.load(first["epoch"])
            self.copies.remove_unnamed(self.manifest.tables)
        self.pins = {
            name: (set(first["named"].get(name, ())), set(first["kept"].get(name, ()))) for name in self.manifest.tables
        }

    def _open_shards(self, table: str, how: _Opening) -> Sharding:
        """Open or make this rank's shards of a table; return the record of a new one. Collective."""
        said = self._ranks.gather(_OPENING, lambda: {"uuid": uuid.uuid4().hex, "shards": self._open_own(table, how)})
        every = {name: facts for one in said for name, facts in one["shards"].items()}
        steps = {step for _, step in every.values()}
        if len(steps) > 1:
            raise CorruptionError(
                f"table '{table or self.place.name}': its shards are at different steps ({sorted(steps)}) in commit "
                f"{self.manifest.epoch}; a shard was written on its own, or a folder was put back from elsewhere"
            )
        return Sharding(said[0]["uuid"], tuple(every[name][0] for name in how.names))

    def _open_own(self, table: str, how: _Opening) -> Json:
        own = [how.names[index] for index in shards_of_rank(self._ranks.rank, len(how.names), self._ranks.world)]
        for name in own:
            label = f"{how.labels}{name}"
            if how.new is not None:
                path = self.folder.table_path(name)
                if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
                    remove_leftover(self.folder, name, path)
                self._made.append(path)
                opened = opening.create(path, _run=self, _name=label, _warns=False, **how.new)
                self.pins[name] = {opened.epoch}, set()
            else:
                path = self.folder.table_path(name)
                if not opening.is_table(path):
                    other = ", or start the hosts in the order of the last time" if self.copies.keepers else ""
                    raise FileNotFoundError(
                        f"{self.folder.label}: {path} has no table; put the files of {name} back{other}"
                    )
                path = self.folder.own_table(name)
                epoch = self.manifest.tables[name]
                opened = opening.open_table(path, how.stored, run=self, epoch=epoch, name=label)
            self.shards[name] = opened
            opened.warns_of_loss = False  # the shared table warns instead
            opened.plain_core.set_pinned_epochs(*self.pins[name])
        self.tables[table] = own
        return {name: [self.shards[name].uuid, self.shards[name].step] for name in own}

    def as_table(self, table: str, sharding: Sharding) -> Table:
        """Return this rank's rows of an open table."""
        own = [self.shards[name] for name in self.tables[table]]
        if len(own) == 1:
            return own[0]
        count = len(sharding.shards)
        first = shards_of_rank(self._ranks.rank, count, self._ranks.world).start
        name = table or self.place.name
        return Shards(name, own, sharding.uuid, lambda: self.manifest.epoch, num_shards=count, first=first)

    # ---- Closing

    def close(self) -> None:
        """Close the shards without a commit, and release the lock."""
        with contextlib.ExitStack() as closing:  # closes every shard also after an error, and unlocks last
            closing.callback(self._unlock)
            for table in self.shards.values():
                closing.callback(table.release)

    def _unlock(self) -> None:
        if self._lock is not None:
            self.folder.unlock(self._lock)
            self._lock = None

    def undo(self) -> None:
        """Close what was opened, after a failure, and remove what was made where nothing was committed."""
        with contextlib.suppress(Exception):
            self.close()
        if not self.folder.epochs():
            for path in self._made:
                shutil.rmtree(path, ignore_errors=True)


def same_arguments(ranks: Ranks, kind: str, **given: object) -> None:
    """Raise ValueError on every rank if an argument differs among the ranks. Collective."""
    texts = {name: repr(value) for name, value in given.items()}
    said: list[dict[str, str]] = ranks.gather("making a layer", lambda: texts)
    for name in texts:
        values = {rank: one.get(name) for rank, one in enumerate(said)}
        if len(set(values.values())) > 1:
            got = "; ".join(f"rank {rank}: {value}" for rank, value in values.items())
            raise ValueError(f"{kind}: {name} must be equal on all ranks, got {got}")
