"""The script after the swap: `before.py` with tables that live on disk, within a RAM budget, and one optimizer.

What must I change in a script whose tables outgrow memory?

    diff examples/torch/before.py examples/torch/after.py

    python examples/torch/before.py    # trains, saves model.pt in the current folder
    python examples/torch/after.py     # continues from model.pt, with its tables in ./tables
"""

from pathlib import Path

import torch
from torch import nn

import bunkbed as bb
from bunkbed.torch import Embedding, Optimizer

USERS, ITEMS, DIM = 500, 300, 32


class Model(nn.Module):
    """Model that predicts a rating from the vectors of a user and an item."""

    def __init__(self):
        super().__init__()
        self.user = Embedding(USERS, DIM, path="tables/user", ram="64MiB", optimizer=bb.Adam(lr=0.05))
        self.item = Embedding(ITEMS, DIM, path="tables/item", ram="64MiB", optimizer=bb.Adam(lr=0.05))
        self.head = nn.Sequential(nn.Linear(3 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users, items):
        user, item = self.user(users), self.item(items)
        return self.head(torch.cat([user, item, user * item], -1))[:, 0]


def batches(count, size=512):
    """Yield synthetic ratings: users and items are of five kinds; a user likes items of the same kind."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        users = torch.randint(USERS, (size,), generator=generator)
        items = torch.randint(ITEMS, (size,), generator=generator)
        noise = 0.1 * torch.randn(size, generator=generator)
        yield users, items, (users % 5 == items % 5).float() + noise


def main():
    torch.manual_seed(0)
    model = Model()
    if Path("model.pt").exists():
        model.load_state_dict(torch.load("model.pt"))
    optimizer = Optimizer(model, dense=torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = []
    for users, items, ratings in batches(200):
        loss = nn.functional.mse_loss(model(users, items), ratings)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {sum(losses[:20]) / 20:.4f} -> {sum(losses[-20:]) / 20:.4f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
