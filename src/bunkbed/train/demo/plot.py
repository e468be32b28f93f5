"""Plot of the demo: both losses, time per step, rows found in RAM, memory compared with the table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bunkbed.core.budget import format_bytes
from bunkbed.train.demo.twice import METRIC, DemoResult
from bunkbed.train.output.plots import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, RED, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 2**20


def plot_demo(result: DemoResult, target: Path) -> Path:
    """Draw the plot into `target` (PNG) and return `target`."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.04, hspace=0.06)
    figure = Figure(figsize=(10, 6.8), layout=layout, facecolor="white")
    title = (
        f"A table of {format_bytes(result.table_bytes)} in {format_bytes(result.budget.ram_bytes)} of RAM: "
        f"{result.step_ratio:.2f}x the time per step"
    )
    figure.suptitle(title, x=0.015, ha="left", fontsize=13, fontweight="bold", color=INK)
    axes = figure.subplots(2, 2)
    _draw_losses(axes[0][0], result)
    _draw_quality(axes[0][1], result)
    _draw_hits(axes[1][0], result)
    _draw_memory(axes[1][1], result)
    figure.savefig(target, dpi=150, format="png")
    return target


def _draw_losses(panel: Axes, result: DemoResult) -> None:
    same = "the same bits in every step" if result.losses_identical else "NOT the same"
    style_axes(panel, f"loss: {same}")
    steps = range(1, len(result.budget.losses) + 1)
    panel.plot(steps, result.in_ram.losses, color=ORANGE, linewidth=4.5, alpha=0.45, label="all in RAM")
    panel.plot(steps, result.budget.losses, color=BLUE, linewidth=1.3, label="within the budget")
    panel.set_xlabel("step", color=MUTED, fontsize=9)
    panel.legend(frameon=False, fontsize=8.5, labelcolor=INK)


def _draw_quality(panel: Axes, result: DemoResult) -> None:
    style_axes(panel, f"{METRIC}, 99 negatives: {result.recovered:.0%} of the planted optimum")
    bars = [
        ("random", result.chance[METRIC], MUTED),
        ("popularity", result.popularity[METRIC], MUTED),
        ("all in RAM", result.in_ram.metrics[METRIC], ORANGE),
        ("budget", result.budget.metrics[METRIC], BLUE),
        ("optimum", result.optimum[METRIC], GREEN),
    ]
    drawn = panel.bar([name for name, _, _ in bars], [value for _, value, _ in bars], width=0.62)
    for bar, (_, value, color) in zip(drawn, bars, strict=True):
        bar.set_color(color)
        middle = bar.get_x() + bar.get_width() / 2
        panel.annotate(
            f"{value:.3f}",
            (middle, value),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
            fontweight="bold",
            color=color,
        )
    panel.margins(y=0.15)


def _draw_hits(panel: Axes, result: DemoResult) -> None:
    style_axes(panel, "unique rows found in RAM, within the budget")
    x = [report.global_step for report in result.budget.reports]
    y = [report.unique_hit_rate for report in result.budget.reports]
    panel.fill_between(x, y, color=GREEN, alpha=0.12, linewidth=0)
    panel.plot(x, y, color=GREEN, linewidth=1.6)
    panel.set_ylim(0, 1.03)
    panel.set_xlim(left=0)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    panel.set_xlabel("step", color=MUTED, fontsize=9)


def _draw_memory(panel: Axes, result: DemoResult) -> None:
    style_axes(panel, "RAM of the tables, MiB")
    reports = result.budget.reports
    x = [report.global_step for report in reports]
    used = [report.ram_bytes / _MIB for report in reports]
    panel.fill_between(x, used, color=PURPLE, alpha=0.12, linewidth=0)
    panel.plot(x, used, color=PURPLE, linewidth=1.6)
    table, budget = result.table_bytes / _MIB, result.budget.ram_bytes / _MIB
    for value, text, color in ((table, "table", INK), (budget, "budget", RED)):
        panel.axhline(value, color=color, linewidth=1.2, linestyle=(0, (4, 3)))
        panel.annotate(
            f"{text} {value:,.1f}",
            (0.99, value),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
            fontweight="bold",
            color=color,
        )
    panel.set_ylim(0, max(table, budget, *used) * 1.15)
    panel.set_xlim(left=0)
    panel.set_xlabel("step", color=MUTED, fontsize=9)
