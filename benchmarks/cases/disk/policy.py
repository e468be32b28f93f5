"""Rows the cache misses, compared with the best static cache and LRU, on ids that stay, move and scan.

Small records (the choice of a victim sees no values), caches of 1, 8 and 30 % of the rows, lookups and updates through
`bunkbed.Table` without lookahead. Ours is what the table's counters say; LRU and the static cache are simulated on the
same batches with as many frames (see `simulate`). The static cache holds the rows that are most probable at
that moment, which no cache can know: the difference is the cost of finding them out.

steady   Zipf ids, exponents 0.8, 1.05 and 1.2
moving   Zipf(1.05); every 200 steps a tenth of the ranks, hot ones too, go to other rows
scan     Zipf(1.05), and every tenth batch is the next part of a pass over the whole table
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

import bunkbed as bb
from benchmarks.cases.disk import simulate
from benchmarks.cases.disk.window import budget_for
from benchmarks.harness import common
from benchmarks.harness.figures import Figure, Settings

DIM = 4
# Batches are this part of the table's rows, as 65,536 ids are of ten million.
IDS_A_ROW = 65_536 / 10_000_000
WORKLOADS = {
    "steady Zipf(0.8)": (0.8, "steady"),
    "steady Zipf(1.05)": (1.05, "steady"),
    "steady Zipf(1.2)": (1.2, "steady"),
    "moving Zipf(1.05)": (1.05, "moving"),
    "Zipf(1.05) and a scan": (1.05, "scan"),
}
# Steps until the cache is full and has seen a row at the border of a good cache a few times, and steps that count.
CACHES = {0.01: (300, 100), 0.08: (1200, 200), 0.30: (2400, 200)}


def policy(settings: Settings) -> list[Figure]:
    """Misses over those of the best static cache, by workload and size of the cache."""
    num_rows = settings.pick(20_000, 250_000, 1_000_000)
    size = round(num_rows * IDS_A_ROW)
    figures = []
    with common.workspace(settings.dir, num_rows * 200) as folder:
        path = folder / "table"
        with bb.create(path, dim=DIM, num_rows=num_rows, optimizer=bb.SGD(), init=bb.Zeros()) as table:
            common.fill(table)
        print(f"{num_rows:,} rows, {size:,} ids a step; rows missed a step, and over the best static cache's")
        for share, (warm, measured) in CACHES.items():
            if settings.tiny:
                warm, measured = 20, 10
            ram = budget_for(path, round(share * num_rows))
            for name, (exponent, kind) in WORKLOADS.items():
                drawn = list(steps(num_rows, size, exponent, kind, warm + measured, settings.seed))
                batches = [batch for batch, _ in drawn]
                frames, own = misses(path, ram, batches, warm)
                best = sum(float(simulate.static_misses([batch], frames, ranked)[0]) for batch, ranked in drawn[warm:])
                best /= measured
                lru = simulate.lru_misses(batches, frames)[warm:].mean()
                unique = np.mean([np.unique(batch).size for batch in batches[warm:]])
                figures.append(
                    Figure(
                        f"misses / best static cache's, {name}, {share:.0%} of the rows",
                        own / best,
                        "x",
                        at_most=1.1 if (name, share) == ("steady Zipf(1.05)", 0.08) else None,
                        note=f"{own:,.0f} of {unique:,.0f} unique rows a step, best {best:,.0f}, "
                        f"LRU {lru:,.0f} ({lru / best:.2f}x); {frames:,} frames, {warm:,} steps warm",
                    )
                )
                print(figures[-1].line(), flush=True)
    return figures


def steps(
    num_rows: int, size: int, exponent: float, kind: str, count: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of ids, `int64[size]`, each with the ids from the most to the least probable at that step."""
    rng = np.random.default_rng(seed)
    cumulative = np.cumsum(simulate.zipf_probabilities(num_rows, exponent))
    ranked = rng.permutation(num_rows)
    position = 0
    for step in range(count):
        if kind == "moving" and step % 200 == 100:
            ranked = moved(ranked, rng, share=0.1)
        if kind == "scan" and step % 10 == 9:
            yield (position + np.arange(size)) % num_rows, ranked
            position += size
            continue
        ranks = np.searchsorted(cumulative, rng.random(size))
        yield ranked[np.minimum(ranks, num_rows - 1)], ranked


def moved(ranked: np.ndarray, rng: np.random.Generator, share: float) -> np.ndarray:
    """The same ids; this share of the ranks, whichever they are, changed hands among themselves."""
    moving = np.flatnonzero(rng.random(ranked.size) < share)
    after = ranked.copy()
    after[moving] = ranked[rng.permutation(moving)]
    return after


def misses(path: Path, ram: int, batches: list[np.ndarray], warm: int) -> tuple[int, float]:
    """Frames of the cache, and rows missed a step after the warm-up; nothing is committed."""
    table = bb.open(path, ram=ram)
    grads = np.zeros((max(batch.size for batch in batches), DIM), np.float32)
    before: dict[str, float] = {}
    for index, ids in enumerate(batches):
        if index == warm:
            before = dict(table.stats())
        table.lookup(ids)
        table.update(ids, grads[: ids.size])
    after = dict(table.stats())
    table.close(commit=False)
    return int(after["frame_capacity"]), (after["misses"] - before["misses"]) / (len(batches) - warm)
