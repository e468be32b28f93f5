"""A writable layer in a process group of more than one is refused, at construction and at backward."""

from __future__ import annotations

import datetime
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

import bunkbed as bb
from bunkbed.torch import Embedding, Optimizer

torch.set_num_threads(1)


def worker(rank: int, folder: str, results: Any) -> None:
    """What one of two ranks meets; the messages go back through the queue."""
    import os

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    emb = Embedding(10, 2)
    opt = Optimizer(emb)
    loss = emb(torch.tensor([1])).sum()
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    messages = []
    for action in (
        lambda: Embedding(10, 2),
        lambda: Embedding(10, 2, path=Path(folder) / "new"),
        lambda: Embedding(10, 2, path=Path(folder) / "table"),
        loss.backward,
    ):
        try:
            action()
            messages.append("no error")
        except RuntimeError as error:
            messages.append(str(error))
    reader = bb.open(Path(folder) / "table", mode="r")
    frozen = Embedding(10, 2, table=reader)  # serving from many processes is fine
    messages.append(str(tuple(frozen(torch.tensor([1])).shape)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    opt.zero_grad()
    results.put((rank, messages))


@pytest.mark.timeout(120)
def test_two_processes(tmp_path: Path) -> None:
    Embedding(10, 2, path=tmp_path / "table").table.close()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=worker, args=(rank, str(tmp_path), results)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=90) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    for messages in found.values():
        for message in messages[:4]:
            assert "cannot be used under torch.distributed with 2 processes yet" in message
            assert "mode='r'" in message
        assert "table 'new'" in messages[1] and "table 'table'" in messages[2]
        assert messages[4] == "(1, 2)"


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
