"""The forum's experiment on whatever device is here: ``python -m benchmarks.device.experiment``.

Collaborative filtering, users x products, by matrix factorisation (see `sides`), dim 64 and 256:

(a)  `nn.Embedding(sparse=True)` resident on the device, SparseAdam;
(b)  the same on the CPU, the loss on the device: rows are copied up, gradients down;
(c)  on the CPU with dense Adam, a few steps;
(d)  ours: device caches of 100 %, 20 %, 5 %, 1 % of the records and 0 (rows trained in RAM), with `lookahead` and
     without, the table in RAM and on the disk of `--dir` (fully written, committed, reopened, RAM for a tenth of it).

1. Rates of the device, its link and the disk are measured; the least time of a step follows (`Limits.formula`).
2. A small case is trained with every size of cache; rows must have the same bits.
3. A cell is one Zipf exponent and one place of the table. Its sides, of both dims, take turns in rounds in rotating
   order, each on new batches. A turn warms up, then times its steps as one, the device idle at both ends.
   Figures are medians over rounds, ratios are taken within a round.
4. The most important cells come first. What no time is left for is skipped, and said to be: the command keeps
   `--minutes` by itself.

By default 1 % of the rows of either table hold every batch. Needs torch, NumPy and the built extension; no network.
From a source checkout with the extension in src/bunkbed: ``python benchmarks/device/experiment.py``, in any folder.
Writes device.json into `--out` again after each cell, and device.png where matplotlib is installed. A side that fails
is said, the others are measured, and the command ends with an error; so it does where rows differ. On a device of type
cpu everything runs too, and the figures say nothing of an accelerator.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a script: the checkout is not on the path; an installed package goes before its src
    sys.path[:1] = [str(Path(__file__).resolve().parents[2])]
    sys.path.append(str(Path(__file__).resolve().parents[2] / "src"))

from benchmarks.device import check, limits, report
from benchmarks.device.report import Key, Results
from benchmarks.device.sides import Data, Device, Draw, Ids, Ours, Pace, Recipe, Sample, Tables, make_tables
from benchmarks.harness import common, turns
from benchmarks.harness.figures import Figure, Settings

#: Is given everything found so far.
Save = Callable[[Results], Any]
#: One side's turn: what it measured, under the names it is reported by.
Turn = Callable[[Draw, Pace, bool], dict[Key, Sample]]
#: Rows of each table for each id of a batch: a cache of 1 % of the rows then holds a batch.
USERS, PRODUCTS = 144, 112


@dataclass(frozen=True)
class Plan:
    """Sizes of a run."""

    seconds: float
    sizes: tuple[int, int]  # users, products
    batch: int
    dims: tuple[int, ...] = (64, 256)
    exponents: tuple[float, ...] = (1.05, 0.8, 1.2)  # the first is the one that most is measured with
    shares: tuple[float, ...] = (1.0, 0.2, 0.05, 0.01, 0.0)
    rounds: int = 5
    pace: Pace = field(default_factory=Pace)
    probe_bytes: int = 128 << 20
    probe_s: float = 1.0
    seed: int = 0

    @property
    def rows(self) -> int:
        return sum(self.sizes)


def make_plan(
    settings: Settings, device: Device, *, minutes: float | None = None, batch: int | None = None, **changes: Any
) -> Plan:
    """Sizes by the size of the suite and by what memory there is."""
    batch = batch or settings.pick(32, 1024, 8192 if device.is_accelerator else 1024)
    sizes: dict[str, Any] = settings.pick(
        {
            "dims": (8, 16),
            "exponents": (1.05,),
            "rounds": 1,
            "pace": Pace(warm=3, steps=3, seconds=0.05),
            "probe_bytes": 1 << 20,
            "probe_s": 0.05,
        },
        {"exponents": (1.05,), "rounds": 2, "pace": Pace(steps=20, seconds=0.3), "probe_s": 0.5},
        {},
    )
    seconds = 60 * (minutes or settings.pick(4.0, 1.0, 7.0))
    plan = Plan(seconds, (USERS * batch, PRODUCTS * batch), batch, seed=settings.seed, **{**sizes, **changes})
    # RAM: both dims' tables and recipes, and the case with 4x the rows. Device: two recipes and one whole cache.
    row = 12 * sum(plan.dims)
    host = row + max(row, 12 * min(plan.dims) * 9)
    most = [0.6 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / host]
    free = device.free_bytes()
    if free is not None:
        most.append(0.8 * free / (row + 12 * max(plan.dims)))
    share = min(1.0, min(most) / plan.rows)
    if share < 1:
        print(f"fewer rows than {plan.rows:,}: memory is short")
        users, products = (max(plan.batch, int(size * share)) for size in plan.sizes)
        plan = Plan(**{**vars(plan), "sizes": (users, products)})
    return plan


class Bench:
    """A run: tables that are kept for several cells, and what was measured."""

    def __init__(self, device: Device, plan: Plan, folder: Path, save: Save | None = None) -> None:
        self.device, self.plan, self.folder = device, plan, folder
        self.save = save or (lambda results: None)
        self.ends = time.perf_counter() + plan.seconds
        self.results = Results()
        self.limits = limits.Limits()
        self._tables: dict[tuple[int, str, int], Tables] = {}
        self._fill_rate = 0.0  # bytes a second, once known
        self._took: dict[str, float] = {}  # seconds of each side's longest turn
        self._failed: set[str] = set()  # sides that get no turn any more

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.ends - time.perf_counter()

    def run(self) -> None:
        """Everything, in order of importance."""
        plan, device = self.plan, self.device
        self.limits = limits.measure(device, plan.dims, plan.batch, num_bytes=plan.probe_bytes)
        print("\n".join(self.limits.lines()), flush=True)
        try:
            self.results.checked = check.check(device, plan.seed)
        except Exception as error:  # the recipes may run all the same
            self.results.failures.append(f"the check: {first_line(error)}")
            print(self.results.failures[-1], flush=True)
        else:
            print(report.checked_line(self.results.checked), flush=True)
        main = plan.exponents[0]
        cells: list[tuple[float, str, Callable[[float], None]]] = [(3.0, "RAM", lambda s: self.cell(main, "RAM", s))]
        cells.append((1.0, "four times the rows", lambda s: self.growth(main, s)))
        cells.append((2.5, "SSD", lambda s: self.cell(main, "SSD", s)))
        for place in ("RAM", "SSD"):
            for exponent in plan.exponents[1:]:
                cells.append(
                    (1.5, f"{place}, Zipf {exponent:g}", lambda s, e=exponent, p=place: self.cell(e, p, s))  # type: ignore[misc]
                )
        self.dense()
        self.save(self.results)
        for index, (weight, name, cell) in enumerate(cells):
            share = self.left * weight / sum(weight for weight, *_ in cells[index:])
            if self.left <= 0:
                self.results.skip(f"cell {name}: no time left")
                continue
            try:
                cell(share)
            except Exception as error:  # what was measured before is kept
                self.results.failures.append(f"cell {name}: {first_line(error)}")
            self.save(self.results)

    # ---- cells

    def cell(self, exponent: float, place: str, seconds: float) -> None:
        """All sides of both dims at one exponent, the tables at one place."""
        plan, device, ends = self.plan, self.device, time.perf_counter() + seconds
        data = self._data(plan.sizes, exponent)
        sides: dict[str, Turn] = {}
        for dim in plan.dims:
            homes = [("a", device.torch)] + ([("b", torch.device("cpu"))] if place == "RAM" else [])
            for name, home in homes:
                self._add_recipe(sides, Key(name, dim, exponent, place), data, home)
            tables = self._open(dim, place, plan.sizes)
            if tables is None:
                continue
            for share in plan.shares:
                self._add_ours(sides, Key("d", dim, exponent, place, share), Ours(device, tables, data, share))
        self._rounds(sides, data, ends)
        report.show(self.results, self.device, exponent, place, plan.batch)

    def growth(self, exponent: float, seconds: float) -> None:
        """Compare four times the rows with the rows of the other cells, at the least dim."""
        plan, device, ends = self.plan, self.device, time.perf_counter() + seconds
        dim, sides = min(plan.dims), dict[str, Turn]()
        datas = {times: self._data((times * plan.sizes[0], times * plan.sizes[1]), exponent) for times in (1, 4)}
        for times, data in datas.items():
            sizes = (data.users.num_rows, data.products.num_rows)
            for name, home in (("a", device.torch), ("b", torch.device("cpu"))):
                self._add_recipe(sides, Key(name, dim, exponent, "growth", times=times), data, home)
            tables = self._open(dim, "RAM", sizes)
            if tables is None:
                continue
            for share in [0.05] if times == 1 else [0.05, 0.0125]:
                key = Key("d", dim, exponent, "growth", share, True, times)
                self._add_ours(sides, key, Ours(device, tables, data, share, (True,)))
        self._rounds(sides, datas[1], ends, {name: datas[4] for name in sides if "4x" in name})
        kept = self._tables.pop((dim, "RAM", 4 * plan.sizes[0]), None)
        if kept is not None:
            kept.close()
        report.show(self.results, self.device, exponent, "growth", plan.batch)

    def dense(self) -> None:
        """(c): a few steps, alone, as they take most of the memory there is."""
        plan = self.plan
        for dim in plan.dims:
            key = Key("c", dim, plan.exponents[0], "RAM")
            data = self._data(plan.sizes, plan.exponents[0])
            try:
                side = Recipe(self.device, "cpu", data, dim, sparse=False)
                sample = side.turn(data.drawer((plan.seed, dim)), Pace(warm=1, steps=3, seconds=0.02 * plan.seconds))
            except (RuntimeError, MemoryError) as error:
                self.results.skip(f"{key}: {first_line(error)}")
            else:
                self.results.add(key, 0, sample, None)
            gc.collect()

    # ---- sides

    def _data(self, sizes: tuple[int, int], exponent: float) -> Data:
        return Data(Ids(sizes[0], exponent), Ids(sizes[1], exponent), self.plan.batch)

    def _add_recipe(self, sides: dict[str, Turn], key: Key, data: Data, home: Any) -> None:
        try:
            side = Recipe(self.device, home, data, key.dim, sparse=True)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            self.results.skip(f"{key}: {first_line(error)}")
            return
        sides[str(key)] = lambda draw, pace, _: {key: side.turn(draw, pace)}

    def _add_ours(self, sides: dict[str, Turn], key: Key, side: Ours) -> None:
        if side.why_not:
            self.results.skip(f"{key}: {side.why_not}")
            return
        sides[str(key)] = lambda draw, pace, reverse: {
            key.with_mode(ahead): sample for ahead, sample in side.turn(draw, pace, reverse=reverse).items()
        }

    def _open(self, dim: int, place: str, sizes: tuple[int, int]) -> Tables | None:
        """The tables of a dim at a place, made when first asked for; None where no time is left to."""
        found = self._tables.get((dim, place, sizes[0]))
        if found is not None:
            return found
        wanted = sum(sizes) * dim * 12
        if self._fill_rate and wanted / self._fill_rate > 0.5 * self.left:
            self.results.skip(
                f"dim {dim}, {place}, {sum(sizes):,} rows: writing {common.bb_bytes(wanted)} takes "
                f"{wanted / self._fill_rate:.0f} s of {self.left:.0f} left"
            )
            return None
        started = time.perf_counter()
        try:
            if place == "SSD":
                common.require_space(self.folder, 3 * wanted)
            tables = make_tables(sizes, dim, None if place == "RAM" else self.folder)
        except (SystemExit, OSError, MemoryError) as error:
            self.results.skip(f"dim {dim}, {place}, {sum(sizes):,} rows: {first_line(error)}")
            return None
        took = time.perf_counter() - started
        self._fill_rate = min(self._fill_rate or float("inf"), wanted / took)
        print(f"[{place}: {sum(sizes):,} rows x {tables.record_bytes} B written in {took:.1f} s]", flush=True)
        if place == "SSD" and self.limits.read_iops is None:
            many = 256 << 20 if self.plan.probe_bytes > 1 << 20 else 1 << 20
            print(limits.measure_disk(self.limits, tables, seconds=self.plan.probe_s, num_bytes=many))
        self._tables[dim, place, sizes[0]] = tables
        return tables

    def _rounds(self, sides: dict[str, Turn], data: Data, ends: float, others: dict[str, Data] | None = None) -> None:
        """Rounds of turns until `ends` or the plan's number; the first one is worth overrunning for."""
        plan = self.plan
        for index in range(plan.rounds):
            round_started = time.perf_counter()
            for place, name in enumerate(turns.order(list(sides), index)):
                if name in self._failed:
                    continue
                if self.left < self._took.get(name, max(self._took.values(), default=0.0)):
                    self.results.skip(f"{name}: round {index + 1}: {max(self.left, 0):.0f} s left")
                    continue
                started = time.perf_counter()
                draw = (others or {}).get(name, data).drawer((plan.seed, index, place, len(self.results.measured)))
                try:
                    samples = sides[name](draw, plan.pace, index % 2 == 1)
                except Exception as error:  # of any kind: backends differ in what they raise for what they have not
                    if name.startswith("(d)") and not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
                        self.results.failures.append(f"{name}: {first_line(error)}")
                    self.results.skip(f"{name}: {first_line(error)}")
                    self._failed.add(name)
                    continue
                self._took[name] = max(self._took.get(name, 0.0), time.perf_counter() - started)
                for key, sample in samples.items():
                    tables = self._tables.get((key.dim, "SSD" if key.place == "SSD" else "RAM", data.users.num_rows))
                    least = None
                    if key.side == "d" and tables is not None:
                        least = self.limits.formula(sample, tables, 2 * plan.batch)
                    self.results.add(key, index, sample, least)
            if time.perf_counter() + (time.perf_counter() - round_started) > ends:
                break
        for name in sides:
            self._took.pop(name, None)
        gc.collect()

    def close(self) -> None:
        """Closes every table."""
        for tables in self._tables.values():
            tables.close()
        self._tables.clear()


