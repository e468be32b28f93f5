"""The RAM of all ranks together, in a memory cgroup: within ``ram=``, whatever the rows take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from benchmarks.harness.common import MIB, MemoryLimit

import bunkbed as bb
import bunkbed.torch as bt
from rank_processes import spawn

ROWS, DIM, SIZE, STEPS = 1_000_000, 64, 4096, 60
RAM = 96 * MIB
#: Messages, gradients and Python's own growth, of both ranks; outside the budget.
OUTSIDE = 48 * MIB

why_not = MemoryLimit.why_not()
pytestmark = pytest.mark.skipif(why_not is not None, reason=str(why_not))


def _train(layer: bt.Embedding, rank: int, steps: int) -> None:
    optimizer = bt.Optimizer(layer)
    draws = (np.random.default_rng([step, rank]).integers(0, ROWS, SIZE) for step in range(steps))
    ids = (torch.from_numpy(drawn % layer.num_embeddings) for drawn in draws)
    for batch in bt.lookahead(ids, layer, ids=lambda batch: {layer: batch}):
        layer(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _limited(rank: int, place: str, group: str, ram: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"optimizer": bb.Adam(lr=0.01), "init": bb.Normal(std=0.1)}
    _train(bt.Embedding(10_000, DIM, **facts), rank, 3)  # what the process needs anyway is not charged to the group
    dist.barrier()
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    layer = bt.Embedding(ROWS, DIM, path=place, ram=ram, **facts)
    _train(layer, rank, STEPS)
    layer.table.commit()
    found = {"rows": len(layer.table), **layer.table.stats()}
    dist.barrier()
    layer.table.close()
    return found


def test_all_ranks_together_keep_to_ram(tmp_path: Path) -> None:
    with MemoryLimit(RAM + OUTSIDE) as limit:
        said = spawn(2, _limited, str(tmp_path / "rows"), str(limit.folder), RAM)
        assert RAM // 2 < limit.peak_bytes() <= RAM + OUTSIDE
    stored = sum(one["rows"] for one in said) * 3 * 4 * DIM
    assert stored > 2 * RAM and all(one["evictions"] > 0 for one in said)
    assert sum(one["ram_bytes"] for one in said) <= RAM
    assert not bb.check(tmp_path / "rows")


def test_the_group_ends_a_rank_that_takes_more(tmp_path: Path) -> None:
    with MemoryLimit(RAM + OUTSIDE) as limit, pytest.raises(AssertionError, match="died with exit status -9"):
        spawn(2, _limited, str(tmp_path / "rows"), str(limit.folder), 8 * RAM)
