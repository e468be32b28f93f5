"""The loss of a batch of positives and their negatives, with its gradient in closed form.

Score, loss and L2 are one autograd function rather than a chain of torch operations: the chain writes six
temporaries of the size of the item vectors, this writes one, and a step of matrix factorization is nothing
but such memory traffic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["pair_loss"]


def _aligned(x: Tensor) -> Tensor:
    """`x` at a 64-byte boundary: MKL's sums depend on the alignment, and ours must not depend on chance."""
    x = x.contiguous()
    return x if x.data_ptr() % 64 == 0 else x.clone()


def _loss_and_slope(scores: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The mean loss of ``scores[B, 1 + K]`` (positive first), and its derivative by every score."""
    batch, width = scores.shape
    slope = torch.empty_like(scores)
    if kind == "bpr":
        behind = scores[:, 1:] - scores[:, :1]
        loss = functional.softplus(behind).mean()
        pull = torch.sigmoid(behind).div_(batch * (width - 1))
        slope[:, 1:] = pull
        slope[:, 0] = -pull.sum(1)
    else:
        signed = scores.clone()
        signed[:, 0].neg_()
        loss = functional.softplus(signed).mean()
        torch.sigmoid(signed, out=slope)
        slope[:, 0].neg_()
        slope.div_(batch * width)
    return loss, slope


class _PairLoss(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(
        ctx: Any,
        users: Tensor,
        items: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        kind: str,
        l2: float,
    ) -> Tensor:
        users, items = _aligned(users), _aligned(items)
        queries = users if weight is None else users * weight
        scores = torch.bmm(queries[:, None], items.transpose(1, 2))[:, 0]
        if bias is not None:
            scores += bias
        loss, slope = _loss_and_slope(scores, kind)
        if l2:
            negatives = items.shape[1] - 1
            # squares[B, 1 + K]; a negative counts as 1 / K of an item, so that l2 means the same for every K.
            squares = torch.bmm(items.view(-1, 1, items.shape[2]), items.view(-1, items.shape[2], 1))
            squares = squares.view(slope.shape)
            penalty = users.square().sum() + squares[:, 0].sum() + squares[:, 1:].sum() / negatives
            loss = loss + (0.5 * l2 / len(users)) * penalty
        ctx.save_for_backward(users, items, queries, slope, weight, bias)
        ctx.l2 = l2
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        users, items, queries, slope, weight, bias = ctx.saved_tensors
        slope = slope * grads[0]
        decay = grads[0] * (ctx.l2 / len(users))
        item_grads = slope[:, :, None] * queries[:, None]
        query_grads = torch.bmm(slope[:, None], items)[:, 0]
        weight_grad = None if weight is None else (query_grads * users).sum(0)
        user_grads = query_grads if weight is None else query_grads * weight
        if ctx.l2:
            shares = torch.full((items.shape[1], 1), 1.0 / (items.shape[1] - 1))
            shares[0] = 1.0
            item_grads.addcmul_(items, shares * decay)
            user_grads.add_(users * decay)
        return user_grads, item_grads, weight_grad, None if bias is None else slope, None, None


def pair_loss(
    users: Tensor,
    items: Tensor,
    *,
    kind: str,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    l2: float = 0.0,
) -> Tensor:
    """Mean loss of a batch in which every positive item competes with its own negatives.

    A score is ``sum(weight * user * item) + bias``. ``"bpr"`` (Rendle et al. 2009) is the mean over pairs of
    softplus(negative - positive); ``"bce"`` the mean binary cross-entropy with label 1 for the positive. `l2`
    adds ``l2 / 2 * (|user|^2 + |item|^2 + mean |negative|^2)``, averaged over the batch.

    Args:
        users: ``float32[B, dim]``.
        items: ``float32[B, 1 + K, dim]``, the positive first, K at least 1.
        kind: ``"bpr"`` or ``"bce"``.
        weight: ``float32[dim]``, or None for ones.
        bias: ``float32[B, 1 + K]``, or None for zeros.

    Returns:
        ``float32[]``, differentiable by users, items, weight and bias. Deterministic: for one number of
        threads it has the same bits wherever the inputs stand in memory.

    >>> float(pair_loss(torch.ones(1, 2), torch.zeros(1, 3, 2), kind="bpr"))  # doctest: +ELLIPSIS
    0.693...
    """
    return _PairLoss.apply(users, items, weight, bias, kind, l2)
