"""Batches of 64 ids on a table in RAM: microseconds of a lookup and of an Adam step, compared with torch's.

The resident cases' table and ids. At this size it is calls that cost, not rows: Python, autograd, locks. A turn is
some hundred calls.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import torch

from benchmarks.harness import common, turns
from benchmarks.harness.figures import Figure, Settings
from benchmarks.peers import ours, pytorch

IDS = 64


def workload(settings: Settings) -> tuple[int, int, list[torch.Tensor], int, int]:
    """Rows, dim, batches, rounds, steps."""
    num_rows, dim = (2_000, 8) if settings.tiny else (4_000_000, 64)
    sample = common.zipf(num_rows)
    rng = np.random.default_rng(settings.seed)
    batches = [torch.from_numpy(sample(rng, IDS)) for _ in range(settings.pick(8, 64, 64))]
    print(f"{num_rows:,} x {dim} float32, {IDS} Zipf(1.05) ids")
    return num_rows, dim, batches, *settings.pick((2, 5), (10, 200), (20, 400))


def small_lookup(settings: Settings) -> list[Figure]:
    """Forward passes in training mode with gradients on, and without gradients."""
    from bunkbed.torch import Embedding, Optimizer

    num_rows, dim, batches, rounds, steps = workload(settings)
    layer = Embedding(num_rows, dim, table=ours.stored_table("adam", num_rows, dim))
    held = Optimizer(layer)
    bare = torch.nn.Embedding(num_rows, dim, sparse=True)

    def silent(module: Any) -> Any:
        def look_up(ids: torch.Tensor) -> None:
            with torch.no_grad():
                module(ids)

        return look_up

    sides = {turns.OURS: layer, "nn.Embedding": bare}
    figures = over(turns.interleave(sides, batches, rounds=rounds, steps=steps), "training")
    sides = {turns.OURS: silent(layer), "nn.Embedding": silent(bare)}
    figures += over(turns.interleave(sides, batches, rounds=rounds, steps=steps), "no_grad")
    del held
    return figures


def over(times: turns.Times, how: str) -> list[Figure]:
    """Microseconds over the bare lookup, round by round."""
    pairs = zip(times.medians(turns.OURS), times.medians("nn.Embedding"), strict=True)
    differences = [(mine - theirs) * 1e6 for mine, theirs in pairs]
    note = ", ".join(f"{side} {times.median(side) * 1e6:.1f} us" for side in times.rounds)
    name = f"lookup of {IDS} ids over nn.Embedding's, {how}"
    middle = statistics.median(differences)
    return [Figure(name, middle, "us", min(differences), max(differences), len(differences), at_most=10, note=note)]


def small_adam(settings: Settings) -> list[Figure]:
    """Compare lookup, backward and optimizer step with SparseAdam's."""
    num_rows, dim, batches, rounds, steps = workload(settings)
    grad = torch.ones(IDS, dim)
    sides = {
        turns.OURS: ours.training("adam", num_rows, dim, grad),
        "torch": pytorch.training("adam", num_rows, dim, grad),
    }
    times = turns.interleave(sides, batches, rounds=rounds, steps=steps)
    return [turns.ratio(times, "torch", at_least=2), *turns.step_times(times, unit="us")]
