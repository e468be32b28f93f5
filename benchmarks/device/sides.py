"""The sides of `experiment`: the forum's recipes, and a table with a device cache, stepping the same model.

The model is matrix factorisation: score = <user, product>, a logistic loss, one optimizer step a batch. A side takes
turns; each turn warms up, then times its steps as one, the device idle at both ends: a wait for the device after each
step would keep copies and kernels from overlapping.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bunkbed as bb
from benchmarks.harness import common
from bunkbed.torch import Embedding, Optimizer, lookahead
from bunkbed.torch.device.tier import DeviceTier
from bunkbed.torch.pendings import pending_of

LR = 1e-3
#: Steps until `lookahead` has pulled its whole window, two batches a step, and then some.
WARM_STEPS = 40
#: Batches `lookahead` pulls beyond the last step of a turn.
BEYOND = 36
#: Buckets of `Ids`.
_BUCKETS = 1 << 20

Batch = tuple[Any, Any]  # int64[B] users, int64[B] products, on the host
Draw = Callable[[int], Sequence[Batch]]


# ---- the device


class Device:
    """A torch device as the measurements need it: when it is done, and how much of its memory is taken."""

    def __init__(self, name: str = "") -> None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.torch = torch.device(name) if name else found or torch.device("cpu")
        self.is_accelerator = self.torch.type != "cpu"
        torch.zeros(1, device=self.torch)  # now, with torch's own words, where there is no such device

    @property
    def label(self) -> str:
        """Its name for people."""
        module = getattr(torch, self.torch.type, None)
        name = getattr(module, "get_device_name", None)
        return f"{self.torch} ({name(self.torch)})" if self.is_accelerator and name else str(self.torch)

    def synchronize(self) -> None:
        """Returns when everything issued is done."""
        if self.is_accelerator:
            torch.accelerator.synchronize(self.torch)

    def allocated(self, *, peak: bool = False) -> int | None:
        """Bytes torch's allocator has handed out, now or at most since `reset_peak`; None where it does not count."""
        if self.torch.type == "mps":
            return None if peak else int(torch.mps.current_allocated_memory())
        if self.is_accelerator:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                ask = torch.accelerator.max_memory_allocated if peak else torch.accelerator.memory_allocated
                return int(ask(self.torch))
        return None

    def reset_peak(self) -> None:
        """Makes `allocated` find a new peak."""
        if self.is_accelerator:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                torch.accelerator.reset_peak_memory_stats(self.torch)

    def free_bytes(self) -> int | None:
        """Return the free bytes of device memory; None where the driver does not report them."""
        if self.torch.type == "mps":
            return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
        if self.is_accelerator:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                return int(torch.accelerator.get_memory_info(self.torch)[0])
        return None


# ---- what is trained on


class Ids:
    """Draws ids of [0, num_rows): Zipf's law, scattered as `common.zipf` does it, or uniform for exponent 0.

    Cheap enough to draw afresh for every turn, so that no side finds rows that another one's turn brought: from a
    table of the inverse distribution, linear within each of 2^20 buckets, which a step cannot tell from the exact one.
    """

    def __init__(self, num_rows: int, exponent: float) -> None:
        self.num_rows = num_rows
        self.place = common.scatter(num_rows)
        cumulative = np.cumsum(np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent)
        self._ends = np.searchsorted(cumulative, np.linspace(0, cumulative[-1], _BUCKETS + 1)).astype(np.float64)

    def draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """int64[size]."""
        at = rng.random(size) * _BUCKETS
        bucket = at.astype(np.int64)
        low = self._ends[bucket]
        ranks = (low + (at - bucket) * (self._ends[bucket + 1] - low)).astype(np.int64)
        return self.place(np.minimum(ranks, self.num_rows - 1))

    def hottest(self, count: int) -> np.ndarray:
        """int64[count], the most likely ids, hottest first."""
        return self.place(np.arange(count, dtype=np.int64))


@dataclass(frozen=True)
class Data:
    """Batches of one law."""

    users: Ids
    products: Ids
    batch: int

    def drawer(self, seed: Sequence[int]) -> Draw:
        """A function that draws batches, each time others."""
        rng = np.random.default_rng(seed)

        def draw(count: int) -> list[Batch]:
            return [
                (
                    torch.from_numpy(self.users.draw(rng, self.batch)),
                    torch.from_numpy(self.products.draw(rng, self.batch)),
                )
                for _ in range(count)
            ]

        return draw


