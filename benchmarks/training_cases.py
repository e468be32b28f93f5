"""`bunkbed train` beside the same model in plain torch (`benchmarks.train_speed`) as a case of the suite."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks import common, turns
from benchmarks.figures import Figure, Settings


def train_speed(settings: Settings) -> list[Figure]:
    """Samples a second of MovieLens-1M GMF, with cross-entropy and with BPR."""
    figures = []
    for name in ("ml1m-bce", "ml1m"):
        rounds, seconds = settings.pick((2, 0.2), (4, 1.0), (10, 2.0))
        arguments = ["-m", "benchmarks.train_speed", name, "--data", str(settings.data)]
        arguments += ["--tiny"] if settings.tiny else []
        children = {side: common.Child([*arguments, "--child", side]) for side in (turns.OURS, "torch")}
        rates: dict[str, list[float]] = {side: [] for side in children}

        def turn(side: str, seconds: float = seconds, children: dict[str, common.Child] = children) -> float:
            answer = children[side].ask(seconds=seconds)
            return float(answer["pairs"] / answer["seconds"])

        try:
            for side in children:
                turn(side)  # warm: caches, allocators, rows never seen
            for round_index in range(rounds):
                for side in turns.order(list(children), round_index):
                    rates[side].append(turn(side))
        finally:
            for child in children.values():
                child.close()
        figures += compared(name, rates)
    return figures


def compared(name: str, rates: dict[str, list[float]]) -> list[Figure]:
    """The ratio, ours over theirs, and both rates."""
    ratios = [mine / theirs for mine, theirs in zip(rates[turns.OURS], rates["torch"], strict=True)]

    def one(text: str, values: Sequence[float], unit: str, **target: float) -> Figure:
        return Figure(text, statistics.median(values), unit, min(values), max(values), len(values), **target)

    found = [one(f"samples/s, {name}, {turns.OURS} / torch", ratios, "x", at_least=1.5)]
    return found + [one(f"{side}, {name}", values, "samples/s") for side, values in rates.items()]
