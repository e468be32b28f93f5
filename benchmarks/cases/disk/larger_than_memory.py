"""A training step on a table many times larger than its memory limit.

10M rows of 768 B (64 weights and Adam's two averages), fully written, committed and opened again; 65,536
Zipf(1.05) ids a step; each side in a process of its own inside a memory cgroup of 1 GiB, a few steps each in
turn, the same batches (see `sides`).

ours      `bunkbed.torch`: lookup, backward of a constant gradient, `Optimizer.step`; defaults but for `ram`;
          plainly, and with `lookahead` around the loader.
memmap    the textbook recipe in NumPy: unique ids, sorted; `rows = memmap[ids]`, Adam, `memmap[ids] = rows`.
          Records hold weights and state together, as ours do.
advised   the same with `madvise(MADV_RANDOM)`, which not every textbook has.
rocksdb, lmdb   the same recipe on a key-value store, tuned; case `key-value-stores`.

Printed with the times: rows missed and first touched (about 0, or the figure would be flattered), what the best
static cache of as many frames would have missed on the same batches (ours must find out which those are: a row at its
border comes up every few hundred steps, so the warm-up is long), the device's own limits measured in the same run, and
the kernel's `read_bytes` as a share of the bytes that the engine requested from the device (512-byte blocks, where the
device has them): below 90 % the figure is void, because the page cache served the other reads.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases.disk import simulate
from benchmarks.cases.disk.sides import Side, batch, build, sampler
from benchmarks.harness import common, turns
from benchmarks.harness.figures import Figure, Settings, missing
from benchmarks.peers import Missing
from benchmarks.peers.records import RECORD_BYTES

#: What `lookahead` is asked for; it ignores what it does not know.
LOOKAHEAD = {"depth": 1, "window": 32}

#: How a model's threads wait for each other: by default they spin, which would take the processors from the threads
#: that read concurrently. The caller's environment takes precedence.
MODEL = {"OMP_WAIT_POLICY": "passive"}

#: Sides whose memory is the page cache.
MAPPED = ("memmap", "advised", "lmdb")
#: RLIMIT_DATA of a side where memory cgroups cannot be had; thread stacks count, used or not.
RLIMIT = "4GiB"


@dataclass(frozen=True)
class Plan:
    """Sizes of a run."""

    rows: int = 10_000_000
    batch: int = 65_536
    limit: str = "1GiB"
    # The limit also has to hold torch and a step's own tensors (337 MiB where it was read last) and a turn's batches
    # (26 MiB). The table uses its budget to the last page: with 600 MiB the cgroup killed the process.
    ram: str = "576MiB"
    rounds: int = 3
    steps: int = 50
    warm_steps: int = 1400
    warm_s: float = 200.0
    seed: int = 0
    tiny: bool = False

    def __str__(self) -> str:
        return (
            f"{self.rows:,} rows x {RECORD_BYTES} B = {common.bb_bytes(self.rows * RECORD_BYTES)}, {self.batch:,} "
            f"Zipf(1.05) ids, memory cgroup {self.limit}, ours with ram={self.ram!r}"
        )


def plan(settings: Settings, **changes: Any) -> Plan:
    """Sizes by the size of the suite."""
    sizes = {
        "tiny": {
            "rows": 40_000,
            "batch": 1_024,
            "ram": "8MiB",
            "rounds": 2,
            "steps": 3,
            "warm_steps": 15,
            "tiny": True,
        },
        "quick": {"rows": 3_000_000, "limit": "640MiB", "ram": "240MiB", "rounds": 3, "steps": 30, "warm_s": 40.0},
        "full": {},
    }[settings.size]
    return Plan(**{**sizes, "seed": settings.seed, **changes})  # type: ignore[arg-type]


@dataclass
class Limits:
    """The device's limits, measured between turns."""

    read_iops: list[float] = field(default_factory=list)
    write_bandwidth: list[float] = field(default_factory=list)

    def measure(self, table: Path, *, tiny: bool) -> None:
        self.read_iops.append(common.random_read_iops(common.segment_files(table), seconds=0.2 if tiny else 3))
        self.write_bandwidth.append(
            common.sequential_write_bandwidth(table.parent, num_bytes=(8 if tiny else 512) * common.MIB)
        )

    def figures(self) -> list[Figure]:
        def one(name: str, values: list[float], unit: str, scale: float = 1.0, note: str = "") -> Figure:
            numbers = [value * scale for value in values]
            middle = statistics.median(numbers)
            return Figure(name, middle, unit, min(numbers), max(numbers), len(numbers), note=note)

        return [
            one("device, random reads", self.read_iops, "a second", note="4 KiB O_DIRECT, 64 threads"),
            one("device, sequential writes", self.write_bandwidth, "GB/s", 1e-9, note="8 MiB O_DIRECT"),
        ]


