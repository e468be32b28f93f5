"""A USearch index (HNSW): approximate nearest rows for serving; ids are its keys, rows are stored as float32.

1. Rows are added from the table to the index in chunks, in log order.
2. The index grows in memory: new rows change links anywhere in the graph, so it cannot be built on disk. Its memory is
   reserved in the table's RAM budget before the first row; the table's cache shrinks.
3. The file is written at the end, from the whole index.
4. Threads that add rows at once miss some of each other's links, which shows in a small graph: of 1,500 rows, more than
   3 % of the nearest were not found in one build of 45. One thread builds a small index: the same bytes each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from bunkbed.core.budget import format_bytes
from bunkbed.core.threads import get_num_threads
from bunkbed.io.common.source import Chunk, Reading, Source, check_claim, check_rows, need
from bunkbed.io.common.writing import Writing
from bunkbed.sharded.table import ShardedTable
from bunkbed.table.table import Table

_INSTALL = '"bunkbed[ann]"'
#: Bunkbed's name of a metric -> USearch's.
_METRICS = {"dot": "ip", "cosine": "cos"}
#: Bytes of an index without its vectors: 300 to 330 bytes per row were measured for links, keys and the map of keys.
_ROW_BYTES, _FIXED_BYTES = 400, 1 << 20
#: Up to so many rows are added by one thread, in about a second.
_SMALL = 10_000


def index_bytes(rows: int, dim: int) -> int:
    """Return the most memory that an index of `rows` rows takes while it is made.

    Measurements with USearch 2.26, 16 to 128 numbers per row and 33 to 131 thousand rows, were four fifths of this.
    """
    return _FIXED_BYTES + rows * (_ROW_BYTES + 5 * dim)  # vectors of 4 bytes a number, in blocks that are not full


def read(reading: Reading) -> Source:
    """Return rows by their keys."""
    path = reading.path
    module = need("usearch.index", path.name, _INSTALL)
    reading.refuse(ids=reading.id_column, name=reading.name, state=reading.state)
    if "weight" not in reading.slots:
        raise ValueError(f"{path} holds weights, got slots={reading.slots!r}")
    try:
        index = module.Index.restore(str(path), view=True)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is not a USearch index: {error}") from None
    if index is None:
        raise ValueError(f"{path} is not a USearch index")
    kind = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(index.dtype.name.lower(), index.dtype.name)
    rows, chunk = len(index), reading.rows_of()
    check_rows(f"{path}: vectors", (rows, index.ndim), kind, reading.length("weight"))
    check_claim(str(path), rows, 4 * index.ndim, path.stat().st_size)
    keys = np.sort(np.asarray(index.keys[:rows], np.uint64)) if rows else np.empty(0, np.uint64)
    if rows and int(keys[-1]) >= 1 << 63:
        raise IndexError(f"{path}: key {keys[-1]} is no id, which is below 2**63; nothing was changed")
    again = np.flatnonzero(keys[1:] == keys[:-1])
    if again.size:
        raise ValueError(f"{path}: key {keys[again[0]]} has several vectors; nothing was changed")

    def chunks() -> Iterator[Chunk]:
        for begin in range(0, rows, chunk):
            part = keys[begin : begin + chunk]
            yield part.astype(np.int64), {"weight": np.ascontiguousarray(np.stack(index.get(part, dtype="f32")))}

    return Source(rows, ("weight",), chunks)


def write(writing: Writing) -> int:
    """Write stored rows, keyed by their ids; the index has the metric `Writing.metric`."""
    module = need("usearch.index", writing.target.name, _INSTALL)
    if list(writing.lengths) != ["weight"]:
        raise ValueError(f"{writing.target}: an index holds weights, got {', '.join(writing.lengths)}")
    table, done = writing.table, 0
    with _memory(table, index_bytes(len(table), table.dim)):
        index: Any = module.Index(ndim=table.dim, metric=_METRICS[writing.metric], dtype="f32")
        threads = 1 if len(table) <= _SMALL else get_num_threads()
        for ids, slots in writing.stored():
            index.add(ids.astype(np.uint64), slots["weight"], threads=threads)
            done += len(ids)
        if len(index) != done:
            raise RuntimeError(f"{writing.target}: USearch took {len(index)} of {done} rows; nothing was written")
        index.save(str(writing.file))
    return done


@contextmanager
def _memory(table: Table, num_bytes: int) -> Iterator[None]:
    """Reserve bytes of the table's budget within the context; the table's cache is smaller meanwhile."""
    is_sharded = isinstance(table, ShardedTable)  # nothing is reserved: its shards keep the size of their caches
    least = num_bytes + (0 if is_sharded else table.minimum_bytes())
    if table.ram_bytes and least > table.ram_bytes:
        raise MemoryError(
            f"table '{table.name}': an index of {len(table):,} rows of {table.dim} takes up to "
            f"{format_bytes(num_bytes)} of memory while it is made, within the table's ram of "
            f"{format_bytes(table.ram_bytes)}; open it with ram= (--ram) of at least {least} bytes"
        )
    if is_sharded:
        yield
        return
    table.reserve_ram(num_bytes)
    try:
        yield
    finally:
        table.reserve_ram(-num_bytes)
