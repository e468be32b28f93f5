"""Recall@20 of users that a run has not seen, recommended to by their histories, against training with them.

    python -m benchmarks.cases.training.new_users

1,000 users of Gowalla are left out of the training file. `bunkbed recommend RUN --history FILE` trains a row for each,
with the items fixed. The same users are recommended to by a run that was trained with them. Both runs have the same
options; held-out items are those of the LightGCN split. `--seeds 3` repeats it with other users and other seeds.
"""

from __future__ import annotations

import gzip
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.cases.training import untuned
from benchmarks.cases.training.quality import FILES
from benchmarks.harness import common
from benchmarks.harness.figures import Settings

LEFT_OUT, K = 1000, 20


def main(arguments: list[str] | None = None) -> None:
    """Train twice for each seed and compare."""
    options: Any = common.parser(__doc__)
    options.add_argument("--data", type=Path, default=Settings().data, help="folder of the data sets")
    options.add_argument("--seeds", type=int, default=1)
    untuned.add_training(options, "--epochs 5")
    chosen = options.parse_args(arguments)
    print(common.machine())
    chosen.dir.mkdir(parents=True, exist_ok=True)
    for seed in range(chosen.seeds):
        with tempfile.TemporaryDirectory(dir=chosen.dir) as name:
            compare(Path(name), chosen, seed)


def compare(folder: Path, chosen: Any, seed: int) -> None:
    """Print the recall of both ways, and the time."""
    train, held = lines(chosen, "path"), lines(chosen, "test")
    names = sorted(train.keys() & held.keys(), key=int)
    count = min(LEFT_OUT, len(names) // 4)
    new = [names[at] for at in np.sort(np.random.default_rng(seed).permutation(len(names))[:count])]
    left_out = set(new)
    write(folder / "all.csv", train)
    write(folder / "rest.csv", {user: items for user, items in train.items() if user not in left_out})
    write(folder / "new.csv", {user: train[user] for user in new})
    (folder / "users.txt").write_text("\n".join(new))
    recalls = {}
    options = untuned.training_options(chosen, len(train), len({item for items in train.values() for item in items}))
    for side, file, asked in (
        ("trained with them", "all", "--users users.txt"),
        ("by history", "rest", "--history new.csv"),
    ):
        run = folder / file
        bunkbed(folder, "train", folder / f"{file}.csv", *options, "--seed", seed, "--out", run)
        option, source = asked.split()
        begin = time.perf_counter()
        out = folder / f"{file}.parquet"
        ram = options[-2:] if chosen.ram else ()
        bunkbed(folder, "recommend", run, option, folder / source, "-k", K, *ram, "--out", out)
        recalls[side] = recall(out, {user: held[user] for user in new})
        print(f"seed {seed}, {count} users, {side:18} Recall@{K} {recalls[side]:.4f}", end="")
        print(f"   recommend: {time.perf_counter() - begin:.1f} s")
    print(f"seed {seed}, by history / trained with them: {recalls['by history'] / recalls['trained with them']:.3f}")


def lines(chosen: Any, part: str) -> dict[str, list[str]]:
    """The items of each user."""
    if chosen.tiny:
        rng = np.random.default_rng(part == "test")
        return {str(user): [str((user + each) % 60) for each in rng.permutation(20)[:8]] for user in range(200)}
    with gzip.open(chosen.data / FILES["gowalla"][part], "rt") as file:
        return {user: items for user, *items in map(str.split, file) if items}


def write(path: Path, pairs: dict[str, list[str]]) -> None:
    rows = (f"{user},{item}\n" for user, items in pairs.items() for item in items)
    path.write_text("user,item\n" + "".join(rows))


def recall(path: Path, held: dict[str, list[str]]) -> float:
    """Mean over users of the share of their held-out items that are recommended."""
    table = pq.read_table(path)
    best: dict[str, set[str]] = {}
    for user, item in zip(table["user"].to_pylist(), table["item"].to_pylist(), strict=True):
        best.setdefault(str(user), set()).add(str(item))
    return float(np.mean([len(best.get(user, set()) & set(items)) / len(items) for user, items in held.items()]))


def bunkbed(folder: Path, *arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "bunkbed", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
