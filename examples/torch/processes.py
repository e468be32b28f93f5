"""How do I train one table from several processes, under torchrun and DistributedDataParallel?

    torchrun --nproc-per-node=2 examples/torch/processes.py

The script of one process stays: the layers are made after `init_process_group`, and the table is divided over the
processes. It resumes from its last checkpoint, so `torchrun --max-restarts=1` goes on after a crash; `--fail-at 150`
shows it. The other processes_*.py train this model with other tools.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bunkbed as bb
from bunkbed.torch import Embedding, Optimizer, lookahead

USERS, ITEMS, DIM = 500, 300, 16


class Ratings(nn.Module):
    """Model that predicts a rating from the vectors of a user and an item."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        ours = {"ram": "64MiB", "optimizer": bb.Adam(lr=0.05), "init": bb.Normal(std=0.1)}
        self.user = Embedding(USERS, DIM, path=folder / "user", **ours)
        self.item = Embedding(ITEMS, DIM, path=folder / "item", **ours)
        self.head = nn.Sequential(nn.Linear(DIM, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return self.head(self.user(users) * self.item(items))


def batches(steps: range, rank: int, size: int = 256):
    """Yield this process's batches: users and items are of five kinds; a user likes items of the same kind."""
    for step in steps:
        generator = torch.Generator().manual_seed(1_000_000 * rank + step)
        users = torch.randint(USERS, (size,), generator=generator)
        items = torch.randint(ITEMS, (size,), generator=generator)
        noise = 0.1 * torch.randn(size, generator=generator)
        yield users, items, (users % 5 == items % 5).float() + noise


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    users, items, ratings = batch
    return nn.functional.mse_loss(model(users, items)[:, 0], ratings)


def show(folder: Path, name: str, losses: list[float]) -> None:
    """Print the mean losses of the first and the last steps, and what the folder of the tables holds."""
    steps = max(1, len(losses) // 10)
    first, last = (sum(part) / steps for part in (losses[:steps], losses[-steps:]))
    print(f"{name}: loss {first:.4f} -> {last:.4f}")
    with bb.open(folder / "user", mode="r") as users:
        print(f"step {users.step}, {len(users):,} rows of users in {users.num_shards} shards")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--folder", type=Path, default=Path("processes"))
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--fail-at", type=int, default=-1, help="let a process of the first attempt crash at a step")
    given = options.parse_args()
    dist.init_process_group("gloo")  # before the layers are made
    rank = dist.get_rank()

    model = Ratings(given.folder)
    whole = DistributedDataParallel(model)
    optimizer = Optimizer(whole, dense=torch.optim.AdamW(whole.parameters(), lr=0.01))
    checkpoint, done = given.folder / "model.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])  # the rows go back to the checkpoint, too
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
        print(f"rank {rank} goes on at step {done}", flush=True)
    losses = []
    loader = lookahead(
        batches(range(done, given.steps), rank), model, ids=lambda batch: {model.user: batch[0], model.item: batch[1]}
    )
    for batch in loader:
        if done == given.fail_at and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(1)
        loss = loss_of(whole, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        done += 1
        if done % 100 == 0 and rank == 0:  # one process saves; the others wait at their next lookup
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
            torch.save(state, checkpoint)
    dist.barrier()
    for layer in (model.user, model.item):
        layer.table.close(commit=True)
    if rank == 0:
        show(given.folder, "DistributedDataParallel", losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
