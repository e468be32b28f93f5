"""Pictures of the suite's figures: targets at a glance, larger than memory, growth with the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt

from benchmarks.figures import Figure, Outcome, number

REACHED, MISSED, PLAIN = "#2a7f62", "#c8553d", "#7a869a"


def draw(folder: Path, outcomes: Sequence[Outcome]) -> list[str]:
    """Draws what the outcomes allow and returns the file names."""
    names = []
    for name, picture in {
        "targets.png": targets(outcomes),
        "larger-than-memory.png": larger_than_memory(outcomes),
        "growth.png": growth(outcomes),
    }.items():
        if picture is not None:
            picture.savefig(folder / name, dpi=110, bbox_inches="tight")
            plt.close(picture)
            names.append(name)
    return names


def targets(outcomes: Sequence[Outcome]) -> Any:
    """Every figure with a target as a multiple of it: right of the line is better."""
    found: list[tuple[str, Figure]] = []
    for outcome in outcomes:
        found += [(outcome.case, f) for f in outcome.figures if f.reached is not None and score(f) is not None]
    if not found:
        return None
    picture, axes = plt.subplots(figsize=(9, 0.42 * len(found) + 1.2))
    for y, (_, figure) in enumerate(found):
        value = score(figure)
        assert value is not None
        # From the line at 1: on a log scale there is no zero to start from.
        axes.barh(y, value - 1, left=1, color=REACHED if figure.reached else MISSED, height=0.62)
        axes.text(max(value, 1) * 1.03, y, f"{figure.text()}, wanted {figure.target}", va="center", fontsize=8)
    axes.set_yticks(range(len(found)), [label(case, figure) for case, figure in found], fontsize=8)
    axes.invert_yaxis()
    values = [score(figure) or 1.0 for _, figure in found]
    logarithmic(axes, min([0.5, *values]) / 1.1, max([2, *values]) * 4)  # room for the text beside the longest bar
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("multiple of the target (log scale; right of the line: reached)")
    axes.spines[["top", "right"]].set_visible(False)
    return picture


def logarithmic(axes: Any, low: float, high: float) -> None:
    """A log axis from `low` to `high` whose ticks read as numbers."""
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    marks = [mark * 10.0**power for power in range(-3, 7) for mark in (1, 2, 5)]
    shown = [mark for mark in marks if low <= mark <= high]
    if len(shown) > 9:
        shown = [mark for mark in shown if f"{mark:e}"[0] == "1"]
    axes.set_xticks(shown, [f"{mark:,g}" for mark in shown])
    axes.minorticks_off()


def label(case: str, figure: Figure) -> str:
    text = f"{case}: {figure.name}"
    return text if len(text) <= 62 else text[:60] + "…"


def score(figure: Figure) -> float | None:
    """How far beyond its target a figure is, as a factor; above 1 is good."""
    value = figure.value
    if value is None or value <= 0 or value == float("inf"):
        return None
    if figure.at_least:
        return value / figure.at_least
    return figure.at_most / value if figure.at_most else None


def steps(outcomes: Sequence[Outcome], case: str) -> list[tuple[str, Figure]]:
    """The step times of a case, by side."""
    ending = ", a step"
    return [
        (figure.name.removesuffix(ending), figure)
        for outcome in outcomes
        if outcome.case == case
        for figure in outcome.figures
        if figure.name.endswith(ending) and figure.value is not None and figure.unit == "ms"
    ]


def larger_than_memory(outcomes: Sequence[Outcome]) -> Any:
    """Step times of all sides on a table that memory does not hold."""
    found = steps(outcomes, "larger-than-memory")
    known = {name for name, _ in found}
    found += [(name, figure) for name, figure in steps(outcomes, "key-value-stores") if name not in known]
    if not found:
        return None
    picture, axes = plt.subplots(figsize=(8, 0.5 * len(found) + 1.2))
    for y, (name, figure) in enumerate(found):
        assert figure.value is not None
        color = REACHED if name in ("bunkbed", "lookahead") else PLAIN
        axes.plot([figure.low or figure.value, figure.high or figure.value], [y, y], color=color, linewidth=2)
        axes.plot(figure.value, y, "o", color=color, markersize=9)
        axes.text(figure.value, y - 0.2, f"{number(figure.value)} ms", ha="center", va="bottom", fontsize=9)
    names = {"lookahead": "bunkbed, lookahead", "advised": "memmap + madvise"}
    axes.set_yticks(range(len(found)), [names.get(name, name) for name, _ in found])
    axes.set_ylim(len(found) - 0.5, -0.8)
    medians = [figure.value or 1.0 for _, figure in found]
    logarithmic(axes, min(medians) / 3, max(medians) * 3)
    axes.grid(axis="x", color="#e3e6ea")
    axes.set_axisbelow(True)
    axes.set_xlabel("ms a step, median and range (log scale); same batches, same memory limit")
    axes.spines[["top", "right"]].set_visible(False)
    return picture


def growth(outcomes: Sequence[Outcome]) -> Any:
    """Step time by the size of the table."""
    found = steps(outcomes, "growth")
    if not found:
        return None
    picture, axes = plt.subplots(figsize=(6, 3.6))
    values = [figure.value or 0.0 for _, figure in found]
    xs = range(len(found))
    axes.plot(xs, values, "o-", color=REACHED)
    axes.axhline(values[0] * 1.15, color=PLAIN, linestyle="--", linewidth=1)
    axes.text(xs[-1], values[0] * 1.16, "smallest + 15 %", ha="right", va="bottom", fontsize=8, color=PLAIN)
    axes.set_xticks(xs, [name for name, _ in found])
    axes.set_ylim(0, max([*values, values[0] * 1.15]) * 1.25)
    axes.set_ylabel("ms a step, median")
    axes.spines[["top", "right"]].set_visible(False)
    return picture
