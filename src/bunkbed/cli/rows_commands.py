"""``bunkbed import`` and ``bunkbed export``: rows between tables and files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.markup import escape

from bunkbed.cli.common import ConfigOption, JsonOption, UsageProblem, print_error, print_json, stderr, stdout
from bunkbed.cli.neighbors_command import Metric
from bunkbed.cli.train_options import OPTIMIZER_DEFAULT, OptimizerName
from bunkbed.io.formats import FORMATS
from bunkbed.train.config import OPTIMIZERS

_SUFFIXES = " ".join(suffix for one in FORMATS for suffix in one.suffixes)
FileArgument = Annotated[Path, typer.Argument(help=f"A file ending in {_SUFFIXES}.", metavar="FILE")]
FormatOption = Annotated[
    str | None,
    typer.Option(
        help=f"Where the name does not tell: {' '.join(one.name for one in FORMATS)}.",
        metavar="NAME",
        show_default=False,
    ),
]
VocabHelp = "For rows named by words: a file of one word a line, whose number from 0 is the id"


def import_table(
    path: Annotated[Path, typer.Argument(help="Table to fill; created unless it exists.", metavar="TABLE")],
    file: FileArgument,
    *,
    dim: Annotated[int | None, typer.Option(help="Numbers per row; needed to create the table.")] = None,
    num_rows: Annotated[int | None, typer.Option(help="Ids in [0, N); default: any id.")] = None,
    optimizer: Annotated[OptimizerName, typer.Option(help="Optimizer of a new table.")] = OPTIMIZER_DEFAULT,
    ids: Annotated[
        str | None,
        typer.Option(help="Column of ids in the file, or a .npy file of int64 ids.", metavar="COLUMN|FILE.npy"),
    ] = None,
    vocab: Annotated[
        Path | None, typer.Option(help=f"{VocabHelp}; written where there is none.", metavar="FILE")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Which array of the file, where it holds several.")] = None,
    state: Annotated[
        str | None, typer.Option(help="Where in a checkpoint that array's optimizer state stands.", metavar="KEY")
    ] = None,
    slots: Annotated[
        str | None, typer.Option(help="What to import; default: all that both have.", metavar="SLOT,SLOT")
    ] = None,
    format: FormatOption = None,
    ram: Annotated[str, typer.Option(help="RAM budget.", metavar="BYTES")] = "1GiB",
    config: ConfigOption = None,
    json: JsonOption = False,
) -> int:
    """Set rows of a table from a file, and commit.

    The file is checked before anything changes. Interrupted, it leaves the table at its last commit.
    """
    import bunkbed as bb

    is_new = not path.exists()
    wanted: Any = ids
    if ids is not None and ids.endswith(".npy"):
        wanted = np.load(ids, mmap_mode="r", allow_pickle=False)
    if is_new:
        if dim is None:
            raise UsageProblem(f"there is no table at {path}; give --dim to create it")
        table = bb.create(path, dim=dim, num_rows=num_rows, optimizer=OPTIMIZERS[optimizer.value](), ram=ram)
    else:
        table = bb.open(path, ram=ram)
    try:
        with table, _row_bars("checking", "importing") as (checking, progress):
            count = bb.import_rows(
                table,
                file,
                ids=wanted,
                format=format,
                name=name,
                state=state,
                slots=None if slots is None else _names(slots),
                vocab=vocab,
                progress=progress,
                checking=checking,
            )
    except BaseException as error:
        # Nothing was committed, and a table that held nothing before is in the way of the next try.
        if is_new:
            shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, KeyboardInterrupt):
            print_error(f"interrupted; {path} {'was not created' if is_new else 'is as it was'}")
            return 130
        raise
    if json:
        print_json({"path": path, "file": file, "rows": count})
    else:
        stdout().print(f"imported {count:,} rows into {escape(str(path))}", soft_wrap=True)
    return 0


def export_table(
    path: Annotated[Path, typer.Argument(help="Table to read.", metavar="TABLE")],
    file: FileArgument,
    *,
    ram: Annotated[str, typer.Option(help="RAM budget.", metavar="BYTES")] = "1GiB",
    slots: Annotated[
        str, typer.Option(help="What to write beside the ids, such as weight,exp_avg.", metavar="SLOT,SLOT")
    ] = "weight",
    snapshot: Annotated[
        str | None, typer.Option(help="Kept epoch to read; default: the last commit.", metavar="NAME")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Take the place of a file that is there.")] = False,
    vocab: Annotated[Path | None, typer.Option(help=f"{VocabHelp}; default: the ids.", metavar="FILE")] = None,
    name: Annotated[str | None, typer.Option(help="What the array is called, in a format that names it.")] = None,
    format: FormatOption = None,
    metric: Annotated[
        Metric | None, typer.Option(help="Of an index of nearest rows; default: dot.", show_default=False)
    ] = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> int:
    """Write rows of a table to a file, which is there whole or not at all."""
    import bunkbed as bb

    names = _names(slots)
    # Readers hold weights only; optimizer state needs the writer, who then commits nothing.
    mode: Literal["w", "r"] = "r" if names == ("weight",) or snapshot is not None else "w"
    table = bb.open(path, mode=mode, ram=ram, snapshot=snapshot)
    try:
        with _row_bars("exporting") as (progress,):
            count = bb.export_rows(
                table,
                file,
                slots=names,
                format=format,
                name=name,
                vocab=vocab,
                metric=metric and metric.value,
                overwrite=overwrite,
                progress=progress,
            )
    except KeyboardInterrupt:
        print_error(f"interrupted; {file} is as it was")
        return 130
    finally:
        table.close(commit=False)
    if json:
        print_json({"path": path, "file": file, "rows": count})
    else:
        stdout().print(f"wrote {count:,} rows to {escape(str(file))}", soft_wrap=True)
    return 0


def _names(slots: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in slots.split(","))


@contextmanager
def _row_bars(*labels: str) -> Iterator[tuple[Callable[[int, int], None], ...]]:
    """A bar on stderr for each label, with rows, time gone and time left, where that is a terminal."""
    console = stderr()
    if not console.is_terminal:
        yield tuple(lambda done, total: None for _ in labels)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def bar(label: str) -> Callable[[int, int], None]:
            def show(done: int, total: int) -> None:
                if label not in tasks:
                    tasks[label] = bars.add_task(label, total=total)
                bars.update(tasks[label], completed=done)

            return show

        yield tuple(bar(label) for label in labels)
