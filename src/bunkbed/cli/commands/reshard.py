"""``bunkbed reshard``: change the number of shards of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bunkbed.cli.shared.console import ConfigOption, JsonOption, byte_progress, escape, print_error, print_json, stdout


def reshard(
    path: Annotated[Path, typer.Argument(help="Folder of a run, of a sharded table or of a table.", metavar="PATH")],
    *,
    shards: Annotated[int, typer.Option(help="New number of shards, 1 to 1024.", metavar="N")],
    drop_snapshots: Annotated[
        bool, typer.Option("--drop-snapshots", help="Drop the snapshots of earlier commits, which cannot be kept.")
    ] = False,
    ram: Annotated[str, typer.Option(help="RAM budget for reading and writing rows.", metavar="BYTES")] = "1GiB",
    config: ConfigOption = None,
    json: JsonOption = False,
) -> int:
    """Change the number of shards of a table or of the tables of a run. Every new record is verified.

    Needs space for a second copy of the rows. An interrupted command leaves the old table or the new one, whole.
    """
    import bunkbed as bb

    try:
        with byte_progress("resharding", "rows") as progress:
            done = bb.reshard(path, shards=shards, drop_snapshots=drop_snapshots, ram=ram, progress=progress)
    except KeyboardInterrupt:
        print_error(f"interrupted; {path} is the old table or the new one, whole")
        return 130
    if json:
        print_json({"path": path, **vars(done)})
        return 0
    stdout().print(
        f"{escape(str(path))} has {done.shards} {'shard' if done.shards == 1 else 'shards'} at commit {done.epoch}: "
        + (f"{done.rows:,} rows rewritten and verified" if done.shards != done.shards_before else "as before"),
        soft_wrap=True,
    )
    return 0
