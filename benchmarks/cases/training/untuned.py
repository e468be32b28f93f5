"""`bunkbed train FILE` without options against implicit's ALS and BPR at their defaults: quality and time.

    python -m benchmarks.cases.training.untuned                 # every data set, three seeds
    python -m benchmarks.cases.training.untuned gowalla --ram 30

Data sets: Gowalla in the LightGCN split; MovieLens-1M in the NCF authors' split, where `bunkbed train` alone is judged,
by their 99 negatives of each user; MovieLens-100k, of which the last item of each user by time is held out
(``--time-col``); three generated ones. There a user takes different items in proportion to exp(popularity + affinity),
with 4 hidden factors, and one item, drawn at random, is held out. Ranking by these true scores is the planted
optimum.

Each training is a process of its own, timed as a whole. All sides are judged alike: every item that the user does not
have in training is ranked. `--ram 30` gives the tables 30 % of the bytes of their records, and 1 MiB, which tables need
however few rows they have. Peers run where the package `implicit` is installed (``pip install implicit``).
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import bunkbed as bb
from benchmarks import peers
from benchmarks.cases.training.quality import FILES
from benchmarks.harness import common
from benchmarks.harness.figures import Settings
from bunkbed.train.data.interactions import read_dataset
from bunkbed.train.settings.auto import RECIPES

FACTORS = 4
RECORD_BYTES = 12  # of a number of a row: weight and state of Adam
K = {"gowalla": 20}
# Not among those that are trained where none is named: it has no peer here.
ALONE = "ml-1m"


class Shape(NamedTuple):
    """A generated data set: pairs of a user are log-normal around `mean`."""

    users: int
    items: int
    mean: float
    popularity: float
    affinity: float


SHAPES = {
    "long-tail": Shape(20_000, 5_000, 40, 1.0, 1.5),
    "dense": Shape(1_000, 500, 100, 0.3, 1.0),
    "tiny": Shape(200, 100, 25, 0.5, 1.5),
}


class Pairs(NamedTuple):
    """Pairs of users and items, ``int64[N, 2]``; `optimum` has the true scores, ``float64[users, items]``.

    `source` are the arguments of `bunkbed train` for a file that it splits alike. Without `held` it alone is judged.
    """

    train: Any
    held: Any
    optimum: Any = None
    source: tuple[str, ...] = ()


def parser(description: str | None, names: list[str], default: str = "all") -> Any:
    """Return a parser of what every comparison takes: data sets, their folder, the number of seeds."""
    options = common.parser(description)
    options.add_argument("names", nargs="*", metavar="NAME", help=f"data sets: {', '.join(names)}; default: {default}")
    options.add_argument("--data", type=Path, default=Settings().data, help="folder of the data sets")
    options.add_argument("--seeds", type=int, default=3)
    return options


def add_training(options: Any, example: str) -> None:
    """Add the options of a command that trains: `--ram` and `--train`."""
    options.add_argument("--ram", type=float, metavar="PERCENT", help="of the records' bytes, and 1 MiB; default: all")
    options.add_argument("--train", default="", help=f"more options of bunkbed train, such as '{example}'")


def training_options(chosen: Any, users: int, items: int) -> list[str]:
    """Return the options of `bunkbed train` that were chosen, with `--ram` for so many users and items."""
    given: list[str] = chosen.train.split()
    if not chosen.ram:
        return given
    values = dict(pairwise(given))
    dim = int(values.get("--dim", RECIPES[values.get("--recipe", "default")].dim))
    return [*given, "--ram", str(int(chosen.ram / 100 * (users + items) * dim * RECORD_BYTES) + (1 << 20))]


def chosen_by(options: Any, names: list[str], arguments: list[str] | None) -> Any:
    """Parse the arguments, print the machine and make the folder of temporary files."""
    chosen = options.parse_args(arguments)
    for name in chosen.names:
        if name not in names:
            options.error(f"no data set {name!r}; they are {', '.join(names)}")
    print(common.machine())
    chosen.dir.mkdir(parents=True, exist_ok=True)
    return chosen


def main(arguments: list[str] | None = None) -> None:
    """Train every side for each seed, and print quality and seconds."""
    names = ["gowalla", "ml-100k", *SHAPES]
    options = parser(__doc__, [*names, ALONE], "all but the last one")
    add_training(options, "--recipe fast")
    chosen = chosen_by(options, [*names, ALONE], arguments)
    for name in chosen.names or (["tiny"] if chosen.tiny else names):
        figures: dict[str, list[tuple[dict[str, float], float]]] = {}
        for seed in range(1 if chosen.tiny else chosen.seeds):
            pairs = pairs_of(name, chosen.data, seed)
            with tempfile.TemporaryDirectory(dir=chosen.dir) as folder:
                for side, found in sides(Path(folder), pairs, chosen, seed):
                    figures.setdefault(side, []).append(found)
        for side, each in figures.items():
            say(name, side, K.get(name, 10), each)


def say(name: str, side: str, k: int, each: list[tuple[dict[str, float], float]]) -> None:
    parts = []
    for metric in (f"recall@{k}", f"ndcg@{k}"):
        values = [quality[metric] for quality, _ in each]
        parts.append(f"{metric} {np.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})")
    seconds = [took for _, took in each]
    took = f"{np.mean(seconds):6.1f} s ({min(seconds):.1f} to {max(seconds):.1f})" if any(seconds) else ""
    print(f"{name:10} {side:18} {'  '.join(parts)}  {took}", flush=True)


def sides(folder: Path, pairs: Pairs, chosen: Any, seed: int) -> Any:
    """Yield the name of each side, its quality and its seconds."""
    yield "bunkbed train", bunkbed(folder, pairs, chosen, seed)
    if pairs.held is None:
        return
    for name in ("als", "bpr"):
        begin = time.perf_counter()
        try:
            scores = implicit(name, pairs, seed)
        except peers.Missing as missing:
            print(f"  no {name.upper()}: {missing}")
            continue
        yield f"implicit {name.upper()}", (judged(scores, pairs), time.perf_counter() - begin)
    if pairs.optimum is not None:
        yield "planted optimum", (judged(pairs.optimum.__getitem__, pairs), 0.0)


def pairs_of(name: str, data: Path, seed: int) -> Pairs:
    """Read or generate a data set."""
    if name in SHAPES:
        return generated(SHAPES[name], seed)
    if name == "gowalla":
        return Pairs(adjacency(data / FILES["gowalla"]["path"]), adjacency(data / FILES["gowalla"]["test"]))
    if name == ALONE:
        files = [str(data / FILES["ml1m"][one]) for one in ("path", "test_negatives")]
        pairs = read_dataset(files[0]).train
        return Pairs(np.stack([pairs.users, pairs.items], 1), None, source=(files[0], "--test-negatives", files[1]))
    path = data / "ml-100k" / "ml-100k.inter.gz"
    found = read_dataset(path, time_col="timestamp:float", split="last")
    train, held = (np.stack([part.users, part.items], 1) for part in (found.train, found.test) if part is not None)
    return Pairs(train, held, source=(str(path), "--time-col", "timestamp:float"))


def adjacency(path: Path) -> Any:
    with gzip.open(path, "rt") as file:
        lines = [line.split() for line in file]
    return np.array([(int(user), int(item)) for user, *items in lines for item in items])


def generated(shape: Shape, seed: int) -> Pairs:
    """Draw a data set and hold out one pair of each user."""
    rng = np.random.default_rng(seed)
    hidden = [rng.standard_normal((count, FACTORS)) / FACTORS**0.5 for count in (shape.users, shape.items)]
    popular = -shape.popularity * np.log(1 + rng.permutation(shape.items))
    scores = shape.affinity * FACTORS**0.5 * (hidden[0] @ hidden[1].T) + popular
    counts = np.clip(shape.mean * rng.lognormal(-0.3, 0.8, shape.users), 3, shape.items // 2).astype(np.int64)
    train, held = [], []
    for user, count in enumerate(counts):
        drawn = np.argpartition(-(scores[user] + rng.gumbel(size=shape.items)), count)[:count]
        out = rng.integers(count)
        train += [(user, item) for item in np.delete(drawn, out)]
        held.append((user, drawn[out]))
    return Pairs(np.array(train)[rng.permutation(len(train))], np.array(held), scores)


def bunkbed(folder: Path, pairs: Pairs, chosen: Any, seed: int) -> tuple[dict[str, float], float]:
    """Train with the command line; return quality and seconds."""
    for name in () if pairs.source else ("train", "held"):
        text = "".join(f"{user},{item}\n" for user, item in getattr(pairs, name).tolist())
        (folder / f"{name}.csv").write_text("user,item\n" + text)
    source = pairs.source or (str(folder / "train.csv"), "--test", str(folder / "held.csv"))
    command = ["train", *source, "--out", str(folder / "run"), "--seed", str(seed)]
    sizes = [len(np.unique(pairs.train[:, column])) for column in (0, 1)]
    command += ["--ks", "10,20", *training_options(chosen, *sizes)]
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "bunkbed", *command, "--json"], check=True, capture_output=True)
    took = time.perf_counter() - begin
    said = [json.loads(line) for line in done.stdout.splitlines()]
    print(f"  seed {seed}: {sum(one['kind'] == 'epoch' for one in said)} epochs, {took:.1f} s", flush=True)
    return said[-1]["test"]["metrics"], took


def implicit(name: str, pairs: Pairs, seed: int) -> Any:
    """Train a peer with its own defaults; return a function of a user to scores."""
    als, bpr = (peers.load(f"implicit.{one}", "implicit") for one in ("als", "bpr"))
    sparse, threads = (peers.load(one, "implicit") for one in ("scipy.sparse", "threadpoolctl"))

    shape = (int(pairs.train[:, 0].max()) + 1, int(max(pairs.train[:, 1].max(), pairs.held[:, 1].max())) + 1)
    matrix = sparse.csr_matrix(
        (np.ones(len(pairs.train), np.float32), (pairs.train[:, 0], pairs.train[:, 1])), shape=shape
    )
    kind = als.AlternatingLeastSquares if name == "als" else bpr.BayesianPersonalizedRanking
    model = kind(random_state=seed, num_threads=bb.get_num_threads())
    with threads.threadpool_limits(1, "blas"):  # as implicit advises
        model.fit(matrix, show_progress=False)
    return lambda user: model.user_factors[user] @ model.item_factors.T


def judged(scores: Any, pairs: Pairs) -> dict[str, float]:
    """Rank by a function of a user to scores; items of the training pairs are left out."""
    seen: dict[int, list[int]] = {}
    for user, item in pairs.train.tolist():
        seen.setdefault(user, []).append(item)
    best = {}
    for user in np.unique(pairs.held[:, 0]).tolist():
        own = np.array(scores(user))
        own[seen.get(user, [])] = -np.inf
        top = np.argpartition(-own, 20)[:20]
        best[user] = top[np.argsort(-own[top], kind="stable")].tolist()
    return quality(best, pairs)


def quality(best: dict[Any, list[int]], pairs: Pairs) -> dict[str, float]:
    """Recall and NDCG, means over the users with held-out items."""
    held: dict[int, set[int]] = {}
    for user, item in pairs.held.tolist():
        held.setdefault(user, set()).add(item)
    gains = 1 / np.log2(np.arange(2, 22))
    found: dict[str, float] = {}
    for k in (10, 20):
        recall = ndcg = 0.0
        for user, items in held.items():
            hits = np.array([item in items for item in best.get(user, [])[:k]], dtype=np.float64)
            recall += hits.sum() / len(items)
            ndcg += hits @ gains[: len(hits)] / gains[: min(k, len(items))].sum()
        found[f"recall@{k}"], found[f"ndcg@{k}"] = recall / len(held), ndcg / len(held)
    return found


if __name__ == "__main__":
    main()
