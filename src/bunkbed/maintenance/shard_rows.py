"""Write the rows of a table into a table with other shards, record by record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt

from bunkbed import _native
from bunkbed.core.arguments import Ids
from bunkbed.errors import CorruptionError
from bunkbed.files.sharding import Split, shards_of
from bunkbed.maintenance.rewriting import forget_counts, move_counts, set_time
from bunkbed.sharded.base.rows import ShardedRows
from bunkbed.table.table import Table

#: Called with (rows done, rows in all), a few times a second.
Progress = Callable[[int, int], None]
Records = npt.NDArray[np.uint8]

_CHUNK_BYTES = 16 << 20
#: Most shards that are written at the same time.
_MOST_THREADS = 8


class LaterHasLess(Exception):
    """A commit has fewer rows or steps than one before it."""


def copy_rows(tables: Sequence[Table], made: Sequence[Table], progress: Progress | None) -> int:
    """Copy every stored row with its whole record, the counts of ids, and the step; return the number of rows.

    Args:
        tables: one table, or in order the tables of several workers, which have the rows of one.
        made: the same, with the same definition.
        progress: called after each chunk.

    Raises:
        LaterHasLess: `made` has other rows, or more steps, from an earlier commit. CorruptionError: a row is in a shard
        that is not its own; a number of rows is not the commit's.
    """
    first = tables[0]
    for one in made:
        if one.step > first.step:
            raise LaterHasLess(f"table '{first.name}' has {first.step} steps, fewer than before,")
        if one.clock > first.clock:
            raise LaterHasLess(f"table '{first.name}' has the clock {first.clock}, an earlier one than before,")
        forget_counts(one)  # of an earlier commit
    shards = [core for one in made for core in _cores(one)]
    total, done = sum(map(len, tables)), 0
    with ThreadPoolExecutor(min(len(shards), _MOST_THREADS), "bunkbed-reshard") as threads:
        writes: list[Future[None]] = []  # of the chunk before: it is written while the next one is read
        for ids, records in _records(tables):
            split = Split.by_shard(ids, len(shards))
            mine, sorted_records = split.take(ids), split.take(records)
            for each in writes:
                each.result()
            parts = [split.part(index) for index in range(len(shards))]
            writes = [
                threads.submit(shard.append_records, mine[part], sorted_records[part])
                for shard, part in zip(shards, parts, strict=True)
                if part.start < part.stop
            ]
            done += len(ids)
            if progress is not None:
                progress(done, total)
        for each in writes:
            each.result()
    written = sum(map(len, made))
    if written > total:
        raise LaterHasLess(f"table '{first.name}' has lost rows that it had before")
    if done != total or written != total:
        raise CorruptionError(f"table {first.path}: {done} rows were read and {written} written of {total}")
    for index, one in enumerate(made):
        set_time(one, first)
        owns = partial(_is_of, index=index, count=len(made)) if len(made) > 1 else None
        for table in tables:
            move_counts(one, table, owns)
    return done


def _cores(table: Table) -> list[_native.Table]:
    """Return the cores of a table's shards, in order."""
    return table.core.cores if isinstance(table.core, ShardedRows) else [table.plain_core]


def _is_of(ids: Ids, index: int, count: int) -> npt.NDArray[np.bool_]:
    mine: npt.NDArray[np.bool_] = shards_of(ids, count) == index
    return mine


def _records(tables: Sequence[Table]) -> Iterator[tuple[Ids, Records]]:
    """Yield (ids, whole records) of all rows, in chunks, shard after shard.

    Raises:
        CorruptionError: an id is in a shard that is not its own.
    """
    cores = [core for table in tables for core in _cores(table)]
    size = cores[0].payload_bytes()
    chunk = max(1, min(65_536, _CHUNK_BYTES // size))
    for index, core in enumerate(cores):
        scan = _native.Scan(core, [])
        while True:
            ids, records = np.empty(chunk, np.int64), np.empty((chunk, size), np.uint8)
            count = scan.next_records(ids, records)
            if count == 0:
                break
            ids, records = ids[:count], records[:count]
            strange = np.flatnonzero(~_is_of(ids, index, len(cores)))
            if strange.size:
                raise CorruptionError(
                    f"table {tables[min(index, len(tables) - 1)].path}: shard {index} of {len(cores)} has id "
                    f"{ids[strange[0]]}, which is another shard's; was a shard's folder exchanged with another's?"
                )
            yield ids, records
