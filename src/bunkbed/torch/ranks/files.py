"""`RankFiles`: the files of a table that ranks share, as one rank has them open.

They are those of an ordinary `bunkbed.ShardedTable`: `bunkbed.open` opens them in one process. Shard s of S belongs to
rank s * W // S, which opens it as a table of its own. Rank 0 has the lock of the directory, and publishes manifests.

Opening has steps that all ranks make together. An error on one rank is raised on all, and what was opened or made is
closed or removed again.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import threading
import weakref
from pathlib import Path

from bunkbed import _native
from bunkbed.core.budget import Budget, parse_bytes
from bunkbed.core.optim import Adam, Optimizer
from bunkbed.core.types import Json
from bunkbed.errors import CorruptionError, FormatError
from bunkbed.files.run_files import RunFiles, RunManifest
from bunkbed.files.sharding import MAX_SHARDS, Sharding, shard_name
from bunkbed.run.leftovers import forget_marks, mark_new, remove_leftover
from bunkbed.table import opening
from bunkbed.table.definition import Definition
from bunkbed.table.table import Table
from bunkbed.torch.ranks.group import Ranks
from bunkbed.torch.ranks.plan import shards_of_rank

_OPENING = "opening a table"
#: The part of a `Budget` of one host that this process may use, by the budget.
_parts: weakref.WeakKeyDictionary[Budget, Budget] = weakref.WeakKeyDictionary()
_parts_lock = threading.Lock()


def budget_of_rank(ram: int | str | Budget | None, ranks: Ranks) -> Budget:
    """Return the budget of this process, where `ram` is that of all processes of its host; default 1 GiB."""
    if not isinstance(ram, Budget):
        return Budget(max(1, parse_bytes(opening.DEFAULT_RAM if ram is None else ram) // ranks.local_world))
    with _parts_lock:
        if ram not in _parts:
            _parts[ram] = Budget(max(1, ram.total_bytes // ranks.local_world))
        return _parts[ram]


class RankFiles:
    """The shards of this rank, open for writing. Owns them, and on rank 0 the lock of the directory.

    Attributes:
        folder: the files of the directory.
        sharding: how rows are divided.
        shards: this rank's shards, by name.
        pins: epochs of each that commits name, and that kept commits name.
        manifest: the commit that was opened.
    """

    def __init__(self, place: Path, ranks: Ranks) -> None:
        self.place = place
        self.folder = RunFiles(place, "sharded table")
        self.shards: dict[str, Table] = {}
        self.pins: dict[str, tuple[set[int], set[int]]] = {}
        self.manifest = RunManifest()
        self.sharding = Sharding("", ())
        self._ranks = ranks
        self._lock: int | None = None
        self._made: list[Path] = []

    @property
    def num_shards(self) -> int:
        """Number of shards of the table."""
        return len(self.sharding.shards)

    @classmethod
    def open(
        cls,
        place: Path,
        ranks: Ranks,
        definition: Definition,
        optimizer: Optimizer | None,
        *,
        shards: int | None,
        ram: int | str | Budget | None,
        disk: int | str | None,
    ) -> RankFiles:
        """Open the table at `place`, or make it there. Collective.

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
        files = cls(place, ranks)
        try:
            # Rank 0 alone, so that it has the lock before another rank reads or makes anything.
            first = ranks.gather(_OPENING, lambda: files._open_parent(shards) if ranks.is_first else None)[0]
            said = ranks.gather(_OPENING, lambda: files._open_shards(first, definition, optimizer, ram, disk))
            ranks.gather(_OPENING, lambda: files._join(first, said))
            if first["is_new"]:
                files.manifest = files.folder.load_newest()
                files.sharding = files.manifest.sharding or files.sharding
        except BaseException:
            files._undo()
            raise
        return files

    # ---- The steps of opening

    def _open_parent(self, shards: int | None) -> Json:
        place, world = self.place, self._ranks.world
        epochs = self.folder.epochs()
        if not epochs and opening.is_table(place):
            raise FormatError(
                f"{place} is a table of one process; divide it with: bunkbed reshard {shlex.quote(str(place))} "
                f"--shards {world if shards is None else shards}"
            )
        if not epochs:
            count = world if shards is None else shards
            if count > MAX_SHARDS:
                raise ValueError(f"shards must be in [1, {MAX_SHARDS}], got {count}")
            _native.make_directories(str(self.folder.files))
            _native.make_directories(str(place / "tables"))
            self._lock = self.folder.lock()
            return {"is_new": True, "shards": count}
        self._lock = self.folder.lock()
        self.manifest = self.folder.load_newest()
        if self.manifest.sharding is None:
            raise FormatError(f"{place} is a run of tables, not one sharded table; open it with bb.Run")
        stored = len(self.manifest.sharding.shards)
        if stored != (world if shards is None else shards):
            other = f", or start {stored} processes" if stored < world else f", or give shards={stored}"
            raise ValueError(
                f"table '{place.name}' at {place} has {stored} shards, and {world} processes want "
                f"{'one each' if shards is None else f'shards={shards}'}; divide it with: bunkbed reshard "
                f"{shlex.quote(str(place))} --shards {world if shards is None else shards}{other}"
            )
        named, kept = self.folder.collect()
        forget_marks(self.folder, set(self.manifest.tables))
        return {
            "is_new": False,
            "shards": stored,
            "epoch": self.manifest.epoch,
            "named": {name: sorted(epochs) for name, epochs in named.items()},
            "kept": {name: sorted(epochs) for name, epochs in kept.items()},
        }

    def _open_shards(
        self,
        first: Json,
        definition: Definition,
        optimizer: Optimizer | None,
        ram: int | str | Budget | None,
        disk: int | str | None,
    ) -> Json:
        place, count = self.place, first["shards"]
        if not (place / "lock").exists():
            raise FileNotFoundError(
                f"rank {self._ranks.rank} does not see the table that rank 0 has at {place}; the ranks must share its "
                "directory (hosts without a shared disk cannot train one table yet)"
            )
        own = [shard_name(index) for index in shards_of_rank(self._ranks.rank, count, self._ranks.world)]
        budget = budget_of_rank(ram, self._ranks)
        limit = {} if disk is None else {"disk": max(1, parse_bytes(disk) // count)}
        if not first["is_new"]:
            self.manifest = self.folder.load(first["epoch"])
            assert self.manifest.sharding is not None
            self.sharding = self.manifest.sharding
        made_by = Adam(lr=1e-3) if optimizer is None else optimizer
        create = {**definition.arguments(), "optimizer": made_by, **limit}
        for name in own:
            label = f"{place.name}/{name}"
            if first["is_new"]:
                path = self.folder.table_path(name)
                if os.path.lexists(path):
                    remove_leftover(self.folder, name, path)
                self._made.append(path)
                table = opening.create(path, ram=budget, _run=self, _name=label, **create)
            else:
                path = self.folder.own_table(name)
                if not opening.is_table(path):
                    raise FileNotFoundError(f"table '{place.name}': {path} has no table; put the files of {name} back")
                wanted = opening.Wanted.of("w", ram=budget, create=limit or None, optimizer=optimizer)
                table = opening.open_table(path, wanted, run=self, epoch=self.manifest.tables[name], name=label)
            self.shards[name] = table
            table.warns_of_loss = False  # the shared table warns instead
            named = {table.epoch} if first["is_new"] else set(first["named"].get(name, ()))
            kept = set() if first["is_new"] else set(first["kept"].get(name, ()))
            table.plain_core.set_pinned_epochs(named, kept)
            self.pins[name] = named, kept
        return {name: [table.uuid, table.epoch, table.step] for name, table in self.shards.items()}

    def _join(self, first: Json, said: list[Json]) -> None:
        every = {name: fact for one in said for name, fact in one.items()}
        names = [shard_name(index) for index in range(first["shards"])]
        steps = {every[name][2] for name in names}
        if len(steps) > 1:
            raise CorruptionError(
                f"table '{self.place.name}': its shards are at different steps ({sorted(steps)}) in commit "
                f"{self.manifest.epoch}; a shard was written on its own, or a folder was put back from elsewhere"
            )
        if not self._ranks.is_first:
            return
        if first["is_new"]:
            mark_new(self.folder, {name: every[name][0] for name in names})
            self.sharding = Sharding.new([every[name][0] for name in names])
            tables = {name: every[name][1] for name in names}
            # The first manifest: from here on the table can be opened.
            self.folder.publish(RunManifest(tables=tables, sharding=self.sharding))
            forget_marks(self.folder, set(names))

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

    def _undo(self) -> None:
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
