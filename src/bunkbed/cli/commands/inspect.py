"""``bunkbed info``, ``check`` and ``snapshots``: show files on disk. Only --repair and --drop change files."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as Grid

from bunkbed.cli.shared.console import (
    ConfigOption,
    JsonOption,
    UsageProblem,
    byte_progress,
    escape,
    print_error,
    print_json,
    stdout,
)
from bunkbed.core.budget import format_bytes
from bunkbed.core.retention import Retention, rules_text
from bunkbed.core.types import Json
from bunkbed.files.kinds import kind_of
from bunkbed.maintenance.snapshots import held_bytes
from bunkbed.table.table import Table
from bunkbed.train.settings.run_config import CONFIG_NAME, read_config

if TYPE_CHECKING:
    import bunkbed

PathArgument = Annotated[Path, typer.Argument(help="Folder of a table or of a run.", metavar="PATH")]
RamOption = Annotated[str, typer.Option(help="RAM budget for reading.", metavar="BYTES")]


def info(path: PathArgument, *, ram: RamOption = "1GiB", config: ConfigOption = None, json: JsonOption = False) -> None:
    """Show facts of a table or a run: rows, optimizer, bytes per tier, version, snapshots."""
    import bunkbed as bb

    kind = kind_of(path)
    if kind != "run":
        with bb.open(path, mode="r", ram=ram) as table:
            about = {"kind": kind, "path": path, **_about(table), "snapshots": bb.snapshots(path)}
            about["cursors"] = bb.cursors(path)
            if isinstance(table, bb.ShardedTable):
                about["shards"] = _shards(table)
        if json:
            print_json(about)
        else:
            _print_table(stdout(), about)
        return
    with bb.Run(path, ram=ram, mode="r") as run:
        tables = {name: _about(run.table(name)) for name in run.table_names}
        for name in tables:
            tables[name]["cursors"] = bb.cursors(path, table=name)
        about = {
            "kind": "run",
            "path": path,
            "epoch": run.epoch,
            "meta": run.meta,
            "training": read_config(path) if (path / CONFIG_NAME).exists() else None,
            "snapshots": run.snapshots(),
            "tables": tables,
        }
    if json:
        print_json(about)
    else:
        _print_run(stdout(), about)


def check(
    path: PathArgument,
    *,
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove files that no commit needs. Never goes back to an earlier commit.")
    ] = False,
    fall_back_to: Annotated[
        int | None,
        typer.Option(help="With --repair: go back to this sound commit if the newest is damaged.", metavar="EPOCH"),
    ] = None,
    ram: RamOption = "256MiB",
    config: ConfigOption = None,
    json: JsonOption = False,
) -> int:
    """Verify every stored byte that a commit needs, and repair what can be repaired without guessing.

    Exit codes: 0 sound (now); 1 problems remain, or it could not be checked, which stderr says; 2 the command line is
    wrong; 130 interrupted.
    """
    import bunkbed as bb

    if fall_back_to is not None and not repair:
        raise UsageProblem("--fall-back-to goes back to an older commit, which only --repair does; give both")
    try:
        kind = kind_of(path)
        with byte_progress("checking") as progress:
            report = bb.check(path, repair=repair, epoch=fall_back_to, ram=ram, progress=progress)
    except KeyboardInterrupt:
        print_error("interrupted before everything was looked at")
        return 130
    if json:
        leftovers = [{"file": file, "bytes": size} for file, size in report.leftovers]
        print_json(
            {
                "path": path,
                "sound": not report,
                "problems": [problem.as_dict() for problem in report],
                "repaired": report.repaired,
                "leftovers": leftovers,
                "epochs": report.epochs,
                "sound_epochs": report.sound_epochs,
                "bytes_read": report.bytes_read,
            }
        )
        return 1 if report else 0
    console = stdout()
    for line in report.repaired:
        console.print(f"[green]repaired[/]  {escape(line)}", soft_wrap=True)
    for problem in report:
        where = escape(f" (byte {problem.offset} of {problem.file.name})") if problem.offset is not None else ""
        console.print(f"[red]problem[/]  {escape(problem.found)}{where}", soft_wrap=True)
        console.print(f"         {escape(problem.meaning)}", soft_wrap=True)
        console.print(f"         [b]{escape(problem.remedy)}[/]", soft_wrap=True)
    if report.leftovers:
        size = format_bytes(sum(size for _, size in report.leftovers))
        console.print(
            f"{len(report.leftovers)} leftovers ({size}) that no commit names, as after a kill; --repair or the next "
            "opening for writing removes them",
            soft_wrap=True,
        )
    name = escape(str(path))
    if report:
        count = "1 problem" if len(report) == 1 else f"{len(report)} problems"
        console.print(f"{name}: {count} in this {kind}", soft_wrap=True)
        return 1
    console.print(f"[green]sound[/]  {kind} {name}", soft_wrap=True)
    return 0


def snapshots(
    path: PathArgument,
    *,
    drop: Annotated[
        list[str] | None,
        typer.Option("--drop", help="Drop this snapshot; may be given several times.", metavar="NAME"),
    ] = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """List the snapshots with the bytes that each needs, or drop some."""
    import bunkbed as bb

    kind_of(path)
    before, held_before = (bb.snapshots(path), held_bytes(path)) if drop else ({}, 0)
    for name in drop or []:
        bb.drop_snapshot(path, name)
    found, held = bb.describe_snapshots(path), held_bytes(path)
    if json:
        print_json(
            {
                "path": path,
                "snapshots": {kept.name: kept.epoch for kept in found},
                "held_bytes": held,
                "details": [kept.as_dict() for kept in found],
                "dropped": drop or [],
            }
        )
        return
    console = stdout()
    for name in drop or []:
        console.print(f"dropped {escape(name)} (commit {before[name]})", soft_wrap=True)
    if drop:
        console.print(f"[dim]{format_bytes(held_before - held)} that no other commit needs[/]")
    if not found:
        console.print(f"{escape(str(path))} keeps no snapshots", soft_wrap=True)
        return
    grid = Grid(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("snapshot", "commit", "written", "step", "rows", "only it holds"):
        grid.add_column(
            column, justify="left" if column in ("snapshot", "written") else "right", no_wrap=column == "snapshot"
        )
    for kept in found:
        grid.add_row(
            escape(kept.name),
            str(kept.epoch),
            kept.time.astimezone().strftime("%Y-%m-%d %H:%M:%S"),
            "" if kept.step is None else f"{kept.step:,}",
            f"{kept.stored_rows:,}",
            format_bytes(kept.own_bytes),
        )
    console.print(grid)
    together = f"together they hold {format_bytes(held)} beyond the newest commit"
    console.print(f"[dim]{together}; what several hold is freed with the last of these[/]", soft_wrap=True)


def _about(table: Table) -> Json:
    stats = table.stats()
    return {
        "num_rows": table.num_rows,
        "dim": table.dim,
        "dtype": str(table.dtype),
        "optimizer": _optimizer(table.optimizer),
        "init": repr(table.init),
        "seed": table.seed,
        "slots": list(table.slots),
        "state_dtype": getattr(table.optimizer, "state_dtype", None),
        "record_bytes": table.record_bytes,
        "stored_rows": int(stats["stored_rows"]),
        "counted_ids": int(stats["counted_ids"]),
        "ram_bytes": int(stats["ram_bytes"]),
        "disk_bytes": int(stats["disk_bytes"]),
        "live_bytes": int(stats["live_bytes"]),
        "tombstones": int(stats["tombstones"]),
        "segments": int(stats["segments"]),
        "epoch": table.epoch,
        "step": table.step,
        "rules": vars(table.retention) if table.retention else None,
        "clock": table.clock,
        "meta": table.meta,
    }


def _shards(table: bunkbed.ShardedTable) -> list[Json]:
    names = ("stored_rows", "disk_bytes", "live_bytes")
    every = zip(table.directories, table.shard_stats(), strict=True)
    return [{"path": path, **{name: int(stats[name]) for name in names}} for path, stats in every]


def _print_table(console: Console, about: Json) -> None:
    console.print(f"{about['kind']} [b]{escape(str(about['path']))}[/b]", soft_wrap=True)
    grid = _grid()
    grid.add_row("rows", f"{about['stored_rows']:,} stored of {_rows(about)}")
    rules = Retention(**about["rules"]) if about["rules"] else Retention()
    state = "its state and age" if rules.removes else "its state"
    grid.add_row("row", f"{about['dim']} x {about['dtype']}, {about['record_bytes']:,} bytes with {state}")
    grid.add_row("initially", f"{escape(about['init'])}, seed {about['seed']}")
    grid.add_row("optimizer", escape(about["optimizer"]))
    grid.add_row("slots", f"{', '.join(about['slots'])} in {about['state_dtype']}" if about["slots"] else "none")
    grid.add_row("disk", _disk(about))
    grid.add_row("ram", f"{format_bytes(about['ram_bytes'])}, taken by this command for reading")
    grid.add_row("commit", f"{about['epoch']}, after step {about['step']:,}")
    if rules:
        grid.add_row("rules", _rules(about))
    if about["meta"]:
        grid.add_row("meta", escape(_meta(about["meta"])))
    grid.add_row("snapshots", escape(_snapshots(about["snapshots"])))
    if about["cursors"]:
        grid.add_row("cursors", escape(_snapshots(about["cursors"])))
    console.print(grid, soft_wrap=True)
    for index, shard in enumerate(about.get("shards", ())):
        size = format_bytes(shard["disk_bytes"])
        line = f"[dim]shard {index}[/]  {shard['stored_rows']:,} rows, {size}, {escape(str(shard['path']))}"
        console.print(line, soft_wrap=True)


def _print_run(console: Console, about: Json) -> None:
    console.print(f"run [b]{escape(str(about['path']))}[/b]", soft_wrap=True)
    grid = _grid()
    training = about["training"]
    if training is not None:
        grid.add_row("data", escape(str(training["source"])))
        grid.add_row("model", escape(_model(training["train"])))
    grid.add_row("commit", str(about["epoch"]))
    progress = about["meta"].get("progress")
    if isinstance(progress, dict):
        grid.add_row("trained", f"{progress['epoch']} epochs, {progress['global_step']:,} steps")
        best = "  ".join(f"{name} {value:.4f}" for name, value in progress["best"].items())
        before = "  before the training on all pairs" if progress.get("chosen_on") else ""
        grid.add_row("best", f"epoch {progress['best_epoch']}  {best}{before}" if best else "not evaluated")
    elif about["meta"]:
        grid.add_row("meta", escape(_meta(about["meta"])))
    grid.add_row("snapshots", escape(_snapshots(about["snapshots"])))
    console.print(grid, soft_wrap=True)
    console.print()
    tables = Grid(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for name in ("table", "stored rows", "of", "dim", "disk", "live", "step", "optimizer"):
        tables.add_column(name, justify="left" if name in ("table", "optimizer") else "right")
    for name, table in about["tables"].items():
        tables.add_row(
            escape(name),
            f"{table['stored_rows']:,}",
            _rows(table),
            str(table["dim"]),
            format_bytes(table["disk_bytes"]),
            format_bytes(table["live_bytes"]),
            f"{table['step']:,}",
            escape(table["optimizer"]),
        )
    console.print(tables)
    for name, table in about["tables"].items():
        if table["rules"]:
            console.print(f"[dim]rules of {escape(name)}[/]  {_rules(table)}", soft_wrap=True)
        if table["cursors"]:
            console.print(f"[dim]cursors of {escape(name)}[/]  {escape(_snapshots(table['cursors']))}", soft_wrap=True)


def _model(train: Json) -> str:
    return f"{train.get('model')}, {train.get('loss')}, dim {train.get('dim')}, {train.get('optimizer')}"


def _optimizer(optimizer: Any) -> str:
    """Return the optimizer's name with its learning rate and each field that is not the default."""
    shown = [
        f"{field.name}={getattr(optimizer, field.name)}"
        for field in fields(optimizer)
        if field.name == "lr" or getattr(optimizer, field.name) != field.default
    ]
    return f"{type(optimizer).__name__}({', '.join(shown)})"


