"""Random tables with random budgets of RAM: the minimum that `create`, `open` and their messages name is right.

What `create` accepts without a warning trains every row, and opens again for writing and for reading within the same
budget. Where it warns, the rows that it names have room. What it refuses works with the budget that it names, and not
with a tenth less. A reader needs at most 8 bytes a row.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from torture.parts import Clock, Progress, Result, Size, folder, in_processes

_NAME = "random tables and budgets do what create and its messages say"
_CASES = 200
_READER_ROWS = 100_000_000
_MOST_NUMBERS = 4_000_000  # of all rows of a table, for the time that a case takes

READER = """
import json, sys
import numpy as np
import bunkbed as bb

path, ram = sys.argv[1], int(sys.argv[2])

def kib(name):
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith(name + ":")))

before = kib("VmHWM")
table = bb.open(path, mode="r", ram=ram)
ids = np.random.default_rng(0).integers(0, table.num_rows, 200_000)
rows = table.lookup(ids)
right = bool((rows == (ids % 1000)[:, None]).all())
print(json.dumps({"right": right, "ram": table.stats()["ram_bytes"], "grown": (kib("VmHWM") - before) * 1024}))
"""


@dataclass(frozen=True)
class Case:
    """A table, the rows that are to be stored, and a budget.

    Attributes:
        num_rows: of the table; None: no bound.
        rows: that are to be stored.
        on_disk: False: in RAM only.
    """

    seed: int
    num_rows: int | None
    rows: int
    dim: int
    optimizer: bb.SGD | bb.Adagrad | bb.RowwiseAdagrad | bb.Adam
    dtype: str
    on_disk: bool
    ram: int

    @classmethod
    def of(cls, seed: int) -> Case:
        chance = np.random.default_rng(seed)
        dim = int(2 ** chance.uniform(0, 8))
        rows = int(np.exp(chance.uniform(0, np.log(min(1_500_000, _MOST_NUMBERS // dim)))))
        optimizer = [bb.SGD(0.5), bb.Adagrad(), bb.RowwiseAdagrad(), bb.Adam()][chance.integers(4)]
        dtype = ["float32", "bfloat16", "float16"][chance.integers(3)]
        on_disk = chance.random() < 0.85
        # A table of its rows alone, or with many rows that are not stored.
        num_rows = [rows, rows, rows * int(chance.integers(2, 100)), None][chance.integers(4)]
        least = bb.minimum_ram(rows, dim, optimizer, dtype, num_rows=num_rows or 1 << 60)
        if not on_disk:
            least += rows * (16 + 12 * dim)
        return cls(seed, num_rows, rows, dim, optimizer, dtype, on_disk, int(least * np.exp(chance.uniform(-1.2, 1.2))))

    @property
    def has_minimum(self) -> bool:
        """Whether the budget holds all rows: a table without a bound is made with less, because it may stay small."""
        least = bb.minimum_ram(self.rows, self.dim, self.optimizer, self.dtype, num_rows=self.num_rows or 1 << 60)
        return self.num_rows is not None or (self.on_disk and self.ram >= least)

    def create(self, path: Path | None, ram: int | None) -> bb.Table:
        given = {"dim": self.dim, "num_rows": self.num_rows, "optimizer": self.optimizer, "dtype": self.dtype}
        return bb.create(path, ram=ram, **given)

    def batches(self, rows: int) -> Iterator[np.ndarray]:
        """Yield distinct ids, `rows` in all."""
        chance = np.random.default_rng(self.seed + 1)
        if self.num_rows is not None and self.num_rows < 2 * rows:
            ids = chance.permutation(self.num_rows)[:rows]
        else:
            # Half as many more: where they are half of the table's rows, 1.39 draws a row are distinct ones on average.
            ids = np.unique(chance.integers(0, self.num_rows or 1 << 62, rows + rows // 2 + 100))
            ids = chance.permutation(ids)[:rows]
        at = 0
        while at < len(ids):
            size = int(np.exp(chance.uniform(0, np.log(40_000))))
            yield ids[at : at + size]
            at += size


def _train(table: bb.Table, batches: Iterator[np.ndarray]) -> int:
    """Train the rows of the batches; return how many there were when the budget was full."""
    done = 0
    for number, ids in enumerate(batches):
        gradients = np.broadcast_to(((ids % 7) - 3).astype(np.float32)[:, None], (len(ids), table.dim))
        try:
            table.lookup(ids[: 1 + number % 50])
            table.update(ids, gradients)
        except MemoryError:
            return done
        done += len(ids)
    return done


class Wrong(Exception):
    """A promise that did not hold."""


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


def _compare(table: bb.Table, case: Case, oracle: bb.Table, rows: int) -> None:
    _require(len(table) >= rows, f"{len(table)} rows are stored, not {rows}")
    for ids in case.batches(rows):
        _require(np.array_equal(table.lookup(ids), oracle.lookup(ids)), "a row is another one")


def _live(case: Case, path: Path | None, table: bb.Table, rows: int) -> float:
    """Train `rows` rows, open the table again, compare; return how many rows it had room for, as a part of `rows`."""
    oracle = case.create(None, None)
    stored = _train(table, case.batches(rows))
    _require(stored == rows, f"MemoryError after {stored:,} of {rows:,} rows")
    _train(oracle, case.batches(rows))
    _compare(table, case, oracle, rows)
    most = 1.0
    if rows < case.rows:  # the rows beyond: until it is full
        chance = np.random.default_rng(case.seed + 2)
        more = (chance.integers(0, case.num_rows or 1 << 62, 500) for _ in range(case.rows // 500))
        _train(table, more)
        most = len(table) / rows
    if path is not None:
        table.close()
        with bb.open(path, ram=case.ram) as again:
            if rows == case.rows:
                _compare(again, case, oracle, rows)
            again.update(next(case.batches(1)), np.zeros((1, case.dim), np.float32))
        with bb.open(path, ram=case.ram, mode="r") as reader:
            _require(len(reader) >= rows, f"the reader has {len(reader)} rows, not {rows}")
            for ids in case.batches(rows):
                reader.lookup(ids)
    table.close(commit=False)
    return most


def outcome(case: Case, place: Path) -> tuple[str, float]:
    """Return what `create` did with the case, and a figure of it; raise `Wrong` where a promise did not hold.

    The figure says, of a warning, how many rows had room, as a part of those that it named; otherwise it is 1.
    """
    path = place / "table" if case.on_disk else None
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        try:
            table = case.create(path, case.ram)
        except ValueError as error:
            needed = int(re.findall(r"at least ram=(\d+)", str(error))[0])
            _require(needed > case.ram, "refused a budget that is no smaller than the one it names")
            _check_refusal(case, path, needed)
            return "refused", 1.0
    if not shown:
        rows = case.rows
        if not case.has_minimum:  # without a bound on its rows, a table may be accepted with room for fewer
            rows = min(rows, 4000 if case.on_disk else table.spec.rows_within(case.ram, False))
        _live(case, path, table, rows)
        return "accepted", 1.0
    named = int(re.findall(r"has room for ([\d,]+) of", str(shown[0].message))[0].replace(",", ""))
    _require(named < (case.num_rows or 0), "warned although all rows have room")
    return "warned", _live(case, path, table, min(named, case.rows))


def _check_refusal(case: Case, path: Path | None, needed: int) -> None:
    """Check that the budget that the message names works, and a tenth less does not."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        table = case.create(path, needed)
    if shown:  # not all rows have room, but as many as a table must have
        named = int(re.findall(r"has room for ([\d,]+) of", str(shown[0].message))[0].replace(",", ""))
        _require(named >= (4096 if case.on_disk else 16), f"created with room for {named} rows")
    rows = 4096 if case.on_disk else 16
    if case.num_rows is not None:
        is_for_all = case.on_disk and needed >= bb.minimum_ram(case.num_rows, case.dim, case.optimizer, case.dtype)
        rows = case.num_rows if is_for_all else min(rows, case.num_rows)
    size = 32 if rows <= 4096 else rows  # for the time that a case takes
    hard = [_hard_batches(rows, case.num_rows or 1 << 40, share, size) for share in (3 / 8, 5 / 8)]
    for some in (case.batches(rows), *map(iter, hard)):
        _require(_train(table, some) >= rows or len(table) >= rows, "the budget that the message names is too small")
    table.close(commit=False)
    for number, batches in enumerate(hard):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            table = case.create(None if path is None else path.with_name(f"other{number}"), needed)
        try:
            table.plain_core.set_ram(needed * 9 // 10)
            is_enough = _train(table, iter(batches)) >= rows
        except MemoryError:
            is_enough = False
        table.close(commit=False)
        if not is_enough:
            return
    raise Wrong(f"a tenth less than ram={needed} works, too")


def _hard_batches(rows: int, end: int, scattered: float, size: int) -> list[np.ndarray]:
    """Return batches of the `rows` ids below `end` that need the most: some scattered, then neighbours.

    Which share must be scattered depends on the rows of a range of the directory: its growth is the last to have room.
    """
    ids = np.arange(rows)
    if rows < end:
        ids = np.unique(np.r_[np.linspace(0, end - 1, int(rows * scattered), dtype=np.int64), :rows])
    return [ids[::-1][start : start + size] for start in range(0, len(ids), size)]


def reader(rows: int, place: Path) -> tuple[bool, str]:
    """Return whether a reader of so many rows of 16 numbers needs at most 8 bytes a row, and how many it needs."""
    path = place / "table"
    with bb.create(path, dim=16, num_rows=rows, optimizer=bb.SGD(1.0), init=bb.Zeros(), ram="2GiB") as table:
        for start in range(0, rows, 1_000_000):
            ids = np.arange(start, min(rows, start + 1_000_000))
            table.set(ids, np.broadcast_to((ids % 1000).astype(np.float32)[:, None], (len(ids), 16)))
    ram = bb.minimum_ram(rows, 16, bb.SGD())
    done = subprocess.run([sys.executable, "-c", READER, str(path), str(ram)], capture_output=True, text=True)
    if done.returncode:
        return False, done.stderr.strip().splitlines()[-1]
    found: dict[str, Any] = json.loads(done.stdout)
    text = f"ram={ram} is {ram / rows:.2f} B a row, of which {found['ram'] / rows:.2f} are used; "
    text += f"the process grew by {found['grown'] / rows:.2f}"
    return found["right"] and max(ram, found["ram"]) <= 8 * rows, text


def run(size: Size) -> list[Result]:
    """Return the figures."""
    total = size.of(_CASES, 20)

    def work(index: int, send: Any) -> None:
        result, clock = Result(_NAME), Clock(size.seconds)
        progress = Progress("tables", total, index)
        counts, loosest = dict.fromkeys(("accepted", "warned", "refused"), 0), 1.0
        for number in range(index, total, size.processes):
            if clock.is_over:
                break
            case = Case.of(size.seed * total + number)
            result.tried += 1
            try:
                with folder() as place:
                    what, figure = outcome(case, place)
                counts[what] += 1
                loosest = max(loosest, figure)
                result.passed += 1
            except Exception as error:
                result.fail(f"{case}: {type(error).__name__}: {error}")
            progress.show(number)
        send((result, counts, loosest))

    whole = Result(_NAME, wanted=total)
    all_counts, loosest = dict.fromkeys(("accepted", "warned", "refused"), 0), 1.0
    for found, counts, figure in in_processes(work, size.processes, size.seconds + 60):
        whole.add(found)
        all_counts = {name: all_counts[name] + counts[name] for name in counts}
        loosest = max(loosest, figure)
    shown = ", ".join(f"{count} {name}" for name, count in all_counts.items())
    whole.note = f"{shown}; where it warned, at most {loosest:.2f} times the rows it named had room"
    rows = size.of(_READER_ROWS, 1_000_000)
    with tempfile.TemporaryDirectory(prefix="bunkbed-torture-") as place:
        is_ok, text = reader(rows, Path(place))
    return [whole, Result(f"a reader of {rows:,} rows x 16 needs at most 8 B a row", int(is_ok), 1, text)]