class Bench:
    """Sides opened on built stores, warmed, and stepped in turns."""

    def __init__(self, stack: ExitStack, plan: Plan, folder: Path, *, limited: bool) -> None:
        self.plan, self.folder = plan, folder
        self._stack = stack
        self._limited = limited
        self.sides: dict[str, Side] = {}
        self.limits = Limits()
        self.next_index = 0

    def open(self, name: str, environment: dict[str, str] | None = None) -> Side:
        """Builds the store if it does not exist, and starts the side; `environment` is added to the caller's.

        Raises:
            Missing: its library is not installed, or nothing here can limit the memory it uses.
        """
        plan = self.plan
        if not self._limited and name in MAPPED and not plan.tiny:
            raise Missing("without a memory cgroup the page cache, which is all the memory it uses, has no limit")
        path = self.folder / name
        build(name, path, plan.rows)
        sizes = {"rows": plan.rows, "batch": plan.batch, "ram": plan.ram, "seed": plan.seed}
        limit = {"limit": plan.limit} if self._limited else {"rlimit": "" if plan.tiny else RLIMIT}
        self.sides[name] = Side(self._stack, name, path, environment=environment, **sizes, **limit)  # type: ignore[arg-type]
        return self.sides[name]

    def fresh(self, count: int) -> list[int]:
        """Return indices of batches that no side has taken."""
        self.next_index += count
        return list(range(self.next_index - count, self.next_index))

    def warm(self, name: str = "ours") -> None:
        """Trains until our cache is full, compaction runs and the misses no longer fall, or the plan's time is over.

        Looking ahead, which keeps the device busy: what must be read to get there is the same.
        """
        start, turn = time.perf_counter(), 5 if self.plan.tiny else 20
        misses: list[float] = []  # a step, of each turn
        compactions = 0.0
        while len(misses) * turn < self.plan.warm_steps and time.perf_counter() - start < self.plan.warm_s:
            answer = self.sides[name].turn(self.fresh(turn), lookahead=LOOKAHEAD)
            compactions += answer["stats"]["compactions"]
            misses.append(answer["stats"]["misses"] / turn)
            full = answer["frames"] >= 0.98 * answer["frame_capacity"]
            if full and compactions > 3 and len(misses) >= 40:
                # 400 steps that miss less than the 400 before by a 200th: the rest would take as long again.
                before, after = statistics.mean(misses[-40:-20]), statistics.mean(misses[-20:])
                if after > 0.995 * before:
                    break
        print(
            f"warm: {len(misses) * turn:,} steps in {time.perf_counter() - start:.0f} s, {answer['frames']:,} of "
            f"{answer['frame_capacity']:,} frames, {misses[-1]:,.0f} rows missed a step, "
            f"{misses[len(misses) // 2]:,.0f} half-way, {answer['progress']}, {compactions:.0f} compactions",
            flush=True,
        )

    def rounds(self, kinds: dict[str, Kind]) -> Results:
        """Take all kinds of turn, every round on batches that no side has taken; measure the device after each round.

        Sides take the same batches. Kinds on one side cannot: the second would find the first one's rows in the cache.
        """
        results = Results({kind: [] for kind in kinds}, {kind: [] for kind in kinds})
        for round_index in range(self.plan.rounds):
            taken = dict.fromkeys((kind.side for kind in kinds.values()), self.next_index)
            indices: dict[str, list[int]] = {}
            for name, kind in kinds.items():
                indices[name] = list(range(taken[kind.side], taken[kind.side] + kind.steps))
                taken[kind.side] += kind.steps
            self.next_index = max(taken.values())
            for name in turns.order(list(kinds), round_index):
                kind = kinds[name]
                results.indices[name] += indices[name]
                results.answers[name].append(self.sides[kind.side].turn(indices[name], **kind.how))
            self.limits.measure(self.sides["ours"].path, tiny=self.plan.tiny)
        return results


@dataclass(frozen=True)
class Kind:
    """A way of stepping a side: its steps a turn, and what the child is given in addition to the batches."""

    side: str
    steps: int
    how: dict[str, Any] = field(default_factory=dict)