def unique_rows(batches: Sequence[Batch]) -> float:
    """Unique rows of a batch, users and products together, on average."""
    return float(np.mean([sum(np.unique(ids.numpy()).size for ids in batch) for batch in batches]))


class Loss:
    """The model behind the embeddings; labels stay on the device."""

    def __init__(self, device: Device, batch: int) -> None:
        self.labels = torch.randint(2, (batch,), generator=torch.Generator().manual_seed(0)).float().to(device.torch)

    def __call__(self, users: Any, products: Any) -> Any:
        scores = (users * products).sum(dim=1)
        return torch.nn.functional.binary_cross_entropy_with_logits(scores, self.labels)


# ---- turns


@dataclass
class Sample:
    """What one turn measured; counts are a step's."""

    step_s: float
    steps: int
    unique: float
    misses: float | None = None  # of unique rows, in the device cache
    loaded_bytes: float = 0.0  # of rows that the formula sends to the device
    link_bytes: float = 0.0  # over the link, ids and write-backs included; counted, or for the recipes computed
    stall_s: float | None = None  # waited for batches on their way
    read_records: float = 0.0  # from disk
    written_bytes: float = 0.0  # to disk
    device_bytes: int | None = None  # of device memory the side took at most
    cache_bytes: int = 0  # the cache's part of these
    asked_bytes: float = 0.0  # that the table asked the disk for in all the turn, and what the kernel read
    kernel_bytes: float = 0.0


@dataclass(frozen=True)
class Pace:
    """How long a turn may be."""

    warm: int = WARM_STEPS
    steps: int = 60
    seconds: float = 1.5  # of timed steps; warming may take twice as long

    @property
    def batches(self) -> int:
        """How many a turn may want."""
        return self.warm + self.steps + BEYOND


def timed(
    device: Device, loader: Iterator[Batch], step: Callable[[Batch], None], pace: Pace, begin: Callable[[], None]
) -> tuple[float, int]:
    """(seconds a step, steps); `begin` is called when the clock starts."""
    started = time.perf_counter()
    for taken in range(pace.warm):
        if taken >= 3 and time.perf_counter() - started > 2 * pace.seconds:
            break
        step(next(loader))
    device.synchronize()
    begin()
    started, taken = time.perf_counter(), 0
    while taken < pace.steps and (taken < 3 or time.perf_counter() - started < pace.seconds):
        step(next(loader))
        taken += 1
    device.synchronize()
    return (time.perf_counter() - started) / taken, taken


def weights(rows: int, dim: int, device: Any) -> Any:
    """float32[rows, dim] of N(0, 0.1): a few megabytes drawn and repeated, as drawing gigabytes takes a while."""
    generator = torch.Generator().manual_seed(rows)
    piece = torch.randn(min(rows, 16_384), dim, generator=generator).mul_(0.1).to(device)
    found = torch.empty(rows, dim, device=device)
    for start in range(0, rows, len(piece)):
        found[start : start + len(piece)] = piece[: min(len(piece), rows - start)]
    return found