def _grid() -> Grid:
    grid = Grid.grid(padding=(0, 3, 0, 0))
    grid.add_column(style="dim")
    grid.add_column()
    return grid


def _rules(about: Json) -> str:
    """Return the rules, and the clock by which rows expire. Only the writer counts the rows that it admits."""
    rules = Retention(**about["rules"])
    clock = f"; the clock is at {about['clock']:,}" if rules.removes else ""
    counts = "" if rules.admit is None else "; the writer's table.stats() counts admitted and refused rows"
    counted = f"; {about['counted_ids']:,} ids are counted" if about["counted_ids"] else ""
    return rules_text(rules) + clock + counted + counts


def _rows(about: Json) -> str:
    return f"{about['num_rows']:,}" if about["num_rows"] is not None else "any id"


def _disk(about: Json) -> str:
    line = (
        f"{format_bytes(about['disk_bytes'])} of the last commit in {about['segments']} segments, "
        f"{format_bytes(about['live_bytes'])} of it live"
    )
    return line + (f"; ids of {about['tombstones']:,} deleted rows" if about["tombstones"] else "")


def _meta(meta: Json) -> str:
    return ", ".join(f"{key} {value}" for key, value in meta.items() if not isinstance(value, (dict, list)))


def _snapshots(kept: dict[str, int]) -> str:
    by_epoch = sorted(kept.items(), key=lambda item: item[1])
    return ", ".join(f"{name} (commit {epoch})" for name, epoch in by_epoch) or "none"
