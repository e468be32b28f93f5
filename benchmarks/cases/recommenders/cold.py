"""Items without any training pair: `bunkbed train --item-features FILE` against popularity.

    python -m benchmarks.cases.recommenders.cold                 # both data sets, three seeds
    python -m benchmarks.cases.recommenders.cold ml-100k --seeds 1 --train '--loss softmax'

A fifth of the items, drawn at random, lose all their pairs to the test. Data sets: MovieLens-100k with words of the
title, year and genres; and generated pairs, of which a user takes different items in proportion to exp(affinity +
popularity), and both depend on the items' genre, tags and price, and a little on chance. Recall@20, first among all
items that the user does not have, then among the items without pairs. Popularity is the number of training pairs. It is
0 for these items, so it orders them by chance: 20 / their number is expected. As a bound, popularity by the test pairs
themselves, and for generated pairs the true scores. A last line, for MovieLens-100k, is NDCG@10 of the last item of
each user by time, with and without features: of items with pairs.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cases.training import untuned
from bunkbed.train import Recommender

COLD_SHARE = 0.2
K = 20
GENRES, TAGS, TAGS_OF_ITEM, FACTORS = 20, 40, 3, 6


class Shape(NamedTuple):
    """A generated data set: each user has `mean` items."""

    users: int
    items: int
    mean: int


SHAPES = {"planted": Shape(3_000, 1_500, 40), "tiny": Shape(300, 200, 30)}


class Sample(NamedTuple):
    """Pairs ``int64[N, 2]`` of labels, the file of items, and the true scores ``float64[users, items]`` or None."""

    pairs: Any
    items: Path
    scores: Any = None


def main(arguments: list[str] | None = None) -> None:
    """Train for each seed, and print recall of the items without pairs."""
    names = ["ml-100k", *SHAPES]
    options = untuned.parser(__doc__, names, "ml-100k and planted")
    untuned.add_training(options, "--loss softmax")
    chosen = untuned.chosen_by(options, names, arguments)
    for name in chosen.names or (["tiny"] if chosen.tiny else ["ml-100k", "planted"]):
        found: dict[str, list[float]] = {}
        for seed in range(1 if chosen.tiny else chosen.seeds):
            with tempfile.TemporaryDirectory(dir=chosen.dir) as folder:
                sample = sample_of(name, chosen.data, Path(folder), seed)
                for side, value in compared(Path(folder), sample, chosen, seed):
                    found.setdefault(side, []).append(value)
        for side, values in found.items():
            print(f"{name:8} {side:60} {np.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})", flush=True)


def compared(folder: Path, sample: Sample, chosen: Any, seed: int) -> Any:
    """Yield the name of each figure and its value."""
    pairs, rng = sample.pairs, np.random.default_rng(seed)
    items = np.unique(pairs[:, 1])
    options = untuned.training_options(chosen, len(np.unique(pairs[:, 0])), len(items))
    cold = np.sort(rng.choice(items, int(COLD_SHARE * len(items)), replace=False))
    is_cold = np.isin(pairs[:, 1], cold)
    for name, rows in {"train": pairs[~is_cold], "test": pairs[is_cold]}.items():
        (folder / f"{name}.csv").write_text("user,item\n" + "".join(f"{user},{item}\n" for user, item in rows.tolist()))
    command = [str(folder / "train.csv"), "--test", str(folder / "test.csv"), "--ks", str(K), "--seed", str(seed)]
    quality = trained(*command, "--item-features", str(sample.items), *options, "--out", str(folder / "run"))
    yield "all items: features", quality[f"recall@{K}"]
    plain = trained(*command, *options, "--out", str(folder / "plain"))
    yield "all items: without features", plain[f"recall@{K}"]
    wanted: dict[int, set[int]] = {}
    for user, item in pairs[is_cold].tolist():
        wanted.setdefault(user, set()).add(item)
    yield "items without pairs: features", recall(best_of(folder / "run", list(wanted), cold), wanted)
    yield "items without pairs: popularity (chance)", K / len(cold)
    labels, counts = np.unique(pairs[is_cold, 1], return_counts=True)
    popular = labels[np.argsort(-counts, kind="stable")][:K].tolist()
    yield "items without pairs: popularity by the test pairs themselves", recall(dict.fromkeys(wanted, popular), wanted)
    if sample.scores is not None:
        best = {user: cold[np.argsort(-sample.scores[user, cold], kind="stable")][:K].tolist() for user in wanted}
        yield "items without pairs: true scores", recall(best, wanted)
        return
    source = (str(folder / "all.csv"), "--time-col", "time", "--seed", str(seed), *options)
    for side, more in {"with": ("--item-features", str(sample.items)), "without": ()}.items():
        quality = trained(*source, *more, "--out", str(folder / side))
        yield f"the last items of users by time: NDCG@10 {side} features", quality["ndcg@10"]


def trained(*arguments: str) -> dict[str, float]:
    """Train in a process; return the metrics of the test."""
    command = [sys.executable, "-m", "bunkbed", "train", *arguments, "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])["test"]["metrics"]
    return found


def best_of(run: Path, users: list[int], cold: Any) -> dict[int, list[int]]:
    """Return the best of some items for each user."""
    with Recommender.load(run) as model:
        allowed = np.sort(model.items.encode(cold.tolist()))
        best = model.best_of(model.users.encode(users), K, items=allowed)
        return {
            user: list(map(int, model.items.decode(row[row >= 0]))) for user, row in zip(users, best.items, strict=True)
        }


def recall(best: dict[int, list[int]], wanted: dict[int, set[int]]) -> float:
    """Return the mean over users of the share of their items that are among the best."""
    return float(np.mean([len(items.intersection(best[user])) / len(items) for user, items in wanted.items()]))


def sample_of(name: str, data: Path, folder: Path, seed: int) -> Sample:
    """Read or generate a data set."""
    if name in SHAPES:
        return generated(SHAPES[name], folder, seed)
    with gzip.open(data / "ml-100k" / "ml-100k.inter.gz", "rt") as file:
        rows = [line.split() for line in file][1:]
    (folder / "all.csv").write_text("user,item,time\n" + "".join(f"{row[0]},{row[1]},{row[3]}\n" for row in rows))
    return Sample(np.array([row[:2] for row in rows], np.int64), data / "ml-100k" / "ml-100k.item.gz")


def generated(shape: Shape, folder: Path, seed: int) -> Sample:
    """Draw items with genre, tags and price, and the pairs of users."""
    rng = np.random.default_rng(seed)
    vectors = [rng.standard_normal((count, FACTORS)) for count in (GENRES, TAGS, 1, shape.items, shape.users)]
    of_genre, of_tag, of_price, own, users = (each / FACTORS**0.5 for each in vectors)
    genre, price = rng.integers(0, GENRES, shape.items), rng.standard_normal(shape.items)
    tags = np.array([rng.choice(TAGS, TAGS_OF_ITEM, replace=False) for _ in range(shape.items)])
    items = 1.5 * of_genre[genre] + of_tag[tags].sum(1) + price[:, None] * of_price + 0.3 * own
    popular = 0.5 * rng.standard_normal(GENRES)[genre] + 0.2 * rng.standard_normal(shape.items)
    scores = FACTORS**0.5 * users @ items.T + popular
    taken = np.argsort(-(scores + rng.gumbel(size=scores.shape)), axis=1)[:, : shape.mean]
    pairs = np.stack([np.repeat(np.arange(shape.users), shape.mean), taken.ravel()], 1)
    lines = [
        f"{at},g{genre[at]},{'|'.join(f't{tag}' for tag in tags[at])},{price[at]:.4f}\n" for at in range(shape.items)
    ]
    path = folder / "items.csv"
    path.write_text("item,genre,tags,price\n" + "".join(lines))
    return Sample(pairs[rng.permutation(len(pairs))], path, scores)


if __name__ == "__main__":
    main()
