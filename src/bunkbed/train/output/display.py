"""Display of training: a live panel on a terminal, plain lines elsewhere.

Both displays take the events of `bunkbed.train.output.events` and do not depend on the trainer. They write only to the
given console.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bunkbed.core.budget import format_bytes
from bunkbed.train.output.events import EpochReport, EvalReport, Event, StepReport

_BLOCKS = "▁▂▃▄▅▆▇█"
# For terminals that cannot show these blocks.
_ASCII_BLOCKS = "_.-=+*#@"
_BAR_WIDTH = 36
# Finished epochs in the panel, so that it fits a terminal of 24 lines.
_EPOCHS_SHOWN = 8
# Drawing the panel takes 10 to 20 ms of Python, which the training thread waits for.
_REFRESHES_PER_S = 2
# Seconds between two lines of the plain display.
_LINE_INTERVAL_S = 10.0


class Display(Protocol):
    """Protocol of a display, which shows events while its context is entered."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __call__(self, event: Event) -> None: ...

    def note(self, message: str) -> None:
        """Show a message in addition to the figures."""


def open_display(console: Console, *, title: str = "", metric: str = "", transient: bool = False) -> Display:
    """Return the live panel if `console` is a terminal, otherwise plain lines.

    Args:
        console: the output.
        title: shown above the figures.
        metric: the main metric; other metrics are shown if they have its cut-off.
        transient: leave nothing on a terminal afterwards; otherwise the finished epochs stay.
    """
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console, title=title, metric=metric, transient=transient)
    return LineDisplay(console, title=title, metric=metric)


