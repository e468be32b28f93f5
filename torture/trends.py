"""Segments, files, descriptors, memory and threads stay within stated bounds during long use of a table.

Each story runs in a separate process with a limit of 1,024 open files. It is watched without the library, through /proc
and the folders. ``python -m torture.trends STORY --steps N`` runs one story and prints its peaks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from bunkbed import _native
from torture.parts import Result, Size, folder

FILES = 1024
ROWS = 5_000
DIM = 8
FACTS: dict[str, Any] = {"dim": DIM, "num_rows": ROWS, "ram": "2MiB"}
ONE = np.ones((1, DIM), np.float32)
MIB = 1 << 20

#: Bytes of a segment of these tables. A table has at most 2 * bytes / SEGMENT_BYTES + SPARE_SEGMENTS segments
#: (docs/files.md), including those of the commit under way.
SEGMENT_BYTES = MIB
SPARE_SEGMENTS = 16 + 4
#: Other files of a table than segments: manifests, the lock, index snapshots. With segments that only the last
#: two commits name, a table has up to three times as many files of segments.
OTHER_FILES = 8
#: Descriptors of a table that the cache of descriptors does not count or may not close: the lock, two rings, segments
#: that are not synced yet, a manifest being written.
OF_A_TABLE = 8
#: Descriptors of the process that do not belong to a table.
OF_THE_PROCESS = 32
#: Most growth of memory after the first quarter of a story.
MOST_GROWTH = 24 * MIB
#: Pools of the core for reads (64) and writes (4), and its parallel loops; io_uring's kernel threads are not counted.
MOST_THREADS = 64 + 4 + 2 * (os.cpu_count() or 1) + 8


class Watch:
    """Watcher of the process and of the folders of tables, with a list of broken bounds."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.peaks = dict.fromkeys(("descriptors", "segments", "files", "rss", "threads"), 0)
        self.tables = 0
        self.problems: list[str] = []
        self._first = _count(Path("/proc/self/fd"))
        self._quarter: dict[str, int] = {}

    def look(
        self, step: int, tables: Sequence[bb.Table], folders: Sequence[Path], snapshots: int = 0, shards: int = 1
    ) -> None:
        """Check all bounds; `folders` are those of durable tables, with `snapshots` snapshots each."""
        self.tables = max(self.tables, shards * len(tables))
        bytes_of_one = max((int(table.stats()["disk_bytes"]) for table in tables), default=0)
        segments = SPARE_SEGMENTS * shards + 2 * (bytes_of_one // SEGMENT_BYTES)
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        now = {
            "descriptors": _count(Path("/proc/self/fd")),
            "segments": max((int(table.stats()["segments"]) for table in tables), default=0),
            "files": max((_count(path) for path in folders), default=0),
            "rss": int(status["VmRSS"].split()[0]) * 1024,
            "threads": _own_threads(),
        }
        self.peaks = {name: max(peak, now[name]) for name, peak in self.peaks.items()}
        if step >= self.steps // 4 and not self._quarter:
            self._quarter = dict(now)
        for name, most in (
            ("descriptors", FILES // 4 + OF_A_TABLE * shards * len(tables) + OF_THE_PROCESS),
            ("segments", segments),
            ("files", 3 * segments + OTHER_FILES + 2 * snapshots),
            ("rss", self._quarter.get("rss", now["rss"]) + MOST_GROWTH),
            ("threads", MOST_THREADS),
        ):
            if now[name] > most:
                self.problems.append(f"{name} at step {step:,}: {now[name]:,}, at most {most:,} expected")

    def end(self) -> None:
        """Check that all descriptors are closed, after all tables are closed."""
        left = _count(Path("/proc/self/fd")) - self._first
        if left > 4:
            self.problems.append(f"{left} descriptors are left when every table is closed")


def _count(path: Path) -> int:
    return sum(1 for _ in path.iterdir())


def _own_threads() -> int:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            names.append((task / "comm").read_text())
    return sum(not name.startswith("iou-") for name in names)


def _set(table: bb.Table, step: int) -> None:
    table.set(np.array([step % ROWS]), ONE)


def small_commits(path: Path, watch: Watch, num_tables: int = 1) -> None:
    """Set and commit one row of each table in turn."""
    tables = [bb.create(path / str(i), **FACTS) for i in range(num_tables)]
    paths = [path / str(i) for i in range(num_tables)]
    for step in range(watch.steps):
        table = tables[step % num_tables]
        _set(table, step // num_tables)
        table.commit()
        if step % 50 == 0:
            watch.look(step, tables, paths)
    for table in tables:
        table.close()


def keep_and_drop(path: Path, watch: Watch) -> None:
    """Keep every commit, and drop the twentieth before it."""
    kept = 20
    with bb.create(path / "t", **FACTS) as table:
        for step in range(watch.steps):
            _set(table, step)
            table.commit(keep=f"s{step}")
            if step >= kept:
                table.drop(f"s{step - kept}")
            if step % 50 == 0:
                watch.look(step, [table], [path / "t"], snapshots=kept + 1)


def open_and_close(path: Path, watch: Watch) -> None:
    """Open, change, commit and close a table; open and close a reader."""
    bb.create(path / "t", **FACTS).close()
    for step in range(watch.steps):
        with bb.open(path / "t", ram="2MiB") as table:
            _set(table, step)
            if step % 25 == 0:
                watch.look(step, [table], [path / "t"])
        with bb.open(path / "t", mode="r", ram="2MiB") as reader:
            reader.lookup(np.array([step % ROWS]))


def readers(path: Path, watch: Watch) -> None:
    """Let readers follow a writer's commits at different rates."""
    with bb.create(path / "t", **FACTS) as table:
        table.commit()
        followers = [bb.open(path / "t", mode="r", ram="2MiB") for _ in range(4)]
        for step in range(watch.steps):
            _set(table, step)
            table.commit()
            for i, reader in enumerate(followers):
                if step % (1 + 7 * i) == 0:
                    reader.refresh()
            if step % 50 == 0:
                watch.look(step, [table, *followers], [path / "t"])
        for reader in followers:
            reader.close()


def background_commits(path: Path, watch: Watch) -> None:
    """Commit in the background, while the next steps run."""
    with bb.create(path / "t", **FACTS) as table:
        for step in range(watch.steps):
            _set(table, step)
            table.begin_commit()
            _set(table, step + 1)
            if step % 50 == 0:
                watch.look(step, [table], [path / "t"])


def updates(path: Path, watch: Watch, **options: Any) -> None:
    """Update a table larger than its cache, with some commits."""
    rng = np.random.default_rng(0)
    rows = 60_000
    facts = FACTS | {"num_rows": rows, "dim": 16, "optimizer": bb.SGD(lr=1.0)} | options
    grads = np.ones((64, 16), np.float32)
    durable = "durability" not in options
    with bb.create(path / "t", **facts) as table:
        for step in range(watch.steps):
            ids = rng.integers(0, rows, 64)
            table.lookup(ids)
            table.update(ids, grads)
            if step % 100 == 99:
                table.commit()
            if step % 250 == 0:
                watch.look(step, [table], [path / "t"] if durable else [])


def sharded(path: Path, watch: Watch) -> None:
    """Commit single rows of a table in three shards."""
    with bb.ShardedTable.create(path / "t", shards=3, **FACTS | {"ram": "8MiB"}) as table:
        for step in range(watch.steps):
            _set(table, step)
            table.commit()
            if step % 50 == 0:
                watch.look(step, [table], table.directories, shards=3)


def run_commits(path: Path, watch: Watch) -> None:
    """Commit a run of two tables; keep every hundredth commit, and drop the kept one before it."""
    with bb.Run(path / "run", ram="8MiB") as one:
        facts = {name: value for name, value in FACTS.items() if name != "ram"}
        tables = [one.table(name, create=facts) for name in ("user", "item")]
        for step in range(watch.steps):
            _set(tables[step % 2], step)
            one.commit(keep=f"s{step}" if step % 100 == 0 else None)
            if step % 100 == 0 and step > 0:
                one.drop(f"s{step - 100}")
            if step % 50 == 0:
                watch.look(step, tables, [path / "run" / "tables" / name for name in ("user", "item")], snapshots=2)


#: name -> (story, steps of the long form, steps of the short form)
STORIES: dict[str, tuple[Callable[[Path, Watch], None], int, int]] = {
    "commits, 1 table": (small_commits, 10_000, 600),
    "commits, 12 tables": (lambda path, watch: small_commits(path, watch, 12), 10_000, 600),
    "commits, 26 tables": (lambda path, watch: small_commits(path, watch, 26), 10_000, 900),
    "keep and drop": (keep_and_drop, 10_000, 200),
    "open and close": (open_and_close, 1_000, 60),
    "readers": (readers, 10_000, 200),
    "begin_commit": (background_commits, 10_000, 300),
    "steps": (updates, 100_000, 1_000),
    "scratch": (lambda path, watch: updates(path, watch, durability="scratch"), 100_000, 1_000),
    "disk limit": (lambda path, watch: updates(path, watch, disk="40MiB"), 100_000, 1_000),
    "sharded": (sharded, 10_000, 200),
    "run": (run_commits, 10_000, 200),
}


def tell(story: str, steps: int, path: Path) -> dict[str, Any]:
    """Run a story in this process."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))
    watch = Watch(steps)
    try:
        STORIES[story][0](path, watch)
        watch.end()
    except (OSError, bb.BunkbedError) as error:
        watch.problems.append(f"{type(error).__name__}: {error}")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # removing the folder needs descriptors too
    return {"steps": steps, "tables": watch.tables, "peaks": watch.peaks, "problems": watch.problems[:5]}


def in_process(story: str, steps: int, seconds: float, fault: str | None = None) -> dict[str, Any]:
    """Run a story in a separate process."""
    command = [sys.executable, "-m", "torture.trends", story, "--steps", str(steps)]
    command += ["--fault", fault] if fault else []
    ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    if ended.returncode != 0:
        return {"steps": steps, "tables": 0, "peaks": {}, "problems": [ended.stderr[-2000:]]}
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def table_of(answers: dict[str, dict[str, Any]]) -> str:
    """Return the peaks, one line per story."""
    lines = [f"{'story':20} {'steps':>8} {'descriptors':>12} {'segments':>9} {'files':>6} {'RSS':>8} {'threads':>8}"]
    for story, answer in answers.items():
        peaks = answer["peaks"]
        if not peaks:
            continue
        lines.append(
            f"{story:20} {answer['steps']:8,} {peaks['descriptors']:12,} {peaks['segments']:9,} {peaks['files']:6,} "
            f"{peaks['rss'] / MIB:4.0f} MiB {peaks['threads']:8,}"
        )
    return "\n".join(lines)


def run(size: Size) -> list[Result]:
    """Run every story, and one with a seeded leak of descriptors, which must be found."""
    result = Result("trends: stories within their bounds", wanted=len(STORIES))
    answers = {}
    for story, (_, steps, least) in STORIES.items():
        answers[story] = in_process(story, size.of(steps, least), max(120.0, size.seconds))
        result.tried += 1
        result.passed += not answers[story]["problems"]
        for problem in answers[story]["problems"]:
            result.fail(f"{story}: {problem}")
    result.note = table_of(answers)
    seeded = Result("trends: a seeded leak of descriptors is found", tried=1)
    leaking = in_process("open and close", STORIES["open and close"][2], 120, "descriptor_leak")
    seeded.passed = int(any("descriptors" in problem for problem in leaking["problems"]))
    return [result, seeded]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("story", choices=STORIES)
    options.add_argument("--steps", type=int, required=True)
    options.add_argument("--fault", help="a seeded bug")
    chosen = options.parse_args()
    _native.set_fault(chosen.fault)
    with folder() as path:
        print(json.dumps(tell(chosen.story, chosen.steps, path)))


if __name__ == "__main__":
    main()
