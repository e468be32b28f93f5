"""Sums of the gradients of equal ids on a device, the same bits in every run.

Each row's gradients are added one after another in batch order, by the operation that pools bags: a bag of gradients
for every row. No atomic additions, whose order would differ from run to run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bunkbed.bag_gradients import BagGradients
from bunkbed.torch.device.batches import PIECE, DeviceBatch
from bunkbed.torch.device.kernels.choice import chooser
from bunkbed.torch.device.kernels.operations import SumPieces
from bunkbed.torch.device.link import Link


def sum_rows(batch: DeviceBatch, grads: Any) -> Any:
    """float32[N, dim] gradients of the ids of a batch to float32[U, dim] of its rows."""
    order, starts = batch.segments()
    return _sum_segments(order, starts, grads, batch, None)


def sum_bags(batch: DeviceBatch, bags: BagGradients, grads: Any, link: Link) -> Any:
    """float32[B, dim] gradients of bags to float32[U, dim] of the rows in them, without one for every id."""
    lengths = np.diff(bags.offsets, append=bags.ids.size)
    order = batch.batch.order()
    bag_of = np.repeat(np.arange(lengths.size, dtype=np.int64), lengths)[order]
    if bags.is_mean:
        counts = link.up(np.maximum(lengths, 1).astype(np.float32))
        grads = grads / counts[:, None]
    weights = None if bags.weights is None else link.up(bags.weights[order])
    _, starts = batch.segments()
    return _sum_segments(link.up(bag_of), starts, grads, batch, weights)


def spread_bags(bags: BagGradients, grads: Any, link: Link) -> Any:
    """float32[B, dim] gradients of bags to float32[N, dim] of their ids."""
    lengths = np.diff(bags.offsets, append=bags.ids.size)
    if bags.is_mean:
        grads = grads / link.up(np.maximum(lengths, 1).astype(np.float32))[:, None]
    bag_of = np.repeat(np.arange(lengths.size, dtype=np.int64), lengths)
    rows = grads.index_select(0, link.up(bag_of))
    return rows if bags.weights is None else rows * link.up(bags.weights)[:, None]


def adds_in_order(device: torch.device) -> bool:
    """Whether a row's gradients are added one after another, however many there are."""
    return bool(device.type == "cpu")


def _sum_segments(places: Any, starts: Any, grads: Any, batch: DeviceBatch, weights: Any) -> Any:
    if not len(batch):
        return grads.new_empty((0, grads.shape[1]))
    pool = torch.nn.functional.embedding_bag
    if adds_in_order(grads.device):
        return pool(places, grads, starts, mode="sum", per_sample_weights=weights)
    first, again = batch.pieces(PIECE)
    if weights is None:
        return chooser.run(SumPieces(grads.shape[1]), grads, places, first, again)
    pieces = pool(places, grads, first, mode="sum", per_sample_weights=weights)
    if again is None:
        return pieces
    return pool(torch.arange(len(pieces), device=grads.device), pieces, again, mode="sum")
