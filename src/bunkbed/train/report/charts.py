"""Charts of a report: drawn by matplotlib as SVG, then converted to the page's colours and fonts.

A chart contains no names: they are in its legend, which the page escapes like all text. Colours are drawn as marks that
occur nowhere else in the file. Then the marks are replaced by CSS variables, so that one picture works on a light and a
dark page.
"""

from __future__ import annotations

import io
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from bunkbed.core.types import Json
from bunkbed.table.sweeps import Bin, Swept, expired_by_age
from bunkbed.train.output.display import main_metrics
from bunkbed.train.output.plots import Metrics
from bunkbed.train.report.hot_rows import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Colours of series, as the page's style sheet names them.
SERIES = ("a", "b", "c", "d", "e", "f")
_SIZE = (5.2, 2.3)  # inches: on a phone it shrinks to two thirds, and its numbers stay readable
_PANEL = (0.115, 0.13, 0.85, 0.82)
_FEWEST_BINS, _MOST_EDGES = 4, 9  # of a histogram: its width in bars, and its numbers
_POINTS = 500  # of a line; more are not visible
# Marks that are replaced by CSS variables: colours that matplotlib does not use by default.
_MARKS = {name: f"#0f1e0{index}" for index, name in enumerate((*SERIES, "muted", "grid"))}
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"

Points = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Line:
    """Entry of a legend: colour, name, and the main value as text."""

    color: str
    name: str
    value: str = ""


@dataclass(frozen=True)
class Chart:
    """Picture with its legend, or the reason for its absence.

    Attributes:
        svg: markup; the only text of a page that is not escaped, made only from numbers.
    """

    svg: str = ""
    lines: list[Line] = field(default_factory=list)
    missing: str = ""


def loss(metrics: Metrics) -> Chart:
    """Draw the loss of step reports, and the mean of every finished epoch at its middle."""
    steps, epochs = series(metrics.steps, "loss"), series(metrics.epochs, "loss")
    if not steps[0] and not epochs[0]:
        return Chart(missing="No step was reported yet.")
    # The mean over an epoch is drawn at the middle of the epoch, not at its end.
    middles = [(start + end) / 2 for start, end in pairwise([0.0, *epochs[0]])]

    def draw(panel: Axes) -> None:
        _line(panel, thin(steps), "a", width=0.9, alpha=0.45)
        _line(panel, (middles, epochs[1]), "a", width=1.8, dots=len(middles) <= 60)

    lines = [Line("a", "mean of the last epoch", f"{epochs[1][-1]:.4f}")] if epochs[1] else []
    return Chart(_svg(draw, metrics.end), lines or [Line("a", "last report", f"{steps[1][-1]:.4f}")])


def quality(metrics: Metrics, metric: str) -> Chart:
    """Draw the validation metrics that have the cut-off of `metric`."""
    evaluated = [entry for entry in metrics.judged if isinstance(entry.get("metrics"), dict) and entry["metrics"]]
    values: dict[str, Points] = {}
    for entry in evaluated:
        for name, value in entry["metrics"].items():
            if _is_number(value):
                x, y = values.setdefault(name, ([], []))
                x.append(float(entry["global_step"]))
                y.append(float(value))
    if not values:
        return Chart(missing="No epoch was evaluated: --valid none, or none is over yet.")
    shown = main_metrics({name: y[-1] for name, (_, y) in values.items()}, metric)[: len(SERIES)]
    best = [entry["global_step"] for entry in evaluated if entry.get("is_best")]

    def draw(panel: Axes) -> None:
        for name, color in zip(shown, SERIES, strict=False):
            _line(panel, values[name], color, width=1.8, dots=len(values[name][0]) <= 60)
        if best:
            panel.axvline(best[-1], color=_MARKS["muted"], linewidth=0.9, linestyle=(0, (3, 3)))
        panel.set_ylim(bottom=0)

    when = ", before the training on all pairs" if metrics.choice else ""
    lines = [
        Line(color, f"{name}{when}", f"{values[name][1][-1]:.4f}") for name, color in zip(shown, SERIES, strict=False)
    ]
    return Chart(_svg(draw, metrics.end), lines)


def hits(metrics: Metrics) -> Chart:
    """Draw the shares of unique rows found in RAM, and on the device if there is a device cache."""
    return _shares(
        metrics,
        [
            ("unique_hit_rate", "unique_hit_rate", "c", "found in RAM"),
            ("device_hit_rate", "device_hit_rate", "d", "found on the device"),
        ],
        "No step was reported yet.",
    )


