"""torch: `nn.Embedding` with its sparse optimizers, and with dense Adam.

``sparse=True`` and `SparseAdam`, `Adagrad` or `SGD` is what torch's documentation offers for large tables. Dense
Adam updates every row at every step and is here because most code uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Step = Callable[[torch.Tensor], Any]

OPTIMIZERS: dict[str, tuple[bool, Callable[..., torch.optim.Optimizer]]] = {
    "adam": (True, lambda p: torch.optim.SparseAdam(p, lr=1e-3)),
    "adagrad": (True, lambda p: torch.optim.Adagrad(p, lr=1e-2)),
    "sgd": (True, lambda p: torch.optim.SGD(p, lr=1e-2)),
    "dense-adam": (False, lambda p: torch.optim.Adam(p, lr=1e-3)),
}


def settings() -> str:
    """For the report."""
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads"


def training(optimizer_name: str, num_rows: int, dim: int, grad: torch.Tensor) -> Step:
    """A step: lookup, backward of `grad`, optimizer step."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns until one opts in or out
    sparse, make = OPTIMIZERS[optimizer_name]
    layer = torch.nn.Embedding(num_rows, dim, sparse=sparse)
    optimizer = make(list(layer.parameters()))

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        layer(ids).backward(grad)
        optimizer.step()

    return step


def lookup(num_rows: int, dim: int) -> Step:
    """A forward pass without gradients."""
    layer = torch.nn.Embedding(num_rows, dim)

    def step(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return layer(ids)

    return step
