"""A training step on a table in RAM, beside torch's own: `nn.Embedding(sparse=True)` with a sparse optimizer.

4M rows of 64 float32, 65,536 Zipf(1.05) ids a batch: lookup, backward of a constant gradient, optimizer step.
Ours goes through `bunkbed.torch` (Embedding, backward, Optimizer.step) with its defaults. Both take the
same batches in one process, a few steps each in turn, and who goes first alternates: the one that runs second
inherits the caches. The published ratio is the median over rounds; the least flattering round is printed too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import torch

import bunkbed as bb
from benchmarks import common
from bunkbed.torch import Embedding, Optimizer

CASES: dict[str, tuple[bb.optim.Optimizer, Callable[..., torch.optim.Optimizer]]] = {
    "adam": (bb.Adam(lr=1e-3), lambda p: torch.optim.SparseAdam(p, lr=1e-3)),
    "adagrad": (bb.Adagrad(lr=1e-2), lambda p: torch.optim.Adagrad(p, lr=1e-2)),
    "sgd": (bb.SGD(lr=1e-2), lambda p: torch.optim.SGD(p, lr=1e-2)),
}

Step = Callable[[torch.Tensor, torch.Tensor], None]


def our_step(name: str, num_rows: int, dim: int) -> Step:
    """One step through our layer, on a table whose every row is stored."""
    table = bb.create(None, dim=dim, num_rows=num_rows, optimizer=CASES[name][0], init=bb.Normal(1.0))
    common.fill(table)
    layer = Embedding(num_rows, dim, table=table)
    optimizer = Optimizer(layer)

    def step(ids: torch.Tensor, grad: torch.Tensor) -> None:
        optimizer.zero_grad()
        layer(ids).backward(grad)
        optimizer.step()

    return step


def their_step(name: str, num_rows: int, dim: int) -> Step:
    """The same step through torch's layer."""
    layer = torch.nn.Embedding(num_rows, dim, sparse=True)
    optimizer = CASES[name][1](list(layer.parameters()))

    def step(ids: torch.Tensor, grad: torch.Tensor) -> None:
        optimizer.zero_grad()
        layer(ids).backward(grad)
        optimizer.step()

    return step


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--optimizer", choices=[*CASES], default="adam", help="which optimizer")
    options.add_argument("--rounds", type=int, default=15, help="turns of each side")
    options = options.parse_args()
    num_rows, dim, batch, steps = 4_000_000, 64, 65_536, 5
    if options.tiny:
        num_rows, batch, steps, options.rounds = 2_000, 256, 2, 3
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns until one opts in or out
    print(common.machine())
    print(f"{num_rows:,} x {dim} float32, {batch:,} Zipf(1.05) ids, {options.optimizer}, all rows stored, warm")

    sample = common.zipf(num_rows)
    rng = np.random.default_rng(options.seed)
    batches = [torch.from_numpy(sample(rng, batch)) for _ in range(8)]
    unique = statistics.mean(ids.unique().numel() for ids in batches) / batch
    grad = torch.ones(batch, dim)
    sides = {
        "bunkbed": our_step(options.optimizer, num_rows, dim),
        "torch": their_step(options.optimizer, num_rows, dim),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    ratios = []
    for round_ in range(options.rounds + 2):
        taken = {}
        for name in list(sides) if round_ % 2 == 0 else list(reversed(sides)):
            step, turn = sides[name], [batches[(round_ * steps + i) % 8] for i in range(steps)]
            samples = [common.timed(lambda step=step, ids=ids: step(ids, grad)) for ids in turn]
            taken[name] = statistics.median(samples)
            if round_ >= 2:  # the first two warm caches and allocators
                times[name] += samples
        if round_ >= 2:
            ratios.append(taken["torch"] / taken["bunkbed"])
    print(f"unique ids: {unique:.0%} of a batch")
    for name, samples in times.items():
        print(f"{name:>8}: {common.spread(samples)} a step")
    print(
        f"ratio torch / bunkbed: median {statistics.median(ratios):.2f}, "
        f"least flattering round {min(ratios):.2f}, best {max(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
