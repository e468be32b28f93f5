"""Rows that come and go, and what changed: ``python -m benchmarks.cases.changes [PART ...]``. The parts:

- ``parquet``: of a table of 4M rows x 64 a million are updated and committed. The time of `bunkbed changes` to a
  Parquet file, within the process; the file's bytes.
- ``half``: a table of 10 GB (Adam, any id) has half of its rows deleted, in calls of 100,000, while it trains on the
  other half, and commits every 50 steps. Its disk and directory before and after, and the times of the steps without
  and with deletes. Its RAM budget is a quarter of it.
- ``expire``: the same, but one sweep removes the half that has expired, and training goes on.
- ``step``: lookup and Adam update of a table in RAM that notes ages and counts, against one that does not, in turns.
- ``admit``: the same of tables with ``admit=0.1`` and ``admit=2``; and where a part of each batch is ids that are new.
- ``sweep``: 100M stored rows x 16 (SGD) of which a hundredth has expired: time and bytes read of a sweep.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
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
    _print_steps({"without deletes": quiet, "with deletes": busy, "afterwards": after_steps})
    print(f"  a delete of 100,000 rows: {common.spread(deletes)}")
    print(f"  tombstones left: {after['tombstones']:,.0f}")


def _print_steps(every: dict[str, Any]) -> None:
    for name, times in every.items():
        p50, p99 = np.percentile(times * 1e3, [50, 99])
        print(f"  steps {name}: median {p50:.1f} ms, p99 {p99:.1f} ms, longest {times.max() * 1e3:.0f} ms")


def expire(directory: Path, size: int, ram: int) -> None:
    """Print disk, directory and step times."""
    rows = size // (DIM * 12 + 12 + 36)
    rules: dict[str, Any] = {"expire": 1, "clock": "event"}
    with common.workspace(directory, 3 * size) as folder, bb.create(folder / "t", dim=DIM, ram=ram, **rules) as table:
        rng = np.random.default_rng(1)
        for first in range(0, rows, 100_000):
            table.clock = 0 if first <= rows // 2 else 1
            ids = np.arange(first, min(rows, first + 100_000))
            table.update(ids, np.full((len(ids), DIM), 0.01, np.float32))
        table.commit()
        middle = rows // 2 // 100_000 * 100_000 + 100_000
        quiet, _ = _steps(table, middle, rows, 400, rng)
        table.commit()
        before = table.stats()
        began = time.perf_counter()
        swept = table.sweep()
        seconds = time.perf_counter() - began
        read = table.stats()["read_bytes"] - before["read_bytes"]
        table.begin_commit()
        busy, _ = _steps(table, middle, rows, 800, rng)
        table.commit()
        table.commit(meta={"again": 1})
        after = table.stats()
    print(f"{rows:,} rows, {common.bb_bytes(before['disk_bytes'])} of files, ram {common.bb_bytes(ram)}: ", end="")
    print(f"{swept.expired:,} expired")
    print(f"  the sweep: {seconds:.1f} s, {common.bb_bytes(read)} read")
    for what, name in (("disk_bytes", "disk"), ("directory_bytes", "directory")):
        sizes = f"{common.bb_bytes(before[what])} -> {common.bb_bytes(after[what])}"
        print(f"  {name}: {sizes}, {after[what] / before[what]:.0%} of before; wanted: <= 60 %")
    _print_steps({"before": quiet, "after the sweep": busy})


def step(rounds: int, rows: int, batch: int) -> None:
    """Print what ages and counts cost a step."""
    tables = [_filled(rows), _filled(rows, expire=1 << 40)]
    rng = np.random.default_rng(2)
    plain, ratios = _in_turns(tables, rounds, lambda: [rng.integers(0, rows, batch) for _ in range(40)])
    print(f"{rows:,} rows x {DIM} in RAM, Adam, {batch:,} ids: a step {plain * 1e3:.2f} ms, with ages and", end=" ")
    print(f"counts x {np.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}); wanted: 1.03")


def admit(rounds: int, rows: int, batch: int) -> None:
    """Print what admission costs a step whose ids are stored, and one of which a part is new and mostly refused."""
    for rule in (0.1, 2):
        _admit_by(rule, rounds, rows, batch)


def _admit_by(rule: float, rounds: int, rows: int, batch: int) -> None:
    tables = [_filled(rows), _filled(rows, admit=rule)]
    rng = np.random.default_rng(3)
    for new in (0, batch // 20, batch // 2):
        strangers = np.empty(0, np.int64)

        def batches(new: int = new) -> list[Any]:
            nonlocal strangers
            for table in tables:
                table.delete(strangers)  # the plain table does not grow
            strangers = rng.integers(rows, 1 << 60, 40 * new)
            parts = strangers.reshape(40, new)
            return [rng.permutation(np.concatenate([rng.integers(0, rows, batch - new), part])) for part in parts]

        plain, ratios = _in_turns(tables, rounds, batches)
        print(f"{rows:,} rows x {DIM} in RAM, Adam, {batch:,} ids, {new / batch:.0%} new: a step", end=" ")
        print(f"{plain * 1e3:.2f} ms, with admit={rule} x {np.median(ratios):.3f}", end=" ")
        print(f"({min(ratios):.3f} to {max(ratios):.3f}); wanted: 1.05")


def _filled(rows: int, **rules: Any) -> bb.Table:
    """Return a table in RAM whose rows are all stored."""
    table = bb.create(None, dim=DIM, **rules)
    for first in range(0, rows, 100_000):
        ids = np.arange(first, min(rows, first + 100_000))
        table.set(ids, table.lookup(ids))
    return table


def _in_turns(tables: list[bb.Table], rounds: int, batches: Callable[[], list[Any]]) -> tuple[float, list[float]]:
    """Return the median seconds of a step of the first table, and the ratios of the second one's to it."""
    ratios: list[float] = []
    times = []
    for _ in range(rounds):
        every = batches()
        grads = np.full((len(every[0]), DIM), 0.01, np.float32)
        seconds = []
        for table in tables if len(ratios) % 2 else tables[::-1]:
            began = time.perf_counter()
            for ids in every:
                table.lookup(ids)
                table.update(ids, grads)
            seconds.append((time.perf_counter() - began) / len(every))
        plain, other = seconds if len(ratios) % 2 else seconds[::-1]
        ratios.append(other / plain)
        times.append(plain)
    return float(np.median(times)), ratios


