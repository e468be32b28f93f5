"""``bunkbed sweep``: remove the rows that the rules of a table, or of a run's tables, let go, and show their ages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from bunkbed.core.retention import Retention, rules_text
from bunkbed.core.types import Json
from bunkbed.files.kinds import kind_of
from bunkbed.maintenance.snapshots import held_bytes
from bunkbed.run.run import Run
from bunkbed.table.sweeps import Bin, Swept, expired_by_age, removal_lines
from bunkbed.table.table import Table

_BAR = 40  # columns of the longest bar
_STAYS, _GOES = "━", "╌"


@dataclass(frozen=True)
class _Done:
    """What a sweep did to a table, or would do.

    Attributes:
        name: of the table in its run; empty for a table alone.
        disk_bytes: of the table's files, before disk was freed and after it.
    """

    table: Table
    name: str
    rules: Retention
    swept: Swept
    disk_bytes: tuple[int, int]

    def facts(self) -> Json:
        """Return what ``--json`` prints of a table."""
        facts = {**vars(self.swept), "removed": self.swept.removed, "rules": vars(self.rules)}
        for bins in ("ages", "counts"):
            facts[bins] = [vars(one) for one in getattr(self.swept, bins)]
        return {**facts, "disk_bytes": dict(zip(("before", "after"), self.disk_bytes, strict=True))}


def sweep(
    path: Annotated[Path, typer.Argument(help="Folder of a table, of a sharded table or of a run.", metavar="PATH")],
    *,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Remove nothing: show what would go of the last commit, while a trainer works."),
    ] = False,
    clock: Annotated[
        int | None,
        typer.Option(
            help='Set the clock of each table that is swept first: for clock="event", not before its present time.',
            min=0,
        ),
    ] = None,
    expire: Annotated[
        int | None, typer.Option(help="With --dry-run: as if this were the rule.", metavar="N", min=1)
    ] = None,
    max_rows: Annotated[int | None, typer.Option(help="With --dry-run: the same.", metavar="N", min=1)] = None,
    name: Annotated[
        str | None,
        typer.Option("--table", help="Of a run: this table; default: each with expire or max_rows.", metavar="NAME"),
    ] = None,
    ram: Annotated[str, typer.Option(help="RAM budget.", metavar="BYTES")] = "1GiB",
    config: ConfigOption = None,
    json: JsonOption = False,
) -> int:
    """Remove the rows that have expired, and those beyond the most rows, by the table's rules; then commit.

    Of a run: sweep each table with expire or max_rows, then commit all together; --json has them as a list, "tables".

    Reads the whole of these tables, which no trainer may have open for writing meanwhile. A sweep that is interrupted
    before its commit changes nothing.
    """
    import bunkbed as bb

    given = {key: value for key, value in {"expire": expire, "max_rows": max_rows}.items() if value is not None}
    if given and not dry_run:
        raise UsageProblem("--expire and --max-rows show what other rules would do; give --dry-run with them")
    state = "the table is as it was"
    try:
        with ExitStack() as opened:
            owner: Run | Table
            if kind_of(path) == "run":
                state = "the run is as it was"
                owner = run = opened.enter_context(bb.Run(path, mode="r" if dry_run else "w", ram=ram))
                tables = {one: run.table(one) for one in _names(run, path, name)}
            elif name is not None:
                raise UsageProblem(f"{path} is one table; leave --table out")
            else:
                owner = opened.enter_context(bb.open(path, mode="r" if dry_run else "w", ram=ram))
                tables = {"": owner}
            for table in tables.values():
                table.sweep_rules()
                if clock is not None:
                    _require_later(table, clock)
            before = owner.version
            try:
                done = [_sweep(table, one, given, clock, dry_run=dry_run) for one, table in tables.items()]
                if any(one.table.is_dirty for one in done):
                    owner.commit()
                done = _free(owner, done)
                if json and name is None and "" not in tables:
                    _print_run(path, done, owner.version)
                else:
                    _print(path, done, owner.version, is_new=owner.version != before, as_json=json)
            except KeyboardInterrupt:
                if owner.version != before:
                    state = "the sweep is committed, but its disk may not be free yet"
                raise
    except KeyboardInterrupt:
        print_error(f"interrupted; {state}")
        return 130
    return 0


def _names(run: Run, path: Path, name: str | None) -> list[str]:
    """Return the names of the tables of a run that are swept."""
    if name is not None and name not in run.table_names:
        raise UsageProblem(f"run {path} has no table {name!r}; give --table as one of {', '.join(run.table_names)}")
    names = run.names_to_sweep() if name is None else [name]
    if not names:
        raise ValueError(
            f"run {path} has no table with a rule by which rows go: its tables were made without expire= and "
            "max_rows=; name the rows with delete(ids)"
        )
    return names


def _require_later(table: Table, clock: int) -> None:
    if table.retention.clock != "event":
        raise UsageProblem(f"table {table.name}: its clock is its step, which --clock cannot set")
    if clock < table.clock:
        raise UsageProblem(f"table {table.name}: its clock is at {table.clock}, and --clock {clock} is before that")


def _sweep(table: Table, name: str, given: dict[str, int], clock: int | None, *, dry_run: bool) -> _Done:
    rules = replace(table.retention, **cast("Json", given))
    with stderr().status(f"reading {len(table):,} rows"):
        if dry_run:
            swept = table.swept_by(rules, table.clock if clock is None else clock, dry_run=True)
        else:
            if clock is not None:
                table.clock = clock
            swept = table.sweep()
    took = int(table.stats()["disk_bytes"])
    return _Done(table, name, rules, swept, (took, took))


def _free(owner: Run | Table, done: list[_Done]) -> list[_Done]:
    """Free the disk of tables of which rows went, and return the sweeps with the bytes that their files take then."""
    tables = [one.table for one in done if one.swept.removed and not one.swept.dry_run]
    if tables:
        with stderr().status("freeing the disk"):
            for _ in range(2):  # the last two commits keep their files
                for table in tables:
                    table.compact()
                owner.commit()
    return [replace(one, disk_bytes=(one.disk_bytes[0], int(one.table.stats()["disk_bytes"]))) for one in done]


def _print_run(path: Path, done: Sequence[_Done], version: int) -> None:
    """Print the sweeps of a run as JSON."""
    print_json(
        {
            "path": path,
            "version": version,
            "removed": sum(one.swept.removed for one in done),
            "disk_bytes": {
                key: sum(one.disk_bytes[index] for one in done) for index, key in enumerate(("before", "after"))
            },
            "tables": [{"name": one.name, **one.facts()} for one in done],
        }
    )


def _print(path: Path, done: Sequence[_Done], version: int, *, is_new: bool, as_json: bool) -> None:
    """Print each sweep as text, or one as JSON."""
    for index, one in enumerate(done):
        title = f"table {one.name} of {path}" if one.name else str(path)
        if as_json:
            print_json({"path": title, **one.facts(), "version": version})
            continue
        if index:
            stdout().print()
        _print_text(title, one, f"{version}, made now" if is_new else f"{version}, the last one")
    went = any(one.swept.removed and not one.swept.dry_run for one in done)
    if went and not as_json and (held := held_bytes(path)):
        text = (
            f"snapshots hold {format_bytes(held)} more, with rows that went; bunkbed snapshots lists them, and --drop"
        )
        stdout().print(f"\n[dim]{text} frees their disk[/]", soft_wrap=True)


def _print_text(title: str, done: _Done, commit: str) -> None:
    rules, swept, disk = done.rules, done.swept, done.disk_bytes
    console = stdout()
    lines = Grid.grid(padding=(0, 3, 0, 0))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column()
    lines.add_row("before", f"{swept.rows:,} rows, clock {swept.clock:,}")
    lines.add_row("rules", rules_text(rules))
    for what, rows in removal_lines(swept, rules):
        lines.add_row(what, rows)
    take = "take" if swept.dry_run else "took"
    lines.add_row("after", f"{swept.rows - swept.removed:,} rows; the others {take} {format_bytes(swept.freed_bytes)}")
    if not swept.dry_run:
        lines.add_row("disk", f"{format_bytes(disk[0])} before, {format_bytes(disk[1])} now")
    lines.add_row("commit", commit)
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
        length = max(1, round(_BAR * one.rows / most))
        dashes = round(length * gone / one.rows)
        bar = f"[cyan]{_STAYS * (length - dashes)}[/][yellow]{_GOES * dashes}[/]"
        grid.add_row(str(one), f"{one.rows:,}", bar)
    return grid
