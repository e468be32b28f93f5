"""Rows missed with a window of ids, compared with LRU and Belady's rule on the same batches and frames.

Zipf(1.05) ids; a cache of about four batches' unique rows; `lookahead` with a window of 32 batches, which ranks
eviction, and a staging depth of 1 (4 reported), which holds records. Ours is what the table's own counters say after
the warm-up; the others are simulated (see `simulate`), start with the same empty cache and count the same steps.
"""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from benchmarks.cases.disk import simulate
from benchmarks.harness import common
from benchmarks.harness.figures import Figure, Settings

DIM = 64
WINDOW = 32


def window(settings: Settings) -> list[Figure]:
    """Misses without lookahead, with depth 1 and with depth 4."""
    import torch

    from bunkbed.torch import lookahead

    num_rows, size = settings.pick((20_000, 512), (1_000_000, 16_384), (1_000_000, 16_384))
    warm, measured = settings.pick((8, 8), (48, 64), (64, 128))
    sample = common.zipf(num_rows)
    rng = np.random.default_rng(settings.seed)
    batches = [sample(rng, size) for _ in range(warm + measured)]
    unique = float(np.mean([np.unique(batch).size for batch in batches]))
    known = inspect.signature(lookahead).parameters
    if "window" not in known:
        print("lookahead knows no window yet: it stages only")
    figures = []
    with common.workspace(settings.dir, int(num_rows * DIM * 12 * 2)) as folder:
        path = folder / "table"
        with bb.create(path, dim=DIM, num_rows=num_rows, optimizer=bb.Adam(), init=bb.Normal(0.01)) as table:
            common.fill(table)
        # The window lives in the same budget: what is left to the cache while it is full is about four batches.
        ram = budget_for(path, round(4.5 * unique))
        print(
            f"{num_rows:,} x {DIM} + Adam, {size:,} Zipf(1.05) ids, {unique:,.0f} unique rows a batch, "
            f"ram={common.bb_bytes(ram)}; {warm} batches warm, {measured} count"
        )
        for name, depths in {
            "without lookahead": None,
            f"window {WINDOW}, depth 1": {"depth": 1, "window": WINDOW},
            f"window {WINDOW}, depth 4": {"depth": 4, "window": WINDOW},
        }.items():
            how = None if depths is None else {key: value for key, value in depths.items() if key in known}
            tensors = [torch.from_numpy(batch) for batch in batches]
            roomy = ram if how is None else with_room(path, ram, round(4 * unique), tensors, how)
            counts = misses(path, roomy, tensors, warm, how)
            # A row counts when it is staged: before step `warm` those of the batches ahead were counted already.
            first = warm if depths is None else warm + depths["depth"] + 1
            figures += ratios(name, counts, batches, first, unique, depth=0 if depths is None else depths["depth"])
    return figures


def budget_for(path: Path, frames: int) -> int:
    """The least `ram` in bytes, to 16 KiB, whose cache has at least `frames`."""

    def capacity(ram: int) -> int:
        try:
            table = bb.open(path, ram=ram)
        except (MemoryError, ValueError):
            return 0
        try:
            return int(table.stats()["frame_capacity"])
        finally:
            table.close(commit=False)

    unit = 16 << 10
    low, high = 0, 64
    while capacity(high * unit) < frames:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if capacity(middle * unit) < frames else (low, middle)
    return high * unit


def with_room(path: Path, ram: int, frames: int, batches: list[Any], how: dict[str, int]) -> int:
    """`ram` and what the window takes of it, so that about `frames` are left while the window is full."""
    part = batches[: 2 * WINDOW]
    for _ in range(4):
        left = misses(path, ram, part, len(part) // 2, how)["frames"]
        if abs(left - frames) <= frames // 50:
            break
        ram += int((frames - left) * DIM * 12.5)
    return ram


def misses(path: Path, ram: int, batches: list[Any], warm: int, how: dict[str, int] | None) -> dict[str, float]:
    """The table's counters over the steps after the warm-up; changes are not committed."""
    import torch

    from bunkbed.torch import Embedding, Optimizer, lookahead

    table = bb.open(path, ram=ram)
    layer = Embedding(table.num_rows, DIM, table=table)
    optimizer = Optimizer(layer)
    grad = torch.full((len(batches[0]), DIM), 0.01)
    loader: Any = batches if how is None else lookahead(batches, layer, ids=lambda ids: {layer: ids}, **how)
    before: dict[str, float] = {}
    for index, ids in zip(itertools.count(), loader, strict=False):
        if index == warm:
            before = dict(table.stats())
        optimizer.zero_grad()
        layer(ids).backward(grad)
        optimizer.step()
    after = dict(table.stats())
    table.close(commit=False)
    # While the window was full: what it takes is off the cache, and comes back when it is empty.
    return {**common.delta(after, before), "frames": before["frame_capacity"]}


def ratios(
    name: str, counts: dict[str, float], batches: list[np.ndarray], first: int, unique: float, *, depth: int
) -> list[Figure]:
    """Ours over LRU's and over Belady's, from batch `first` on.

    Belady's rule twice: loading a batch when it is wanted, and `depth` batches before, as staging must: rows of the
    batches in between may not make room then.
    """
    frames, steps = int(counts["frames"]), len(batches) - first
    lru = float(simulate.lru_misses(batches, frames)[first:].mean())
    belady = float(simulate.belady_misses(batches, frames)[first:].mean())
    own = counts["misses"] / steps
    note = f"{own:,.0f} a step ({own / unique:.0%} of unique rows), {frames:,} frames"
    at_most = ({"at_most": 0.75}, {"at_most": 1.05}) if depth == 1 else ({}, {})
    figures = [
        Figure(f"misses / LRU's, {name}", own / lru, "x", note=f"{note}; LRU {lru:,.0f}", **at_most[0]),
        Figure(f"misses / Belady's, {name}", own / belady, "x", note=f"Belady {belady:,.0f}", **at_most[1]),
    ]
    if depth > 0:
        try:
            staged = float(simulate.belady_misses(batches, frames, depth)[first:].mean())
        except ValueError as error:  # the table then stages less
            note = str(error)
            figures.append(Figure(f"misses / Belady's that stages, {name}", None, "x", note=note))
        else:
            note = f"Belady {staged:,.0f} when it must load each batch {depth} ahead"
            figures.append(Figure(f"misses / Belady's that stages, {name}", own / staged, "x", note=note))
    return figures
