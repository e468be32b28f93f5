"""The host's part of a device cache: from a batch's ids to frames, loads and evictions, on one core.

A step has 65,536 Zipf(1.05) ids over 4M and 40M rows. The cache of 5 % and of 20 % of the rows is full and warm, and
half of the steps train. The parts of a step are timed separately: *dedupe* (`Table.batch`, which the step needs without
a device too), *plan* (frames, loads and evictions), the *positions* of all ids, *release* of its pins, and with a
window of 8 batches *expect*. The rate is that of the first three, which a step needs before its plan can be executed;
the note has the rate of all parts. The records themselves are not moved here.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

import bunkbed as bb
from benchmarks.harness import common
from benchmarks.harness.figures import Figure, Settings
from bunkbed import _native

#: Gradients of one row that a GPU adds in one piece, as in bunkbed.torch, which is not imported here.
PIECE = 64

Samples = dict[str, list[float]]


def device_planner(settings: Settings) -> list[Figure]:
    """Millions of ids a second, and microseconds of each part, by rows, cache and window."""
    num_ids = settings.pick(512, 65_536, 65_536)
    sizes = settings.pick((20_000,), (4_000_000,), (4_000_000, 40_000_000))
    before = bb.get_num_threads()
    bb.set_num_threads(1)
    try:
        return [
            figure
            for num_rows in sizes
            for figure in of_size(num_rows, num_ids, settings.pick(12, 60, 100), settings.seed)
        ]
    finally:
        bb.set_num_threads(before)


def of_size(num_rows: int, num_ids: int, steps: int, seed: int) -> list[Figure]:
    sample, rng = common.zipf(num_rows), np.random.default_rng(seed)
    place = common.scatter(num_rows)
    table = bb.create(None, dim=1, num_rows=num_rows).core
    batches = [sample(rng, num_ids) for _ in range(2 * steps)]
    figures = []
    for share in (0.05, 0.2):
        for window in (0, 8):
            device = _native.DeviceMap(table, int(share * num_rows))
            fill(device, table, place)
            figures += figures_of(num_rows, share, window, num_ids, *measured(device, table, batches, window))
    return figures


def fill(device: _native.DeviceMap, table: _native.Table, place: Callable[[np.ndarray], np.ndarray]) -> None:
    """Every frame has a row, the most wanted ones: a warm cache is near that."""
    for first in range(0, device.frames, 50_000):
        rows = place(np.arange(first, min(first + 50_000, device.frames)))
        device.plan(table.batch(np.ascontiguousarray(rows, np.int64))).release()


def measured(device: Any, table: Any, batches: list[np.ndarray], window: int) -> tuple[Samples, float, float]:
    """Seconds of the parts of each step of the second half; unique rows and misses of one."""
    times: Samples = {"dedupe": [], "expect": [], "plan": [], "numbers": [], "release": []}
    numbers = np.empty(0, np.int64)
    coming: deque[tuple[Any, int]] = deque()
    unique, warm = 0, len(batches) // 2
    before = device.stats()

    def timed(part: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        times[part].append(time.perf_counter() - start)
        return result

    for ids in batches:
        batch = timed("dedupe", lambda ids=ids: table.batch(ids))
        number = timed("expect", lambda batch=batch: device.expect(batch)) if window else 0
        coming.append((batch, number))
        if len(coming) <= window:
            continue
        batch, number = coming.popleft()
        plan = timed("plan", lambda batch=batch, number=number: device.plan(batch, number))
        if numbers.size < plan.max_numbers(PIECE):
            numbers = np.empty(plan.max_numbers(PIECE), np.int64)
        timed("numbers", lambda plan=plan, numbers=numbers: plan.write_numbers(PIECE, numbers))
        if len(times["plan"]) % 2:
            plan.mark_dirty()
        device.arrived(plan.evict_ids)
        timed("release", plan.release)
        if len(times["plan"]) == warm - window:
            before = device.stats()
            unique = 0
        unique += len(batch)
    after = device.stats()
    taken = len(batches) - warm
    kept = {part: samples[-taken:] for part, samples in times.items() if samples}
    return kept, unique / taken, (after["misses"] - before["misses"]) / taken


def figures_of(
    num_rows: int, share: float, window: int, num_ids: int, times: Samples, unique: float, misses: float
) -> list[Figure]:
    where = f"{num_rows:,} rows, {share:.0%} cached" + (f", window of {window}" if window else "")
    parts = {part: statistics.median(samples) * 1e6 for part, samples in times.items()}
    rates = [
        num_ids / (a + b + c) / 1e6 for a, b, c in zip(times["dedupe"], times["plan"], times["numbers"], strict=True)
    ]
    note = f"{unique:,.0f} unique rows, {misses:,.0f} missed; us: "
    note += ", ".join(f"{part} {value:,.0f}" for part, value in parts.items())
    note += f"; all of it {num_ids / sum(parts.values()):.1f} M ids/s"
    return [
        Figure(
            f"ids planned and deduped, {where}",
            statistics.median(rates),
            "M/s",
            min(rates),
            max(rates),
            len(rates),
            note=note,
            at_least=30.0,
        )
    ]
