"""``bunkbed eval`` and ``bunkbed recommend``: use a finished run. Both only read."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from bunkbed.cli.shared.console import (
    ConfigOption,
    JsonOption,
    UsageProblem,
    escape,
    need,
    print_json,
    stderr,
    stdout,
)
from bunkbed.cli.shared.train_fit import judge
from bunkbed.cli.shared.train_options import Ranking
from bunkbed.train.settings.run_config import DATA_NAME, read_config

if TYPE_CHECKING:
    from bunkbed.train.data.vocab import Label
    from bunkbed.train.trained import Recommender

RunArgument = Annotated[Path, typer.Argument(help="Folder that bunkbed train wrote.", metavar="RUN")]
SnapshotOption = Annotated[
    str | None,
    typer.Option(help="Use this snapshot; default: best, otherwise the last commit.", metavar="NAME"),
]
RamOption = Annotated[str | None, typer.Option(help="RAM budget; default: the run's.", metavar="BYTES")]


def evaluate(
    run: RunArgument,
    *,
    ranking: Annotated[
        Ranking | None, typer.Option(help="Rank all items, or sampled ones; default: as in training.")
    ] = None,
    ks: Annotated[
        str | None, typer.Option(help="Cut-offs of the metrics; default: as in training.", metavar="K,K")
    ] = None,
    snapshot: SnapshotOption = None,
    ram: RamOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Rank held-out items again and print HR, NDCG, recall and MRR."""
    stored = read_config(run)
    need("torch", "pyarrow", "duckdb", command="eval")
    from bunkbed.train.data.store import load_dataset, open_dataset
    from bunkbed.train.settings.config import TrainConfig

    settings = TrainConfig.of_run(stored["train"])
    cutoffs = None if ks is None else replace(settings, ks=ks).cutoffs
    data = (open_dataset if settings.stream else load_dataset)(run / DATA_NAME)
    with stderr().status("ranking"):
        result = judge(run, settings, data, ranking=ranking and ranking.value, ks=cutoffs, ram=ram, snapshot=snapshot)
    if json:
        print_json({"run": run, **asdict(result)})
        return
    table = Table(box=None, padding=(0, 3, 0, 0), show_header=False)
    for name, value in result.metrics.items():
        table.add_row(name, f"[b]{value:.4f}[/b]")
    console = stdout()
    console.print(f"{escape(str(run))}  {result.split}, {result.ranking}", soft_wrap=True)
    console.print(table)


def recommend(
    run: RunArgument,
    *,
    user: Annotated[str | None, typer.Option(help="User, as in the training file.", metavar="ID")] = None,
    users: Annotated[
        Path | None, typer.Option(help="Recommend to the users of this file, one a line; needs --out.", metavar="FILE")
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(
            help="Recommend to new users, by their interactions in this file; needs --out.",
            metavar="FILE",
        ),
    ] = None,
    user_col: Annotated[
        str | None, typer.Option(help="Users of the history: a column's name, or its position from 0.")
    ] = None,
    item_col: Annotated[
        str | None, typer.Option(help="Items of the history: a column's name, or its position from 0.")
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Recommend to all users; needs --out.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write user, rank, item and score to this new .parquet or .csv file.", metavar="FILE"),
    ] = None,
    items: Annotated[
        Path | None, typer.Option(help="Recommend only the items of this file, one a line.", metavar="FILE")
    ] = None,
    k: Annotated[int, typer.Option("-k", "--k", help="Number of items.", min=1)] = 10,
    include_seen: Annotated[
        bool, typer.Option("--include-seen", help="Also recommend items that the user has in the training file.")
    ] = False,
    snapshot: SnapshotOption = None,
    ram: RamOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Recommend the items with the highest scores, without those seen: to one user, several, all, or new ones."""
    if sum((user is not None, users is not None, history is not None, everyone)) != 1:
        raise UsageProblem("give one of --user ID, --users FILE, --history FILE and --all")
    if (user is None) != (out is not None):
        raise UsageProblem("--out FILE goes with --users, --history and --all, and they need it")
    if history is None and (user_col is not None or item_col is not None):
        raise UsageProblem("--user-col and --item-col are of --history FILE")
    read_config(run)
    need("torch", "pyarrow", command="recommend")
    from bunkbed.train.trained import Recommender, read_histories, read_labels

    with Recommender.load(run, ram=ram, snapshot=snapshot) as model:
        allowed = None if items is None else read_labels(items, model.items, "item")
        if user is not None:
            chosen = None if allowed is None else model.items.decode(allowed)
            ranked = model.recommend(user, k, include_seen=include_seen, items=chosen)
            _show(run, model, user, ranked, include_seen, json)
            return
        assert out is not None
        asked = None if users is None else read_labels(users, model.users, "user")
        new = None if history is None else read_histories(history, model.items, user_col=user_col, item_col=item_col)
        with Progress(
            TextColumn("scoring"), BarColumn(), TaskProgressColumn(), console=stderr(), transient=True
        ) as bar:
            task = bar.add_task("", total=1.0)
            count = model.write(
                out,
                k,
                users=asked,
                histories=None if new is None else new.pairs,
                items=allowed,
                include_seen=include_seen,
                on_progress=lambda share: bar.update(task, completed=share),
            )
    left_out = {} if new is None else {"unknown_pairs": new.unknown, "users_left_out": new.without}
    if json:
        print_json({"run": run, "out": out, "rows": count, **left_out})
        return
    stdout().print(f"wrote {count:,} recommendations to {escape(str(out))}", soft_wrap=True)
    if new is not None and new.unknown:
        stdout().print(
            f"left out: {new.unknown:,} pairs with items that the run does not know, "
            f"and {new.without:,} users who have no other",
            soft_wrap=True,
        )


def _show(
    run: Path, model: Recommender, user: str, ranked: list[tuple[Label, float]], include_seen: bool, json: bool
) -> None:
    """Print the recommendations for one user."""
    seen = model.num_seen(user)
    if json:
        label = model.users.decode([model.users.index(user)])[0]
        best = [{"item": item, "score": score} for item, score in ranked]
        print_json({"run": run, "user": label, "seen": seen, "items": best})
        return
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("", justify="right", style="dim")
    table.add_column("item")
    table.add_column("score", justify="right")
    for place, (item, score) in enumerate(ranked, start=1):
        table.add_row(str(place), escape(str(item)), f"{score:.4f}")
    console = stdout()
    left_out = "" if include_seen else f", {seen:,} seen items left out"
    console.print(f"user [b]{escape(user)}[/b]{left_out}", soft_wrap=True)
    console.print(table)
