"""Sums of the gradients of equal ids on a device, the same bits in every run.

``embedding_bag`` adds each row's gradients in batch order, as one bag per row; a GPU adds long bags in pieces
(`PIECE`). A device without ``embedding_bag`` adds them in pairs. Atomic additions are not used, as their order differs
between runs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bunkbed.adapters.bag_gradients import BagGradients, IntArray
from bunkbed.torch.device.base import capabilities
from bunkbed.torch.device.base.batches import DeviceBatch
from bunkbed.torch.device.base.link import Link
from bunkbed.torch.device.kernels.choice import chooser
from bunkbed.torch.device.kernels.operations import SumPieces


def sum_rows(batch: DeviceBatch, grads: Tensor) -> Tensor:
    """Sum float32[N, dim] gradients of the ids of a batch to float32[U, dim] of its rows."""
    return _sum_segments(batch.segments().order, grads, batch, None)


def sum_bags(batch: DeviceBatch, bags: BagGradients, grads: Tensor, link: Link) -> Tensor:
    """Sum float32[B, dim] gradients of bags to float32[U, dim] of their rows, without a gradient for every id."""
    lengths = np.diff(bags.offsets, append=bags.ids.size)
    order = batch.batch.order()
    bag_of = np.repeat(np.arange(lengths.size, dtype=np.int64), lengths)[order]
    if bags.is_mean:
        counts = link.up(np.maximum(lengths, 1).astype(np.float32))
        grads = grads / counts[:, None]
    weights = None if bags.weights is None else link.up(bags.weights[order])
    return _sum_segments(link.up(bag_of), grads, batch, weights)


def spread_bags(bags: BagGradients, grads: Tensor, link: Link) -> Tensor:
    """Convert float32[B, dim] gradients of bags to float32[N, dim] of their ids."""
    lengths = np.diff(bags.offsets, append=bags.ids.size)
    if bags.is_mean:
        grads = grads / link.up(np.maximum(lengths, 1).astype(np.float32))[:, None]
    bag_of = np.repeat(np.arange(lengths.size, dtype=np.int64), lengths)
    rows = grads.index_select(0, link.up(bag_of))
    return rows if bags.weights is None else rows * link.up(bags.weights)[:, None]


def norm(sums: Tensor) -> float:
    """Return the 2-norm of float32[U, dim] to 1e-6 or better; it is not finite if an element is not finite."""
    if capabilities.of(sums.device).has_float64:
        return float(torch.linalg.vector_norm(sums, dtype=torch.float64))
    if not sums.numel():
        return 0.0
    # Each row is divided by a power of two, so that no square overflows or underflows. The reciprocal of the power is
    # made from bits and multiplied, as the quotients of a device may be less exact.
    power = sums.abs().amax(dim=1).view(torch.int32) & 0x7F800000
    power = power.clamp(min=0x00800000, max=0x7E800000)
    squares = sums * (0x7F000000 - power).view(torch.float32)[:, None]
    squares = squares * squares
    while squares.shape[1] > 1:  # in pairs: the number of roundings is log2 of the width
        half = (squares.shape[1] + 1) // 2
        first, second = squares[:, :half].clone(), squares[:, half:]
        first[:, : second.shape[1]] += second
        squares = first
    rows, scale = torch.stack([squares[:, 0], power.view(torch.float32)]).cpu().numpy().astype(np.float64)
    return float(np.sqrt(np.sum(rows * scale * scale)))


def add_segments(places: Tensor, rows: Tensor, starts: Tensor, bounds: IntArray, weights: Tensor, link: Link) -> Tensor:
    """Sum segments of rows, each in an order that depends only on the segment.

    Args:
        places: int64[N] positions in `rows`, segment by segment.
        rows: float32[n, dim].
        starts: int64[S], the start of each segment; an empty segment gives zeros.
        bounds: `starts` and N, on the host.
        weights: float32[N] factors, or None.
        link: to the device, where all arguments but `bounds` are.

    Returns:
        float32[S, dim].
    """
    if capabilities.of(rows.device).has_bags:
        return torch.nn.functional.embedding_bag(places, rows, starts, mode="sum", per_sample_weights=weights)
    values = rows.index_select(0, places)
    if weights is not None:
        values *= weights[:, None]
    return _add_pairs(values, bounds, link)


def _add_pairs(values: Tensor, bounds: IntArray, link: Link) -> Tensor:
    """`add_segments` of consecutive float32[N, dim], overwritten: adds neighbours, then pairs, then pairs of pairs.

    Each round gathers both sides and copies the sums to distinct places.
    """
    counts = np.diff(bounds)
    rank = np.arange(values.shape[0], dtype=np.int64) - np.repeat(bounds[:-1], counts)
    beyond = np.repeat(counts, counts) - rank  # rows of the segment from here on
    left, distance = np.arange(values.shape[0], dtype=np.int64), 1
    while True:
        left = left[(rank[left] % (2 * distance) == 0) & (beyond[left] > distance)]
        if not left.size:
            break
        here = link.up(left)
        total = values.index_select(0, here) + values.index_select(0, link.up(left + distance))
        values.index_copy_(0, here, total)
        distance *= 2
    full = np.flatnonzero(counts)
    found = values.index_select(0, link.up(bounds[:-1][full]))
    if full.size == counts.size:
        return found
    sums = values.new_zeros((counts.size, values.shape[1]))
    return sums.index_copy_(0, link.up(full), found)


def _sum_segments(places: Tensor, grads: Tensor, batch: DeviceBatch, weights: Tensor) -> Tensor:
    if not len(batch):
        return grads.new_empty((0, grads.shape[1]))
    device = capabilities.of(grads.device)
    if device.adds_in_order or not device.has_bags:
        return add_segments(places, grads, batch.segments().starts, batch.batch.offsets(), weights, batch.link)
    _, _, first, again = batch.segments()
    if weights is None:
        return chooser.run(SumPieces(grads.shape[1]), grads, places, first, again)
    pool = torch.nn.functional.embedding_bag
    pieces = pool(places, grads, first, mode="sum", per_sample_weights=weights)
    if again is None:
        return pieces
    return pool(torch.arange(len(pieces), device=grads.device), pieces, again, mode="sum")
