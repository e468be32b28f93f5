"""Each optimizer compared with torch's: the largest difference of any weight after 200 steps with duplicate ids.

torch's side is `nn.Embedding(sparse=True)` with `SparseAdam`, `Adagrad` or `SGD` on its sparse gradients;
row-wise Adagrad, which torch lacks, is held against its formula in torch. Rows never touched must keep
their initial bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import bunkbed as bb
from benchmarks.harness import common
from benchmarks.harness.figures import Figure, Settings

LIMIT = 1e-6

CASES: list[tuple[Any, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None]] = [
    (bb.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    (bb.Adagrad(lr=0.01), lambda p: torch.optim.Adagrad(p, lr=0.01)),
    (
        bb.Adagrad(lr=0.01, initial_accumulator=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    ),
    (bb.Adam(lr=1e-3), lambda p: torch.optim.SparseAdam(p, lr=1e-3)),
    (
        bb.Adam(lr=1e-3, betas=(0.8, 0.99), eps=1e-6),
        lambda p: torch.optim.SparseAdam(p, lr=1e-3, betas=(0.8, 0.99), eps=1e-6),
    ),
    (bb.RowwiseAdagrad(lr=0.01), None),
]


class RowwiseAdagrad(torch.optim.Optimizer):
    """Row-wise Adagrad by its formula, in torch's float32."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})
        self.sum = torch.zeros(len(params[0]))

    def step(self, closure: None = None) -> None:
        group = self.param_groups[0]
        weight = group["params"][0]
        grad = weight.grad.coalesce()
        rows, values = grad.indices()[0], grad.values()
        self.sum[rows] += values.square().mean(dim=1)
        scale = group["lr"] / (self.sum[rows].sqrt() + group["eps"])
        with torch.no_grad():
            weight[rows] -= scale[:, None] * values


def difference(
    optimizer: Any, make: Any, *, num_rows: int, dim: int, batch: int, steps: int, seed: int
) -> tuple[float, bool]:
    """Largest difference of any weight, and whether untouched rows kept their bits."""
    table = bb.create(None, dim=dim, num_rows=num_rows, optimizer=optimizer, init=bb.Normal(0.1), seed=seed)
    everything = np.arange(num_rows)
    start = table.lookup(everything)
    layer = torch.nn.Embedding(num_rows, dim, sparse=True, _weight=torch.tensor(start))
    parameters = list(layer.parameters())
    torch_optimizer = make(parameters) if make else RowwiseAdagrad(parameters, optimizer.lr, optimizer.eps)
    sample = common.zipf(num_rows // 2)
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids = sample(rng, batch)
        # Small enough that the hottest row, hundreds of times in a batch, stays near 1, where 1e-6 is a strict limit.
        grads = rng.standard_normal((batch, dim), dtype=np.float32) / np.float32(64)
        table.update(ids, grads)
        torch_optimizer.zero_grad()
        layer(torch.from_numpy(ids)).backward(torch.from_numpy(grads))
        # SparseAdam and Adagrad sum duplicates first, as we do. torch's SGD adds them to the weight one at a
        # time, rounding each: over hundreds of duplicates and 200 steps that alone is 4e-5.
        layer.weight.grad = layer.weight.grad.coalesce()
        torch_optimizer.step()
    ours, theirs = table.lookup(everything), layer.weight.detach().numpy()
    untouched = ~table.contains(everything)
    kept = bool(untouched.any()) and ours[untouched].tobytes() == start[untouched].tobytes()
    table.close()
    return float(np.abs(ours - theirs).max()), kept


def optimizers(settings: Settings) -> list[Figure]:
    """The largest difference of each optimizer."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns until one opts in or out
    sizes = {"num_rows": 20_000, "dim": 64, "batch": 4096, "steps": 200}
    if settings.tiny:
        sizes = {"num_rows": 200, "dim": 8, "batch": 64, "steps": 200}
    print(common.machine())
    print(
        ", ".join(f"{key} {value:,}" for key, value in sizes.items()),
        "Zipf(1.05) over the lower half of the ids, weights N(0, 0.1)",
    )
    figures = []
    for optimizer, make in CASES:
        largest, kept = difference(optimizer, make, seed=settings.seed, **sizes)
        verdict = "ok" if largest <= LIMIT and kept else "TOO LARGE" if kept else "UNTOUCHED ROWS CHANGED"
        kept_note = "untouched rows kept their bits" if kept else "UNTOUCHED ROWS CHANGED"
        # An untouched row that changed is no small difference.
        value = largest if kept else float("inf")
        figures.append(Figure(f"largest difference, {optimizer!r}", value, at_most=LIMIT, note=kept_note))
        print(f"{optimizer!r}: largest difference {largest:.2g} (limit {LIMIT:g}), {verdict}")
    return figures


def main() -> None:
    options = common.parser(__doc__).parse_args()
    figures = optimizers(Settings("tiny" if options.tiny else "full", options.dir, options.seed))
    if bad := sum(not figure.reached for figure in figures):
        sys.exit(f"{bad} optimizers failed")


if __name__ == "__main__":
    main()
