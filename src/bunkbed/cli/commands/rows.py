"""``bunkbed import`` and ``bunkbed export``: copy rows between tables and files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from bunkbed.cli.commands.neighbors import Metric
from bunkbed.cli.shared.console import (
    ConfigOption,
    JsonOption,
    UsageProblem,
    escape,
    given_options,
    print_error,
    print_json,
    stderr,
    stdout,
)
from bunkbed.cli.shared.opened_table import OpenedTable, open_rows
from bunkbed.cli.shared.train_options import OPTIMIZER_DEFAULT, OptimizerName
from bunkbed.core.types import Json
from bunkbed.io.common.naming import write_vocabulary
from bunkbed.io.common.source import naming_file
from bunkbed.io.formats import FORMATS, format_of
from bunkbed.table.table import Table
from bunkbed.train.settings.config import OPTIMIZERS

_SUFFIXES = " ".join(suffix for one in FORMATS for suffix in one.suffixes)
FileArgument = Annotated[Path, typer.Argument(help=f"A file ending in {_SUFFIXES}.", metavar="FILE")]
FormatOption = Annotated[
    str | None,
    typer.Option(
        help=f"Format, if the file name does not show it: {' '.join(one.name for one in FORMATS)}.",
        metavar="NAME",
        show_default=False,
    ),
]
VocabHelp = "For rows named by words: a file with one word per line; the line number from 0 is the id"


def import_table(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="Table to import into; created if it does not exist.", metavar="TABLE")],
    file: FileArgument,
    *,
    dim: Annotated[int | None, typer.Option(help="Numbers per row; required to create the table.")] = None,
    num_rows: Annotated[int | None, typer.Option(help="Ids are in [0, N); default: any id.")] = None,
    optimizer: Annotated[
        OptimizerName, typer.Option(help="Optimizer of a new table. An existing table must have this one.")
    ] = OPTIMIZER_DEFAULT,
    ids: Annotated[
        str | None,
        typer.Option(
            help="Read ids from this column of the file, or from a .npy file of int64 ids.", metavar="COLUMN|FILE.npy"
        ),
    ] = None,
    vocab: Annotated[
        Path | None, typer.Option(help=f"{VocabHelp}; written if it does not exist.", metavar="FILE")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Import this array, if the file has several.")] = None,
    state: Annotated[
        str | None, typer.Option(help="Key of that array's optimizer state in a checkpoint.", metavar="KEY")
    ] = None,
    slots: Annotated[
        str | None, typer.Option(help="Import these slots; default: all that file and table have.", metavar="SLOT,SLOT")
    ] = None,
    format: FormatOption = None,
    ram: Annotated[str, typer.Option(help="RAM budget.", metavar="BYTES")] = "1GiB",
    config: ConfigOption = None,
    json: JsonOption = False,
) -> int:
    """Set rows of a table from a file, and commit.

    The file is checked before anything changes. An interrupted import leaves the table at its last commit.
    """
    import bunkbed as bb

    is_new = not path.exists()
    wanted: Any = ids
    if ids is not None and ids.endswith(".npy"):
        with naming_file(Path(ids), "npy"):
            wanted = np.load(ids, mmap_mode="r", allow_pickle=False)
    if is_new:
        if dim is None:
            raise UsageProblem(f"there is no table at {path}; give --dim to create it")
        table = bb.create(path, dim=dim, num_rows=num_rows, optimizer=OPTIMIZERS[optimizer.value](), ram=ram)
    else:
        table = bb.open(path, ram=ram)
    try:
        with table, _row_bars("checking", "importing") as (checking, progress):
            if not is_new:
                asked = {"dim": dim, "num_rows": num_rows, "optimizer": optimizer.value}
                _require_same(table, path, {name: asked[name] for name in asked if name in given_options(context)})
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
        # Nothing was committed. A new table is removed, so that it does not stop the next import.
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


def _require_same(table: Table, path: Path, asked: Json) -> None:
    """Raise if an option has another value than the table."""
    names = {kind: name for name, kind in OPTIMIZERS.items()}
    for option, value in asked.items():
        is_so = getattr(table, option)
        if option == "optimizer":
            is_so = names.get(type(is_so), type(is_so).__name__)
        if value != is_so:
            flag = f"--{option.replace('_', '-')}"
            raise UsageProblem(
                f"{flag} {value}: table {path} is there and has {is_so}; leave {flag} out, or name another table"
            )


def export_table(
    path: Annotated[Path, typer.Argument(help="Folder of a table or of a run.", metavar="TABLE")],
    file: FileArgument,
    *,
    ram: Annotated[str, typer.Option(help="RAM budget.", metavar="BYTES")] = "1GiB",
    slots: Annotated[
        str, typer.Option(help="Write these slots with the ids, such as weight,exp_avg.", metavar="SLOT,SLOT")
    ] = "weight",
    table: Annotated[str | None, typer.Option("--table", help="Export this table of a run.", metavar="NAME")] = None,
    snapshot: Annotated[
        str | None,
        typer.Option(help="Read this snapshot; default: a training run's best, else the last commit.", metavar="NAME"),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            help="Write the labels of a training run's rows here, one per line in the order of their ids.",
            metavar="FILE",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    vocab: Annotated[
        Path | None,
        typer.Option(help=f"{VocabHelp}; default: a training run's labels, else the ids.", metavar="FILE"),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the array, in a format with names.")] = None,
    format: FormatOption = None,
    metric: Annotated[
        Metric | None, typer.Option(help="Metric of an index of nearest rows; default: dot.", show_default=False)
    ] = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> int:
    """Write rows of a table to a file, which is complete or not there.

    The table of a training run is user, item, item_bias, user_feature or item_feature. Rows have the names of the
    training file, if the format can hold names; features have numbers.
    """
    import bunkbed as bb

    names = _names(slots)
    if labels is not None and not overwrite and os.path.lexists(labels):
        raise UsageProblem(f"{labels} exists already; give another --labels, or --overwrite")
    try:
        with (
            open_rows(path, table, snapshot, ram, command="export") as opened,
            _words(opened, file, format, vocab) as words,
            _row_bars("exporting") as (progress,),
        ):
            if labels is not None and opened.vocab is None:
                raise UsageProblem(f"--labels: rows of {path} are called by their ids; leave it out")
            count = bb.export_rows(
                opened.table,
                file,
                slots=names,
                format=format,
                name=name,
                vocab=words,
                metric=metric and metric.value,
                overwrite=overwrite,
                progress=progress,
            )
            if labels is not None:
                _write_labels(opened, labels)
    except KeyboardInterrupt:
        print_error(f"interrupted; {file} is as it was")
        return 130
    if json:
        print_json({"path": path, "table": table, "snapshot": opened.snapshot, "file": file, "rows": count})
        return 0
    of = f" of {table}" if table else ""
    if opened.snapshot:
        of += f", snapshot {opened.snapshot},"
    stdout().print(f"wrote {count:,} rows{escape(of)} to {escape(str(file))}", soft_wrap=True)
    return 0


@contextmanager
def _words(opened: OpenedTable, file: Path, format: str | None, vocab: Path | None) -> Iterator[Path | None]:
    """Yield the vocabulary for an export: `vocab`, or a training run's labels if the format can hold them, or None."""
    if vocab is not None or opened.vocab is None or not format_of(file, format).has_words:
        yield vocab
        return
    with tempfile.TemporaryDirectory(prefix="bunkbed-") as folder:
        _write_labels(opened, Path(folder) / "labels")
        yield Path(folder) / "labels"


def _write_labels(opened: OpenedTable, path: Path) -> None:
    assert opened.vocab is not None
    write_vocabulary(path, map(str, chain.from_iterable(opened.vocab.batches())))


def _names(slots: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in slots.split(","))


@contextmanager
def _row_bars(*labels: str) -> Iterator[tuple[Callable[[int, int], None], ...]]:
    """Show a progress bar on stderr for each label, with rows, elapsed and remaining time, if stderr is a terminal."""
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
        tasks: Json = {}

        def bar(label: str) -> Callable[[int, int], None]:
            def show(done: int, total: int) -> None:
                if label not in tasks:
                    tasks[label] = bars.add_task(label, total=total)
                bars.update(tasks[label], completed=done)

            return show

        yield tuple(bar(label) for label in labels)
