"""A 4 GiB table, fully written, trained within ``ram="256MiB"`` inside a 600 MiB memory cgroup.

The child imports what it needs, takes a step on a table of ten rows, notes its resident size, then opens the table
and trains. What its peak grew by from there is what the table took: it must stay within the budget. Steps go
through NumPy, or through `bunkbed.torch` with ``--torch``, whose interpreter is larger.
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


def child(options: argparse.Namespace) -> None:
    """Serves steps inside the cgroup and reports memory."""
    sample = common.zipf(options.rows)
    rng = np.random.default_rng(options.seed)
    # Interpreter and batch: everything the caller holds, touched once so that it is resident.
    ids = sample(rng, options.batch)
    grads = np.full((options.batch, DIM), 0.01, np.float32)
    out = np.full((options.batch, DIM), 0.0, np.float32)  # not np.zeros: its pages count only once written
    # A step on a table of ten rows: what the code, torch, the adapter and a batch's output take is not the table's.
    if options.torch:
        import torch

        from bunkbed.torch import Embedding, Optimizer

        torch.set_num_threads(1)
        gradient = torch.from_numpy(grads)
        warm = Embedding(10, DIM)
        optimizer = Optimizer(warm)
        warm(torch.from_numpy(ids % 10)).backward(gradient)
        optimizer.step()
        del warm, optimizer
    else:
        with bb.create(None, dim=DIM, num_rows=10) as small:
            small.lookup(ids % 10, out=out)
            small.update(ids % 10, grads)
    common.reset_peak()
    base = common.resident_bytes("VmHWM")
    table = bb.open(options.child_path, ram=options.ram)

    if options.torch:
        layer = Embedding(table.num_rows, DIM, table=table)
        optimizer = Optimizer(layer)

        def step() -> None:
            optimizer.zero_grad()
            layer(torch.from_numpy(ids)).backward(gradient)
            optimizer.step()
    else:

        def step() -> None:
            table.lookup(ids, out=out)
            table.update(ids, grads)

    def handle(steps: int) -> dict[str, Any]:
        before = table.stats()
        for _ in range(steps):
            ids[:] = sample(rng, options.batch)
            step()
        table.commit()
        stats = table.stats()
        return {
            "base": base,
            "peak": common.resident_bytes("VmHWM"),
            "ram_bytes": stats["ram_bytes"],
            "stats": common.delta(stats, before),
            "frames": stats["frames"],
            "frame_capacity": stats["frame_capacity"],
        }

    common.serve(handle)


def bounded_memory(settings: Settings) -> list[Figure]:
    """Peak memory through NumPy and through `bunkbed.torch`."""
    common_arguments = ["--dir", str(settings.dir), "--seed", str(settings.seed)]
    common_arguments += {"tiny": ["--tiny"], "quick": ["--bytes", "1GiB", "--ram", "64MiB"], "full": []}[settings.size]
    return [
        measure(arguments(common_arguments)),
        measure(arguments([*common_arguments, "--torch"])),
    ]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    options = common.parser(__doc__)
    options.add_argument("--bytes", default="4GiB", help="size of the table")
    options.add_argument("--ram", default="256MiB", help="its budget")
    options.add_argument("--limit", default="600MiB", help="the memory cgroup")
    options.add_argument("--batch", type=int, default=65_536, help="ids a step")
    options.add_argument("--steps", type=int, default=200, help="training steps")
    options.add_argument("--torch", action="store_true", help="step through bunkbed.torch")
    options.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    options.add_argument("--child-path", type=Path, help=argparse.SUPPRESS)
    parsed = options.parse_args(given)
    if parsed.tiny:
        parsed.bytes, parsed.ram, parsed.batch, parsed.steps = "48MiB", "8MiB", 1024, 20
    return parsed


def main() -> None:
    options = arguments()
    if options.child_path:
        return child(options)
    if not measure(options).reached:
        sys.exit("the table took more than its budget")
    return None


def measure(options: argparse.Namespace) -> Figure:
    """Builds the table and trains it in a child inside the memory limit."""
    num_rows = -(-parse_bytes(options.bytes) // (DIM * 12))
    with common.workspace(options.dir, int(num_rows * DIM * 12 * 1.8)) as folder:
        print(common.machine(folder))
        why_not = common.MemoryLimit.why_not()
        if why_not and not options.tiny:
            sys.exit(f"no figure without a memory limit: {why_not}")
        with bb.create(folder / "table", dim=DIM, num_rows=num_rows, optimizer=bb.Adam(), ram="1GiB") as table:
            common.fill(table)
        common.forget_pages(folder)
        command = ["-m", "benchmarks.cases.bounded_memory", "--child-path", str(folder / "table")]
        command += ["--ram", options.ram, "--batch", str(options.batch), "--rows", str(num_rows)]
        command += ["--torch"] if options.torch else []
        print(
            f"{num_rows:,} rows x {DIM * 12} B = {common.bb_bytes(num_rows * DIM * 12)}, "
            f"ram={options.ram!r}, cgroup {options.limit}, {options.steps} steps of {options.batch:,} "
            f"Zipf(1.05) ids and 4 commits, through {'bunkbed.torch' if options.torch else 'NumPy'}"
        )
        if why_not:
            return run(options, common.Child(command), None)
        else:
            with common.MemoryLimit(parse_bytes(options.limit)) as limit:
                return run(options, common.Child(command, limit), limit)


def run(options: argparse.Namespace, process: common.Child, limit: common.MemoryLimit | None) -> Figure:
    """Four turns with a commit after each, then the figures."""
    for _ in range(4):
        answer = process.ask(steps=options.steps // 4)
    process.close()
    grown = answer["peak"] - answer["base"]
    budget = parse_bytes(options.ram)
    stats = answer["stats"]
    print(
        f"last turn: {stats['misses'] / max(1, stats['unique_rows']):.0%} of unique rows missed, "
        f"{stats['evictions']:,.0f} evicted, {answer['frames']:,} frames of {answer['frame_capacity']:,}"
    )
    print(
        f"interpreter and batch {common.bb_bytes(answer['base'])}; peak beyond them "
        f"{common.bb_bytes(grown)} of {common.bb_bytes(budget)} ({grown / budget:.0%}); "
        f"the table counts {common.bb_bytes(answer['ram_bytes'])}"
    )
    if limit is not None:
        print(f"cgroup peak {common.bb_bytes(limit.peak_bytes())}, limit reached {limit.refusals()} times")
    return Figure(
        f"peak memory beyond the interpreter's, through {'bunkbed.torch' if options.torch else 'NumPy'}",
        grown / common.MIB,
        "MiB",
        at_most=budget / common.MIB,
        note=f"a table of {options.bytes} in a memory cgroup of {options.limit}",
    )


if __name__ == "__main__":
    main()
