"""How an import's rows get into the table: as whole records where they can, slot by slot otherwise.

`Table.set` makes a row's initial record first, since the other slots must be there, and goes through the rows once a
slot. Where a chunk brings all there is to say of its rows, none of that is wanted: its records are put together here
and taken as they are, and a row that is on disk already is not read either. The bits are the same.

No row comes twice in most files, so the records of a chunk go to the log while the next one is set, and the commit
finds the disk at work already.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bunkbed import _native
from bunkbed.core.arguments import Floats, Ids
from bunkbed.table.table import Table


class Setting:
    """Sets rows of `table`, chunk by chunk. Holds the records of one chunk.

    Args:
        slots: what each chunk brings.
    """

    def __init__(self, table: Table, slots: tuple[str, ...]) -> None:
        self._table = table
        self._columns: dict[str, slice] = {}
        end = 0
        for slot, (_, length) in table._fields.items():  # in the order of the record
            self._columns[slot] = slice(end, end + length)
            end += length
        self._absent = [slot for slot in self._columns if slot not in slots]
        state_dtype = getattr(table.optimizer, "state_dtype", "float32")
        self._is_plain = (
            "weight" in slots
            and table.dtype == state_dtype == "float32"
            and table._above is None  # a device cache must be asked for its rows
            and isinstance(table._native, _native.Table)  # each shard of a sharded one has records of its own
            and table._native.payload_bytes() == 4 * end
        )
        self._records: Floats = np.empty((0, end), np.float32)

    def set(self, ids: Ids, values: dict[str, Floats]) -> None:
        """Of equal ids the last wins. Values must be finite, which nobody checks here.

        Raises:
            See `Table.set`.
        """
        # What a stored row holds in slots that the file has not must stay.
        is_whole = self._is_plain and len(ids) > 0 and _are_distinct(ids)
        if is_whole and not (self._absent and self._table.contains(ids).any()):
            self._set_whole(ids, values)
        else:
            for slot, rows in values.items():
                self._table.set(ids, rows, slot=slot)
        self._table._native.write_dirty()

    def _set_whole(self, ids: Ids, values: dict[str, Floats]) -> None:
        if len(self._columns) == 1:
            records = values["weight"]
        else:
            if len(self._records) < len(ids):
                self._records = np.empty((len(ids), self._records.shape[1]), np.float32)
                for slot in self._absent:  # the same for every row
                    self._records[:, self._columns[slot]] = self._table.get(ids[:1], slot)
            records = self._records[: len(ids)]
            for slot, rows in values.items():
                records[:, self._columns[slot]] = rows
        payload: npt.NDArray[np.uint8] = np.ascontiguousarray(records, np.float32).view(np.uint8)
        self._table._native.scatter_records(np.ascontiguousarray(ids), payload)


def _are_distinct(ids: Ids) -> bool:
    return bool((ids[1:] > ids[:-1]).all()) or len(np.unique(ids)) == len(ids)
