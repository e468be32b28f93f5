"""Step time by the size of the table: 10^6 to 10^9 rows, the same unique rows a step, everything touched in RAM.

In every table 400,000 ids have the same Zipf probabilities, scattered over its range. They are trained before the
clock starts: a batch has equally many unique rows in each table, and no row is read from disk. What may differ is how
rows are found (a flat directory or a hashed one, as the table chooses) and how far apart they lie.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import torch

import bunkbed as bb
from benchmarks.harness import common, turns
from benchmarks.harness.figures import Figure, Settings
from bunkbed.torch import Embedding, Optimizer

DIM = 64


def growth(settings: Settings) -> list[Figure]:
    """Steps on each table in turns."""
    sizes = settings.pick((10**4, 10**6), (10**6, 10**7, 10**8, 10**9), (10**6, 10**7, 10**8, 10**9))
    popular, size = settings.pick((2_000, 256), (200_000, 32_768), (400_000, 65_536))
    rounds, steps = settings.pick((2, 2), (12, 4), (24, 5))
    sample = common.zipf(popular)
    rng = np.random.default_rng(settings.seed)
    ranks = [sample(rng, size) for _ in range(8)]
    grad = torch.full((size, DIM), 0.01)
    tables = {}
    with common.workspace(settings.dir, len(sizes) * popular * DIM * 12 * 2) as folder:
        sides = {}
        for num_rows in sizes:
            name = f"10^{len(str(num_rows)) - 1} rows"
            tables[name] = bb.create(
                folder / str(num_rows),
                dim=DIM,
                num_rows=num_rows,
                optimizer=bb.Adam(),
                init=bb.Normal(0.01),
                ram="1GiB",
            )
            sides[name] = stepper(tables[name], popular, ranks, grad)
        print(f"{size:,} Zipf(1.05) ids of {popular:,} trained ones, {DIM} + Adam, ram='1GiB' each")
        times = turns.interleave(sides, range(len(ranks)), rounds=rounds, steps=steps)
        stats = {name: table.stats() for name, table in tables.items()}
        for table in tables.values():
            table.close(commit=False)
    least, most = next(iter(sides)), list(sides)[-1]
    ratios = times.ratios(most, least)
    middle = statistics.median(ratios)
    figures = [
        Figure(f"step, {most} / {least}", middle, "x", min(ratios), max(ratios), len(ratios), at_most=1.15),
        Figure(
            "rows read in the measured steps",
            sum(s["reads"] for s in stats.values()),
            note=f"{sum(s['evictions'] for s in stats.values()):,.0f} evicted",
        ),
    ]
    return figures + turns.step_times(times)


def stepper(table: bb.Table, popular: int, ranks: list[np.ndarray], grad: torch.Tensor) -> Callable[[int], None]:
    """A step on the table's own ids of a batch of ranks, every popular row stored."""
    place = common.scatter(table.num_rows or 0)
    everything = place(np.arange(popular))
    zeros = np.zeros((10_000, DIM), np.float32)
    for start in range(0, popular, len(zeros)):
        part = everything[start : start + len(zeros)]
        table.update(part, zeros[: part.size])
    batches = [torch.from_numpy(place(part)) for part in ranks]
    layer = Embedding(table.num_rows, DIM, table=table)
    optimizer = Optimizer(layer)

    def step(index: int) -> None:
        optimizer.zero_grad()
        layer(batches[index]).backward(grad)
        optimizer.step()

    return step
