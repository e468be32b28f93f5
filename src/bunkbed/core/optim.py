"""Optimizers as definitions: the hyperparameters are here, the row update is in the core.

| optimizer        | slots per row                | equals                                            |
|------------------|------------------------------|---------------------------------------------------|
| `SGD`            | none                         | `torch.optim.SGD` on a sparse gradient; dense too |
| `Adagrad`        | `sum[dim]`                   | `torch.optim.Adagrad`, sparse and dense           |
| `RowwiseAdagrad` | `sum[1]`                     | FBGEMM's exact row-wise Adagrad                   |
| `Adam`           | `exp_avg[dim]`, `exp_avg_sq[dim]` | `torch.optim.SparseAdam` (not dense Adam)    |

The equality with a dense optimizer holds for `weight_decay=0`: decay changes only the rows of the step.

State is float32, or with ``state_dtype="bfloat16"`` stored in half the bytes. The step is computed in float32 from the
stored values. The result is stored with stochastic rounding, which has no bias and is keyed by (seed, row, step, slot).
So an average is right in the long run even where each step changes it by less than bfloat16 can represent.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import ClassVar

from bunkbed.core.typed import shortened
from bunkbed.core.types import Json


def _require(owner: object, name: str, value: float, *, positive: bool = False, below: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{type(owner).__name__}: {name} must be a number, got {shortened(value)}")
    low_ok = value > 0 if positive else value >= 0
    if not (low_ok and value < below and value <= sys.float_info.max):
        bound = "above 0" if positive else "at least 0"
        limit = "" if below == math.inf else f" and below {below:g}"
        raise ValueError(f"{type(owner).__name__}: {name} must be finite, {bound}{limit}, got {shortened(value)}")


_LARGEST = 3e38  # smaller values stay finite in every state dtype
STATE_DTYPES = ("float32", "bfloat16")


def _require_flag(owner: object, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{type(owner).__name__}: {name} must be True or False, got {shortened(value)}")


def _require_state_dtype(owner: object, value: object) -> None:
    if not isinstance(value, str) or value not in STATE_DTYPES:
        raise ValueError(
            f"{type(owner).__name__}: state_dtype must be one of {', '.join(STATE_DTYPES)}, got {shortened(value)}"
        )


@dataclass(frozen=True)
class Optimizer:
    """Base class of the optimizers; use a subclass."""

    #: Names of the per-row arrays, in record order; the same as in PyTorch.
    slots: ClassVar[tuple[str, ...]] = ()
    #: The name stored in the table's manifest.
    kind: ClassVar[str] = ""

    def slot_dim(self, dim: int) -> int:
        """Return the length of each slot of a row with `dim` weights."""
        return dim

    def native(self) -> Json:
        """Return the definition for the core: `kind` and the value of every hyperparameter."""
        raise NotImplementedError


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent: ``w -= lr * g``.

    Args:
        lr: learning rate, at least 0.
        weight_decay: ``weight_decay * w`` is added to the gradient, only for rows of the step; at least 0.
        decoupled: decay the weight itself (``w *= 1 - lr * weight_decay``) instead.

    Raises:
        ValueError, TypeError: a hyperparameter out of range or not a number.
    """

    lr: float = 1e-2
    weight_decay: float = 0.0
    decoupled: bool = False
    kind: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        _require(self, "lr", self.lr)
        _require(self, "weight_decay", self.weight_decay)
        _require_flag(self, "decoupled", self.decoupled)

    def native(self) -> Json:
        return {"kind": "sgd", "lr": self.lr, "weight_decay": self.weight_decay, "decoupled": self.decoupled}


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011): ``sum += g * g; w -= lr * g / (sqrt(sum) + eps)``.

    Args:
        lr: learning rate, at least 0.
        eps: added to the denominator, at least 0.
        initial_accumulator: initial value of ``sum``, at least 0; rounded to the nearest value of `state_dtype`.
        weight_decay: see `SGD`.
        decoupled: see `SGD`.
        state_dtype: dtype of the stored slots: ``"float32"`` or ``"bfloat16"``.

    Raises:
        ValueError, TypeError: a hyperparameter out of range or not a number.
    """

    lr: float = 1e-2
    eps: float = 1e-10
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0
    decoupled: bool = False
    state_dtype: str = "float32"
    slots: ClassVar[tuple[str, ...]] = ("sum",)
    kind: ClassVar[str] = "adagrad"

    def __post_init__(self) -> None:
        _require(self, "lr", self.lr)
        _require(self, "eps", self.eps)
        _require(self, "initial_accumulator", self.initial_accumulator, below=_LARGEST)
        _require(self, "weight_decay", self.weight_decay)
        _require_flag(self, "decoupled", self.decoupled)
        _require_state_dtype(self, self.state_dtype)

    def native(self) -> Json:
        return {
            "kind": "adagrad",
            "lr": self.lr,
            "eps": self.eps,
            "initial_accumulator": self.initial_accumulator,
            "weight_decay": self.weight_decay,
            "decoupled": self.decoupled,
            "state_dtype": self.state_dtype,
        }


@dataclass(frozen=True)
class RowwiseAdagrad(Optimizer):
    """Adagrad with one accumulator a row, as in FBGEMM: ``sum += mean(g * g); w -= lr / (sqrt(sum) + eps) * g``.

    Args:
        lr: learning rate, at least 0.
        eps: added to the denominator, at least 0.
        weight_decay: see `SGD`.
        decoupled: see `SGD`.
        state_dtype: dtype of the stored accumulator: ``"float32"`` or ``"bfloat16"``. The latter saves no space here,
            because the fields of a record begin at multiples of 4 bytes.

    Raises:
        ValueError, TypeError: a hyperparameter out of range or not a number.
    """

    lr: float = 1e-2
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    state_dtype: str = "float32"
    slots: ClassVar[tuple[str, ...]] = ("sum",)
    kind: ClassVar[str] = "rowwise_adagrad"

    def __post_init__(self) -> None:
        _require(self, "lr", self.lr)
        _require(self, "eps", self.eps)
        _require(self, "weight_decay", self.weight_decay)
        _require_flag(self, "decoupled", self.decoupled)
        _require_state_dtype(self, self.state_dtype)

    def slot_dim(self, dim: int) -> int:
        return 1

    def native(self) -> Json:
        return {
            "kind": "rowwise_adagrad",
            "lr": self.lr,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "decoupled": self.decoupled,
            "state_dtype": self.state_dtype,
        }


@dataclass(frozen=True)
class Adam(Optimizer):
    """Lazy Adam, exactly `torch.optim.SparseAdam` (Kingma and Ba 2015).

    The state of rows that are not in a step does not change; bias correction uses the table's step.

    Args:
        lr: learning rate, at least 0.
        betas: decay of the two running averages, each in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: see `SGD`.
        decoupled: see `SGD`; with it this is a lazy AdamW.
        state_dtype: dtype of the stored slots: ``"float32"`` or ``"bfloat16"``.

    Raises:
        ValueError, TypeError: a hyperparameter out of range or not a number.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    state_dtype: str = "float32"
    slots: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    kind: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        _require(self, "lr", self.lr)
        if not isinstance(self.betas, (tuple, list)):
            raise TypeError(f"Adam: betas must be two numbers, got {shortened(self.betas)}")
        if len(self.betas) != 2:
            raise ValueError(f"Adam: betas must be two numbers, got {shortened(self.betas)}")
        object.__setattr__(self, "betas", (self.betas[0], self.betas[1]))
        _require(self, "betas[0]", self.betas[0], below=1.0)
        _require(self, "betas[1]", self.betas[1], below=1.0)
        _require(self, "eps", self.eps)
        _require(self, "weight_decay", self.weight_decay)
        _require_flag(self, "decoupled", self.decoupled)
        _require_state_dtype(self, self.state_dtype)

    def native(self) -> Json:
        return {
            "kind": "adam",
            "lr": self.lr,
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "decoupled": self.decoupled,
            "state_dtype": self.state_dtype,
        }


