"""`bb.reshard` from 1 shard to 4 to 3, each compared with a plain copy of the same files that is synced to the disk.

``python -m benchmarks.cases.reshard --bytes 2GiB --dir DIR`` prints the rates of a full-size run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import bunkbed as bb
from benchmarks.harness import common
from bunkbed.core.budget import parse_bytes

DIM = 64


def main(argv: Sequence[str] | None = None) -> None:
    """Make a table with Adam's state, reshard it, and print both rates in MiB/s."""
    parser = common.parser(__doc__)
    parser.add_argument("--bytes", default="64MiB", help="bytes of the table's rows with optimizer state")
    arguments = parser.parse_args(argv)
    num_bytes = parse_bytes(arguments.bytes)
    with common.workspace(arguments.dir, 4 * num_bytes) as folder:
        path, plain = folder / "table", folder / "plain"
        with bb.ShardedTable.create(path, shards=1, dim=DIM, num_rows=num_bytes // (DIM * 12), ram="512MiB") as table:
            common.fill(table)
        print(common.machine(folder))
        for shards in (4, 3):
            copied_s = common.timed(lambda: _copy(path, plain))
            size = sum(file.stat().st_size for file in plain.rglob("*") if file.is_file())
            shutil.rmtree(plain)
            resharded_s = common.timed(lambda shards=shards: bb.reshard(path, shards=shards, ram="512MiB"))
            print(
                f"to {shards} shards: {size / resharded_s / 2**20:,.0f} MiB/s; "
                f"copy {size / copied_s / 2**20:,.0f} MiB/s; "
                f"ratio {copied_s / resharded_s:.2f}"
            )


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    os.sync()


if __name__ == "__main__":
    main()
