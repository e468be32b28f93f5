"""Reading and splitting interactions, in memory and streamed: seconds, processor seconds and peak memory.

    python -m benchmarks.cases.training.train_data

Reads MovieLens-1M (gzip, from `--data`) and a generated CSV file of 5M rows of 500,000 users and 100,000 items, plain
and with every id quoted. Each measurement is a process of its own; the modules are imported before it starts. The
rounds take turns. The streamed path has `--ram` for DuckDB.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import common
from bunkbed.core.budget import parse_bytes

MOVIELENS = "ncf-ml1m/train.tsv.gz"


def generate(path: Path, rows: int, seed: int, *, quote: str = "") -> Path:
    """Write a CSV file: some users and items far more often than others."""
    rng = np.random.default_rng(seed)
    with path.open("w") as file:
        file.write("user_id,item_id,rating\n")
        for first in range(0, rows, 1 << 18):
            count = min(1 << 18, rows - first)
            users = (rows // 10 * rng.random(count) ** 1.5).astype(np.int64)
            items = (rows // 50 * rng.random(count) ** 3).astype(np.int64)
            pairs = zip(users.tolist(), items.tolist(), strict=True)
            file.writelines(f"{quote}{user}{quote},{quote}{item}{quote},5\n" for user, item in pairs)
    return path


def child(path: Path, ram: str, *, is_streamed: bool) -> dict[str, Any]:
    """Read and split one file."""
    import duckdb  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    from bunkbed.train.data.interactions import read_dataset
    from bunkbed.train.data.prepare import prepare_dataset
    from bunkbed.train.data.splits import split
    from bunkbed.train.data.stream import open_split
    from bunkbed.train.settings.config import TrainConfig

    marks = [(time.perf_counter(), time.process_time())]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        if is_streamed:
            data = prepare_dataset(Path(folder) / "data", path, ram_bytes=parse_bytes(ram))
            marks.append((time.perf_counter(), time.process_time()))
            open_split(data.train, TrainConfig(stream=True, eval_users=10, ram=ram), Path(folder) / "stream")
        else:
            data = read_dataset(path)
            marks.append((time.perf_counter(), time.process_time()))
            split(data.train, TrainConfig())
        marks.append((time.perf_counter(), time.process_time()))
    return {
        "pairs": len(data.train),
        "read": [after - before for before, after in zip(marks[0], marks[1], strict=True)],
        "split": [after - before for before, after in zip(marks[1], marks[2], strict=True)],
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure every file on both paths."""
    options = common.parser(__doc__)
    options.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the data sets")
    options.add_argument("--ram", default="256MiB", help="for DuckDB, streamed")
    options.add_argument("--rounds", type=int, default=3, help="measurements of each file and path")
    options.add_argument("--child", nargs=2, metavar=("FILE", "PATH"), help="(inner) measure once")
    settings = options.parse_args(arguments)
    if settings.child:
        found = child(Path(settings.child[0]), settings.ram, is_streamed=settings.child[1] == "streamed")
        print(json.dumps(found))
        return
    rows, rounds = (2_000, 1) if settings.tiny else (5_000_000, settings.rounds)
    print(common.machine())
    settings.dir.mkdir(exist_ok=True)
    with common.workspace(settings.dir, rows * 100) as folder:
        files = [generate(folder / "plain.csv", rows, settings.seed)]
        files.append(generate(folder / "quoted.csv", rows, settings.seed, quote='"'))
        if (settings.data / MOVIELENS).exists() and not settings.tiny:
            files.append(folder / "train.tsv.gz")
            files[-1].write_bytes((settings.data / MOVIELENS).read_bytes())
        measured: dict[tuple[Path, str], list[dict[str, Any]]] = {}
        for _ in range(rounds):
            for file in files:
                for path in ("memory", "streamed"):
                    argv = [
                        "-m",
                        "benchmarks.cases.training.train_data",
                        "--ram",
                        settings.ram,
                        "--child",
                        str(file),
                        path,
                    ]
                    done = subprocess.run([sys.executable, *argv], check=True, capture_output=True, text=True)
                    measured.setdefault((file, path), []).append(json.loads(done.stdout))
    for (file, path), turns in measured.items():
        peak = max(turn["rss"] for turn in turns)
        print(f"{file.name}, {path}: {turns[0]['pairs']:,} pairs, peak {common.bb_bytes(peak)}")
        for stage in ("read", "split"):
            wall = common.spread((turn[stage][0] for turn in turns), "s", 1)
            print(f"  {stage}: {wall}; {statistics.median(turn[stage][1] for turn in turns):.2f} processor seconds")


if __name__ == "__main__":
    main()
