"""The losses of losses.py in torch's own operations: for tensors on a device without the core's kernels, and for
models whose score is more than a dot product."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["competition", "mean_squares", "pair_loss", "shared_loss", "without_seen"]


def competition(
    positive: Tensor, negative: Tensor, kind: str, hardness: float, pair_weights: Tensor | None = None
) -> Tensor:
    """Return the mean loss of scores ``[B]`` against ``[B, K]``, each times a weight ``[B]``.

    A negative score of -inf does not compete.
    """

    def weighted(losses: Tensor) -> Tensor:
        if pair_weights is None:
            return losses
        return losses * pair_weights.to(losses.device).view(-1, *[1] * (losses.dim() - 1))

    batch, count = negative.shape
    softplus = torch.nn.functional.softplus
    if kind == "softmax":
        scores = torch.cat([positive[:, None], negative], 1)
        return weighted(torch.logsumexp(scores, 1) - positive).sum() / batch
    if kind == "bpr":
        losses = weighted(softplus(negative - positive[:, None]))
        if hardness:
            weights = torch.softmax(hardness * negative.detach(), dim=1)
            return (weights * losses).sum() / batch
        return losses.sum() / (batch * count)
    return (weighted(softplus(-positive)).sum() + weighted(softplus(negative)).sum()) / (batch * (1 + count))


def mean_squares(users: Tensor, items: Tensor) -> Tensor:
    """Return ``|user|^2 + |item|^2 + mean |negative|^2``, averaged over a batch of pairs or of shared negatives."""
    batch = len(users)
    if items.dim() == 2:
        negatives = items[batch:]
        return (users.square().sum() + items[:batch].square().sum()) / batch + negatives.square().sum() / len(negatives)
    squares = users.square().sum() + items[:, 0].square().sum()
    return (squares + items[:, 1:].square().sum() / (items.shape[1] - 1)) / batch


def without_seen(negative: Tensor, seen: Tensor | None) -> Tensor:
    """Return scores ``[B, M]`` with -inf at the places ``int64[S]`` of items that the user has."""
    if seen is None:
        return negative
    return negative.reshape(-1).index_fill(0, seen.to(negative.device), -torch.inf).view(negative.shape)


def pair_loss(
    users: Tensor,
    items: Tensor,
    *,
    kind: str,
    weight: Tensor | None,
    bias: Tensor | None,
    l2: float,
    hardness: float,
    pair_weights: Tensor | None = None,
) -> Tensor:
    """See `bunkbed.train.models.losses.pair_loss`."""
    queries = users if weight is None else users * weight
    scores = (queries[:, None] * items).sum(-1)
    if bias is not None:
        scores = scores + bias
    loss = competition(scores[:, 0], scores[:, 1:], kind, hardness, pair_weights)
    return loss + 0.5 * l2 * mean_squares(users, items) if l2 else loss


def shared_loss(
    users: Tensor,
    items: Tensor,
    *,
    kind: str,
    seen: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    l2: float,
    hardness: float,
    pair_weights: Tensor | None = None,
) -> Tensor:
    """See `bunkbed.train.models.losses.shared_loss`."""
    batch = len(users)
    queries = users if weight is None else users * weight
    positive, negative = (queries * items[:batch]).sum(-1), queries @ items[batch:].T
    if bias is not None:
        positive, negative = positive + bias[:batch], negative + bias[batch:]
    loss = competition(positive, without_seen(negative, seen), kind, hardness, pair_weights)
    return loss + 0.5 * l2 * mean_squares(users, items) if l2 else loss