class LiveDisplay:
    """Panel that is redrawn in place; the finished epochs stay on the screen after it."""

    def __init__(self, console: Console, *, title: str = "", metric: str = "", transient: bool = False) -> None:
        self._console = console
        self._title = title
        self._metric = metric
        self._step: StepReport | None = None
        self._evaluation: EvalReport | None = None
        self._epochs: list[EpochReport] = []
        self._losses: list[float] = []
        self._note = ""
        self._live = Live(
            console=console, refresh_per_second=_REFRESHES_PER_S, get_renderable=self.render, transient=transient
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After the end only the finished epochs are of interest, not the progress of the last step.
        self._live.get_renderable = self._render_end  # type: ignore[method-assign]
        self._live.stop()

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepReport):
            self._step, self._evaluation = event, None
            self._losses.append(event.loss)
        elif isinstance(event, EvalReport):
            self._evaluation = event
        else:
            self._evaluation = None
            self._epochs.append(event)

    def note(self, message: str) -> None:
        self._note = message

    def render(self) -> RenderableType:
        """Return the current panel."""
        parts: list[RenderableType] = []
        if self._title:
            parts.append(Text(self._title, style="bold"))
        parts.append(self._progress())
        if self._epochs:
            parts.append(Padding(epoch_table(self._epochs[-_EPOCHS_SHOWN:], self._metric), (1, 0, 0, 0)))
        if self._note:
            parts.append(Padding(Text(self._note, style="yellow"), (1, 0, 0, 0)))
        return Padding(Group(*parts), (1, 2))

    def _render_end(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._title:
            parts.append(Text(self._title, style="bold"))
        if self._epochs:
            parts.append(epoch_table(self._epochs, self._metric))
        return Padding(Group(*parts), (1, 2)) if parts else Text("")

    def _progress(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", width=6)
        grid.add_column(width=_BAR_WIDTH)
        grid.add_column()
        report = self._step
        if report is None:
            grid.add_row("epoch", ProgressBar(total=1, completed=0, width=_BAR_WIDTH, pulse=True), "starting")
            return grid
        if self._evaluation is not None:
            done, total = self._evaluation.done, max(1, self._evaluation.total)
            bar = ProgressBar(total=total, completed=done, width=_BAR_WIDTH, complete_style="magenta")
            grid.add_row("eval", bar, f"{done:,} of {total:,} users ranked")
        else:
            bar = ProgressBar(total=max(1, report.steps_per_epoch), completed=report.step, width=_BAR_WIDTH)
            step = f"step {report.step:,} of {report.steps_per_epoch:,}"
            eta = f"[dim]ETA[/] {format_seconds(report.eta_s)}"
            where = f"[b]{report.epoch}[/b] of {report.epochs}, {step}  {eta}"
            grid.add_row("epoch", bar, Text.from_markup(where))
        line = sparkline(self._losses, _BAR_WIDTH, ascii_only=self._console.options.ascii_only)
        loss = Text.from_markup(f"[b]{report.loss:.5f}[/b]  [dim]{report.samples_per_s:,.0f} samples/s[/]")
        grid.add_row("loss", Text(line, style="cyan"), loss)
        rate = f"[b]{report.unique_hit_rate:.1%}[/b] of unique rows in RAM, [b]{report.disk_share:.1%}[/b] from disk"
        grid.add_row("hits", _share(report.unique_hit_rate, "green"), Text.from_markup(rate))
        if report.device_hit_rate is not None:
            on_device = f"[b]{report.device_hit_rate:.1%}[/b] of unique rows there"
            grid.add_row("device", _share(report.device_hit_rate, "green"), Text.from_markup(on_device))
        used = report.ram_bytes / max(1, report.ram_budget_bytes)
        budget = f"[b]{format_bytes(report.ram_bytes)}[/b] of {format_bytes(report.ram_budget_bytes)}"
        grid.add_row("RAM", _share(used, "green" if used <= 1 else "red"), Text.from_markup(budget))
        read, written = format_bytes(report.ssd_read_bytes_per_s), format_bytes(report.ssd_write_bytes_per_s)
        waited = f"waits [b]{report.stall_share:.1%}[/b]"
        text = Text.from_markup(f"read [b]{read}/s[/b]  write [b]{written}/s[/b]  {waited}")
        grid.add_row("SSD", _share(report.stall_share, "yellow"), text)
        return grid


class LineDisplay:
    """Display of one line at intervals, for log files and pipes."""

    def __init__(self, console: Console, *, title: str = "", metric: str = "") -> None:
        self._console = console
        self._title = title
        self._metric = metric
        self._last_line_s = -math.inf

    def __enter__(self) -> Self:
        if self._title:
            self._print(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepReport):
            now = time.monotonic()
            if now - self._last_line_s >= _LINE_INTERVAL_S:
                self._last_line_s = now
                self._print(step_line(event))
        elif isinstance(event, EpochReport):
            self._last_line_s = time.monotonic()
            self._print(epoch_line(event, self._metric))

    def note(self, message: str) -> None:
        self._print(message)

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


def step_line(report: StepReport) -> str:
    """Return one line about a running epoch."""
    return (
        f"epoch {report.epoch}/{report.epochs} step {report.step}/{report.steps_per_epoch} "
        f"loss {report.loss:.5f} {report.samples_per_s:,.0f} samples/s ETA {format_seconds(report.eta_s)} "
        f"{_device_text(report)}hits {report.unique_hit_rate:.1%} from disk {report.disk_share:.1%} "
        f"RAM {format_bytes(report.ram_bytes)} of {format_bytes(report.ram_budget_bytes)} "
        f"SSD read {format_bytes(report.ssd_read_bytes_per_s)}/s write {format_bytes(report.ssd_write_bytes_per_s)}/s "
        f"waits {report.stall_share:.1%}"
    )


def _device_text(report: StepReport | EpochReport) -> str:
    return "" if report.device_hit_rate is None else f"device {report.device_hit_rate:.1%} "


def epoch_line(report: EpochReport, metric: str = "") -> str:
    """Return one line about a finished epoch."""
    shown = main_metrics(report.metrics, metric)
    quality = "".join(f" {name} {report.metrics[name]:.4f}" for name in shown)
    ranking = f" ({report.ranking})" if report.metrics else ""
    return (
        f"epoch {report.epoch}/{report.epochs} done loss {report.loss:.5f}{quality}{ranking}"
        f"{' best' if report.is_best else ''} {_device_text(report)}hits {report.unique_hit_rate:.1%} "
        f"RAM {format_bytes(report.ram_bytes)} of {format_bytes(report.ram_budget_bytes)} "
        f"in {format_seconds(report.seconds)}"
    )


def main_metrics(metrics: Mapping[str, float], metric: str = "") -> list[str]:
    """Return the names of the metrics to show: those with the cut-off of `metric`, without equal metrics.

    >>> main_metrics({"hr@10": 0.7, "ndcg@10": 0.4, "recall@10": 0.7, "hr@20": 0.8, "mrr": 0.3}, "ndcg@10")
    ['hr@10', 'ndcg@10', 'mrr']
    """
    cutoffs = [name.partition("@")[2] for name in metrics if "@" in name]
    cutoff = metric.partition("@")[2] or (cutoffs[0] if cutoffs else "")
    shown = [name for name in metrics if name.partition("@")[2] in (cutoff, "")]
    hits, recall = f"hr@{cutoff}", f"recall@{cutoff}"
    # With one held-out item per user, both metrics are equal.
    if metric != recall and hits in shown and recall in shown and metrics[hits] == metrics[recall]:
        shown.remove(recall)
    return shown


def epoch_table(reports: Sequence[EpochReport], metric: str = "") -> Table:
    """Return finished epochs as a table, with the best one marked."""
    evaluated = [report for report in reports if report.metrics]
    names = main_metrics(evaluated[-1].metrics, metric) if evaluated else []
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("epoch", justify="right")
    table.add_column("loss", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("hits", justify="right")
    table.add_column("time", justify="right")
    table.add_column("")
    best = max((report.epoch for report in reports if report.is_best), default=None)
    for report in reports:
        is_best = report.epoch == best and bool(names)
        values = [f"{report.metrics[name]:.4f}" if name in report.metrics else "" for name in names]
        table.add_row(
            str(report.epoch),
            f"{report.loss:.5f}",
            *values,
            f"{report.unique_hit_rate:.1%}",
            format_seconds(report.seconds),
            "best so far" if is_best else "",
            style="bold green" if is_best else "",
        )
    if evaluated:
        table.caption = evaluated[-1].ranking
        table.caption_style = "dim"
        table.caption_justify = "left"
    return table


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Return `values` as a row of at most `width` blocks; more values are averaged.

    >>> sparkline([3.0, 2.0, 1.0], 10)
    '█▅▁'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    if len(finite) > width:
        edges = [len(finite) * at // width for at in range(width + 1)]
        finite = [sum(finite[low:high]) / (high - low) for low, high in pairwise(edges)]
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    return "".join(blocks[round((value - low) / span * (len(blocks) - 1))] for value in finite)


def format_seconds(seconds: float) -> str:
    """Return a readable duration.

    >>> format_seconds(3.21), format_seconds(75), format_seconds(7384)
    ('3.2 s', '1:15', '2:03:04')
    """
    if not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _share(value: float, style: str) -> ProgressBar:
    completed = min(1.0, max(0.0, value))
    return ProgressBar(total=1.0, completed=completed, width=_BAR_WIDTH, complete_style=style, finished_style=style)
