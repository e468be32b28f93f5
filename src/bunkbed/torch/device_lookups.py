"""Lookups through a device cache, as autograd functions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bunkbed.adapters.bag_gradients import BagGradients
from bunkbed.torch.base.gradients import IntArray
from bunkbed.torch.base.types import Context, RowsBatch
from bunkbed.torch.device.sums import spread_bags
from bunkbed.torch.device.tiers import Tier
from bunkbed.torch.pending import Pending, alive


class _Lookup(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """Lookup of rows; backward gives their gradients to `Pending`. The anchor is its differentiable input."""

    @staticmethod
    def forward(
        ctx: Context, anchor: Tensor, pending: Pending, tier: Tier, ids: IntArray, padding: int | None
    ) -> Tensor:
        pending.require_anchor(anchor)
        ctx.pending, ctx.ids, ctx.padding = pending.ref, ids, padding
        ctx.order = next(pending.order)
        values, ctx.batch = tier.lookup(ids)
        return values

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        pending = alive(ctx.pending)
        pending.require_first_order()
        # Taken out of the graph: a loss that the caller keeps must not keep the frames pinned.
        batch, ctx.batch = ctx.batch, None
        pending.hold(ctx.order, ctx.ids, pending.rows.grads(grad), ctx.padding, batch=batch)
        return pending.no_change(), None, None, None, None


class _BagLookup(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """Lookup of pooled rows; row gradients go to `Pending`, those of per_sample_weights to autograd."""

    @staticmethod
    def forward(
        ctx: Context, anchor: Tensor, weights: Tensor, pending: Pending, tier: Tier, bags: BagGradients
    ) -> Tensor:
        pending.require_anchor(anchor)
        ctx.pending, ctx.bags = pending.ref, bags
        ctx.order = next(pending.order)
        rows, ctx.batch = tier.lookup_rows(bags.ids)
        if weights is not None and weights.requires_grad:
            ctx.like = weights  # dtype and device only
            ctx.rows = rows.index_select(0, ctx.batch.inverse())  # a copy of the present rows
        return tier.pooled(ctx.batch, rows, bags)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        pending, bags = alive(ctx.pending), ctx.bags
        pending.require_first_order()
        pooled = pending.rows.grads(grad)
        weights_grad = None
        if ctx.needs_input_grad[1]:
            bare = BagGradients(bags.ids, bags.offsets, None, False)
            weights_grad = (ctx.rows * spread_bags(bare, pooled, pending.require_tier().link)).sum(dim=1)
            weights_grad = weights_grad.to(ctx.like.device, ctx.like.dtype)
        if not ctx.needs_input_grad[0]:
            return None, weights_grad, None, None, None
        batch, ctx.batch = ctx.batch, None
        pending.hold(ctx.order, bags.ids, pooled, batch=batch, bags=bags)
        return pending.no_change(), weights_grad, None, None, None


def look_up(pending: Pending, ids: IntArray, padding: int | None, *, touch: bool) -> Tensor:
    """Return float32[..., dim] rows of int64[...] ids on the device, with gradients if the anchor requires them.

    `touch` says whether a lookup without gradients loads its rows into the cache.
    """
    tier = pending.require_tier()
    flat = np.array(ids.reshape(-1))  # a copy: the caller may change the ids before backward
    if torch.is_grad_enabled() and pending.anchor.requires_grad:
        values = _Lookup.apply(pending.anchor, pending, tier, flat, padding)
    elif touch:
        values, _ = tier.lookup(flat)
    else:
        batch: RowsBatch = tier.deduped(flat)
        values = tier.evaluate(batch).index_select(0, batch.inverse())
    return values.reshape(*ids.shape, values.shape[1])


def look_up_bags(pending: Pending, bags: BagGradients, weights: Tensor, *, touch: bool) -> Tensor:
    """Return float32[B, dim] pooled rows on the device; `weights` is the tensor that needs a gradient, or None."""
    tier = pending.require_tier()
    wants = pending.anchor.requires_grad or (weights is not None and weights.requires_grad)
    if torch.is_grad_enabled() and wants:
        return _BagLookup.apply(pending.anchor, weights, pending, tier, bags)
    if touch:
        rows, placed = tier.lookup_rows(bags.ids)
        return tier.pooled(placed, rows, bags)
    batch: RowsBatch = tier.deduped(bags.ids)
    return tier.pooled(batch, tier.evaluate(batch), bags)
