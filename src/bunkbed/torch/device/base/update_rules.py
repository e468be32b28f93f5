"""The optimizers' update rules in plain torch operations, on any device.

The operations and their order are those of the core's kernels (csrc/kernels/impl/optimizer_impl.h). Each torch
operation below rounds once. ``torch.lerp``, ``addcmul`` and ``alpha=`` are not used, as they round once where the core
rounds twice. On a CPU the rows have the bits of the core's rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bunkbed.core import optim

#: Virtual lanes of a sum over a row (docs/design/engine.md, rule 2).
_LANES = 16


@dataclass(frozen=True, slots=True)
class StepConstants:
    """Values that are the same for every row of a step, each rounded to float32 once."""

    step_size: float
    eps: float
    decay: float  # coupled: added to the gradient as decay * weight; 0 for none
    keep: float  # decoupled: the weight is multiplied with it first; 1 for none
    one_minus_beta1: float
    one_minus_beta2: float


def step_constants(optimizer: optim.Optimizer, lr: float, step: int) -> StepConstants:
    """Return the constants of step number `step`, counted from 1, at learning rate `lr`."""
    weight_decay = float(getattr(optimizer, "weight_decay", 0.0))
    decoupled = bool(getattr(optimizer, "decoupled", False))
    size, beta1, beta2 = lr, 0.0, 0.0
    if isinstance(optimizer, optim.Adam):
        beta1, beta2 = optimizer.betas
        size = lr * math.sqrt(1.0 - _integer_power(beta2, step)) / (1.0 - _integer_power(beta1, step))
    return StepConstants(
        step_size=_float32(size),
        eps=_float32(getattr(optimizer, "eps", 0.0)),
        decay=0.0 if decoupled else _float32(weight_decay),
        keep=_float32(1.0 - lr * weight_decay) if decoupled else 1.0,
        one_minus_beta1=_float32(1.0 - beta1),
        one_minus_beta2=_float32(1.0 - beta2),
    )


def update_rows(
    optimizer: optim.Optimizer, constants: StepConstants, grad: Tensor, weight: Tensor, slots: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Take one step of rows; return new weights and slots.

    Args:
        optimizer: decides the rule.
        constants: of this step.
        grad: float32[U, dim], summed; not changed.
        weight: float32[U, dim], overwritten.
        slots: float32[U, length] in record order, overwritten.
    """
    if constants.keep != 1.0:
        weight *= constants.keep
    if constants.decay != 0.0:
        grad = grad + weight * constants.decay
    if isinstance(optimizer, optim.SGD):
        weight -= grad * constants.step_size
    elif isinstance(optimizer, optim.Adagrad):
        slots[0] += grad * grad
        weight -= (grad / (_sqrt(slots[0]) + constants.eps)) * constants.step_size
    elif isinstance(optimizer, optim.RowwiseAdagrad):
        # Both operands of a division are tensors: with a number, a device multiplies by a reciprocal instead.
        squares = _lane_sum(grad * grad)[:, None]
        slots[0] += squares / torch.full_like(squares, grad.shape[1])
        size = torch.full_like(slots[0], constants.step_size)
        weight -= grad * (size / (_sqrt(slots[0]) + constants.eps))
    elif isinstance(optimizer, optim.Adam):
        exp_avg, exp_avg_sq = slots
        exp_avg += (grad - exp_avg) * constants.one_minus_beta1
        exp_avg_sq += (grad * grad - exp_avg_sq) * constants.one_minus_beta2
        weight -= (exp_avg / (_sqrt(exp_avg_sq) + constants.eps)) * constants.step_size
    else:
        raise TypeError(f"a device cache knows no update rule of {type(optimizer).__name__}")
    return weight, slots


def _float32(value: float) -> float:
    return float(np.float32(value))


def _integer_power(base: float, exponent: int) -> float:
    """Return ``base ** exponent`` by repeated squaring, as the core does: the same bits everywhere."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _sqrt(values: Tensor) -> Tensor:
    """Return correctly rounded roots; on a CPU by NumPy, as torch may call a library that rounds otherwise."""
    if not values.is_cpu:
        return values.sqrt()
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(values.numpy()))


def _lane_sum(values: Tensor) -> Tensor:
    """Return float32[U] sums of float32[U, dim] over 16 virtual lanes, folded 8, 4, 2, 1."""
    rows, dim = values.shape
    lanes = values.new_zeros((rows, _LANES))
    for start in range(0, dim, _LANES):
        block = values[:, start : start + _LANES]
        lanes[:, : block.shape[1]] += block
    half = _LANES // 2
    while half:
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
        half //= 2
    return lanes[:, 0]
