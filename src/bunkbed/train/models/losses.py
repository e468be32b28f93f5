"""The loss of a batch of positives and their negatives, with its gradient in closed form.

Score, loss and L2 are one autograd function instead of a chain of torch operations. The chain writes six temporaries
of the size of the item vectors; the function writes one. Such memory traffic dominates a step of matrix factorization.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bunkbed import _native
from bunkbed.train.models import plain_losses

__all__ = ["aligned", "pair_loss", "shared_loss"]


def aligned(x: Tensor) -> Tensor:
    """Return `x` at a 64-byte boundary: MKL's sums depend on the alignment, and results must be deterministic."""
    x = x.contiguous()
    return x if x.data_ptr() % 64 == 0 else x.clone()


def _loss_and_slopes(
    positive: Tensor, negative: Tensor, kind: str, hardness: float, pair_weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return the mean loss of scores ``[B]`` against ``[B, K]``, its two derivatives, and a factor of both derivatives.

    The scores are contiguous, and the derivatives reuse their memory. A negative score of -inf counts as a loss of 0.
    """
    weights = None if pair_weights is None else pair_weights.numpy()
    batch, count = negative.shape
    if kind == "softmax":
        scores = torch.cat([positive[:, None], negative], 1)
        largest = scores.amax(1, keepdim=True)
        shares = scores.sub_(largest).exp_()
        totals = shares.sum(1, keepdim=True)
        losses = (totals.log() + largest).view(-1).sub_(positive)
        shares /= totals
        wanted: float | Tensor = 1
        if pair_weights is not None:
            losses *= pair_weights
            shares *= pair_weights[:, None]
            wanted = pair_weights
        loss = losses.double().sum().float() / batch
        return loss, shares[:, 0] - wanted, shares[:, 1:].contiguous(), 1.0 / batch
    if kind == "bpr":
        scale = 1.0 / (batch * (1 if hardness else count))
        total = _native.bpr_slopes(positive.numpy(), negative.numpy(), hardness, weights)
        return torch.tensor(total * scale), positive, negative, scale
    scale = 1.0 / (batch * (1 + count))
    positive.neg_()
    if weights is None:
        total = _native.logistic_slopes(positive.numpy()) + _native.logistic_slopes(negative.view(-1).numpy())
    else:  # softplus of scores against a positive of 0
        total = 0.0
        for scores in (positive[:, None], negative):
            total += _native.bpr_slopes(torch.zeros(batch).numpy(), scores.numpy(), 0.0, weights)
    return torch.tensor(total * scale), positive.neg_(), negative, scale


def _square(x: Tensor) -> Tensor:
    """Return the sum of squares, in one pass without a temporary."""
    flat = aligned(x).view(-1)
    return torch.dot(flat, flat)


class _PairLoss(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(
        ctx: Any,
        users: Tensor,
        items: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        pair_weights: Tensor | None,
        kind: str,
        l2: float,
        hardness: float,
    ) -> Tensor:
        users, items = users.contiguous(), items.contiguous()
        queries = users if weight is None else users * weight
        scores = torch.empty(items.shape[:2], dtype=items.dtype)
        squares = _native.pair_scores(queries.numpy(), items.numpy(), scores.numpy())
        if bias is not None:
            scores += bias
        positive, negative = scores[:, 0].contiguous(), scores[:, 1:].contiguous()
        loss, positive, negative, ctx.scale = _loss_and_slopes(positive, negative, kind, hardness, pair_weights)
        if l2:
            penalty = float(_square(users)) + squares[0] + squares[1] / (items.shape[1] - 1)
            loss += 0.5 * l2 / len(users) * penalty
        ctx.save_for_backward(users, items, queries, torch.cat([positive[:, None], negative], 1), weight, bias)
        ctx.l2 = l2
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        users, items, queries, slope, weight, bias = ctx.saved_tensors
        grad = float(grads[0])
        slope = slope * (ctx.scale * grad)
        decay = grad * ctx.l2 / len(users)
        query_grads, item_grads = torch.empty_like(queries), torch.empty_like(items)
        _native.pair_grads(
            slope.numpy(),
            queries.numpy(),
            items.numpy(),
            decay,
            decay / (items.shape[1] - 1),
            query_grads.numpy(),
            item_grads.numpy(),
        )
        user_grads, weight_grad = _through_weight(query_grads, users, weight)
        if ctx.l2:
            user_grads.add_(users, alpha=decay)
        return user_grads, item_grads, weight_grad, None if bias is None else slope, None, None, None, None


class _SharedLoss(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(
        ctx: Any,
        users: Tensor,
        items: Tensor,
        seen: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        pair_weights: Tensor | None,
        kind: str,
        l2: float,
        hardness: float,
    ) -> Tensor:
        batch = len(users)
        users, positives, negatives = aligned(users), items[:batch], aligned(items[batch:])
        queries = users if weight is None else users * weight
        positive = torch.linalg.vecdot(queries, positives)
        negative = queries @ negatives.T
        if bias is not None:
            positive += bias[:batch]
            negative += bias[batch:]
        if seen is not None:
            negative.view(-1).index_fill_(0, seen, -torch.inf)
        loss, positive, negative, ctx.scale = _loss_and_slopes(positive, negative, kind, hardness, pair_weights)
        if l2:
            penalty = (_square(users) + _square(positives)) / batch + _square(negatives) / len(negatives)
            loss = loss + 0.5 * l2 * penalty
        ctx.save_for_backward(users, positives, negatives, queries, positive, negative, weight, bias)
        ctx.l2 = l2
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        users, positives, negatives, queries, positive, negative, weight, bias = ctx.saved_tensors
        batch, count = negative.shape
        grad = float(grads[0])
        # The vectors are scaled, because they are fewer numbers than the scores.
        scale = grad * ctx.scale
        scaled = queries * scale
        query_grads = torch.mm(negative, negatives).addcmul_(positives, positive[:, None]).mul_(scale)
        item_grads = torch.empty(batch + count, users.shape[1], dtype=users.dtype)
        torch.mul(scaled, positive[:, None], out=item_grads[:batch])
        torch.mm(negative.T, scaled, out=item_grads[batch:])
        user_grads, weight_grad = _through_weight(query_grads, users, weight)
        if ctx.l2:
            decay = grad * ctx.l2
            item_grads[:batch].add_(positives, alpha=decay / batch)
            item_grads[batch:].add_(negatives, alpha=decay / count)
            user_grads.add_(users, alpha=decay / batch)
        bias_grad = None if bias is None else torch.cat([positive, negative.sum(0)]).mul_(scale)
        return user_grads, item_grads, None, weight_grad, bias_grad, None, None, None, None


def _through_weight(query_grads: Tensor, users: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of users and of the weight, from those of weighted user vectors."""
    if weight is None:
        return query_grads, None
    return query_grads * weight, (query_grads * users).sum(0)


def pair_loss(
    users: Tensor,
    items: Tensor,
    *,
    kind: str,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    pair_weights: Tensor | None = None,
    l2: float = 0.0,
    hardness: float = 0.0,
) -> Tensor:
    """Return the mean loss of a batch in which every positive item competes with its own negatives.

    A score is ``sum(weight * user * item) + bias``. ``"bpr"`` (Rendle et al. 2009) is the mean over pairs of
    softplus(negative - positive); ``"bce"`` the mean binary cross-entropy with label 1 for the positive;
    ``"softmax"`` the mean cross-entropy of the positive among itself and its negatives (sampled softmax, Jean et al.
    2015; where negatives are not drawn uniformly, the caller subtracts log q from the scores with `bias`). `l2` adds
    ``l2 / 2 * (|user|^2 + |item|^2 + mean |negative|^2)``, averaged over the batch. `hardness` weighs the
    negatives of a pair by softmax(hardness * score); no gradient flows through these weights. `pair_weights` multiply
    the loss of each pair; the penalty and the number of pairs in the mean stay the same.

    Args:
        users: ``float32[B, dim]``.
        items: ``float32[B, 1 + K, dim]``, the positive first, K at least 1.
        kind: ``"bpr"``, ``"bce"`` or ``"softmax"``.
        weight: ``float32[dim]``, or None for ones.
        bias: ``float32[B, 1 + K]``, or None for zeros.
        pair_weights: ``float32[B]``, at least 0, or None for ones.
        hardness: for ``"bpr"``.

    Returns:
        ``float32[]``, differentiable by users, items, weight and bias. Deterministic: for one number of
        threads it has the same bits for every place of the inputs in memory.

    >>> float(pair_loss(torch.ones(1, 2), torch.zeros(1, 3, 2), kind="bpr"))  # doctest: +ELLIPSIS
    0.693...
    """
    if not users.is_cpu:
        return plain_losses.pair_loss(
            users, items, kind=kind, weight=weight, bias=bias, pair_weights=pair_weights, l2=l2, hardness=hardness
        )
    return _PairLoss.apply(users, items, weight, bias, pair_weights, kind, l2, hardness)


def shared_loss(
    users: Tensor,
    items: Tensor,
    *,
    kind: str,
    seen: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    pair_weights: Tensor | None = None,
    l2: float = 0.0,
    hardness: float = 0.0,
) -> Tensor:
    """Return the loss of `pair_loss` where all positives of the batch compete with one set of negatives.

    Args:
        users: ``float32[B, dim]``.
        items: ``float32[B + M, dim]``: the positives, then the negatives, M at least 1.
        kind: ``"bpr"``, ``"bce"`` or ``"softmax"``.
        seen: ``int64[S]`` places in the matrix of B x M scores, row by row, of negatives that do not compete,
            because the user has the item; their loss counts as 0 in the means.
        weight: ``float32[dim]``, or None for ones.
        bias: ``float32[B + M]``, or None for zeros.
        pair_weights: ``float32[B]``, at least 0, or None for ones.
        hardness: for ``"bpr"``.

    Returns:
        ``float32[]``, differentiable and deterministic as `pair_loss`.
    """
    if not users.is_cpu:
        return plain_losses.shared_loss(
            users,
            items,
            kind=kind,
            seen=seen,
            weight=weight,
            bias=bias,
            pair_weights=pair_weights,
            l2=l2,
            hardness=hardness,
        )
    return _SharedLoss.apply(users, items, seen, weight, bias, pair_weights, kind, l2, hardness)
