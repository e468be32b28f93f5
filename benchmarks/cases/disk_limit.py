"""What ``disk=`` costs: the same training on tables that may take two and a half to four times their rows on disk.

Every side trains the same batches in turns, with a commit every so many steps, waited for; what a table's files take is
asked for after every step.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

import numpy as np

import bunkbed as bb
from benchmarks.harness import common
from benchmarks.harness.figures import Figure, Settings
from benchmarks.peers.records import DIM, RECORD_BYTES

#: Limits as multiples of the rows' bytes; None: no limit.
LIMITS = (None, 4.0, 3.0, 2.5)


@dataclass
class Side:
    """A table with its limit, and what was seen of it."""

    table: bb.Table
    limit: float | None
    seconds: list[float] = field(default_factory=list)
    most: int = 0
    before: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "no limit" if self.limit is None else f"{self.limit:g} times the rows"

    def turn(self, batches: list[np.ndarray], grads: np.ndarray, commits: int) -> None:
        """Trains on them, with so many commits in their midst."""
        start = time.perf_counter()
        for number, ids in enumerate(batches):
            self.table.lookup(ids)
            self.table.update(ids, grads)
            if number % (len(batches) // commits) == 0:
                self.table.commit(meta={"number": number})
            self.most = max(self.most, int(self.table.stats()["disk_bytes"]))
        self.seconds.append((time.perf_counter() - start) / len(batches))


def disk_limit(settings: Settings) -> list[Figure]:
    """Compare step times with and without limits, and return the most that the files took."""
    rows = settings.pick(20_000, 500_000, 1_000_000)
    size = settings.pick(256, 16_384, 16_384)
    turns, steps = settings.pick((2, 10), (3, 60), (5, 120))
    sample = common.zipf(rows)
    rng = np.random.default_rng(settings.seed)
    grads = np.full((size, DIM), 0.01, np.float32)
    with common.workspace(settings.dir, rows * RECORD_BYTES * 18) as folder:
        sides = []
        for number, limit in enumerate(LIMITS):
            table = bb.create(
                folder / f"table-{number}",
                dim=DIM,
                num_rows=rows,
                ram=max(rows * RECORD_BYTES // 5, 4 << 20),
                # A small table needs a few MiB in addition to its rows.
                disk=None if limit is None else int(limit * rows * RECORD_BYTES) + (8 << 20),
            )
            common.fill(table, seed=settings.seed)
            table.commit()
            sides.append(Side(table, limit, before=dict(table.stats())))
        for _ in range(turns):
            batches = [sample(rng, size) for _ in range(steps)]
            for side in sides:
                side.turn(batches, grads, commits=2)
        figures = []
        for side in sides:
            ratios = [own / free for own, free in zip(side.seconds, sides[0].seconds, strict=True)]
            moved = common.delta(dict(side.table.stats()), side.before)
            amplification = moved["written_bytes"] / max(1, moved["written_back"] * RECORD_BYTES)
            step_ms = 1e3 * statistics.median(side.seconds)
            note = f"{step_ms:.1f} ms a step, commits included; {amplification:.2f} bytes written for one that changed"
            if side.limit is not None:
                figures.append(
                    Figure(
                        f"step, {side.name} / no limit",
                        statistics.median(ratios),
                        "x",
                        min(ratios),
                        max(ratios),
                        turns,
                        note=note,
                    )
                )
            figures.append(
                Figure(f"files at most, {side.name}", side.most / (rows * RECORD_BYTES), "x the rows", note=note)
            )
            side.table.close(commit=False)
    return figures
