"""`Table.explain`: compare what a running table did with the limits of this machine."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bunkbed.core.budget import format_bytes
from bunkbed.machine import limits
from bunkbed.machine.rates import Machine, remembered
from bunkbed.machine.read_paths import main_path, records_by_path
from bunkbed.machine.text import WIDTH, facts_grid, milliseconds, rates, read_paths, speed, times_grid

if TYPE_CHECKING:
    from bunkbed.table.table import Table

# The keys of `Table.stats` that describe the present. All other keys count up from the opening.
_NOW = frozenset(
    (
        "ram_bytes", "ram_budget_bytes", "frames", "frame_capacity", "dirty_rows", "stored_rows", "directory_bytes",
        "disk_bytes", "index_snapshot_bytes", "live_bytes", "tombstones", "segments", "open_files", "threads",
        "window_batches", "window_bytes", "staging_depth", "disk_limit_bytes", "snapshot_bytes",
        "counted_ids",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Explanation:
    """The measured work of a table in one interval, and the least time that it needs on this machine.

    ``print`` it, or read its fields. A step is an update; for a table that was only read, a lookup.

    Attributes:
        table: the table's name.
        seconds: wall time of the interval, with all other work in it.
        steps: number of steps in the interval.
        counts: the increase of each counter of `Table.stats`: ``unique_rows``, ``misses``, ``written_bytes``...
        now: the values of `Table.stats` that describe the present: ``frames``, ``disk_bytes``...
        record_bytes: weights and optimizer state of a row.
        machine: the rates of the machine; None: never measured here.
        times: seconds that a step needs of each resource at those rates; None: a rate is not known. The time of the
            model is not known to the table and counts 0.
        stats: `Table.stats` at the end, for ``explain(since=)``.
    """

    table: str
    seconds: float
    steps: int
    counts: dict[str, float]
    now: dict[str, float]
    record_bytes: int
    machine: Machine | None
    times: limits.StepTimes | None
    stats: dict[str, int | float] = field(repr=False)
    on_disk: bool = True

    def per_step(self, counter: str) -> float:
        """Return one of `counts` divided by the steps; 0 without steps."""
        return self.counts.get(counter, 0) / self.steps if self.steps else 0.0

    @property
    def steps_per_s(self) -> float:
        """The measured speed: steps divided by seconds."""
        return self.steps / self.seconds if self.seconds > 0 else 0.0

    @property
    def limit_steps_per_s(self) -> float | None:
        """Steps a second that this machine allows for the same work; None: unknown, or there were no steps."""
        if self.times is None or not self.steps:
            return None
        return 1 / self.times.together if self.times.together else math.inf

    @property
    def share_of_limit(self) -> float | None:
        """Measured steps a second divided by the limit's; None: unknown."""
        limit = self.limit_steps_per_s
        return None if limit is None else self.steps_per_s / limit

    @property
    def binds(self) -> str | None:
        """The resource that sets the limit: ``"disk"`` or ``"memory"``; None: unknown."""
        return None if self.times is None or not self.steps else self.times.binds

    @property
    def hit_rate(self) -> float | None:
        """Fraction of the unique rows that were in RAM; None without unique rows or without updates (a row counts once
        a step, and only an update ends a step)."""
        unique = self.counts.get("unique_rows", 0) if self.counts.get("updates") else 0
        return self.counts.get("hits", 0) / unique if unique else None

    @property
    def read_path(self) -> str | None:
        """The access path of most records that were read: ``"single reads"``, ``"merged reads"`` or ``"sweep"``."""
        return main_path(records_by_path(self.counts))

    @property
    def read_amplification(self) -> float | None:
        """Bytes read, also by compaction, for each byte of a record that was wanted; None: no record was read."""
        wanted_bytes = self.counts["read_records"] * self.record_bytes
        return self.counts["read_bytes"] / wanted_bytes if wanted_bytes else None

    @property
    def write_amplification(self) -> float | None:
        """Bytes written to the log for each byte of a record written back; None: no record was written back."""
        written_back = self.counts.get("written_back", 0)
        return self.counts.get("written_bytes", 0) / (written_back * self.record_bytes) if written_back else None

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(*_parts(self))

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=WIDTH, color_system=None, force_terminal=False, highlight=False)
        console.print(self)
        assert isinstance(console.file, io.StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def explain(table: Table, since: Explanation | Mapping[str, int | float] | None = None) -> Explanation:
    """See `Table.explain`."""
    after = table.stats()
    before: Mapping[str, int | float] = (
        {} if since is None else since.stats if isinstance(since, Explanation) else since
    )
    if since is not None and "open_s" not in before:
        raise ValueError(f"table '{table.name}': since must be an earlier explain() or stats() of this table")
    counts = {key: float(value - before.get(key, 0)) for key, value in after.items() if key not in _NOW}
    if min(counts.values(), default=0) < 0:
        key = min(counts, key=lambda name: counts[name])
        raise ValueError(
            f"table '{table.name}': since was taken after this, or of another opening: {key} went from "
            f"{before[key]:g} to {after[key]:g}"
        )
    seconds = counts.pop("open_s")
    steps = int(counts["updates"] or counts["lookups"])
    machine = table._machine()
    if machine is None:
        machine = remembered()  # rates of another directory; the memory rate is the same
    record_bytes = int(table.core.payload_bytes())
    return Explanation(
        table=table.name,
        seconds=seconds,
        steps=steps,
        counts=counts,
        now={key: float(value) for key, value in after.items() if key in _NOW},
        record_bytes=record_bytes,
        machine=machine,
        times=_times(counts, steps, table.dim, record_bytes, machine),
        stats=dict(after),
        on_disk=table.path is not None,
    )


def _times(
    counts: Mapping[str, float], steps: int, dim: int, record_bytes: int, machine: Machine | None
) -> limits.StepTimes | None:
    if machine is None or not steps:
        return None

    def known(rate: float | None, needed: float) -> float | None:
        return rate if rate else (None if needed else math.inf)

    reads, written = counts["reads"] / steps, counts["written_bytes"] / steps
    # Without updates no step ends, so unique rows are not counted. Rows read from disk are a lower bound for them.
    unique = counts["unique_rows"] if counts["updates"] else counts["misses"]
    moved = limits.memory_bytes(counts["ids"] / steps, unique / steps, dim, record_bytes)
    read_iops = known(machine.read_iops, reads)
    write_rate = known(machine.write_bytes_per_s, written)
    memory_rate = known(machine.memory_bytes_per_s, moved)
    if read_iops is None or write_rate is None or memory_rate is None:
        return None
    return limits.step_times(
        reads=reads,
        read_bytes=counts["read_bytes"] / steps,
        read_bytes_per_s=machine.read_bytes_per_s,
        written_bytes=written,
        moved_bytes=moved,
        read_iops=read_iops,
        write_bytes_per_s=write_rate,
        memory_bytes_per_s=memory_rate,
    )


# ---- As text, within 80 columns


def _parts(it: Explanation) -> list[Any]:
    from rich.markup import escape

    grid = facts_grid()
    grid.add_row("table", f"[b]{escape(it.table)}[/]")
    if not it.steps:
        grid.add_row("steps", f"none in {_seconds(it.seconds)}: nothing to explain yet")
        _tiers(it, grid)
        return [grid]
    kind = "steps" if it.counts["updates"] else "lookups (there was no update)"
    average = f"{milliseconds(it.seconds / it.steps)} ms each" if it.seconds else ""
    grid.add_row(
        "speed", f"[b]{speed(it.steps_per_s)}[/] {kind} a second: {it.steps:,} in {_seconds(it.seconds)}, {average}"
    )
    grid.add_row("limit", _limit(it))
    grid.add_row("rows", _rows(it))
    if it.on_disk:
        grid.add_row("reads", _reads(it))
        if it.read_path is not None:
            wanted_bytes = it.counts["read_records"] * it.record_bytes
            grid.add_row("", read_paths(records_by_path(it.counts), it.counts["read_bytes"], wanted_bytes))
        if it.write_amplification is not None:
            grid.add_row(
                "writes",
                f"{format_bytes(it.per_step('written_bytes'))} a step, {it.write_amplification:.2f} times the "
                f"{it.per_step('written_back'):,.0f} rows written back",
            )
    _tiers(it, grid)
    if it.times is None:
        return [grid]
    assert it.machine is not None
    grid.add_row("machine", rates(it.machine))
    rows = [
        ("disk, reads", it.times.disk_reads, "at least"),
        ("disk, writes", it.times.disk_writes, "at least"),
        ("memory", it.times.memory, "at least"),
    ]
    rows = [row for row in rows if row[1]]
    rows.append(("measured", it.seconds / it.steps, "the model's work included"))
    return [grid, "", times_grid(rows, it.times.binds)]


def _limit(it: Explanation) -> str:
    limit, share = it.limit_steps_per_s, it.share_of_limit
    if limit is None or share is None:
        where = "this table's disk" if it.on_disk else "this machine"
        return f"unknown: measure {where} once with bunkbed.machine.measure({'table.path' if it.on_disk else ''})"
    text = f"{speed(limit)} a second, [b]{it.binds}[/] binds; the table runs at [b]{share:.0%}[/] of it"
    if share > 1.1:  # nothing runs faster than its limit
        text += "\n[yellow]so the machine was busy when it was measured: bunkbed.machine.measure(again=True)[/]"
    return text


def _rows(it: Explanation) -> str:
    if it.hit_rate is None:
        return f"{it.per_step('misses'):,.0f} read from disk a lookup"
    text = f"{it.per_step('unique_rows'):,.0f} unique a step, {it.hit_rate:.1%} in RAM"
    if it.counts["misses"]:
        text += f", {it.per_step('misses'):,.0f} missed"
    if it.counts["first_touches"]:
        text += f", {it.per_step('first_touches'):,.0f} new"
    return text


def _reads(it: Explanation) -> str:
    text = f"{it.per_step('reads'):,.0f} a step"
    if it.counts.get("staged_rows"):
        text += f", {it.per_step('staged_rows'):,.0f} rows staged"
    if "stall_s" in it.counts and it.seconds:
        text += f"; waited for {it.counts['stall_s'] / it.seconds:.0%} of the time"
    return text


def _tiers(it: Explanation, grid: Any) -> None:
    now = it.now
    budget = f" of {format_bytes(now['ram_budget_bytes'])}" if now["ram_budget_bytes"] else ""
    grid.add_row(
        "RAM",
        f"{format_bytes(now['ram_bytes'])}{budget}: {now['frames']:,.0f} rows, "
        f"directory {format_bytes(now['directory_bytes'])}",
    )
    if now.get("window_batches"):
        grid.add_row(
            "window",
            f"{now['window_batches']:,.0f} batches in {format_bytes(now['window_bytes'])}, "
            f"{now['staging_depth']:,.0f} staged",
        )
    if it.on_disk:
        live = now["live_bytes"] / now["disk_bytes"] if now["disk_bytes"] else 1.0
        grid.add_row("files", f"{format_bytes(now['disk_bytes'])}, {live:.0%} of it live")


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 600 else f"{value / 60:,.0f} min"
