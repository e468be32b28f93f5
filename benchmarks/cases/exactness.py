"""Rows after training, to the last bit, whatever the RAM, the threads and the SIMD level.

300 steps of Adam on Zipf ids, each gradient computed from the row just looked up, so that one wrong bit
spreads. Every lookup of every step, and at the end every weight, slot and stored flag, is compared with
`bunkbed.testing.ReferenceTable`. In the first half the next batch is staged before the present one is
updated, in the second a window of 12 batches plans and stages. Commits happen every 25 steps, the table is closed and
opened again half-way. Then the seeded bugs: each must make the run fail. All of it with float32 rows and state, then
in bfloat16 (or what ``--dtype`` and ``--state-dtype`` say).

The exponent is 0.6, flatter than the other benchmarks': a step must evict at least 30 % of its unique rows
even with half of the table in RAM, and hotter ids would let the cache hide a bug.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from benchmarks.harness import common
from benchmarks.harness.figures import Figure, Settings
from bunkbed import _native
from bunkbed.testing import ReferenceTable
from bunkbed.window import Window

FAULTS = ("lost_write_back", "stale_read", "double_update")
LEVELS = ("scalar", "avx2", "avx512")
DTYPES = ("float32", "bfloat16", "float16")
STATE_DTYPES = ("float32", "bfloat16")
BOTH_WIDTHS = (("float32", "float32"), ("bfloat16", "bfloat16"))


@dataclasses.dataclass(frozen=True)
class Plan:
    """One training run, whatever holds the table."""

    num_rows: int = 20_000
    dim: int = 64
    batch: int = 1024
    steps: int = 300
    exponent: float = 0.6
    seed: int = 0
    dtype: str = "float32"
    state_dtype: str = "float32"

    def table_arguments(self) -> dict[str, Any]:
        return {
            "dim": self.dim,
            "num_rows": self.num_rows,
            "optimizer": bb.Adam(lr=0.01, state_dtype=self.state_dtype),
            "init": bb.Normal(std=0.1),
            "seed": 42,
            "dtype": self.dtype,
        }

    @property
    def table_bytes(self) -> int:
        """Weights and Adam state of every row."""
        return self.num_rows * self.record_bytes

    @property
    def record_bytes(self) -> int:
        """Of one row."""
        return self.dim * ((4 if self.dtype == "float32" else 2) + 2 * (4 if self.state_dtype == "float32" else 2))

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """ids int64[batch] and noise float32[batch, dim] of every step."""
        sample = common.zipf(self.num_rows, self.exponent)
        rng = np.random.default_rng(self.seed)
        for _ in range(self.steps):
            ids = sample(rng, self.batch)
            yield ids, rng.standard_normal((self.batch, self.dim), dtype=np.float32)


@dataclasses.dataclass
class Expected:
    """What `ReferenceTable` holds: a checksum of every lookup, and the rows at the end."""

    lookups: list[int]
    table: ReferenceTable
    unique_rows: int


class Mismatch(AssertionError):
    """The table and the reference differ."""


def gradient(rows: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """What a quadratic loss would send back: it depends on every bit of the rows."""
    return rows * np.float32(0.1) + noise


def reference(plan: Plan) -> Expected:
    """Trains the oracle."""
    table = ReferenceTable(**plan.table_arguments())
    lookups, unique = [], 0
    for ids, noise in plan.batches():
        rows = table.lookup(ids)
        lookups.append(zlib.crc32(rows.tobytes()))
        table.update(ids, gradient(rows, noise))
        unique += np.unique(ids).size
    return Expected(lookups, table, unique)


def smallest_ram(make: Callable[[int], Any]) -> int:
    """The smallest `ram` in bytes, to one KiB, with which `make` gives a table."""
    low, high = 0, 1
    while True:
        try:
            make(high * 1024).close(commit=False)
            break
        except (MemoryError, ValueError):
            low, high = high, 2 * high
            if high > 1 << 22:
                raise
    while high - low > 1:
        middle = (low + high) // 2
        try:
            make(middle * 1024).close(commit=False)
            high = middle
        except (MemoryError, ValueError):
            low = middle
    return high * 1024


def train(
    plan: Plan,
    expected: Expected,
    folder: Path,
    *,
    ram: int,
    fault: str = "",
    disk: int | None = None,
    make: Callable[..., Any] = bb.create,
) -> dict[str, float]:
    """Trains a table in `folder` within `ram` bytes, and `disk` bytes of files, and compares everything.

    `make` has the arguments of `bunkbed.create`.

    Returns:
        The table's counters over the whole run, and ``evicted_share`` of the steps' unique rows.

    Raises:
        Mismatch: at the first difference.
    """
    totals: dict[str, float] = {}

    def leave(table: Any) -> None:
        for key, value in table.stats().items():
            totals[key] = totals.get(key, 0) + value

    table = make(folder, ram=ram, disk=disk, **plan.table_arguments())
    _native.set_index_snapshots(1000)  # index snapshots during training, and at the close half-way
    try:
        if fault:
            _native.set_fault(fault)
        coming = (ids for ids, _ in plan.batches())
        next(coming)
        window = None
        for step, (ids, noise) in enumerate(plan.batches()):
            if step == plan.steps // 2:
                leave(table)
                table.close()
                table = bb.open(folder, ram=ram, disk=disk)
                window = Window(table, depth=2, batches=12)
                window.push(ids)
            elif step % 25 == 24:
                table.begin_commit(meta={"step": step})  # the next steps run during the commit
            rows = table.lookup(ids)
            if window is None:
                table.stage(next(coming))
            else:
                window.advance()
                for ahead in itertools.islice(coming, 0 if window.is_full else 2):
                    window.push(ahead)
            if zlib.crc32(rows.tobytes()) != expected.lookups[step]:
                raise Mismatch(f"step {step}: the lookup differs from the reference")
            table.update(ids, gradient(rows, noise))
            if step % 7 == 3:
                table.core.write_dirty()  # as imports do
        compare(table, expected.table)
        leave(table)
    finally:
        if fault:
            _native.set_fault(None)
        table.close(commit=False)
        _native.set_index_snapshots()
    totals["evicted_share"] = totals["evictions"] / expected.unique_rows
    return totals


def compare(table: Any, oracle: ReferenceTable) -> None:
    """Every row, every slot, every stored flag."""
    ids = np.arange(oracle.num_rows or 0, dtype=np.int64)
    if table.step != oracle.step:
        raise Mismatch(f"the table's step is {table.step}, not {oracle.step}")
    if not np.array_equal(table.contains(ids), oracle.contains(ids)):
        raise Mismatch("other rows are stored than in the reference")
    for slot in ("weight", *oracle.slots):
        ours, theirs = table.get(ids, slot=slot), oracle.get(ids, slot=slot)
        differ = (ours.view(np.uint32) != theirs.view(np.uint32)).any(axis=1)
        if differ.any():
            raise Mismatch(f"{slot}: {int(differ.sum())} rows differ, the first is {int(differ.argmax())}")


def budgets(plan: Plan, folder: Path) -> dict[str, int]:
    """The four budgets by name, in bytes."""
    counter = itertools.count()
    smallest = smallest_ram(lambda ram: bb.create(folder / f"probe-{next(counter)}", ram=ram, **plan.table_arguments()))
    return {
        "smallest": smallest,
        "10 %": max(smallest, plan.table_bytes // 10),
        "50 %": max(smallest, plan.table_bytes // 2),
        # Rows, directory and buffers: nothing ever leaves.
        "everything": 4 * plan.table_bytes + 16 * smallest,
    }


def levels() -> list[str]:
    """The SIMD levels this processor has."""
    before, found = _native.simd(), []
    for level in LEVELS:
        try:
            _native.set_simd(level)
        except ValueError:
            continue
        found.append(level)
    _native.set_simd(before)
    return found


def io_ways() -> list[str]:
    """The ways of reading that can be had here."""
    before, found = _native.io(), ["threads"]
    with contextlib.suppress(OSError):
        _native.set_io("uring")
        found.append("uring")
    _native.set_io(before)
    return found


def check_plan(plan: Plan, folder: Path, ways: list[tuple[int, str]]) -> tuple[int, int]:
    """Every budget with each of `ways`, (threads, level), then the seeded bugs; prints a line each.

    Returns:
        How many runs differed from the reference, and how many bugs were not found.
    """
    bad = undetected = 0
    print(
        f"{plan.num_rows:,} rows x {plan.record_bytes} B ({plan.dtype} rows, {plan.state_dtype} Adam state), "
        f"{plan.steps} steps of {plan.batch} Zipf({plan.exponent}) ids"
    )
    expected = reference(plan)
    rams = budgets(plan, folder)
    runs = itertools.count()
    simd, threads, io = _native.simd(), bb.get_num_threads(), _native.io()
    reading = io_ways()
    try:
        for done, ((name, ram), (count, level)) in enumerate(itertools.product(rams.items(), ways)):
            bb.set_num_threads(count)
            _native.set_simd(level)
            # The order shifts by one with each budget, so that every level is tried with every way of reading.
            _native.set_io(way := reading[(done + done // len(ways)) % len(reading)])
            try:
                totals = train(plan, expected, folder / f"run-{next(runs)}", ram=ram)
            except Mismatch as error:
                bad += 1
                print(f"ram {name:>10}, {count} threads, {level:>6}, {way:>7}: DIFFERS: {error}", flush=True)
                continue
            print(
                f"ram {name:>10} ({common.bb_bytes(ram)}), {count} threads, {level:>6}, {way:>7}: identical; "
                f"evicted {totals['evicted_share']:.0%} of unique rows, "
                f"{totals['compactions']:.0f} compactions, {totals['commits']:.0f} commits",
                flush=True,
            )
    finally:
        _native.set_simd(simd)
        _native.set_io(io)
        bb.set_num_threads(threads)
    for fault in FAULTS:
        try:
            train(plan, expected, folder / f"run-{next(runs)}", ram=rams["smallest"], fault=fault)
        except (Mismatch, bb.BunkbedError) as error:
            print(f"seeded bug {fault}: found ({error})", flush=True)
        else:
            undetected += 1
            print(f"seeded bug {fault}: NOT FOUND", flush=True)
    return bad, undetected


def exactness(settings: Settings, dtypes: tuple[tuple[str, str], ...] = BOTH_WIDTHS) -> list[Figure]:
    """Every budget, thread count and SIMD level, with the ways of reading in turns; then the seeded bugs.

    The whole for each of `dtypes`, (of the rows, of the state).
    """
    plan = Plan(seed=settings.seed)
    ways = [*itertools.product((1, 2), levels())]
    if settings.tiny:
        plan = dataclasses.replace(plan, num_rows=4000, batch=256, steps=40)
        ways = [ways[0], ways[-1]]
    bad = undetected = 0
    with common.workspace(settings.dir, 8 * plan.table_bytes) as folder:
        print(common.machine(folder))
        for dtype, state_dtype in dtypes:
            own = folder / f"{dtype}-{state_dtype}"
            own.mkdir()
            found = check_plan(dataclasses.replace(plan, dtype=dtype, state_dtype=state_dtype), own, ways)
            bad, undetected = bad + found[0], undetected + found[1]
    names = ", ".join(f"{dtype} rows with {state_dtype} state" for dtype, state_dtype in dtypes)
    note = f"of {4 * len(ways) * len(dtypes)}: budgets, thread counts, SIMD levels, ways of reading; {names}"
    return [
        Figure("runs that differ from the reference", bad, at_most=0, note=note),
        Figure("seeded bugs not found", undetected, at_most=0, note=", ".join(FAULTS)),
    ]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--dtype", choices=DTYPES, help="of the rows; default: float32, and then bfloat16")
    parser.add_argument("--state-dtype", choices=STATE_DTYPES, help="of Adam's state; default: the same two")
    options = parser.parse_args()
    dtypes = BOTH_WIDTHS
    if options.dtype or options.state_dtype:
        dtypes = ((options.dtype or "float32", options.state_dtype or "float32"),)
    figures = exactness(Settings("tiny" if options.tiny else "full", options.dir, options.seed), dtypes)
    if failed := [figure.line() for figure in figures if not figure.reached]:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
