"""`bunkbed train --model sasrec` against MF: the next item of each user, with no option but --model and --time-col.

    python -m benchmarks.cases.recommenders.sequences               # both data sets, three seeds
    python -m benchmarks.cases.recommenders.sequences ml-100k --seeds 1

Data sets: MovieLens-100k, and a planted Markov chain. In the chain each item has five likely successors; after an item
comes one of these with probability .8, by geometric weights, otherwise any item in proportion to its popularity. A user
is a walk that never visits an item twice. The last item of each user is the test, and ranking by the true
probabilities after the item before it is the planted optimum. Each training is a process of its own, timed as a whole.
All sides are judged alike: every item that the user does not have before the test is ranked.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cases.training import untuned
from benchmarks.cases.training.untuned import Pairs

SUCCESSORS, LIKELY, RATIO = 5, 0.8, 0.6


class Chain(NamedTuple):
    """A planted Markov chain: pairs of a user are uniform between half and one and a half times `mean`."""

    users: int
    items: int
    mean: int


CHAINS = {"markov": Chain(3_000, 1_000, 30), "tiny": Chain(400, 100, 20)}


def main(arguments: list[str] | None = None) -> None:
    """Train both models for each seed, and print quality and seconds."""
    names = ["ml-100k", *CHAINS]
    options = untuned.parser(__doc__, names, default="the first two")
    untuned.add_training(options, "--epochs 5")
    chosen = untuned.chosen_by(options, names, arguments)
    for name in chosen.names or (["tiny"] if chosen.tiny else names[:2]):
        figures: dict[str, list[tuple[dict[str, float], float]]] = {}
        for seed in range(1 if chosen.tiny else chosen.seeds):
            with tempfile.TemporaryDirectory(dir=chosen.dir) as folder:
                for side, found in sides(Path(folder), name, chosen, seed):
                    figures.setdefault(side, []).append(found)
        for side, each in figures.items():
            untuned.say(name, side, 10, each)


def sides(folder: Path, name: str, chosen: Any, seed: int) -> Iterator[tuple[str, tuple[dict[str, float], float]]]:
    """Yield the name of each side, its quality and its seconds."""
    pairs = planted(CHAINS[name], folder, seed) if name in CHAINS else untuned.pairs_of(name, chosen.data, seed)
    for model in ("mf", "sasrec"):
        own = folder / model
        own.mkdir()
        given = argparse.Namespace(train=f"--model {model} {chosen.train}", ram=chosen.ram)
        yield model, untuned.bunkbed(own, pairs, given, seed)
    popular = np.bincount(pairs.train[:, 1]).astype(np.float64)
    yield "popular", (untuned.judged(lambda user: popular, pairs), 0.0)
    if pairs.optimum is not None:
        yield "planted optimum", (untuned.judged(pairs.optimum.__getitem__, pairs), 0.0)


def planted(chain: Chain, folder: Path, seed: int) -> Pairs:
    """Draw walks, write them as a file with times, and hold out the last item of each."""
    rng = np.random.default_rng(seed)
    following = transitions(chain, rng)
    train, held, optimum = [], [], []
    for user, count in enumerate(rng.integers(chain.mean // 2, chain.mean * 3 // 2 + 1, chain.users)):
        free = np.ones(chain.items)
        walk = [int(rng.integers(chain.items))]
        while len(walk) < count:
            free[walk[-1]] = 0
            chances = np.cumsum(following[walk[-1]] * free)
            walk.append(int(np.searchsorted(chances, rng.random() * chances[-1], side="right")))
        train += [(user, item) for item in walk[:-1]]
        held.append((user, walk[-1]))
        optimum.append(following[walk[-2]])
    file = folder / "walks.csv"
    lines = [f"{user},{item},{time}\n" for time, (user, item) in enumerate(train + held)]
    file.write_text("user,item,time\n" + "".join(np.array(lines)[rng.permutation(len(lines))]))
    return Pairs(np.array(train), np.array(held), np.array(optimum), (str(file), "--time-col", "time"))


def transitions(chain: Chain, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the probabilities of each item after each, ``float64[items, items]``."""
    popular = 1 / (1 + rng.permutation(chain.items))
    found = np.tile((1 - LIKELY) * popular / popular.sum(), (chain.items, 1))
    weights = RATIO ** np.arange(SUCCESSORS)
    for item in range(chain.items):
        found[item, rng.choice(chain.items, SUCCESSORS, replace=False)] += LIKELY * weights / weights.sum()
    return found


if __name__ == "__main__":
    main()
