"""The trained models: a head over tables of users and items.

`bunkbed.train.models.scorer` ranks with these models.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bunkbed.core.budget import Budget
from bunkbed.core.init import Normal, Zeros
from bunkbed.core.types import Json
from bunkbed.torch import Embedding
from bunkbed.train.models.heads import make_head
from bunkbed.train.models.scorer import Scorer
from bunkbed.train.settings.config import TrainConfig

if TYPE_CHECKING:
    from bunkbed.run.run import Run

__all__ = ["Recommender", "create_tables"]


def create_tables(run: Run, config: TrainConfig, num_users: int, num_items: int) -> Json:
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

    # The seeds differ; otherwise user n and item n would start with the same row.
    init = Normal(std=config.init_std)
    tables = {
        "user": table("user", num_users, config.row_dim, init, 2 * config.seed),
        "item": table("item", num_items, config.row_dim, init, 2 * config.seed + 1),
    }
    if config.bias:
        tables["item_bias"] = table("item_bias", num_items, 1, Zeros(), config.seed)
    return tables


def torch_device(name: str) -> torch.device:
    """Return the device that an option names.

    Raises:
        ValueError: torch or this machine has no such device; the message lists the devices.
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
    """Model that computes the losses of batches of users and items.

    Owns the layers and the `head`; the tables belong to the run. Not thread-safe.

    Args:
        tables: the tables that `create_tables` returns.
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
        self.head = make_head(config).to(device)
        self._options: Json = {"kind": config.loss, "l2": config.l2, "hardness": config.hardness}

    def forward(
        self,
        users: Tensor,
        items: Tensor,
        seen: Tensor | None = None,
        log_q: Tensor | None = None,
        pair_weights: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of a batch, whose parts are as in `bunkbed.train.data.sampling.Batch`."""
        bias = None if self.item_bias is None else self.item_bias(items)[..., 0]
        if log_q is not None:
            log_q = log_q.to(self.user.anchor.device)
            bias = -log_q if bias is None else bias - log_q
        given: Json = {"seen": seen, "bias": bias, "pair_weights": pair_weights}
        return self.head.loss(self.user(users), self.item(items), **given, **self._options)

    def scorer(self) -> Scorer:
        """Return a `Scorer` of the current model, with a copy of the head."""
        head = copy.deepcopy(self.head).cpu().requires_grad_(False)
        bias = None if self.item_bias is None else self.item_bias.table
        return Scorer(self.user.table, self.item.table, head, item_bias=bias)

    def dense_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are trained outside the tables."""
        return list(self.head.parameters())
