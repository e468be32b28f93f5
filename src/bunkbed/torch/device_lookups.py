"""Lookups through a device cache: autograd's side of `DeviceTier`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bunkbed.adapters.bag_gradients import BagGradients
from bunkbed.torch.base.gradients import IntArray
from bunkbed.torch.device.sums import spread_bags
from bunkbed.torch.device.tiers import Tier
from bunkbed.torch.pending import Pending, alive


class _Lookup(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """Rows out, and the gradients back into `Pending`; the anchor is the input that makes autograd come back."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, pending: Pending, tier: Tier, ids: IntArray, padding: int | None) -> Any:
        pending.require_anchor(anchor)
        ctx.pending, ctx.ids, ctx.padding = pending.ref, ids, padding
        ctx.order = next(pending.order)
        values, ctx.batch = tier.lookup(ids)
        return values

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        pending = alive(ctx.pending)
        pending.require_first_order()
        # Handed on: a loss that is kept keeps this graph, which must not keep frames from others.
        batch, ctx.batch = ctx.batch, None
        pending.hold(ctx.order, ctx.ids, pending.rows.grads(grad), ctx.padding, batch=batch)
        return pending.no_change(), None, None, None, None


class _BagLookup(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """Pooled rows out; gradients of the rows into `Pending`, and of per_sample_weights back to autograd."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, weights: Any, pending: Pending, tier: Tier, bags: BagGradients) -> Any:
        pending.require_anchor(anchor)
        ctx.pending, ctx.bags = pending.ref, bags
        ctx.order = next(pending.order)
        rows, ctx.batch = tier.lookup_rows(bags.ids)
        if weights is not None and weights.requires_grad:
            ctx.like = weights  # dtype and device only
            ctx.rows = rows.index_select(0, ctx.batch.inverse())  # as they are now
        return tier.pooled(ctx.batch, rows, bags)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
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


def look_up(pending: Pending, ids: IntArray, padding: int | None, *, touch: bool) -> Any:
    """float32[..., dim] rows of int64[...] ids on the tier's device, with gradients where the anchor has them.

    `touch`: without gradients, whether rows are brought into the cache.
    """
    tier = pending.require_tier()
    flat = np.array(ids.reshape(-1))  # ours: the caller may change his before backward, or while it is planned for
    if torch.is_grad_enabled() and pending.anchor.requires_grad:
        values = _Lookup.apply(pending.anchor, pending, tier, flat, padding)
    elif touch:
        values, _ = tier.lookup(flat)
    else:
        batch: Any = tier.deduped(flat)
        values = tier.evaluate(batch).index_select(0, batch.inverse())
    return values.reshape(*ids.shape, values.shape[1])


def look_up_bags(pending: Pending, bags: BagGradients, weights: Any, *, touch: bool) -> Any:
    """float32[B, dim] pooled rows on the tier's device; `weights`: the tensor whose gradient is wanted, or None."""
    tier = pending.require_tier()
    wants = pending.anchor.requires_grad or (weights is not None and weights.requires_grad)
    if torch.is_grad_enabled() and wants:
        return _BagLookup.apply(pending.anchor, weights, pending, tier, bags)
    if touch:
        rows, placed = tier.lookup_rows(bags.ids)
        return tier.pooled(placed, rows, bags)
    batch: Any = tier.deduped(bags.ids)
    return tier.pooled(batch, tier.evaluate(batch), bags)
