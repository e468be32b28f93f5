"""``disk=``: a table's files never take more, a table that fits is never in its way, and errors say what would do."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bunkbed as bb
from bunkbed.testing.compare import assert_same_bits
from bunkbed.torch import Embedding, Optimizer

ROWS = 8_000
TABLE: dict[str, Any] = {"dim": 64, "num_rows": ROWS, "optimizer": bb.Adam(lr=0.01), "seed": 3}
RAM = "2MiB"


def bytes_of(folder: Path) -> int:
    """Return the bytes of files that exist before and after: a concurrent commit may remove a file meanwhile."""

    def sizes() -> dict[str, int]:
        found = {}
        for entry in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found[entry.name] = entry.stat().st_size
        return found

    before = sizes()
    return sum(before[name] for name in sizes() if name in before)


def churn(table: Any, steps: int, seed: int, limit: int = 1 << 60) -> int:
    """Trains on random rows; the most bytes the files took."""
    rng = np.random.default_rng(seed)
    most = 0
    for _ in range(steps):
        ids = rng.integers(0, ROWS, 300)
        table.lookup(ids)
        table.update(ids, rng.standard_normal((300, 64)).astype(np.float32))
        most = max(most, bytes_of(table.path))
        assert most <= limit
    return most


def fill(table: Any) -> None:
    for begin in range(0, ROWS, 1000):
        table.update(np.arange(begin, begin + 1000), np.ones((1000, 64), np.float32))


def least_limit(path: Path) -> int:
    """What the error of a limit of one byte asks for."""
    with pytest.raises(ValueError, match=r"it needs at least disk=\d+") as info:
        bb.open(path, ram=RAM, disk=1)
    return int(re.findall(r"disk=(\d+)", str(info.value))[-1])


def filled(path: Path) -> int:
    """Makes a table of which every row is committed; the smallest limit that opens it."""
    with bb.create(path, ram=RAM, **TABLE) as table:
        fill(table)
    return least_limit(path)


def test_the_smallest_limit_holds_through_training_commits_and_opening(tmp_path: Path) -> None:
    path = tmp_path / "t"
    kept = bb.create(None, **TABLE)
    with bb.create(path, ram=RAM, **TABLE) as table:
        fill(table)
    fill(kept)
    limit = least_limit(path)
    table = bb.open(path, ram=RAM, disk=limit)
    assert bb.open(path) is table and table.stats()["disk_limit_bytes"] == limit
    most = 0
    for seed in range(6):
        most = max(most, churn(table, 30, seed, limit))
        rng = np.random.default_rng(seed)
        for _ in range(30):
            ids = rng.integers(0, ROWS, 300)
            kept.update(ids, rng.standard_normal((300, 64)).astype(np.float32))
        _ = table.begin_commit(meta={"seed": seed}) if seed % 3 else table.commit(meta={"seed": seed})
    assert most > 0.6 * limit, "nothing came near it"
    ids = np.arange(ROWS)
    for slot in ("weight", *table.slots):
        assert_same_bits(table.get(ids, slot), kept.get(ids, slot), slot)
    table.close()
    table.close()
    assert bytes_of(path) <= limit
    assert bb.check(path) == []


def test_a_run_keeps_its_tables_limits(tmp_path: Path) -> None:
    limit = 48 << 20
    with bb.Run(tmp_path / "run", ram="4MiB") as run:
        table = run.table("user", create={**TABLE, "disk": limit})
        fill(table)
        for seed in range(4):
            churn(table, 30, seed, limit)
            _ = run.begin_commit() if seed % 2 else run.commit(files={"dense": bytes(seed)})
        last = table.get(np.arange(ROWS))
    with bb.Run(tmp_path / "run", ram="4MiB") as run:
        table = run.table("user", create={**TABLE, "disk": "48MiB"})
        assert table.stats()["disk_limit_bytes"] == limit
        assert_same_bits(table.get(np.arange(ROWS)), last, "opened again")


def test_more_rows_than_fit_are_refused_before_anything_changes(tmp_path: Path) -> None:
    table = bb.create(tmp_path / "t", ram=RAM, disk="10MiB", **TABLE)
    stored = 0
    with pytest.raises(OSError, match=r"stored rows are more than its limit of disk=10485760 .* would do") as info:
        for stored in range(0, ROWS, 500):
            table.update(np.arange(stored, stored + 500), np.ones((500, 64), np.float32))
    assert info.value.errno == errno.ENOSPC
    assert "nothing was changed or lost" in str(info.value)
    assert 1000 <= stored < ROWS and not table.contains(np.arange(stored, ROWS)).any()
    steps = table.step
    with pytest.raises(OSError, match="stored rows are more than its limit"):
        table.set(np.arange(ROWS), np.zeros((ROWS, 64), np.float32))
    assert table.step == steps
    table.update(np.arange(stored), np.ones((stored, 64), np.float32))  # those that are there
    table.commit()
    table.close()
    wanted = int(re.findall(r"disk=(\d+)", str(info.value))[-1])
    with bb.open(tmp_path / "t", ram=RAM, disk=wanted) as table:
        table.update(np.arange(stored, stored + 500), np.ones((500, 64), np.float32))


def test_a_snapshot_that_would_leave_too_little_is_refused(tmp_path: Path) -> None:
    limit = filled(tmp_path / "t") + (9 << 20)  # room for one
    table = bb.open(tmp_path / "t", ram=RAM, disk=limit)
    table.commit(keep="first")
    churn(table, 120, 0, limit)
    assert table.stats()["snapshot_bytes"] > 5 << 20
    with pytest.raises(OSError, match=r"keeping 'second' would leave too little of disk=\d+ bytes") as info:
        table.commit(keep="second")
    assert info.value.errno == errno.ENOSPC and table.is_dirty
    churn(table, 60, 1, limit)
    table.commit()
    assert set(bb.snapshots(tmp_path / "t")) == {"first"}
    table.drop("first")
    assert table.stats()["snapshot_bytes"] == 0
    table.commit(keep="second")
    table.close()


@pytest.mark.parametrize("keep", [None, "more"])
def test_a_commit_between_the_steps_of_a_scan_hides_no_row(tmp_path: Path, keep: str | None) -> None:
    """A commit packs the log where there is little room, also one that is then refused, and moves records by that."""
    table = bb.open(tmp_path / "t", ram=RAM, disk=filled(tmp_path / "t") + (2 << 20))
    stopped = 0
    for seed in range(4):
        churn(table, 60, seed)
        scan = table.scan(chunk=500)
        ids = [next(scan)[0]]
        with contextlib.suppress(OSError):  # no room to keep it
            table.commit(meta={"seed": seed}, keep=keep)
        try:
            ids += [some for some, _ in scan]
        except bb.BunkbedError as error:
            assert "compaction moved its records while it was scanned" in str(error)
            stopped += 1
            ids = [some for some, _ in table.scan()]
        assert_same_bits(np.sort(np.concatenate(ids)), np.arange(ROWS), "every row once")
        table.commit()
    assert stopped > 0, "nothing was compacted"
    table.close()


class Story:
    """Random calls on a table at, or just above, the smallest limit that holds its rows: no call may fail."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.path = folder / f"t{seed}"
        self.rows = int(self.rng.choice([300, 2000, 6000]))
        self.ram = ["1MiB", "2MiB", "6MiB"][seed % 3]
        self.dim = int(self.rng.choice([2, 16, 64]))
        fixed = self.rows if seed % 2 else None
        self.spec: dict[str, Any] = {
            "dim": self.dim,
            "num_rows": fixed,
            "optimizer": bb.SGD(lr=1.0),
            "init": bb.Zeros(),
        }
        self.counts = np.zeros(self.rows, np.float32)
        self.commits = float(self.rng.choice([0.0, 0.02, 0.2]))
        self.largest = int(self.rng.choice([1, 20, 400]))

    def least_limit(self) -> int:
        with bb.create(self.path, ram=self.ram, **self.spec) as table:
            for begin in range(0, self.rows, 500):
                ids = np.arange(begin, min(self.rows, begin + 500))
                table.update(ids, np.zeros((len(ids), self.dim), np.float32))
        with pytest.raises(ValueError, match=r"it needs at least disk=\d+") as info:
            bb.open(self.path, ram=self.ram, disk=1)
        return int(re.findall(r"disk=(\d+)", str(info.value))[-1])

    def change(self, table: Any) -> None:
        ids = self.rng.integers(0, self.rows, self.rng.integers(1, self.largest + 1))
        table.update(ids, np.full((len(ids), self.dim), -1.0, np.float32))
        np.add.at(self.counts, ids, 1.0)

    def run(self) -> int:
        limit = int(self.least_limit() * self.rng.choice([1.0, 1.02, 1.2]))
        if self.rng.integers(2):
            shutil.rmtree(self.path)
            table = bb.create(self.path, ram=self.ram, disk=limit, **self.spec)
        else:
            table = bb.open(self.path, ram=self.ram, disk=limit)
        most = 0
        for _ in range(200):
            self.change(table)
            most = max(most, bytes_of(self.path))
            if self.rng.random() < self.commits:
                _ = table.begin_commit() if self.rng.integers(2) else table.commit()
            if self.rng.random() < 0.02:
                table.close()
                table = bb.open(self.path, ram=self.ram, disk=limit)
        assert_same_bits(table.get(np.arange(self.rows))[:, 0], self.counts, "rows")
        table.close()
        with bb.open(self.path, ram=self.ram, disk=limit) as table:
            assert_same_bits(table.get(np.arange(self.rows))[:, 0], self.counts, "opened again")
        shutil.rmtree(self.path)
        assert most <= limit
        return limit


