"""``bunkbed eval`` and ``bunkbed recommend``: use a finished run. Both only read."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from bunkbed.cli.commands.train import judge, open_reader
from bunkbed.cli.shared.console import ConfigOption, JsonOption, escape, need, print_json, stderr, stdout
from bunkbed.cli.shared.train_options import Ranking
from bunkbed.train.settings.run_config import DATA_NAME, read_config

RunArgument = Annotated[Path, typer.Argument(help="Folder that bunkbed train wrote.", metavar="RUN")]
SnapshotOption = Annotated[
    str | None,
    typer.Option(help="Use this kept epoch; default: the best one, otherwise the last.", metavar="NAME"),
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
    user: Annotated[str, typer.Option(help="User, as in the training file.", metavar="ID")],
    k: Annotated[int, typer.Option("-k", "--k", help="Number of items.", min=1)] = 10,
    include_seen: Annotated[
        bool, typer.Option("--include-seen", help="Also print items that the user has in the training data.")
    ] = False,
    snapshot: SnapshotOption = None,
    ram: RamOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Print the items with the highest scores for a user, without those already seen."""
    stored = read_config(run)
    need("torch", "pyarrow", command="recommend")
    import numpy as np

    from bunkbed.train.data.store import load_vocabs, seen_items
    from bunkbed.train.evaluate.recommend import recommend as best_items
    from bunkbed.train.settings.config import TrainConfig

    settings = TrainConfig.of_run(stored["train"])
    folder = run / DATA_NAME
    users, items = load_vocabs(folder)
    index = users.index(user, what="user")
    seen = seen_items(folder, index)
    exclude = np.empty(0, np.int64) if include_seen else seen
    with open_reader(run, ram or settings.ram, snapshot) as opened:
        rows, scores = best_items(opened, settings, index, k, exclude)
    labels = items.decode(rows)
    if json:
        pairs = zip(labels, scores.tolist(), strict=True)
        ranked = [{"item": label, "score": score} for label, score in pairs]
        print_json({"run": run, "user": users.decode([index])[0], "seen": len(seen), "items": ranked})
        return
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("", justify="right", style="dim")
    table.add_column("item")
    table.add_column("score", justify="right")
    for place, (label, score) in enumerate(zip(labels, scores.tolist(), strict=True), start=1):
        table.add_row(str(place), escape(str(label)), f"{score:.4f}")
    console = stdout()
    left_out = "" if include_seen else f", {len(seen):,} seen items left out"
    console.print(f"user [b]{escape(user)}[/b]{left_out}", soft_wrap=True)
    console.print(table)
