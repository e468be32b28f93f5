"""The same training twice, with a small RAM budget and with everything in RAM, and the cost of the budget.

1. Plant preferences and generate interactions (`bunkbed.train.demo.data`).
2. Train within the budget, then with RAM for everything: same data, same seed, same threads, and the order of pairs
   that `bunkbed train` chooses for the budget.
3. Compare every loss and every row, bit for bit. Time only steps after the first epoch, because first touches need no
   read and would make the budget look faster.
4. Rank held-out items and compare with the planted optimum.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bunkbed.core.budget import format_bytes, parse_bytes
from bunkbed.train.demo.data import Planted, plant
from bunkbed.train.output.events import EpochReport, Event, StepReport
from bunkbed.train.settings.config import TrainConfig

if TYPE_CHECKING:
    pass

# The metric of quality. The quality of a random ranking of 100 items counts as 0 % recovered.
METRIC = "ndcg@10"


@dataclass(frozen=True)
class DemoSize:
    """Size of the generated data and of the training."""

    num_users: int = 300_000
    num_items: int = 10_000
    num_pairs: int = 1_400_000
    num_tests: int = 10_000
    dim: int = 64
    epochs: int = 3
    batch_size: int = 4_096


@dataclass(frozen=True)
class Side:
    """Result of one of the two trainings.

    Attributes:
        ram_bytes: the budget.
        order: the order of the pairs.
        step_seconds: wall time a step, in the median epoch after the first.
        losses: loss of every step.
        hit_rate: rows found in RAM / unique rows, after the first epoch.
        read_bytes: bytes read from disk.
        written_bytes: bytes written to disk.
        reports: all step reports.
        metrics: metrics of the held-out items.
    """

    ram_bytes: int
    order: str
    step_seconds: float
    losses: list[float]
    hit_rate: float
    read_bytes: int
    written_bytes: int
    metrics: dict[str, float]
    reports: list[StepReport] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class DemoResult:
    """Result of a demo.

    Attributes:
        table_bytes: bytes of the stored rows with their optimizer state.
        stored_rows: stored rows of all tables.
        budget: the training within the budget.
        in_ram: the training with everything in RAM.
        losses_identical: every loss has the same bits in both.
        rows_identical: every row has the same bits in both.
        optimum: metrics of the planted optimum.
        popularity: metrics of ranking by popularity.
        chance: metrics of ranking at random.
        seconds: wall time of the demo.
    """

    table_bytes: int
    stored_rows: int
    budget: Side
    in_ram: Side
    losses_identical: bool
    rows_identical: bool
    optimum: dict[str, float]
    popularity: dict[str, float]
    chance: dict[str, float]
    seconds: float

    @property
    def step_ratio(self) -> float:
        """Time per step within the budget / all in RAM."""
        return self.budget.step_seconds / self.in_ram.step_seconds

    @property
    def recovered(self) -> float:
        """Share of the way from a random ranking to the planted optimum, in NDCG@10."""
        chance = self.chance[METRIC]
        return (self.budget.metrics[METRIC] - chance) / (self.optimum[METRIC] - chance)

    def headline(self) -> str:
        """Summary of the result in one line."""
        identical = "identical" if self.losses_identical and self.rows_identical else "DIFFERENT"
        return (
            f"table {format_bytes(self.table_bytes)}, RAM budget {format_bytes(self.budget.ram_bytes)}: "
            f"{self.step_ratio:.2f}x the time per step of all in RAM, losses {identical}, "
            f"{self.recovered:.0%} of the planted optimum recovered"
        )


class Watcher(Protocol):
    """Protocol of a display of a demo's progress."""

    def begin(self, what: str) -> Callable[[Event], None]:
        """Start a phase; return the function that gets the phase's events."""


