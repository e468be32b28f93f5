"""Plot of a run: loss, quality, hit rate and memory over time, from its metrics file."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from bunkbed.core.types import Json
from bunkbed.files.durable import make_file
from bunkbed.train.output.display import main_metrics
from bunkbed.train.settings.run_config import CHOICE_NAME, LOG_NAME

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PathLike = str | os.PathLike[str]

INK = "#22313f"
MUTED = "#8593a0"
GRID = "#e6eaee"
BLUE, ORANGE, GREEN, RED, PURPLE = "#2f6fb5", "#e07b39", "#3a9d6c", "#c8494f", "#7b5ea7"
_MIB = 2**20


@dataclass
class Metrics:
    """Lines of a ``metrics.jsonl``, by kind, in file order.

    Attributes:
        choice: epochs of the training before, which chose the epoch for this one on all pairs.
    """

    steps: list[Json] = field(default_factory=list)
    epochs: list[Json] = field(default_factory=list)
    choice: list[Json] = field(default_factory=list)

    @property
    def judged(self) -> list[Json]:
        """The epochs that may have figures of quality."""
        return self.choice or self.epochs

    @property
    def end(self) -> float:
        """The last step."""
        every = (*self.steps, *self.epochs, *self.choice)
        return max([1.0, *(float(entry["global_step"]) for entry in every)])


def read_metrics(path: PathLike) -> Metrics:
    """Read a metrics file, without a torn last line (of a run that was killed).

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line before the last is not JSON, or a line is not a report; the message names it.
    """
    result = Metrics()
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{os.fspath(path)} line {number}: is not JSON ({error.msg})") from error
        step = entry.get("global_step") if isinstance(entry, dict) else None
        if isinstance(step, bool) or not isinstance(step, (int, float)) or not math.isfinite(step):
            raise ValueError(f"{os.fspath(path)} line {number}: is not a report, it tells no number as its global_step")
        (result.epochs if entry.get("kind") == "epoch" else result.steps).append(entry)
    return result


def read_run(run: PathLike) -> Metrics:
    """Read the metrics of a run, with those of the training that chose its epoch. Raises as `read_metrics`."""
    folder = Path(run)
    result = read_metrics(folder / LOG_NAME)
    if (folder / CHOICE_NAME).is_file():
        result.choice = read_metrics(folder / CHOICE_NAME).epochs
    return result


def plot_run(run: PathLike, *, out: PathLike | None = None, title: str | None = None, metric: str = "") -> Path:
    """Draw ``training.png`` into a run's folder.

    Args:
        run: the run's folder, with its ``metrics.jsonl``.
        out: another file to draw into.
        title: default: the folder's name.
        metric: the main metric; other metrics are drawn if they have its cut-off.

    Returns:
        The picture's path.

    Raises:
        FileNotFoundError: the run has no metrics yet.
        ModuleNotFoundError: matplotlib is not installed.
    """
    folder = Path(run)
    target = Path(out) if out is not None else folder / "training.png"
    figure = draw(read_run(folder), title=title or folder.name, metric=metric)
    temporary = target.with_name(f".{target.name}")
    with make_file(temporary) as file:
        figure.savefig(file, dpi=150, format="png")
    temporary.replace(target)
    return target


def draw(metrics: Metrics, *, title: str, metric: str = "") -> Figure:
    """Draw the four panels over the steps of a run. The caller owns the figure; no window is opened."""
    # Not pyplot: it has global state and may select a backend that needs a display.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.04, hspace=0.04)
    figure = Figure(figsize=(10, 6.4), layout=layout, facecolor="white")
    figure.suptitle(title, x=0.015, ha="left", fontsize=13, fontweight="bold", color=INK)
    axes = figure.subplots(2, 2)
    steps, epochs = metrics.steps, metrics.epochs
    _draw_loss(axes[0][0], steps, epochs)
    _draw_quality(axes[0][1], metrics.judged, metric, "quality of the first training" if metrics.choice else "")
    _draw_hits(axes[1][0], steps, epochs)
    _draw_memory(axes[1][1], steps, epochs)
    for row in axes:
        for panel in row:
            panel.set_xlim(0, metrics.end)
    for panel in axes[1]:
        panel.set_xlabel("step", color=MUTED, fontsize=9)
    return figure


def style_axes(panel: Axes, title: str) -> None:
    """Style axes: light grid, no box, title above the left edge."""
    panel.set_title(title, loc="left", fontsize=10.5, color=INK, pad=8)
    panel.grid(axis="y", color=GRID, linewidth=0.9)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color(GRID)
    panel.tick_params(colors=MUTED, labelsize=8.5, length=0)


def _draw_loss(panel: Axes, steps: list[Json], epochs: list[Json]) -> None:
    style_axes(panel, "loss")
    x, y = _series(steps, "loss")
    panel.plot(x, y, color=BLUE, linewidth=0.8, alpha=0.45)
    ends, y = _series(epochs, "loss")
    if ends:
        # The mean over an epoch is drawn at the middle of the epoch, not at its end.
        middles = [(start + end) / 2 for start, end in pairwise([0.0, *ends])]
        panel.plot(middles, y, color=BLUE, linewidth=1.8, marker="o", markersize=3.5)
        _label_last(panel, middles, y, f"{y[-1]:.4f}", BLUE)


def _draw_quality(panel: Axes, epochs: list[Json], metric: str, title: str) -> None:
    evaluated = [entry for entry in epochs if entry["metrics"]]
    names = main_metrics(evaluated[-1]["metrics"], metric) if evaluated else []
    ranking = evaluated[-1].get("ranking", "") if evaluated else ""
    style_axes(panel, title or (f"quality, {_short(ranking)}" if names and ranking else "quality"))
    if not names:
        panel.text(0.5, 0.5, "not evaluated", transform=panel.transAxes, ha="center", color=MUTED)
        panel.set_yticks([])
        return
    ends: list[tuple[float, str, str]] = []
    palette = [ORANGE, BLUE, GREEN, PURPLE, RED, MUTED]
    for name, color in zip(names, palette, strict=False):
        shown = [entry for entry in epochs if name in entry["metrics"]]
        x = [entry["global_step"] for entry in shown]
        y = [entry["metrics"][name] for entry in shown]
        panel.plot(x, y, color=color, linewidth=1.8, marker="o", markersize=3.5, clip_on=False)
        ends.append((y[-1], f"{name} {y[-1]:.3f}", color))
    best = [entry for entry in epochs if entry.get("is_best")]
    if best:
        at = best[-1]["global_step"]
        panel.axvline(at, color=MUTED, linewidth=0.9, linestyle=(0, (3, 3)))
        panel.annotate(
            f"best: epoch {best[-1]['epoch']}",
            (at, 0.0),
            xycoords=("data", "axes fraction"),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=8,
            color=MUTED,
        )
    panel.set_ylim(bottom=0)
    _label_ends(panel, ends)


def _short(ranking: str) -> str:
    """Return a ranking and its split in a few words, without the rest, which is in the metrics file.

    >>> _short("full ranking of 90 items, less those trained on; 40 users; split last")
    'full ranking of 90 items, split last'
    """
    what = ranking.partition(";")[0].partition(", less")[0].removeprefix("sampled ranking: ")
    split = ranking.rpartition("; ")[2]
    return f"{what}, {split}" if split.startswith("split ") else what


def _draw_hits(panel: Axes, steps: list[Json], epochs: list[Json]) -> None:
    style_axes(panel, "unique rows found in RAM")
    x, y = _series(steps or epochs, "unique_hit_rate")
    panel.fill_between(x, y, color=GREEN, alpha=0.12, linewidth=0)
    panel.plot(x, y, color=GREEN, linewidth=1.6)
    panel.set_ylim(0, 1.03)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if x:
        # The mean of the last epoch: the hit rate of its last steps is higher, when no rows are prefetched any more.
        last = epochs[-1]["unique_hit_rate"] if epochs else y[-1]
        _label_last(panel, x, [last], f"{last:.1%}", GREEN)


def _draw_memory(panel: Axes, steps: list[Json], epochs: list[Json]) -> None:
    style_axes(panel, "RAM of all tables, MiB")
    entries = steps or epochs
    x, used = _series(entries, "ram_bytes")
    _, budget = _series(entries, "ram_budget_bytes")
    if not x:
        return
    used, budget = [value / _MIB for value in used], [value / _MIB for value in budget]
    panel.fill_between(x, used, color=PURPLE, alpha=0.12, linewidth=0)
    panel.plot(x, used, color=PURPLE, linewidth=1.6)
    panel.plot(x, budget, color=RED, linewidth=1.2, linestyle=(0, (4, 3)))
    panel.set_ylim(0, max(max(budget), max(used)) * 1.18)
    _label_last(panel, x, budget, f"budget {budget[-1]:,.1f}", RED)
    _label_last(panel, x, used, f"in use {used[-1]:,.1f}", PURPLE, below=True)


def _label_ends(panel: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Label the ends of the lines, moved apart where labels would overlap; easier to read than a legend."""
    low, high = panel.get_ylim()
    gap = 0.065 * (high - low)
    at = low - gap
    for y, text, color in sorted(ends):
        at = max(y, at + gap)
        panel.annotate(
            text,
            (1.02, at),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8.5,
            fontweight="bold",
            color=color,
            annotation_clip=False,
        )


def _series(entries: list[Json], key: str) -> tuple[list[float], list[float]]:
    points = [
        (float(entry["global_step"]), float(entry[key]))
        for entry in entries
        if entry.get(key) is not None and math.isfinite(entry[key])
    ]
    return [x for x, _ in points], [y for _, y in points]


def _label_last(panel: Axes, x: list[float], y: list[float], text: str, color: str, *, below: bool = False) -> None:
    panel.annotate(
        text,
        (x[-1], y[-1]),
        xytext=(-2, -7 if below else 5),
        textcoords="offset points",
        ha="right",
        va="top" if below else "bottom",
        fontsize=8.5,
        fontweight="bold",
        color=color,
    )
