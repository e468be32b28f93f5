"""The processes that train a table larger than memory, one side each, inside a memory limit.

A child opens its store, then steps on request. Batch `i` is a function of the seed and `i` alone, so that sides with
unlike numbers of steps a turn take the same batches. The parent makes them, whose memory has no limit (what it takes to
draw from ten million rows is 80 MB), and hands them over in a file before the clock starts.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from benchmarks.harness import common
from benchmarks.peers.records import DIM, RECORD_BYTES, Records, Training
from bunkbed.core.budget import parse_bytes

#: Edge of the matrices whose product simulates a model's work.
EDGE = 512


@functools.cache
def sampler(num_rows: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Draws the ids of every batch."""
    return common.zipf(num_rows)


def batch(sample: Any, seed: int, index: int, size: int) -> np.ndarray:
    """Ids of one batch, `int64[size]`."""
    ids: np.ndarray = sample(np.random.default_rng((seed, index)), size)
    return ids


class Ours:
    """Steps our table through `bunkbed.torch`; on request with lookahead and with a model's work in each step."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        from bunkbed.torch import Embedding, Optimizer, lookahead

        self.table = bb.open(options.path, ram=options.ram)
        self.layer = Embedding(self.table.num_rows, DIM, table=self.table)
        self.optimizer = Optimizer(self.layer)
        self.grad = torch.full((options.batch, DIM), 0.01)
        self.torch = torch
        self.lookahead = lookahead
        self.left, self.right, self.product = (torch.rand(EDGE, EDGE) for _ in range(3))

    def turn(self, batches: list[np.ndarray], *, lookahead: dict[str, int] | None, products: int) -> list[float]:
        """Seconds of each step: what `lookahead` does between two steps counts into the later one."""
        tensors = [self.torch.from_numpy(ids) for ids in batches]
        loader: Any = tensors
        if lookahead is not None:
            known = inspect.signature(self.lookahead).parameters
            depths = {name: value for name, value in lookahead.items() if name in known}
            loader = self.lookahead(tensors, self.layer, ids=lambda ids: {self.layer: ids}, **depths)
        times, start = [], time.perf_counter()
        for ids in loader:
            self.optimizer.zero_grad()
            rows = self.layer(ids)
            self.work(products)
            rows.backward(self.grad)
            self.optimizer.step()
            now = time.perf_counter()
            times.append(now - start)
            start = now
        return times

    def work(self, products: int) -> None:
        """A model's work: matrix products on all of torch's threads."""
        for _ in range(products):
            self.torch.mm(self.left, self.right, out=self.product)

    def progress(self) -> str:
        stats = self.table.stats()
        return f"{stats['live_bytes'] / max(1, stats['disk_bytes']):.0%} of the log live"

    def stats(self) -> dict[str, float]:
        return dict(self.table.stats())

    def close(self) -> None:
        # With a commit, so that a store that is kept loses the segments of the one before.
        self.table.close()


class Theirs:
    """Steps a peer's records with Adam in NumPy."""

    def __init__(self, records: Records) -> None:
        self.training = Training(records)

    def turn(self, batches: list[np.ndarray], *, lookahead: dict[str, int] | None, products: int) -> list[float]:
        return [common.timed(lambda ids=ids: self.training.step(ids)) for ids in batches]

    def progress(self) -> str:
        return self.training.records.progress()

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.training.records.close()


def peer(name: str) -> Any:
    """The module of a peer and the name of its class."""
    from benchmarks.peers import lmdb_store, memmap, rocksdb

    return {
        "memmap": (memmap, memmap.Memmap),
        "advised": (memmap, memmap.Advised),
        "rocksdb": (rocksdb, rocksdb.RocksDb),
        "lmdb": (lmdb_store, lmdb_store.Lmdb),
    }[name]


def build(name: str, path: Path, num_rows: int) -> None:
    """Writes every record of a side's store, if it is not there yet.

    It has its name once it is whole: a build that was interrupted is never taken for a store, and leaves nothing.
    """
    if path.exists():
        return
    folder = path.parent / f"{name}.partial"
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    common.require_space(path.parent, num_rows * RECORD_BYTES * 2)
    folder.mkdir(parents=True)
    part = folder / "store"
    start = time.perf_counter()
    try:
        if name == "ours":
            optimizer, init = bb.Adam(), bb.Normal(0.01)
            with bb.create(part, dim=DIM, num_rows=num_rows, optimizer=optimizer, init=init, ram="2GiB") as table:
                common.fill(table)
        else:
            peer(name)[0].build(part, num_rows)
        common.forget_pages(part)
        part.rename(path)
    finally:
        shutil.rmtree(folder)
    print(f"{name}: {num_rows:,} rows written in {time.perf_counter() - start:.0f} s", flush=True)


