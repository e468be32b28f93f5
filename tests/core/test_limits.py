"""The formulas, against sums over every rank, simulated caches and the core itself."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest
from benchmarks.cases.disk.simulate import belady_misses, lru_misses
from benchmarks.harness import common

import bunkbed as bb
from bunkbed import _native
from bunkbed.machine import limits
from bunkbed.machine.rates import random_reads
from bunkbed.window import Window


def every_rank(rows: int, exponent: float) -> np.ndarray:
    weight = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    return weight / weight.sum()


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.05, 2.0])
@pytest.mark.parametrize("rows", [1, 2, 256, 257, 300_000])
def test_unique_rows_against_the_sum_over_every_rank(rows: int, exponent: float) -> None:
    popularity = limits.zipf(rows, exponent)
    share = every_rank(rows, exponent)
    assert popularity.rows.sum() == rows
    assert popularity.rows @ popularity.share == pytest.approx(1.0)
    for ids in (1, 7, 5000):
        exact = -np.expm1(ids * np.log1p(-np.minimum(share, 1 - 1e-16))).sum()
        assert popularity.unique_rows(ids) == pytest.approx(exact, rel=1e-3)
    for frames in (rows // 10, rows // 2):
        exact = -np.expm1(5000 * np.log1p(-np.minimum(share[frames:], 1 - 1e-16))).sum()
        assert limits.cache(popularity, 5000, frames, policy="static").misses == pytest.approx(exact, rel=3e-3)


def test_a_huge_table_costs_no_more_than_a_small_one() -> None:
    popularity = limits.zipf(10**13, 1.05)
    assert len(popularity.rows) < 1500
    assert popularity.rows.sum() == pytest.approx(10**13)
    unique = popularity.unique_rows(65_536)
    assert 26_000 < unique < 65_536
    for policy in ("lru", "gclock", "static", "window", "planner"):
        found = limits.cache(popularity, 65_536, 10**7, policy=policy, window=8).misses
        assert 0 < found < unique


def simulated(policy: str, batches: list[np.ndarray], frames: int, warm: int) -> float:
    simulate = {"lru": lru_misses, "belady": belady_misses}[policy]
    return float(simulate(batches, frames)[warm:].mean())


@pytest.mark.parametrize(("exponent", "frames"), [(1.05, 2000), (1.05, 6000), (0.5, 6000), (0.0, 6000)])
def test_caches_against_simulated_ones(exponent: float, frames: int) -> None:
    rows, ids, warm = 20_000, 500, 300
    sample, rng = common.zipf(rows, exponent), np.random.default_rng(1)
    batches = [sample(rng, ids) for _ in range(warm + 300)]
    popularity = limits.zipf(rows, exponent)

    def predicted(policy: str, window: int = 0) -> float:
        return limits.cache(popularity, ids, frames, policy=policy, window=window).misses

    assert predicted("lru") == pytest.approx(simulated("lru", batches, frames, warm), rel=0.02)
    # Knowing all that comes is Belady's choice; knowing nothing is the best static cache.
    assert predicted("window", 10**6) == pytest.approx(simulated("belady", batches, frames, warm), rel=0.05)
    assert predicted("window", 0) == pytest.approx(predicted("static"), rel=1e-6)
    assert predicted("window", 10**6) < predicted("window", 8) <= predicted("static") <= predicted("gclock") + 1e-6
    assert predicted("gclock") <= predicted("lru") * 1.001
    assert predicted("window", 8) <= predicted("planner", 8) * 1.001 <= predicted("planner", 2) * 1.002


def test_gclock_counts_as_the_core_does() -> None:
    core = (_native.GCLOCK_MAX_COUNT, _native.GCLOCK_HIT, _native.GCLOCK_RETURN)
    assert core == (limits.GCLOCK_MAX, limits.GCLOCK_HIT, limits.GCLOCK_RETURN)
    # Against the chain walked by hand: each round some uses, then the visit. `uses` in as many rounds as one is worth.
    rng = np.random.default_rng(0)
    for uses in (0.3, 0.6):
        predicted = limits.rounds_stayed(np.array([uses / limits.GCLOCK_HIT]))
        for start, stay in zip((0, limits.GCLOCK_RETURN), predicted, strict=True):
            rounds = []
            for _ in range(60_000 if start == 0 else 2000):
                count, stayed = start, 0
                while True:
                    stayed += 1
                    count = min(127, count + 32 * rng.poisson(uses / 32))
                    if count == 0:
                        break
                    count -= 1
                rounds.append(stayed)
            assert float(stay[0]) == pytest.approx(np.mean(rounds), rel=0.1)


@pytest.mark.parametrize(("exponent", "batches"), [(0.0, 0), (1.05, 0), (1.05, 24)])
def test_the_core_misses_and_writes_what_is_predicted(exponent: float, batches: int, tmp_path: Path) -> None:
    rows, dim, ids = 60_000, 8, 512
    with bb.create(tmp_path / "t", dim=dim, num_rows=rows, optimizer=bb.Adam(), ram="64MiB") as table:
        common.fill(table)
    sample, rng = common.zipf(rows, exponent), np.random.default_rng(0)
    grads = np.ones((ids, dim), np.float32)

    def step(table: bb.Table, window: Window, coming: deque[np.ndarray]) -> None:
        while len(coming) < max(1, batches):
            coming.append(sample(rng, ids))
            if batches:
                window.push(coming[-1])
        if batches:
            window.advance()
        batch = coming.popleft()
        table.lookup(batch)
        table.update(batch, grads)

    with (
        bb.open(tmp_path / "t", ram="3MiB") as table,
        Window(table, depth=2, batches=max(1, batches)) as window,
    ):
        coming: deque[np.ndarray] = deque()
        for _ in range(3000 if exponent else 400):  # until it knows the rows at the border of what it can hold
            step(table, window, coming)
        before = table.stats()
        for _ in range(400):
            step(table, window, coming)
        counts = {key: value - before[key] for key, value in table.stats().items()}
        frames = table.stats()["frame_capacity"]
        spec = table.spec
    policy = "planner" if batches else "gclock"
    predicted = limits.cache(limits.zipf(rows, exponent), ids, frames, policy=policy, window=batches)
    assert counts["unique_rows"] / 400 == pytest.approx(predicted.popularity.unique_rows(ids), rel=0.02)
    assert counts["misses"] / 400 == pytest.approx(predicted.misses, rel=0.04)
    assert counts["written_back"] == pytest.approx(counts["misses"], rel=0.01)
    use = spec.memory_use(rows, 3 << 20, 512, True)
    written = predicted.write_amplification(_native.TARGET_LIVE) * counts["written_back"] * use["stored_bytes"]
    assert counts["written_bytes"] == pytest.approx(written, rel=0.15)


@pytest.mark.parametrize(
    ("ram", "num_rows", "dtype"),
    [
        ("2MiB", 5000, "float32"),
        ("3MiB", 100_000, "bfloat16"),
        ("64MiB", 100_000, "float32"),
        ("4MiB", None, "float32"),
    ],
)
def test_a_budget_becomes_the_frames_that_were_said(ram: str, num_rows: int | None, dtype: str, tmp_path: Path) -> None:
    with bb.create(tmp_path / "t", dim=16, num_rows=num_rows, dtype=dtype, ram=ram) as table:
        table.commit(keep="made")
        (tmp_path / "block").write_bytes(bytes(4096))
        unit = max(512, random_reads([tmp_path / "block"], seconds=0.0)[1])
        stats = table.stats()
        use = table.spec.memory_use(0, table.ram_bytes, unit, True)
    if num_rows is not None and use["directory_bytes"] == stats["directory_bytes"]:  # flat: known in advance
        assert use["frames"] == stats["frame_capacity"]
    else:  # the estimate of a hashed one is on the safe side
        assert 0.8 * stats["frame_capacity"] <= use["frames"] <= stats["frame_capacity"]
    assert use["fixed_bytes"] + use["directory_bytes"] + use["frames"] * use["frame_bytes"] <= table.ram_bytes


def test_edges() -> None:
    popularity = limits.zipf(1000, 1.0)
    assert limits.cache(popularity, 64, 1000).misses == 0
    assert limits.cache(popularity, 64, 1000).write_amplification(0.65) == 1
    assert limits.cache(popularity, 64, 0).misses == pytest.approx(popularity.unique_rows(64))
    assert limits.cache(popularity, 64, 1).misses < popularity.unique_rows(64)
    uniform = limits.cache(limits.zipf(100_000, 0.0), 1024, 100)
    assert uniform.write_amplification(0.9) > uniform.write_amplification(0.5) > 1


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="the Zipf exponent must be at least 0, got -1"):
        limits.zipf(10, -1)
    with pytest.raises(ValueError, match="the Zipf exponent must be at least 0, got nan"):
        limits.zipf(10, float("nan"))
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        limits.zipf(0, 1)
    with pytest.raises(ValueError, match="policy must be one of static, lru, gclock, window, planner, got 'fifo'"):
        limits.cache(limits.zipf(10, 1), 4, 2, policy="fifo")
    with pytest.raises(ValueError, match="must lie between 0 and 1, got 1"):
        limits.cache(limits.zipf(10, 1), 4, 2).write_amplification(1)


def test_the_largest_time_binds() -> None:
    times = limits.step_times(
        reads=100,
        written_bytes=1e6,
        moved_bytes=1e9,
        read_iops=1000,
        write_bytes_per_s=1e7,
        memory_bytes_per_s=1e10,
        compute_s=0.15,
    )
    assert times.resources == pytest.approx({"disk": 0.2, "memory": 0.1, "model": 0.15})
    assert (times.binds, times.together) == ("disk", pytest.approx(0.2))
    assert times.in_turn == pytest.approx(0.45)
    assert limits.memory_bytes(10, 5, 4, 100) == 10 * 16 + 5 * (200 + 16)
