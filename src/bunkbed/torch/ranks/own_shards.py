"""`OwnShards`: the shards that one rank has, as one table, where it has not exactly one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from bunkbed.core.arguments import Floats, Ids
from bunkbed.sharded.rows import ShardedBatch, ShardedRows
from bunkbed.table.table import Table


class _Core(ShardedRows):
    """The rows of several shards; their commits are those of `bunkbed.torch.ranks.epochs`."""

    def __init__(self, name: str, tables: Sequence[Table], num_shards: int, owned: range) -> None:
        cores = [table.plain_core for table in tables]
        super().__init__(name, tables[0].spec, cores, writable=True, num_shards=num_shards, first=owned.start)
        self._tables = tables

    def epoch(self) -> int:
        return self._tables[0].epoch

    def meta(self) -> str:
        return "{}"

    def uuid(self) -> bytes:
        return bytes.fromhex(self._tables[0].uuid)

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown()

    def snapshots(self) -> list[tuple[str, int]]:
        return []

    def _refuse(self, *_: Any) -> NoReturn:
        raise AssertionError("a rank's shards are committed by all ranks together")

    commit = begin_commit = drop = rewind = refresh = _refuse


class OwnShards(Table):
    """The shards of one rank. Has the rows only: does not own the shards, and cannot commit."""

    core: _Core
    _batch_class = ShardedBatch

    def __init__(self, name: str, tables: Sequence[Table], num_shards: int, owned: range) -> None:
        super().__init__(tables[0].spec, None, "w", name=name)
        self._start(_Core(name, tables, num_shards, owned))

    def _scan(self, fields: Sequence[tuple[int, int]], chunk: int) -> Iterator[tuple[Ids, list[Floats]]]:
        for scan in self.core.scans([index for index, _ in fields]):
            yield from self._rows_of(scan, fields, chunk)
