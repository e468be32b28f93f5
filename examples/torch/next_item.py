"""How do I train a sequence model whose output rows are its input rows, without a softmax over all rows?

    python examples/torch/next_item.py                                     # a synthetic log, seconds
    python examples/torch/next_item.py --ratings ml-1m/ratings.dat --epochs 20

A GRU over a user's last items computes a query; the predicted item is the one whose row has the highest product with
the query. One table serves three lookups of a step: the inputs, the next items, and a few hundred negatives that the
whole batch shares, drawn by popularity with logQ correction. Ranking streams over all rows of the table.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import bunkbed as bb
from bunkbed.torch import Embedding, Optimizer

LENGTH = 16


class Model(nn.Module):
    def __init__(self, items: int, dim: int, folder: Path, ram: str) -> None:
        super().__init__()
        self.item = Embedding(items, dim, path=folder / "item", ram=ram, init=bb.Normal(0.1), optimizer=bb.Adam(5e-3))
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.query = nn.Linear(dim, dim)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        """Return the queries for the item after each of int64[B, T]: float32[B, T, dim]."""
        return self.query(self.gru(self.item(items))[0])

    def loss(self, sequences: torch.Tensor, negatives: torch.Tensor, log_chance: torch.Tensor) -> torch.Tensor:
        """Return the sampled softmax loss of int64[B, T + 1] with int64[K] negatives, drawn with exp(log_chance)."""
        queries, wanted = self(sequences[:, :-1]), sequences[:, 1:]
        right = (queries * self.item(wanted)).sum(-1, keepdim=True) - log_chance[wanted].unsqueeze(-1)
        wrong = queries @ self.item(negatives).T - log_chance[negatives]
        wrong = wrong.masked_fill(wanted.unsqueeze(-1) == negatives, -torch.inf)
        logits = torch.cat([right, wrong], -1).flatten(0, 1)
        return nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))


def hit_rate(model: Model, sequences: np.ndarray) -> float:
    """Return how often the last item of a sequence is among the ten best of the whole table."""
    model.eval()
    with torch.no_grad():
        queries = torch.cat([model(torch.from_numpy(part[:, :-1]))[:, -1] for part in np.array_split(sequences, 4)])
    model.train()
    best, _ = model.item.table.topk(queries.numpy(), 10)
    return float((best == sequences[:, -1:]).any(1).mean())


def planted(items: int, sequences: int, seed: int) -> tuple[np.ndarray, float]:
    """Return int64[sequences, LENGTH + 1], and the best possible hit rate of the last item.

    In 80 % of the steps one of an item's three successors follows it, otherwise any item, by Zipf's law.
    """
    rng = np.random.default_rng(seed)
    popular = 1.0 / np.arange(1, items + 1)
    popular /= popular.sum()
    follows = np.random.default_rng(5).integers(0, items, (items, 3))
    out = np.empty((sequences, LENGTH + 1), np.int64)
    out[:, 0] = rng.choice(items, sequences, p=popular)
    for at in range(1, LENGTH + 1):
        next_one = follows[out[:, at - 1], rng.integers(0, 3, sequences)]
        out[:, at] = np.where(rng.random(sequences) < 0.8, next_one, rng.choice(items, sequences, p=popular))
    best = 0.0
    for last in out[:, -2]:  # for each, the ten most likely items
        chance = 0.2 * popular
        np.add.at(chance, follows[last], 0.8 / 3)
        best += np.partition(chance, -10)[-10:].sum()
    return out, best / sequences


def from_ratings(path: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Return training and test sequences of MovieLens's ``user::item::rating::time``, and the number of items.

    A user's last sequence is for the test; the earlier items are cut into training sequences.
    """
    users, items, _, times = np.loadtxt(path, delimiter=":", usecols=(0, 2, 4, 6), dtype=np.int64).T
    names, items = np.unique(items, return_inverse=True)
    order = np.lexsort((times, users))
    by_user = np.split(items[order], np.flatnonzero(np.diff(users[order])) + 1)
    train, test = [], []
    for seen in by_user:
        if len(seen) > LENGTH:
            test.append(seen[-LENGTH - 1 :])
        for end in range(len(seen) - 1, LENGTH, -LENGTH):
            train.append(seen[end - LENGTH - 1 : end])
    return np.array(train, np.int64), np.array(test, np.int64), len(names)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ratings", type=Path, help="MovieLens's ratings.dat")
    options.add_argument("--epochs", type=int, default=4)
    options.add_argument("--dim", type=int, default=32)
    options.add_argument("--negatives", type=int, default=256, help="of each batch")
    options.add_argument("--ram", default="16MiB")
    given = options.parse_args()
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    if given.ratings:
        train, test, items = from_ratings(given.ratings)
        best = ""
    else:
        items = 300
        train, _ = planted(items, 5_000, seed=0)
        test, optimum = planted(items, 1_000, seed=1)
        best = f", planted optimum {optimum:.3f}"
    seen = np.bincount(train.ravel(), minlength=items) + 1.0
    chance = seen / seen.sum()
    log_chance = torch.from_numpy(np.log(given.negatives * chance)).float()
    with tempfile.TemporaryDirectory() as folder:
        model = Model(items, given.dim, Path(folder), given.ram)
        optimizer = Optimizer(model, dense=torch.optim.Adam(model.parameters(), 5e-3))
        for epoch in range(given.epochs):
            total, steps = 0.0, 0
            for part in np.array_split(rng.permutation(len(train)), max(1, len(train) // 64)):
                negatives = torch.from_numpy(rng.choice(items, given.negatives, p=chance))
                loss = model.loss(torch.from_numpy(train[part]), negatives, log_chance)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total, steps = total + loss.item(), steps + 1
            print(f"epoch {epoch + 1}: loss {total / steps:.3f}, HR@10 {hit_rate(model, test):.3f}{best}")
        model.item.table.close()


if __name__ == "__main__":
    main()
