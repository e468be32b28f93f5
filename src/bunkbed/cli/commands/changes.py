"""``bunkbed changes``: write the rows that changed since a commit to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bunkbed.cli.shared.console import (
    ConfigOption,
    JsonOption,
    UsageProblem,
    escape,
    print_error,
    print_json,
    stdout,
)
from bunkbed.feed.changes import Changes
from bunkbed.feed.delta_file import SUFFIXES, write_delta, write_next_delta


def changes(
    path: Annotated[Path, typer.Argument(help="Folder of a table, of a sharded table or of a run.", metavar="TABLE")],
    *,
    since: Annotated[
        str,
        typer.Option(
            help="Commit that the reader has, 0 for none; or the name of a cursor, which moves to the newest commit. "
            "The first time it gives every row.",
            metavar="COMMIT|CURSOR",
        ),
    ] = "0",
    out: Annotated[
        Path | None,
        typer.Option(
            help=f"File to make, ending in {' or '.join(SUFFIXES)}; or, with a cursor, a folder that gets a Parquet "
            "file from each call that found changes, as for a job that runs often.",
            metavar="FILE|FOLDER",
        ),
    ] = None,
    table: Annotated[str | None, typer.Option("--table", help="Table of a run.", metavar="NAME")] = None,
    cursors: Annotated[bool, typer.Option("--cursors", help="List the cursors instead.")] = False,
    drop_cursor: Annotated[
        str | None,
        typer.Option(
            "--drop-cursor",
            help="Drop this cursor instead: it is no longer in use, or starts again with every row.",
            metavar="CURSOR",
        ),
    ] = None,
    ram: Annotated[str, typer.Option(help="Memory for ids and versions.", metavar="BYTES")] = "256MiB",
    config: ConfigOption = None,
    json: JsonOption = False,
) -> int:
    """Write the rows that changed since a commit, each once, and the ids of deleted rows.

    The table may be in use by a trainer. The file has the columns id and weight; weight is null where a row was
    deleted. It is complete or not there; a cursor moves after that.
    """
    import bunkbed as bb

    if cursors or drop_cursor is not None:
        if out is not None or (cursors and drop_cursor is not None):
            raise UsageProblem("--cursors and --drop-cursor go alone")
        return _manage(path, table, drop_cursor, json=json)
    if out is None:
        raise UsageProblem("give --out FILE.parquet, FILE.arrow or, with a cursor, a folder")
    is_commit = since.isascii() and since.isdigit()

    def open_changes() -> Changes:
        return bb.changes(path, int(since) if is_commit else since, table=table, ram=ram)

    try:
        if out.suffix in SUFFIXES:
            delta = write_delta(open_changes(), out)
        elif out.suffix and not out.is_dir():
            raise UsageProblem(f"--out {out}: a file must end in {' or '.join(SUFFIXES)}; a folder has no suffix")
        elif is_commit:
            raise UsageProblem(f"--out {out}: a folder needs a cursor, --since NAME; or give a file ending in .parquet")
        else:
            delta = write_next_delta(open_changes, since, out, ".parquet")
    except KeyboardInterrupt:
        print_error("interrupted; no file was made, and the cursor is where it was")
        return 130
    if json:
        print_json({"path": path, **vars(delta)})
    elif delta.file is None:
        stdout().print(f"nothing changed since commit {delta.since}", soft_wrap=True)
    else:
        stdout().print(
            f"wrote {delta.rows:,} changed and {delta.deleted:,} deleted rows, commits {delta.since} to "
            f"{delta.version}, to {escape(str(delta.file))}",
            soft_wrap=True,
        )
    return 0


def _manage(path: Path, table: str | None, drop: str | None, *, json: bool) -> int:
    import bunkbed as bb

    if drop is not None:
        bb.drop_cursor(path, drop, table=table)
    found = bb.cursors(path, table=table)
    if json:
        print_json({"path": path, "cursors": found, "dropped": drop})
        return 0
    if drop is not None:
        stdout().print(f"dropped cursor {escape(drop)}", soft_wrap=True)
        return 0
    for name, commit in found.items():
        stdout().print(f"{escape(name)}  commit {commit}", soft_wrap=True)
    if not found:
        stdout().print(f"{escape(str(path))} has no cursors", soft_wrap=True)
    return 0