def run_demo(folder: Path, *, ram: float | str, seed: int, size: DemoSize, watcher: Watcher) -> DemoResult:
    """Run the demo; tables and metrics stay in `folder`.

    Args:
        folder: an existing folder on the disk to be measured, for two runs.
        ram: the RAM budget of all tables in the first training.
        seed: of the data and of both trainings.
        size: size of data and training.
        watcher: shows the progress.

    Raises:
        MemoryError: the budget is too small for the tables; the message says how much is needed.
    """
    began = time.perf_counter()
    watcher.begin("planting preferences and generating interactions")
    planted = plant(
        num_users=size.num_users,
        num_items=size.num_items,
        num_pairs=size.num_pairs,
        num_tests=size.num_tests,
        seed=seed,
    )
    budget_bytes = parse_bytes(ram)
    full_bytes = _ram_for_everything(size)
    sides: list[Side] = []
    for name, num_bytes in (("budget", budget_bytes), ("in-ram", full_bytes)):
        config = TrainConfig(
            model="mf",
            loss="bpr",
            dim=size.dim,
            ram=num_bytes,
            order=sides[0].order if sides else "auto",
            lr=5e-3,
            l2=1e-2,
            lr_decay=0.6,
            epochs=size.epochs,
            batch_size=size.batch_size,
            negatives=1,
            valid="none",
            metric=METRIC,
            ks="10",
            commit_every=size.epochs,
            seed=seed,
        )
        words = "everything in RAM" if sides else f"a RAM budget of {format_bytes(num_bytes)}"
        sides.append(_train(folder / name, config, planted, watcher.begin(f"training with {words}")))
    watcher.begin("comparing every row")
    rows_identical, stored_rows = _compare_rows(folder / "budget", folder / "in-ram")
    record_bytes = 3 * 4 * size.dim  # weights and Adam's two slots
    return DemoResult(
        table_bytes=stored_rows * record_bytes,
        stored_rows=stored_rows,
        budget=sides[0],
        in_ram=sides[1],
        losses_identical=_same_bits(sides[0].losses, sides[1].losses),
        rows_identical=rows_identical,
        optimum=planted.optimum,
        popularity=planted.popularity,
        chance=planted.chance,
        seconds=time.perf_counter() - began,
    )


def _ram_for_everything(size: DemoSize) -> int:
    """Return a budget in which no row is ever evicted: more than enough for records, directory and buffers."""
    return 2 * (size.num_users + size.num_items) * (3 * 4 * size.dim + 64) + (64 << 20)


def _train(folder: Path, config: TrainConfig, planted: Planted, tell: Callable[[Event], None]) -> Side:
    from bunkbed.run.run import Run
    from bunkbed.train.evaluate.evaluator import evaluate_run
    from bunkbed.train.loop import Trainer

    reports: list[StepReport] = []
    epochs: list[EpochReport] = []

    def on_event(event: Event) -> None:
        if isinstance(event, StepReport):
            reports.append(event)
        elif isinstance(event, EpochReport):
            epochs.append(event)
        tell(event)

    with Run(folder, ram=config.ram) as run:
        trainer = Trainer(config, planted.data, run)
        trainer.fit(on_event)
        result = evaluate_run(run, planted.data, trainer.config)
    # From the end of one epoch to the end of the next, with waits for reads, sampling and all other work.
    ends = [0.0, *(epoch.time_s for epoch in epochs)]
    seconds = [end - start for start, end in pairwise(ends)]
    if len(epochs) > 1:
        epochs_timed, seconds = epochs[1:], seconds[1:]
    else:
        epochs_timed = epochs
    return Side(
        ram_bytes=parse_bytes(config.ram),
        order=trainer.config.order,
        step_seconds=median(seconds) * config.epochs / len(trainer.losses),
        losses=list(trainer.losses),
        hit_rate=mean(epoch.unique_hit_rate for epoch in epochs_timed),
        read_bytes=sum(epoch.disk_read_bytes for epoch in epochs),
        written_bytes=sum(epoch.disk_written_bytes for epoch in epochs),
        metrics=result.metrics,
        reports=reports,
    )


def _compare_rows(first: Path, second: Path) -> tuple[bool, int]:
    """Return whether two committed runs have the same bits in every row, and the stored rows of the first."""
    from bunkbed.run.run import Run

    with Run(first, ram="64MiB", mode="r") as one, Run(second, ram="64MiB", mode="r") as other:
        names = one.table_names
        stored = sum(len(one.table(name)) for name in names)
        same = names == other.table_names and all(_same_table(one.table(name), other.table(name)) for name in names)
    return same and stored > 0, stored


def _same_table(one: Any, other: Any) -> bool:
    if len(one) != len(other) or one.num_rows != other.num_rows or one.step != other.step:
        return False
    # One table is held in memory, as in the training with everything in RAM. A scan reads the log in order; lookups
    # would read each row separately.
    expected = np.zeros((one.num_rows, one.dim), np.float32)
    is_stored = np.zeros(one.num_rows, bool)
    for ids, values in one.scan():
        expected[ids], is_stored[ids] = values, True
    for ids, values in other.scan():
        same = np.array_equal(values.view(np.uint32), expected[ids].view(np.uint32))
        if not same or not is_stored[ids].all():
            return False
    return True


def _same_bits(one: list[float], other: list[float]) -> bool:
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return len(a) == len(b) and len(a) > 0 and bool(np.array_equal(a.view(np.uint64), b.view(np.uint64)))
