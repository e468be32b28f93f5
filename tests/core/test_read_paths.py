"""Access paths: the predicted reads, the reads that the core makes, and what is said of both."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.machine import Machine, rates
from bunkbed.machine.read_paths import PATHS, Reads, expected_reads, main_path, records_by_path

MACHINE = Machine(1e10, 1e5, 1e9, 512, "/dev/ssd (ext4)", 2, 1.0)


def simulated(wanted: int, slots: int, stored_bytes: int, gap: int, unit: int, largest: int) -> Reads:
    """The reads of random slots, by the rule of the core."""
    places = np.sort(np.random.default_rng(0).choice(slots, wanted, replace=False)).tolist()
    reads: list[list[int]] = []  # begin, end, records
    swept = [False]
    for place in places:
        begin, end = place * stored_bytes // unit * unit, -(-(place + 1) * stored_bytes // unit) * unit
        is_near = bool(reads) and begin <= reads[-1][1] + gap
        if is_near and end - reads[-1][0] <= largest:
            reads[-1][1] = max(reads[-1][1], end)
            reads[-1][2] += 1
        else:
            swept[len(reads) :] = [is_near]
            reads.append([begin, end, 1])
    records = dict.fromkeys(PATHS, 0.0)
    for (_, _, count), is_swept in zip(reads, swept, strict=True):
        records["sweep" if is_swept else "merged reads" if count > 1 else "single reads"] += count
    return Reads(len(reads), sum(end - begin for begin, end, _ in reads), records)


@pytest.mark.parametrize("share", [0.002, 0.01, 0.03, 0.1, 0.3, 0.7, 1.0])
@pytest.mark.parametrize(
    ("stored_bytes", "gap", "unit", "largest"),
    [
        (776, 16384, 512, 256 << 10),
        (776, 16384, 4096, 256 << 10),
        (776, 0, 512, 256 << 10),
        (136, 20_000, 512, 64 << 10),
        (104, 5_000, 1, 256 << 10),
        (8200, 8192, 4096, 256 << 10),
        (100_000, 131_072, 512, 256 << 10),  # two records a read at most
    ],
)
def test_expected_reads(share: float, stored_bytes: int, gap: int, unit: int, largest: int) -> None:
    slots = 50_000
    wanted = int(share * slots)
    found = expected_reads(wanted, slots, stored_bytes, gap_bytes=gap, read_unit=unit, largest_bytes=largest)
    real = simulated(wanted, slots, stored_bytes, gap, unit, largest)
    noise = 4 / math.sqrt(wanted)
    assert found.reads == pytest.approx(real.reads, rel=0.07 + noise)
    assert found.read_bytes == pytest.approx(real.read_bytes, rel=0.07 + 2 * noise)
    assert sum(found.records.values()) == pytest.approx(wanted)
    for path in PATHS:
        assert found.records[path] / wanted == pytest.approx(real.records[path] / wanted, abs=0.07 + noise), path
    # The reads never take more time than one sweep over the log.
    sweep_bytes = slots * stored_bytes
    assert found.read_bytes <= 1.001 * sweep_bytes + found.reads * 2 * unit
    if gap:
        assert found.reads * gap <= 1.001 * sweep_bytes + 2 * found.reads * (stored_bytes + unit)


def test_nothing_and_too_much() -> None:
    nothing = expected_reads(0, 100, 776)
    assert (nothing.reads, nothing.read_bytes, nothing.path) == (0, 0, None)
    assert main_path(records_by_path({"single_records": 0, "merged_records": 0, "swept_records": 0})) is None
    with pytest.raises(ValueError, match="101 wanted records need as many slots, got 100"):
        expected_reads(101, 100, 776)


ROWS, DIM = 40_000, 64
STORED = 264  # bytes of a record


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table whose log has the rows in the order of their ids."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with bb.create(tmp_path / "t", dim=DIM, num_rows=ROWS, optimizer=bb.SGD(), ram="64MiB") as made:
        made.set(np.arange(ROWS), np.ones((ROWS, DIM), np.float32))
    return tmp_path / "t"


def lookup(path: Path, ids: np.ndarray) -> tuple[dict[str, float], dict[str, int | float]]:
    with bb.open(path, mode="r", ram="64MiB") as reader:
        opened = reader.stats()
        assert (reader.lookup(ids) == 1).all()
        stats = reader.stats()
    stats["read_bytes"] -= opened["read_bytes"]  # the ids of the log
    return records_by_path(stats), stats


@pytest.mark.parametrize("share", [0.002, 0.02, 0.6])
def test_the_core_reads_as_expected(share: float, table: Path) -> None:
    ids = np.random.default_rng(1).choice(ROWS, int(share * ROWS), replace=False)
    records, stats = lookup(table, ids)
    unit = max(rates.random_reads(sorted(table.glob("segment-*"))[:1], seconds=0.0)[1], 1)
    slots = stats["disk_bytes"] / STORED  # the ids and versions of the chunks are between the records
    found = expected_reads(ids.size, slots, STORED, read_unit=unit)
    assert sum(records.values()) == stats["read_records"] == ids.size
    assert stats["reads"] == pytest.approx(found.reads, rel=0.2)
    assert stats["read_bytes"] == pytest.approx(found.read_bytes, rel=0.2)
    assert main_path(records) == found.path == list(PATHS)[[0.002, 0.02, 0.6].index(share)]


def test_the_measured_gap_decides(table: Path) -> None:
    """Of every 100th record: 26 KiB are between two, 46 where a chunk ends."""
    ids = np.arange(0, ROWS, 100)
    assert lookup(table, ids)[0] == {"single reads": ids.size, "merged reads": 0, "sweep": 0}
    rates._save({rates._key(table): replace(MACHINE, read_bytes_per_s=1e5 * 50_000)})
    records, stats = lookup(table, ids)
    assert records["single reads"] <= 1 and records["sweep"] > ids.size / 3
    assert stats["read_bytes"] == pytest.approx(ROWS * STORED, rel=0.1)
    rates._save({rates._key(table): MACHINE})  # without the rate of large reads
    assert lookup(table, ids)[0]["single reads"] == ids.size


def test_shards_read_by_the_measured_gap_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with bb.ShardedTable.create(tmp_path / "t", dim=DIM, num_rows=ROWS, shards=2, ram="64MiB") as made:
        made.set(np.arange(ROWS), np.ones((ROWS, DIM), np.float32))
    with bb.open(tmp_path / "t", mode="r", ram="64MiB") as reader:
        reader.lookup(np.arange(0, ROWS, 100))
        assert reader.explain().read_path == "single reads"
    rates._save({rates._key(tmp_path): replace(MACHINE, read_bytes_per_s=1e5 * 1e6)})
    with bb.open(tmp_path / "t", mode="r", ram="64MiB") as reader:
        reader.lookup(np.arange(0, ROWS, 100))
        found = reader.explain()
        shards = reader.shard_stats()
    assert found.machine is not None and found.machine.read_gap == 1_000_000
    assert found.read_path in ("merged reads", "sweep")
    for counter in PATHS.values():
        assert found.counts[counter] == sum(stats[counter] for stats in shards)


def test_explain_names_the_path(table: Path) -> None:
    rates._save({rates._key(table): replace(MACHINE, read_bytes_per_s=2e9)})
    with bb.open(table, mode="r", ram="64MiB") as reader:
        reader.lookup(np.arange(ROWS))
        found = reader.explain()
        again = reader.explain(since=found)
    assert found.read_path == "sweep" and found.counts["swept_records"] > ROWS / 2
    assert found.read_amplification == pytest.approx(found.counts["read_bytes"] / (ROWS * 4 * DIM))
    assert found.times is not None
    assert found.times.disk_reads == pytest.approx(found.counts["read_bytes"] / 2e9)  # the bandwidth limits a sweep
    assert "% sweep" in str(found) and f"; {found.read_amplification:.1f} x the wanted bytes" in str(found)
    assert (again.read_path, again.read_amplification) == (None, None)
    assert "wanted bytes" not in str(again)


def test_two_disks_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    known = {place: replace(MACHINE, read_bytes_per_s=rate) for place, rate in zip(places, (3e9, 1e9), strict=True)}
    monkeypatch.setattr("bunkbed.sharded.table.remembered", lambda place: known[place.parent])
    with bb.ShardedTable.create(tmp_path / "t", dim=2, directories=places, ram="16MiB") as table:
        real = type(tmp_path).stat
        monkeypatch.setattr(type(tmp_path), "stat", lambda path, **more: Disk(real(path, **more), path))
        machine = table.explain().machine
        monkeypatch.undo()
    assert machine is not None and machine.read_bytes_per_s == 2e9  # half of the rows are on the slower one


class Disk:
    """What `Path.stat` returns, with a device for each path."""

    def __init__(self, stat: os.stat_result, path: Path) -> None:
        self.st_mode, self.st_dev = stat.st_mode, hash(path)
