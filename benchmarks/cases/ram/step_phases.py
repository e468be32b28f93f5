"""Where the time of an Adam step in RAM goes, and how near each phase is to what memory gives.

The resident cases' table and batches. A step is taken apart at the calls `bunkbed.torch` makes: dedupe the ids, gather
their rows, sum the gradients of equal ids, update the rows. Its rest is what the whole step through the torch layer
takes beyond them: Python, autograd, checks. Whole steps and phases alternate on one table, with one thread and with
two.

Each phase is compared with a bound, measured in the same run: the simplest loop in C++ that prefetches and touches the
same memory, without a directory, arithmetic or bookkeeping.

- dedupe: one read of 16 bytes for each id, in a table of the unique ids twice over, as a hash table would be;
- gather: the rows' weights copied from records that lie apart as in frames;
- sums: the gradients read in the order of their rows, nothing written;
- update: whole records changed where they lie, gradients left out.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import bunkbed as bb
from benchmarks.cases.ram import resident
from benchmarks.harness.figures import Figure, Settings
from benchmarks.peers import ours
from bunkbed import _native
from bunkbed.torch import Embedding, Optimizer

PHASES = ("dedupe", "gather", "sums", "update")
Samples = dict[str, list[float]]


def step_phases(settings: Settings) -> list[Figure]:
    """Milliseconds of each phase with one thread and with two, and its bound."""
    work = resident.workload(settings)
    print(f"adam: {work}")
    before = bb.get_num_threads(), torch.get_num_threads()
    times: dict[int, Samples] = {}
    bounds: dict[int, Samples] = {}
    try:
        on_each_count(times, functools.partial(measure, work, *trained(work)))
        on_each_count(bounds, functools.partial(measure_bounds, work))  # the table's memory is theirs now
    finally:
        bb.set_num_threads(before[0])
        torch.set_num_threads(before[1])
    figures = []
    for threads, samples in times.items():
        for name, seconds in samples.items():
            bound = bounds[threads].get(name, [])
            figures.append(figure(f"{name}, {threads} thread{'s' * (threads > 1)}", seconds, bound))
    return figures


def trained(work: resident.Workload) -> tuple[Any, Any]:
    """A layer on a stored table, and its optimizer."""
    layer = Embedding(work.num_rows, work.dim, table=ours.stored_table("adam", work.num_rows, work.dim))
    return layer, Optimizer(layer)


def on_each_count(into: dict[int, Samples], measured: Callable[[], Samples]) -> None:
    """What is measured with one thread and with two."""
    for threads in (1, 2):
        bb.set_num_threads(threads)
        torch.set_num_threads(threads)
        into[threads] = measured()


def measure(work: resident.Workload, layer: Any, optimizer: Any) -> Samples:
    """Seconds of every phase, of whole steps, and of what these take beyond the phases of the step before."""
    samples: Samples = {name: [] for name in (*PHASES, "rest", "whole step")}
    grads = work.grad.numpy()
    warmup, steps = len(work.batches), work.rounds * work.steps
    for index in range(warmup + steps):
        # Not the same batch twice in a row: its rows would still be in the processor's cache.
        phases = step_apart(layer.table, work.batches[2 * index % len(work.batches)].numpy(), grads)
        ids = work.batches[(2 * index + 1) % len(work.batches)]
        start = time.perf_counter()
        optimizer.zero_grad()
        layer(ids).backward(work.grad)
        optimizer.step()
        whole = time.perf_counter() - start
        if index >= warmup:
            for name, seconds in zip(samples, [*phases, whole - sum(phases), whole], strict=True):
                samples[name].append(seconds)
    return samples


def step_apart(table: Any, ids: np.ndarray, grads: np.ndarray) -> list[float]:
    """One step on the table itself; the seconds of each phase."""
    clock = time.perf_counter
    times = [clock()]
    batch = table.batch(ids)
    times.append(clock())
    rows = table.lookup_batch(batch, ids.size)
    times.append(clock())
    sums, _norm = batch.sum(grads)
    times.append(clock())
    table.update_batch(batch, sums)
    times.append(clock())
    del rows
    return [end - start for start, end in itertools.pairwise(times)]


def measure_bounds(work: resident.Workload) -> Samples:
    """Seconds of the simplest loops over the same memory, one phase after another as in a step."""
    weight_bytes, record_bytes = work.dim * 4, work.dim * 12
    batches = [ids.numpy() for ids in work.batches]
    slots = 2 * max(np.unique(ids).size for ids in batches)
    frames = _native.RowProbe(work.num_rows, record_bytes)
    grads = _native.RowProbe(len(work.grad), weight_bytes)
    hashes = _native.RowProbe(slots, 16)
    plans = [(ids, hashed(ids, slots), grouped(ids), first_seen(ids)) for ids in batches]
    samples: Samples = {name: [] for name in PHASES}
    warmup, steps = len(batches), work.rounds * work.steps
    for index in range(warmup + steps):
        ids, places, order, unique = plans[index % len(plans)]
        seconds = (
            hashes.run(places, 16, "read"),
            frames.run(ids, weight_bytes, "copy"),
            grads.run(order, weight_bytes, "read"),
            frames.run(unique, record_bytes, "change"),
        )
        if index >= warmup:
            for name, value in zip(PHASES, seconds, strict=True):
                samples[name].append(value)
    return samples


def hashed(ids: np.ndarray, slots: int) -> np.ndarray:
    """A place for each id, int64[N], below `slots`."""
    mixed: np.ndarray = (ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)) % np.uint64(slots)
    return mixed.astype(np.int64)


def first_seen(ids: np.ndarray) -> np.ndarray:
    """Each id once, int64[U], in the order they come first: the order in which rows are updated."""
    _, firsts = np.unique(ids, return_index=True)
    found: np.ndarray = ids[np.sort(firsts)]
    return found


def grouped(ids: np.ndarray) -> np.ndarray:
    """Places in the batch, int64[N], those of one id together, in the order ids come first: as sums read them."""
    _, firsts, inverse = np.unique(ids, return_index=True, return_inverse=True)
    places: np.ndarray = np.argsort(firsts[inverse], kind="stable")
    return places


def figure(name: str, seconds: Sequence[float], bound: Sequence[float]) -> Figure:
    """Milliseconds, and how many times the bound they are."""
    values = [value * 1e3 for value in seconds]
    middle = statistics.median(values)
    note = ""
    if bound:
        least = statistics.median(bound) * 1e3
        note = f"bound {least:.2f} ms, {middle / least:.2f} times it"
    return Figure(name, middle, "ms", min(values), max(values), len(values), note=note)
