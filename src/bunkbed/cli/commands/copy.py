"""``bunkbed copy``: back up tables and runs, or rewrite them for serving."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bunkbed.cli.shared.console import ConfigOption, JsonOption, byte_progress, escape, print_error, print_json, stdout
from bunkbed.cli.shared.train_options import OptimizerName
from bunkbed.core.budget import format_bytes
from bunkbed.files.kinds import kind_of
from bunkbed.train.settings.config import OPTIMIZERS


def copy(
    src: Annotated[Path, typer.Argument(help="Folder of a table or of a run.", metavar="SRC")],
    dst: Annotated[Path, typer.Argument(help="Folder to make, or an earlier copy of it.", metavar="DST")],
    *,
    snapshot: Annotated[
        str | None, typer.Option(help="Copy this kept commit; default: the last one.", metavar="NAME")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Rewrite the rows as float32, bfloat16 or float16.", metavar="DTYPE")
    ] = None,
    optimizer: Annotated[
        OptimizerName | None, typer.Option(help="Rewrite the rows for this optimizer; sgd drops all state.")
    ] = None,
    no_link: Annotated[
        bool, typer.Option("--no-link", help="Copy every byte instead of sharing files on one filesystem.")
    ] = False,
    ram: Annotated[str, typer.Option(help="RAM budget for rewriting rows.", metavar="BYTES")] = "1GiB",
    config: ConfigOption = None,
    json: JsonOption = False,
) -> int:
    """Copy a commit and verify every record. A later copy to the same folder copies only what is new.

    An interrupted copy leaves DST unchanged. With --dtype or --optimizer the rows are rewritten into a new table.
    """
    import bunkbed as bb

    kind = kind_of(src)
    definition = None if optimizer is None else OPTIMIZERS[optimizer.value]()
    rewrites = dtype is not None or definition is not None
    try:
        with byte_progress("copying", "rows" if rewrites else "bytes") as progress:
            done = bb.copy(
                src,
                dst,
                snapshot=snapshot,
                dtype=dtype,
                optimizer=definition,
                link=not no_link,
                ram=ram,
                progress=progress,
            )
    except KeyboardInterrupt:
        print_error(f"interrupted; {dst} is as it was")
        return 130
    if json:
        print_json({"src": src, "dst": dst, "kind": kind, **vars(done)})
        return 0
    parts = [
        f"{format_bytes(size)} {what}"
        for size, what in (
            (done.linked_bytes, "linked"),
            (done.copied_bytes, "copied"),
            (done.present_bytes, "there already"),
        )
        if size
    ]
    what = f"{done.rows:,} rows rewritten" if rewrites else ", ".join(parts) or "no rows"
    stdout().print(
        f"copied commit {done.epoch} of {kind} {escape(str(src))} to {escape(str(dst))}: {what}; verified",
        soft_wrap=True,
    )
    return 0
