"""The Typer application with all sub-commands."""

from __future__ import annotations

from typing import Annotated

import typer

from bunkbed.cli.commands.changes import changes
from bunkbed.cli.commands.compare import compare
from bunkbed.cli.commands.copy import copy
from bunkbed.cli.commands.demo import demo
from bunkbed.cli.commands.inspect import check, info, snapshots
from bunkbed.cli.commands.judge import evaluate, recommend
from bunkbed.cli.commands.neighbors import neighbors
from bunkbed.cli.commands.plan import plan
from bunkbed.cli.commands.report import report
from bunkbed.cli.commands.reshard import reshard
from bunkbed.cli.commands.rows import export_table, import_table
from bunkbed.cli.commands.serve import serve
from bunkbed.cli.commands.sweep import sweep
from bunkbed.cli.commands.train import train
from bunkbed.cli.version import version_text

app = typer.Typer(
    name="bunkbed",
    help="Embedding tables larger than RAM, trained exactly as if they fitted.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With --version: also the build, this machine and the libraries.")
    ] = False,
    # `bunkbed.cli.main` removes --debug from the arguments before this call. It is declared here for --help.
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error comes from (also BUNKBED_DEBUG=1).")
    ] = False,
) -> None:
    """Embedding tables larger than RAM, trained exactly as if they fitted."""
    if version:
        typer.echo(version_text(verbose))
        raise typer.Exit
    if verbose:
        raise typer.BadParameter("goes with --version; sub-commands have their own options", param_hint="--verbose")
    if context.invoked_subcommand is None:
        raise typer.BadParameter("a command is missing; `bunkbed --help` lists them")


_LEARN, _LOOK, _ROWS = "Learn", "Look", "Rows in and out"
app.command("demo", rich_help_panel=_LEARN)(demo)
app.command("train", rich_help_panel=_LEARN)(train)
app.command("eval", rich_help_panel=_LEARN)(evaluate)
app.command("recommend", rich_help_panel=_LEARN)(recommend)
app.command("compare", rich_help_panel=_LEARN)(compare)
app.command("serve", rich_help_panel=_LEARN)(serve)
app.command("plan", rich_help_panel=_LOOK)(plan)
app.command("info", rich_help_panel=_LOOK)(info)
app.command("report", rich_help_panel=_LOOK)(report)
app.command("check", rich_help_panel=_LOOK)(check)
app.command("snapshots", rich_help_panel=_LOOK)(snapshots)
app.command("neighbors", rich_help_panel=_LOOK)(neighbors)
app.command("copy", rich_help_panel=_ROWS)(copy)
app.command("reshard", rich_help_panel=_ROWS)(reshard)
app.command("import", rich_help_panel=_ROWS)(import_table)
app.command("export", rich_help_panel=_ROWS)(export_table)
app.command("changes", rich_help_panel=_ROWS)(changes)
app.command("sweep", rich_help_panel=_ROWS)(sweep)
