r"""Keras's optimizers as update rules of a table.

| Keras | the table | what differs |
|---|---|---|
| `SGD` without momentum | `bunkbed.SGD` | nothing |
| `Adagrad` | `bunkbed.Adagrad` | gradients of an id that a batch repeats are summed, then squared, \
which Keras squares separately; epsilon is added after the root, not before it: a relative 2e-7 at Keras's defaults |
| `Adam` without amsgrad, `AdamW` | `bunkbed.Adam` | a step changes only the rows it touches; Keras changes all |

Weight decay changes the rows that a step touches; Keras's changes all rows. Other features of an optimizer (momentum,
EMA, a norm over all variables) are an error; they are never ignored.
"""

from __future__ import annotations

import math

import keras

import bunkbed as bb
from bunkbed.core.optim import Optimizer
from bunkbed.core.types import Json
from bunkbed.keras.base.pending import StepRule
from bunkbed.keras.base.types import KerasOptimizer, Tensor

OURS = "bunkbed.SGD, bunkbed.Adagrad, bunkbed.RowwiseAdagrad or bunkbed.Adam"


def _inner(optimizer: KerasOptimizer) -> KerasOptimizer:
    """Return the optimizer that steps: the one inside a LossScaleOptimizer, or itself."""
    return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer


def _kind(optimizer: KerasOptimizer) -> type:
    """Return its public Keras class: on torch, ``keras.optimizers.Adam(...)`` makes an object of a subclass."""
    kinds = [kind for kind in type(optimizer).__mro__ if not kind.__module__.startswith("keras.src.backend.")]
    return kinds[0]


def _refuse(optimizer: KerasOptimizer, what: str, *, own: bool = False) -> ValueError:
    remedy = "" if own else f", or give the layer its own: Embedding(..., optimizer=...) with {OURS}"
    return ValueError(
        f"Embedding: the optimizer {type(optimizer).__name__} {what}, which a table does not do; use another{remedy}"
    )


def rule_of(optimizer: KerasOptimizer, token: Tensor, lr: float) -> Optimizer:
    """Return the update rule that follows a Keras optimizer.

    Args:
        optimizer: a `keras.optimizers.Optimizer`.
        token: the table's token, for `exclude_from_weight_decay`.
        lr: the first learning rate; each step passes its own.

    Raises:
        ValueError: no update rule of bunkbed has this class or setting; the message lists the rules.
    """
    inner = _inner(optimizer)
    kind = _kind(inner)
    step_rule(inner, follows=True)
    if inner.global_clipnorm is not None:
        raise _refuse(inner, "clips by the norm of all gradients together (global_clipnorm)")
    decay = inner.weight_decay
    if decay is not None and not inner._use_weight_decay(token):
        decay = None
    shared: Json = {"lr": lr, "weight_decay": float(decay or 0.0), "decoupled": bool(decay)}
    if kind is keras.optimizers.SGD:
        if inner.momentum:
            raise _refuse(inner, f"has momentum={inner.momentum:g}")
        return bb.SGD(**shared)
    if kind is keras.optimizers.Adagrad:
        return bb.Adagrad(eps=inner.epsilon, initial_accumulator=inner.initial_accumulator_value, **shared)
    if kind in (keras.optimizers.Adam, keras.optimizers.AdamW):
        if inner.amsgrad:
            raise _refuse(inner, "has amsgrad=True")
        return bb.Adam(betas=(float(inner.beta_1), float(inner.beta_2)), eps=inner.epsilon, **shared)
    raise ValueError(
        f"Embedding: no update rule of a table is keras.optimizers.{kind.__name__}; compile SGD, Adagrad, Adam or "
        f"AdamW and the table follows, or give the layer its own: Embedding(..., optimizer=...) with {OURS}"
    )


def learning_rate_now(optimizer: KerasOptimizer) -> float:
    """Return the learning rate as a number; 0.0 if it is unknown outside a step."""
    rate = _inner(optimizer)._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) or not hasattr(rate, "numpy"):
        return 0.0  # not used: each step passes its own
    try:
        value = float(rate.numpy())
    except (AttributeError, NotImplementedError, ValueError):  # while a graph is traced
        return 0.0
    return value if math.isfinite(value) and value >= 0 else 0.0


def step_rule(optimizer: KerasOptimizer, *, follows: bool) -> StepRule:
    """Return accumulation and clipping of an optimizer's steps; None is a caller that is not a Keras optimizer.

    Raises:
        ValueError: the optimizer averages all weights, which a table cannot do.
    """
    if optimizer is None:
        return StepRule()
    if optimizer.use_ema:
        raise _refuse(optimizer, "averages the weights of all steps (use_ema=True)", own=not follows)
    return StepRule(optimizer.gradient_accumulation_steps or 1, optimizer.clipnorm or None, optimizer.clipvalue or None)


def is_update(optimizer: KerasOptimizer) -> Tensor:
    """Return bool[]: whether the current step ends an accumulation, as Keras computes it."""
    steps = None if optimizer is None else optimizer.gradient_accumulation_steps
    if not steps:
        return keras.ops.convert_to_tensor(True)
    return keras.ops.equal((keras.ops.convert_to_tensor(optimizer._iterations) + 1) % steps, 0)


def loss_scale(optimizer: KerasOptimizer, scaling: KerasOptimizer) -> Tensor:
    """Return the factor of the current step's loss; None if the loss is not scaled."""
    if scaling is not None:
        return scaling.dynamic_scale
    return None if optimizer is None else optimizer.loss_scale_factor
