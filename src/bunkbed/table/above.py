"""What lies above a table and sees its calls: its device cache, or the check of a reader's age."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Above(Protocol):
    """The calls that a table makes to what lies above it. One thread may nest the contexts."""

    def reading(self) -> AbstractContextManager[None]:
        """Return a context in which the table has the newest rows and a device cache does not change them."""

    def writing(self) -> AbstractContextManager[None]:
        """Return a context in which the table may change; it has the newest rows, and later a cache has no copies."""

    def table_closed(self) -> None:
        """Note that the table is closed. Rows that were not written back are lost."""

    def stats(self) -> dict[str, int | float]:
        """Return counters for `Table.stats`."""