@dataclass
class Results:
    """Answers of every kind of turn, round by round."""

    answers: dict[str, list[dict[str, Any]]]
    indices: dict[str, list[int]]

    def times(self, names: dict[str, str] | None = None) -> turns.Times:
        """The seconds alone, for `benchmarks.harness.turns`; kinds may be renamed."""
        names = names or {}
        return turns.Times({names.get(k, k): [a["times"] for a in answers] for k, answers in self.answers.items()})

    def a_step(self, kind: str, key: str, group: str = "stats") -> float:
        """A counter's mean over this kind's steps."""
        steps = sum(len(answer["times"]) for answer in self.answers[kind])
        return float(sum(answer[group].get(key, 0) for answer in self.answers[kind]) / steps)


@contextlib.contextmanager
def bench(settings: Settings, plan: Plan, stores: int) -> Iterator[Bench]:
    """A `Bench` with `stores` tables' room on disk; stores are kept where `settings.table` says."""
    why_not = common.MemoryLimit.why_not()
    if why_not and not plan.tiny:
        plan = replace(plan, rows=min(plan.rows, 3_000_000), ram="240MiB", limit=f"none, RLIMIT_DATA {RLIMIT} instead")
    # Training can write every row of our table again before a file of its last commit may be removed.
    needed = int(plan.rows * RECORD_BYTES * (1 + 2 * stores))
    place = contextlib.nullcontext(settings.table) if settings.table else common.workspace(settings.dir, needed)
    with place as folder, ExitStack() as stack:
        assert folder is not None
        # A store that is kept is one of this size only.
        folder = folder / f"{plan.rows}-rows"
        print(common.machine(folder.parent))
        if why_not:
            print(f"A SMALLER CASE: {why_not}; each process's own memory is limited instead, memory maps are left out")
        print(plan, flush=True)
        yield Bench(stack, plan, folder, limited=why_not is None)


def against_the_device(found: Results, kind: str, limits: Limits, *, target: bool) -> list[Figure]:
    """Ours against the device, and whether the figure counts."""
    median = found.times().median(kind)
    iops, bandwidth = statistics.median(limits.read_iops), statistics.median(limits.write_bandwidth)
    reads, written = found.a_step(kind, "reads"), found.a_step(kind, "written_bytes")
    reading, writing = reads / iops, written / bandwidth
    # The engine asks the device for 512-byte blocks where it may, so a read is often less than 4 KiB.
    share = found.a_step(kind, "read_bytes", "io") / max(1.0, found.a_step(kind, "read_bytes"))
    touched = found.a_step(kind, "first_touches")
    return [
        Figure(
            f"share of the device's limit, {kind}",
            (reading + writing) / median * 100,
            "%",
            note=f"reads need {reading * 1e3:.1f} ms, {common.bb_bytes(written)} written a step, compaction included, "
            f"{writing * 1e3:.1f} ms; the step took {median * 1e3:.1f} ms; reads alone {reading / median:.0%}",
            **({"at_least": 92} if target else {}),
        ),
        Figure(
            f"kernel's read_bytes of what the engine asked for, {kind}",
            share * 100,
            "%",
            note=("counts" if share >= 0.9 else "VOID: it came from the page cache")
            + f"; {touched:,.0f} first touches",
        ),
        Figure(
            f"rows missed a step, {kind}",
            found.a_step(kind, "misses"),
            note=f"of {found.a_step(kind, 'unique_rows'):,.0f} unique; {reads:,.0f} reads, "
            f"{found.a_step(kind, 'evictions'):,.0f} evicted, {found.a_step(kind, 'written_back'):,.0f} written back, "
            f"{found.a_step(kind, 'compactions'):.2f} compactions",
        ),
    ]


def static_cache(found: Results, plan: Plan, frames: int) -> tuple[float, float]:
    """Misses a step of the best static cache of `frames` on the plain turns' batches: by popularity, in hindsight."""
    sample, place = sampler(plan.rows), common.scatter(plan.rows)
    batches = [batch(sample, plan.seed, i, plan.batch) for i in found.indices["plain"]]
    ranked = place(np.arange(min(frames, plan.rows), dtype=np.int64))
    popular = simulate.static_misses(batches, frames, ranked).mean()
    return float(popular), float(simulate.static_misses(batches, frames).mean())


