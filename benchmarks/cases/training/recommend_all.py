"""Recommendations for all users of Gowalla, with the ids of the file, to Parquet: the whole command.

    python -m benchmarks.cases.training.recommend_all

A model is trained for one epoch; then `bunkbed recommend RUN --all -k 20 --out FILE` runs in a process of its own, with
all that it takes to start, once with everything in RAM and once with `--ram` of 30 % of the rows' bytes. In turn with
it runs the bare float32 product of as many users and items (`full_ranking.products`), which scores every pair and keeps
nothing. Printed are the median seconds of each, the least and the most.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import bunkbed as bb
from benchmarks.cases.training.full_ranking import products
from benchmarks.cases.training.quality import FILES
from benchmarks.harness import common
from benchmarks.harness.figures import Settings

DIM = 64


def main(arguments: list[str] | None = None) -> None:
    """Train, then take turns."""
    options: Any = common.parser(__doc__)
    options.add_argument("--data", type=Path, default=Settings().data, help="folder of the data sets")
    options.add_argument("--turns", type=int, default=5)
    chosen = options.parse_args(arguments)
    print(common.machine())
    chosen.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=chosen.dir) as name:
        folder = Path(name)
        source = chosen.data / FILES["gowalla"]["path"]
        if chosen.tiny or not source.exists():
            source = folder / "pairs.txt"
            source.write_text("".join(f"{user} {user % 97} {user % 89 + 97}\n" for user in range(500)))
        bunkbed("train", source, "--epochs", 1, "--dim", DIM, "--valid", "none", "--out", folder / "run")
        with bb.Run(folder / "run", mode="r") as run:
            users, items = (run.table(one).num_rows for one in ("user", "item"))
            tables = [run.table(one) for one in ("user", "item")]
            stored = sum(table.record_bytes * table.num_rows for table in tables)
        sides = {
            "recommend --all, all in RAM": lambda: recommend(folder, 4 * stored),
            "recommend --all, 30 % of the bytes": lambda: recommend(folder, int(0.3 * stored)),
            "the bare product": lambda: multiply(users, items),
        }
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(1 if chosen.tiny else chosen.turns):
            for side, work in sides.items():
                seconds[side].append(work())
    print(f"{users:,} users x {items:,} items, {DIM} numbers each, top 20")
    for side, found in seconds.items():
        print(f"{side:36} {statistics.median(found):6.2f} s  ({min(found):.2f} to {max(found):.2f})")


def bunkbed(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "bunkbed", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def recommend(folder: Path, ram: int) -> float:
    begin = time.perf_counter()
    out = folder / "top.parquet"
    bunkbed("recommend", folder / "run", "--all", "-k", 20, "--ram", max(ram, 1 << 23), "--out", out)
    out.unlink()
    return time.perf_counter() - begin


def multiply(users: int, items: int) -> float:
    rows = torch.randn(users, DIM), torch.randn(items, DIM)
    begin = time.perf_counter()
    products(*rows, bb.get_num_threads())
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
