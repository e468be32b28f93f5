"""Uniform batches of a table beyond its RAM: what a step takes, against what the device needs at least for it.

A table of float32[64] rows with Adam state is written, committed and opened again with a tenth of its bytes. Each batch
has distinct uniform ids, a share of the rows. A step is a lookup of the batch and its update, or the update alone.

The least time of the device, measured in turns with the steps: the bytes that must be read, one sweep of the live log
(large reads) or one read for each wanted record (small reads), whichever is less, plus the bytes of the evicted records
at the rate of a file that is written sequentially. Compaction is no part of it. A ratio is taken within a round.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import bunkbed as bb
from benchmarks.harness import common
from benchmarks.harness.figures import Figure, Settings
from bunkbed import _native

DIM, RECORD_BYTES = 64, 776
LARGE, SMALL = 256 << 10, 4 << 10
READ_THREADS, PROBE_S = 64, 0.4
SHARES = (0.25, 0.05, 0.01, 0.001)
PART = 0.1  # RAM / bytes of the records


@dataclass(frozen=True)
class Device:
    """The rates of the disk, measured on the table's own files."""

    read_bytes_per_s: float
    reads_per_s: float
    write_bytes_per_s: float

    @classmethod
    def measure(cls, folder: Path, seconds: float) -> Device:
        """Measure for about three times `seconds`."""
        files = [str(file) for file in folder.rglob("*") if file.is_file() and file.stat().st_size >= LARGE]
        large, _ = _native.probe_reads(files, 16, seconds, LARGE)
        small, _ = _native.probe_reads(files, READ_THREADS, seconds, SMALL)
        file = folder / "written"
        written, _ = _native.probe_writes(str(file), 256 << 20, seconds)
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


def rounds(table: bb.Table, folder: Path, share: float, settings: Settings, *, lookup: bool) -> Figure:
    """Return the ratio of a step to the least time of the device, measured in turns."""
    rows = int(table.num_rows or 0)
    size = max(1, int(rows * share))
    warmup, count, probe_s = settings.pick((1, 1, 0.02), (6, 3, PROBE_S), (6, 7, PROBE_S))
    rng = np.random.default_rng((settings.seed, size, lookup))  # no batch of another measurement, which is in RAM
    grads = np.full((size, DIM), 0.01, np.float32)
    ratios: list[float] = []
    for number in range(warmup + count):
        ids = rng.choice(rows, size, replace=False)
        device = Device.measure(folder, probe_s) if number >= warmup else None
        step = take_step(table, ids, grads, lookup=lookup)
        if device is not None:
            least = device.least(size, rows, int(step.counts["written_back"]))
            ratios.append(step.seconds / least)
    note = (
        f"{step.seconds * 1e3:,.1f} / {least * 1e3:,.1f} ms; records {path_of(step.counts)} %; "
        f"read {step.counts['read_bytes'] / 1e6:,.0f} MB; {step.counts['compacted_records']:,.0f} records compacted"
    )
    name = f"{share:.1%} of the rows, {'lookup and update' if lookup else 'update'} / least time of the device"
    wanted = 1.3 if share == SHARES[0] and not lookup else None
    return Figure(name, statistics.median(ratios), "x", min(ratios), max(ratios), count, at_most=wanted, note=note)


def access_paths(settings: Settings) -> list[Figure]:
    """The suite's case."""
    rows = settings.pick(6_000, 250_000, 1_000_000)
    with common.workspace(settings.dir, rows * RECORD_BYTES * 3) as folder:
        build(folder / "table", rows)
        with bb.open(folder / "table", ram=int(rows * RECORD_BYTES * PART)) as table:
            return [
                rounds(table, folder, share, settings, lookup=lookup) for share in SHARES for lookup in (False, True)
            ]