def stalls(metrics: Metrics) -> Chart:
    """Draw the fraction of the time that steps waited for reads."""
    return _shares(metrics, [("stall_share", "", "e", "waited for reads")], "No step was reported yet.")


def speed(metrics: Metrics) -> Chart:
    """Draw positive pairs a second."""
    points = series(metrics.steps, "samples_per_s")
    if not points[0]:
        return Chart(missing="No step was reported yet.")

    def draw(panel: Axes) -> None:
        _area(panel, thin(points), "b")
        panel.set_ylim(bottom=0)
        panel.yaxis.set_major_formatter(lambda value, _: compact(value))

    return Chart(_svg(draw, metrics.end), [Line("b", "pairs a second, last report", f"{points[1][-1]:,.0f}")])


def hot_rows(curves: Sequence[Curve]) -> Chart:
    """Draw the share of the pairs over the fraction of the rows, the hottest rows first."""

    def draw(panel: Axes) -> None:
        lowest = min(float(one.part[1]) for one in curves)
        for one, color in zip(curves, SERIES, strict=False):
            panel.plot(one.part[1:], one.share[1:], color=_MARKS[color], linewidth=1.8)
        panel.set_xscale("log")
        panel.set_xlim(min(lowest, 0.1), 1)
        panel.set_ylim(0, 1.03)
        panel.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        panel.yaxis.set_major_formatter(_percent)
        panel.minorticks_off()

    lines = [
        Line(color, f"{one.table}: the hottest 1 % of the rows take", f"{one.share_of(0.01):.0%}")
        for one, color in zip(curves, SERIES, strict=False)
    ]
    return Chart(_svg(draw), lines)


def by_age(swept: Swept, expire: int | None) -> Chart:
    """Draw the rows before a sweep by their age, the expired ones in another colour."""
    expired = expired_by_age(swept, expire)
    lines = [Line("a", "rows", f"{sum(one.rows for one in swept.ages) - sum(expired):,}")]
    if expire is not None:
        lines = [Line("a", "have not expired", lines[0].value), Line("b", "expired", f"{sum(expired):,}")]
    return _bins(swept.ages, expired, "a", lines)


def by_count(swept: Swept) -> Chart:
    """Draw the rows before a sweep by the number of updates that named them."""
    lines = [Line("c", "rows", f"{sum(one.rows for one in swept.counts):,}")]
    return _bins(swept.counts, [0] * len(swept.counts), "c", lines)


def series(entries: Sequence[Json], key: str) -> Points:
    """Return steps and values of a field of reports, without values that are not finite."""
    points = [(float(entry["global_step"]), float(entry[key])) for entry in entries if _is_number(entry.get(key))]
    return [x for x, _ in points], [y for _, y in points]


