"""``bunkbed demo``: measure the cost of a small RAM budget on this machine. Needs no data file."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bunkbed.cli.shared.console import ConfigOption, JsonOption, UsageProblem, escape, need, print_json, stderr, stdout
from bunkbed.core.budget import format_bytes

if TYPE_CHECKING:
    from bunkbed.train.demo.twice import DemoResult, DemoSize
    from bunkbed.train.output.events import Event

PICTURE_NAME = "bunkbed-demo.png"


def demo(
    *,
    ram: Annotated[str, typer.Option(help="RAM budget of all tables together.", metavar="BYTES")] = "32MiB",
    epochs: Annotated[int, typer.Option(help="Number of passes over the pairs, in both trainings.", min=1)] = 3,
    scale: Annotated[
        float, typer.Option(help="Multiply the numbers of users, items and pairs by this.", min=0.001, max=1000.0)
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the data and both trainings.", min=0)] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Keep the runs and the picture here; default: only the picture.", metavar="FOLDER"),
    ] = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> int:
    """Train on a table larger than its RAM budget, then in RAM, and compare every bit.

    Plants preferences, generates Zipf-skewed interactions, and says what the budget costs.
    """
    need("torch", "pyarrow", "matplotlib", command="demo")
    from bunkbed.train.demo.plot import plot_demo
    from bunkbed.train.demo.twice import run_demo

    size = _size(scale, epochs)
    watcher = _Watcher(stderr())
    with _folder(out) as folder, watcher:
        result = run_demo(folder, ram=ram, seed=seed, size=size, watcher=watcher)
    picture = plot_demo(result, (out or Path.cwd()) / PICTURE_NAME)
    if json:
        values = asdict(result)
        for side in ("budget", "in_ram"):
            values[side].pop("reports")
        extra = {"step_ratio": result.step_ratio, "recovered": result.recovered, "picture": picture}
        print_json({"headline": result.headline(), **extra, **values})
    else:
        _say(stdout(), result, picture, out, epochs)
    return 0 if result.losses_identical and result.rows_identical else 1


def _size(scale: float, epochs: int) -> DemoSize:
    from bunkbed.train.demo.twice import DemoSize

    full = DemoSize()

    def scaled(count: int) -> int:
        return max(200, round(count * scale))

    return DemoSize(
        num_users=scaled(full.num_users),
        num_items=scaled(full.num_items),
        num_pairs=scaled(full.num_pairs),
        num_tests=scaled(full.num_tests),
        epochs=epochs,
        batch_size=max(256, min(full.batch_size, round(full.batch_size * scale))),
    )


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Yield `out`, or a temporary folder in the working directory that is removed afterwards.

    The system's temporary folder is not used, because it is often in RAM and the demo needs a disk.
    """
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageProblem(f"{out} exists and is not an empty folder; give another --out")
        out.mkdir(parents=True, exist_ok=True)
        yield out
        return
    folder = Path(tempfile.mkdtemp(prefix=".bunkbed-demo-", dir=Path.cwd()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Watcher:
    """The display of the present phase, on stderr, so that stdout has only the result."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = contextlib.ExitStack()

    def __enter__(self) -> _Watcher:
        return self

    def __exit__(self, *unused: object) -> None:
        self._phase.close()

    def begin(self, what: str) -> Callable[[Event], None]:
        from bunkbed.train.output.display import open_display

        self._phase.close()
        if what.startswith("training"):
            return self._phase.enter_context(open_display(self._console, title=what, transient=True))
        if self._console.is_terminal:
            self._phase.enter_context(self._console.status(what))
        else:
            self._console.print(what)
        return lambda event: None


def _say(console: Console, result: DemoResult, picture: Path, out: Path | None, epochs: int) -> None:
    from bunkbed.train.demo.twice import METRIC
    from bunkbed.train.output.display import format_seconds, sparkline

    console.print(Text(result.headline(), style="bold"), soft_wrap=True)
    console.print()
    grid = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    grid.add_column("", style="dim")
    grid.add_column("within the budget", justify="right")
    grid.add_column("all in RAM", justify="right")
    sides = (result.budget, result.in_ram)
    grid.add_row("RAM budget", *(format_bytes(side.ram_bytes) for side in sides))
    grid.add_row("time per step", *(f"{1000 * side.step_seconds:.1f} ms" for side in sides))
    grid.add_row("unique rows found in RAM", *(f"{side.hit_rate:.1%}" for side in sides))
    grid.add_row("read from disk", *(format_bytes(side.read_bytes) for side in sides))
    grid.add_row("written to disk", *(format_bytes(side.written_bytes) for side in sides))
    grid.add_row("last loss", *(f"{side.losses[-1]:.6f}" for side in sides))
    grid.add_row(METRIC, *(f"{side.metrics[METRIC]:.4f}" for side in sides))
    lines = [sparkline(side.losses, 18, ascii_only=console.options.ascii_only) for side in sides]
    grid.add_row("loss", *(Text(line, style="cyan") for line in lines))
    console.print(grid)
    console.print()
    steps = len(result.budget.losses)
    timed = "steps after the first epoch, when nearly every row they need is stored"
    if epochs == 1:
        timed = "the only epoch, which flatters the budget: a row's first touch needs no read"
    equal = "every one identical" if result.losses_identical else "[red]not identical[/]"
    rows = "all identical" if result.rows_identical else "[red]not identical[/]"
    facts = [
        ("compared", f"{steps:,} losses, {equal}; {result.stored_rows:,} stored rows, {rows}"),
        (
            "quality",
            f"{METRIC} {result.budget.metrics[METRIC]:.4f}; planted optimum {result.optimum[METRIC]:.4f}, "
            f"popularity {result.popularity[METRIC]:.4f}, random {result.chance[METRIC]:.4f}",
        ),
        ("timed", timed),
        ("took", format_seconds(result.seconds)),
        ("picture", escape(str(picture))),
    ]
    if out is not None:
        facts.append(("runs", f"{escape(str(out / 'budget'))}, {escape(str(out / 'in-ram'))}"))
    for label, text in facts:
        console.print(f"[dim]{label:<10}[/]{text}", soft_wrap=True)
