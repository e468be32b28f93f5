"""The dense part of every model: it computes a score from a row of a user and a row of an item.

A head works in two steps, so that ranking can reuse results: it computes `queries` of users and `vectors` of items once
each, and then scores from both. The trained weights of a head are small and belong to torch; the rows are in tables.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from bunkbed.train.models import plain_losses
from bunkbed.train.models.cosine import cosine_contrastive_loss, units
from bunkbed.train.models.encoder import Encoder
from bunkbed.train.models.losses import aligned, pair_loss, shared_loss
from bunkbed.train.settings.config import TrainConfig

__all__ = ["CosineHead", "DotHead", "Head", "NeuMFHead", "SequenceHead", "TwoTowerHead", "make_head"]

# Hidden numbers in memory at once in each thread that scores every user with every item.
_BLOCK_HIDDEN = 1 << 20


def _relu_layers(widths: tuple[int, ...]) -> nn.ModuleList:
    """Return linear layers whose initial weights keep the scale of activations with ReLU (He et al. 2015)."""
    layers = nn.ModuleList(nn.Linear(wide, narrow) for wide, narrow in pairwise(widths))
    for layer in layers:
        nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    return layers


class Head(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Base class of heads. Shapes: ``N`` users, ``M`` items, rows of the tables' dim, all float32."""

    #: Temporary numbers for each score of `pair_scores`.
    numbers_per_score: int

    def queries(self, users: Tensor) -> Tensor:
        """Return the user part of scores: rows ``[N, dim]`` -> ``[N, q]``."""
        raise NotImplementedError

    def vectors(self, items: Tensor) -> Tensor:
        """Return the item part of scores: rows ``[..., dim]`` -> ``[..., q]``."""
        raise NotImplementedError

    def pair_scores(self, queries: Tensor, vectors: Tensor) -> Tensor:
        """Score each user with its own items: ``[N, q]`` and ``[N, K, q]`` -> ``[N, K]``."""
        raise NotImplementedError

    def all_scores(self, queries: Tensor, vectors: Tensor, out: Tensor) -> Tensor:
        """Score each user with every item: ``[N, q]`` and ``[M, q]`` -> ``out[N, M]``."""
        raise NotImplementedError

    def magnitudes(self, queries: Tensor, vectors: Tensor) -> Tensor:
        """Return the size of the sums that scores are rounded in, without cancellation: ``[N, q]`` twice -> ``[N]``."""
        raise NotImplementedError

    def loss(
        self,
        users: Tensor,
        items: Tensor,
        *,
        seen: Tensor | None,
        bias: Tensor | None,
        pair_weights: Tensor | None = None,
        kind: str,
        l2: float,
        hardness: float,
    ) -> Tensor:
        """Return the loss of a batch of rows (see `bunkbed.train.data.sampling.Batch`); `bias` is added to scores."""
        raise NotImplementedError


class DotHead(Head):
    """Head with score = ``sum(weight * user * item)``: mf without a weight, gmf (He et al. 2017) with a weight that
    starts at ones, so that gmf starts as mf.

    Args:
        weight: ``float32[dim]``, or None.
    """

    def __init__(self, weight: Tensor | None = None) -> None:
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(weight)
        self.numbers_per_score = 0

    def queries(self, users: Tensor) -> Tensor:
        return users if self.weight is None else users * self.weight

    def vectors(self, items: Tensor) -> Tensor:
        return items

    def pair_scores(self, queries: Tensor, vectors: Tensor) -> Tensor:
        return torch.matmul(vectors, queries[:, :, None])[:, :, 0]

    def all_scores(self, queries: Tensor, vectors: Tensor, out: Tensor) -> Tensor:
        return torch.mm(queries, vectors.T, out=out)

    def magnitudes(self, queries: Tensor, vectors: Tensor) -> Tensor:
        return queries.norm(dim=1) * vectors.norm(dim=1)

    def loss(self, users: Tensor, items: Tensor, *, seen: Tensor | None, **options: Any) -> Tensor:
        if items.dim() == 2:
            return shared_loss(users, items, seen=seen, weight=self.weight, **options)
        return pair_loss(users, items, weight=self.weight, **options)


class CosineHead(DotHead):
    """Head with score = the cosine of user and item, for the cosine contrastive loss.

    The loss of a pair is ``1 - cos(user, item) + negative_weight * mean(max(0, cos(user, negative) - margin))``, and
    that of a batch the mean (Mao et al. 2021, eq. 1).

    Args:
        margin: a negative with a cosine below it does not count; -1 to 1.
        negative_weight: of the mean over the negatives.
    """

    def __init__(self, margin: float, negative_weight: float) -> None:
        super().__init__()
        self._margin = margin
        self._negative_weight = negative_weight

    def queries(self, users: Tensor) -> Tensor:
        return units(users)[0]

    def vectors(self, items: Tensor) -> Tensor:
        return units(items)[0]

    def loss(self, users: Tensor, items: Tensor, *, seen: Tensor | None, **options: Any) -> Tensor:
        if options["kind"] != "ccl" or options["bias"] is not None:
            raise ValueError(f"cosines have loss ccl and no bias, got loss {options['kind']}")
        margin, weight, of_pairs = self._margin, self._negative_weight, options.get("pair_weights")
        loss = cosine_contrastive_loss(
            users, items, margin=margin, negative_weight=weight, seen=seen, pair_weights=of_pairs
        )
        l2 = options["l2"]
        return loss + 0.5 * l2 * plain_losses.mean_squares(users, items) if l2 else loss


