"""``bunkbed plan``: predict the training speed here, the limiting resource and the effect of changes."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from rich.console import Console, Group, RenderableType
from rich.table import Table as Grid

from bunkbed import _native, planning
from bunkbed.cli.shared.console import ConfigOption, JsonOption, UsageProblem, escape, print_json, stderr, stdout
from bunkbed.cli.shared.train_options import OPTIMIZER_DEFAULT, OptimizerName, option, whole_number
from bunkbed.core.budget import format_bytes, format_least, parse_bytes
from bunkbed.core.optim import OPTIMIZERS
from bunkbed.core.types import Json
from bunkbed.machine.rates import Machine, free_bytes, measure, memory_bytes
from bunkbed.machine.text import WIDTH, decimal_bytes, facts_grid, rates, speed, times_grid
from bunkbed.planning import DEFAULT_LATENCY_S, DEFAULT_LOOKAHEAD, LOCAL_BYTES_PER_S, Plan, Question

_TABLE, _STEP, _MACHINE, _RANKS = "Table", "Step", "Machine", "Several processes"


class Dtype(StrEnum):
    """Types of stored weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


DTYPE_DEFAULT = Dtype.float32


def plan(
    *,
    rows: Annotated[
        int,
        option(_TABLE, "Number of rows of the table, such as 1e9; all are assumed to be trained.", parser=whole_number),
    ],
    dim: Annotated[int, option(_TABLE, "Number of weights of a row.")],
    dtype: Annotated[Dtype, option(_TABLE, "Type of the stored weights.")] = DTYPE_DEFAULT,
    optimizer: Annotated[OptimizerName, option(_TABLE, "Optimizer; each row has its state.")] = OPTIMIZER_DEFAULT,
    ram: Annotated[
        str, option(_TABLE, "RAM budget of the table; with --ranks, of each host.", metavar="BYTES")
    ] = "1GiB",
    batch: Annotated[
        int,
        option(_STEP, "Number of ids of a step, with duplicates; with --ranks, of each rank.", parser=whole_number),
    ] = 65_536,
    zipf: Annotated[float, option(_STEP, "Skew of the ids: the exponent of Zipf's law; 0: uniform.")] = 1.05,
    lookahead: Annotated[
        int, option(_STEP, "Number of batches known ahead; 0: none, so nothing overlaps.")
    ] = DEFAULT_LOOKAHEAD,
    compute_ms: Annotated[float, option(_STEP, "Time of the model in a step, in milliseconds.")] = 0.0,
    dir: Annotated[Path, option(_MACHINE, "Measure the disk of this folder.", metavar="DIR")] = Path(),
    ssd_iops: Annotated[
        float | None, option(_MACHINE, "Random reads per second, instead of measuring.", metavar="N")
    ] = None,
    ssd_read: Annotated[
        str | None, option(_MACHINE, "Bytes read per second by large reads, such as 3GB.", metavar="BYTES")
    ] = None,
    ssd_write: Annotated[
        str | None, option(_MACHINE, "Bytes written per second, such as 2GB, instead of measuring.", metavar="BYTES")
    ] = None,
    memory_bandwidth: Annotated[
        str | None, option(_MACHINE, "Bytes per second, such as 20GB, instead of measuring.", metavar="BYTES")
    ] = None,
    endurance: Annotated[
        str, option(_MACHINE, "Bytes that may be written to the disk in its life, by its data sheet.", metavar="BYTES")
    ] = "600TB",
    ranks: Annotated[
        int, option(_RANKS, "Divide the rows over N processes; predicted, not measured.", metavar="N")
    ] = 1,
    ranks_per_host: Annotated[
        int | None,
        option(
            _RANKS, "Processes of a host, which share its RAM, disk and link. Default: all; with --link 1.", metavar="N"
        ),
    ] = None,
    link: Annotated[
        str | None,
        option(_RANKS, "Rate of a host's link, such as 10Gbit or 1.25GB. Needed for several hosts.", metavar="RATE"),
    ] = None,
    link_latency_ms: Annotated[
        float, option(_RANKS, "Time of one collective without data, in milliseconds; an assumption.")
    ] = DEFAULT_LATENCY_S * 1e3,
    remeasure: Annotated[bool, option(_MACHINE, "Measure again instead of using the last figures.")] = False,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Predict the training speed: steps per second, the limiting resource, bytes per tier and the effect of changes.

    Measures memory and disk once, in about five seconds, and stores the figures. A prediction is an upper limit.
    """
    given = {
        "read_iops": ssd_iops,
        "read_bytes_per_s": _bytes("--ssd-read", ssd_read),
        "write_bytes_per_s": _bytes("--ssd-write", ssd_write),
        "memory_bytes_per_s": _bytes("--memory-bandwidth", memory_bandwidth),
    }
    times = (("--compute-ms", compute_ms), ("--link-latency-ms", link_latency_ms))
    for name, value in (("--ssd-iops", ssd_iops), *((name, value + 1) for name, value in times)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UsageProblem(f"{name} must be {'above 0' if name == '--ssd-iops' else 'at least 0'}")
    life = _bytes("--endurance", endurance)
    assert life is not None

    def predict(machine: Machine) -> Plan:
        return planning.plan(
            rows,
            dim,
            batch,
            machine=machine,
            zipf=zipf,
            optimizer=OPTIMIZERS[optimizer.value](),
            dtype=dtype.value,
            ram=ram,
            lookahead=lookahead,
            compute_s=compute_ms / 1e3,
            ranks=ranks,
            ranks_per_host=ranks_per_host,
            link=link,
            latency_s=link_latency_ms / 1e3,
        )

    try:  # find a wrong option before the measurement, which takes seconds
        predict(Machine(memory_bytes_per_s=1.0, read_iops=1.0, write_bytes_per_s=1.0))
    except (ValueError, TypeError) as error:
        raise UsageProblem(str(error)) from error
    machine = _machine(dir, given, again=remeasure)
    base = predict(machine)
    others = list(planning.changes(base))
    free = free_bytes(dir) if machine.disk else None
    if json:
        print_json(_as_json(base, others, life, free))
    else:
        show(stdout(), base, others, life, free)


def _machine(directory: Path, given: dict[str, float | None], *, again: bool) -> Machine:
    figures = {name: value for name, value in given.items() if value is not None}
    if figures.keys() >= given.keys() - {"read_bytes_per_s"}:
        return Machine(**figures)  # type: ignore[arg-type]
    with stderr().status(f"measuring memory and the disk of {escape(str(directory))}, about five seconds"):
        return replace(measure(directory, again=again), **figures)  # type: ignore[arg-type]


def _bytes(name: str, text: str | None) -> float | None:
    try:
        return None if text is None else float(parse_bytes(text))
    except (ValueError, TypeError) as error:
        raise UsageProblem(f"{name}: {error}") from error


# ---- As text, within 80 columns


def show(console: Console, base: Plan, others: list[tuple[str, Plan]], life: float, free: int | None) -> None:
    """Print a plan and its alternatives; `free` are the disk's free bytes, None where no disk was measured."""
    parts: list[RenderableType] = [
        _facts(base, free),
        "",
        _step(base),
        "",
        _verdict(base, life),
        "",
        _others(base, others),
    ]
    note = (
        "A limit, not a promise: training comes near it where the disk binds, less so\n"
        "where memory does. A full cache, every row trained, random ids, no commits."
    )
    if base.question.ranks > 1:
        rates_are = "measured" if base.machine.disk else "as given"
        note += "\nPredicted; no link between processes was measured."
        note += f"\nRates of memory and disk: {rates_are}. The rest is computed by a cost model."
    console.print(Group(*parts, "", f"[dim]{note}[/]"), width=min(console.width, WIDTH))


def _facts(plan: Plan, free: int | None) -> RenderableType:
    asked, machine = plan.question, plan.machine
    grid = facts_grid()
    grid.add_row(
        "table",
        f"{asked.rows:,} rows x {asked.dim} {asked.dtype}, {type(asked.optimizer).__name__}:\n"
        f"{plan.record_bytes:,} B a row, {format_bytes(plan.record_bytes * asked.rows)}",
    )
    of_batch, of_all, of_host = "", "", ""
    if asked.ranks > 1:
        hosts = asked.ranks // asked.ranks_per_host
        where = f"{asked.ranks_per_host:,} on each of {hosts:,} hosts" if hosts > 1 else "on one host"
        grid.add_row("ranks", f"{asked.ranks:,}, {where}; {asked.stored:,} rows a rank")
        grid.add_row("", "[dim]step to link are those of one rank; the times below are its host's[/]")
        of_batch, of_all = " of each rank", " of all ranks"
        of_host = f"{format_bytes(asked.rank_ram)} of a host's {format_bytes(asked.ram)}: "
    grid.add_row(
        "step",
        f"{asked.batch:,} ids{of_batch}, Zipf {asked.zipf:g}: {plan.unique_rows:,.0f} unique rows{of_all}, "
        f"{plan.misses:,.0f} missed ({plan.misses / plan.unique_rows:.1%})"
        + ("" if plan.fits_batch else ";\nsome are read twice, as the cache is too small for a step"),
    )
    grid.add_row(
        "RAM",
        f"{of_host}{plan.frames:,} rows in {format_bytes(plan.frames_bytes)}, "
        f"directory {format_bytes(plan.directory_bytes)}, "
        f"buffers {format_bytes(plan.buffers_bytes + plan.window_bytes)}",
    )
    least = format_least(plan.minimum_ram)
    if plan.asked_ram < plan.minimum_ram:
        asked_for = format_bytes(plan.asked_ram)
        grid.add_row("", f"[yellow]{asked_for} is too little for the rows: planned with the minimum, {least}[/]")
    else:
        grid.add_row("", f"[dim]the minimum for these rows is {least}[/]")
    if free is not None and asked.ram > memory_bytes():
        grid.add_row("", f"[yellow]too little memory: this machine has {format_bytes(memory_bytes())}[/]")
    if plan.read_path:
        grid.add_row(
            "reads", f"mostly {plan.read_path}: {plan.reads:,.0f} a step of {format_bytes(plan.read_bytes)} in all"
        )
    grid.add_row("disk", f"about {format_bytes(plan.disk_bytes)}, {_native.TARGET_LIVE:.0%} of it live")
    grid.add_row("", "[dim]each snapshot or saved file: up to as much again[/]")
    if free is None:
        grid.add_row("", "[dim]every rate is given: not compared with a disk[/]")
    else:
        room, advised = format_bytes(free), 3 * asked.ranks_per_host * plan.record_bytes * asked.stored
        if free < advised:
            short = "fits" if _fits(plan, free) else "too little room"
            grid.add_row("", f"[yellow]{short}: {room} are free on {escape(machine.disk)}[/]")
            grid.add_row("", f"[yellow]3 x the rows is advised, {format_bytes(advised)}[/]")
        else:
            grid.add_row("", f"[dim]fits: {room} are free on {escape(machine.disk)}[/]")
    grid.add_row("files", f"{plan.segments:,} segments at most, a descriptor each in a reader")
    if asked.ranks > 1:
        forward, backward = plan.exchanged.forward_bytes, plan.exchanged.backward_bytes
        grid.add_row(
            "link",
            f"{format_bytes(forward + backward)} sent a step and rank: {format_bytes(forward)} forward, "
            f"{format_bytes(backward)} backward",
        )
        latency = "assumed" if asked.latency_s == DEFAULT_LATENCY_S else "as given"
        grid.add_row("", f"[dim]{_link_rate(asked)}[/]")
        grid.add_row("", f"[dim]{latency}: {asked.latency_s * 1e3:g} ms a collective[/]")
    grid.add_row("machine", rates(machine))
    grid.add_row("", f"[dim]{escape(machine.disk)}, measured; --remeasure[/]" if machine.disk else "[dim]as given[/]")
    if machine.read_unit == 1:
        grid.add_row("", "[yellow]this file system cannot be read past the page cache: the reads/s are the cache's[/]")
    return grid


def _fits(plan: Plan, free: int | None) -> bool | None:
    """Return whether a host's disk has room for its rows, None where no disk was looked at."""
    return None if free is None else free >= plan.question.ranks_per_host * plan.disk_bytes


def _link_rate(asked: Question) -> str:
    if asked.link_bytes_per_s is None:
        return f"assumed: {LOCAL_BYTES_PER_S / 1e9:g} GB/s a rank"
    return f"as given: {asked.link_bytes_per_s / 1e9:,.4g} GB/s a host, {asked.rank_bytes_per_s / 1e9:,.4g} GB/s a rank"


def _step(plan: Plan) -> RenderableType:
    times, here = plan.times, plan.question.ranks_per_host
    written = f"{format_bytes(here * plan.written_bytes)}, {plan.write_amplification:.2f} x what is evicted"
    link = [
        ("link, lookup", times.link_forward, "rows, with ids ahead" if plan.question.lookahead else "ids, rows"),
        ("link, update", times.link_backward, "gradients"),
    ]
    return times_grid(
        [
            ("disk, reads", times.disk_reads, f"{here * plan.misses:,.0f} rows"),
            ("disk, writes", times.disk_writes, written if plan.misses else ""),
            ("memory", times.memory, "lookup, gradients, update"),
            ("model", times.compute, "as given" if times.compute else "not given: --compute-ms"),
            *(link if plan.question.ranks > 1 else []),
        ],
        plan.binds,
    )


def _verdict(plan: Plan, life: float) -> RenderableType:
    grid = facts_grid()
    overlap = "with lookahead, all at once" if plan.question.lookahead else "without lookahead, one after another"
    ids = plan.steps_per_s * plan.question.batch * plan.question.ranks
    ids_text = f"{ids / 1e6:,.2f} million" if ids >= 1e6 else f"{ids:,.0f}"
    grid.add_row(
        "limit", f"[b]{speed(plan.steps_per_s)} steps/s[/], {ids_text} ids/s; [b]{plan.binds}[/] binds ({overlap})"
    )
    grid.add_row("", f"as many ids as there are rows take {_duration(plan.question.rows / ids / 86_400)}")
    if not plan.fits_batch:
        grid.add_row(
            "",
            f"[yellow]the cache holds {plan.frames:,} rows, a step wants {plan.unique_rows:,.0f}: some are read twice; "
            "give it more RAM[/]",
        )
    elif plan.misses and plan.frames < 4 * plan.unique_rows:
        grid.add_row("", "[yellow]the cache holds less than four steps: up to a quarter more misses are likely[/]")
    days = plan.days_to_write(life)
    host = " by a host" if plan.question.ranks > 1 else ""
    if math.isinf(days):
        grid.add_row("SSD", "written by commits only")
    else:
        grid.add_row(
            "SSD",
            f"{decimal_bytes(plan.written_bytes_per_day)} written in a day of this{host}; a drive rated for "
            f"{decimal_bytes(life)} of writes would last {_duration(days)}",
        )
    return grid


def _others(base: Plan, others: list[tuple[str, Plan]]) -> RenderableType:
    grid = Grid(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    grid.add_column("what would change", no_wrap=True)
    for name in ("RAM", "B a row", "missed", "steps/s", ""):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("binds", no_wrap=True)
    grid.add_column("SSD a day", justify="right", no_wrap=True)
    is_least = base.asked_ram < base.minimum_ram
    for name, plan in [("the minimum" if is_least else "as asked", base), *others]:
        factor = plan.steps_per_s / base.steps_per_s
        grid.add_row(
            name,
            format_least(plan.question.ram) if name == "the minimum" else format_bytes(plan.question.ram),
            f"{plan.record_bytes:,}",
            f"{plan.misses / plan.unique_rows:.1%}",
            f"[b]{speed(plan.steps_per_s)}[/]",
            ""
            if plan is base
            else f"[{'green' if factor > 1.02 else 'dim'}]{factor:{'.0f' if factor >= 99.95 else '.1f'}}x[/]",
            plan.binds,
            decimal_bytes(plan.written_bytes_per_day),
        )
    return grid


def _duration(days: float) -> str:
    for unit, in_a_day in (("seconds", 86_400), ("minutes", 1440), ("hours", 24)):
        if days * in_a_day < (48 if unit == "hours" else 120):
            return f"{days * in_a_day:.{1 if days * in_a_day < 10 else 0}f} {unit}"
    return f"{days:,.0f} days" if days < 730 else f"{days / 365:,.0f} years"


# ---- As JSON


def _as_json(base: Plan, others: list[tuple[str, Plan]], life: float, free: int | None) -> Json:
    return {
        "machine": {**asdict(base.machine), "free_bytes": free},
        **_facts_json(base, life, free),
        "changes": [{"change": name, **_facts_json(plan, life, free)} for name, plan in others],
    }


def _facts_json(plan: Plan, life: float, free: int | None) -> Json:
    asked = plan.question
    days = plan.days_to_write(life)
    return {
        **_ranks_json(plan),
        "table": {
            "rows": asked.rows,
            "dim": asked.dim,
            "dtype": asked.dtype,
            "optimizer": asked.optimizer.kind,
            "record_bytes": plan.record_bytes,
        },
        "step": {
            "ids": asked.batch,
            "zipf": asked.zipf,
            "lookahead": asked.lookahead,
            "window": plan.window,
            "unique_rows": plan.unique_rows,
            "misses": plan.misses,
            "hit_rate": plan.hit_rate,
            "evicted_rows": plan.evicted_rows,
            "fits_batch": plan.fits_batch,
            "reads": plan.reads,
            "read_bytes": plan.read_bytes,
            "read_path": plan.read_path,
            "written_bytes": plan.written_bytes,
            "write_amplification": plan.write_amplification,
        },
        "ram": {
            "budget_bytes": asked.ram,
            "minimum_bytes": plan.minimum_ram,
            "asked_bytes": plan.asked_ram,
            "frames": plan.frames,
            "frames_bytes": plan.frames_bytes,
            "directory_bytes": plan.directory_bytes,
            "buffers_bytes": plan.buffers_bytes,
            "window_bytes": plan.window_bytes,
        },
        "disk": {"bytes": plan.disk_bytes, "segments": plan.segments, "fits": _fits(plan, free)},
        "seconds": {**asdict(plan.times), "step": plan.step_s},
        "steps_per_s": plan.steps_per_s,
        "binds": plan.binds,
        "written_bytes_per_day": plan.written_bytes_per_day,
        "days_to_endurance": None if math.isinf(days) else days,
    }


def _ranks_json(plan: Plan) -> Json:
    asked = plan.question
    if asked.ranks == 1:
        return {}
    return {
        "ranks": {
            "ranks": asked.ranks,
            "per_host": asked.ranks_per_host,
            "rows": asked.stored,
            "ram_bytes": asked.rank_ram,
            "link_bytes_per_s": asked.rank_bytes_per_s,
            "latency_s": asked.latency_s,
            "forward_bytes": plan.exchanged.forward_bytes,
            "backward_bytes": plan.exchanged.backward_bytes,
            "is_predicted": True,
        }
    }
