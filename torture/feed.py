"""The change feed under kill -9: a writer and a consumer die at any time, and no change is lost or given twice.

The writer updates, deletes and commits; all its steps follow from their numbers, so the rows of each commit are known.
The consumer writes the changes since its cursor into a folder of Parquet files. Both are killed at random and started
again. At the end the files must follow each other without a gap, no file may have an id twice, and applied in order
they must make the rows of each commit that they lead to, bit for bit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from bunkbed import _native
from bunkbed.feed.delta_file import write_next_delta
from bunkbed.testing import ReferenceTable
from torture.parts import Child, Clock, Progress, Result, Size, folder

_KILLS = 200
_FACTS: dict[str, Any] = {"dim": 6, "num_rows": None, "optimizer": bb.SGD(lr=1.0), "init": bb.Zeros()}
_IDS, _STEPS_PER_COMMIT = 2000, 4
_MOST_S = 0.25  # the longest life of a process


def run(size: Size) -> list[Result]:
    """Return the figures."""
    import pyarrow.parquet  # noqa: F401 - before the processes are forked

    result = Result("kills of a writer and a consumer of changes")
    chance = random.Random(size.seed)
    clock, progress = Clock(size.seconds), Progress("feed", kills := size.of(_KILLS, least=6), 0)
    with folder() as root:
        _live(lambda send: _write(root / "t", send, most_commits=1))
        while result.tried < kills and not clock.is_over:
            progress.show(result.tried)
            writer = Child(lambda send: _write(root / "t", send))
            consumer = Child(lambda send: _consume(root, send))
            ends = sorted(
                [(chance.random() * _MOST_S, writer), (chance.random() * _MOST_S, consumer)], key=lambda e: e[0]
            )
            start = time.monotonic()
            for moment, child in ends:
                time.sleep(max(0.0, start + moment - time.monotonic()))
                child.kill()
            for _, child in ends:
                result.tried += 1
                if child.wait() == -9:
                    result.passed += 1
                else:
                    result.fail(f"a process ended by itself: {child.sent[-1:]}")
        _live(lambda send: _consume(root, send, once=True))
        result.note = _check(root, result)
    return [result]


def _live(body: Callable[[Callable[[Any], None]], Any]) -> None:
    child = Child(body)
    if child.wait() != 0:
        raise AssertionError(child.sent[-1:])


def _step(table: Any, number: int) -> None:
    """Carry out step `number` on a table or its oracle. Phases in which rows come and go are followed by dying."""
    rng = np.random.default_rng([7, number])
    is_dying = number // 60 % 2 == 1
    if number % 3 == 2 or (is_dying and number % 3 == 1):
        table.delete(rng.integers(0, _IDS, 300 if is_dying else 40))
    else:
        ids = rng.integers(0, _IDS, 30 if is_dying else 200)
        table.update(ids, rng.integers(-3, 4, (len(ids), _FACTS["dim"])).astype(np.float32))


def _write(path: Path, send: Callable[[Any], None], most_commits: int = 10**9) -> None:
    _native.set_compaction_slack(1 << 10)
    _native.set_index_snapshots(100, in_line=True)
    table = bb.open(path, ram="4MiB", create=_FACTS)
    number = int(table.meta.get("steps", 0))
    for _ in range(most_commits):
        for _ in range(_STEPS_PER_COMMIT):
            _step(table, number)
            number += 1
        table.commit(meta={"steps": number, "next": table.epoch + 1})
    if most_commits == 1:
        table.close()


def _consume(root: Path, send: Callable[[Any], None], *, once: bool = False) -> None:
    (root / "deltas").mkdir(exist_ok=True)
    while True:
        found = write_next_delta(lambda: bb.changes(root / "t", "consumer"), "consumer", root / "deltas", ".parquet")
        if once and found.file is None:
            return


def _check(root: Path, result: Result) -> str:
    """Apply the files in order and compare; the commits in between are compared where the oracle knows their steps."""
    import pyarrow.parquet as parquet

    result.tried += 1
    with bb.open(root / "t", mode="r", ram="16MiB") as table:
        newest, steps = table.epoch, int(table.meta["steps"])
    oracle = ReferenceTable(**_FACTS)
    for number in range(steps):
        _step(oracle, number)
    rows: dict[int, bytes] = {}
    at = puts = deletions = 0
    files = sorted((root / "deltas").glob("changes-*.parquet"))
    for path in files:
        _, since, version = path.stem.split("-")
        if int(since) != at:
            result.fail(f"{path.name} does not follow commit {at}")
            return ""
        at = int(version)
        found = parquet.read_table(path)
        ids = found["id"].to_numpy()
        if len(np.unique(ids)) != len(ids):
            result.fail(f"{path.name} has an id twice")
            return ""
        for row, weights in zip(ids.tolist(), found["weight"].to_pylist(), strict=True):
            if weights is None:
                rows.pop(row, None)
                deletions += 1
            else:
                rows[row] = np.array(weights, np.float32).tobytes()
                puts += 1
    expected = {row: oracle.lookup([row])[0].tobytes() for row in oracle._places}
    if at != newest:
        result.fail(f"the files end at commit {at}, the table is at {newest}")
    elif rows != expected:
        different = sum(rows.get(row) != expected.get(row) for row in {*rows, *expected})
        result.fail(f"{different} rows differ from those of commit {newest}")
    else:
        result.passed += 1
    return f"{newest:,} commits, {len(files):,} files with {puts:,} changed and {deletions:,} deleted rows"
