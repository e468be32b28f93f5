"""The trained models: a head over tables of users and items.

`bunkbed.train.models.scorer` ranks with these models.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bunkbed.core.budget import Budget
from bunkbed.core.init import Normal, Zeros
from bunkbed.core.types import Json
from bunkbed.torch import Embedding
from bunkbed.train.features.features import Features, table_of
from bunkbed.train.models.featured import FeaturedLayer, Rows
from bunkbed.train.models.heads import SequenceHead, make_head
from bunkbed.train.models.plain_losses import mean_squares
from bunkbed.train.models.scorer import EncodedUsers, Known, Scorer
from bunkbed.train.settings.config import TrainConfig

if TYPE_CHECKING:
    from bunkbed.run.run import Run

__all__ = ["Recommender", "SequenceRecommender", "create_tables", "make_model"]

#: The tables that `create_tables` returns, by name.
Tables = Mapping[str, Any]
_NONE: Mapping[str, Features] = MappingProxyType({})


def create_tables(
    run: Run, config: TrainConfig, num_users: int, num_items: int, features: Mapping[str, Features] = _NONE
) -> Json:
    """Create or open the tables of a run: ``user``, ``item``, with a bias ``item_bias``, and those of features.

    A model of sequences has no ``user``.

    Args:
        features: by side.

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
    tables = {}
    if not config.is_sequential:
        tables["user"] = table("user", num_users, config.row_dim, init, 2 * config.seed)
    tables["item"] = table("item", num_items, config.row_dim, init, 2 * config.seed + 1)
    if config.bias:
        tables["item_bias"] = table("item_bias", num_items, 1, Zeros(), config.seed)
    for side, of_side in features.items():  # zeros: a feature that no step has trained says nothing
        name = table_of(side)
        tables[name] = table(name, of_side.num_features, config.row_dim, Zeros(), config.seed)
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


def make_model(
    config: TrainConfig, tables: Tables, features: Mapping[str, Features] = _NONE
) -> Recommender | SequenceRecommender:
    """Return the model of a config over the tables that `create_tables` returns."""
    return (SequenceRecommender if config.is_sequential else Recommender)(config, tables, features)


def _layers(
    config: TrainConfig, tables: Tables, features: Mapping[str, Features], device: torch.device
) -> dict[str, Embedding | FeaturedLayer]:
    """Return a layer for users, items and biases, over its tables."""
    cache: int | Budget | None = None
    if config.device_cache is not None:  # one budget, which the tables share
        cache = Budget(config.device_cache) if config.device_cache_bytes else 0
    options: Json = {"device": device, "device_cache": cache}
    found: dict[str, Embedding | FeaturedLayer] = {}
    for name, table in tables.items():
        if name not in map(table_of, features):
            found[name] = Embedding(table.num_rows, table.dim, table=table, **options)
    for side, of_side in features.items():
        table = tables[table_of(side)]
        values = Embedding(table.num_rows, table.dim, table=table, **options)
        found[side] = FeaturedLayer(found[side], values, of_side)
    return found


def _wanted(layer: Embedding | FeaturedLayer, ids: Tensor) -> dict[nn.Module, Tensor]:
    return layer.wanted(ids) if isinstance(layer, FeaturedLayer) else {layer: ids}


def _for_ranking(layer: Embedding | FeaturedLayer) -> Rows:
    return layer.for_ranking() if isinstance(layer, FeaturedLayer) else layer.table


class Recommender(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Model that computes the losses of batches of users and items.

    Owns the layers and the `head`; the tables belong to the run. Not thread-safe.

    Args:
        tables: the tables that `create_tables` returns.
        features: by side.
    """

    def __init__(self, config: TrainConfig, tables: Tables, features: Mapping[str, Features] = _NONE) -> None:
        super().__init__()
        device = torch_device(config.device)
        layers = _layers(config, tables, features, device)
        self.user, self.item = layers["user"], layers["item"]
        self.item_bias = layers.get("item_bias")
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
        of_users, of_items = self.user(users), self.item(items)
        if log_q is not None:
            log_q = log_q.to(of_users.device)
            bias = -log_q if bias is None else bias - log_q
        given: Json = {"seen": seen, "bias": bias, "pair_weights": pair_weights}
        return self.head.loss(of_users, of_items, **given, **self._options)

    def wanted(self, parts: tuple[Tensor, ...]) -> dict[nn.Module, Tensor]:
        """Return the ids that `forward` looks up in each layer, from its arguments."""
        users, items, *_ = parts
        found = {**_wanted(self.user, users), **_wanted(self.item, items)}
        if self.item_bias is not None:
            found[self.item_bias] = items
        return found

    def scorer(self, known: Known) -> Scorer:
        """Return a `Scorer` of the current model, with a copy of the head."""
        head = copy.deepcopy(self.head).cpu().requires_grad_(False)
        bias = None if self.item_bias is None else self.item_bias.table
        return Scorer(_for_ranking(self.user), _for_ranking(self.item), head, item_bias=bias)

    def dense_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are trained outside the tables."""
        return list(self.head.parameters())


class SequenceRecommender(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Model that computes the losses of windows of sequences, with the interface of `Recommender`.

    The rows of a step, those of its windows and of the negatives, are one lookup.
    """

    def __init__(self, config: TrainConfig, tables: Tables, features: Mapping[str, Features] = _NONE) -> None:
        super().__init__()
        device = torch_device(config.device)
        self.item = _layers(config, tables, features, device)["item"]
        self.head: SequenceHead = make_head(config).to(device)
        self._l2 = config.l2

    def forward(
        self,
        lengths: Tensor,
        items: Tensor,
        noise: Tensor,
        seen: Tensor | None = None,
        log_q: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of a batch, whose parts are as in `bunkbed.train.data.sequences.SequenceBatch`."""
        ends = (lengths + 1).cumsum(0)
        total = int(ends[-1])
        has_next = torch.ones(total, dtype=torch.bool)
        has_next[ends - 1] = False
        inputs = has_next.nonzero()[:, 0]
        compared = torch.cat([inputs + 1, torch.arange(total, len(items))])

        rows = self.item(items)
        inputs, compared = (rows.index_select(0, at.to(rows.device)) for at in (inputs, compared))
        outputs = self.head.encoder(inputs, lengths, noise=int(noise))
        bias = None if log_q is None else -log_q.to(rows.device)
        loss = self.head.loss(outputs, compared, seen=seen, bias=bias, kind="softmax", l2=0.0, hardness=0.0)
        return loss + 0.5 * self._l2 * mean_squares(inputs, compared) if self._l2 else loss

    def wanted(self, parts: tuple[Tensor, ...]) -> dict[nn.Module, Tensor]:
        """As `Recommender.wanted`."""
        return _wanted(self.item, parts[1])

    def scorer(self, known: Known) -> Scorer:
        """As `Recommender.scorer`; the users are encoded from their known pairs."""
        head = copy.deepcopy(self.head).cpu().requires_grad_(False)
        item = _for_ranking(self.item)
        return Scorer(EncodedUsers(item, head, known), item, head)

    def dense_parameters(self) -> list[nn.Parameter]:
        """As `Recommender.dense_parameters`."""
        return list(self.head.parameters())
