"""``bunkbed report``: write one HTML page about a run or a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bunkbed.cli.shared.console import ConfigOption, JsonOption, escape, need, print_json, stderr, stdout
from bunkbed.core.budget import format_bytes


def report(
    path: Annotated[Path, typer.Argument(help="Folder of a run or of a table.", metavar="PATH")],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write this page; default: report.html in a run's folder, PATH.html for a table.", metavar="FILE.html"
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    ram: Annotated[
        str, typer.Option(help="RAM budget for reading; ages take up to a tenth more.", metavar="BYTES")
    ] = "1GiB",
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Write one HTML page: loss, quality, hit rate, stalls, hot rows, tiers, limits, ages, snapshots, disk, options.

    The page needs no network and no other file. Works while a training runs; measures nothing. Reads the whole log of
    each table with expire or max_rows, for the ages of its rows.
    """
    need("matplotlib", "jinja2", "pyarrow", command="report")
    from bunkbed.train.report import write_report

    with stderr().status(f"reading {escape(str(path))}"):
        page = write_report(path, out, overwrite=overwrite, ram=ram)
    if json:
        print_json({"path": path, "report": page, "bytes": page.stat().st_size})
    else:
        stdout().print(f"report  {escape(str(page))}  ({format_bytes(page.stat().st_size)})", soft_wrap=True)
