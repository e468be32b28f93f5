"""A table of 10^10 rows: creating it, its bytes on disk, and a million random rows trained in 512 MiB.

Ids are uniform, so that hardly any row comes twice: the worst case for a directory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from benchmarks.harness import common
from benchmarks.harness.figures import Figure, Settings
from bunkbed.core.budget import parse_bytes

DIM = 64


def disk_bytes(folder: Path) -> int:
    """Bytes allocated on disk, as ``du`` counts them."""
    return sum(path.stat().st_blocks * 512 for path in [folder, *folder.rglob("*")])


def child(options: argparse.Namespace) -> None:
    """Trains random rows and reports memory and time."""
    rng = np.random.default_rng(options.seed)
    grads = np.full((options.batch, DIM), 0.01, np.float32)
    ids = rng.integers(0, options.rows, options.batch)
    common.reset_peak()
    base = common.resident_bytes("VmHWM")
    table = bb.open(options.child_path, ram=options.ram)

    def handle(steps: int) -> dict[str, Any]:
        times = []
        for _ in range(steps):
            ids[:] = rng.integers(0, options.rows, options.batch)
            times.append(common.timed(lambda: (table.lookup(ids), table.update(ids, grads))))
        table.commit()
        return {
            "times": times,
            "stored": len(table),
            "grown": common.resident_bytes("VmHWM") - base,
            "step": table.step,
        }

    common.serve(handle)


def huge(settings: Settings) -> list[Figure]:
    """Creating it, its bytes on disk, and training within the budget."""
    given = ["--dir", str(settings.dir), "--seed", str(settings.seed)]
    return measure(arguments(given + settings.pick(["--tiny"], ["--train", "200000"], [])))


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    options = common.parser(__doc__)
    options.add_argument("--rows", type=int, default=10**10, help="rows of the table")
    options.add_argument("--train", type=int, default=1_000_000, help="random rows to train")
    options.add_argument("--batch", type=int, default=10_000, help="ids a step")
    options.add_argument("--ram", default="512MiB", help="the budget")
    options.add_argument("--child-path", type=Path, help=argparse.SUPPRESS)
    parsed = options.parse_args(given)
    if parsed.tiny:
        parsed.train, parsed.batch = 20_000, 2_000
    return parsed


def main() -> None:
    options = arguments()
    if options.child_path:
        return child(options)
    failed = [figure.line() for figure in measure(options) if figure.reached is False]
    if failed and not options.tiny:
        sys.exit("\n".join(failed))
    return None


def measure(options: argparse.Namespace) -> list[Figure]:
    """Creates the table five times and trains the last one."""
    with common.workspace(options.dir, options.train * DIM * 12 * 3) as folder:
        print(common.machine(folder))
        times = []
        for attempt in range(5):
            path = folder / f"table-{attempt}"

            def make(path: Path = path) -> None:
                bb.create(
                    path,
                    dim=DIM,
                    num_rows=options.rows,
                    optimizer=bb.Adam(),
                    init=bb.Normal(0.01),
                    ram=options.ram,
                ).close()

            times.append(common.timed(make))
        created = disk_bytes(path)
        print(f"{options.rows:,} rows x {DIM * 12} B = {common.bb_bytes(options.rows * DIM * 12)}")
        print(f"create and close: {common.spread(times)}; {common.bb_bytes(created)} on disk")

        command = ["-m", "benchmarks.cases.huge", "--child-path", str(path), "--rows", str(options.rows)]
        command += ["--batch", str(options.batch), "--ram", options.ram, "--seed", str(options.seed)]
        process = common.Child(command)
        answer = process.ask(steps=options.train // options.batch)
        process.close()
        print(
            f"{answer['stored']:,} random rows trained: {common.spread(answer['times'])} a step "
            f"of {options.batch:,}; peak beyond interpreter and batch "
            f"{common.bb_bytes(answer['grown'])} of {options.ram}; "
            f"{common.bb_bytes(disk_bytes(path))} on disk"
        )
        seconds = [value * 1e3 for value in times]
        grown = answer["grown"] / common.MIB
        return [
            # Judged by the worst of the five.
            Figure("create and close, slowest", max(seconds), "ms", min(seconds), max(seconds), 5, at_most=100),
            Figure("new table on disk", created / 1024, "KiB", at_most=1024),
            Figure("peak memory beyond the interpreter's", grown, "MiB", at_most=parse_bytes(options.ram) / common.MIB),
        ]


if __name__ == "__main__":
    main()
