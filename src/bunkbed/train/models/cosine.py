"""The cosine contrastive loss of a batch (Mao et al. 2021, SimpleX), with its gradient in closed form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bunkbed.train.models.losses import aligned

__all__ = ["cosine_contrastive_loss", "units"]


class _CosineContrastive(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(
        ctx: Any,
        users: Tensor,
        items: Tensor,
        seen: Tensor | None,
        pair_weights: Tensor | None,
        margin: float,
        negative_weight: float,
    ) -> Tensor:
        batch, dim = users.shape
        queries, ctx.user_lengths = units(aligned(users))
        vectors, ctx.item_lengths = units(aligned(items).view(-1, dim))
        if items.dim() == 2:
            positive = torch.linalg.vecdot(queries, vectors[:batch])
            negative = queries @ aligned(vectors[batch:]).T
            if seen is not None:
                negative.view(-1).index_fill_(0, seen.to(negative.device), -torch.inf)
        else:
            scores = torch.matmul(vectors.view(items.shape), queries[:, :, None])[:, :, 0]
            positive, negative = scores[:, 0], scores[:, 1:].contiguous()
        over = negative.sub_(margin).clamp_(min=0)
        per_negative = negative_weight / negative.shape[1]
        losses = (1 - positive).double() + over.sum(1, dtype=torch.float64) * per_negative
        slopes = over.sign_().mul_(per_negative / batch)
        pulls = torch.full_like(positive, -1.0 / batch)
        if pair_weights is not None:
            pair_weights = pair_weights.to(losses.device)
            losses *= pair_weights
            slopes *= pair_weights[:, None]
            pulls *= pair_weights
        ctx.save_for_backward(queries, vectors, pulls, slopes)
        ctx.is_shared = items.dim() == 2
        return (losses.sum() / batch).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, vectors, pulls, slopes = ctx.saved_tensors
        batch, dim = queries.shape
        if ctx.is_shared:
            user_grads = torch.mm(slopes, aligned(vectors[batch:])).addcmul_(vectors[:batch], pulls[:, None])
            item_grads = torch.empty_like(vectors)
            torch.mul(queries, pulls[:, None], out=item_grads[:batch])
            torch.mm(slopes.T, queries, out=item_grads[batch:])
        else:
            every = torch.cat([pulls[:, None], slopes], 1)
            user_grads = torch.matmul(every[:, None], vectors.view(batch, -1, dim))[:, 0]
            item_grads = (every[:, :, None] * queries[:, None]).view(-1, dim)
        user_grads = _of_rows(user_grads * grads[0], queries, ctx.user_lengths)
        item_grads = _of_rows(item_grads * grads[0], vectors, ctx.item_lengths)
        shape = (-1, dim) if ctx.is_shared else (batch, -1, dim)
        return user_grads, item_grads.view(shape), None, None, None, None


def units(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows ``[N, dim]`` of length 1, and their lengths ``[N, 1]``; a row of zeros stays as it is."""
    lengths = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp_(min=1e-12)
    return rows / lengths, lengths


def _of_rows(grads: Tensor, of_length_1: Tensor, lengths: Tensor) -> Tensor:
    """Return the gradients of rows, from those of the rows of length 1."""
    along = torch.linalg.vecdot(grads, of_length_1)[:, None]
    return (grads - along * of_length_1) / lengths


def cosine_contrastive_loss(
    users: Tensor,
    items: Tensor,
    *,
    margin: float,
    negative_weight: float,
    seen: Tensor | None = None,
    pair_weights: Tensor | None = None,
) -> Tensor:
    """Return the mean over pairs of 1 - cos(user, item) + `negative_weight` * the mean of
    max(0, cos(user, negative) - `margin`).

    Args:
        users: ``float32[B, dim]``.
        items: ``float32[B, 1 + K, dim]``, the positive first, or ``float32[B + M, dim]``: the positives, then M
            negatives that all pairs share.
        margin: a negative whose cosine is below it does not count.
        negative_weight: weight of the negatives.
        seen: ``int64[S]`` places in the matrix of B x M cosines, row by row, of negatives that do not count.
        pair_weights: ``float32[B]``, a factor of each pair's loss; None: 1.

    Returns:
        ``float32[]``, differentiable by users and items. Deterministic: for one number of threads it has the same bits
        for every place of the inputs in memory.

    >>> float(cosine_contrastive_loss(torch.eye(1, 2), torch.eye(1, 2).repeat(3, 1), margin=0.5, negative_weight=4.0))
    2.0
    """
    return _CosineContrastive.apply(users, items, seen, pair_weights, margin, negative_weight)
