"""``bunkbed serve``: rows, neighbours and recommendations over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bunkbed.cli.shared.console import ConfigOption, JsonOption, UsageProblem, escape, need, print_json, stdout
from bunkbed.core.budget import parse_bytes
from bunkbed.train.settings.run_config import CONFIG_NAME


def serve(
    path: Annotated[Path, typer.Argument(help="Folder of a table or of a run.", metavar="RUN|TABLE")],
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0: every network. There are no passwords.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.", min=1, max=65535)] = 8080,
    ram: Annotated[str, typer.Option(help="RAM budget of the rows in all workers together.", metavar="BYTES")] = "1GiB",
    workers: Annotated[int, typer.Option(help="Processes.", min=1, max=256)] = 1,
    snapshot: Annotated[
        str | None,
        typer.Option(
            help="Follow the snapshot of this name; default: a training run's best, else the newest commit.",
            metavar="NAME",
        ),
    ] = None,
    max_age: Annotated[
        float, typer.Option("--max-age", help="Greatest age of the rows in seconds; older ones get status 503.")
    ] = 2.0,
    max_rows: Annotated[int, typer.Option("--max-rows", help="Most ids, labels or users of a request.", min=1)] = 1000,
    max_k: Annotated[int, typer.Option("--max-k", help="Most results for each.", min=1)] = 1000,
    max_body: Annotated[str, typer.Option("--max-body", help="Most bytes of a request.", metavar="BYTES")] = "1MiB",
    max_scan: Annotated[
        str,
        typer.Option("--max-scan", help="Largest table that a request may compare with as a whole.", metavar="BYTES"),
    ] = "1GiB",
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", help="Most requests at once; others get status 503.", min=1)
    ] = 256,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Serve rows, neighbours and recommendations over HTTP, while training goes on. Follows the newest commit."""
    need("fastapi", "uvicorn", "orjson", "prometheus_client", "pyarrow", command="serve", extra="serve")
    if (path / CONFIG_NAME).exists():
        need("torch", command="serve", extra="train,serve")
    if not max_age > 0:
        raise UsageProblem(f"--max-age must be above 0 seconds, got {max_age:g}")
    from bunkbed.serve import workers as processes
    from bunkbed.serve.settings import ServeSettings
    from bunkbed.serve.source import opened

    settings = ServeSettings(
        path=str(path),
        ram=parse_bytes(ram),
        workers=workers,
        snapshot=snapshot,
        max_age_s=max_age,
        max_rows=max_rows,
        max_k=max_k,
        max_body=parse_bytes(max_body),
        max_scan=parse_bytes(max_scan),
        max_waiting=max_waiting,
    )
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    processes.require_free(host, port)
    with opened(settings) as source:
        facts = source.facts()
        if json:
            print_json({"path": path, "address": address, "workers": workers, **facts})
        else:
            _show(facts, address, workers)
        if workers == 1:
            processes.run_one(settings, source, host=host, port=port)
            return
    processes.run_several(settings, host=host, port=port)


def _show(facts: dict[str, object], address: str, workers: int) -> None:
    """Print what is served, and where."""
    console = stdout()
    tables = facts["tables"]
    assert isinstance(tables, dict)
    number = "" if workers == 1 else f", {workers} workers"
    console.print(f"serving [b]{escape(str(facts['name']))}[/b] at commit {facts['version']}{number}", soft_wrap=True)
    for name, about in tables.items():
        rows = "any id" if about["num_rows"] is None else f"{about['num_rows']:,} rows"
        by = "ids, labels" if about["has_labels"] else "ids"
        console.print(f"  {escape(name)}: {rows} x {about['dim']}, by {by}", soft_wrap=True)
    paths = ["/lookup", "/neighbors", *(["/recommend"] if facts["recommends"] else []), "/info", "/healthz", "/metrics"]
    console.print(f"{address}  {'  '.join(paths)}", soft_wrap=True)
    console.print(f"{address}/docs describes and tries them; Ctrl-C stops", soft_wrap=True)
