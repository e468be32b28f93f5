"""The engine's arithmetic in plain NumPy: the exact bits of every row after a step.

This is a second implementation, from the rules and not from the C++, so that tests find a mistake in either one.
Each float32 operation below is one IEEE operation, in the order written; NumPy neither fuses nor reorders elementwise
arithmetic.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

LANES = 16


def integer_power(base: float, exponent: int) -> float:
    """Return ``base ** exponent`` in double by repeated squaring, the same bits on every machine.

    >>> integer_power(0.5, 3)
    0.125
    """
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def lane_sum(products: FloatArray) -> FloatArray:
    """Sum float32[U, n] along the last axis over 16 virtual lanes, folded 8, 4, 2, 1.

    Lane ``j`` takes elements ``j``, ``j + 16``, ... one after another, starting from zero.
    """
    rows, width = products.shape
    lanes = np.zeros((rows, LANES), np.float32)
    for start in range(0, width, LANES):
        block = products[:, start : start + LANES]
        lanes[:, : block.shape[1]] += block
    for half in (8, 4, 2, 1):
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
    return lanes[:, 0]


def sum_duplicates(ids: IntArray, grads: FloatArray) -> tuple[IntArray, FloatArray]:
    """Sum the gradients of each id one after another, in batch order.

    Args:
        ids: int64[N], duplicates allowed, may be empty.
        grads: float32[N, dim].

    Returns:
        The distinct ids in first-occurrence order, int64[U], and their sums, float32[U, dim].
    """
    unique, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    groups = place[inverse]

    # Each pass adds the k-th occurrence of every id, so the sums of one id are in batch order.
    by_group = np.argsort(groups, kind="stable")
    counts = np.bincount(groups, minlength=unique.size)
    starts = np.cumsum(counts) - counts
    sums: FloatArray = grads[by_group[starts]].copy() if ids.size else np.zeros_like(grads)
    for occurrence in range(1, int(counts.max(initial=0))):
        live = np.flatnonzero(counts > occurrence)
        sums[live] += grads[by_group[starts[live] + occurrence]]
    return unique[order], sums


def optimizer_slots(optimizer: Any, dim: int) -> dict[str, tuple[int, float]]:
    """Return name -> (width in float32, initial value) of the optimizer's slots of a row."""
    kind = type(optimizer).__name__
    if kind == "SGD":
        return {}
    if kind == "Adagrad":
        return {"sum": (dim, float(optimizer.initial_accumulator))}
    if kind == "RowwiseAdagrad":
        return {"sum": (1, 0.0)}
    if kind == "Adam":
        return {"exp_avg": (dim, 0.0), "exp_avg_sq": (dim, 0.0)}
    raise TypeError(
        f"optimizer must be bb.SGD, bb.Adagrad, bb.RowwiseAdagrad or bb.Adam, got {type(optimizer).__name__}"
    )


def apply_optimizer(
    optimizer: Any,
    *,
    lr: float,
    step: int,
    grad: FloatArray,
    weight: FloatArray,
    slots: dict[str, FloatArray],
) -> None:
    """Run one optimizer step on float32[U, dim] rows, in place.

    Args:
        optimizer: any optimizer of bunkbed.
        lr: the learning rate of this step.
        step: the table's step number, 1 for the first update.
        grad: the summed gradients, float32[U, dim]; changed when weight decay is coupled.
        weight: float32[U, dim].
        slots: arrays by their names in ``optimizer_slots``, float32[U, width].
    """
    f32 = np.float32
    decay = float(optimizer.weight_decay)
    if decay and optimizer.decoupled:
        weight *= f32(1.0 - lr * decay)
    elif decay:
        grad += f32(decay) * weight

    kind = type(optimizer).__name__
    if kind == "SGD":
        weight -= f32(lr) * grad
    elif kind == "Adagrad":
        slots["sum"] += grad * grad
        weight -= f32(lr) * (grad / (np.sqrt(slots["sum"]) + f32(optimizer.eps)))
    elif kind == "RowwiseAdagrad":
        mean = lane_sum(grad * grad) / f32(grad.shape[1])
        slots["sum"] += mean[:, None]
        weight -= (f32(lr) / (np.sqrt(slots["sum"]) + f32(optimizer.eps))) * grad
    else:
        beta1, beta2 = optimizer.betas
        correction1 = 1.0 - integer_power(beta1, step)
        correction2 = 1.0 - integer_power(beta2, step)
        step_size = f32(lr * math.sqrt(correction2) / correction1)
        slots["exp_avg"] += (grad - slots["exp_avg"]) * f32(1.0 - beta1)
        slots["exp_avg_sq"] += (grad * grad - slots["exp_avg_sq"]) * f32(1.0 - beta2)
        weight -= step_size * (slots["exp_avg"] / (np.sqrt(slots["exp_avg_sq"]) + f32(optimizer.eps)))


def pool(rows: FloatArray, pooling: str, weights: FloatArray | None) -> FloatArray:
    """Pool the float32[n, dim] rows of one bag to float32[dim]; an empty bag gives zeros.

    Rows are added in bag order. ``mean`` divides by the number of rows, or by the sum of the weights;
    ``sqrtn`` by the square root of that number, or of the sum of squared weights (TensorFlow's combiners). A bag whose
    weights sum to 0 is divided by infinity, which gives zeros.
    """
    f32 = np.float32
    total: FloatArray = np.zeros(rows.shape[1], np.float32)
    if not len(rows):
        return total
    mass = f32(0)
    for index, row in enumerate(rows):
        scale = f32(1) if weights is None else weights[index]
        total += row if weights is None else scale * row
        mass = mass + (scale * scale if pooling == "sqrtn" else scale)
    if mass == 0:
        mass = f32(np.inf)
    if pooling == "mean":
        total /= mass
    elif pooling == "sqrtn":
        total /= np.sqrt(mass)
    return total


def latest_time(time: int) -> int:
    """Return the latest time that has the 26 highest binary digits of `time`, with which it is kept for a count."""
    cut = max(0, time.bit_length() - 26)
    return (((time >> cut) + 1) << cut) - 1
