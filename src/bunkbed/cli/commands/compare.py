"""``bunkbed compare``: show several runs in one table, with baselines among them.

Writes no file; with ``--baselines`` ``baselines.json`` in the folder of each run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from bunkbed.cli.shared.console import ConfigOption, JsonOption, UsageProblem, escape, need, print_json, stderr, stdout
from bunkbed.core.budget import parse_bytes
from bunkbed.core.types import Json
from bunkbed.train.settings.run_config import read_config

if TYPE_CHECKING:
    from bunkbed.train.evaluate.comparison import RunSummary
    from bunkbed.train.evaluate.results import Baseline


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders that bunkbed train wrote.", metavar="RUN...")],
    *,
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines",
            help="Judge popular items, item-item neighbors and ALS (pip install implicit) as the runs; stored in them.",
        ),
    ] = False,
    ram: Annotated[
        str | None,
        typer.Option(help="RAM that a baseline may take; default: the run's, at least 1 GiB.", metavar="BYTES"),
    ] = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Show runs side by side, the best first: the options in which they differ, quality, speed."""
    if ram is not None and not baselines:
        raise UsageProblem("--ram goes with --baselines")
    for folder in runs:
        read_config(folder)  # raises for a folder that is not a run
    twice = {str(folder) for folder in runs if sum(folder.resolve() == other.resolve() for other in runs) > 1}
    if twice:
        raise UsageProblem(f"{sorted(twice)[0]} is given twice; name each run once")
    need("torch", "pyarrow", *(["duckdb"] if baselines else []), command="compare")
    from bunkbed.train.evaluate.comparison import differing_options, ranked, summarize_run

    found = ranked([summarize_run(folder) for folder in runs])
    names = differing_options(found)
    others, left_out = _baselines(runs, ram) if baselines else ([], {})
    if json:
        values: Json = {"options": names, "runs": [_plain(run) for run in found], "comparable": _is_comparable(found)}
        if baselines:
            values |= {"baselines": [asdict(one) for one in others], "left_out": left_out}
        print_json(values)
        return
    console, headers, rows = stdout(), *_cells(found, others, names)
    table = _across(headers, rows)
    width = console.measure(table, options=console.options.update(width=10_000)).maximum
    if not console.is_terminal:  # one line for each run, of any length
        console.width = width
    console.print(table if width <= console.width else _down(headers, rows))
    for name, reason in left_out.items():
        stderr().print(f"[yellow]note[/] {name} is left out: {escape(reason)}", soft_wrap=True)
    if not _is_comparable(found):
        stderr().print(
            "[yellow]note[/] the runs were not judged alike (data, validation or its seed differ), "
            "so their validation figures do not compare",
            soft_wrap=True,
        )


def _baselines(runs: Sequence[Path], ram: str | None) -> tuple[list[Baseline], dict[str, str]]:
    """Return the baselines of runs, and why others are left out."""
    from bunkbed.train.evaluate.baselines import baselines_of

    with stderr().status("baselines") as status:
        allowed = None if ram is None else parse_bytes(ram)
        return baselines_of(runs, ram=allowed, on_progress=lambda text: status.update(escape(text)))


def _is_comparable(runs: Sequence[RunSummary]) -> bool:
    return len({run.judged_by for run in runs}) == 1


def _plain(run: RunSummary) -> Json:
    users, items, pairs = run.data
    return {
        **asdict(run),
        "config": run.config.to_dict(),
        "data": {"users": users, "items": items, "pairs": pairs},
        "test": None if run.test is None else asdict(run.test),
    }


def _across(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table with a row for each run and baseline."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for header in headers:
        is_text = header in ("run", "options")
        table.add_column(header, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _down(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return the same with a column for each run and baseline, for a narrow terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("", style="dim", no_wrap=True)
    for row in rows:
        table.add_column(row[0], justify="right", overflow="fold")
    for at, header in enumerate(headers[1:], start=1):
        table.add_row(header, *(row[at].replace(", ", "\n") for row in rows))
    return table


def _cells(
    runs: Sequence[RunSummary], baselines: Sequence[Baseline], names: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Return the headers and the cells of each run and baseline; the best value of each metric is bold."""
    from bunkbed.train.evaluate.comparison import with_baselines
    from bunkbed.train.evaluate.results import Baseline
    from bunkbed.train.output.display import main_metrics

    rows = with_baselines(runs, baselines)
    valid = [row.best for row in rows if row.best]
    test = [row.test.metrics for row in rows if row.test is not None]
    first = runs[0].best or (valid + test or [{}])[0]
    # The main metrics of the first run that all have.
    shown = main_metrics(first, runs[0].config.metric)
    metrics, test_metrics = (
        [name for name in shown if figures and all(name in one for one in figures)] for figures in (valid, test)
    )
    headers = ["run", *(["options"] if names else []), "split", "epochs", "best", *metrics]
    headers += [*(f"test {name}" for name in test_metrics), "pairs/s", "hits", *(["seconds"] if baselines else [])]
    cells = []
    best = {name: max(one[name] for one in valid) for name in metrics}
    best_test = {name: max(one[name] for one in test) for name in test_metrics}
    for row in rows:
        in_test = {} if row.test is None else row.test.metrics
        figures = [_figure(row.best.get(name), best[name]) for name in metrics]
        figures += [_figure(in_test.get(name), best_test[name]) for name in test_metrics]
        seconds = [] if not baselines else ["-" if row.seconds is None else f"{row.seconds:,.1f}"]
        if isinstance(row, Baseline):
            plain = [row.name, *(["-"] if names else []), *"---", *figures, *"--", *seconds]
            cells.append([f"[dim]{cell}[/dim]" for cell in plain])
            continue
        one = [
            escape(str(row.folder)),
            *([escape(", ".join(f"{name} {_option(row.options[name])}" for name in names))] if names else []),
            row.valid if row.config.split == "random" else row.config.split,
            f"{row.epochs}" if row.is_done else f"{row.epochs} of {row.config.epochs}",
            "-" if row.best_epoch is None else str(row.best_epoch),
            *figures,
            "-" if row.pairs_per_s is None else f"{row.pairs_per_s:,.0f}",
            "-" if row.hit_rate is None else f"{row.hit_rate:.1%}",
            *seconds,
        ]
        cells.append(one)
    return headers, cells


def _figure(value: float | None, best: float | None) -> str:
    if value is None:
        return "-"
    return f"[b]{value:.4f}[/b]" if value == best else f"{value:.4f}"


def _option(value: object) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
