"""A training step on a table many times larger than its memory limit, beside the `np.memmap` recipe.

10M rows of 768 B (64 weights and Adam's two averages), fully written, committed and opened again; 65,536
Zipf(1.05) ids a step; each side in a process of its own inside a memory cgroup of 1 GiB, a few steps each in
turn.

ours     `bunkbed.torch`: lookup, backward of a constant gradient, `Optimizer.step`; defaults but for `ram`.
memmap   the textbook recipe in NumPy: unique ids, sorted; `rows = memmap[ids]`, Adam, `memmap[ids] = rows`.
         Records hold weights and state together, as ours do.
advised  the same with `madvise(MADV_RANDOM)`, which not every textbook has.

Printed beside the times: rows missed and first touched (about 0, or the figure would be flattered), the
device's own limit measured in the same run, and the kernel's `read_bytes` beside the bytes the engine asked the
device for (512-byte blocks, where the device has them): below 90 % the figure is void, for then it came from the
page cache.
"""

from __future__ import annotations

import argparse
import mmap
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from benchmarks import common

DIM = 64
WIDTH = 3 * DIM  # weight, exp_avg, exp_avg_sq


def build_table(path: Path, num_rows: int) -> None:
    """Writes every row and commits."""
    with bb.create(path, dim=DIM, num_rows=num_rows, optimizer=bb.Adam(), init=bb.Normal(0.01), ram="2GiB") as table:
        common.fill(table)


def build_memmap(path: Path, num_rows: int) -> None:
    """Writes every record: random weights, zero state."""
    rng = np.random.default_rng(0)
    chunk = np.zeros((100_000, WIDTH), np.float32)
    chunk[:, :DIM] = rng.standard_normal((len(chunk), DIM))
    with path.open("wb") as file:
        for start in range(0, num_rows, len(chunk)):
            file.write(chunk[: num_rows - start].tobytes())


class Ours:
    """The child process that steps our table."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        from bunkbed.torch import Embedding, Optimizer

        self.table = bb.open(options.child_path, ram=options.ram)
        self.layer = Embedding(self.table.num_rows, DIM, table=self.table)
        self.optimizer = Optimizer(self.layer)
        self.grad = torch.full((options.batch, DIM), 0.01)
        self.from_numpy = torch.from_numpy

    def step(self, ids: np.ndarray) -> None:
        self.optimizer.zero_grad()
        self.layer(self.from_numpy(ids)).backward(self.grad)
        self.optimizer.step()

    def stats(self) -> dict[str, float]:
        return dict(self.table.stats())


class Memmap:
    """The child process that steps the recipe."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.records = np.memmap(options.child_path, np.float32, "r+").reshape(-1, WIDTH)
        if options.child == "advised":  # else each fault may read 128 KiB around the row
            self.records._mmap.madvise(mmap.MADV_RANDOM)
        self.count = 0

    def step(self, ids: np.ndarray) -> None:
        self.count += 1
        unique, inverse = np.unique(ids, return_inverse=True)
        rows = self.records[unique]
        rows[inverse, :DIM]  # the lookup
        grad = np.bincount(inverse).astype(np.float32)[:, None] * np.float32(0.01)  # equal gradients, summed
        weight, exp_avg, exp_avg_sq = rows[:, :DIM], rows[:, DIM : 2 * DIM], rows[:, 2 * DIM :]
        exp_avg += (grad - exp_avg) * np.float32(0.1)
        exp_avg_sq += (grad * grad - exp_avg_sq) * np.float32(0.001)
        size = 1e-3 * np.sqrt(1 - 0.999**self.count) / (1 - 0.9**self.count)
        weight -= np.float32(size) * (exp_avg / (np.sqrt(exp_avg_sq) + np.float32(1e-8)))
        self.records[unique] = rows

    def stats(self) -> dict[str, float]:
        return {}


