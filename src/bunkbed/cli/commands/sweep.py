"""``bunkbed sweep``: remove the rows that a table's rules let go, and show the ages of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, cast

import typer
from rich.table import Table as Grid

from bunkbed.cli.shared.console import (
    ConfigOption,
    JsonOption,
    UsageProblem,
    escape,
    print_error,
    print_json,
    stderr,
    stdout,
)
from bunkbed.core.budget import format_bytes
from bunkbed.core.retention import Retention, cut_text, rules_text
from bunkbed.core.types import Json
from bunkbed.files.kinds import kind_of
from bunkbed.table.sweeps import Bin, Swept, expired_by_age
from bunkbed.table.table import Table

_BAR = 40  # columns of the longest bar
_STAYS, _GOES = "━", "╌"


def sweep(
    path: Annotated[Path, typer.Argument(help="Folder of a table, of a sharded table or of a run.", metavar="TABLE")],
    *,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Remove nothing: show what would go of the last commit, while a trainer works."),
    ] = False,
    clock: Annotated[
        int | None,
        typer.Option(help='Set the clock of a table with clock="event" first, not before its present time.', min=0),
    ] = None,
    expire: Annotated[
        int | None, typer.Option(help="With --dry-run: as if this were the table's rule.", metavar="N", min=1)
    ] = None,
    max_rows: Annotated[int | None, typer.Option(help="With --dry-run: the same.", metavar="N", min=1)] = None,
    name: Annotated[str | None, typer.Option("--table", help="Table of a run.", metavar="NAME")] = None,
    ram: Annotated[str, typer.Option(help="RAM budget.", metavar="BYTES")] = "1GiB",
    config: ConfigOption = None,
    json: JsonOption = False,
) -> int:
    """Remove the rows that have expired, and those beyond the most rows, by the table's rules; then commit.

    Reads the whole table, which no trainer may have open for writing meanwhile. An interrupted sweep leaves it at its
    last commit.
    """
    import bunkbed as bb

    given = {key: value for key, value in {"expire": expire, "max_rows": max_rows}.items() if value is not None}
    if given and not dry_run:
        raise UsageProblem("--expire and --max-rows show what other rules would do; give --dry-run with them")
    try:
        with ExitStack() as opened:
            if kind_of(path) == "run":
                run = opened.enter_context(bb.Run(path, mode="r" if dry_run else "w", ram=ram))
                if name not in run.table_names:
                    raise UsageProblem(f"run {path}: give --table as one of {', '.join(run.table_names)}")
                table, commit = run.table(name), cast("Callable[[], int]", run.commit)
            elif name is not None:
                raise UsageProblem(f"{path} is one table; leave --table out")
            else:
                table = opened.enter_context(bb.open(path, mode="r" if dry_run else "w", ram=ram))
                commit = table.commit
            if clock is not None and dry_run:
                _require_later(table, clock)
            elif clock is not None:
                table.clock = clock
            with stderr().status(f"reading {len(table):,} rows"):
                if not dry_run:
                    swept, rules = table.sweep(), table.retention
                else:
                    table.sweep_rules()
                    rules = replace(table.retention, **cast("Json", given))
                    swept = table.swept_by(rules, table.clock if clock is None else clock, dry_run=True)
            before, took = table.version, _disk_bytes(table)
            version = before if dry_run else commit()
            if swept.removed and not dry_run:
                with stderr().status("freeing the disk"):
                    for _ in range(2):  # the last two commits keep their files
                        table.compact()
                        version = commit()
            disk = took, _disk_bytes(table)
            title = str(path) if name is None else f"table {name} of {path}"
            _print(title, rules, swept, version, disk, is_new=version != before, as_json=json)
    except KeyboardInterrupt:
        print_error("interrupted; the table is as it was")
        return 130
    return 0


def _require_later(table: Table, clock: int) -> None:
    if table.retention.clock != "event":
        raise UsageProblem(f"table {table.name}: its clock is its step, which --clock cannot set")
    if clock < table.clock:
        raise UsageProblem(f"table {table.name}: its clock is at {table.clock}, and --clock {clock} is before that")


def _disk_bytes(table: Table) -> int:
    return int(table.stats()["disk_bytes"])


def _print(
    title: str, rules: Retention, swept: Swept, version: int, disk: tuple[int, int], *, is_new: bool, as_json: bool
) -> None:
    """Print a sweep; `disk`: the bytes of the table's files before and after it."""
    if as_json:
        facts = {**vars(swept), "removed": swept.removed, "rules": vars(rules), "version": version}
        facts["disk_bytes"] = {"before": disk[0], "after": disk[1]}
        for bins in ("ages", "counts"):
            facts[bins] = [vars(one) for one in getattr(swept, bins)]
        print_json({"path": title, **facts})
        return
    console = stdout()
    lines = Grid.grid(padding=(0, 3, 0, 0))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column()
    goes = "would go" if swept.dry_run else "went"
    lines.add_row("before", f"{swept.rows:,} rows, clock {swept.clock:,}")
    lines.add_row("rules", rules_text(rules))
    lines.add_row(goes, f"{swept.expired:,} that expired")
    if rules.max_rows is not None:
        lines.add_row(goes, f"{swept.evicted:,} beyond the most rows" + cut_text(rules, swept.cut))
    if swept.spared:
        lines.add_row("spared", f"{swept.spared:,} that expired, because of keep")
    lines.add_row("after", f"{swept.rows - swept.removed:,} rows; the others took {format_bytes(swept.freed_bytes)}")
    if not swept.dry_run:
        lines.add_row("disk", f"{format_bytes(disk[0])} before, {format_bytes(disk[1])} now")
    lines.add_row("commit", f"{version}, made now" if is_new else f"{version}, the last one")
    console.print(f"[b]{escape(title)}[/b]", soft_wrap=True)
    console.print(lines, soft_wrap=True)
    if swept.ages:
        unit = "steps" if rules.clock == "step" else "units"
        console.print(f"\n[dim]rows before, by age in {unit} of the clock ({_GOES} expired)[/]", soft_wrap=True)
        console.print(_picture(swept.ages, expired_by_age(swept, rules.expire)), soft_wrap=True)
        console.print("\n[dim]rows before, by the number of updates that named them[/]", soft_wrap=True)
        console.print(_picture(swept.counts, [0] * len(swept.counts)), soft_wrap=True)


def _picture(bins: Sequence[Bin], expired: Sequence[int]) -> Grid:
    """Return a bar for each bin; `expired`: how many rows of each have expired."""
    grid = Grid.grid(padding=(0, 2, 0, 0))
    columns: list[Literal["left", "right"]] = ["right", "right", "left"]
    for justify in columns:
        grid.add_column(justify=justify, no_wrap=True)
    most = max(one.rows for one in bins)
    for one, gone in zip(bins, expired, strict=True):
        span = f"{one.low:,}" if one.low == one.high else f"{one.low:,} to {one.high:,}"
        length = max(1, round(_BAR * one.rows / most))
        dashes = round(length * gone / one.rows)
        bar = f"[cyan]{_STAYS * (length - dashes)}[/][yellow]{_GOES * dashes}[/]"
        grid.add_row(span, f"{one.rows:,}", bar)
    return grid
