"""Rows that go."""

from __future__ import annotations

from contextlib import AbstractContextManager

from numpy.typing import ArrayLike

from bunkbed.core.arguments import as_ids
from bunkbed.table.core import Core


class TableDeletes:
    """The part of `bunkbed.Table` that removes rows."""

    core: Core
    _name: str

    def _writing(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def delete(self, ids: ArrayLike) -> int:
        """Delete rows: each looks up as its initial row again, and is stored with fresh optimizer state when updated.

        A delete is an ordinary change: it is durable with the next commit, and readers, copies and `changes` see it.
        It frees the row's memory at once and its disk through compaction. Until then the log has 16 bytes for each
        deleted row. Deletes of many rows in one call are faster and take less disk than one call for each row.

        Args:
            ids: int64[...]; may have repeated ids, and ids of rows that are not stored.

        Returns:
            The number of rows that were stored and are deleted now.

        Raises:
            IndexError, TypeError: see `lookup`; nothing is changed.
            ReadOnlyError: the table is open for reading.
            OSError: the disk, or the limit ``disk=``, has no room for the tombstones. BunkbedError: a call larger than
            the table's memory failed half-way; the table refuses use until it is reopened at its last commit.

        >>> import bunkbed as bb, numpy as np
        >>> table = bb.create(None, dim=2, init=bb.Zeros(), optimizer=bb.SGD(lr=1.0))
        >>> table.update([7, 8], np.ones((2, 2), np.float32))
        >>> table.delete([7, 7, 9])
        1
        >>> table.lookup([7, 8]).tolist(), len(table)
        ([[0.0, 0.0], [-1.0, -1.0]], 1)
        """
        array = as_ids(ids, table=f"table '{self._name}'")
        with self._writing():
            return int(self.core.erase(array.reshape(-1)))