class Side:
    """The parent's end of a side: a child process in a memory cgroup of its own, where one can be had."""

    def __init__(
        self,
        stack: ExitStack,
        name: str,
        path: Path,
        *,
        rows: int,
        batch: int,
        ram: str,
        seed: int,
        limit: str | None = None,
        rlimit: str = "",
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name, self.path = name, path
        self.limit = stack.enter_context(common.MemoryLimit(parse_bytes(limit))) if limit else None
        values = {"path": path, "rows": rows, "batch": batch, "ram": ram, "seed": seed, "rlimit": rlimit}
        arguments = [text for key, value in values.items() for text in (f"--{key}", str(value))]
        self._batches = (sampler(rows), seed, batch)
        self.child = common.Child(["-m", "benchmarks.cases.disk.sides", name, *arguments], self.limit, environment)
        stack.callback(self.child.close)
        self.answers: list[dict[str, Any]] = []

    def turn(self, indices: Sequence[int], **how: Any) -> dict[str, Any]:
        """Steps on these batches; the answer has times, counters and the kernel's counts."""
        sample, seed, size = self._batches
        with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix="batches-") as file:
            for index in indices:
                if not how.get("only_work"):
                    file.write(batch(sample, seed, int(index), size).tobytes())
            file.flush()
            answer = self.child.ask(batches=file.name, count=len(indices), **how)
        self.answers.append(answer)
        return answer

    def a_step(self, answers: Sequence[dict[str, Any]], group: str, key: str) -> float:
        """A counter's mean over the steps of these answers."""
        steps = sum(len(answer["times"]) for answer in answers)
        return float(sum(answer[group].get(key, 0) for answer in answers) / max(1, steps))

    def peak(self) -> str:
        """What the limit saw, for people."""
        if self.limit is None:
            return "no memory limit"
        return f"cgroup peak {common.bb_bytes(self.limit.peak_bytes())} with page cache"


def child(options: argparse.Namespace) -> None:
    """Serves turns until standard input ends."""
    if options.rlimit:
        resource.setrlimit(resource.RLIMIT_DATA, (parse_bytes(options.rlimit),) * 2)
    if options.side == "ours":
        side: Ours | Theirs = Ours(options)
    else:
        side = Theirs(peer(options.side)[1](options.path, parse_bytes(options.ram)))

    def handle(
        batches: str,
        count: int,
        lookahead: dict[str, int] | None = None,
        products: int = 0,
        only_work: bool = False,
    ) -> dict[str, Any]:
        ids = np.fromfile(batches, np.int64).reshape(-1, options.batch)
        stats, io, spent = side.stats(), common.proc_io(), time.process_time()
        if only_work:
            assert isinstance(side, Ours)
            times = [common.timed(lambda: side.work(products)) for _ in range(count)]
        else:
            times = side.turn(list(ids), lookahead=lookahead, products=products)
        spent = time.process_time() - spent
        after = side.stats()
        return {
            "times": times,
            "used": {"cpu_s": spent},
            "stats": common.delta(after, stats),
            "io": common.delta(common.proc_io(), io),
            "frames": after.get("frames", 0),
            "frame_capacity": after.get("frame_capacity", 0),
            "progress": side.progress(),
            "resident": common.resident_bytes("VmHWM"),
            "settings": "" if isinstance(side, Ours) else side.training.records.settings,
        }

    common.serve(handle)
    side.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("side")
    options.add_argument("--path", type=Path, required=True)
    options.add_argument("--ram", required=True)
    options.add_argument("--rlimit", default="", help="RLIMIT_DATA, where there is no memory cgroup")
    for name in ("rows", "batch", "seed"):
        options.add_argument(f"--{name}", type=int, required=True)
    child(options.parse_args())


if __name__ == "__main__":
    main()

__all__ = ["RECORD_BYTES", "Side", "batch", "build", "sampler"]
