"""``bunkbed import`` and ``bunkbed export``: rows between tables and files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from bunkbed.cli.common import ConfigOption, JsonOption, UsageProblem, print_json, stdout
from bunkbed.cli.train_options import OPTIMIZER_DEFAULT, OptimizerName

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

    if not path.exists():
        if dim is None:
            raise UsageProblem(f"there is no table at {path}; give --dim to create it")
        rules = {"sgd": bb.SGD, "adagrad": bb.Adagrad, "rowwise_adagrad": bb.RowwiseAdagrad, "adam": bb.Adam}
        table = bb.create(path, dim=dim, num_rows=num_rows, optimizer=rules[optimizer.value](), ram=ram)
    else:
        table = bb.open(path, ram=ram)
    with table:
        bb.import_rows(table, file)
        stored = len(table)
    if json:
        print_json({"path": path, "file": file, "stored_rows": stored})
    else:
        stdout().print(f"{escape(str(path))} now stores {stored:,} rows", soft_wrap=True)


def export_table(
    path: Annotated[Path, typer.Argument(help="Table to read.", metavar="TABLE")],
    file: FileArgument,
    *,
    ram: Annotated[str, typer.Option(help="RAM budget.", metavar="BYTES")] = "1GiB",
    snapshot: Annotated[
        str | None, typer.Option(help="Kept epoch to read; default: the last commit.", metavar="NAME")
    ] = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Write the stored rows of a table to a file."""
    import bunkbed as bb

    with bb.open(path, mode="r", ram=ram, snapshot=snapshot) as table:
        bb.export_rows(table, file)
        stored = len(table)
    if json:
        print_json({"path": path, "file": file, "stored_rows": stored})
    else:
        stdout().print(f"wrote {stored:,} rows to {escape(str(file))}", soft_wrap=True)
