"""Layers of one process under torch.distributed: a reader in each process, and a group of one."""

from __future__ import annotations

from pathlib import Path

import torch

import bunkbed as bb
from bunkbed.torch import Embedding, Optimizer
from rank_processes import spawn

torch.set_num_threads(1)


def _reads(rank: int, path: str) -> list[float]:
    with bb.open(path, mode="r") as reader:
        frozen = Embedding(10, 2, table=reader)
        rows: list[float] = frozen(torch.tensor([rank])).flatten().tolist()
    return rows


def test_each_process_has_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "table"
    with Embedding(10, 2, path=path, seed=1).table as table:
        rows = table.get([0, 1]).tolist()
    assert spawn(2, _reads, str(path)) == rows


def test_a_group_of_one_is_fine(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        emb = Embedding(10, 2)
        opt = Optimizer(emb)
        emb(torch.tensor([1])).sum().backward()
        opt.step()
        assert emb.table.step == 1
    finally:
        torch.distributed.destroy_process_group()
