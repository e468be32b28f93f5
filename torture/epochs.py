"""Readers concurrent with a writer: every batch of rows is of one epoch, during commits and compaction.

Each row contains its id and the number of the commit that set it, so a mixed batch can be recognized. All rows are set
between two commits; a reader's batch, two lookups within `pinned`, must have one number, that of the reader's commit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from bunkbed import _native
from torture.parts import Child, Clock, Progress, Result, Size, folder

ROWS = 400
DIM = 6
BATCH = 48
RAM = 1 << 20


def _write(path: Path, send: Callable[[Any], None]) -> None:
    """Commit in an endless loop: set number n in all rows, in an order that evicts; sometimes keep or compact."""
    _native.set_compaction_slack(32 << 10)
    _native.set_index_snapshots(1, in_line=True)
    options: dict[str, Any] = {"dim": DIM, "num_rows": ROWS, "optimizer": bb.SGD(lr=1.0), "init": bb.Zeros()}
    table = bb.create(path, ram=_smallest(options), **options)
    ids = np.arange(ROWS, dtype=np.int64)
    chance = np.random.default_rng(0)
    number = 0
    while True:
        number += 1
        order = chance.permutation(ids)
        for part in np.array_split(order, 8):
            values = np.full((part.size, DIM), number, np.float32)
            values[:, 0] = part
            table.set(part, values)
        # Most commits are still under way while the rows of the next commit are set.
        commit = table.commit if number % 4 == 0 else table.begin_commit
        commit(keep="kept" if number % 7 == 0 else None, meta={"number": number})
        if number % 5 == 0:
            table.compact()
        if number == 2:
            send("ready")
        if os.getppid() == 1:
            return


def _smallest(options: dict[str, Any]) -> int:
    from bunkbed.table.definition import Definition

    return int(Definition(**options).spec().minimum_ram(ROWS, True)) + 4096


def _read(path: Path, batches: int, seed: int, seconds: float, *, watches: bool) -> tuple[Result, int, int]:
    clock = Clock(seconds)
    result = Result("batches of one epoch")
    chance = np.random.default_rng(seed)
    refreshes = 0
    reader = bb.open(path, mode="r", ram=RAM)
    newest = reader.meta["number"]
    first = newest
    if watches:
        reader.watch(max_age_s=0.04)
    progress = Progress("epochs", batches, seed)
    while result.tried < batches and not clock.is_over:
        progress.show(result.tried)
        if not watches and result.tried % 20 == 0:
            reader.refresh()
        ids = chance.integers(0, ROWS, BATCH)
        with reader.pinned():
            number = reader.meta["number"]
            rows = [reader.lookup(part) for part in np.split(ids, 2)]
        refreshes += number != newest
        result.tried += 1
        if number < newest:
            result.fail(f"the reader went back from commit {newest} to {number}")
            break
        newest = number
        rows = np.concatenate(rows)
        if (rows[:, 0] != ids).any() or (rows[:, 1:] != newest).any():
            seen = np.unique(rows[:, 1:]).tolist()
            result.fail(f"batch {result.tried} at commit {newest} shows {seen}")
            continue
        result.passed += 1
    reader.close()
    return result, refreshes, newest - first


def run(size: Size) -> list[Result]:
    """Run one writer, and readers, each in a process."""
    wanted = size.of(120_000, least=200)
    total = Result("batches of one epoch, during commits and compaction")
    second = Result("a second writer is refused")
    with folder() as root:
        path = root / "table"
        writer = Child(lambda send: _write(path, send), size.seconds + 120)
        try:
            if next(writer.receive(), None) != "ready":
                raise RuntimeError(f"the writer ended: {writer.sent}")
            readers = max(1, size.processes - 1)
            children = [
                Child(
                    lambda send, i=i: _read(
                        path, -(-wanted // readers), i + size.seed, size.seconds, watches=i % 2 == 0
                    ),
                    size.seconds + 60,
                )
                for i in range(readers)
            ]
            second.tried = size.of(50, least=3)
            for _ in range(second.tried):
                try:
                    bb.open(path, ram=RAM).close(commit=False)
                except bb.TableLockedError as error:
                    second.passed += f"process {writer.pid}" in str(error)
                time.sleep(0.01)
            refreshes = commits = 0
            for child in children:
                status = child.wait()
                if status != 0:
                    total.fail(f"a reader ended with status {status}: {child.sent[-1:]}")
                    total.tried += 1
                    continue
                part, times, number = child.sent[-1]
                total.add(part)
                refreshes += times
                commits = max(commits, number)
        finally:
            writer.kill()
            writer.wait()
        problems = bb.check(path)
    total.note = f"{refreshes:,} refreshes, {readers} reading at once, over {commits:,} commits"
    if problems:
        total.fail(f"the table has problems: {problems[0]}")
        total.tried += 1
    return [total, second]
