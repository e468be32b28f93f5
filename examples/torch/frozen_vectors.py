"""How do I use pretrained vectors of a `.npy` that is larger than RAM, frozen, and train only the layers after it?

    python examples/torch/frozen_vectors.py                                     # makes a small file itself
    python examples/torch/frozen_vectors.py --vectors vectors.npy --folder tables --ram 512MiB

The file is imported once, as a stream, into a table without optimizer state. After that the table is opened for
reading: any number of processes may read it, and no process can change it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import bunkbed as bb
from bunkbed.torch import EmbeddingBag


def frozen_table(vectors: Path, path: Path, ram: str) -> bb.Table:
    """Return the table of a .npy of float[rows, dim], opened for reading. The first call imports it."""
    rows, dim = np.load(vectors, mmap_mode="r").shape
    with bb.open(path, ram=ram, create={"dim": dim, "num_rows": rows, "optimizer": bb.SGD()}) as table:
        if "source" not in table.meta:  # an interrupted import left no meta
            count = bb.import_rows(table, vectors)
            table.commit(meta={"source": str(vectors)})
            print(f"imported {count:,} rows of {table.record_bytes} bytes")
    return bb.open(path, mode="r", ram=ram)


class Classifier(nn.Module):
    """Classifier of two classes, from the mean of a text's word vectors."""

    def __init__(self, table: bb.Table) -> None:
        super().__init__()
        self.words = EmbeddingBag(table.num_rows, table.dim, mode="mean", table=table)
        self.words.anchor.requires_grad = False  # frozen: no gradients, no bunkbed.torch.Optimizer
        self.head = nn.Linear(table.dim, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(words))


def texts(vectors: np.ndarray, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64[count, 20] words, and the side of a plane on which their mean is, int64[count]."""
    plane = np.random.default_rng(0).standard_normal(vectors.shape[1])
    words = (len(vectors) ** np.random.default_rng(seed).random((count, 20))).astype(np.int64) - 1  # Zipf's law
    side = vectors[words].mean(1) @ plane > 0
    return torch.from_numpy(words), torch.from_numpy(side.astype(np.int64))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--vectors", type=Path, help=".npy of float32 or float16 [rows, dim]")
    options.add_argument("--folder", type=Path, help="where the table stays")
    options.add_argument("--ram", default="1MiB")
    options.add_argument("--steps", type=int, default=100)
    given = options.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        vectors = given.vectors
        if vectors is None:
            vectors = Path(temporary) / "vectors.npy"
            np.save(vectors, np.random.default_rng(1).standard_normal((20_000, 64)).astype(np.float32))
        table = frozen_table(vectors, (given.folder or Path(temporary)) / "words", given.ram)
        model = Classifier(table)
        optimizer = torch.optim.Adam(model.head.parameters(), lr=0.05)  # only the dense weights
        pretrained = np.load(vectors, mmap_mode="r")
        for step in range(given.steps):
            words, side = texts(pretrained, 100, seed=1000 + step)
            loss = nn.functional.cross_entropy(model(words), side)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        words, side = texts(pretrained, 1000, seed=1)
        with torch.no_grad():
            right = (model(words).argmax(1) == side).float().mean()
        ids = np.arange(0, len(pretrained), 97)
        same = np.array_equal(table.lookup(ids, touch=False), pretrained[ids].astype(np.float32))
        memory = table.stats()["ram_bytes"] / 2**20
        print(f"accuracy {right:.3f}; rows are the file's: {same}")
        print(f"{table.nbytes / 2**20:.1f} MiB of rows, {memory:.1f} MiB of RAM")
        table.close()


if __name__ == "__main__":
    main()
