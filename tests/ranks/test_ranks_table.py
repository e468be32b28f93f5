"""The methods of a table that processes share, and how many exchanges a step takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import bunkbed as bb
import bunkbed.torch as bt
from bunkbed.table import sweeps
from bunkbed.testing import ReferenceTable, arithmetic
from bunkbed.testing.compare import assert_same_bits
from bunkbed.torch.ranks.plan import owners_of
from bunkbed.window import Window
from rank_processes import message_of, spawn

ROWS, DIM = 400, 6
EVERY = np.arange(ROWS)
FACTS: dict[str, Any] = {"dim": DIM, "num_rows": ROWS, "optimizer": bb.Adam(lr=0.01), "init": bb.Normal(0.1), "seed": 3}


def _layer(**places: Any) -> bt.Embedding:
    made = {"optimizer": FACTS["optimizer"], "init": FACTS["init"], "seed": FACTS["seed"]}
    return bt.Embedding(ROWS, DIM, **made, **places)


def _ids(step: int, rank: int) -> np.ndarray:
    """Return other ids on each rank, of which few come often; in one step, none on rank 1."""
    rng = np.random.default_rng([step, rank])
    return (rng.zipf(1.3, 0 if (step, rank) == (2, 1) else 100 + 20 * rank) - 1) % ROWS


def _methods(rank: int, place: str | None, shards: int) -> None:
    world = dist.get_world_size()
    places: dict[str, Any] = {} if place is None else {"path": place, "ram": "64MiB", "shards": shards}
    table = _layer(**places).table
    oracle = ReferenceTable(**FACTS)
    for step in range(5):
        every = [_ids(step, one) for one in range(world)]
        grads = [
            np.random.default_rng([9, step, one]).standard_normal((len(ids), DIM)) for one, ids in enumerate(every)
        ]
        grads = [one.astype(np.float32) for one in grads]
        assert_same_bits(table.lookup(every[rank]), oracle.lookup(every[rank]), "lookup")
        offsets = np.arange(0, len(every[rank]), 7)
        for pooling in ("sum", "mean"):
            found = table.lookup_bags(every[rank], offsets, pooling=pooling)
            assert_same_bits(found, oracle.lookup_bags(every[rank], offsets, pooling=pooling), pooling)
        table.update(every[rank], grads[rank])
        oracle.update(np.concatenate(every), np.concatenate(grads))
        # Of equal ids, the last one of the last rank is written.
        values = [np.full((3, DIM), step + one, np.float32) for one in range(world)]
        table.set(np.array([1, 5, step]), values[rank])
        for one in values:
            oracle.set(np.array([1, 5, step]), one)
        gone = [np.array([2 + one, 7, step, 3 * step + one]) for one in range(world)]
        assert table.delete(gone[rank]) == oracle.delete(np.concatenate(gone))
        batch = table.batch(every[rank])
        found = table.lookup_batch(batch, len(every[rank]))
        assert_same_bits(found, oracle.lookup(every[rank]), "lookup_batch")
        table.update_batch(batch, batch.sum(grads[rank])[0])
        sums = [arithmetic.sum_duplicates(ids, one) for ids, one in zip(every, grads, strict=True)]
        oracle.update(np.concatenate([ids for ids, _ in sums]), np.concatenate([one for _, one in sums]))
    for slot in ("weight", *oracle.slots):
        assert_same_bits(table.get(EVERY, slot=slot), oracle.get(EVERY, slot=slot), slot)
    assert (table.contains(EVERY) == oracle.contains(EVERY)).all()
    assert table.step == oracle.step and table.optimizer == oracle.optimizer
    table.optimizer = bb.Adam(lr=0.5)
    oracle.optimizer = bb.Adam(lr=0.5)
    table.update(_ids(7, rank), np.ones((len(_ids(7, rank)), DIM), np.float32))
    together = np.concatenate([_ids(7, one) for one in range(world)])
    oracle.update(together, np.ones((len(together), DIM), np.float32))
    assert_same_bits(table.get(EVERY), oracle.get(EVERY), "another learning rate")
    # What counts or scans rows sees those of this rank, and each row is on one.
    scanned = np.concatenate([ids for ids, _ in table.local.scan()])
    assert (owners_of(scanned, table.num_shards, world) == rank).all() and len(scanned) == len(table)
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, scanned.tolist())
    assert sorted(id for part in parts for id in part) == EVERY[oracle.contains(EVERY)].tolist()
    assert f"rank {rank} of {world}" in repr(table) and "DistributedTable" in repr(table)
    assert "use bunkbed.torch.lookahead" in message_of(lambda: _window(table))
    assert "always up to date" in message_of(table.refresh)
    table.compact()
    table.close(commit=False)
    _sweep(rank, world)


def _sweep(rank: int, world: int) -> None:
    """Sweep a table whose ranks have unlike numbers of rows and ages; `len` and `stats` see those of one rank."""
    every_rule: list[dict[str, Any]] = [
        {"max_rows": 100},
        {"max_rows": 90, "evict": "rarest", "expire": 4, "clock": "event"},
    ]
    for rules in every_rule:
        table = bt.Embedding(None, 2, seed=0, retention=bb.Retention(**rules), optimizer=bb.SGD(lr=0.1)).table
        oracle = ReferenceTable(dim=2, seed=0, init=table.init, optimizer=bb.SGD(lr=0.1), **rules)
        for step in range(8):
            every = np.random.default_rng(step).integers(0, 400, 60)
            every = every[(owners_of(every, world, world) == 0) | (step < 4)]  # later only rows of rank 0 are named
            if "clock" in rules:
                table.clock = oracle.clock = (1 << 62) + step
            mine = every[rank::world]
            table.update(mine, np.ones((len(mine), 2), np.float32))
            oracle.update(every, np.ones((len(every), 2), np.float32))
        expected = oracle.sweep()
        with mock.patch.object(sweeps, "most_at_once", lambda ram_bytes: 20 + rank):  # ranks with unlike budgets
            found = table.sweep()
        assert (found.rows, found.expired, found.evicted) == (expected.rows, expected.expired, expected.evicted)
        assert found.removed > 30 and (found.ages, found.cut) == (expected.ages, expected.cut)
        assert (table.contains(np.arange(400)) == oracle.contains(np.arange(400))).all()
        table.close(commit=False)


def _window(table: Any) -> None:
    with Window(table) as window:
        window.push(np.array([1]))


@pytest.mark.parametrize(("world", "shards"), [(2, 2), (2, 5), (4, 4)])
def test_methods_in_files(world: int, shards: int, tmp_path: Path) -> None:
    spawn(world, _methods, str(tmp_path / "rows"), shards)


def test_methods_in_ram() -> None:
    spawn(2, _methods, None, 2)


# ---- Exchanges


def _counts(rank: int, ahead: bool) -> list[int]:
    layers = nn.ModuleList([_layer() for _ in range(4)])
    optimizer = bt.Optimizer(layers)
    ranks = layers[0].table.ranks
    batches = [torch.from_numpy(_ids(5, rank))] * 6
    loader: Any = batches
    if ahead:
        loader = bt.lookahead(batches, layers, ids=lambda ids: dict.fromkeys(layers, ids))
    counts = []
    for ids in loader:
        before = ranks.exchanges
        sum(layer(ids).sum() for layer in layers).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(ranks.exchanges - before)
    return counts[1:]


def test_exchanges_of_a_step() -> None:
    # With ids ahead: rows, gradients, norms, for all tables together. Between the steps comes the exchange of ids.
    assert spawn(2, _counts, True) == [[3] * 5] * 2
    # Without: ids and rows of each table, whose layers are called one by one.
    assert spawn(2, _counts, False) == [[4 * 2 + 2] * 5] * 2
