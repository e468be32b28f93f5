"""Quality and time of `bunkbed train --resume RUN --more FILE` against training on all interactions.

    python -m benchmarks.cases.recommenders.more                 # every data set, three seeds
    python -m benchmarks.cases.recommenders.more ml-100k dense

A run is trained on 90 % of the training pairs without options, then the other 10 % are added. It is compared with a
run that is trained on all pairs. MovieLens-100k is divided by time, the other data sets (`untuned`) by chance. All runs
rank the same held-out pairs. Times are those of whole processes, and of the training without starting the process and
reading the file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cases.training import untuned
from benchmarks.cases.training.untuned import SHAPES, K, pairs_of

OLD_SHARE = 0.9


class Trained(NamedTuple):
    """Metrics on the held-out pairs, seconds of the process, and seconds of its training."""

    quality: dict[str, float]
    process_s: float
    training_s: float


def main(arguments: list[str] | None = None) -> None:
    """Train both ways for each seed, and print quality and time."""
    names = ["gowalla", "ml-100k", *SHAPES]
    options = untuned.parser(__doc__, names)
    untuned.add_training(options, "--recipe fast")
    options.add_argument("--round", default="", help="options of the round, such as '--epochs 3'")
    chosen = untuned.chosen_by(options, names, arguments)
    for name in chosen.names or (["tiny"] if chosen.tiny else names):
        found = []
        for seed in range(1 if chosen.tiny else chosen.seeds):
            with tempfile.TemporaryDirectory(dir=chosen.dir) as folder:
                found.append(compared(Path(folder), name, chosen, seed))
        means = np.mean(found, axis=0)
        quality = f"ndcg@{K.get(name, 10)} {means[0]:.3f} (90 % alone {means[1]:.3f})"
        quality += f", recall@20 {means[2]:.3f} ({means[3]:.3f})"
        print(f"{name:10} of training on all: {quality}", end="")
        print(f", process {means[4]:.2f} and training {means[5]:.2f} of the time", flush=True)


def compared(folder: Path, name: str, chosen: Any, seed: int) -> list[float]:
    """Train both ways; return the quality and time of the round as parts of those of training on all."""
    pairs = pairs_of(name, chosen.data, seed)
    order = np.arange(len(pairs.train))
    if name == "gowalla":  # by user in its file
        order = np.random.default_rng(seed).permutation(len(order))
    train = pairs.train[order]
    cut = int(OLD_SHARE * len(train))
    for part, rows in {"all": train, "old": train[:cut], "new": train[cut:], "held": pairs.held}.items():
        text = "".join(f"{user},{item}\n" for user, item in rows.tolist())
        (folder / f"{part}.csv").write_text("user,item\n" + text)
    sizes = [len(np.unique(train[:, column])) for column in (0, 1)]
    chosen_options = untuned.training_options(chosen, *sizes)
    common_options = ("--test", folder / "held.csv", "--ks", "10,20", "--seed", seed, *chosen_options)
    whole = trained(folder / "all.csv", *common_options, "--out", folder / "all")
    old = trained(folder / "old.csv", *common_options, "--out", folder / "run")
    more = trained("--resume", folder / "run", "--more", folder / "new.csv", *chosen.round.split())
    found = []
    for metric in (f"ndcg@{K.get(name, 10)}", "recall@20"):
        found += [one.quality[metric] / whole.quality[metric] for one in (more, old)]
    print(f"  {name} seed {seed}: {whole.process_s:.1f} s on all, {more.process_s:.1f} s on more", flush=True)
    return [*found, more.process_s / whole.process_s, more.training_s / whole.training_s]


def trained(*arguments: object) -> Trained:
    begin = time.perf_counter()
    command = [sys.executable, "-m", "bunkbed", "train", *map(str, arguments), "--json"]
    done = subprocess.run(command, check=True, capture_output=True)
    took = time.perf_counter() - begin
    outcome = json.loads(done.stdout.splitlines()[-1])
    return Trained(outcome["test"]["metrics"], took, outcome["seconds"])


if __name__ == "__main__":
    main()
