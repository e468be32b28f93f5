"""The losses of losses.py in torch's own operations, for tensors on a device where the core's kernels cannot go."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pair_loss", "shared_loss"]


def _competition(positive: Tensor, negative: Tensor, kind: str, hardness: float) -> Tensor:
    """The mean loss of scores ``[B]`` against ``[B, K]``; a negative score of -inf does not compete."""
    batch, count = negative.shape
    softplus = torch.nn.functional.softplus
    if kind == "bpr":
        losses = softplus(negative - positive[:, None])
        if hardness:
            weights = torch.softmax(hardness * negative.detach(), dim=1)
            return (weights * losses).sum() / batch
        return losses.sum() / (batch * count)
    return (softplus(-positive).sum() + softplus(negative).sum()) / (batch * (1 + count))


def pair_loss(
    users: Tensor, items: Tensor, *, kind: str, weight: Tensor | None, bias: Tensor | None, l2: float, hardness: float
) -> Tensor:
    """See `bunkbed.train.losses.pair_loss`."""
    queries = users if weight is None else users * weight
    scores = (queries[:, None] * items).sum(-1)
    if bias is not None:
        scores = scores + bias
    loss = _competition(scores[:, 0], scores[:, 1:], kind, hardness)
    if l2:
        penalty = users.square().sum() + items[:, 0].square().sum()
        penalty = penalty + items[:, 1:].square().sum() / (items.shape[1] - 1)
        loss = loss + 0.5 * l2 / len(users) * penalty
    return loss


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
) -> Tensor:
    """See `bunkbed.train.losses.shared_loss`."""
    batch = len(users)
    queries = users if weight is None else users * weight
    positives, negatives = items[:batch], items[batch:]
    positive, negative = (queries * positives).sum(-1), queries @ negatives.T
    if bias is not None:
        positive, negative = positive + bias[:batch], negative + bias[batch:]
    if seen is not None:
        negative = negative.reshape(-1).index_fill(0, seen.to(negative.device), -torch.inf).reshape(batch, -1)
    loss = _competition(positive, negative, kind, hardness)
    if l2:
        penalty = (users.square().sum() + positives.square().sum()) / batch + negatives.square().sum() / len(negatives)
        loss = loss + 0.5 * l2 * penalty
    return loss