@pytest.mark.parametrize("first", [0, 8, 16])
def test_rows_that_fit_are_trained_committed_and_opened_within_the_limit(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 8):
        Story(tmp_path, seed).run()


def test_a_table_of_unknown_rows_goes_on_without_commits_at_the_smallest_limit(tmp_path: Path) -> None:
    """Its one large segment is still being filled: garbage in it must be found too."""
    story = Story(tmp_path, 4)
    story.rows, story.dim, story.largest, story.counts = 6000, 64, 400, np.zeros(6000, np.float32)
    story.spec |= {"dim": 64, "optimizer": bb.Adam(lr=0.1), "num_rows": None}
    limit = story.least_limit()
    table = bb.open(story.path, ram=story.ram, disk=limit)
    for _ in range(400):
        story.change(table)
    assert bytes_of(story.path) <= limit
    table.close(commit=False)
    bb.open(story.path, ram=story.ram, disk=limit).close()


@pytest.mark.parametrize("disk", [0, -1, "4 apples", True, "1MiB"])
def test_a_limit_that_is_none_makes_nothing(tmp_path: Path, disk: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"size|disk=|create: disk must be"):
        bb.create(tmp_path / "t", ram=RAM, disk=disk, **TABLE)
    assert not (tmp_path / "t").exists()