class Recipe:
    """`torch.nn.Embedding` for users and products, on `home`; the loss on the device.

    Args:
        sparse: sparse gradients and SparseAdam; else dense ones and Adam.
        home: where the tables lie; rows are copied where that is not the device.
    """

    def __init__(self, device: Device, home: Any, data: Data, dim: int, *, sparse: bool) -> None:
        self.device, self.home, self.data = device, torch.device(home), data
        gc.collect()
        before = device.allocated()
        self.tables = [
            torch.nn.Embedding(rows, dim, sparse=sparse, _weight=weights(rows, dim, home))
            for rows in (data.users.num_rows, data.products.num_rows)
        ]
        self.dim = dim
        kind = torch.optim.SparseAdam if sparse else torch.optim.Adam
        self.optimizer = kind([table.weight for table in self.tables], lr=LR)
        self.loss = Loss(device, data.batch)
        self.held: Any = None if before is None else (device.allocated() or 0) - before
        self.most: int | None = None  # bytes of device memory, in any turn
        if not device.is_accelerator:  # no counter: weights and both averages
            self.most = sum(3 * table.weight.nbytes for table in self.tables)

    def step(self, batch: Batch) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        rows = [table(ids.to(self.home)) for table, ids in zip(self.tables, batch, strict=True)]
        users, products = (found.to(self.device.torch) for found in rows)
        self.loss(users, products).backward()
        self.optimizer.step()

    def turn(self, draw: Draw, pace: Pace) -> Sample:
        """Timed steps."""
        batches = draw(pace.batches)
        self.device.reset_peak()
        at_start: Any = self.device.allocated()
        step_s, steps = timed(self.device, iter(batches), self.step, pace, lambda: None)
        ids = 2 * self.data.batch
        is_resident = self.home == self.device.torch
        # Copied, repeated rows and all: up, and their gradients down.
        copied = 0 if is_resident else ids * self.dim * 4
        sample = Sample(step_s, steps, unique_rows(batches[:8]), misses=0.0 if is_resident else None)
        if self.device.is_accelerator:
            sample.link_bytes = float(ids * 8 if is_resident else 2 * copied)
        sample.loaded_bytes = float(copied)
        peak: Any = self.device.allocated(peak=True)
        if None not in (peak, self.held, at_start):  # the optimizer's state is made in the first turn
            self.most = max(self.most or 0, self.held + peak - at_start)
        sample.device_bytes = self.most
        return sample


# ---- ours


@dataclass
class Tables:
    """The users' and the products' table of one dim, fully written; closed by `close`."""

    dim: int
    users: Any
    products: Any
    place: str  # "RAM" or "SSD"
    folders: list[Path] = field(default_factory=list)

    @property
    def both(self) -> list[Any]:
        return [self.users, self.products]

    @property
    def nbytes(self) -> int:
        """Of all records."""
        return sum(table.nbytes for table in self.both)

    @property
    def record_bytes(self) -> int:
        return int(self.users.record_bytes)

    def close(self) -> None:
        for table in self.both:
            table.close(commit=False)


