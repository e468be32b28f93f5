"""What commits cost training: how long they stop a step, how much they slow steps down, and what they write.

Steps go through `bunkbed.torch` (lookup, backward of a constant gradient, `Optimizer.step`), commits through
`table.begin_commit()`, which a thread makes durable meanwhile.

commit-stall        A cycle: quiet steps, begin_commit(), steps until it is durable and five more. The stall of each of
                    these, the five included, is its time beyond the median quiet step. Every fourth cycle commits in
                    the foreground instead. The table's ``stall_s`` splits a stall in two: the longer wait for the rows
                    that the step itself reads, which is the device's, and the rest, which is the commit's.
commit-throughput   1,000 steps with a commit started half-way, compared with 1,000 of a table that never commits, or
                    that is made with ``durability="scratch"`` where this release has it. The sides take turns.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import bunkbed as bb
from benchmarks.cases.disk.sides import build
from benchmarks.harness import common, turns
from benchmarks.harness.figures import Figure, Settings
from benchmarks.peers.records import DIM, RECORD_BYTES
from bunkbed import _native
from bunkbed.torch import Embedding, Optimizer

#: Steps after a commit is durable that are judged with those during it: garbage collection, compaction and the index
#: snapshot that it makes due start only then.
AFTERMATH = 5


class Step(NamedTuple):
    """What one took."""

    seconds: float
    waited: float  # the part of `seconds` that waited for reads

    @property
    def rest(self) -> float:
        """Seconds it did not wait for its reads."""
        return self.seconds - self.waited


class Steps:
    """Training steps on one table; batch `i` is the same for every table of that size.

    `batches` batches are made before any clock starts and are repeated in a cycle: so many that their tails do not fit
    the cache together, or a table on disk would be trained from RAM.
    """

    def __init__(
        self, table: bb.Table, size: int, seed: int, sample: Callable[..., np.ndarray], *, batches: int
    ) -> None:
        assert table.num_rows is not None
        self.table = table
        self.layer = Embedding(table.num_rows, DIM, table=table)
        self.optimizer = Optimizer(self.layer)
        self.grad = torch.full((size, DIM), 0.01)
        rng = np.random.default_rng(seed)
        self.batches = [torch.from_numpy(sample(rng, size)) for _ in range(batches)]
        self.taken = 0

    def step(self) -> Step:
        """Takes one."""
        ids = self.batches[self.taken % len(self.batches)]
        self.taken += 1
        waited = float(self.table.stats()["stall_s"])
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.layer(ids).backward(self.grad)
        self.optimizer.step()
        seconds = time.perf_counter() - start
        return Step(seconds, float(self.table.stats()["stall_s"]) - waited)


# ---- How long a commit stops training


@dataclass
class Cycle:
    """Every kind of step, and seconds of calls, from one commit to the next."""

    dirty: int = 0
    quiet: list[Step] = field(default_factory=list)
    during: list[Step] = field(default_factory=list)  # from begin_commit() until the commit is durable
    after: list[Step] = field(default_factory=list)
    call: float | None = None
    durable: float | None = None
    foreground: float | None = None

    def beyond(self, steps: Sequence[Step], part: str = "seconds") -> list[float]:
        """Milliseconds of that part beyond this cycle's median quiet step: a device's speed drifts over minutes."""
        middle = statistics.median(getattr(step, part) for step in self.quiet)
        return [(getattr(step, part) - middle) * 1e3 for step in steps]


def stall_figures(name: str, cycles: Sequence[Cycle], target_ms: float) -> list[Figure]:
    """Return the stall with its target, and the figures to compare it with."""

    def stalls(part: str, values: Sequence[float], note: str = "", **target: float) -> Figure:
        p50, p99 = np.percentile(values, [50, 99])
        text = f"p50 {p50:.1f}, p99 {p99:.1f}, max {max(values):.1f}{note}"
        return Figure(
            f"{name}: {part}, p99", float(p99), "ms", min(values), max(values), len(values), note=text, **target
        )

    def judged(part: str) -> list[float]:
        return [value for one in cycles for value in one.beyond(one.during + one.after, part)]

    middle = statistics.median(step.seconds for one in cycles for step in one.quiet) * 1e3
    dirty = statistics.median(one.dirty for one in cycles)
    note = f"; beyond a quiet step's {middle:.1f} ms; {dirty:,.0f} rows dirty"
    during = [value for one in cycles for value in one.beyond(one.during)]
    after = [value for one in cycles for value in one.beyond(one.after)]
    whole = f"stall of a step during a commit or one of {AFTERMATH} after it"
    quiet = [value for one in cycles for value in one.beyond(one.quiet)]
    calls, durable, foreground = ([getattr(one, kind) for one in cycles] for kind in ("call", "durable", "foreground"))
    return [
        stalls(whole, judged("seconds"), note, at_most=target_ms),
        stalls("of it, waiting for the step's own reads", judged("waited")),
        stalls("of it, the rest: what the commit itself stops", judged("rest")),
        stalls("those during it alone", during),
        stalls(f"the {AFTERMATH} after it alone", after),
        stalls("the same of quiet steps", quiet),
        Figure(f"{name}: begin_commit()", *spread(calls), note="the call itself"),
        Figure(f"{name}: until it is durable", *spread(durable)),
        Figure(f"{name}: commit() in the foreground", *spread(foreground), note="for comparison"),
    ]


def spread(times: Sequence[float | None]) -> tuple[float, str, float, float, int]:
    """Median, unit, least, most and number, of those seconds that were measured."""
    numbers = [seconds * 1e3 for seconds in times if seconds is not None]
    return statistics.median(numbers), "ms", min(numbers), max(numbers), len(numbers)


def cycle(steps: Steps, soil: Callable[[], list[Step]], *, background: bool) -> Cycle:
    """Makes rows dirty by `soil`, which gives its quiet steps, and commits."""
    made = Cycle(quiet=soil())
    made.dirty = int(steps.table.stats()["dirty_rows"])
    start = time.perf_counter()
    if not background:
        steps.table.commit(meta={"step": steps.taken})
        made.foreground = time.perf_counter() - start
        return made
    pending = steps.table.begin_commit(meta={"step": steps.taken})
    made.call = time.perf_counter() - start
    while not pending.done:
        made.during.append(steps.step())
    made.durable = time.perf_counter() - start
    pending.wait()
    made.after += [steps.step() for _ in range(AFTERMATH)]
    # What the commit and these steps made dirty must not be the next one's.
    steps.table.commit()
    return made


def commit_stall(settings: Settings) -> list[Figure]:
    """1 % dirty of a table on disk, and a cache of 1 GiB that is dirty all over."""
    rows = settings.pick(20_000, 3_000_000, 10_000_000)
    small = settings.pick(4_000, 350_000, 1_398_101)
    needed = (rows * 3 + small * 4) * RECORD_BYTES
    with common.workspace(settings.dir, needed if settings.table is None else small * 4 * RECORD_BYTES) as folder:
        kept = (settings.table or folder) / f"{rows}-rows"
        build("ours", kept / "ours", rows)
        disk = one_per_cent(settings, kept / "ours", rows)
        ram = all_dirty(settings, folder / "small", small)
    return [
        *stall_figures(f"1 % dirty of {rows / 1e6:g}M rows", disk, 50),
        *stall_figures(f"{common.bb_bytes(small * RECORD_BYTES)} all dirty", ram, 100),
    ]


def one_per_cent(settings: Settings, path: Path, rows: int) -> list[Cycle]:
    """Steps on a table on disk until 1 % of its rows are dirty, then a commit; again and again."""
    size = settings.pick(64, 65_536, 65_536)
    ram = settings.pick("8MiB", "300MiB", "1GiB")
    with bb.open(path, ram=ram) as table:
        steps = Steps(table, size, settings.seed, common.zipf(rows), batches=settings.pick(20, 200, 400))

        def soil() -> list[Step]:
            quiet: list[Step] = []
            while len(quiet) < 3 or table.stats()["dirty_rows"] < rows // 100:
                quiet.append(steps.step())
            return quiet

        warm(steps, settings.pick(5, 60, 300))
        table.commit()
        return [cycle(steps, soil, background=number % 4 != 3) for number in range(settings.pick(4, 12, 48))]


def warm(steps: Steps, most: int) -> None:
    """Trains until the cache is full."""
    for _ in range(most):
        steps.step()
        stats = steps.table.stats()
        if stats["frames"] >= 0.98 * stats["frame_capacity"]:
            break


def all_dirty(settings: Settings, path: Path, rows: int) -> list[Cycle]:
    """Every row of a table in RAM updated, then a commit; again and again."""
    size = settings.pick(64, 65_536, 65_536)
    ids = np.arange(rows)
    grads = np.full((rows, DIM), 0.01, np.float32)
    with bb.create(
        path,
        dim=DIM,
        num_rows=rows,
        optimizer=bb.Adam(),
        init=bb.Normal(0.01),
        ram=int(rows * RECORD_BYTES * 1.2) + (64 << 20),
    ) as table:
        steps = Steps(table, size, settings.seed, common.zipf(rows), batches=20)

        def soil() -> list[Step]:
            for part in range(0, rows, 100_000):
                table.update(ids[part : part + 100_000], grads[part : part + 100_000])
            return [steps.step() for _ in range(settings.pick(2, 10, 10))]

        soil()
        table.commit()
        return [cycle(steps, soil, background=number % 4 != 3) for number in range(settings.pick(4, 4, 8))]


# ---- How much commits slow training down


@dataclass
class Turn:
    """What a turn of one side took and wrote."""

    seconds: float
    steps: int
    stats: dict[str, float]
    device_bytes: int  # written, by the kernel's count

    @property
    def dirtied(self) -> float:
        """Rows that were clean and became dirty."""
        return self.stats["written_back"] + self.stats["dirty_rows"]


def turn(steps: Steps, count: int, *, commits: bool) -> Turn:
    """Take `count` steps and, with `commits`, start a commit half-way; it is durable when the turn ends."""
    before, io, start = dict(steps.table.stats()), common.proc_io(), time.perf_counter()
    pending = None
    for number in range(count):
        if commits and number == count // 2:
            pending = steps.table.begin_commit(meta={"step": steps.taken})
        steps.step()
    if pending is not None:
        pending.wait()
    seconds = time.perf_counter() - start
    return Turn(
        seconds,
        count,
        common.delta(dict(steps.table.stats()), before),
        common.delta(common.proc_io(), io)["write_bytes"],  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class Place:
    """A table that two sides train."""

    name: str
    rows: int
    ram: str
    size: int  # ids of a batch


def places(settings: Settings) -> list[Place]:
    """A table on disk, of which a twelfth is in RAM, and one in RAM."""
    small = settings.pick(4_000, 600_000, 2_000_000)
    return [
        Place(
            "disk-bound",
            settings.pick(20_000, 1_000_000, 3_000_000),
            settings.pick("2MiB", "96MiB", "240MiB"),
            settings.pick(64, 4_096, 16_384),
        ),
        Place("in RAM", small, str(int(small * RECORD_BYTES * 1.2) + (64 << 20)), settings.pick(64, 65_536, 65_536)),
    ]


def commit_throughput(settings: Settings) -> list[Figure]:
    """On disk and in RAM."""
    figures = []
    for place in places(settings):
        with common.workspace(settings.dir, place.rows * RECORD_BYTES * 6) as folder:
            figures += compare(settings, folder, place)
    return figures + checksum_rate()


def can_scratch() -> bool:
    """Whether this release makes tables that promise nothing."""
    return "durability" in inspect.signature(bb.create).parameters


def compare(settings: Settings, folder: Path, place: Place) -> list[Figure]:
    """Two tables in turns, one of which commits."""
    count, rounds = settings.pick((20, 2), (1_000, 2), (1_000, 5))
    other = "scratch" if can_scratch() else "never committing"
    sides = {"committing": False, other: can_scratch()}
    sample = common.zipf(place.rows)
    stepping: dict[str, Steps] = {}
    found: dict[str, list[Turn]] = {side: [] for side in sides}
    for side, is_scratch in sides.items():
        options: dict[str, Any] = {"durability": "scratch"} if is_scratch else {}
        table = bb.create(
            folder / side,
            dim=DIM,
            num_rows=place.rows,
            optimizer=bb.Adam(),
            init=bb.Normal(0.01),
            ram=place.ram,
            **options,
        )
        common.fill(table)
        if not is_scratch:
            table.commit()
        stepping[side] = Steps(table, place.size, settings.seed, sample, batches=settings.pick(20, 400, 400))
        warm(stepping[side], settings.pick(5, 300, 600))
    for number in range(rounds + 1):
        for side in turns.order(list(sides), number):
            made = turn(stepping[side], count, commits=side == "committing")
            if number > 0:  # the first one warms
                found[side].append(made)
    for steps in stepping.values():
        steps.table.close(commit=False)
    return speed(place.name, found, other) + written(place.name, found)


def speed(name: str, found: dict[str, list[Turn]], other: str) -> list[Figure]:
    """Compare the steps a second of both sides, round by round."""
    ratios = [100 * b.seconds / a.seconds for a, b in zip(found["committing"], found[other], strict=True)]
    steps = found["committing"][0].steps
    times = {side: statistics.median(t.seconds / t.steps for t in made) * 1e3 for side, made in found.items()}
    return [
        Figure(
            f"{name}: throughput with a commit every {steps:,} steps, of {other}",
            statistics.median(ratios),
            "%",
            min(ratios),
            max(ratios),
            len(ratios),
            at_least=95,
            note=", ".join(f"{side} {seconds:.2f} ms a step" for side, seconds in times.items()),
        )
    ]


def written(name: str, found: dict[str, list[Turn]]) -> list[Figure]:
    """What each side wrote, a step and of what it had to."""
    figures = []
    for side, made in found.items():
        steps = sum(one.steps for one in made)
        dirtied = sum(one.dirtied for one in made) * RECORD_BYTES
        engine = sum(one.stats["written_bytes"] for one in made)
        device = sum(one.device_bytes for one in made)
        figures.append(
            Figure(
                f"{name}: bytes written a step, {side}",
                engine / steps,
                "B",
                note=f"the kernel counted {device / steps:,.0f}; {dirtied / steps:,.0f} B of records were made dirty",
            )
        )
        if dirtied:
            figures.append(Figure(f"{name}: write amplification, {side}", engine / dirtied, "x"))
        reads = sum(one.stats["read_bytes"] for one in made)
        seconds = sum(one.seconds for one in made)
        share = (engine + reads) / crc_bytes_per_second() / seconds
        figures.append(
            Figure(
                f"{name}: checksums, of a processor's time, {side}",
                share * 100,
                "%",
                note=f"{(engine + reads) / steps:,.0f} B written and read a step, at most all of it checksummed once",
            )
        )
    return figures


_rate: list[float] = []


def crc_bytes_per_second() -> float:
    """How fast records' checksums are made, on one processor, out of memory and not the processor's cache."""
    if not _rate:
        data = np.random.default_rng(0).bytes(64 << 20)
        times = [common.timed(lambda: _native.crc32c_of_parts(data, RECORD_BYTES)) for _ in range(5)]
        _rate.append(len(data) / statistics.median(times))
    return _rate[0]


def checksum_rate() -> list[Figure]:
    """The rate the shares follow from."""
    return [Figure("checksums of records", crc_bytes_per_second() / 1e9, "GB/s", note=f"{RECORD_BYTES} B each")]