def thin(points: Points, most: int = _POINTS) -> Points:
    """Return the points; more than `most` points are averaged over neighbours.

    >>> thin(([1, 2, 3, 4, 5], [1.0, 3.0, 5.0, 7.0, 9.0]), 3)
    ([1.5, 3.5, 5.0], [2.0, 6.0, 9.0])
    """
    size = -(-len(points[0]) // most)
    if size <= 1:
        return points
    x, y = ([sum(part) / len(part) for part in _parts(values, size)] for values in points)
    return x, y


def compact(value: float) -> str:
    """
    >>> compact(0), compact(950), compact(20_000), compact(1.5e6), compact(4.61e18)
    ('0', '950', '20k', '1.5M', '4.61E')
    """
    for unit, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _parts(values: list[float], size: int) -> list[list[float]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _shares(metrics: Metrics, wanted: list[tuple[str, str, str, str]], missing: str) -> Chart:
    """Draw lines from 0 to 100 %, of (key of steps, key of epochs or "", colour, name)."""
    drawn = [
        (series(metrics.steps, key) if metrics.steps else series(metrics.epochs, key), of_epochs, color, name)
        for key, of_epochs, color, name in wanted
    ]
    drawn = [one for one in drawn if one[0][0]]
    if not drawn:
        return Chart(missing=missing)

    def draw(panel: Axes) -> None:
        for points, _, color, _name in drawn:
            _area(panel, thin(points), color)
        panel.set_ylim(0, 1.03)
        panel.yaxis.set_major_formatter(_percent)

    lines = []
    for points, of_epochs, color, name in drawn:
        # The mean of the last epoch: the hit rate of its last steps is higher, when no rows are prefetched any more.
        ends = series(metrics.epochs, of_epochs)[1] if of_epochs else []
        where = "last epoch" if ends else "last report"
        lines.append(Line(color, f"{name}, {where}", f"{(ends or points[1])[-1]:.1%}"))
    return Chart(_svg(draw, metrics.end), lines)


def _percent(value: float, _: object) -> str:
    return f"{100 * value:g} %"


def _bins(bins: Sequence[Bin], expired: Sequence[int], color: str, lines: list[Line]) -> Chart:
    """Draw a bar for each bin, with its `expired` rows on top."""
    if not bins:
        return Chart(missing="No row with an age is stored.")
    places = [one.high.bit_length() for one in bins]
    edges = range(places[0], max(places[0] + _FEWEST_BINS, places[-1] + 1) + 1)
    shown = edges[:: -(-len(edges) // _MOST_EDGES)]

    def draw(panel: Axes) -> None:
        stay = [one.rows - gone for one, gone in zip(bins, expired, strict=True)]
        panel.bar(places, stay, width=0.9, color=_MARKS[color])
        panel.bar(places, expired, bottom=stay, width=0.9, color=_MARKS["b"])
        panel.set_xlim(edges[0] - 0.5, edges[-1] - 0.5)
        # Bin i begins at 2**(i - 1), that of 0 at 0.
        panel.set_xticks([edge - 0.5 for edge in shown], [compact(float(f"{1 << edge >> 1:.3g}")) for edge in shown])
        panel.locator_params(axis="y", nbins=5, integer=True)
        panel.yaxis.set_major_formatter(lambda value, _: compact(value))

    return Chart(_svg(draw), lines)


def _line(panel: Axes, points: Points, color: str, *, width: float, alpha: float = 1.0, dots: bool = False) -> None:
    marker = "o" if dots else ""
    panel.plot(
        *points, color=_MARKS[color], linewidth=width, alpha=alpha, clip_on=not dots, marker=marker, markersize=3.4
    )


def _area(panel: Axes, points: Points, color: str) -> None:
    panel.fill_between(*points, color=_MARKS[color], alpha=0.13, linewidth=0)
    panel.plot(*points, color=_MARKS[color], linewidth=1.4)


def _svg(draw: Callable[[Axes], None], end: float | None = None) -> str:
    """Return one panel as markup for the page; `end` is the last step of a chart over steps."""
    import matplotlib

    # Not pyplot: it has global state and may select a backend that needs a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE)
    panel = figure.add_axes(_PANEL)
    panel.grid(axis="y", color=_MARKS["grid"], linewidth=0.9)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color(_MARKS["grid"])
    panel.tick_params(which="both", colors=_MARKS["muted"], labelsize=10, length=0, pad=5)
    panel.locator_params(axis="y", nbins=5)
    if end is not None:
        panel.set_xlim(0, end)
        panel.locator_params(axis="x", nbins=6, integer=True)
        panel.xaxis.set_major_formatter(lambda value, _: compact(value))
    draw(panel)
    text = io.StringIO()
    about = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bunkbed", "axes.formatter.useoffset": False}):
        figure.savefig(text, format="svg", transparent=True, metadata=about)
    return _at_home(text.getvalue())


def _at_home(text: str) -> str:
    """Return matplotlib's SVG for use in a page: without ids, fonts and style rules, in the page's colours."""
    root = ET.fromstring(text)
    for element in root.iter():
        for child in [child for child in element if child.tag in (f"{{{_SVG}}}style", f"{{{_SVG}}}metadata")]:
            element.remove(child)  # a style rule in a picture would apply to the whole page
        element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
        if element.tag == "g":
            element.attrib.pop("id", None)  # ids are the same in every chart
        if f"{{{_XLINK}}}href" in element.attrib:
            element.set("href", element.attrib.pop(f"{{{_XLINK}}}href"))
        if "style" in element.attrib:
            style = re.sub(r"font-family: [^;]*;? ?", "", element.get("style", ""))
            for name, mark in _MARKS.items():
                style = style.replace(mark, f"var(--{name})")
            element.set("style", style)
        if "d" in element.attrib:
            element.set("d", re.sub(r"(\.\d\d)\d+", r"\1", element.get("d", "")).replace("\n", ""))
    root.set("aria-hidden", "true")  # the sentence and the legend next to it describe it
    return ET.tostring(root, encoding="unicode")
