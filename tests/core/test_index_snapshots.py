"""Index snapshots, seen from Python: opening with one, checking, repairing, copying, in runs and snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import bunkbed as bb
from bunkbed import _native
from bunkbed.testing import ReferenceTable
from bunkbed.testing.conformance import assert_same_bits

KWARGS = {"dim": 4, "num_rows": 2000, "optimizer": bb.Adam(lr=0.1), "init": bb.Normal(std=0.1), "seed": 3}
IDS = np.arange(2000)


@pytest.fixture(autouse=True)
def small_ones() -> Iterator[None]:
    _native.set_index_snapshots(1, in_line=True)
    yield
    _native.set_index_snapshots()


def train(seed: int, *tables) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(5):
        ids = rng.integers(0, 2000, 300)
        grads = rng.standard_normal((300, 4), dtype=np.float32)
        for table in tables:
            table.update(ids, grads)


def make(path: Path) -> ReferenceTable:
    oracle = ReferenceTable(**KWARGS)
    with bb.create(path, ram="8MiB", **KWARGS) as table:
        for seed in range(3):
            train(seed, table, oracle)
            table.commit(keep="second" if seed == 1 else None)
    return oracle


def assert_same(table, oracle: ReferenceTable) -> None:
    for slot in ("weight", *table.slots):
        assert_same_bits(table.get(IDS, slot=slot), oracle.get(IDS, slot=slot))


def test_opening_reads_little(tmp_path: Path) -> None:
    oracle = make(tmp_path / "t")
    with bb.open(tmp_path / "t", mode="r", ram="8MiB") as table:
        assert table.stats()["index_snapshot_bytes"] > 0
        assert table.stats()["indexed_records"] < len(table) / 2
        assert_same(table, oracle)
    with bb.open(tmp_path / "t", snapshot="second", ram="8MiB") as table:
        assert len(table) > 0
    assert bb.check(tmp_path / "t") == []


def test_closing_leaves_a_table_that_opens_fast(tmp_path: Path) -> None:
    _native.set_index_snapshots(100)
    with bb.create(tmp_path / "t", ram="8MiB", **KWARGS) as table:
        table.set(IDS, np.ones((2000, 4), np.float32))
        epoch = table.commit()
    with bb.open(tmp_path / "t", ram="8MiB") as table:
        assert table.epoch == epoch + 1 and table.stats()["indexed_records"] == 0
        assert_same_bits(table.lookup(IDS), np.ones((2000, 4), np.float32))
    with bb.open(tmp_path / "t", ram="8MiB") as table:
        assert table.epoch == epoch + 1  # nothing to gain by another one


def test_a_damaged_one_is_repaired(tmp_path: Path) -> None:
    oracle = make(tmp_path / "t")
    for path in (tmp_path / "t").glob("directory-*"):
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
    with pytest.raises(bb.CorruptionError, match="fails its checksum; no row is lost by it: bunkbed check --repair"):
        bb.open(tmp_path / "t", ram="8MiB")
    problems = bb.check(tmp_path / "t")
    assert problems and {problem.kind for problem in problems} == {"directory"}
    assert "no row is lost: the segments hold them all" in problems[0] and "--repair" in problems[0].remedy
    assert bb.check(tmp_path / "t", repair=True) == []
    with bb.open(tmp_path / "t", ram="8MiB") as table:
        assert_same(table, oracle)
        train(9, table, oracle)
        table.commit()
        train(10, table, oracle)
        table.commit()
        assert table.stats()["index_snapshot_bytes"] > 4096
    with bb.open(tmp_path / "t", ram="8MiB", mode="r") as table:
        assert_same(table, oracle)


def test_copies_do_without(tmp_path: Path) -> None:
    oracle = make(tmp_path / "t")
    bb.copy(tmp_path / "t", tmp_path / "u")
    assert not list((tmp_path / "u").glob("directory-*"))
    with bb.open(tmp_path / "u", mode="r", ram="8MiB") as table:
        assert_same(table, oracle)
    bb.copy(tmp_path / "t", tmp_path / "u")


def test_tables_of_a_run(tmp_path: Path) -> None:
    oracle = ReferenceTable(**KWARGS)
    with bb.Run(tmp_path / "run", ram="64MiB") as run:
        table = run.table("user", create=KWARGS)
        for seed in range(3):
            train(seed, table, oracle)
            run.commit()
    with bb.Run(tmp_path / "run", ram="64MiB") as run:
        table = run.table("user")
        assert table.stats()["index_snapshot_bytes"] > 0
        assert_same(table, oracle)
    for path in (tmp_path / "run" / "tables" / "user").glob("directory-*"):
        path.unlink()
    assert {problem.kind for problem in bb.check(tmp_path / "run")} == {"directory"}
    assert bb.check(tmp_path / "run", repair=True) == []
    with bb.Run(tmp_path / "run", ram="64MiB") as run:
        assert_same(run.table("user"), oracle)


def test_closing_leaves_a_copy_a_copy_and_what_was_kept_the_newest_commit(tmp_path: Path) -> None:
    _native.set_index_snapshots(10)
    make(tmp_path / "t")
    with bb.open(tmp_path / "t") as table:
        train(7, table)
        table.commit(keep="kept")
    bb.copy(tmp_path / "t", tmp_path / "copy")
    for place in ("t", "copy"):
        with bb.open(tmp_path / place) as table:
            epoch = table.epoch
            table.lookup(IDS)
        with bb.open(tmp_path / place, mode="r") as table:
            assert table.epoch == epoch
    with bb.open(tmp_path / "t") as table:
        train(8, table)
    bb.copy(tmp_path / "t", tmp_path / "copy")  # the copy was not changed meanwhile