def test_only_writers_of_files_have_a_limit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a table in RAM only has none"):
        bb.create(None, disk="1GiB", **TABLE)
    bb.create(tmp_path / "t", ram=RAM, **TABLE).close()
    with pytest.raises(ValueError, match="a reader"):
        bb.open(tmp_path / "t", mode="r", disk="1GiB")
    table = bb.open(tmp_path / "t", ram=RAM, create={**TABLE, "disk": "1GiB"})
    assert table.stats()["disk_limit_bytes"] == 1 << 30
    table.close()


def test_a_layer_takes_it(tmp_path: Path) -> None:
    layer = Embedding(1000, 64, path=tmp_path / "t", ram=RAM, disk="16MiB", seed=1)
    optimizer = Optimizer(layer)
    layer(torch.arange(1000)).sum().backward()
    optimizer.step()
    assert layer.table.stats()["disk_limit_bytes"] == 16 << 20
    layer.state_dict()
    with pytest.raises(ValueError, match=r"disk"):
        Embedding(1000, 64, table=layer.table, disk="16MiB")


def test_a_batch_beyond_what_is_left_is_refused_and_smaller_ones_go_on(tmp_path: Path) -> None:
    table = bb.create(tmp_path / "t", ram=RAM, **TABLE)
    fill(table)
    table.close()
    limit = least_limit(tmp_path / "t")
    table = bb.open(tmp_path / "t", ram=RAM, disk=limit)
    churn(table, 130, 5, limit)  # no commit: nearly all rows are there twice
    ids = np.arange(ROWS)
    before = table.get(ids)
    refused = r"no room for 8000 ids within disk=\d+; fewer ids in a call need less, .*disk=(\d+) always has it"
    with pytest.raises(OSError, match=refused) as info:
        table.update(ids, np.ones((ROWS, 64), np.float32))
    assert info.value.errno == errno.ENOSPC
    assert_same_bits(table.get(ids), before, "refused")
    churn(table, 5, 6, limit)
    table.commit()
    table.close()
    named = re.search(refused, str(info.value))
    assert named is not None
    with bb.open(tmp_path / "t", ram=RAM, disk=int(named[1])) as table:
        churn(table, 130, 7, int(named[1]))
        table.update(ids, np.ones((ROWS, 64), np.float32))


