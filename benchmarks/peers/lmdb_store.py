"""LMDB through `lmdb`: one memory-mapped B+tree, the kernel's page cache is its cache.

Loaded in key order with ``append``. Reads: 16 threads, each with its read transaction, take ascending keys (the
binding touches pages with the GIL released, so faults overlap); ``readahead=False``, as its documentation advises
for a database larger than memory. Writes: one transaction a step, ascending puts through a cursor, ``writemap`` and
no sync, its fastest settings (a crash may then damage the file; ours would lose nothing committed).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import peers
from benchmarks.peers.records import RECORD_BYTES, Records, initial, joined, keys, values

THREADS = 16


def environment(path: Path, map_bytes: int) -> Any:
    lmdb = peers.load("lmdb", "lmdb")
    return lmdb.open(
        str(path),
        map_size=map_bytes,
        writemap=True,
        map_async=True,
        sync=False,
        metasync=False,
        readahead=False,
        max_readers=4 * THREADS,
    )


def build(path: Path, num_rows: int) -> None:
    # A page holds five records; copy-on-write needs additional room.
    found = environment(path, max(64 << 20, 2 * num_rows * RECORD_BYTES))
    for rows, records in initial(num_rows):
        with found.begin(write=True) as transaction:
            transaction.cursor().putmulti(zip(keys(rows), values(records), strict=True), append=True)
    found.sync(True)
    found.close()


class Lmdb(Records):
    """An environment opened with the settings above."""

    settings = (
        f"{THREADS} reading threads, readahead off, one write transaction a step with ascending cursor puts, "
        "writemap, map_async, no sync"
    )

    def __init__(self, path: Path, budget_bytes: int) -> None:
        size = (path / "data.mdb").stat().st_size
        self.environment = environment(path, max(64 << 20, 2 * size))
        self._threads = ThreadPoolExecutor(THREADS)

    def _read(self, wanted: list[bytes]) -> list[bytes]:
        with self.environment.begin() as transaction:
            return [transaction.get(key) for key in wanted]

    def read(self, rows: np.ndarray) -> np.ndarray:
        wanted = keys(rows)
        size = -(-len(wanted) // THREADS)
        parts = [wanted[start : start + size] for start in range(0, len(wanted), size)]
        return joined([value for part in self._threads.map(self._read, parts) for value in part])

    def write(self, rows: np.ndarray, records: np.ndarray) -> None:
        with self.environment.begin(write=True) as transaction:
            transaction.cursor().putmulti(zip(keys(rows), values(records), strict=True))

    def close(self) -> None:
        self._threads.shutdown()
        self.environment.close()
