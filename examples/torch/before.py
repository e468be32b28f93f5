"""The script before the swap: ratings learned with `torch.nn.Embedding`, sparse gradients and two optimizers.

What must I change in a script whose tables outgrow memory?

    diff examples/torch/before.py examples/torch/after.py

    python examples/torch/before.py    # trains, saves model.pt in the current folder
    python examples/torch/after.py     # continues from model.pt, with its tables in ./tables
"""

from pathlib import Path

import torch
from torch import nn

USERS, ITEMS, DIM = 500, 300, 32


class Model(nn.Module):
    """Model that predicts a rating from the vectors of a user and an item."""

    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, DIM, sparse=True)
        self.item = nn.Embedding(ITEMS, DIM, sparse=True)
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
    sparse = torch.optim.SparseAdam([*model.user.parameters(), *model.item.parameters()], lr=0.05)
    dense = torch.optim.AdamW(model.head.parameters(), lr=0.01)
    losses = []
    for users, items, ratings in batches(200):
        loss = nn.functional.mse_loss(model(users, items), ratings)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        losses.append(loss.item())
    print(f"loss {sum(losses[:20]) / 20:.4f} -> {sum(losses[-20:]) / 20:.4f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
