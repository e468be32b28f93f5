"""Setting of an import's rows: as whole records if possible, otherwise slot by slot.

`Table.set` makes a row's initial record first, because it sets one slot of a record, and it visits the rows once for
each slot. A chunk that decides all slots of its rows needs neither: `Setting` makes whole records, and a row that is on
disk is not read. The bits are the same.

Most files have each row once, so the records of a chunk are written back while the next chunk is set, and the commit
has less to write.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bunkbed import _native
from bunkbed.core.arguments import Floats, Ids
from bunkbed.table.table import Table


class Setting:
    """Setter of rows of `table`, chunk by chunk. Holds the records of one chunk.

    Args:
        slots: the slots in each chunk.
    """

    def __init__(self, table: Table, slots: tuple[str, ...]) -> None:
        self._table = table
        self._columns: dict[str, slice] = {}
        end = 0
        for slot, (_, length) in table.fields.items():  # in the order of the record
            self._columns[slot] = slice(end, end + length)
            end += length
        self._absent = [slot for slot in self._columns if slot not in slots]
        state_dtype = getattr(table.optimizer, "state_dtype", "float32")
        self._is_plain = (
            "weight" in slots
            and table.dtype == state_dtype == "float32"
            and not table.has_cache  # rows may be in a device cache
            and isinstance(table.core, _native.Table)  # not sharded
            and table.core.payload_bytes() == 4 * end
        )
        self._records: Floats = np.empty((0, end), np.float32)

    def set(self, ids: Ids, values: dict[str, Floats]) -> None:
        """Set rows; of equal ids the last wins. Values must be finite, which is not checked here.

        Raises:
            See `Table.set`.
        """
        # A stored row must keep its slots that the file does not have.
        is_whole = self._is_plain and len(ids) > 0 and _are_distinct(ids)
        if is_whole and not (self._absent and self._table.contains(ids).any()):
            self._set_whole(ids, values)
        else:
            for slot, rows in values.items():
                self._table.set(ids, rows, slot=slot)
        self._table.core.write_dirty()

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
        self._table.plain_core.scatter_records(np.ascontiguousarray(ids), payload)


def _are_distinct(ids: Ids) -> bool:
    return bool((ids[1:] > ids[:-1]).all()) or len(np.unique(ids)) == len(ids)
