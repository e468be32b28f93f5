"""``disk=``: a table's files never take more, a table that fits is never in its way, and errors say what would do."""

from __future__ import annotations

import contextlib
import errno
import re
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
    """Of the files that are there before and after: one that a commit beside removes meanwhile counts for nothing."""

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
    table = bb.create(tmp_path / "t", ram=RAM, disk="32MiB", **TABLE)
    fill(table)
    table.commit(keep="first")
    held = table.stats()["snapshot_bytes"]
    churn(table, 120, 0, 32 << 20)
    assert table.stats()["snapshot_bytes"] >= held
    with pytest.raises(OSError, match=r"keeping 'second' would leave too little of disk=33554432 bytes") as info:
        table.commit(keep="second")
    assert info.value.errno == errno.ENOSPC and table.is_dirty
    churn(table, 60, 1, 32 << 20)
    table.commit()
    assert set(bb.snapshots(tmp_path / "t")) == {"first"}
    table.drop("first")
    assert table.stats()["snapshot_bytes"] == 0
    table.commit(keep="second")
    table.close()


@pytest.mark.parametrize("disk", [0, -1, "4 apples", True, "1MiB"])
def test_a_limit_that_is_none_makes_nothing(tmp_path: Path, disk: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"size|disk="):
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
    with pytest.raises(OSError, match=r"no room for 8000 ids within disk=\d+; commit\(\) or dropping") as info:
        table.update(ids, np.ones((ROWS, 64), np.float32))
    assert info.value.errno == errno.ENOSPC
    assert_same_bits(table.get(ids), before, "refused")
    churn(table, 5, 6, limit)
    table.commit()
    table.close()
