"""RocksDB through `rocksdict`, tuned for point reads of a table larger than memory.

Loaded as sorted files by ``SstFileWriter``. Reads: 16 threads of multi-get on ascending keys, direct I/O, a ten-bit
bloom filter, a hash index within blocks. Writes: one batch a step, no write-ahead log (ours has none either between
commits), direct I/O for flushes and compactions. Half of the budget's caches is block cache, a quarter memtables,
which hold the rows written last; the rest is room for reads in flight and compactions. No compression: trained
floats do not compress.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import peers
from benchmarks.peers.records import Records, initial, joined, keys, values

THREADS = 16
MIB = 1 << 20


def options(budget_bytes: int) -> tuple[Any, str]:
    """RocksDB's options within a budget, and what they are in words."""
    rocksdict = peers.load("rocksdict", "rocksdict")
    memtable = max(4 * MIB, budget_bytes // 16)
    cache = max(4 * MIB, budget_bytes // 2)
    table = rocksdict.BlockBasedOptions()
    table.set_block_cache(rocksdict.Cache(cache))
    table.set_block_size(4096)
    table.set_bloom_filter(10, False)
    table.set_data_block_index_type(rocksdict.DataBlockIndexType.binary_and_hash())
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    chosen = rocksdict.Options(raw_mode=True)
    chosen.create_if_missing(True)
    chosen.set_block_based_table_factory(table)
    chosen.set_compression_type(rocksdict.DBCompressionType.none())
    chosen.set_use_direct_reads(True)
    chosen.set_use_direct_io_for_flush_and_compaction(True)
    chosen.set_write_buffer_size(memtable)
    chosen.set_max_write_buffer_number(4)
    chosen.set_max_background_jobs(4)
    chosen.set_level_compaction_dynamic_level_bytes(True)
    chosen.set_max_bytes_for_level_base(4 * memtable)
    chosen.set_target_file_size_base(max(memtable, 64 * MIB))
    chosen.set_optimize_filters_for_hits(True)
    chosen.set_bytes_per_sync(MIB)
    words = (
        f"{THREADS} threads of multi-get, direct I/O, block cache {cache // MIB} MiB of 4 KiB blocks, "
        f"4 memtables of {memtable // MIB} MiB, bloom filter, no log, no compression, write batches"
    )
    return chosen, words


def build(path: Path, num_rows: int) -> None:
    """Loads every record as sorted files of a million rows."""
    rocksdict = peers.load("rocksdict", "rocksdict")
    chosen, _ = options(1 << 30)
    database = rocksdict.Rdict(str(path), chosen)
    writer, name = None, path.parent / "load.sst"
    for count, (rows, records) in enumerate(initial(num_rows), start=1):
        if writer is None:
            writer = rocksdict.SstFileWriter(options=chosen)
            writer.open(str(name))
        for key, value in zip(keys(rows), values(records), strict=True):
            writer[key] = value
        if count % 10 == 0 or rows[-1] == num_rows - 1:
            writer.finish()
            move = rocksdict.IngestExternalFileOptions()
            move.set_move_files(True)
            database.ingest_external_file([str(name)], move)
            name.unlink(missing_ok=True)
            writer = None
    database.close()


class RocksDb(Records):
    """A database opened with the options above."""

    def __init__(self, path: Path, budget_bytes: int) -> None:
        rocksdict = peers.load("rocksdict", "rocksdict")
        chosen, self.settings = options(budget_bytes)
        self.database = rocksdict.Rdict(str(path), chosen)
        self._make_batch = lambda: rocksdict.WriteBatch(raw_mode=True)
        self._unlogged = rocksdict.WriteOptions()
        self._unlogged.disable_wal = True
        self._threads = ThreadPoolExecutor(THREADS)

    def read(self, rows: np.ndarray) -> np.ndarray:
        # Contiguous parts: neighbouring keys share blocks, which one multi-get reads once.
        wanted = keys(rows)
        size = -(-len(wanted) // THREADS)
        parts = [wanted[start : start + size] for start in range(0, len(wanted), size)]
        return joined([value for part in self._threads.map(self.database.get, parts) for value in part])

    def write(self, rows: np.ndarray, records: np.ndarray) -> None:
        batch = self._make_batch()
        for key, value in zip(keys(rows), values(records), strict=True):
            batch.put(key, value)
        self.database.write(batch, self._unlogged)

    def progress(self) -> str:
        def count(name: str) -> int:
            return int(self.database.property_int_value(f"rocksdb.{name}") or 0)

        levels = [self.database.property_value(f"rocksdb.num-files-at-level{level}") for level in range(7)]
        return (
            f"files by level {'/'.join(str(level) for level in levels)}, {count('num-running-compactions')} "
            f"compactions running, {count('estimate-pending-compaction-bytes') // MIB} MiB pending"
        )

    def close(self) -> None:
        self._threads.shutdown()
        self.database.close()
