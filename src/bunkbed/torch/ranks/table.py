"""`DistributedTable`: a table that several processes train together."""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from bunkbed import _native
from bunkbed.adapters.tables import TableArguments, require_same
from bunkbed.core.arguments import Floats, Ids
from bunkbed.core.budget import Budget, parse_bytes
from bunkbed.core.optim import Adam, Optimizer
from bunkbed.errors import BunkbedError
from bunkbed.files.sharding import Sharding
from bunkbed.sharded.base.rows import ShardedBatch
from bunkbed.table import opening
from bunkbed.table.definition import Definition
from bunkbed.table.table import Table
from bunkbed.table.uncommitted import warn_when_it_goes
from bunkbed.torch.ranks.commits import RankCommits
from bunkbed.torch.ranks.core import RankCore
from bunkbed.torch.ranks.epochs import FileEpochs, RamEpochs
from bunkbed.torch.ranks.files import RankFiles, same_arguments
from bunkbed.torch.ranks.group import Ranks
from bunkbed.torch.ranks.rows import Changes
from bunkbed.torch.ranks.sharing import Sharing

if TYPE_CHECKING:
    from bunkbed.torch.ranks.run import RankRun


class DistributedTable(Table):
    """One table whose rows are divided over the processes of a torch process group; made by the layers.

    Has the methods of `bunkbed.Table`. Those that read or change rows, and `rewind`, are collective: every rank must
    call them, with its own ids, which may be none. `update` adds the gradients of all ranks, in the order of ranks, and
    of equal ids `set` writes the last one of the last rank. Any rank alone may call `commit`, `begin_commit`, `drop`
    and `close`: a thread on each of the others does its part. `len` and `stats` see the rows of this rank, which
    `local` has. `topk`, `scan` and exports need all rows: open a reader for them.

    With a path, the files are those of a `bunkbed.ShardedTable` with a shard or more for each rank.
    """

    core: RankCore
    _batch_class = ShardedBatch

    def __init__(
        self,
        core: RankCore,
        path: Path | None,
        *,
        sums_gradients: bool,
        ram_bytes: int,
    ) -> None:
        super().__init__(core.local.spec, path, "w", name=core.name)
        self.local = core.local
        self.ranks = core.ranks
        self.sums_gradients = sums_gradients
        #: Whether this rank's rows are in one core.
        self.has_one_core = isinstance(core.local.core, _native.Table)
        self._ram_bytes = ram_bytes
        self._start(core)
        opening.register_writer(self)

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return self.core.num_shards

    def __repr__(self) -> str:
        text = super().__repr__().replace("bunkbed.Table", "bunkbed.torch.DistributedTable", 1)
        return (
            text.replace(", closed>", f", rank {self.ranks.rank} of {self.ranks.world}, closed>")
            if (self._closed)
            else f"{text[:-1]}, rank {self.ranks.rank} of {self.ranks.world}>"
        )

    def scan_slots(self, slots: Sequence[str], chunk: int) -> NoReturn:
        """Raise BunkbedError, as `scan` does: no rank has all rows."""
        self._refuse("scan()")

    def _scan(self, fields: Sequence[tuple[int, int]], chunk: int) -> Iterator[tuple[Ids, list[Floats]]]:
        return self.local._scan(fields, chunk)

    def topk(self, *_: Any, **__: Any) -> NoReturn:
        """Raise BunkbedError: no rank has all rows."""
        self._refuse("topk()")

    def _refuse(self, call: str) -> NoReturn:
        raise BunkbedError(
            f"table '{self._name}': {call} needs all rows, and this rank has only its own; commit, and open a reader: "
            f'bunkbed.open({str(self._path or "path")!r}, mode="r"). The rows of this rank are table.local'
        )

    def __del__(self) -> None:
        if sys.is_finalizing() or self.core is None or not self.core.is_own:
            return
        warn_when_it_goes(self)
        if not self._closed:  # the shards would stay locked until Python's garbage collection
            with contextlib.suppress(Exception):
                self.core.close()

    # ---- Making

    @classmethod
    def in_ram(
        cls, definition: Definition, ranks: Ranks, *, shards: int, sums_gradients: bool, ram: float | str | None
    ) -> Self:
        """Make a table in RAM. Collective."""
        identity = ranks.gather("making a table", lambda: uuid.uuid4().hex)[0]
        limit = None if ram is None else max(1, parse_bytes(ram) // ranks.local_world)

        def make() -> Table:
            return opening.create(None, ram=limit, **definition.arguments())

        made: list[Table] = []
        ranks.gather("making a table", lambda: made.append(make()))
        local, changes = made[0], Changes()
        commits = RankCommits("table 'table'", ranks, RamEpochs(local), changes)
        core = RankCore("table", local.spec, local, ranks, shards, changes, commits, bytes.fromhex(identity))
        return cls(core, None, sums_gradients=sums_gradients, ram_bytes=limit or 0)

    @classmethod
    def at(cls, files: RankFiles, ranks: Ranks, *, sums_gradients: bool) -> Self:
        """Return the table whose shards are open."""
        name, sharding, changes = files.place.name, files.sharding, Changes()
        local = files.as_table("", sharding)
        commits = RankCommits(f"table '{name}'", ranks, FileEpochs(files), changes)
        identity = bytes.fromhex(sharding.uuid)
        core = RankCore(name, local.spec, local, ranks, len(sharding.shards), changes, commits, identity)
        ram = sum(table.ram_bytes for table in files.shards.values())
        return cls(core, files.place, sums_gradients=sums_gradients, ram_bytes=ram)

    @classmethod
    def in_run(cls, name: str, files: RankFiles, sharding: Sharding, commits: RankCommits, run: RankRun) -> Self:
        """Return a table of a run whose shards are open."""
        local = files.as_table(name, sharding)
        identity, count = bytes.fromhex(sharding.uuid), len(sharding.shards)
        core = RankCore(name, local.spec, local, run.ranks, count, commits.changes, commits, identity, in_run=True)
        table = cls(core, None, sums_gradients=run.sums_gradients, ram_bytes=local.ram_bytes)
        table._run = run
        return table


def shared_table(
    arguments: TableArguments, optimizer: Optimizer | None, ranks: Ranks, sharing: Sharing
) -> DistributedTable:
    """Open or make the table of a layer that `ranks` share. Collective.

    Raises:
        ValueError: an argument differs among the ranks, or is not that of the stored table. See also `RankFiles.open`.
    """
    kind, definition, path = arguments.kind, arguments.definition, arguments.path
    place = None if path is None else opening.resolve(path)
    same_arguments(
        ranks,
        kind,
        path=None if place is None else str(place),
        **{name: value for name, value in vars(definition).items() if name != "optimizer"},
        optimizer=optimizer,
        ram=None if isinstance(arguments.ram, Budget) else arguments.ram,
        disk=arguments.disk,
        shards=sharing.shards,
        gradients=sharing.gradients,
    )
    sums = sharing.gradients == "sum"
    if sharing.shards is not None and sharing.shards < ranks.world:
        raise ValueError(f"{kind}: shards must be at least {ranks.world}, one for each rank, got {sharing.shards}")
    if definition.durability == "scratch":
        raise ValueError(
            f'{kind}: durability="scratch" is for a table of one process; leave it out, or give placement="local"'
        )
    if place is None:
        ram = arguments.ram
        if isinstance(ram, Budget):
            raise ValueError(f"{kind}: a shared Budget is for tables with a path; give ram= in bytes")
        made = replace(definition, optimizer=Adam(lr=1e-3) if optimizer is None else optimizer)
        shards = sharing.shards or ranks.world
        return DistributedTable.in_ram(made, ranks, shards=shards, sums_gradients=sums, ram=ram)
    present = opening.open_writer(place)
    found = ranks.gather("making a layer", lambda: present is not None)
    if present is not None and all(found):
        return _again(present, arguments, optimizer, ranks, sharing)
    if any(found):
        raise BunkbedError(f"{kind}: {place} is open on rank {found.index(True)} already, and not on every rank")
    files = RankFiles.open(
        place, ranks, definition, optimizer, shards=sharing.shards, ram=arguments.ram, disk=arguments.disk
    )
    try:
        ranks.gather("opening a table", lambda: _require_same(kind, files, arguments))
        table = DistributedTable.at(files, ranks, sums_gradients=sums)
    except BaseException:
        files.close()
        raise
    return table


def _again(
    present: Table, arguments: TableArguments, optimizer: Optimizer | None, ranks: Ranks, sharing: Sharing
) -> DistributedTable:
    def check() -> None:
        if not isinstance(present, DistributedTable):
            raise BunkbedError(f"{arguments.kind}: {present.path} is open in this process as a table of one process")
        require_same(arguments.kind, present, **arguments.same)
        sums = "sum" if present.sums_gradients else "mean"
        for name, given, open_with in (
            ("process_group", ranks, present.ranks),
            ("gradients", sharing.gradients, sums),
            ("shards", sharing.shards or present.num_shards, present.num_shards),
        ):
            if given != open_with:
                raise ValueError(
                    f"{arguments.kind}: {present.path} is open already, with another {name}= than this layer's; give "
                    "both layers the same"
                )

    ranks.gather("opening a table", check)
    assert isinstance(present, DistributedTable)
    opening.open_again(present, {}, optimizer)
    return present


def _require_same(kind: str, files: RankFiles, arguments: TableArguments) -> None:
    for table in files.shards.values():
        require_same(kind, table, **arguments.same)
