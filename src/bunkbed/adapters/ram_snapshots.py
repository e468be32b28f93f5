"""Kept epochs of a table in RAM only: copies of its stored rows, in this process.

The core keeps no epochs of such a table, and a framework's checkpoint holds no rows. Without these copies, keeping and
reloading the best epoch would need a path even for a small model in one process.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bunkbed.table.definition import Definition
from bunkbed.table.opening import create
from bunkbed.table.table import Table

#: Rows of one `set` call in `rewind`.
_CHUNK = 65_536


@dataclass
class _Copy:
    epoch: int
    step: int
    ids: NDArray[np.int64]  # int64[n]
    slots: dict[str, NDArray[np.float32]]  # "weight" and every optimizer slot, float32[n, length]


class RamSnapshots:
    """The methods of `bunkbed.Table` for kept commits, for a table in RAM only.

    Owns one copy of the stored rows for each kept epoch. The copies exist until the process or the last layer ends.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        #: The number of the next step if the core's is wrong: a table cannot be set back to step 0. None: it is right.
        self.next_step: int | None = None
        self._copies: dict[str, _Copy] = {}

    def snapshots(self) -> dict[str, int]:
        """Return name -> epoch, oldest first."""
        return {name: copy.epoch for name, copy in self._copies.items()}

    def commit(self, keep: str) -> int:
        """Keep a copy of every stored row under the name; return the epoch."""
        table = self._table
        epoch: int = table.commit()
        names = ("weight", *table.slots)
        parts: list[tuple[NDArray[np.int64], list[NDArray[np.float32]]]] = [
            (ids, [values, *(table.get(ids, slot) for slot in table.slots)]) for ids, values in table.scan()
        ]
        ids = np.concatenate([part[0] for part in parts]) if parts else np.empty(0, np.int64)
        slots = {name: np.concatenate([part[1][i] for part in parts]) for i, name in enumerate(names) if parts}
        self._copies[keep] = _Copy(epoch, table.step if self.next_step is None else self.next_step - 1, ids, slots)
        return epoch

    def drop(self, name: str) -> None:
        """Remove a copy."""
        del self._copies[name]

    def rewind(self, epoch: int) -> None:
        """Set every row, slot and the step back to the kept epoch, which becomes the newest commit."""
        table = self._table
        copy = next((copy for copy in self._copies.values() if copy.epoch == epoch), None)
        if copy is None:
            raise ValueError(f"table '{table.name}' keeps no epoch {epoch}; it keeps: {self.snapshots()}")
        later = [ids[~np.isin(ids, copy.ids)] for ids, _ in table.scan()]
        fresh = create(None, **Definition.of(table).arguments())
        for ids in later:  # rows that were not stored at the epoch get their initial values
            for slot in ("weight", *table.slots):
                table.set(ids, fresh.get(ids, slot), slot)
        for slot, values in copy.slots.items():
            for start in range(0, len(copy.ids), _CHUNK):
                table.set(copy.ids[start : start + _CHUNK], values[start : start + _CHUNK], slot)
        self.next_step = None
        if copy.step > 0:  # an empty step sets the step number, which bias correction depends on
            table.update(np.empty(0, np.int64), np.empty((0, table.dim), np.float32), step=copy.step)
        elif table.step > 0:
            self.next_step = 1
        table.commit()
