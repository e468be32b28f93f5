"""The picture of `experiment`: steps a second by the size of the device cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt

RECIPES = {
    "a": ("(a) resident, SparseAdam", "#1f2933"),
    "b": ("(b) CPU, SparseAdam", "#7a869a"),
    "c": ("(c) CPU, dense Adam", "#c8553d"),
}
LINES = {
    ("RAM", True): ("table in RAM, lookahead", "#2a7f62", "-", "o"),
    ("RAM", False): ("table in RAM", "#2a7f62", "--", "s"),
    ("SSD", True): ("table on SSD, lookahead", "#3b6fb6", "-", "o"),
    ("SSD", False): ("table on SSD", "#3b6fb6", "--", "s"),
}


def draw(path: Path, data: dict[str, Any]) -> None:
    """One panel for each dim and Zipf exponent, a log axis of steps a second for each dim."""
    measured = [one for one in data["measured"] if one["place"] != "growth"]
    dims = sorted({one["dim"] for one in measured})
    exponents = sorted({one["exponent"] for one in measured})
    shares = sorted({one["share"] for one in measured if one["share"] is not None})
    if not measured:
        return
    picture, grid = plt.subplots(
        len(dims),
        len(exponents),
        figsize=(1.6 + 4 * len(exponents), 1.2 + 3.3 * len(dims)),
        squeeze=False,
        sharey="row",
    )
    labels: dict[str, Any] = {}
    for row, dim in enumerate(dims):
        for column, exponent in enumerate(exponents):
            axes = grid[row][column]
            here = [one for one in measured if one["dim"] == dim and one["exponent"] == exponent]
            labels.update(panel(axes, here, shares))
            axes.set_title(f"dim {dim}, Zipf {exponent:g}", fontsize=10)
            if row == len(dims) - 1:
                axes.set_xlabel("device cache, of all records")
        grid[row][0].set_ylabel("steps a second (log scale)")
    picture.legend(
        labels.values(),
        labels.keys(),
        loc="lower center",
        ncols=4 if len(exponents) > 1 else 2,
        fontsize=8,
        frameon=False,
    )
    note = "" if data["accelerator"] else "\nNO ACCELERATOR: these figures say nothing of one"
    picture.suptitle(f"Matrix factorisation, {data['plan']['batch']:,} ids a step\n{data['device']}{note}", fontsize=11)
    rows = 2 if len(exponents) > 1 else 4
    height = 1.2 + 3.3 * len(dims)
    picture.tight_layout(rect=(0, 0.22 * rows / height, 1, 1))
    picture.savefig(path, dpi=110)
    plt.close(picture)


def panel(axes: Any, measured: list[dict[str, Any]], shares: list[float]) -> dict[str, Any]:
    """Draws one panel; what its marks mean."""
    labels = {}
    for side, (label, color) in RECIPES.items():
        # (a) and (b) were measured with the tables in RAM, where there were any.
        rates = [one["steps_per_s"] for one in measured if one["side"] == side]
        if rates:
            labels[label] = axes.axhline(rates[0], color=color, linewidth=1.4, linestyle=":")
    for (place, ahead), (label, color, style, marker) in LINES.items():
        points = [
            (shares.index(one["share"]), one["steps_per_s"])
            for one in measured
            if one["side"] == "d" and one["place"] == place and one["ahead"] == ahead
        ]
        if points:
            xs, ys = zip(*sorted(points), strict=True)
            labels[label] = axes.plot(
                xs, ys, style, color=color, marker=marker, markersize=5, markerfacecolor=color if ahead else "white"
            )[0]
    axes.set_yscale("log")
    axes.set_xticks(range(len(shares)), [f"{100 * share:g} %" for share in shares])
    axes.set_xlim(-0.4, len(shares) - 0.6)
    axes.grid(axis="y", which="both", color="#e3e6ea", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return labels