def sweep(directory: Path, rows: int, ram: int) -> None:
    """Print the time of a sweep, and what it read."""
    dim, at_once = 16, 1_000_000
    rules: dict[str, Any] = {"expire": 1, "clock": "event", "optimizer": bb.SGD(lr=0.1)}
    with common.workspace(directory, rows * 120) as folder, bb.create(folder / "t", dim=dim, ram=ram, **rules) as table:
        for first in range(0, rows, at_once):
            table.clock = 0 if first < rows // 100 else 1
            ids = np.arange(first, min(rows, first + at_once))
            table.update(ids, np.full((len(ids), dim), 0.01, np.float32))
        table.commit()
        common.forget_pages(folder)
        for dry_run in (True, False):
            before = table.stats()
            began = time.perf_counter()
            swept = table.sweep(dry_run=dry_run)
            seconds = time.perf_counter() - began
            read = table.stats()["read_bytes"] - before["read_bytes"]
            what = "a dry run" if dry_run else "the sweep"
            print(f"{what} of {rows:,} rows x {dim}, ram {common.bb_bytes(ram)}: {seconds:.1f} s,", end=" ")
            print(f"{common.bb_bytes(read)} read of {common.bb_bytes(before['disk_bytes'])}, {swept.expired:,} expired")


def main() -> int:
    options = common.parser(__doc__)
    names = ["parquet", "half", "expire", "step", "admit", "sweep"]
    options.add_argument("parts", nargs="*", help=f"{', '.join(names)}; default: all")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--size", type=float, default=10e9, help="bytes of the table of `half` and `expire`")
    options.add_argument("--rows", type=float, default=1e8, help="rows of `sweep`")
    chosen = options.parse_args()
    parts = chosen.parts or names
    if unknown := sorted(set(parts) - set(names)):
        options.error(f"there is no part {unknown[0]!r}; there are {', '.join(names)}")
    rows, size = (40_000, 100_000_000) if chosen.tiny else (4_000_000, int(chosen.size))
    print(common.machine(chosen.dir))
    if "parquet" in parts:
        parquet(chosen.dir, chosen.rounds, rows, rows // 4)
    if "half" in parts:
        half(chosen.dir, size, max(size // 4, 64 << 20))
    if "expire" in parts:
        expire(chosen.dir, size, max(size // 4, 64 << 20))
    for name, part in (("step", step), ("admit", admit)):
        if name in parts:
            part(chosen.rounds * 3, rows // 4, 4096 if chosen.tiny else 65_536)
    if "sweep" in parts:
        sweep(chosen.dir, 100_000 if chosen.tiny else int(chosen.rows), (64 << 20) if chosen.tiny else (3 << 30))
    return 0


if __name__ == "__main__":
    sys.exit(main())