def larger_than_memory(settings: Settings, plan_: Plan | None = None, memmap_steps: int = 1) -> list[Figure]:
    """Compare ours, with and without lookahead, with the `memmap` recipes."""
    size = plan_ or plan(settings)
    peers = ["memmap", "advised"] if memmap_steps else []
    with bench(settings, size, 1 + len(peers)) as found:
        size = found.plan
        found.open("ours")
        peers, absent = opened(found, peers)
        found.warm()
        for name in peers:
            found.sides[name].turn(found.fresh(1))  # fills its page cache
        kinds = {
            "plain": Kind("ours", size.steps),
            "lookahead": Kind("ours", size.steps, {"lookahead": LOOKAHEAD}),
            **{name: Kind(name, memmap_steps) for name in peers},
        }
        results = found.rounds(kinds)
        frames = int(results.answers["plain"][-1]["frame_capacity"])
        peaks = {name: side.peak() for name, side in found.sides.items()}
        settings_of = {name: results.answers[name][-1]["settings"] for name in peers}
    times = results.times({"plain": turns.OURS})
    at_most = {"at_most": 120} if (size.rows, size.limit) == (Plan.rows, Plan.limit) else {}
    figures = [turns.step_time(times, turns.OURS, note=peaks["ours"], **at_most)]
    figures += [turns.step_time(times, "lookahead", note=f"{LOOKAHEAD}")]
    plain, ahead = results.a_step("plain", "misses"), results.a_step("lookahead", "misses")
    figures += [Figure("misses with lookahead / without", ahead / plain if plain else None, "x", at_most=0.999)]
    popular, hindsight = static_cache(results, size, frames)
    note = f"{plain:,.0f} against {popular:,.0f} with {frames:,} frames; {hindsight:,.0f} if chosen in hindsight"
    figures += [
        Figure("misses / best static cache's", plain / popular if popular else None, "x", at_most=1.1, note=note)
    ]
    figures += against_the_device(results, "plain", found.limits, target=True)
    figures += against_the_device(results, "lookahead", found.limits, target=False)
    figures += found.limits.figures()
    for name in peers:
        figures += [turns.ratio(times, name), turns.step_time(times, name, note=f"{settings_of[name]}; {peaks[name]}")]
    return figures + absent


def opened(found: Bench, names: Sequence[str], **target: float) -> tuple[list[str], list[Figure]]:
    """Opens the sides that can be had, and gives a figure for each that cannot."""
    peers, absent = [], []
    for name in names:
        try:
            found.open(name)
            peers.append(name)
        except Missing as error:
            print(f"{name} is left out: {error}")
            absent.append(missing(f"ratio {name} / {turns.OURS}", str(error), **target))
    return peers, absent


