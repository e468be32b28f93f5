"""``bunkbed import`` and ``bunkbed export``: rows between tables and files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from bunkbed.cli.common import ConfigOption, JsonOption, UsageProblem, print_json, stderr, stdout
from bunkbed.cli.train_options import OPTIMIZER_DEFAULT, OptimizerName
from bunkbed.train.config import OPTIMIZERS

FileArgument = Annotated[Path, typer.Argument(help=".npy, .parquet or .safetensors.", metavar="FILE")]


def import_table(
    path: Annotated[Path, typer.Argument(help="Table to fill; created unless it exists.", metavar="TABLE")],
    file: FileArgument,
    *,
    dim: Annotated[int | None, typer.Option(help="Numbers per row; needed to create the table.")] = None,
    num_rows: Annotated[int | None, typer.Option(help="Ids in [0, N); default: any id.")] = None,
    optimizer: Annotated[OptimizerName, typer.Option(help="Optimizer of a new table.")] = OPTIMIZER_DEFAULT,
    ram: Annotated[str, typer.Option(help="RAM budget.", metavar="BYTES")] = "1GiB",
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Set rows of a table from a file, and commit."""
    import bunkbed as bb

    is_new = not path.exists()
    if is_new:
        if dim is None:
            raise UsageProblem(f"there is no table at {path}; give --dim to create it")
        table = bb.create(path, dim=dim, num_rows=num_rows, optimizer=OPTIMIZERS[optimizer.value](), ram=ram)
    else:
        table = bb.open(path, ram=ram)
    try:
        with table, _progress("importing") as progress:
            count = bb.import_rows(table, file, progress=progress)
    except BaseException:
        # Nothing was committed, and a table that held nothing before is in the way of the next try.
        if is_new:
            shutil.rmtree(path, ignore_errors=True)
        raise
    if json:
        print_json({"path": path, "file": file, "rows": count})
    else:
        stdout().print(f"imported {count:,} rows into {escape(str(path))}", soft_wrap=True)


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
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Write the stored rows of a table to a file."""
    import bunkbed as bb

    names = tuple(name.strip() for name in slots.split(","))
    # Readers hold weights only; optimizer state needs the writer, who then commits nothing.
    mode: Literal["w", "r"] = "r" if names == ("weight",) or snapshot is not None else "w"
    table = bb.open(path, mode=mode, ram=ram, snapshot=snapshot)
    try:
        with _progress("exporting") as progress:
            count = bb.export_rows(table, file, slots=names, progress=progress)
    finally:
        table.close(commit=False)
    if json:
        print_json({"path": path, "file": file, "rows": count})
    else:
        stdout().print(f"wrote {count:,} rows to {escape(str(file))}", soft_wrap=True)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A line on stderr that counts rows, where that is a terminal."""
    console = stderr()
    if not console.is_terminal:
        yield lambda done, total: None
        return
    with console.status(what) as status:
        yield lambda done, total: status.update(f"{what}: {done:,} of {total:,} rows")
