"""What a row may show while many threads change it.

Rows are counters: SGD with a learning rate of 1 on zeros, gradients of whole negative numbers. A row that is read shows
at least the increments whose calls had returned before the read began (`done`), at most those whose calls had started
before it ended (`begun`). Rows change in pairs, both by one call: a view of one of the two without the other is torn.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

Rows = Any  # int64[n]
#: Commits whose bounds are remembered.
_MOST_COMMITS = 400


class Wrong(Exception):
    """A value that cannot be."""


class Counts:
    """The bounds of each row of one table, in a file that reader processes map. Thread-safe.

    Attributes:
        begun, done: int64[rows]: increments whose calls began, and returned.
        durable: int64[rows]: what every commit that returned holds at least.
    """

    def __init__(self, path: Path, rows: int, *, is_new: bool = True) -> None:
        self.rows = rows
        values = np.memmap(path, np.int64, "w+" if is_new else "r", shape=(3, rows))
        self.begun, self.done, self.durable = values
        self._lock = threading.Lock()  # guards all that follows, and changes of the above
        self._commits: dict[int, tuple[Rows, Rows]] = {}

    def begin(self, rows: Rows, increments: Rows) -> None:
        with self._lock:
            np.add.at(self.begun, rows, increments)

    def end(self, rows: Rows, increments: Rows) -> None:
        with self._lock:
            np.add.at(self.done, rows, increments)

    def undo(self, rows: Rows, increments: Rows) -> None:
        """The call refused to do what it began."""
        with self._lock:
            np.add.at(self.begun, rows, -increments)

    def low(self) -> Rows:
        """What a read that begins now shows at least."""
        with self._lock:
            return self.done.copy()

    def high(self) -> Rows:
        """What a read that has ended shows at most."""
        with self._lock:
            return self.begun.copy()

    def committed(self, epoch: int | None, low: Rows, high: Rows) -> None:
        """A commit that holds at least `low` and at most `high` returned. No epoch: that of a close."""
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
        """The counts in `values`, float32[n, dim] of pairs of rows: whole, within the bounds, of pairs equal."""
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
        """As `check`, of every stored row once, in any order."""
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
    """Many may pass at once, or one alone: a scan needs a time without changes."""

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
