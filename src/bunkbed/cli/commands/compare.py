"""``bunkbed compare``: show several runs in one table. Writes no file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from bunkbed.cli.shared.console import ConfigOption, JsonOption, UsageProblem, escape, need, print_json, stderr, stdout
from bunkbed.core.types import Json
from bunkbed.train.settings.run_config import read_config

if TYPE_CHECKING:
    from bunkbed.train.evaluate.comparison import RunSummary


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders that bunkbed train wrote.", metavar="RUN...")],
    *,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Show runs side by side, the best first: the options in which they differ, quality, speed."""
    for folder in runs:
        read_config(folder)  # raises for a folder that is not a run
    twice = {str(folder) for folder in runs if sum(folder.resolve() == other.resolve() for other in runs) > 1}
    if twice:
        raise UsageProblem(f"{sorted(twice)[0]} is given twice; name each run once")
    need("torch", "pyarrow", command="compare")
    from bunkbed.train.evaluate.comparison import differing_options, ranked, summarize_run

    found = ranked([summarize_run(folder) for folder in runs])
    names = differing_options(found)
    if json:
        print_json({"options": names, "runs": [_plain(run) for run in found], "comparable": _is_comparable(found)})
        return
    console, table = stdout(), _table(found, names)
    if not console.is_terminal:  # one line for each run, of any length
        width = console.measure(table, options=console.options.update(width=10_000)).maximum
        console.width = width
    console.print(table)
    if not _is_comparable(found):
        stderr().print(
            "[yellow]note[/] the runs were not judged alike (data, validation or its seed differ), "
            "so their validation figures do not compare",
            soft_wrap=True,
        )


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


def _table(runs: Sequence[RunSummary], names: Sequence[str]) -> Table:
    """Return a table with a row for each run; the best value of each metric is bold."""
    from bunkbed.train.output.display import main_metrics

    # The main metrics of the first run that all runs have.
    metrics = [
        name
        for name in main_metrics(runs[0].best, runs[0].config.metric)
        if all(name in run.best for run in runs if run.best)
    ]
    tested = [run.test.metrics for run in runs if run.test is not None]
    test_metrics = [name for name in metrics if tested and all(name in each for each in tested)]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("run", overflow="fold")
    if names:
        table.add_column("options", overflow="fold")
    for header in ("split", "epochs", "best", *metrics, *(f"test {name}" for name in test_metrics), "pairs/s", "hits"):
        table.add_column(header, justify="right", no_wrap=True)
    best = {name: max((run.best[name] for run in runs if name in run.best), default=None) for name in metrics}
    best_test = {name: max(each[name] for each in tested) for name in test_metrics}
    for run in runs:
        shown = [_figure(run.best.get(name), best[name]) for name in metrics]
        in_test = run.test.metrics if run.test is not None else {}
        shown += [_figure(in_test.get(name), best_test[name]) for name in test_metrics]
        table.add_row(
            escape(str(run.folder)),
            *([escape(", ".join(f"{name} {_option(getattr(run.config, name))}" for name in names))] if names else []),
            run.config.valid if run.config.split == "random" else run.config.split,
            f"{run.epochs}" if run.is_done else f"{run.epochs} of {run.config.epochs}",
            "-" if run.best_epoch is None else str(run.best_epoch),
            *shown,
            "-" if run.pairs_per_s is None else f"{run.pairs_per_s:,.0f}",
            "-" if run.hit_rate is None else f"{run.hit_rate:.1%}",
        )
    return table


def _figure(value: float | None, best: float | None) -> str:
    if value is None:
        return "-"
    return f"[b]{value:.4f}[/b]" if value == best else f"{value:.4f}"


def _option(value: object) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