def beside_a_model(settings: Settings) -> list[Figure]:
    """The model's work is a two-thread matrix product, half, once and twice as long as the disk's work alone."""
    size = plan(settings)
    with bench(settings, size, 1) as found:
        size = found.plan
        ours = found.open("ours", MODEL)
        found.warm()
        disk = statistics.median(ours.turn(found.fresh(size.steps), lookahead=LOOKAHEAD)["times"])
        product = statistics.median(ours.turn([0] * 20, products=4, only_work=True)["times"]) / 4
        products = {factor: max(1, round(factor * disk / product)) for factor in (1.0, 0.5, 2.0)}
        steps = max(3, size.steps // 2)
        kinds = {"disk alone": Kind("ours", steps, {"lookahead": LOOKAHEAD})}
        processors = os.cpu_count() or 1
        for factor, count in products.items():
            kinds[f"work {factor:g}"] = Kind("ours", steps, {"products": count, "only_work": True})
            kinds[f"both {factor:g}"] = Kind("ours", steps, {"products": count, "lookahead": LOOKAHEAD})
        results = found.rounds(kinds)
    times = results.times()
    figures = []
    for factor in products:
        parts = [times.medians(kind) for kind in ("disk alone", f"work {factor:g}", f"both {factor:g}")]
        ratios = [both / max(alone, work) for alone, work, both in zip(*parts, strict=True)]
        middle = statistics.median(ratios)
        name = f"step / max(work alone, disk alone), work {factor:g}x the disk's"
        target = {"at_most": 1.1} if factor == 1 else {}
        figures.append(Figure(name, middle, "x", min(ratios), max(ratios), len(ratios), **target))
        # What no overlap can beat: the processor time of both, on every processor all the time.
        own, model = (results.a_step(kind, "cpu_s", "used") for kind in ("disk alone", f"work {factor:g}"))
        alone, work = times.median("disk alone"), times.median(f"work {factor:g}")
        bound = max(alone, work, (own + model) / processors)
        figures.append(
            Figure(
                f"step / what the processors allow, work {factor:g}x the disk's",
                times.median(f"both {factor:g}") / bound,
                "x",
                note=f"processor time a step: {own * 1e3:.0f} ms for reading and training, {model * 1e3:.0f} ms for "
                f"the work; on {processors} processors {(own + model) / processors * 1e3:.0f} ms at least, "
                f"{bound / max(alone, work):.2f}x the longer of both alone; "
                f"{results.a_step(f'both {factor:g}', 'cpu_s', 'used') * 1e3:.0f} ms were used",
            )
        )
    figures += turns.step_times(times)
    for kind in ("disk alone", "both 1"):
        waited = results.a_step(kind, "read_wait_s") * 1e3
        note = f"{results.a_step(kind, 'misses'):,.0f} rows missed a step"
        figures.append(Figure(f"waited for reads a step, {kind}", waited, "ms", note=note))
    return figures + found.limits.figures()


def key_value_stores(settings: Settings) -> list[Figure]:
    """Compare ours with RocksDB and LMDB, all in steady state: caches full, compactions running."""
    size = plan(settings, rounds=settings.pick(2, 3, 3), warm_s=settings.pick(5.0, 40.0, 90.0))
    own, theirs = settings.pick((3, 1), (20, 3), (20, 3))
    with bench(settings, size, 3) as found:
        found.open("ours")
        peers, absent = opened(found, ("rocksdb", "lmdb"), at_least=5)
        found.warm()
        for name in peers:
            warm_peer(found, name, settings.pick(1.0, 15.0, 60.0))
        results = found.rounds({name: Kind(name, own if name == "ours" else theirs) for name in found.sides})
        peaks = {name: side.peak() for name, side in found.sides.items()}
        last = {name: answers[-1] for name, answers in results.answers.items()}
    times = results.times({"ours": turns.OURS})
    figures = [turns.ratio(times, name, at_least=5) for name in peers]
    figures.append(turns.step_time(times, turns.OURS, note=f"{last['ours']['progress']}; {peaks['ours']}"))
    for name in peers:
        answer = last[name]
        traffic = (
            f"kernel read {common.bb_bytes(results.a_step(name, 'read_bytes', 'io'))} and wrote "
            f"{common.bb_bytes(results.a_step(name, 'write_bytes', 'io'))} a step"
        )
        note = "; ".join(text for text in (answer["settings"], answer["progress"], traffic, peaks[name]) if text)
        figures.append(turns.step_time(times, name, note=note))
    return figures + absent + found.limits.figures()


def warm_peer(found: Bench, name: str, seconds: float) -> None:
    """Steps a peer for so long: its caches fill, and what it wrote is compacted."""
    start, side, spans = time.perf_counter(), found.sides[name], []
    while time.perf_counter() - start < seconds:
        spans += side.turn(found.fresh(1 if found.plan.tiny else 2))["times"]
    fifth = max(1, len(spans) // 5)
    medians = [statistics.median(spans[i : i + fifth]) for i in range(0, len(spans), fifth)]
    print(
        f"{name} warmed: {len(spans)} steps, {' '.join(f'{median * 1e3:,.0f}' for median in medians)} ms a step; "
        f"{side.answers[-1]['progress']}",
        flush=True,
    )


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--rows", type=int, default=10_000_000, help="rows of the table")
    options.add_argument("--batch", type=int, default=65_536, help="ids a step")
    options.add_argument("--limit", default="1GiB", help="memory cgroup of each side")
    options.add_argument("--ram", default=Plan.ram, help="our budget inside that limit")
    options.add_argument("--rounds", type=int, default=3, help="turns of each side")
    options.add_argument("--steps", type=int, default=50, help="our steps a turn")
    options.add_argument("--memmap-steps", type=int, default=1, help="the recipe's steps a turn; 0 leaves it out")
    options.add_argument("--warm-steps", type=int, default=1400, help="steps of the warm-up, at most")
    options.add_argument("--warm-seconds", type=float, default=200.0, help="its time, at most")
    options.add_argument("--table", type=Path, help="keep the stores in this folder, and use them again")
    options = options.parse_args()
    size = Plan(
        options.rows,
        options.batch,
        options.limit,
        options.ram,
        options.rounds,
        options.steps,
        options.warm_steps,
        options.warm_seconds,
        options.seed,
    )
    settings = Settings("tiny" if options.tiny else "full", options.dir, options.seed, table=options.table)
    for figure in larger_than_memory(settings, plan(settings) if options.tiny else size, options.memmap_steps):
        print(figure.line())


if __name__ == "__main__":
    main()