def child(options: argparse.Namespace) -> None:
    """Serves steps until standard input ends."""
    side = Ours(options) if options.child == "ours" else Memmap(options)
    sample = common.zipf(options.rows)
    rng = np.random.default_rng(options.seed)

    def handle(steps: int) -> dict[str, Any]:
        times, unique = [], 0
        stats, io = side.stats(), common.proc_io()
        for _ in range(steps):
            ids = sample(rng, options.batch)
            times.append(common.timed(lambda ids=ids: side.step(ids)))
            unique += np.unique(ids).size
        return {
            "times": times,
            "unique": unique,
            "stats": common.delta(side.stats(), stats),
            "frames": side.stats().get("frames", 0),
            "frame_capacity": side.stats().get("frame_capacity", 0),
            "live": side.stats().get("live_bytes", 0) / max(1, side.stats().get("disk_bytes", 0)),
            "io": common.delta(common.proc_io(), io),
            "resident": common.resident_bytes("VmHWM"),
        }

    common.serve(handle)


def warm(ours: common.Child, *, tiny: bool, steady: bool) -> None:
    """Steps until the cache is full and the share of misses stands still; with `steady`, until compaction runs."""
    last, compactions = 1.0, 0.0
    for _ in range(3 if tiny else 60):
        answer = ours.ask(steps=5 if tiny else 20)
        stats = answer["stats"]
        compactions += stats["compactions"]
        missed = stats["misses"] / max(1, stats["unique_rows"])
        full = answer["frames"] >= 0.98 * answer["frame_capacity"]
        if full and abs(missed - last) < 0.01 * last and (compactions > 3 or not steady):
            break
        last = missed
    print(
        f"warm: {answer['frames']:,} frames of {answer['frame_capacity']:,}, {missed:.1%} of rows missed, "
        f"{answer['live']:.0%} of the log live, {compactions:.0f} compactions",
        flush=True,
    )


def report(name: str, answers: list[dict[str, Any]], steps: int) -> float:
    """Prints one side's figures and returns its median step."""
    times = [t for answer in answers for t in answer["times"]]
    unique = sum(answer["unique"] for answer in answers) / steps
    read = sum(answer["io"]["read_bytes"] for answer in answers) / steps
    written = sum(answer["io"]["write_bytes"] for answer in answers) / steps
    print(f"{name:>8}: {common.spread(times)} a step, {unique:,.0f} unique rows a step")
    print(
        f"{'':>8}  kernel read {common.bb_bytes(read)} and wrote {common.bb_bytes(written)} a step, "
        f"peak resident {common.bb_bytes(max(answer['resident'] for answer in answers))}"
    )
    return statistics.median(times)


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--rows", type=int, default=10_000_000, help="rows of the table")
    options.add_argument("--batch", type=int, default=65_536, help="ids a step")
    options.add_argument("--limit", default="1GiB", help="memory cgroup of each side")
    options.add_argument("--ram", default="640MiB", help="our budget inside that limit")
    options.add_argument("--rounds", type=int, default=3, help="turns of each side")
    options.add_argument("--steps", type=int, default=50, help="our steps a turn")
    options.add_argument("--memmap-steps", type=int, default=1, help="the recipe's steps a turn; 0 leaves it out")
    options.add_argument("--steady", action="store_true", help="warm until compaction runs too")
    options.add_argument("--child", choices=["ours", "memmap", "advised"], help=argparse.SUPPRESS)
    options.add_argument("--child-path", type=Path, help=argparse.SUPPRESS)
    options = options.parse_args()
    if options.tiny:
        options.rows, options.batch, options.ram, options.steps = 40_000, 1_024, "8MiB", 3
    if options.child:
        return child(options)

    record_bytes = WIDTH * 4
    with common.workspace(options.dir, int(options.rows * record_bytes * (4 if options.memmap_steps else 2))) as folder:
        print(common.machine(folder))
        why_not = common.MemoryLimit.why_not()
        if why_not and not options.tiny:
            sys.exit(f"no figure without a memory limit: {why_not}")
        print(
            f"{options.rows:,} rows x {record_bytes} B = {common.bb_bytes(options.rows * record_bytes)}, "
            f"{options.batch:,} Zipf(1.05) ids, memory cgroup {options.limit}, ours with ram={options.ram!r}"
        )
        paths = {"ours": folder / "table"}
        build_table(paths["ours"], options.rows)
        if options.memmap_steps:
            # A file each: pages that one process cached would serve the other.
            paths |= {name: folder / f"{name}.bin" for name in ("memmap", "advised")}
            build_memmap(paths["memmap"], options.rows)
            shutil.copyfile(paths["memmap"], paths["advised"])
        common.forget_pages(folder)
        run(options, paths, limited=why_not is None)


