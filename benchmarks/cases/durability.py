"""What a durable table costs away from training: opening it, checking it, copying it."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import numpy as np

import bunkbed as bb
from benchmarks.harness import common
from benchmarks.harness.figures import Figure, Settings, missing
from benchmarks.peers.records import DIM, RECORD_BYTES

#: Records of the opening case are small: opening reads no records.
SMALL_DIM = 4
#: What a row takes on disk there: its record, padded, and its place in an index.
SMALL_BYTES = 40


def cold(folder: Path, settings: Settings) -> None:
    """Drops cached pages of these files, and where root allows the kernel's own of their names and places too."""
    common.forget_pages(folder)
    if settings.tiny:  # a test has no business with the machine's caches
        return
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3")


# ---- Opening


def opening(settings: Settings) -> list[Figure]:
    """Seconds until a table of 10^6 to 10^8 rows is open, for training and for reading, and its first lookup done.

    Two tables of each size: one was closed; the writer of the other was killed after it had committed almost half of
    its rows past the index snapshot that its commits name, and opening has to find these rows in the log. With records
    as small as these no snapshot is made earlier; with larger records at most an eighth of the rows is not in one.
    """
    sizes = settings.pick((20_000,), (10**6, 10**7), (10**6, 10**7, 10**8))
    rounds = settings.pick(2, 3, 5)
    figures = []
    for rows in sizes:
        ram = f"{64 + rows * 20 // common.MIB}MiB"
        for ending, end in (("closed", write), ("its writer killed", write_and_be_killed)):
            with common.workspace(settings.dir, rows * SMALL_BYTES * 3) as folder:
                path = folder / "table"
                end(path, rows, ram)
                figures += open_times(path, f"{rows:,} rows, {ending},", ram, rounds, settings)
    if settings.size == "quick":
        figures.append(missing("open 100,000,000 rows", "left out of quick runs", at_most=3.0))
    return figures


def open_times(path: Path, what: str, ram: str, rounds: int, settings: Settings) -> list[Figure]:
    size = sum(file.stat().st_size for file in path.iterdir())
    modes: tuple[Literal["w", "r"], ...] = ("w", "r")
    figures = []
    for mode in modes:
        opened = [open_once(path, mode, ram, settings) for _ in range(rounds)]
        times = [seconds for seconds, _ in opened]
        figures.append(
            Figure(
                f"open {what} {'for training' if mode == 'w' else 'to read'}",
                statistics.median(times),
                "s",
                min(times),
                max(times),
                len(times),
                at_most=3.0 if what.startswith("100,000,000") else None,
                note=f"{common.bb_bytes(size)} on disk, page cache dropped, ram={ram!r}, {opened[0][1]:,.0f} records "
                "looked at, with a first lookup",
            )
        )
    return figures


def write(path: Path, rows: int, ram: str) -> None:
    """A table with every row stored and committed, a part of it twice, as training leaves it."""
    start = time.perf_counter()
    with bb.create(path, dim=SMALL_DIM, num_rows=rows, optimizer=bb.SGD(), init=bb.Normal(0.01), ram=ram) as table:
        common.fill(table, chunk=1_000_000)
        table.commit()
        again = np.arange(0, rows, 50)
        table.set(again, np.ones((again.size, SMALL_DIM), np.float32))
        table.commit()
    print(f"{rows:,} rows written in {time.perf_counter() - start:.0f} s", flush=True)


def write_and_be_killed(path: Path, rows: int, ram: str) -> None:
    """The same, and then 45 % of the rows again, in no order; the writer ends by SIGKILL once that is committed."""
    writer = multiprocessing.get_context("spawn").Process(target=_write_and_die, args=(path, rows, ram))
    start = time.perf_counter()
    writer.start()
    writer.join()
    if writer.exitcode != -signal.SIGKILL:
        raise RuntimeError(f"the writer ended with status {writer.exitcode}")
    print(f"{rows:,} rows written, and their writer killed, in {time.perf_counter() - start:.0f} s", flush=True)


def _write_and_die(path: Path, rows: int, ram: str) -> None:
    table = bb.create(path, dim=SMALL_DIM, num_rows=rows, optimizer=bb.SGD(), init=bb.Normal(0.01), ram=ram)
    common.fill(table, chunk=1_000_000)
    table.commit()
    # The checkpoint that is due now is taken by a thread; the next commit names it. Few rows: none is taken.
    while rows >= 1_000_000 and not any(path.glob("directory-*")):
        time.sleep(0.2)
    time.sleep(0.2)
    table.commit()
    some = np.random.default_rng(0).permutation(rows)[: int(rows * 0.45)]
    for part in range(0, some.size, 1_000_000):
        ids = some[part : part + 1_000_000]
        table.set(ids, np.ones((ids.size, SMALL_DIM), np.float32))
    table.commit()
    os.kill(os.getpid(), signal.SIGKILL)


