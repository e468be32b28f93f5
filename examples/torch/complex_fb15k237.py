"""How do I train a knowledge graph whose entities outgrow memory, and rank by filtered MRR?

    python examples/torch/complex_fb15k237.py                                          # a synthetic graph, seconds
    python examples/torch/complex_fb15k237.py FOLDER --epochs 3                        # FOLDER with FB15k-237, minutes

ComplEx (Trouillon et al. 2016), trained as in Lacroix et al. 2018: reciprocal relations, Adagrad, the N3 penalty, and a
softmax over entities. Here the softmax uses a sample that the batch shares (`--candidates`; the number of entities
selects all). Triples are visited by blocks of heads and of tails (`bunkbed.BlockOrder`) and the sample is drawn from
the tails of the block, so that a graph larger than `--ram` reads little; `--blocks 1` shuffles all triples. FOLDER
contains train.txt, valid.txt and test.txt, optionally with .gz, of ``head<TAB>relation<TAB>tail``.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import nn

import bunkbed as bb
from bunkbed.torch import Embedding, Optimizer, lookahead


class ComplEx(nn.Module):
    """Model with score(h, r, t) = Re<h, r, conj(t)>: the product of the query (h, r) with the row of t."""

    def __init__(self, entities: int, relations: int, rank: int, lr: float, folder: Path, ram: str) -> None:
        super().__init__()
        budget, ours = bb.Budget(ram), {"init": bb.Normal(1e-3), "optimizer": bb.Adagrad(lr)}
        self.entity = Embedding(entities, 2 * rank, path=folder / "entity", ram=budget, seed=0, **ours)
        self.relation = Embedding(2 * relations, 2 * rank, path=folder / "relation", ram=budget, seed=1, **ours)

    @staticmethod
    def query(heads: torch.Tensor, relations: torch.Tensor) -> torch.Tensor:
        (a, b), (c, d) = heads.chunk(2, -1), relations.chunk(2, -1)
        return torch.cat([a * c - b * d, a * d + b * c], -1)

    def loss(self, triples: torch.Tensor, candidates: torch.Tensor, penalty: float) -> torch.Tensor:
        """Return the loss of int64[B, 3] triples, with int64[K] entities as negatives."""
        heads, relations, tails = self.entity(triples[:, 0]), self.relation(triples[:, 1]), self.entity(triples[:, 2])
        query = self.query(heads, relations)
        # Each candidate represents (entities - 1) / candidates entities.
        others = (self.entity.num_embeddings - 1) / len(candidates)
        wrong = query @ self.entity(candidates).T + np.log(max(others, 1.0))
        wrong = wrong.masked_fill(triples[:, 2:] == candidates, -torch.inf)
        logits = torch.cat([(query * tails).sum(1, keepdim=True), wrong], 1)
        cubes = sum(rows.unflatten(1, (2, -1)).square().sum(1).pow(1.5).sum() for rows in (heads, relations, tails))
        right = torch.zeros(len(logits), dtype=torch.int64)
        return nn.functional.cross_entropy(logits, right) + penalty * cubes / len(heads)


@torch.no_grad()
def mrr(model: ComplEx, triples: np.ndarray, known: dict[tuple[int, int], list[int]], chunk: int = 4096) -> float:
    """Return the filtered mean reciprocal rank. A tie counts half. Entities are read chunk by chunk."""
    total, entities = 0.0, model.entity.num_embeddings
    for part in torch.from_numpy(triples).split(1024):
        query = model.query(model.entity(part[:, 0]), model.relation(part[:, 1]))
        wanted = (query * model.entity(part[:, 2])).sum(1, keepdim=True)
        above, ties = torch.zeros(len(part)), torch.zeros(len(part))
        right = [(at, tail) for at, (head, rel, _) in enumerate(part.tolist()) for tail in known[head, rel]]
        row, tail = torch.tensor(right).T
        for start in range(0, entities, chunk):
            ids = torch.arange(start, min(start + chunk, entities))
            scores = query @ model.entity(ids).T
            inside = (tail >= start) & (tail <= ids[-1])  # all known tails, including this triple's tail
            scores[row[inside], tail[inside] - start] = -torch.inf
            above += (scores > wanted).sum(1)
            ties += (scores == wanted).sum(1)
        total += (1 / (1 + above + ties / 2)).sum().item()
    return total / len(triples)


def read(folder: Path) -> tuple[list[np.ndarray], int, int]:
    """Return triples of train, valid and test, in both directions, and the number of entities and relations."""
    both, entities, relations = [], defaultdict(count().__next__), defaultdict(count(0, 2).__next__)
    for name in ("train", "valid", "test"):
        file = folder / f"{name}.txt"
        with file.open() if file.exists() else gzip.open(f"{file}.gz", "rt") as lines:
            triples = [line.rstrip("\n").split("\t") for line in lines]
        there = np.array([(entities[h], relations[r], entities[t]) for h, r, t in triples], np.int64)
        both.append(np.concatenate([there, there[:, ::-1] + [0, 1, 0]]))  # relation r's reciprocal is r + 1
    return both, len(entities), len(relations)


def plant(folder: Path) -> Path:
    """Write and return a graph of 200 entities on a circle, where relation r leads from e to e + r + 1."""
    rng = np.random.default_rng(0)
    triples = rng.permutation([f"e{e}\tr{r}\te{(e + r + 1) % 200}\n" for e in range(200) for r in range(8)])
    for name, lines in zip(("test", "valid", "train"), np.split(triples, [100, 200]), strict=True):
        (folder / f"{name}.txt").write_text("".join(lines))
    return folder


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, nargs="?")
    options.add_argument("--rank", type=int, default=100, help="complex numbers of a row")
    options.add_argument("--epochs", type=int, default=40)
    options.add_argument("--batch", type=int, default=500)
    options.add_argument("--candidates", type=int, default=1024)
    options.add_argument("--lr", type=float, default=0.1)
    options.add_argument("--penalty", type=float, default=0.05, help="N3")
    options.add_argument("--ram", default="64MiB", help="of both tables")
    options.add_argument("--blocks", type=int, help="of heads and of tails; default: as few as fit in the RAM")
    given = options.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as temporary:
        (train, valid, test), entities, relations = read(given.folder or plant(Path(temporary)))
        known = defaultdict(list)
        for head, relation, tail in np.concatenate([train, valid, test]).tolist():
            known[head, relation].append(tail)
        model = ComplEx(entities, relations, given.rank, given.lr, Path(temporary), given.ram)
        optimizer = Optimizer(model)
        blocks = given.blocks or bb.suggest_blocks([model.entity.table] * 2, ram=given.ram)
        order = bb.BlockOrder([train[:, 0], train[:, 2]], blocks)

        def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            tails = [order.members(epoch, 1, block) for block in range(blocks)]
            for batch in order.batches(epoch, given.batch):
                candidates = rng.permutation(tails[batch.blocks[1]])[: given.candidates]
                yield torch.from_numpy(train[batch.indices]), torch.from_numpy(candidates)

        start = time.monotonic()
        for epoch in range(1, given.epochs + 1):
            for triples, candidates in lookahead(
                batches(epoch), model, lambda b: {model.entity: [b[0][:, ::2], b[1]], model.relation: [b[0][:, 1]]}
            ):
                loss = model.loss(triples, candidates, given.penalty)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            speed = epoch * len(train) / (time.monotonic() - start)
            print(f"epoch {epoch}: loss {loss.item():.3f}, {speed:,.0f} triples/s", flush=True)
        for name, triples in (("valid", valid), ("test", test)):
            print(f"{name}: filtered MRR {mrr(model, triples, known):.4f}")
        model.entity.table.close()
        model.relation.table.close()


if __name__ == "__main__":
    main()
