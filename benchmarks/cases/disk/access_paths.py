"""Uniform batches of a table beyond its RAM: what a step takes, against what the device needs at least for it.

``python -m benchmarks.cases.disk.access_paths`` writes a table of float32[64] rows with Adam state, commits it and
opens it again with a tenth of its bytes. Each batch has distinct uniform ids, a share of the rows. A step is a lookup
of the batch and its update, or the update alone.

The least time of the device, measured in turns with the steps: the bytes that must be read, one sweep of the live log
(large reads) or one read for each wanted record (small reads), whichever is less, plus the bytes of the evicted records
at the rate of a file that is written sequentially. Compaction is no part of it. A ratio is taken within a round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import bunkbed as bb
from bunkbed import _native

DIM, RECORD_BYTES = 64, 776
LARGE, SMALL = 256 << 10, 4 << 10
READ_THREADS, PROBE_S = 64, 0.4
SHARES = (0.25, 0.05, 0.01, 0.001)


@dataclass(frozen=True)
class Device:
    """The rates of the disk, measured on the table's own files."""

    read_bytes_per_s: float
    reads_per_s: float
    write_bytes_per_s: float

    @classmethod
    def measure(cls, path: Path, folder: Path) -> Device:
        files = [str(file) for file in path.rglob("*") if file.is_file() and file.stat().st_size >= LARGE]
        large, unit = _native.probe_reads(files, 16, PROBE_S, LARGE)
        if unit == 1:
            raise RuntimeError(f"{path}: this file system reads through the page cache, so there is no figure")
        small, _ = _native.probe_reads(files, READ_THREADS, PROBE_S, SMALL)
        file = folder / "written"
        written, _ = _native.probe_writes(str(file), 256 << 20, PROBE_S)
        file.unlink()
        return cls(large * LARGE, small, written)

    def least(self, wanted: int, rows: int, evicted: int) -> float:
        """Return the seconds for the reads of a step by the cheaper path, and its write-back."""
        read = min(wanted / self.reads_per_s, rows * RECORD_BYTES / self.read_bytes_per_s)
        return read + evicted * RECORD_BYTES / self.write_bytes_per_s


@dataclass(frozen=True)
class Step:
    """One step: its seconds, and what the table counted."""

    seconds: float
    counts: dict[str, float]


def path_of(counts: dict[str, float]) -> str:
    """Return the share of the records read by each path, in percent."""
    total = counts["read_records"] or 1
    return " ".join(f"{name} {100 * counts[f'{name}_records'] / total:.0f}" for name in ("single", "merged", "swept"))


def take_step(table: bb.Table, ids: np.ndarray, grads: np.ndarray, *, lookup: bool) -> Step:
    before, start = table.stats(), time.perf_counter()
    if lookup:
        table.lookup(ids, touch=True)
    table.update(ids, grads)
    seconds, after = time.perf_counter() - start, table.stats()
    return Step(seconds, {key: after[key] - before[key] for key in before if isinstance(before[key], (int, float))})


def build(path: Path, rows: int) -> None:
    with bb.create(path, num_rows=rows, dim=DIM, optimizer=bb.Adam(1e-3), ram="256MiB") as table:
        for ids in np.array_split(np.arange(rows), -(-rows // 50_000)):
            table.update(ids, np.full((len(ids), DIM), 0.01, np.float32))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--part", type=float, default=0.1, help="RAM as a part of the records' bytes")
    options.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="rows of a batch / rows")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--warmup", type=int, default=6, help="steps that count for nothing")
    options.add_argument("--dir", type=Path, default=Path("bench-data"))
    given = options.parse_args()
    given.dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.dir)))
        build(folder / "table", given.rows)
        ram = int(given.rows * RECORD_BYTES * given.part)
        table = stack.enter_context(bb.open(folder / "table", ram=ram))
        rng = np.random.default_rng(0)
        print(f"{given.rows:,} rows x {RECORD_BYTES} B, {ram / 2**20:.0f} MiB RAM; seconds, median (range)")
        for share in given.shares:
            size = max(1, int(given.rows * share))
            grads = np.full((size, DIM), 0.01, np.float32)
            for lookup in (False, True):
                batches = [rng.choice(given.rows, size, replace=False) for _ in range(given.warmup + given.rounds)]
                ratios, seconds, floors = [], [], []
                for number, ids in enumerate(batches):
                    device = Device.measure(folder / "table", folder) if number >= given.warmup else None
                    step = take_step(table, ids, grads, lookup=lookup)
                    if device is None:
                        continue
                    floor = device.least(size, given.rows, int(step.counts["written_back"]))
                    seconds.append(step.seconds)
                    floors.append(floor)
                    ratios.append(step.seconds / floor)
                what = "lookup + update" if lookup else "update"
                facts = [
                    f"{share:6.1%} {what:15}  {statistics.median(seconds):7.3f}",
                    f"device {statistics.median(floors):7.3f}",
                    f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                    f"records %: {path_of(step.counts)}",
                    f"read {step.counts['read_bytes'] / 1e6:,.0f} MB",
                    f"compacted {step.counts['compacted_records']:,.0f}",
                ]
                print("  ".join(facts), flush=True)


if __name__ == "__main__":
    main()
