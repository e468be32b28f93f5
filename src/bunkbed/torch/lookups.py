"""Lookups of bags, and through a device cache, as an autograd function.

`Embedding` has its own function for a table in RAM: its small lookups take a few microseconds, of which the objects and
calls here would be a noticeable part.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from bunkbed.adapters.bag_gradients import BagGradients, IntArray
from bunkbed.torch.base.types import Context, RowsBatch
from bunkbed.torch.device.sums import spread_bags
from bunkbed.torch.layer import TableLayer
from bunkbed.torch.pending import Pending, alive


class Request(Protocol):
    """What a lookup wants. Graphs keep it, so it must not keep the table or a layer alive."""

    ids: IntArray  # int64[N]; the caller cannot change them before backward without an error
    padding: int | None  # the id that gets no gradient
    bags: BagGradients | None  # if rows are pooled

    def look_up(self, layer: TableLayer, *, keep_rows: bool) -> tuple[Tensor, RowsBatch, Tensor]:
        """Return the layer's output, the batch if there is one, and with `keep_rows` a copy of the rows of `ids`."""

    def weights_grad(self, pending: Pending, rows: Tensor, grads: Tensor) -> Tensor:
        """Return float32[N] gradients of the weights of `ids`, from kept rows and the gradients of bags."""


class Lookup(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """A lookup; backward gives row gradients to `Pending`, those of per_sample_weights to autograd."""

    @staticmethod
    def forward(
        ctx: Context, anchor: Tensor, weights: Tensor, ids: Tensor, layer: TableLayer, request: Request
    ) -> Tensor:
        """Look up `request`.

        Args:
            anchor: the differentiable input that represents the rows.
            weights: those that need a gradient, one for each of ``request.ids``, or None.
            ids: the caller's tensor if ``request.ids`` is its memory, for torch to detect a change before backward.
        """
        pending = layer._pending
        ctx.pending, ctx.request, ctx.order = pending.ref, request, pending.next_place()
        if ids is not None:
            ctx.save_for_backward(ids)
        ctx.like = weights  # dtype and device only
        # A gradient of the weights needs the present rows; at backward a step may have changed them.
        output, ctx.batch, ctx.rows = request.look_up(layer, keep_rows=weights is not None)
        return output

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        pending, request = alive(ctx.pending), ctx.request
        pending.require_first_order()
        _ = ctx.saved_tensors  # raises if the ids were changed
        grads = pending.rows.grads(grad)
        weights_grad = None
        if ctx.needs_input_grad[1]:
            weights_grad = request.weights_grad(pending, ctx.rows, grads).to(ctx.like.device, ctx.like.dtype)
        if not ctx.needs_input_grad[0]:
            return None, weights_grad, None, None, None
        # Taken out of the graph: a loss that the caller keeps must not keep the frames of a device cache pinned.
        batch, ctx.batch = ctx.batch, None
        pending.hold(ctx.order, request.ids, grads, request.padding, batch=batch, bags=request.bags)
        return pending.no_change(), weights_grad, None, None, None


class DeviceRequest:
    """A lookup through the device cache of the layer's table; of `bags`, or of int64[N] ids."""

    __slots__ = ("bags", "ids", "padding")

    def __init__(self, ids: IntArray, padding: int | None = None, bags: BagGradients | None = None) -> None:
        self.ids, self.padding, self.bags = ids, padding, bags

    def look_up(self, layer: TableLayer, *, keep_rows: bool) -> tuple[Tensor, RowsBatch, Tensor]:
        """See `Request`."""
        tier = layer._pending.require_tier()
        if self.bags is None:
            values, batch = tier.lookup(self.ids)
            return layer._output(values), batch, None
        rows, batch = tier.lookup_rows(self.ids)
        kept = rows.index_select(0, batch.inverse()) if keep_rows else None
        return layer._output(tier.pooled(batch, rows, self.bags)), batch, kept

    def weights_grad(self, pending: Pending, rows: Tensor, grads: Tensor) -> Tensor:
        """See `Request`."""
        assert self.bags is not None
        bare = BagGradients(self.ids, self.bags.offsets, None, False)
        return (rows * spread_bags(bare, grads, pending.require_tier().link)).sum(dim=1)

    def evaluate(self, layer: TableLayer) -> Tensor:
        """Return the layer's output; the cache stays as it is."""
        tier = layer._pending.require_tier()
        batch: RowsBatch = tier.deduped(self.ids)
        rows = tier.evaluate(batch)
        values = rows.index_select(0, batch.inverse()) if self.bags is None else tier.pooled(batch, rows, self.bags)
        return layer._output(values)


def look_up_on_device(layer: TableLayer, request: DeviceRequest, weights: Tensor, *, touch: bool) -> Tensor:
    """Return the layer's output, with gradients if anchor or weights require them.

    `touch` says whether a lookup without gradients loads its rows into the cache.
    """
    anchor = layer._pending.anchor
    if torch.is_grad_enabled() and (anchor.requires_grad or weights is not None):
        return Lookup.apply(anchor, weights, None, layer, request)
    return request.look_up(layer, keep_rows=False)[0] if touch else request.evaluate(layer)