def open_once(path: Path, mode: Literal["w", "r"], ram: str, settings: Settings) -> tuple[float, float]:
    """Seconds, and how many records opening looked at."""
    cold(path, settings)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    reader = multiprocessing.get_context("spawn").Process(target=_open_and_leave, args=(path, mode, ram, theirs))
    reader.start()
    theirs.close()
    found: tuple[float, float] = ours.recv()
    reader.join()
    return found


def _open_and_leave(path: Path, mode: Literal["w", "r"], ram: str, pipe: Connection) -> None:
    """Ends without closing, which would take the checkpoint whose lack is to be measured."""
    start = time.perf_counter()
    table = bb.open(path, mode=mode, ram=ram)
    table.lookup(np.array([0, table.num_rows - 1]))
    pipe.send((time.perf_counter() - start, table.stats()["indexed_records"]))
    os._exit(0)


# ---- Checking and copying


def checking(settings: Settings) -> list[Figure]:
    """Bytes a second of `bb.check` and `bb.copy` on one table, compared with plain reading of the same files."""
    rows = settings.pick(4_000, 1_000_000, 3_000_000)
    rounds = settings.pick(2, 3, 5)
    with common.workspace(settings.dir, rows * RECORD_BYTES * 4) as folder:
        path = folder / "table"
        with bb.create(path, dim=DIM, num_rows=rows, optimizer=bb.Adam(), init=bb.Normal(0.01), ram="512MiB") as table:
            common.fill(table)
            table.commit()
            part = np.arange(rows // 10)
            table.update(part, np.ones((part.size, DIM), np.float32))
        size = sum(file.stat().st_size for file in path.iterdir())
        calls: dict[str, Callable[[], object]] = {
            "plain sequential reading": lambda: read_all(path),
            "bb.check": lambda: bb.check(path),
            "bb.copy by links": lambda: bb.copy(path, folder / "links"),
            "bb.copy by bytes": lambda: bb.copy(path, folder / "bytes", link=False),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        again: list[float] = []
        for number in range(rounds):
            for name in list(calls) if number % 2 == 0 else list(calls)[::-1]:
                shutil.rmtree(folder / "links", ignore_errors=True)
                shutil.rmtree(folder / "bytes", ignore_errors=True)
                cold(path, settings)
                times[name].append(common.timed(calls[name]))
        bb.copy(path, folder / "links")
        again = [common.timed(lambda: bb.copy(path, folder / "links")) for _ in range(rounds)]
    figures = [rate(name, size, seconds) for name, seconds in times.items()]
    shares = [a / b for a, b in zip(times["plain sequential reading"], times["bb.check"], strict=True)]
    figures.append(
        Figure(
            "bb.check, of plain reading's rate",
            100 * statistics.median(shares),
            "%",
            100 * min(shares),
            100 * max(shares),
            len(shares),
        )
    )
    figures.append(
        Figure(
            "bb.copy again, nothing new",
            1e3 * statistics.median(again),
            "ms",
            1e3 * min(again),
            1e3 * max(again),
            len(again),
        )
    )
    return figures


def rate(name: str, size: int, seconds: list[float]) -> Figure:
    rates = [size / one / 1e9 for one in seconds]
    return Figure(
        name, statistics.median(rates), "GB/s", min(rates), max(rates), len(rates), note=common.bb_bytes(size)
    )


def read_all(folder: Path) -> int:
    """Reads every file from end to end past the page cache, 8 MiB at a time; the bytes read."""
    return sum(len(part) for file in sorted(folder.iterdir()) for part in parts_of(file))


def parts_of(file: Path) -> Iterator[memoryview]:
    buffer = mmap.mmap(-1, 8 * common.MIB)  # aligned, as direct reads want it
    try:
        handle = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # this file system has no reads past the page cache
        handle = os.open(file, os.O_RDONLY)
    try:
        while read := os.readv(handle, [buffer]):
            yield memoryview(buffer)[:read]
            if read < len(buffer):
                return
    finally:
        os.close(handle)
