"""`ShardedTables`: the tables of a run that are divided into shards. The shards themselves are tables of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from bunkbed.core.arguments import as_whole
from bunkbed.core.types import Json
from bunkbed.files.run_files import RunManifest
from bunkbed.files.sharding import MAX_SHARDS, Sharding
from bunkbed.sharded.base.shards import Shards
from bunkbed.table import opening
from bunkbed.table.table import Table


class ShardedTables:
    """The open ones. Owns no shard.

    Args:
        label: the run, for messages.
        tables: the run's open tables by name, shards among them; the run changes it.
        manifest: returns the run's present commit.

    Attributes:
        new: the records of tables that no commit names yet, by name.
    """

    def __init__(self, label: str, tables: dict[str, Table], manifest: Callable[[], RunManifest]) -> None:
        self.new: dict[str, Sharding] = {}
        self._label = label
        self._tables = tables
        self._manifest = manifest
        self._open: dict[str, Table] = {}
        self._limits: dict[str, int] = {}  # of the files of each open table, in bytes; 0: none

    def __iter__(self) -> Iterator[Table]:
        return iter(self._open.values())

    def add(self, name: str, table: Table, create: Json | None) -> None:
        """Add a table that was opened with the arguments `create`."""
        self._open[name] = table
        self._limits[name] = opening.parse_disk((create or {}).get("disk"), "w")

    def records(self) -> dict[str, Sharding]:
        """Return the records of all sharded tables, by name."""
        return {**self._manifest().sharded, **self.new}

    def by_name(self) -> dict[str, Table]:
        """Return the run's open tables by name, with each sharded one in place of its shards."""
        shards, found = self._shard_names(), {}
        for name, table in self._tables.items():
            whole = shards.get(name)
            if whole is None:
                found[name] = table
            elif whole in self._open:
                found[whole] = self._open[whole]
        return found

    def _shard_names(self) -> dict[str, str]:
        """Return the table of each shard, by the shard's name."""
        return {shard: name for name, sharding in self.records().items() for shard in sharding.names(name)}

    def parted(self, name: str, create: Json | None) -> tuple[Json | None, int | None]:
        """Return the argument `create` of `bunkbed.Run.table` without ``shards``, and that.

        Raises:
            ValueError: the table has another number of shards, or the name is that of a shard.
        """
        shards = None if create is None else create.get("shards")
        sharding = self.records().get(name)
        stored = 0 if sharding is None else len(sharding.shards)
        if shards is not None:
            as_whole(shards, what="shards", table=f"table {name!r}", low=1, high=MAX_SHARDS)
            if name in {*self._manifest().table_names(), *self.by_name()} and shards != stored:
                raise ValueError(f"{self._label}: table {name!r} has {stored or 'no'} shards, got shards={shards}")
        whole = self._shard_names().get(name)
        if whole is not None:
            raise ValueError(f"{self._label}: {name!r} is a shard; open its table, {whole!r}, instead")
        return None if create is None else {key: value for key, value in create.items() if key != "shards"}, shards

    def again(self, name: str, create: Json | None) -> Table:
        """Return an open table of the run; raise ValueError where a value of `create` is not its own."""
        table = self.by_name()[name]
        if name in self._open and create is not None:
            limit = opening.parse_disk(create.get("disk"), "w")
            if limit not in (0, self._limits[name]):
                raise ValueError(
                    f"table '{name}' is open already with disk={self._limits[name]} (0: no limit), {limit} was asked "
                    "for; close the run first"
                )
            create = {key: value for key, value in create.items() if key != "disk"}
        opening.compare_with(table, create, None)
        return table

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Keep other threads from the rows inside, so that all shards have the same step.

        Raises:
            BunkbedError: the shards of a table do not agree.
        """
        with contextlib.ExitStack() as still:
            for table in self._open.values():
                assert isinstance(table, Shards)
                still.enter_context(table.core.alone(write=True))
            yield

    @contextlib.contextmanager
    def torn(self, reason: str, *, write: bool = True) -> Iterator[None]:
        """Change or move the shards one after another inside; if that fails, the tables refuse use."""
        cores = [table.core for table in self._open.values() if isinstance(table, Shards)]
        with contextlib.ExitStack() as still:
            for core in cores:
                still.enter_context(core.alone(write=write, torn=True))
                core.tear(reason)
            yield
            for core in cores:
                core.mend()