def test_what_a_killed_writer_left_counts_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "t"
    limit = filled(path)
    code = (
        "import os, sys, numpy as np, bunkbed as bb\n"
        f"table = bb.open({str(path)!r}, ram={RAM!r}, disk={limit})\n"
        "rng = np.random.default_rng(int(sys.argv[1]))\n"
        "for _ in range(40):\n"
        f"    table.update(rng.integers(0, {ROWS}, 300), rng.standard_normal((300, 64)).astype(np.float32))\n"
        "os._exit(9)\n"
    )
    for seed in range(3):
        assert subprocess.run([sys.executable, "-c", code, str(seed)], check=False).returncode == 9
        assert bytes_of(path) <= limit
    with bb.open(path, ram=RAM, disk=limit) as table:
        assert bytes_of(path) <= table.stats()["disk_bytes"] + 65_536
        churn(table, 40, 3, limit)


def test_a_table_that_took_more_is_opened_within_the_limit_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "t"
    small = filled(path)
    with bb.open(path, ram=RAM) as table:
        churn(table, 200, 0)
        table.commit()
        churn(table, 100, 1)
    limit = least_limit(path)
    assert limit > small, "its segments are not packed any more"
    with pytest.raises(ValueError, match=r"stored rows in .* bytes of files"):
        bb.open(path, ram=RAM, disk=limit - 1)
    with bb.open(path, ram=RAM, disk=limit) as table:
        assert bytes_of(path) <= limit
        churn(table, 150, 2, limit)


def test_a_run_refuses_to_keep_what_would_leave_too_little(tmp_path: Path) -> None:
    limit = 48 << 20
    run = bb.Run(tmp_path / "run", ram="4MiB")
    table = run.table("user", create={**TABLE, "disk": limit})
    fill(table)
    run.commit()
    kept = 0
    with pytest.raises(OSError, match="would leave too little of disk=") as info:
        for kept in range(8):
            churn(table, 40, kept, limit)
            run.commit(keep=f"k{kept}")
    assert info.value.errno == errno.ENOSPC and kept >= 1
    churn(table, 60, 9, limit)
    run.commit()
    run.rewind("k0")
    churn(run.table("user"), 60, 10)
    run.close()
    with bb.Run(tmp_path / "run", ram="4MiB") as run:
        churn(run.table("user", create={**TABLE, "disk": limit}), 60, 11, limit)


def test_a_refused_call_leaves_no_trace_in_the_reckoning(tmp_path: Path) -> None:
    limit = filled(tmp_path / "t")
    table = bb.open(tmp_path / "t", ram=RAM, disk=limit)
    ids = np.arange(ROWS)
    for seed in range(4):
        churn(table, 60, seed, limit)
        with contextlib.suppress(OSError):  # it may fit
            table.update(ids, np.ones((ROWS, 64), np.float32))
        table.commit()
    table.close()


def test_more_ram_needs_no_more_disk(tmp_path: Path) -> None:
    path = tmp_path / "t"
    limit = filled(path)
    table = bb.open(path, ram=RAM, disk=limit)
    table.core.set_ram(64 << 20)
    churn(table, 100, 0, limit)
    table.core.set_ram(2 << 20)
    churn(table, 100, 1, limit)
    table.close()


def test_a_table_that_is_open_has_the_limit_it_has(tmp_path: Path) -> None:
    table = bb.create(tmp_path / "t", ram=RAM, **TABLE)
    with pytest.raises(ValueError, match=r"is open already with disk=0 .* 1073741824 was asked for"):
        bb.open(tmp_path / "t", disk="1GiB")
    table.close()


def test_meta_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    limit = filled(tmp_path / "t")
    table = bb.open(tmp_path / "t", ram=RAM, disk=limit)
    churn(table, 5, 0, limit)
    with pytest.raises(OSError, match="bytes of meta= leave too little"):
        table.commit(meta={"text": "x" * (8 << 20)})
    table.commit(meta={"text": "x"})
    table.close()
