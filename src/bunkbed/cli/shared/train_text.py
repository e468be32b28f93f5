"""What ``bunkbed train`` prints about its data, options, tables and outcome."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from bunkbed.cli.shared.console import escape
from bunkbed.core.budget import format_bytes, parse_bytes
from bunkbed.core.types import Json
from bunkbed.train.output.events import EpochReport, Outcome
from bunkbed.train.settings.config import TrainConfig

if TYPE_CHECKING:
    from bunkbed.run.run import Run
    from bunkbed.train.data.interactions import Dataset
    from bunkbed.train.evaluate.evaluator import EvalResult


def say_decisions(console: Console, values: Json, reasons: dict[str, str]) -> None:
    """Print options that were decided, each with its reason."""
    shown = {name: "by the order" if values[name] is None else values[name] for name in reasons}
    listed = ", ".join(f"{name.replace('_', '-')} {shown[name]} [dim]({why})[/]" for name, why in reasons.items())
    if reasons:
        console.print(f"[b]auto[/b]    {listed}", soft_wrap=True, highlight=False)


def explained(values: Json, reasons: dict[str, str]) -> Json:
    """Return decided options with their reasons, for JSON."""
    return {name: {"value": values[name], "reason": why} for name, why in reasons.items()}


def say_data(console: Console, data: Dataset) -> None:
    """Print what was read, and what was left out."""
    train = data.train
    lines = [
        f"[b]{escape(Path(train.source).name)}[/b]  {len(train):,} pairs of {data.num_users:,} users and "
        f"{data.num_items:,} items  [dim]({escape(train.form)})[/]"
    ]
    if train.duplicates:
        lines.append(f"{train.duplicates:,} repeated pairs dropped: a pair counts once")
    for pairs in (train, data.test):
        if pairs is not None and pairs.malformed:
            lines.append(
                f"[yellow]{pairs.malformed:,} malformed rows of {escape(Path(pairs.source).name)} left out[/], "
                f"the first: {escape(pairs.first_malformed)}; --strict stops there"
            )
        if pairs is not None and pairs.low_ratings:
            lines.append(
                f"{pairs.low_ratings:,} rows of {escape(Path(pairs.source).name)} left out for their low ratings"
            )
        if pairs is not None and pairs.empty_users:
            lines.append(
                f"{pairs.empty_users:,} users without items left out of {escape(Path(pairs.source).name)}: "
                "their lines hold no pair"
            )
    if data.test is not None:
        name = escape(Path(data.test.source).name) if data.split == "random" else f"split {data.split}"
        lines.append(f"[b]{name}[/b]  {len(data.test):,} pairs to judge by")
    if data.candidates is not None:
        width = data.candidates.negatives.shape[1]
        lines.append(f"[b]{escape(Path(data.candidates.source).name)}[/b]  {width} negatives for each")
    if data.cold_users or data.cold_items:
        lines.append(
            f"{data.cold_users:,} users and {data.cold_items:,} items stand only in the test"
            f"{' files' if data.split == 'random' else ''}; "
            "they are ranked too, untrained"
        )
    for line in lines:
        console.print(line, soft_wrap=True)


def say_features(console: Console, about: Json) -> None:
    """Print what files of features said."""
    for side, found in about.items():
        columns = [each for each in found["columns"] if each["name"] not in found.get("absent", [])]
        listed = escape(", ".join(f"{each['name']} {_said(each)}" for each in columns if each["features"]))
        name, count = escape(Path(found["source"]).name), sum(each["features"] for each in columns)
        ids = f"{found['ids']:,} {side}s (column {escape(repr(found['id_column']))})"
        lines = [f"[b]{name}[/b]  {ids} with {count:,} features: {listed}"]
        left_out = sum(each["left_out"] for each in found["columns"])
        if left_out:
            lines.append(f"{left_out:,} values of one {side} alone left out: they say nothing about others")
        if found["new"]:
            lines.append(f"{found['new']:,} {side}s have no interactions; those with features are ranked by these")
        if found.get("absent"):
            lines.append(f"{escape(', '.join(found['absent']))}: not in this file; no {side} has them now")
        if found.get("lost"):
            lines.append(f"{found['lost']:,} {side}s that had features are not in this file, and have none now")
        for line in lines:
            console.print(line, soft_wrap=True)


def _said(column: Json) -> str:
    return "(number)" if column["kind"] == "number" else f"({column['features']:,} values)"


def say_tables(console: Console, run: Run, config: TrainConfig) -> None:
    """Print the sizes of the tables, and the order of the pairs."""
    parts = []
    total = 0
    for name, table in run.tables.items():
        parts.append(f"{name} {table.num_rows or 0:,} x {table.dim}")
        total += table.nbytes
    times = total / parse_bytes(config.ram)
    console.print(
        f"[b]tables[/b]  {', '.join(parts)}: {format_bytes(total)} with optimizer state; "
        f"RAM budget {ram_text(config)}{f', {times:.1f} times smaller' if times > 1 else ''}",
        soft_wrap=True,
    )
    if config.blocks is not None:
        users, items = config.blocks
        console.print(
            f"[b]order[/b]   pairs by {users:,} blocks of users and {items:,} of items ({config.order}); "
            "--order uniform has the figures of more RAM, and reads more from disk",
            soft_wrap=True,
        )


def say_outcome(
    console: Console,
    folder: Path,
    config: TrainConfig,
    outcome: Outcome,
    last: EpochReport | None,
    result: EvalResult | None,
    picture: Path,
    data: Dataset,
) -> None:
    """Print the end of a training."""
    from bunkbed.train.output.display import main_metrics

    def say(label: str, text: str) -> None:
        console.print(f"[dim]{label:<8}[/]{text}", soft_wrap=True)

    if outcome.best_epoch is not None and outcome.best:
        quality = _quality(outcome.best, main_metrics(outcome.best, config.metric))
        ranking = ""
        if config.valid == "none":
            ranking = "  [dim]validation, before the training on all pairs[/]"
        elif last is not None:
            ranking = f"  [dim]validation, {last.ranking}; chosen by {config.metric}[/]"
        say("best", f"epoch {outcome.best_epoch}  {quality}{ranking}")
    if result is not None:
        quality = _quality(result.metrics, list(result.metrics))
        say("valid" if result.split == "validation" else "test", f"{quality}  [dim]{result.split}, {result.ranking}[/]")
    if outcome.stopped_early:
        say("stopped", f"after epoch {outcome.epoch}: no better epoch within the patience")
    say("run", escape(str(folder)))
    say("picture", escape(str(picture)))
    if outcome.interrupted:
        where = f"after epoch {outcome.epoch}, step {outcome.step:,}"
        console.print(f"[yellow]interrupted[/] {where}; everything is committed", soft_wrap=True)
        say("resume", f"[b]bunkbed train --resume {escape(shlex.quote(str(folder)))}[/b]")
    else:
        user = data.train.user_vocab.decode([0])[0]
        say("try", escape(shlex.join(["bunkbed", "recommend", str(folder), "--user", str(user), "-k", "10"])))


def _quality(metrics: dict[str, float], names: list[str]) -> str:
    return "  ".join(f"{name} [b]{metrics[name]:.4f}[/b]" for name in names)


def ram_text(config: TrainConfig) -> str:
    """Return the RAM budget as text."""
    return format_bytes(parse_bytes(config.ram))
