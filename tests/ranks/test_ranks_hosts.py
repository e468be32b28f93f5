"""Tables that processes share, in models that other tools wrap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bunkbed.torch as bt
from rank_cases import HOSTS, Case, cases, run
from rank_processes import message_of, spawn


def _train(rank: int, case: Case) -> dict[str, Any]:
    return run(case, 2, rank)


@pytest.mark.parametrize("host", [host for host in HOSTS if host != "DDP"])
def test_rows_have_the_bits_of_one_process(host: str) -> None:
    case = Case(host=host, clips=True)
    alone = run(case, 2, None)
    for found in spawn(2, _train, case):
        for key, value in alone.items():
            if key.startswith(("layers", "norms")):
                assert (found[key] == value) if isinstance(value, (int, list)) else (found[key] == value).all(), key


#: Of one process under DDP, which must not see the float64 gradient of an anchor.
ALONE = {
    **{name: case for name, case in cases().items() if case.ram is None},
    **{host: Case(host=host, clips=True) for host in HOSTS},
}


def _train_alone(rank: int) -> dict[str, dict[str, Any]]:
    return {name: run(case, 1, rank) for name, case in ALONE.items()}


@pytest.fixture(scope="module")
def one() -> dict[str, dict[str, Any]]:
    return spawn(1, _train_alone)[0]


@pytest.mark.parametrize("name", ALONE)
def test_a_group_of_one_process_has_the_bits_of_no_group(one: dict[str, dict[str, Any]], name: str) -> None:
    alone = run(ALONE[name], 1, None)
    assert one[name].keys() == alone.keys()
    for key, value in alone.items():
        assert np.array_equal(one[name][key], value, equal_nan=key == "norms"), key


def _train_own_tables(rank: int) -> list[Any]:
    """Train a table of each process's own under DDP."""
    model = _Model(placement="local")
    whole = DistributedDataParallel(model)
    optimizer = bt.Optimizer(whole)
    for step in range(3):
        whole(torch.tensor([rank, 5, step + 7])).sum().backward()
        assert model.rows.anchor.grad.dtype is torch.float64 and model.rows.anchor.grad.item() > 0
        optimizer.step()
        optimizer.zero_grad()
    return [model.rows.table.step, model.rows.table.contains(range(20)).nonzero()[0].tolist()]


def test_processes_with_tables_of_their_own_train_under_ddp() -> None:
    assert spawn(2, _train_own_tables) == [[3, [0, 5, 7, 8, 9]], [3, [1, 5, 7, 8, 9]]]


class _Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rows = bt.Embedding(20, 4, seed=1, **options)
        self.dense = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.dense(self.rows(ids))
        return output


def _misuse(rank: int) -> list[str]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    found = [message_of(lambda: fully_shard(_Model(), mesh=mesh))]
    model = _Model()
    whole = DistributedDataParallel(model)
    every = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    found.append(message_of(lambda: bt.Optimizer(whole, dense=every)))
    rest = [parameter for parameter in model.parameters() if parameter not in bt.anchors(whole)]
    optimizer = bt.Optimizer(whole, dense=ZeroRedundancyOptimizer(rest, torch.optim.AdamW, lr=0.1))
    before = model.dense.weight.detach().clone()
    whole(torch.tensor([rank, 5])).sum().backward()
    optimizer.step()
    assert model.rows.table.step == 1 and (model.dense.weight != before).all()
    return found


def test_tools_that_divide_parameters_must_leave_anchors_whole() -> None:
    for sharded, zero in spawn(2, _misuse):
        assert "fully_shard(model, ignored_params=bunkbed.torch.anchors(model))" in sharded
        assert "anchors = bunkbed.torch.anchors(model)" in zero
