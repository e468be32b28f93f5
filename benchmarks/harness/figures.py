"""What a case of the suite is given and what it hands back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Size = Literal["tiny", "quick", "full"]


@dataclass(frozen=True)
class Settings:
    """How a case is to run.

    Args:
        size: ``"tiny"`` takes a second or two, for tests, and yields no figure; ``"quick"`` measures what ``"full"``
            measures with fewer turns or a smaller table, and says so.
        dir: where temporary files go.
        seed: of ids, gradients and weights.
        data: folder of the real data sets.
        table: a fully written table to use and keep for the larger-than-memory cases, built where absent.
    """

    size: Size = "full"
    dir: Path = Path("bench-data")
    seed: int = 0
    data: Path = Path("../shared/data")
    table: Path | None = None

    @property
    def tiny(self) -> bool:
        return self.size == "tiny"

    def pick(self, tiny: Any, quick: Any, full: Any) -> Any:
        """One of three by `size`."""
        return {"tiny": tiny, "quick": quick, "full": full}[self.size]


@dataclass(frozen=True)
class Figure:
    """One measured number, with its target where it has one.

    Args:
        name: what was measured, such as ``"ratio torch / bunkbed"``.
        value: the median, or the number itself; None where it could not be measured, and `note` says why.
        unit: of `value`, `low` and `high`; ``"x"`` for ratios.
        low, high: least and most over the rounds or samples.
        count: how many rounds or samples.
        at_least, at_most: the target.
        note: settings, circumstances.
    """

    name: str
    value: float | None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    count: int | None = None
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the target was met; None without a target or a value."""
        if self.value is None or (self.at_least is None and self.at_most is None):
            return None
        above = self.at_least is None or self.value >= self.at_least
        # NumPy's numbers compare to NumPy's booleans, which JSON does not know.
        return bool(above and (self.at_most is None or self.value <= self.at_most))

    @property
    def target(self) -> str:
        """The target for people, or nothing."""
        parts = []
        if self.at_least is not None:
            parts.append(f">= {number(self.at_least)}")
        if self.at_most is not None:
            parts.append(f"<= {number(self.at_most)}")
        return f"{', '.join(parts)} {self.unit}".strip() if parts else ""

    def text(self) -> str:
        """The value and its spread for people."""
        if self.value is None:
            return "not measured"
        unit = self.unit if self.unit in ("", "x") else f" {self.unit}"
        text = f"{number(self.value)}{unit}"
        if self.low is not None and self.high is not None:
            text += f" ({number(self.low)} to {number(self.high)})"
        return text

    def line(self) -> str:
        """One printed line."""
        verdict = {True: "reached", False: "MISSED", None: ""}[self.reached]
        wanted = f", wanted {self.target}: {verdict}" if self.target else ""
        note = f"; {self.note}" if self.note else ""
        return f"{self.name}: {self.text()}{wanted}{note}"


@dataclass
class Outcome:
    """A case that ran, or why it did not."""

    case: str
    figures: list[Figure] = field(default_factory=list)
    machine: str = ""
    command: str = ""
    revision: str = ""
    size: Size = "full"
    seconds: float = 0.0
    #: Processors that other processes kept busy meanwhile, on average: if these are many, the figures are void.
    others: float = 0.0
    skipped: str = ""
    failed: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values, the verdicts included."""
        data = dataclasses.asdict(self)
        for plain, figure in zip(data["figures"], self.figures, strict=True):
            plain["reached"] = figure.reached
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        """The inverse of `to_json`."""
        figures = [Figure(**{k: v for k, v in figure.items() if k != "reached"}) for figure in data["figures"]]
        return cls(**{**data, "figures": figures})


def number(value: float) -> str:
    """Three significant digits, no exponent between a thousandth and a billion."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def missing(name: str, why: str, **target: float) -> Figure:
    """A figure that could not be measured."""
    return Figure(name, None, note=why, **target)


def judged(figures: Sequence[Figure], *, tiny: bool) -> list[Figure]:
    """The figures as they are, or without targets where the run was too small to judge anything."""
    if not tiny:
        return list(figures)
    return [dataclasses.replace(figure, at_least=None, at_most=None) for figure in figures]
