"""``bunkbed reshard``: change the number of shards of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bunkbed.cli.shared.console import ConfigOption, JsonOption, byte_progress, escape, print_error, print_json, stdout


def reshard(
    path: Annotated[
        Path, typer.Argument(help="Folder of a run, of a table, or with the folders of Keras workers.", metavar="PATH")
    ],
    *,
    shards: Annotated[int, typer.Option(help="New number of shards, 1 to 1024.", metavar="N")],
    workers: Annotated[
        bool | None,
        typer.Option(
            "--workers/--no-workers",
            help="Make a folder for each of N Keras workers, or a sharded table. Default: as it is now.",
        ),
    ] = None,
    drop_snapshots: Annotated[
        bool, typer.Option("--drop-snapshots", help="Drop the snapshots of earlier commits, which cannot be kept.")
    ] = False,
    ram: Annotated[str, typer.Option(help="RAM budget for reading and writing rows.", metavar="BYTES")] = "1GiB",
    config: ConfigOption = None,
    json: JsonOption = False,
) -> int:
    """Change the number of shards of a table, of the tables of a run, or of Keras workers. Verifies every new record.

    Needs space for a second copy of the rows. An interrupted command leaves the old table or the new one, whole.
    """
    import bunkbed as bb

    try:
        with byte_progress("resharding", "rows") as progress:
            done = bb.reshard(
                path, shards=shards, workers=workers, drop_snapshots=drop_snapshots, ram=ram, progress=progress
            )
    except KeyboardInterrupt:
        print_error(f"interrupted; {path} is the old table or the new one, whole")
        return 130
    if json:
        print_json({"path": path, **vars(done)})
        return 0
    what = "worker" if done.workers else "shard"
    is_as_before = done.shards == done.shards_before and done.rows == 0 and workers is None
    stdout().print(
        f"{escape(str(path))} has {done.shards} {what if done.shards == 1 else what + 's'} at commit {done.epoch}: "
        + ("as before" if is_as_before else f"{done.rows:,} rows rewritten and verified"),
        soft_wrap=True,
    )
    return 0
