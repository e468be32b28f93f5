"""`bunkbed train` with a table beyond its RAM, by blocks and in uniform order, against all in RAM in uniform order.

    python -m benchmarks.cases.training.block_order gowalla
    python -m benchmarks.cases.training.block_order ml1m-bce --orders auto uniform --turns 5
    python -m benchmarks.cases.training.block_order gowalla --turns 0 --quality 20

    gowalla    default options, every pair trained, `ram="16MiB"` for 52 MiB of rows
    ml1m-bce   the recipe of that name, RAM for a quarter of the records' bytes and 1 MiB

The sides train one epoch each in turn, in one process; a ratio is of the epochs of one turn. The first epoch of each,
whose rows were never stored, is not timed. An epoch's time includes its batches, waits for reads and writes of evicted
rows, not the commit. Printed are medians with least and most, the rows read in an epoch, and the ratio to the device's
time for the bytes that were read and written, at its rates of large reads and writes, measured after each epoch on the
tables' files. `--quality` trains all
sides for as many epochs from the start, with RAM for everything, since bits do not depend on it, and ranks the test
items.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import bunkbed as bb
from benchmarks.cases.disk.access_paths import LARGE, PROBE_S, Device
from benchmarks.cases.training.quality import OVERHEAD_BYTES, load, record_bytes
from benchmarks.harness import common
from bunkbed.train.data.interactions import Dataset
from bunkbed.train.evaluate.evaluator import evaluate_run
from bunkbed.train.loop import Trainer
from bunkbed.train.output.events import EpochReport, Event
from bunkbed.train.recipes import RECIPES
from bunkbed.train.settings.config import TrainConfig

IN_RAM = "in RAM, uniform"
WANTED = {"gowalla": {"auto": 3.0, "uniform": 30.0}, "ml1m-bce": {"auto": 4.0, "uniform": 15.0}}
METRICS = {"gowalla": "recall@20", "ml1m-bce": "hr@10"}
MANY = 1_000_000  # epochs, commits and evaluations that no turn reaches


class Side:
    """One training that goes on an epoch at a time."""

    def __init__(self, config: TrainConfig, data: Dataset, run: bb.Run) -> None:
        config = replace(config, epochs=MANY, eval_every=MANY, commit_every=MANY)
        self._run = run
        self._trainer = Trainer(config, data, run)
        self.order = self._trainer.config.order
        self.seconds: list[float] = []
        self.missed: list[int] = []
        self.reads: list[int] = []
        self.moved: list[tuple[int, int]] = []  # bytes read and written
        self.device_s: list[float] = []  # the device's time for these; 0: not measured

    def epoch(self) -> None:
        """Train one epoch."""
        reports: list[EpochReport] = []
        before = self._counts()

        def on_event(event: Event) -> None:
            if isinstance(event, EpochReport):
                reports.append(event)
                self._trainer.request_stop()

        self._trainer.fit(on_event)
        self.seconds.append(reports[0].seconds)
        missed, read, written = (after - first for after, first in zip(self._counts(), before, strict=True))
        self.missed.append(missed)
        self.reads.append(reports[0].disk_reads or 0)
        self.moved.append((read, written))
        self.device_s.append(0.0)
        if read and any(file.stat().st_size >= LARGE for file in self._run.path.rglob("segment-*")):
            device = Device.measure(self._run.path, PROBE_S)
            self.device_s[-1] = read / device.read_bytes_per_s + written / device.write_bytes_per_s

    def _counts(self) -> list[int]:
        """Return rows missed, bytes read and bytes written so far."""
        every = [table.stats() for table in self._run.tables.values()]
        return [int(sum(one[name] for one in every)) for name in ("misses", "read_bytes", "written_bytes")]


@contextmanager
def sides(config: TrainConfig, data: Dataset, orders: list[str], folder: Path) -> Iterator[dict[str, Side]]:
    """The training in RAM, and one within the budget for each order."""
    roomy = replace(config, ram=4 * record_bytes(config, data) + 64 * common.MIB, order="uniform")
    configs = {IN_RAM: roomy, **{order: replace(config, order=order) for order in orders}}
    with ExitStack() as stack:
        yield {
            name: Side(each, data, stack.enter_context(bb.Run(folder / name.split(",")[0], ram=each.ram)))
            for name, each in configs.items()
        }


def measure(name: str, config: TrainConfig, data: Dataset, orders: list[str], folder: Path, turns: int) -> Any:
    """Train the sides in turn and print how they compare; the ratios and the decided orders."""
    with sides(config, data, orders, folder) as trained:
        for turn in range(turns + 1):
            for side in list(trained.values()) if turn % 2 else list(reversed(trained.values())):
                side.epoch()
        base = trained[IN_RAM].seconds[1:]
        figures: dict[str, Any] = {}
        for which, side in trained.items():
            seconds = side.seconds[1:]
            print(
                f"{which:>15}: {common.spread(seconds, 's an epoch', 1)}; "
                f"{statistics.median(side.missed[1:]):,.0f} rows missed, {statistics.median(side.reads[1:]):,.0f} reads"
            )
            if which == IN_RAM:
                continue
            ratios = [one / other for one, other in zip(seconds, base, strict=True)]
            wanted = WANTED[name].get(which)
            print(
                f"{'':>15}  {side.order}: {common.spread(ratios, 'x of all in RAM', 1)}"
                + (f", wanted: at most {wanted:g}" if wanted else "")
            )
            of_device = [one / other for one, other in zip(seconds, side.device_s[1:], strict=True) if other]
            if of_device:
                read, written = (statistics.median(column) / 1e9 for column in zip(*side.moved[1:], strict=True))
                time = common.spread(of_device, "x of the device's time", 1)
                print(f"{'':>15}  {time} for {read:.1f} GB read and {written:.1f} GB written")
            figures[which] = {
                "order": side.order,
                "ratios": ratios,
                "of device": of_device,
                "seconds": seconds,
                "missed": side.missed[1:],
            }
        figures["in RAM"] = {"seconds": base}
    return figures


def quality(name: str, config: TrainConfig, data: Dataset, orders: dict[str, str], folder: Path, epochs: int) -> Any:
    """Train uniform order and the decided orders for as many epochs, and print the metric of the test items."""
    metric = METRICS[name]
    roomy = replace(config, ram=4 * record_bytes(config, data) + 64 * common.MIB, epochs=epochs, commit_every=MANY)
    found = {}
    for which in dict.fromkeys(["uniform", *orders.values()]):
        each = replace(roomy, order=which, eval_every=MANY)
        with bb.Run(folder / f"quality-{which.replace(':', '-')}", ram=each.ram) as run:
            Trainer(each, data, run).fit()
            found[which] = evaluate_run(run, data, each).metrics[metric]
        print(
            f"{metric} after {epochs} epochs, {which}: {found[which]:.4f}, {found[which] / found['uniform']:.1%} of "
            "uniform order's",
            flush=True,
        )
    return found


def configured(name: str, data: Dataset, *, tiny: bool) -> TrainConfig:
    """The options of a case."""
    config = TrainConfig(valid="none", metric="recall@20", ram=16 << 20) if name == "gowalla" else RECIPES[name]
    if tiny:
        config = replace(config, dim=8, batch_size=256, negatives=2)
    if tiny or name != "gowalla":
        ram = record_bytes(config, data) // 4 + OVERHEAD_BYTES // (2 if tiny else 1)
        config = replace(config, valid="none", ram=ram)
    return config


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure one case."""
    options = common.parser(__doc__)
    options.add_argument("name", choices=sorted(WANTED))
    options.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the data sets")
    options.add_argument("--orders", nargs="+", default=["auto"], help="within the budget: auto, uniform, blocks:PxQ")
    options.add_argument("--turns", type=int, default=5, help="timed epochs of each side")
    options.add_argument(
        "--quality", type=int, default=0, metavar="EPOCHS", help="also compare the quality after these"
    )
    options.add_argument("--batch-size", type=int, help="pairs a step of every side, instead of the order's default")
    options.add_argument("--ram", type=int, help="bytes, instead of the case's")
    options.add_argument("--json", type=Path, help="also write the figures here")
    settings = options.parse_args(arguments)
    data = load(settings.name, settings.data, tiny=settings.tiny)
    config = configured(settings.name, data, tiny=settings.tiny)
    config = replace(config, ram=settings.ram) if settings.ram else config
    config = replace(config, batch_size=settings.batch_size) if settings.batch_size else config
    if settings.tiny:
        settings.turns = min(settings.turns, 2)
    records = record_bytes(config, data)
    print(common.machine(settings.dir.parent))
    print(
        f"{settings.name}: {len(data.train):,} pairs, {data.num_users:,} users, {data.num_items:,} items, "
        f"records {records:,} B, ram {config.ram:,} B"
    )
    with common.workspace(settings.dir, 48 * records * (2 + len(settings.orders))) as folder:
        figures = measure(settings.name, config, data, settings.orders, folder, settings.turns)
        if settings.quality:
            decided = {order: figures[order]["order"] for order in settings.orders}
            figures["quality"] = quality(settings.name, config, data, decided, folder, settings.quality)
    if settings.json:
        settings.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return figures


if __name__ == "__main__":
    main()
