"""``bunkbed neighbors``: print the rows most similar to a given row."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table as Listing

from bunkbed.cli.shared.console import ConfigOption, JsonOption, UsageProblem, escape, print_json, stderr, stdout
from bunkbed.cli.shared.opened_table import open_rows
from bunkbed.core.arguments import Ids


class Metric(StrEnum):
    """Measures of the similarity of two rows."""

    dot = "dot"
    cosine = "cosine"


def neighbors(
    path: Annotated[Path, typer.Argument(help="Folder of a table or of a run.", metavar="TABLE")],
    *,
    id: Annotated[
        str,
        typer.Option("--id", help="Compare with this row; in a training run: as in the training file.", metavar="ID"),
    ],
    k: Annotated[int, typer.Option("-k", "--k", help="Number of rows.", min=1)] = 10,
    metric: Annotated[Metric, typer.Option(help="Measure of similarity.")] = Metric.dot,
    table: Annotated[
        str | None, typer.Option("--table", help="Read this table of a run; default: item.", metavar="NAME")
    ] = None,
    snapshot: Annotated[
        str | None,
        typer.Option(help="Read this snapshot; default: a training run's best, else the last commit.", metavar="NAME"),
    ] = None,
    ram: Annotated[str, typer.Option(help="RAM budget.", metavar="BYTES")] = "1GiB",
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Print the rows most similar to a given row. Exact, because it reads every stored row."""
    import bunkbed as bb

    with open_rows(path, table, snapshot, ram, command="neighbors", default="item") as opened:
        vocab = opened.vocab
        one = _number(id) if vocab is None else vocab.index(id, what=opened.what)
        with stderr().status("reading rows"):
            found, scores = bb.neighbors(opened.table, one, k, metric=metric.value)
        name = opened.table.name
        has_features = opened.has_features

    def to_labels(ids: Ids) -> Sequence[int | str]:
        return ids.tolist() if vocab is None else vocab.decode(ids)

    is_row = found >= 0  # the id is -1 where fewer than k rows are stored
    labels = to_labels(found[is_row])
    pairs = list(zip(labels, scores[is_row].tolist(), strict=True))
    if json:
        listed = [{"id": label, "score": score} for label, score in pairs]
        print_json(
            {
                "path": path,
                "table": name,
                "id": to_labels(np.array([one]))[0],
                "metric": metric.value,
                "neighbors": listed,
            }
        )
        return
    if has_features:
        stderr().print(
            f"compared: the rows of {escape(name)} without their features, which are in {escape(name)}_feature",
            soft_wrap=True,
        )
    listing = Listing(box=None, padding=(0, 3, 0, 0), header_style="dim")
    listing.add_column("", justify="right", style="dim")
    listing.add_column("id")
    listing.add_column(metric.value, justify="right")
    for place, (label, score) in enumerate(pairs, start=1):
        listing.add_row(str(place), escape(str(label)), f"{score:.4f}")
    console = stdout()
    console.print(f"nearest to [b]{escape(id)}[/b] in {escape(name)}", soft_wrap=True)
    console.print(listing)


def _number(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise UsageProblem(f"--id must be an integer, as this table's ids are, got {text!r}") from None
    if not -(2**63) <= number < 2**63:
        raise UsageProblem(f"--id must be below 2**63, got {text}")
    return number
