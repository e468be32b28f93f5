"""What `experiment` measured: printed tables, figures for the suite, JSON."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.device.check import Checked
from benchmarks.device.sides import Device, Sample
from benchmarks.harness.figures import Figure
from bunkbed.torch.device.kernels.choice import Choice, chooser

SIDES = {
    "a": "resident, SparseAdam",
    "b": "CPU, SparseAdam",
    "c": "CPU, dense Adam",
    "d": "bunkbed",
}

#: Of a weight trained on the device, from the table's own on the CPU: sums in another order, through Adam's quotient.
LARGEST_DIFFERENCE = 1e-5


@dataclass(frozen=True)
class Key:
    """What a figure is of.

    Attributes:
        side: a letter of `SIDES`.
        place: ``"RAM"``, ``"SSD"``, or ``"growth"`` for the case with 4x the rows (in RAM).
        share: of the records that the device cache holds; None for recipes.
        ahead: whether with `lookahead`.
        times: how many times the usual rows.
    """

    side: str
    dim: int
    exponent: float
    place: str
    share: float | None = None
    ahead: bool = False
    times: int = 1

    def with_mode(self, ahead: bool) -> Key:
        """The same with or without lookahead."""
        return dataclasses.replace(self, ahead=ahead)

    @property
    def name(self) -> str:
        """Of the side alone."""
        text = f"({self.side}) {SIDES[self.side]}"
        if self.share is not None:
            text += f", cache {100 * self.share:g} %"
        if self.ahead:
            text += ", lookahead"
        return text if self.times == 1 else f"{text}, {self.times}x rows"

    def __str__(self) -> str:
        return f"{self.name}, dim {self.dim}, Zipf {self.exponent:g}, {self.place}"


@dataclass
class Measured:
    """The turns of one key, by round; and the formula's least seconds of each, with what binds."""

    rounds: dict[int, Sample] = field(default_factory=dict)
    least: dict[int, tuple[float, str]] = field(default_factory=dict)

    def median(self, name: str) -> float | None:
        """Of a field of the samples; None where it was not measured."""
        values = [getattr(sample, name) for sample in self.rounds.values()]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    @property
    def step_s(self) -> float:
        return statistics.median(sample.step_s for sample in self.rounds.values())

    @property
    def percent(self) -> float | None:
        """Of the formula's limit that was reached."""
        if not self.least:
            return None
        return statistics.median(100 * least / self.rounds[index].step_s for index, (least, _) in self.least.items())

    @property
    def bound(self) -> str:
        """Which limit that is."""
        return statistics.mode(bound for _, bound in self.least.values()) if self.least else ""


@dataclass
class Results:
    """Everything a run found."""

    measured: dict[Key, Measured] = field(default_factory=dict)
    checked: Checked | None = None
    skipped: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, key: Key, index: int, sample: Sample, least: tuple[float, str] | None) -> None:
        """A turn of round `index`."""
        found = self.measured.setdefault(key, Measured())
        found.rounds[index] = sample
        if least is not None:
            found.least[index] = least

    def skip(self, why: str) -> None:
        """Something that will not be in the figures."""
        self.skipped.append(why)

    def kernel_share(self) -> float | None:
        """Return the kernel's bytes read from disk / the bytes that tables requested; None without such requests."""
        samples = [s for key, found in self.measured.items() if key.place == "SSD" for s in found.rounds.values()]
        asked = sum(sample.asked_bytes for sample in samples)
        return sum(sample.kernel_bytes for sample in samples) / asked if asked else None


def ratio(results: Results, name: str, above: Key, below: Key, **target: float) -> Figure | None:
    """Step time of `above` over that of `below`, within rounds; None where no round has both."""
    first, second = (results.measured.get(key, Measured()).rounds for key in (above, below))
    ratios = [first[index].step_s / second[index].step_s for index in first if index in second]
    if not ratios:
        return None
    return Figure(name, statistics.median(ratios), "x", min(ratios), max(ratios), len(ratios), **target)  # type: ignore[arg-type]


def checked_line(checked: Checked) -> str:
    """For people."""
    verdict = "the same bits with every cache" if not checked.differing else f"{checked.differing} ROWS DIFFER"
    return (
        f"check: {checked.runs} runs of a small case, {checked.evictions:,} evictions in the smallest cache: "
        f"{verdict}; largest difference from the table on the CPU {checked.difference:.2g}"
    )


def verdicts(results: Results) -> list[str]:
    """What the check found wrong, whatever was measured; nothing where it could not be made."""
    checked = results.checked
    if checked is None:
        return []
    found = [f"{checked.differing} rows differ between device caches"] if checked.differing else []
    if not checked.difference <= LARGEST_DIFFERENCE:  # NaN is none
        found.append(
            f"a weight is {checked.difference:.2g} from the table's on the CPU, {LARGEST_DIFFERENCE:g} allowed"
        )
    if not checked.evictions:
        found.append("the smallest cache evicted nothing, so nothing was checked")
    return found


def kernel_lines(choices: list[Choice]) -> list[str]:
    """For people: which operations ran as kernels, and how many times as fast as plain ones they measured."""
    lines = [f"  {c}" + ("" if c.speedup is None else f", {c.speedup:.2f}x") for c in choices]
    return ["kernels:", *lines] if lines else ["kernels: none was tried, every operation was plain"]


# ---- printed


