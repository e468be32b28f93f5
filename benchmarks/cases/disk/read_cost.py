"""What concurrent reads cost a model: `io_uring` against a pool of threads.

A matrix product on one and on two threads of torch is repeated while another thread looks rows of 768 B up without a
pause in a table larger than its cache: the ids are uniform, so nearly every row is read. In turns: the product alone,
with reads by threads, with reads by io_uring. io_uring stays the default as long as the model does at least 10 % more
work with it. Then the reads alone: processor time of one, evictions and everything else of a lookup counted in.

The backend of a read is chosen when the read is made, not when the table is opened: each turn sets it again, and the
core's count of the reads of each backend must agree, or there is no figure.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from benchmarks.cases.disk.sides import build
from benchmarks.cases.exactness import io_ways
from benchmarks.harness import common, turns
from benchmarks.harness.figures import Figure, Settings
from bunkbed import _native

#: Edge of the matrices: small enough for the caches, so that processor time limits the product, and large enough that
#: its threads seldom wait for each other: torch's threads spin then, and the cost of a concurrent reader is random.
EDGE = 512


class Reads:
    """Looks batches up, one after another, on a thread of its own."""

    def __init__(self, table: Any, size: int, seed: int, way: str) -> None:
        self.table = table
        self.way = way
        self._size = size
        self._rng = np.random.default_rng(seed)

    def batch(self) -> np.ndarray:
        return self._rng.integers(self.table.num_rows, size=self._size)

    @contextlib.contextmanager
    def served(self) -> Any:
        """Reads made inside are carried out the way of this side, and by no other.

        Raises:
            AssertionError: it was another one.
        """
        _native.set_io(self.way)
        before = _native.io_counts()
        yield
        made = {way: count - before[way] for way, count in _native.io_counts().items()}
        assert made.pop(self.way) > 0 and not any(made.values()), f"reads of {self.way} were served by {made}"

    @contextlib.contextmanager
    def going(self) -> Any:
        """Reads go on inside."""
        stop = threading.Event()

        def look_up() -> None:
            while not stop.is_set():
                self.table.lookup(self.batch())

        thread = threading.Thread(target=look_up)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def torch_threads(threads: int = 0) -> int:
    """Threads of torch's operations; sets them where a number is given."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    return int(torch.get_num_threads())


def products(seconds: float, threads: int) -> float:
    """Matrix products a second on so many threads."""
    import torch

    torch_threads(threads)
    left, right = torch.rand(EDGE, EDGE), torch.rand(EDGE, EDGE)
    result = torch.empty(EDGE, EDGE)
    count, start = 0, time.perf_counter()
    while (now := time.perf_counter()) - start < seconds:
        for _ in range(10):
            torch.mm(left, right, out=result)
        count += 10
    return count / (now - start)


def with_reads(reads: Reads | None, seconds: float, threads: int) -> tuple[float, float]:
    """Products and reads a second."""
    if reads is None:
        return products(seconds, threads), 0.0
    with reads.served(), reads.going():
        time.sleep(0.05)
        before, start = reads.table.stats()["reads"], time.perf_counter()
        rate = products(seconds, threads)
        return rate, (reads.table.stats()["reads"] - before) / (time.perf_counter() - start)


def alone(reads: Reads, seconds: float) -> tuple[float, float]:
    """Microseconds of processor time a read, and reads a second, with nothing else running."""
    before, start, spent = reads.table.stats()["reads"], time.perf_counter(), time.process_time()
    with reads.served():
        while time.perf_counter() - start < seconds:
            reads.table.lookup(reads.batch())
    count = reads.table.stats()["reads"] - before
    return (time.process_time() - spent) / count * 1e6, count / (time.perf_counter() - start)


def read_cost(settings: Settings) -> list[Figure]:
    """The suite's case."""
    rows, size, seconds = settings.pick((40_000, 500, 0.05), (3_000_000, 4_000, 1.0), (10_000_000, 4_000, 1.0))
    place: Any = contextlib.nullcontext(settings.table)
    if settings.table is None:
        place = common.workspace(settings.dir, rows * 768 * 2)
    before, threads = _native.io(), torch_threads()
    with place as folder:
        path = Path(folder) / f"{rows}-rows" / "ours"
        build("ours", path, rows)
        with contextlib.ExitStack() as stack:
            stack.callback(torch_threads, threads)
            stack.callback(_native.set_io, before)
            reads: dict[str, Reads] = {}
            table = stack.enter_context(bb.open(path, ram=settings.pick("8MiB", "64MiB", "256MiB"), mode="r"))
            for name in io_ways():
                reads[name] = Reads(table, size, settings.seed, name)
            while not settings.tiny and table.stats()["frames"] < 0.98 * table.stats()["frame_capacity"]:
                table.lookup(reads["threads"].batch())
            return figures(reads, seconds, settings.pick(2, 5, 7))


def figures(reads: dict[str, Reads], seconds: float, rounds: int) -> list[Figure]:
    """All measurements on an open, warm table, for each way of reading."""
    names = list(reads)
    found: list[Figure] = []
    for threads in (2, 1):
        rates: dict[str, list[float]] = {name: [] for name in ("", *names)}
        speeds: dict[str, list[float]] = {name: [] for name in rates}
        for index in range(rounds):
            for backend in turns.order(list(rates), index):
                rate, speed = with_reads(reads.get(backend), seconds, threads)
                rates[backend].append(rate)
                speeds[backend].append(speed)
        for backend in names:
            shares = [100 * rate / free for rate, free in zip(rates[backend], rates[""], strict=True)]
            note = f"with {statistics.median(speeds[backend]):,.0f} reads a second"
            found.append(one(f"model of {threads} threads, reads by {backend}", shares, "% of its work alone", note))
        if "uring" in names:
            gains = [uring / pool for uring, pool in zip(rates["uring"], rates["threads"], strict=True)]
            # A model of one thread leaves the other core to the reads.
            target = {"at_least": 1.1} if threads == 2 else {}
            found.append(one(f"model of {threads} threads, work with reads by uring / threads", gains, "x", **target))
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for index in range(rounds):
        for backend in turns.order(names, index):
            costs[backend].append(alone(reads[backend], seconds))
    for backend, pairs in costs.items():
        note = f"{statistics.median(speed for _, speed in pairs):,.0f} reads a second"
        found.append(one(f"processor time of a read, {backend}", [cost for cost, _ in pairs], "us", note))
    return found


def one(name: str, values: list[float], unit: str, note: str = "", **target: float) -> Figure:
    return Figure(name, statistics.median(values), unit, min(values), max(values), len(values), note=note, **target)


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--table", type=Path, help="keep the table in this folder, and use it again")
    options.add_argument("--quick", action="store_true", help="a smaller table and fewer turns")
    options = options.parse_args()
    size: Any = "tiny" if options.tiny else "quick" if options.quick else "full"
    print(common.machine())
    for figure in read_cost(Settings(size, options.dir, options.seed, table=options.table)):
        print(figure.line())


if __name__ == "__main__":
    main()
