"""Matrix factorization and its generalised form, over tables of users and items.

The model comes in two halves. `Recommender` is what trains: torch layers over the tables of a run. `Scorer`
is what ranks: it reads rows without touching the cache, needs no torch layer, and so works on a reader.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bunkbed.budget import Budget
from bunkbed.init import Normal, Zeros
from bunkbed.torch import Embedding
from bunkbed.train.config import TrainConfig
from bunkbed.train.losses import pair_loss, shared_loss

if TYPE_CHECKING:
    from bunkbed.run import Run

__all__ = [
    "DENSE_FILE",
    "Recommender",
    "Scorer",
    "create_tables",
    "dense_bytes",
    "dense_state",
    "scorer_of_run",
]

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

#: The run's file of dense weights and their optimizer's state.
DENSE_FILE = "dense.pt"


class Rows(Protocol):
    """The one thing a `Scorer` asks of a table."""

    def lookup(self, ids: Int64Array, *, touch: bool = True) -> Float32Array: ...


def create_tables(run: Run, config: TrainConfig, num_users: int, num_items: int) -> dict[str, Any]:
    """Create or open the tables of a run: ``user``, ``item`` and, with a bias, ``item_bias``.

    Raises:
        ValueError: the run holds tables of another shape.
    """

    def table(name: str, rows: int, dim: int, init: Normal | Zeros, seed: int) -> Any:
        definition = {
            "dim": dim,
            "num_rows": rows,
            "optimizer": config.table_optimizer(),
            "init": init,
            "seed": seed,
            "dtype": config.dtype,
        }
        return run.table(name, create=definition)

    # Seeds differ, or user n and item n would start as the same row.
    init = Normal(std=config.init_std)
    tables = {
        "user": table("user", num_users, config.dim, init, 2 * config.seed),
        "item": table("item", num_items, config.dim, init, 2 * config.seed + 1),
    }
    if config.bias:
        tables["item_bias"] = table("item_bias", num_items, 1, Zeros(), config.seed)
    return tables


def torch_device(name: str) -> torch.device:
    """The device an option names.

    Raises:
        ValueError: torch knows no such device, or this machine has none; says which it has.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if found is not None else 0
    has = "cpu alone" if found is None else f"cpu and {count} {found.type}"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is not None and device.type == "cpu":
        return device
    if device is None or found is None or device.type != found.type or (device.index or 0) >= count:
        raise ValueError(f"option device: there is no {name!r} here; torch {torch.__version__} finds {has}")
    return device


class Recommender(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Scores of users and items: ``sum(weight * user * item) + bias``.

    Owns the layers and, for ``gmf``, a dense `weight` ``float32[dim]`` that starts at ones, so that gmf
    starts as mf; the tables belong to the run. Not thread-safe.

    Args:
        tables: as `create_tables` gives them.
    """

    def __init__(self, config: TrainConfig, tables: Mapping[str, Any]) -> None:
        super().__init__()

        device = torch_device(config.device)
        cache: int | Budget | None = None
        if config.device_cache is not None:  # one budget, which the tables share
            cache = Budget(config.device_cache) if config.device_cache_bytes else 0

        def layer(name: str) -> Embedding:
            table = tables[name]
            return Embedding(table.num_rows, table.dim, table=table, device=device, device_cache=cache)

        self.user = layer("user")
        self.item = layer("item")
        self.item_bias = layer("item_bias") if config.bias else None
        self.weight = nn.Parameter(torch.ones(config.dim, device=device)) if config.model == "gmf" else None
        self._options: dict[str, Any] = {"kind": config.loss, "l2": config.l2, "hardness": config.hardness}

    def forward(self, users: Tensor, items: Tensor, seen: Tensor | None = None) -> Tensor:
        """The loss of a batch, whose parts are as in `bunkbed.train.sampling.Batch`."""
        bias = None if self.item_bias is None else self.item_bias(items)[..., 0]
        rows = self.user(users), self.item(items)
        if items.dim() == 1:
            return shared_loss(*rows, seen=seen, weight=self.weight, bias=bias, **self._options)
        return pair_loss(*rows, weight=self.weight, bias=bias, **self._options)

    def scorer(self) -> Scorer:
        """What ranks with the model as it is now; takes a copy of the dense weights."""
        return Scorer(
            self.user.table,
            self.item.table,
            weight=None if self.weight is None else self.weight.detach().cpu().numpy().copy(),
            item_bias=None if self.item_bias is None else self.item_bias.table,
        )

    def dense_parameters(self) -> list[nn.Parameter]:
        """What is trained outside the tables."""
        return [] if self.weight is None else [self.weight]


def dense_bytes(model: Recommender, optimizer: torch.optim.Optimizer | None) -> bytes:
    """Dense weights and their optimizer's state as a file, for `Run.commit`."""
    buffer = io.BytesIO()
    weights = {} if model.weight is None else {"weight": model.weight.detach().cpu()}
    torch.save({"weights": weights, "optimizer": optimizer.state_dict() if optimizer else None}, buffer)
    return buffer.getvalue()


def dense_state(data: bytes) -> dict[str, Any]:
    """What `dense_bytes` saved."""
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return state


class Scorer:
    """Reads the vectors that scores are made of: ``score = query(user) . item + bias(item)``.

    Owns nothing; as thread-safe as its tables. Lookups leave the cache alone (``touch=False``).

    Args:
        user: table of users.
        item: table of items.
        weight: ``float32[dim]`` of gmf, or None.
        item_bias: table of item biases, or None.
    """

    def __init__(
        self, user: Rows, item: Rows, *, weight: Float32Array | None = None, item_bias: Rows | None = None
    ) -> None:
        self._user = user
        self._item = item
        self._weight = weight
        self._item_bias = item_bias

    def queries(self, users: Int64Array) -> Float32Array:
        """``int64[N]`` -> ``float32[N, dim]``: user vectors, weighted."""
        rows = self._user.lookup(users, touch=False)
        return rows if self._weight is None else rows * self._weight

    def items(self, items: Int64Array) -> Float32Array:
        """``int64[...]`` -> ``float32[..., dim]``."""
        return self._item.lookup(items, touch=False)

    def biases(self, items: Int64Array) -> Float32Array | None:
        """``int64[...]`` -> ``float32[...]``, or None where the model has none."""
        return None if self._item_bias is None else self._item_bias.lookup(items, touch=False)[..., 0]


def scorer_of_run(run: Run, config: TrainConfig) -> Scorer:
    """The `Scorer` of what a run holds as it was opened.

    Raises:
        FileNotFoundError: the run was never committed.
    """
    user, item = run.table("user"), run.table("item")
    bias = run.table("item_bias") if config.bias else None
    weights = dense_state(run.read(DENSE_FILE))["weights"]
    weight = weights["weight"].numpy() if "weight" in weights else None
    return Scorer(user, item, weight=weight, item_bias=bias)