def first_line(error: BaseException) -> str:
    """What an error says, torch's page about it left out."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def measure(device: Device, plan: Plan, directory: Path, save: Save | None = None) -> Results:
    """The whole experiment; prints as it goes, and has `save` keep what is known after each cell."""
    print(common.machine())
    print(f"device: {device.label}")
    if not device.is_accelerator:
        print(
            "NO ACCELERATOR was found or asked for: the device is this CPU, its cache is RAM and the link no link. The "
            "figures say nothing of an accelerator."
        )
    print(
        f"{plan.sizes[0]:,} users x {plan.sizes[1]:,} products, dims {plan.dims}, {plan.batch:,} ids each a step, "
        f"at most {plan.seconds:.0f} s",
        flush=True,
    )
    with common.workspace(directory, 0) as folder:  # room is asked for where tables are made
        bench = Bench(device, plan, folder, save)
        try:
            bench.run()
        finally:
            bench.close()
    for text in bench.results.skipped:
        print(f"not measured: {text}")
    return bench.results


def device(settings: Settings) -> list[Figure]:
    """The suite's case."""
    here = Device()
    plan = make_plan(settings, here)
    results = measure(here, plan, settings.dir)
    if results.failures:
        raise RuntimeError("; ".join(results.failures))
    return report.figures(results, here, judge=not settings.tiny)


def arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.device.experiment",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size = options.add_mutually_exclusive_group()
    size.add_argument("--tiny", action="store_true", help="some seconds, for tests; no figure")
    size.add_argument("--quick", action="store_true", help="a minute: one Zipf exponent, two rounds")
    options.add_argument("--device", default="", help="as torch names it; default: an accelerator, else cpu")
    options.add_argument("--minutes", type=float, help="time budget; default: 7")
    options.add_argument("--batch", type=int, help="users, and products, a step; default: 8192, on a CPU 1024")
    options.add_argument(
        "--rows", type=int, nargs=2, metavar=("USERS", "PRODUCTS"), help="default: 144 and 112 x batch"
    )
    options.add_argument("--zipf", type=float, nargs="+", help="exponents, the main one first; 0: uniform")
    options.add_argument("--out", type=Path, default=Path("runs/device"), help="folder for device.json and device.png")
    options.add_argument("--dir", type=Path, default=Path("bench-data"), help="where the tables on SSD go")
    options.add_argument("--seed", type=int, default=0, help="of ids and weights")
    return options.parse_args()


def main() -> None:
    options = arguments()
    began, busy = time.perf_counter(), common.busy_seconds()
    settings = Settings(
        "tiny" if options.tiny else "quick" if options.quick else "full", dir=options.dir, seed=options.seed
    )
    changes: dict[str, Any] = {"exponents": tuple(options.zipf)} if options.zipf else {}
    here = Device(options.device)
    plan = make_plan(settings, here, minutes=options.minutes, batch=options.batch, **changes)
    if options.rows:
        plan = Plan(**{**vars(plan), "sizes": tuple(options.rows)})
    options.out.mkdir(parents=True, exist_ok=True)

    def save(results: Results, **more: Any) -> dict[str, Any]:
        found = report.figures(results, here, judge=not options.tiny)
        data = {**report.to_json(results, here, plan, common.machine(), found), **more}
        part = options.out / "device.json.part"
        part.write_text(json.dumps(data, indent=1) + "\n")
        part.replace(options.out / "device.json")
        return data

    results = measure(here, plan, options.dir, save)
    found = report.figures(results, here, judge=not options.tiny)
    print("\n".join(figure.line() for figure in found))
    print("\n".join(report.kernel_lines(report.chooser.choices)))
    took = time.perf_counter() - began
    others = max(0.0, common.busy_seconds() - busy - sum(os.times()[:2])) / took
    if others > 0.2:  # as the suite says it
        print(f"DISTURBED: other processes kept {others:.1f} cores busy")
    data = save(results, others=others)
    print(f"written: {options.out / 'device.json'}", end="")
    try:
        from benchmarks.device import plot
    except ImportError as error:
        print(f"; no plot: {error}", end="")
    else:
        plot.draw(options.out / "device.png", data)
        print(f", {options.out / 'device.png'}", end="")
    print(f"; {time.perf_counter() - began:.0f} s")
    failures = [*results.failures, *report.verdicts(results)]
    if failures:
        sys.exit("failed: " + "; ".join(failures))


if __name__ == "__main__":
    main()
