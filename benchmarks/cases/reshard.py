"""`bb.reshard` from 1 shard to 4 to 3, each compared with a plain copy of the same files that is synced to the disk.

``python -m benchmarks.cases.reshard --bytes 2GiB --dir DIR`` prints the rates of a full-size run. ``--kills 20`` then
kills a process that reshards at as many random times; each time the table must be whole, with the same rows and state
in the old or the new number of shards.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import bunkbed as bb
from benchmarks.harness import common
from bunkbed.core.budget import parse_bytes

DIM = 64


def main(argv: Sequence[str] | None = None) -> None:
    """Make a table with Adam's state, reshard it, and print both rates in MiB/s."""
    parser = common.parser(__doc__)
    parser.add_argument("--bytes", default="64MiB", help="bytes of the table's rows with optimizer state")
    parser.add_argument("--kills", type=int, default=0, help="times that a process is killed while it reshards")
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
        if arguments.kills:
            whole = sum(_is_whole_after_kills(path, arguments.kills, resharded_s))
            print(f"kills at random times after which the table was whole: {whole} of {arguments.kills}")


def _is_whole_after_kills(path: Path, kills: int, seconds: float) -> Iterator[bool]:
    """Reshard between 3 and 4 shards, each time killed within `seconds`; yield whether the table is whole."""
    moments, wanted = np.random.default_rng(0), _facts(path)
    for _ in range(kills):
        shards = 3 if wanted[0] == 4 else 4
        code = f"import bunkbed as bb; print(flush=True); bb.reshard({str(path)!r}, shards={shards}, ram='512MiB')"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(moments.uniform(0, seconds))
            process.kill()
        found = _facts(path)
        yield found[0] in (wanted[0], shards) and found[1:] == wanted[1:] and not bb.check(path)
        wanted = found


def _facts(path: Path) -> list[int]:
    """Return the number of shards, the step, the rows, and a checksum of them and their state, in any order."""
    weights = np.random.default_rng(1).integers(1 << 63, size=DIM, dtype=np.uint64)
    rows = checksum = 0
    with bb.ShardedTable.open(path, mode="r", ram="512MiB") as table:
        for number, slot in enumerate(("weight", *table.slots)):
            for ids, values in table.scan(slot):
                mixed = (values.view(np.uint32) * weights).sum(1, dtype=np.uint64)
                checksum += int((mixed * (ids.astype(np.uint64) * 8 + 2 * number + 1)).sum(dtype=np.uint64))
                rows += len(ids)
        return [table.num_shards, table.step, rows, checksum % 2**64]


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    os.sync()


if __name__ == "__main__":
    main()
