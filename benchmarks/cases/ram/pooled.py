"""Mean-pooled bags of 20 ids on a table in RAM, compared with FBGEMM's operator and torch's `EmbeddingBag`.

The resident cases' table; 3,277 bags make 65,540 ids a batch. Forward passes in training mode, gradients on; ours with
its default optimizer, so its records hold Adam's state too. Two bare loops take turns with them: C++ that asks ahead
and adds up the same rows, with no directory, no bags and no output; one where rows lie as in our frames, Adam's state
between them, and one where they lie as in a plain array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import bunkbed as bb
from benchmarks.cases.ram import resident
from benchmarks.harness import common, turns
from benchmarks.harness.figures import Figure, Settings
from benchmarks.peers import fbgemm
from bunkbed import _native

BAG = 20
Side = Callable[[torch.Tensor], Any]


def our_side(num_rows: int, dim: int) -> Side:
    from bunkbed.torch import EmbeddingBag, Optimizer

    table = bb.create(None, dim=dim, num_rows=num_rows, optimizer=bb.Adam(lr=1e-3), init=bb.Normal(1.0))
    common.fill(table)
    layer = EmbeddingBag(num_rows, dim, table=table, mode="mean")
    optimizer = Optimizer(layer)  # a trainable layer wants one before it looks anything up
    return lambda ids, _held=optimizer: layer(ids)


def torch_side(num_rows: int, dim: int) -> Side:
    return torch.nn.EmbeddingBag(num_rows, dim, mode="mean", sparse=True)


def fbgemm_side(num_rows: int, dim: int, bags: int) -> Side:
    module = fbgemm.make(num_rows, dim, optimizer_name="rowwise-adagrad", pooling="MEAN")
    offsets = torch.arange(bags + 1) * BAG
    return lambda ids: module(ids.view(-1), offsets)


def bare_loop(num_rows: int, dim: int, record_bytes: int) -> Side:
    probe = _native.RowProbe(num_rows, record_bytes)
    return lambda ids: probe.run(ids.view(-1).numpy(), dim * 4, "read")


def bags(settings: Settings) -> list[Figure]:
    """Pooled lookups of all three."""
    num_rows, dim, count = (2_000, 8, 16) if settings.tiny else (4_000_000, 64, 3_277)
    sample = common.zipf(num_rows)
    rng = np.random.default_rng(settings.seed)
    batches = [torch.from_numpy(sample(rng, count * BAG)).view(-1, BAG) for _ in range(8)]
    print(f"{num_rows:,} x {dim} float32, {count:,} mean-pooled bags of {BAG} Zipf(1.05) ids")
    makers = {
        turns.OURS: lambda: our_side(num_rows, dim),
        "torch": lambda: torch_side(num_rows, dim),
        "fbgemm": lambda: fbgemm_side(num_rows, dim, count),
        "bare loop, our frames": lambda: bare_loop(num_rows, dim, dim * 12),
        "bare loop, plain array": lambda: bare_loop(num_rows, dim, dim * 4),
    }
    sides, absent = resident.build(makers)
    rounds, steps = settings.pick((2, 2), (10, 4), (30, 5))
    times = turns.interleave(sides, batches, rounds=rounds, steps=steps)
    targets = {"torch": 1.7, "fbgemm": 2.0}
    figures = [turns.ratio(times, peer, at_least=target) for peer, target in targets.items() if peer in sides]
    return figures + turns.step_times(times, notes=resident.notes(sides)) + absent
