"""Rows that go, and what changed: ``python -m benchmarks.cases.changes [parquet] [half]``.

- ``parquet``: of a table of 4M rows x 64 a million are updated and committed. The time of `bunkbed changes` to a
  Parquet file, within the process; the file's bytes.
- ``half``: a table of 10 GB (Adam, any id) has half of its rows deleted, in calls of 100,000, while it trains on the
  other half, and commits every 50 steps. Its disk and directory before and after, and the times of the steps without
  and with deletes. Its RAM budget is a quarter of it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from benchmarks.harness import common
from bunkbed.feed.delta_file import write_delta

DIM = 64


def parquet(directory: Path, rounds: int, rows: int, changed: int) -> None:
    """Print the times of `rounds` files."""
    with common.workspace(directory, rows * (DIM * 8 + 64)) as folder:
        with bb.create(folder / "t", dim=DIM, num_rows=rows, optimizer=bb.SGD(lr=0.1), ram="2GiB") as table:
            for first in range(0, rows, 100_000):
                ids = np.arange(first, min(rows, first + 100_000))
                table.update(ids, np.ones((len(ids), DIM), np.float32))
            since = table.commit(keep="before")
            ids = np.random.default_rng(0).choice(rows, changed, replace=False)
            table.update(ids, np.ones((changed, DIM), np.float32))
            table.commit()
        seconds = []
        for number in range(rounds):
            out = folder / f"delta-{number}.parquet"
            began = time.perf_counter()
            delta = write_delta(bb.changes(folder / "t", since), out)
            seconds.append(time.perf_counter() - began)
            assert (delta.rows, delta.deleted) == (changed, 0)
            size = out.stat().st_size
            out.unlink()
    print(f"{changed:,} changed rows of {rows:,} x {DIM} to Parquet, {common.bb_bytes(size)}:", end=" ")
    print(f"{common.spread(seconds, 's', 1.0)}; wanted: 2 s")


def _steps(table: bb.Table, first: int, end: int, count: int, rng: np.random.Generator, delete: Any = None) -> Any:
    """Train on ids of a range and commit every 50 steps; return the seconds of each step, and of each delete."""
    steps, deletes = [], []
    grads = np.full((4096, DIM), 0.01, np.float32)
    for number in range(count):
        ids = rng.integers(first, end, 4096)
        began = time.perf_counter()
        table.lookup(ids)
        table.update(ids, grads)
        steps.append(time.perf_counter() - began)
        if delete is not None and number % 10 == 5:
            began = time.perf_counter()
            delete()
            deletes.append(time.perf_counter() - began)
        if number % 50 == 49:
            table.begin_commit()
    return np.array(steps), np.array(deletes)


def half(directory: Path, size: int, ram: int) -> None:
    """Print disk, directory and step times."""
    rows = size // (DIM * 12 + 32)
    with common.workspace(directory, 3 * size) as folder, bb.create(folder / "t", dim=DIM, ram=ram) as table:
        rng = np.random.default_rng(1)
        middle, gone = rows // 2, 0
        for first in range(0, rows, 100_000):
            ids = np.arange(first, min(rows, first + 100_000))
            table.update(ids, np.full((len(ids), DIM), 0.01, np.float32))
        table.commit()

        def delete() -> None:
            nonlocal gone
            end = min(middle, gone + 100_000)
            assert table.delete(np.arange(gone, end)) == end - gone
            gone = end

        quiet, _ = _steps(table, middle, rows, 400, rng)
        table.commit()
        before = table.stats()
        busy, deletes = _steps(table, middle, rows, 10 * (middle // 100_000 + 1), rng, delete)
        assert gone == middle
        after_steps, _ = _steps(table, middle, rows, 200, rng)
        table.commit()
        table.commit(meta={"again": 1})
        after = table.stats()
        table.compact()
        for number in range(2):
            table.commit(meta={"compacted": number})
        compacted = table.stats()
    print(f"{rows:,} rows, {common.bb_bytes(before['disk_bytes'])} of files, ram {common.bb_bytes(ram)}, ", end="")
    print("half deleted:")
    for what, name in (("disk_bytes", "disk"), ("directory_bytes", "directory")):
        sizes = f"{common.bb_bytes(before[what])} -> {common.bb_bytes(after[what])}"
        print(f"  {name}: {sizes}, {after[what] / before[what]:.0%} of before; wanted: <= 60 %")
    print(f"  disk after compact(): {compacted['disk_bytes'] / before['disk_bytes']:.0%} of before")
    for name, times in (("without deletes", quiet), ("with deletes", busy), ("afterwards", after_steps)):
        p50, p99 = np.percentile(times * 1e3, [50, 99])
        print(f"  steps {name}: median {p50:.1f} ms, p99 {p99:.1f} ms, longest {times.max() * 1e3:.0f} ms")
    print(f"  a delete of 100,000 rows: {common.spread(deletes)}")
    print(f"  tombstones left: {after['tombstones']:,.0f}")


def main() -> int:
    options = common.parser(__doc__)
    options.add_argument("parts", nargs="*", help="parquet, half; default: both")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--size", type=float, default=10e9, help="bytes of the table of `half`")
    chosen = options.parse_args()
    parts = chosen.parts or ["parquet", "half"]
    if unknown := sorted(set(parts) - {"parquet", "half"}):
        options.error(f"there is no part {unknown[0]!r}; there are parquet and half")
    rows, size = (40_000, 100_000_000) if chosen.tiny else (4_000_000, int(chosen.size))
    print(common.machine(chosen.dir))
    if "parquet" in parts:
        parquet(chosen.dir, chosen.rounds, rows, rows // 4)
    if "half" in parts:
        half(chosen.dir, size, max(size // 4, 64 << 20))
    return 0


if __name__ == "__main__":
    sys.exit(main())
