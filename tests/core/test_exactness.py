"""Bit-identical rows for every budget, thread count, SIMD level and way of reading; seeded bugs must break it.

``python -m benchmarks.cases.exactness`` is the same run, larger and over every combination.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.cases import exactness

import bunkbed as bb
from bunkbed import _native

pytestmark = pytest.mark.usefixtures("native_defaults")

PLAN = exactness.Plan(num_rows=6_000, dim=64, batch=256, steps=300)
# More rows in their half of the bytes: as many segments, so that as much is compacted.
NARROW = dataclasses.replace(PLAN, num_rows=12_000, batch=512, dtype="bfloat16", state_dtype="bfloat16")

# Every budget with every thread count, level and way of reading at least once, a quarter of the product.
COMBINATIONS = [
    ("smallest", 1, "scalar", "uring"),
    ("smallest", 2, "avx2", "threads"),
    ("smallest", 2, "avx512", "uring"),
    ("10 %", 2, "scalar", "threads"),
    ("10 %", 1, "avx2", "uring"),
    ("10 %", 1, "avx512", "threads"),
    ("50 %", 1, "scalar", "threads"),
    ("50 %", 2, "avx2", "uring"),
    ("50 %", 1, "avx512", "threads"),
    ("everything", 2, "scalar", "uring"),
    ("everything", 1, "avx2", "threads"),
    ("everything", 2, "avx512", "uring"),
]


@pytest.fixture(scope="module")
def expected() -> exactness.Expected:
    return exactness.reference(PLAN)


@pytest.fixture(scope="module")
def budgets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    return exactness.budgets(PLAN, tmp_path_factory.mktemp("probe"))


@pytest.mark.parametrize(("name", "threads", "level", "io"), COMBINATIONS)
def test_rows_are_bit_identical(
    tmp_path: Path, expected: Any, budgets: dict[str, int], name: str, threads: int, level: str, io: str
) -> None:
    if level not in exactness.levels():
        pytest.skip(f"this processor has no {level}")
    if io not in exactness.io_ways():
        pytest.skip(f"no {io} here")
    bb.set_num_threads(threads)
    _native.set_simd(level)
    _native.set_io(io)
    assert _native.simd() == level
    totals = exactness.train(PLAN, expected, tmp_path / "table", ram=budgets[name])
    assert totals["index_snapshot_bytes"] > 0  # of the table that was opened in the middle
    # A run that does not evict and compact shows nothing.
    assert totals["compactions"] >= 3
    if name == "everything":
        assert totals["evicted_share"] < 0.1
    else:
        assert totals["evicted_share"] >= 0.3


def test_rows_are_bit_identical_within_a_disk_limit(tmp_path: Path, expected: Any, budgets: dict[str, int]) -> None:
    """Little more than what its rows need: steps and commits wait for compaction."""
    free = exactness.train(PLAN, expected, tmp_path / "free", ram=budgets["smallest"])
    limited = exactness.train(PLAN, expected, tmp_path / "limited", ram=budgets["smallest"], disk=15 << 20)
    assert sum(entry.stat().st_size for entry in (tmp_path / "limited").iterdir()) <= 15 << 20
    assert limited["compacted_records"] > free["compacted_records"], "the limit bound nothing"


def make_sharded(path: Path, **kwargs: Any) -> bb.ShardedTable:
    return bb.ShardedTable.create(path, shards=3, directories=[path.parent / "ssd0", path.parent / "ssd1"], **kwargs)


@pytest.mark.parametrize(("name", "threads"), [("smallest", 2), ("50 %", 1), ("everything", 2)])
def test_rows_of_a_sharded_table_are_bit_identical(tmp_path: Path, expected: Any, name: str, threads: int) -> None:
    """Each shard has a third of the rows and of the budget, so all evict and compact as one table does."""
    bb.set_num_threads(threads)
    counter = itertools.count()
    smallest = exactness.smallest_ram(
        lambda ram: make_sharded(tmp_path / str(next(counter)) / "probe", ram=ram, **PLAN.table_arguments())
    )
    ram = {"smallest": smallest, "50 %": PLAN.table_bytes // 2, "everything": 4 * PLAN.table_bytes + 16 * smallest}
    totals = exactness.train(PLAN, expected, tmp_path / "table", ram=max(smallest, ram[name]), make=make_sharded)
    assert totals["compactions"] >= 3
    assert totals["evicted_share"] < 0.1 if name == "everything" else totals["evicted_share"] >= 0.3


@pytest.mark.parametrize("fault", exactness.FAULTS)
def test_a_seeded_bug_is_found_in_a_sharded_table(tmp_path: Path, expected: Any, fault: str) -> None:
    ram = PLAN.table_bytes // 3
    with pytest.raises((exactness.Mismatch, bb.BunkbedError)):
        exactness.train(PLAN, expected, tmp_path / "table", ram=ram, fault=fault, make=make_sharded)


@pytest.fixture(scope="module")
def narrow_expected() -> exactness.Expected:
    return exactness.reference(NARROW)


@pytest.fixture(scope="module")
def narrow_budgets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    return exactness.budgets(NARROW, tmp_path_factory.mktemp("probe"))


@pytest.mark.parametrize(
    ("name", "threads", "level"),
    [("smallest", 1, "avx512"), ("10 %", 2, "scalar"), ("50 %", 2, "avx2"), ("everything", 2, "avx512")],
)
def test_rows_and_state_in_bfloat16_are_bit_identical(
    tmp_path: Path, narrow_expected: Any, narrow_budgets: dict[str, int], name: str, threads: int, level: str
) -> None:
    if level not in exactness.levels():
        pytest.skip(f"this processor has no {level}")
    bb.set_num_threads(threads)
    _native.set_simd(level)
    totals = exactness.train(NARROW, narrow_expected, tmp_path / "table", ram=narrow_budgets[name])
    assert totals["compactions"] >= 3
    assert (totals["evicted_share"] < 0.1) == (name == "everything")
    assert name == "everything" or totals["evicted_share"] >= 0.3


@pytest.mark.parametrize("fault", exactness.FAULTS)
def test_a_seeded_bug_is_found_in_bfloat16(
    tmp_path: Path, narrow_expected: Any, narrow_budgets: dict[str, int], fault: str
) -> None:
    with pytest.raises((exactness.Mismatch, bb.BunkbedError)):
        exactness.train(NARROW, narrow_expected, tmp_path / "table", ram=narrow_budgets["smallest"], fault=fault)


@pytest.mark.parametrize("fault", exactness.FAULTS)
def test_a_seeded_bug_is_found(tmp_path: Path, expected: Any, budgets: dict[str, int], fault: str) -> None:
    with pytest.raises((exactness.Mismatch, bb.BunkbedError)):
        exactness.train(PLAN, expected, tmp_path / "table", ram=budgets["smallest"], fault=fault)
    # And the same run without it passes: the failure was the bug's.
    short = dataclasses.replace(PLAN, steps=30)
    exactness.train(short, exactness.reference(short), tmp_path / "sound", ram=budgets["smallest"])


def test_an_unknown_fault_is_an_error() -> None:
    with pytest.raises(ValueError, match="no_such_fault"):
        _native.set_fault("no_such_fault")


def test_a_caller_that_flushes_denormal_numbers_gets_the_same_bits(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    ids = np.arange(20_000)
    gradients = np.full((len(ids), 16), np.float32(2**-127))  # a denormal number, as are most of the results
    found = []
    for flushes in (False, True):
        torch.set_flush_denormal(flushes)
        try:
            bb.set_num_threads(2)
            with bb.create(
                tmp_path / str(flushes), dim=16, num_rows=len(ids), optimizer=bb.SGD(0.5), init=bb.Zeros()
            ) as table:
                table.update(ids, gradients)
                table.update(np.r_[ids, ids], np.r_[gradients, gradients])
                found.append(table.lookup(ids).view(np.uint32))
        finally:
            torch.set_flush_denormal(False)
    assert (found[0] != 0).all()
    assert np.array_equal(*found)
