"""Initialisers: they give the value of an untouched row, a pure function of (seed, id).

They are part of the file format (FORMAT.md has the arithmetic and test vectors). All machines give the same bits.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

from bunkbed.core.typed import shortened
from bunkbed.core.types import Json


def _require_finite(owner: object, name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{type(owner).__name__}: {name} must be a number, got {shortened(value)}")
    if not abs(value) <= sys.float_info.max:
        raise ValueError(f"{type(owner).__name__}: {name} must be finite, got {shortened(value)}")


@dataclass(frozen=True)
class Initializer:
    """Base class of the initialisers; use a subclass."""

    kind: ClassVar[str] = ""

    def native(self) -> tuple[str, float, float]:
        """Return (kind, a, b), the form of the core and the manifest."""
        raise NotImplementedError


@dataclass(frozen=True)
class Zeros(Initializer):
    """Every weight 0."""

    kind: ClassVar[str] = "zeros"

    def native(self) -> tuple[str, float, float]:
        return ("zeros", 0.0, 0.0)


@dataclass(frozen=True)
class Normal(Initializer):
    """Normal distribution with mean 0.

    Args:
        std: standard deviation, finite, at least 0.

    Raises:
        ValueError, TypeError: `std` out of range or not a number.
    """

    std: float = 1.0
    kind: ClassVar[str] = "normal"

    def __post_init__(self) -> None:
        _require_finite(self, "std", self.std)
        if self.std < 0:
            raise ValueError(f"Normal: std must be at least 0, got {self.std!r}")

    def native(self) -> tuple[str, float, float]:
        return ("normal", float(self.std), 0.0)


@dataclass(frozen=True)
class Uniform(Initializer):
    """Uniform distribution over [low, high).

    Args:
        low: smallest value, finite.
        high: upper end, finite, not below `low`.

    Raises:
        ValueError, TypeError: a bound not finite, not a number, or `high < low`.
    """

    low: float = -0.05
    high: float = 0.05
    kind: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        _require_finite(self, "low", self.low)
        _require_finite(self, "high", self.high)
        if self.high < self.low:
            raise ValueError(f"Uniform: high must not be below low, got low={self.low!r}, high={self.high!r}")

    def native(self) -> tuple[str, float, float]:
        return ("uniform", float(self.low), float(self.high))


#: Every initialiser by its name in the manifest.
INITIALIZERS: dict[str, type[Initializer]] = {cls.kind: cls for cls in (Zeros, Normal, Uniform)}


def from_native(kind: str, a: float, b: float) -> Initializer:
    """Return the initialiser of a manifest; the inverse of `Initializer.native`."""
    arguments: dict[str, Json] = {
        "zeros": {},
        "normal": {"std": a},
        "uniform": {"low": a, "high": b},
    }
    return INITIALIZERS[kind](**arguments[kind])


def require_initializer(value: object) -> Initializer:
    """Return `value` if it is an initialiser.

    Raises:
        TypeError: it is not an initialiser; the message lists the choices.
    """
    if not isinstance(value, Initializer) or not value.kind:
        choices = ", ".join(f"bb.{cls.__name__}" for cls in INITIALIZERS.values())
        raise TypeError(f"init must be one of {choices}, got {shortened(value)}")
    return value