class TwoTowerHead(DotHead):
    """Head with score = ``<tower(user), tower(item)>``; each tower is a perceptron with ReLU between its layers
    (Covington et al. 2016; Yi et al. 2019).

    Args:
        dim: numbers of a row, and of the output of a tower.
        layers: widths of the hidden layers.
    """

    def __init__(self, dim: int, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.user_tower = _relu_layers((dim, *layers, dim))
        self.item_tower = _relu_layers((dim, *layers, dim))

    def queries(self, users: Tensor) -> Tensor:
        return _perceptron(self.user_tower, users)

    def vectors(self, items: Tensor) -> Tensor:
        return _perceptron(self.item_tower, items)

    def loss(self, users: Tensor, items: Tensor, *, seen: Tensor | None, **options: Any) -> Tensor:
        l2 = options.pop("l2")  # of the rows, not of the outputs of the towers
        loss = super().loss(self.queries(aligned(users)), self.vectors(aligned(items)), seen=seen, l2=0.0, **options)
        return loss + 0.5 * l2 * plain_losses.mean_squares(users, items) if l2 else loss


class SequenceHead(DotHead):
    """Head with score = ``<output of the encoder, item>``: the user part is an output, not a row.

    Args:
        encoder: of the users' items.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder


class NeuMFHead(Head):
    """Head with score = ``sum(weight * user * item) + perceptron(user', item')`` (He et al. 2017, without its sigmoid,
    which keeps every ranking). A row has both parts, ``[user, user']``: one lookup and one read instead of two.

    The perceptron's first layer is the sum of a user's part and an item's part, in `queries` and `vectors`.

    Args:
        dim: numbers of each part; a row has twice as many.
        layers: widths of the hidden layers, at least one.
    """

    def __init__(self, dim: int, layers: tuple[int, ...]) -> None:
        super().__init__()
        self._dim = dim
        self.weight = nn.Parameter(torch.ones(dim))
        self.user_layer = nn.Linear(dim, layers[0], bias=False)
        self.item_layer = nn.Linear(dim, layers[0])
        self.hidden = _relu_layers(layers)
        self.out = nn.Linear(layers[-1], 1, bias=False)
        self.numbers_per_score = dim + 2 * sum(layers)

    def queries(self, users: Tensor) -> Tensor:
        return torch.cat([users[..., : self._dim] * self.weight, self.user_layer(users[..., self._dim :])], -1)

    def vectors(self, items: Tensor) -> Tensor:
        return torch.cat([items[..., : self._dim], self.item_layer(items[..., self._dim :])], -1)

    def _deep(self, first: Tensor) -> Tensor:
        hidden = torch.relu(first)
        for layer in self.hidden:
            hidden = torch.relu(layer(hidden))
        return self.out(hidden)[..., 0]

    def pair_scores(self, queries: Tensor, vectors: Tensor) -> Tensor:
        dim = self._dim
        products = torch.matmul(vectors[..., :dim], queries[:, :dim, None])[..., 0]
        return products + self._deep(queries[:, None, dim:] + vectors[..., dim:])

    def _every_score(self, queries: Tensor, vectors: Tensor) -> Tensor:
        dim = self._dim
        return queries[:, :dim] @ vectors[:, :dim].T + self._deep(queries[:, None, dim:] + vectors[:, dim:])

    def all_scores(self, queries: Tensor, vectors: Tensor, out: Tensor) -> Tensor:
        step = max(1, _BLOCK_HIDDEN // (len(vectors) * self.numbers_per_score))
        for first in range(0, len(queries), step):
            out[first : first + step] = self._every_score(queries[first : first + step], vectors)
        return out

    def magnitudes(self, queries: Tensor, vectors: Tensor) -> Tensor:
        dim = self._dim
        products = queries[:, :dim].norm(dim=1) * vectors[:, :dim].norm(dim=1)
        hidden = queries[:, dim:].abs() + vectors[:, dim:].abs()
        for layer in self.hidden:
            hidden = hidden @ layer.weight.abs().T + layer.bias.abs()
        return products + hidden @ self.out.weight[0].abs()

    def loss(
        self,
        users: Tensor,
        items: Tensor,
        *,
        seen: Tensor | None,
        bias: Tensor | None,
        pair_weights: Tensor | None = None,
        kind: str,
        l2: float,
        hardness: float,
    ) -> Tensor:
        batch = len(users)
        queries, vectors = self.queries(aligned(users)), self.vectors(aligned(items))
        if items.dim() == 2:
            positive = self.pair_scores(queries, vectors[:batch, None])[:, 0]
            negative = self._every_score(queries, vectors[batch:])
            if bias is not None:
                positive, negative = positive + bias[:batch], negative + bias[batch:]
            negative = plain_losses.without_seen(negative, seen)
        else:
            scores = self.pair_scores(queries, vectors)
            scores = scores if bias is None else scores + bias
            positive, negative = scores[:, 0], scores[:, 1:]
        loss = plain_losses.competition(positive, negative, kind, hardness, pair_weights)
        return loss + 0.5 * l2 * plain_losses.mean_squares(users, items) if l2 else loss


def _perceptron(layers: nn.ModuleList, rows: Tensor) -> Tensor:
    hidden = rows
    for layer in layers[:-1]:
        hidden = torch.relu(layer(hidden))
    return layers[-1](hidden)


def make_head(config: TrainConfig) -> Head:
    """Return the head of a run's model, on the CPU; its initial weights are a function of the seed only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if config.model == "two-tower":
            return TwoTowerHead(config.dim, config.layer_widths)
        if config.model == "neumf":
            return NeuMFHead(config.dim, config.layer_widths)
        if config.is_sequential:
            return SequenceHead(
                Encoder(config.dim, config.length_or_default, config.dropout_or_default, config.init_std)
            )
        if config.loss == "ccl":
            return CosineHead(config.margin_or_default, config.negative_weight_or_default)
        return DotHead(torch.ones(config.dim) if config.model == "gmf" else None)
