"""Tables whose rows do not fit in the ranks' RAM: the bits of one process whose rows do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import bunkbed as bb
import bunkbed.torch as bt
from bunkbed.testing.compare import assert_same_bits
from rank_processes import spawn

ROWS, DIM, SIZE, STEPS = 30_000, 32, 1_500, 30
EVERY = np.arange(ROWS)
FACTS: dict[str, Any] = {"optimizer": bb.Adam(lr=0.01), "init": bb.Normal(std=0.1), "seed": 3}


def _ids(step: int, rank: int) -> torch.Tensor:
    rng = np.random.default_rng([step, rank])
    return torch.from_numpy((rng.zipf(1.1, SIZE) - 1) % ROWS)


def _loss(layer: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = layer(_ids(step, rank)).square().sum()
    return loss


def _wanted(layer: bt.Embedding, rank: int) -> Callable[[int], dict[Any, torch.Tensor]]:
    return lambda step: {layer: _ids(step, rank)}


def _train(rank: int, place: str, shards: int, ram: str, ahead: dict[str, Any] | None) -> int:
    """Train, with commits and compactions, and the table opened again half way; return evictions of this rank."""
    evicted = 0
    for part in (range(STEPS // 2), range(STEPS // 2, STEPS)):
        layer = bt.Embedding(ROWS, DIM, path=place, ram=ram, shards=shards, **FACTS)
        optimizer = bt.Optimizer(layer)
        batches: Any = part
        if ahead is not None:
            batches = bt.lookahead(part, layer, ids=_wanted(layer, rank), **ahead)
        for step in batches:
            _loss(layer, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 7 == 3:
                layer.table.begin_commit()
            if step % 11 == 5:
                layer.table.compact()
        evicted += layer.table.stats()["evictions"]
        layer.table.close(commit=True)
        del layer, optimizer
        dist.barrier()
    return evicted


@pytest.fixture(scope="module")
def alone() -> dict[str, np.ndarray]:
    """Return the rows of one process, in RAM."""
    layer = bt.Embedding(ROWS, DIM, **FACTS)
    optimizer = bt.Optimizer(layer)
    for step in range(STEPS):
        for rank in range(2):
            (_loss(layer, step, rank) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {slot: layer.table.get(EVERY, slot=slot) for slot in ("weight", "exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize(
    ("shards", "ram", "ahead"),
    [
        (2, "5MiB", None),
        (2, "5MiB", {}),
        (2, "6MiB", {"window": 3, "depth": 1}),
        (6, "8MiB", {"depth": 4}),
        (2, "64MiB", {}),
    ],
)
def test_budgets_windows_and_shards(
    alone: dict[str, np.ndarray], shards: int, ram: str, ahead: dict[str, Any] | None, tmp_path: Path
) -> None:
    found = spawn(2, _train, str(tmp_path / "rows"), shards, ram, ahead)
    assert all(evicted > 100 for evicted in found) or ram == "64MiB"
    assert not bb.check(tmp_path / "rows")
    with bb.open(tmp_path / "rows", mode="r") as reader:
        for slot, rows in alone.items():
            assert_same_bits(reader.get(EVERY, slot=slot), rows, slot)