#: Every optimizer by its name in the manifest. Opening, the command line and the tests use this dict.
OPTIMIZERS: dict[str, type[Optimizer]] = {cls.kind: cls for cls in (SGD, Adagrad, RowwiseAdagrad, Adam)}


def from_native(values: Json) -> Optimizer:
    """Return the optimizer of a manifest; the inverse of `Optimizer.native`."""
    fields = dict(values)
    kind = fields.pop("kind")
    if kind == "adam":
        fields["betas"] = (fields.pop("beta1"), fields.pop("beta2"))
    return OPTIMIZERS[kind](**fields)


def require_optimizer(value: object) -> Optimizer:
    """Return `value` if it is an optimizer definition.

    Raises:
        TypeError: it is not an optimizer; the message lists the choices.
    """
    if not isinstance(value, Optimizer) or not value.kind:
        choices = ", ".join(f"bb.{cls.__name__}" for cls in OPTIMIZERS.values())
        raise TypeError(f"optimizer must be one of {choices}, got {shortened(value)}")
    return value


def check_same_slots(name: str, present: Optimizer, wanted: Optimizer) -> None:
    """Check that records with the slots of `present` can hold those of `wanted`.

    Raises:
        ValueError: another class, or other initial values or dtype of the slots; names both.
    """
    if type(present) is not type(wanted):

        def slots(optimizer: Optimizer) -> str:
            return f"{type(optimizer).__name__} ({', '.join(optimizer.slots) or 'no slots'})"

        raise ValueError(
            f"table '{name}': its records hold the state of {slots(present)}, {slots(wanted)} was asked for; "
            "hyperparameters may change on opening, the optimizer's class may not"
        )
    stored, asked = (getattr(optimizer, "state_dtype", "float32") for optimizer in (present, wanted))
    if stored != asked:
        raise ValueError(
            f"table '{name}': state_dtype is {stored!r} in the table, {asked!r} was asked for; it is how the slots are "
            "stored; to convert a table, export it with its slots and import it into a new one"
        )
    before = getattr(present, "initial_accumulator", 0.0)
    after = getattr(wanted, "initial_accumulator", 0.0)
    if before != after:
        raise ValueError(
            f"table '{name}': initial_accumulator is {before} in the table, {after} was asked for; "
            "it is part of what an untouched row is and cannot change"
        )


def have_same_slots(present: Optimizer, wanted: Optimizer) -> bool:
    """Return whether `check_same_slots` passes."""
    try:
        check_same_slots("", present, wanted)
    except ValueError:
        return False
    return True
