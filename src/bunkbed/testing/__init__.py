"""For tests of code that uses tables: an oracle, and a conformance suite for any kind of table.

`ReferenceTable` is a table in plain NumPy with the same bits as the engine. `TableTests` is a pytest class to
subclass; pytest is imported only when the name is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bunkbed.testing.reference import ReferenceTable

if TYPE_CHECKING:
    from bunkbed.testing.conformance import TableTests

__all__ = ["ReferenceTable", "TableTests"]


def __getattr__(name: str) -> Any:
    if name == "TableTests":
        from bunkbed.testing.conformance import TableTests

        return TableTests
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