def make_tables(sizes: tuple[int, int], dim: int, folder: Path | None) -> Tables:
    """Make tables with every row stored; in a folder: committed and reopened, with RAM for a tenth of the rows."""
    made, folders = [], []
    for name, rows in zip(("users", "products"), sizes, strict=True):
        path = None if folder is None else folder / f"{name}-{dim}"
        whole = rows * dim * 12
        table = bb.create(
            path, dim=dim, num_rows=rows, optimizer=bb.Adam(lr=LR), init=bb.Normal(0.1), ram=whole * 5 // 4 + (64 << 20)
        )
        common.fill(table, chunk=32_768)
        if path is not None:
            table.close()
            table = bb.open(path, ram=whole // 10 + (16 << 20))
            folders.append(path)
        made.append(table)
    return Tables(dim, made[0], made[1], "RAM" if folder is None else "SSD", folders)


class Model(torch.nn.Module):  # type: ignore[misc]
    """The two layers over tables."""

    def __init__(self, device: Device, tables: Tables, caches: Sequence[int]) -> None:
        super().__init__()
        self.user, self.product = (
            Embedding(table.num_rows, table.dim, table=table, device=device.torch, device_cache=cache)
            for table, cache in zip(tables.both, caches, strict=True)
        )


class Ours:
    """Tables with device caches of a share of their records' bytes.

    Caches of other sizes take turns on the same tables: a turn attaches a cache, fills it with the hottest rows, steps
    with `lookahead` and without it, and detaches it. The turn fills the cache by training these rows, because in long
    training nearly every evicted row is dirty; a cache that holds all rows evicts none and is filled by lookups.
    """

    def __init__(
        self, device: Device, tables: Tables, data: Data, share: float, modes: Sequence[bool] = (False, True)
    ) -> None:
        self.device, self.tables, self.data, self.modes = device, tables, data, modes
        self.frames = [int(share * table.num_rows) for table in tables.both]
        self.caches = [frames * table.record_bytes for frames, table in zip(self.frames, tables.both, strict=True)]
        self.loss = Loss(device, data.batch)

    @property
    def why_not(self) -> str:
        """Why the cache cannot work, or nothing: a batch's rows must fit."""
        for ids, frames in zip((self.data.users, self.data.products), self.frames, strict=True):
            wanted = max(np.unique(ids.draw(np.random.default_rng(i), self.data.batch)).size for i in range(4))
            if 0 < frames < wanted * 1.02:
                return f"a cache of {frames:,} rows does not hold a batch's {wanted:,}"
        return ""

    def turn(self, draw: Draw, pace: Pace, *, reverse: bool = False) -> dict[bool, Sample]:
        """Timed steps without and with lookahead; with `reverse` in the other order."""
        gc.collect()
        before = self.device.allocated()
        model = Model(self.device, self.tables, self.caches)
        optimizer = Optimizer(model)
        try:
            self._fill(model, optimizer)
            modes = list(self.modes)[:: -1 if reverse else 1]
            return {mode: self._steps(model, optimizer, draw(pace.batches), pace, mode, before) for mode in modes}
        finally:
            # Write the rows back before the layers are deleted: afterwards no object could do so.
            for table in self.tables.both:
                tier = pending_of(table).tier
                if isinstance(tier, DeviceTier):
                    tier.leave()
            del model, optimizer
            gc.collect()

    def _fill(self, model: Any, optimizer: Any) -> None:
        everything = [model.user, model.product]
        for layer, ids, frames in zip(everything, (self.data.users, self.data.products), self.frames, strict=True):
            if frames == 0:
                continue
            rows = np.sort(ids.hottest(frames))  # neighbours on disk are read together
            for part in np.array_split(rows, -(-frames // 65_536)):
                wanted = torch.from_numpy(part)
                optimizer.zero_grad()
                found = layer(wanted).sum()
                if frames < ids.num_rows:
                    found.backward()
                    optimizer.step()
        optimizer.zero_grad()

    def _steps(
        self, model: Any, optimizer: Any, batches: Sequence[Batch], pace: Pace, ahead: bool, before: int | None
    ) -> Sample:
        start: list[dict[str, float]] = []
        kernel = common.proc_io()["read_bytes"] if self.tables.place == "SSD" else 0
        opened = self._counts()

        def begin() -> None:
            self.device.reset_peak()
            start.append(self._counts())

        def step(batch: Batch) -> None:
            optimizer.zero_grad()
            self.loss(model.user(batch[0]), model.product(batch[1])).backward()
            optimizer.step()

        loader: Any = itertools.cycle(batches)
        if ahead:
            loader = lookahead(loader, model, ids=lambda batch: {model.user: batch[0], model.product: batch[1]})
        loader = iter(loader)
        try:
            step_s, steps = timed(self.device, loader, step, pace, begin)
            counts = self._counts()
        finally:
            if ahead:
                loader.close()
        done = {name: value / steps for name, value in common.delta(counts, start[0]).items()}
        unique = unique_rows(batches[:8])
        misses = done["device_misses"] if self.caches[0] else unique
        row = self.tables.record_bytes if self.caches[0] else self.tables.dim * 4
        peak = self.device.allocated(peak=True)
        held = int(counts["device_bytes"])
        sample = Sample(
            step_s,
            steps,
            unique,
            misses=misses,
            loaded_bytes=misses * row,
            link_bytes=done["device_bytes_up"] + done["device_bytes_down"],
            stall_s=done["device_stall_s"] if ahead else None,
            read_records=done["read_records"],
            written_bytes=done["written_bytes"],
            device_bytes=held if peak is None or before is None else peak - before,
            cache_bytes=held,
        )
        if kernel:
            sample.kernel_bytes = common.proc_io()["read_bytes"] - kernel
            sample.asked_bytes = self._counts()["read_bytes"] - opened["read_bytes"]
        return sample

    def _counts(self) -> dict[str, float]:
        """What both tables count, added up; what one without a cache does not count is 0."""
        names = ("device_misses", "device_bytes", "device_bytes_up", "device_bytes_down", "device_stall_s")
        names += ("read_records", "read_bytes", "written_bytes")
        found = [table.stats() for table in self.tables.both]
        return {name: float(sum(stats.get(name, 0) for stats in found)) for name in names}
