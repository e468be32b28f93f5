"""`Shards`: some or all shards of one table, as a table whose commits another object makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from bunkbed.core.arguments import Floats, Ids
from bunkbed.core.budget import parse_bytes
from bunkbed.core.types import Json
from bunkbed.errors import CorruptionError
from bunkbed.sharded.base.rows import ShardedBatch, ShardedRows
from bunkbed.table.table import Table


class _Core(ShardedRows):
    """The rows of the shards, with the interface of `_native.Table`."""

    def __init__(
        self, name: str, tables: Sequence[Table], uuid: str, epoch: Callable[[], int], num_shards: int, first: int
    ) -> None:
        super().__init__(
            name,
            tables[0].spec,
            [table.plain_core for table in tables],
            writable=tables[0].mode == "w",
            num_shards=num_shards,
            first=first,
        )
        self.epoch = epoch
        self._uuid = bytes.fromhex(uuid)

    def meta(self) -> str:
        return "{}"

    def uuid(self) -> bytes:
        return self._uuid

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown()

    def snapshots(self) -> list[tuple[str, int]]:
        return []

    def refresh(self, to: int | None = None) -> NoReturn:
        raise ValueError(f"table '{self.name}' is part of a run, whose tables move together; call refresh() of the run")

    def _refuse(self, *_: Any) -> NoReturn:
        raise AssertionError("the shards are committed by their run, or by all ranks together")

    commit = begin_commit = drop = rewind = _refuse


def of_each(create: Json, num_shards: int) -> Json:
    """Return the arguments of `bunkbed.create` for each shard: its part of ``disk``."""
    disk = create.get("disk")
    return create if disk is None else {**create, "disk": max(1, parse_bytes(disk) // num_shards)}


class Shards(Table):
    """Shards of one table. Has their rows only: does not own the shards, and cannot commit.

    Args:
        name: of the table.
        tables: the open shards, in order.
        uuid: identity of the table.
        epoch: returns the number of the last commit.
        num_shards: shards of the whole table.
        first: the number of the first of `tables`.
        run: the run that commits the table.
    """

    core: _Core
    _batch_class = ShardedBatch

    def __init__(
        self,
        name: str,
        tables: Sequence[Table],
        uuid: str,
        epoch: Callable[[], int],
        *,
        num_shards: int,
        first: int = 0,
        run: Any = None,
    ) -> None:
        super().__init__(tables[0].spec, None, tables[0].mode, name=name, run=run)
        self.num_shards = num_shards
        self._is_of_reader_run = self._mode == "r"
        self._tables = tuple(tables)
        for table in tables:
            table.warns_of_loss = False  # this table, or the one that it is part of, warns instead
        steps = [table.step for table in tables]
        if len(set(steps)) > 1:
            raise CorruptionError(
                f"table '{name}': its shards are at different steps ({', '.join(map(str, steps))}) in commit "
                f"{epoch()}; a shard was written on its own, or a folder was put back from elsewhere"
            )
        self._start(_Core(name, tables, uuid, epoch, num_shards, first))

    def __repr__(self) -> str:
        return super().__repr__().replace(" in RAM:", f": {len(self._tables)} of {self.num_shards} shards,", 1)

    @property
    def ram_bytes(self) -> int:
        """The RAM budget of the shards in bytes."""
        return sum(table.ram_bytes for table in self._tables)

    def _scan(self, fields: Sequence[tuple[int, int]], chunk: int) -> Iterator[tuple[Ids, list[Floats]]]:
        with self._reading():
            scans = self.core.scans([index for index, _ in fields])
        for scan in scans:
            yield from self._rows_of(scan, fields, chunk)
