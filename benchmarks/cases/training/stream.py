"""``bunkbed train --stream`` of a generated file of 200M interactions by 20M users, inside a memory cgroup of 2 GiB.

The file is Parquet with 64-bit ids as a hash would give them. The command reads, numbers, splits, shuffles and trains
inside the limit, is asked to stop (as by Ctrl-C) after some minutes of steps, and the run is then evaluated on sampled
users inside the same limit. What counts as memory there is the page cache too, which the kernel takes back when it
must; how much was not page cache is looked at several times a second.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import common
from benchmarks.harness.figures import Figure, Settings, missing
from bunkbed.core.budget import parse_bytes

# On disk a pair takes some 12 B in the source, 45 B while duplicate pairs are removed, 25 B in a run.
BYTES_A_PAIR = 90
EVAL_USERS = 1_000


@dataclass(frozen=True)
class Size:
    """How much of it."""

    pairs: int
    users: int
    items: int
    ram: str
    limit: str
    train_s: float


SIZES = {
    "tiny": Size(20_000, 2_000, 500, "256MiB", "2GiB", 0.0),
    "quick": Size(10_000_000, 1_000_000, 200_000, "512MiB", "1.25GiB", 30.0),
    "full": Size(200_000_000, 20_000_000, 1_000_000, "1GiB", "2GiB", 180.0),
}


def stream(settings: Settings) -> list[Figure]:
    """Samples a second, memory, and how long what comes before the first step takes."""
    size = SIZES[settings.size]
    why_not = common.MemoryLimit.why_not()
    if why_not and not settings.tiny:
        return [missing("samples/s of a streamed file", f"no memory limit: {why_not}")]
    with common.workspace(settings.dir, size.pairs * BYTES_A_PAIR) as folder:
        start = time.perf_counter()
        for done in generate(folder / "pairs.parquet", size, settings.seed):
            _say(f"generated {done:,} of {size.pairs:,} interactions", start)
        common.forget_pages(folder)
        with contextlib.nullcontext() if why_not else common.MemoryLimit(parse_bytes(size.limit)) as limit:
            return _measure(folder, size, limit)


def generate(path: Path, size: Size, seed: int) -> Iterator[int]:
    """Writes the file: every user at least once, some users and items far more often than others."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(seed)
    schema = pa.schema([("user_id", pa.int64()), ("item_id", pa.int64())])
    chunk, every = 1 << 21, size.pairs // size.users
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=["item_id"]) as writer:
        for first in range(0, size.pairs, chunk):
            places = np.arange(first, min(first + chunk, size.pairs))
            users = (size.users * rng.random(len(places)) ** 1.5).astype(np.int64)
            once = places % every == 0
            users[once] = (places[once] // every) % size.users
            items = (size.items * rng.random(len(places)) ** 3).astype(np.int64)
            # An odd number times a rank, modulo 2^64: every id once, and none near its neighbours.
            hashed = ((users.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
            writer.write_table(pa.table([hashed, items], schema=schema), row_group_size=1 << 20)
            yield first + len(places)


def _measure(folder: Path, size: Size, limit: common.MemoryLimit | None) -> list[Figure]:
    run = folder / "run"
    train = ["train", str(folder / "pairs.parquet"), "--stream", "--ram", size.ram, "--out", str(run)]
    train += ["--eval-users", str(EVAL_USERS), "--ranking", "sampled", "--epochs", "1"]
    most = [0]
    start = time.perf_counter()
    began = _run(train, limit, most, log=run / "metrics.jsonl", train_s=size.train_s)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["kind"] == "step"]
    about = json.loads((run / "data" / "dataset.json").read_text())
    evaluated = time.perf_counter()
    if size.train_s:  # else the training has shown one
        _run(["eval", str(run), "--json", "--ram", size.ram], limit, most)
    evaluated = time.perf_counter() - evaluated
    rates = [step["samples_per_s"] for step in steps[len(steps) // 4 :]]  # the first steps fill the cache
    note = (
        f"{size.pairs:,} interactions ({about['train']['duplicates']:,} repeated), {size.users:,} users, "
        f"--ram {size.ram}, memory cgroup of {size.limit}; {steps[-1]['global_step'] if steps else 0:,} steps of 4,096"
    )
    figures = []
    if limit is not None:
        most_allowed = parse_bytes(size.limit) / common.MIB
        figures += [
            Figure(
                "peak of the memory cgroup", limit.peak_bytes() / common.MIB, "MiB", at_most=most_allowed, note=note
            ),
            Figure("the most of it that was not page cache", most[0] / common.MIB, "MiB", note="looked at 5 times a s"),
        ]
    if rates:
        figures.append(
            Figure(
                "positive pairs trained", float(np.median(rates)), "1/s", min(rates), max(rates), len(rates), note=note
            )
        )
    figures.append(Figure("from the file to the first step", began - start, "s", note=note))
    if size.train_s:
        figures.append(
            Figure(f"evaluation of {EVAL_USERS:,} users, starting included", evaluated, "s", note="sampled ranking")
        )
    figures.append(Figure("the run's folder", _bytes_in(run) / common.MIB, "MiB", note="tables included"))
    return figures


def _run(
    arguments: Sequence[str],
    limit: common.MemoryLimit | None,
    most: list[int],
    *,
    log: Path | None = None,
    train_s: float = 0.0,
) -> float:
    """Runs ``bunkbed`` inside the limit; interrupts it `train_s` after its first report, whose time it returns."""
    command = [sys.executable, "-m", "bunkbed", *arguments]
    start, said, began, is_told = time.perf_counter(), 0.0, 0.0, False
    process = subprocess.Popen(command if limit is None else limit.command(command))
    try:
        while process.poll() is None:
            time.sleep(0.2)
            now = time.perf_counter()
            memory = _not_cache(limit)
            most[0] = max(most[0], memory)
            if log is not None and not began and log.exists() and log.stat().st_size:
                began = now
            if began and train_s and now - began > train_s and not is_told:
                process.send_signal(signal.SIGINT)
                is_told = True
            if now - said > 30:
                said = now
                _say(f"{arguments[0]}: {common.bb_bytes(memory)} without the page cache", start)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode not in ((0, 130) if is_told else (0,)):
        reason = "killed: out of its memory limit" if process.returncode == -9 else f"exit status {process.returncode}"
        raise RuntimeError(f"bunkbed {arguments[0]} ended ({reason})")
    return began


def _not_cache(limit: common.MemoryLimit | None) -> int:
    """Bytes of the group that no file is behind."""
    if limit is None:
        return 0
    stat: dict[str, Any] = dict(line.split() for line in limit._file("memory.stat").read_text().splitlines())
    return int(stat["anon"] if "anon" in stat else stat["total_rss"])


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _say(text: str, start: float) -> None:
    print(f"[{time.perf_counter() - start:6.0f} s] {text}", flush=True)