def cells(key: Key, found: Measured, results: Results) -> list[str]:
    """One line of the printed table."""
    step_ms = sorted(1e3 * sample.step_s for sample in found.rounds.values())

    def text(value: float | None, form: str = ",.0f", scale: float = 1.0) -> str:
        return "-" if value is None else format(value * scale, form)

    percent = found.percent
    recipes = [
        results.measured.get(dataclasses.replace(key, side=side, share=None, ahead=False)) if key.side == "d" else None
        for side in "ab"
    ]
    return [
        key.name,
        str(key.dim),
        f"{1 / found.step_s:,.1f}",
        f"{1e3 * found.step_s:.3g}",
        f"{step_ms[0]:.3g}-{step_ms[-1]:.3g}",
        text(found.median("unique")),
        text(found.median("misses")),
        text(found.median("link_bytes"), ",.2f", 1e-6),
        text(found.median("stall_s"), ".2f", 1e3),
        text(found.median("read_records")) if key.place == "SSD" and key.side == "d" else "-",
        "-" if percent is None else f"{percent:.0f} ({found.bound})",
        text(found.median("device_bytes"), ",.1f", 1 / (1 << 20)),
        *("-" if other is None else f"{other.step_s / found.step_s:.2f}x" for other in recipes),
    ]


HEAD = [
    "side", "dim", "it/s", "ms", "least-most", "unique", "missed", "link MB", "stall ms", "disk rows", "% of limit",
    "device MiB", "of (a)", "of (b)",
]  # fmt: skip


def show(results: Results, device: Device, exponent: float, place: str, batch: int) -> None:
    """Prints one cell."""
    found = {
        key: measured for key, measured in results.measured.items() if key.exponent == exponent and (key.place == place)
    }
    if not found:
        return
    order = sorted(found, key=lambda k: (k.dim, k.side, k.times, -(k.share or 0), k.ahead))
    lines = [HEAD, *[cells(key, found[key], results) for key in order]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    where = {"growth": "in RAM, with as many rows as elsewhere and with 4x"}.get(place, f"table in {place}")
    rounds = max(len(measured.rounds) for measured in found.values())
    print(f"\nZipf {exponent:g}, {where}; device {device.torch}, {batch:,} ids each, medians of <= {rounds} rounds")
    for line in lines:
        print("  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]))
    print(flush=True)


# ---- figures


def figures(results: Results, device: Device, *, judge: bool) -> list[Figure]:
    """What the suite shows; targets of speed only on an accelerator, and where `judge`."""
    found: list[Figure | None] = []
    if results.checked is not None:
        found += [
            Figure("rows that differ between device caches", results.checked.differing, at_most=0),
            Figure(
                "largest difference from the table on the CPU", results.checked.difference, at_most=LARGEST_DIFFERENCE
            ),
        ]
    judge = judge and device.is_accelerator
    keys = list(results.measured)
    dims = sorted({key.dim for key in keys})
    main = keys[0].exponent if keys else 0.0
    for dim in dims:
        ours = Key("d", dim, main, "RAM", 0.05, True)
        for side, least in (("a", 1.0), ("b", 10.0)):
            peer = Key(side, dim, main, "RAM")
            target = {"at_least": least} if judge else {}
            found.append(ratio(results, f"({side}) / (d) 5 %, lookahead, dim {dim}", peer, ours, **target))
        measured = results.measured.get(ours)
        if measured is not None and measured.percent is not None:
            binds = {"at_least": 70.0} if judge and measured.bound == "link" else {}
            name = f"of the formula's limit ({measured.bound}), (d) 5 %, lookahead, dim {dim}"
            found.append(Figure(name, measured.percent, "%", **binds))  # type: ignore[arg-type]
    if len(dims) > 1:
        for side, share, ahead in (("a", None, False), ("b", None, False), ("d", 0.05, True), ("d", 0.0, True)):
            few, many = (Key(side, dim, main, "RAM", share, ahead) for dim in (dims[0], dims[-1]))
            found.append(ratio(results, f"{few.name}: dim {dims[-1]} / dim {dims[0]}", many, few))
    for side, share in (("a", None), ("b", None), ("d", 0.05), ("d", 0.0125)):
        least_dim = dims[0] if dims else 0
        many = Key(side, least_dim, main, "growth", share, side == "d", 4)
        few = dataclasses.replace(many, times=1, share=None if side != "d" else 0.05)
        note = "as many bytes of cache" if share == 0.0125 else ""
        name = f"{few.name}: 4x rows / 1x" + (f", {note}" if note else "")
        target = {"at_most": 1.1} if judge and share == 0.05 else {}
        found.append(ratio(results, name, many, few, **target))
    share_read = results.kernel_share()
    if share_read is not None:
        void = "" if share_read >= 0.9 else "below 90: figures of tables on SSD are void, they came from the page cache"
        found.append(
            Figure("read by the kernel, of what the tables asked the disk for", 100 * share_read, "%", note=void)
        )
    if not device.is_accelerator:
        found = [
            f and dataclasses.replace(f, note="; ".join([*filter(None, [f.note]), "no accelerator"])) for f in found
        ]
    return [figure for figure in found if figure is not None]


def to_json(results: Results, device: Device, plan: Any, machine: str, found: list[Figure]) -> dict[str, Any]:
    """Everything, as plain values."""
    return {
        "device": device.label,
        "accelerator": device.is_accelerator,
        "machine": machine.splitlines(),
        "plan": dataclasses.asdict(plan),
        "check": None if results.checked is None else dataclasses.asdict(results.checked),
        "figures": [{**dataclasses.asdict(figure), "reached": figure.reached} for figure in found],
        "measured": [
            {
                **dataclasses.asdict(key),
                "name": key.name,
                "step_ms": 1e3 * measured.step_s,
                "steps_per_s": 1 / measured.step_s,
                "percent_of_limit": measured.percent,
                "bound": measured.bound,
                "rounds": [dataclasses.asdict(sample) for sample in measured.rounds.values()],
            }
            for key, measured in results.measured.items()
        ],
        "kernels": [dataclasses.asdict(choice) for choice in chooser.choices],
        "skipped": results.skipped,
        "failures": results.failures,
    }