def run(options: argparse.Namespace, paths: dict[str, Path], *, limited: bool) -> None:
    """All children in turn, then the figures."""
    from contextlib import ExitStack

    from bunkbed.budget import parse_bytes

    with ExitStack() as stack:
        children, limits = {}, {}
        for name, path in paths.items():
            limit = stack.enter_context(common.MemoryLimit(parse_bytes(options.limit))) if limited else None
            arguments = ["-m", "benchmarks.larger_than_memory", "--child", name, "--child-path", str(path)]
            arguments += ["--rows", str(options.rows), "--batch", str(options.batch), "--ram", options.ram]
            children[name] = common.Child([*arguments, "--seed", str(options.seed)], limit)
            stack.callback(children[name].close)
            limits[name] = limit
        warm(children["ours"], tiny=options.tiny, steady=options.steady)
        peers = [name for name in children if name != "ours"]
        for name in peers:
            children[name].ask(steps=1)  # fills its page cache

        steps = {"ours": options.steps, **dict.fromkeys(peers, options.memmap_steps)}
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in children}
        limits_iops: list[float] = []
        ratios: dict[str, list[float]] = {name: [] for name in peers}
        for round_ in range(options.rounds):
            for name in list(children) if round_ % 2 == 0 else list(reversed(children)):
                answers[name].append(children[name].ask(steps=steps[name]))
            limits_iops.append(
                common.random_read_iops(common.segment_files(paths["ours"]), seconds=0.2 if options.tiny else 3)
            )
            medians = {name: statistics.median(a[-1]["times"]) for name, a in answers.items()}
            for name in peers:
                ratios[name].append(medians[name] / medians["ours"])

        median = report("bunkbed", answers["ours"], options.rounds * options.steps)
        figures(answers["ours"], median, limits_iops, options)
        if limits["ours"] is not None:
            print(f"{'':>8}  cgroup peak {common.bb_bytes(limits['ours'].peak_bytes())}, page cache included")
        for name in peers:
            report(name, answers[name], options.rounds * options.memmap_steps)
            print(
                f"{'':>8}  ratio {name} / bunkbed: median {statistics.median(ratios[name]):.1f}, "
                f"least flattering round {min(ratios[name]):.1f}, best {max(ratios[name]):.1f}"
            )


def figures(answers: list[dict[str, Any]], median: float, iops: list[float], options: argparse.Namespace) -> None:
    """Ours against the device, and whether the figure counts."""
    steps = options.rounds * options.steps
    total: dict[str, float] = {}
    for answer in answers:
        for key, value in answer["stats"].items():
            total[key] = total.get(key, 0) + value / steps
    device = statistics.median(iops)
    needed = total["reads"] / device
    read_bytes = sum(answer["io"]["read_bytes"] for answer in answers) / steps
    # The engine asks the device for 512-byte blocks where it may, so a read is often less than 4 KiB.
    share = read_bytes / max(1.0, total["read_bytes"])
    print(
        f"{'':>8}  a step: {total['misses']:,.0f} rows missed in {total['reads']:,.0f} reads, "
        f"{total['first_touches']:,.0f} first touches, {total['evictions']:,.0f} evicted, "
        f"{total['written_back']:,.0f} written back, {total['compactions']:.2f} compactions"
    )
    print(
        f"{'':>8}  device: {device:,.0f} random 4 KiB O_DIRECT reads/s (64 threads, same run; "
        f"{min(iops):,.0f} to {max(iops):,.0f}); reads alone need {needed * 1e3:.1f} ms: "
        f"{needed / median:.0%} of the limit"
    )
    verdict = "counts" if share >= 0.9 else "VOID: it came from the page cache"
    print(
        f"{'':>8}  the kernel's read_bytes is {share:.0%} of what the engine asked for "
        f"({total['read_bytes'] / max(1.0, total['reads']):,.0f} B a read): the figure {verdict}"
    )


if __name__ == "__main__":
    main()
