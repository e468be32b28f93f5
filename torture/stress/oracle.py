"""Valid values of a row while several threads change it.

Rows are counters: SGD with a learning rate of 1 on zeros, gradients of whole negative numbers. A read must show at
least the increments of calls that returned before the read started (`done`), and at most those of calls that started
before the read ended (`started`). One call changes both rows of a pair: a change in only one row of a pair is torn.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

Rows = Any  # int64[n]
#: Number of commits whose bounds are stored.
_MOST_COMMITS = 400


class Wrong(Exception):
    """An invalid value."""


class Counts:
    """Bounds of each row of one table, in a file that reader processes map. Thread-safe.

    Attributes:
        started, done: int64[rows]: increments of calls that have started, and of calls that have returned.
        durable: int64[rows]: least values in every commit that has returned.
    """

    def __init__(self, path: Path, rows: int, *, is_new: bool = True) -> None:
        self.rows = rows
        values = np.memmap(path, np.int64, "w+" if is_new else "r", shape=(3, rows))
        self.started, self.done, self.durable = values
        self._lock = threading.Lock()  # guards the fields below, and changes of the arrays above
        self._commits: dict[int, tuple[Rows, Rows]] = {}

    def begin(self, rows: Rows, increments: Rows) -> None:
        with self._lock:
            np.add.at(self.started, rows, increments)

    def end(self, rows: Rows, increments: Rows) -> None:
        with self._lock:
            np.add.at(self.done, rows, increments)

    def undo(self, rows: Rows, increments: Rows) -> None:
        """Undo the start of a call that was refused."""
        with self._lock:
            np.add.at(self.started, rows, -increments)

    def low(self) -> Rows:
        """Return the least values of a read that starts now."""
        with self._lock:
            return self.done.copy()

    def high(self) -> Rows:
        """Return the largest values of a read that has ended."""
        with self._lock:
            return self.started.copy()

    def committed(self, epoch: int | None, low: Rows, high: Rows) -> None:
        """Store the bounds `low` and `high` of a commit that returned. `epoch` is None for the commit of a close."""
        with self._lock:
            np.maximum(self.durable, low, out=self.durable)
            if epoch is None:
                return
            if epoch in self._commits:
                low, high = np.maximum(low, self._commits[epoch][0]), np.minimum(high, self._commits[epoch][1])
            self._commits[epoch] = low, high
            while len(self._commits) > _MOST_COMMITS:
                del self._commits[next(iter(self._commits))]

    def of_commit(self, epoch: int) -> tuple[Rows, Rows] | None:
        with self._lock:
            return self._commits.get(epoch)

    def check(self, what: str, rows: Rows, values: Any, low: Rows, high: Rows) -> Rows:
        """Return the counts in `values`, float32[n, dim] of pairs; check: whole, within bounds, equal in pairs."""
        counts = values[:, 0].astype(np.int64)
        bad = (values != counts[:, None]).any(axis=1) | (counts < low[rows]) | (counts > high[rows])
        torn = np.repeat((counts[0::2] != counts[1::2]), 2)
        if bad.any() or torn.any():
            at = int(np.flatnonzero(bad | torn)[0])
            row = int(rows[at])
            raise Wrong(
                f"{what}: row {row} shows {np.unique(values[at]).tolist()}, its partner {values[at ^ 1, 0]}; "
                f"expected one in [{low[row]}, {high[row]}]; {int((bad | torn).sum())} of {len(rows)} rows are wrong"
            )
        return counts

    def check_stored(self, what: str, rows: Rows, values: Any, low: Rows, high: Rows) -> None:
        """As `check`, for every stored row once, in any order."""
        order = np.argsort(rows, kind="stable")
        rows, values = rows[order], values[order]
        missing = np.setdiff1d(np.flatnonzero(low > 0), rows)
        if missing.size or np.unique(rows).size != rows.size:
            doubled = rows.size - np.unique(rows).size
            raise Wrong(
                f"{what}: {missing.size} of {int((low > 0).sum())} stored rows are missing, {doubled} came twice"
            )
        if rows.size % 2 or (rows[0::2] + 1 != rows[1::2]).any():
            raise Wrong(f"{what}: rows without their partners")
        self.check(what, rows, values, low, high)


class Gate:
    """Shared or exclusive lock: some scans need a time without changes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_closed = False

    def enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed)
            self._inside += 1

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed)
            self._is_closed = True
            self._changed.wait_for(lambda: self._inside == 0)

    def open(self) -> None:
        with self._changed:
            self._is_closed = False
            self._changed.notify_all()
