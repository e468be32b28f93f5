"""Sides of a comparison in turns: the one place that says who goes when and how ratios come about.

1. Every side takes the same batches, a few steps a turn, all sides once a round.
2. The order changes every round: rotated, and reversed every other time, so that no side always starts and none
   always follows the same other side, whose caches it would inherit.
3. The first rounds warm caches and allocators and count for nothing.
4. A ratio is taken within a round, from the medians of its turns, because absolute times drift over a run. The
   published ratio is the median over rounds; the least flattering round is printed with it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import common
from benchmarks.harness.figures import Figure

OURS = "bunkbed"
Turn = Callable[[Sequence[int]], Sequence[float]]


@dataclass
class Times:
    """Seconds of every step of every side, round by round."""

    rounds: dict[str, list[list[float]]] = field(default_factory=dict)

    def samples(self, side: str) -> list[float]:
        """All steps of one side."""
        return [seconds for turn in self.rounds[side] for seconds in turn]

    def medians(self, side: str) -> list[float]:
        """The median of each round's turn."""
        return [statistics.median(turn) for turn in self.rounds[side]]

    def median(self, side: str) -> float:
        return statistics.median(self.samples(side))

    def ratios(self, above: str, below: str = OURS) -> list[float]:
        """How many times longer `above` took than `below`, round by round."""
        return [a / b for a, b in zip(self.medians(above), self.medians(below), strict=True)]

    def fastest(self, sides: Sequence[str]) -> str:
        """The side with the least median."""
        return min(sides, key=self.median)


def order(sides: Sequence[str], round_index: int) -> list[str]:
    """Who goes when in a round."""
    start = (round_index // 2) % len(sides)
    rotated = [*sides[start:], *sides[:start]]
    return rotated if round_index % 2 == 0 else rotated[::-1]


def stepping(step: Callable[[Any], Any], batches: Sequence[Any]) -> Turn:
    """A turn that takes one timed step for each batch index."""

    def turn(indices: Sequence[int]) -> list[float]:
        return [common.timed(lambda batch=batches[i]: step(batch)) for i in indices]

    return turn


def take(turns: Mapping[str, Turn], num_batches: int, *, rounds: int, steps: int, warmup: int = 2) -> Times:
    """All sides in turns; each is called with the batch indices of its turn and returns the seconds of its steps."""
    times = Times({name: [] for name in turns})
    for round_index in range(warmup + rounds):
        indices = [(round_index * steps + i) % num_batches for i in range(steps)]
        for name in order(list(turns), round_index):
            seconds = list(turns[name](indices))
            if round_index >= warmup:
                times.rounds[name].append(seconds)
    return times


def interleave(
    sides: Mapping[str, Callable[[Any], Any]],
    batches: Sequence[Any],
    *,
    rounds: int,
    steps: int,
    warmup: int = 2,
) -> Times:
    """`take` for sides that are functions of one batch, all in this process."""
    turns = {name: stepping(step, batches) for name, step in sides.items()}
    return take(turns, len(batches), rounds=rounds, steps=steps, warmup=warmup)


def ratio(times: Times, peer: str, *, name: str = "", note: str = "", **target: float) -> Figure:
    """Peer over ours: the median over rounds, the least and the most flattering round."""
    ratios = times.ratios(peer)
    name = name or f"ratio {peer} / {OURS}"
    return Figure(name, statistics.median(ratios), "x", min(ratios), max(ratios), len(ratios), note=note, **target)


def step_time(times: Times, side: str, *, unit: str = "ms", note: str = "", **target: float) -> Figure:
    """Median, least and most of a side's steps."""
    samples = [seconds * {"s": 1, "ms": 1e3, "us": 1e6}[unit] for seconds in times.samples(side)]
    value = statistics.median(samples)
    return Figure(f"{side}, a step", value, unit, min(samples), max(samples), len(samples), note=note, **target)


def step_times(times: Times, *, unit: str = "ms", notes: Mapping[str, str] | None = None) -> list[Figure]:
    """`step_time` of every side."""
    return [step_time(times, side, unit=unit, note=(notes or {}).get(side, "")) for side in times.rounds]
