"""The warning for a table that is dropped without a commit. Each table warns once."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from bunkbed.errors import UncommittedWarning

if TYPE_CHECKING:
    from bunkbed.table.table import Table


def warn_of_loss(table: Table) -> None:
    """Warn with the number of rows that are lost if `table` is dropped now.

    Does nothing for a table that is committed or closed, a reader, a table in RAM only, and in a child after a fork.
    ``close(commit=False)``, and a ``with`` block left by an exception, drop changes without a warning.
    """
    if table.closed or table.core is None or table.mode != "w" or table.path is None:
        return
    if not table.warns_of_loss or not table.is_own:
        return
    rows, is_exact, steps = table.core.uncommitted()
    if rows == 0 and steps == 0:
        return
    table.warns_of_loss = False
    count = f"{'' if is_exact else 'up to '}{rows:,} changed row{'' if rows == 1 else 's'}"
    since = f" of {steps:,} step{'' if steps == 1 else 's'}" if steps else ""
    verb = "is" if rows == 1 and is_exact else "are"
    how = (
        "call close() or use a with block; close(commit=False) drops changes without a word"
        if table.run is None
        else "call run.close() or use a with block on the run"
    )
    warnings.warn(
        f"table '{table.name}' at {table.path} was left open: "
        f"{count}{since} since commit {table.epoch} {verb} lost; {how}",
        UncommittedWarning,
        stacklevel=3,
    )


def warn_when_it_goes(table: Table) -> None:
    """Call `warn_of_loss` from a finalizer, which cannot raise: show the warning even where warnings are errors."""
    try:
        warn_of_loss(table)
    except UncommittedWarning as warning:
        warnings.showwarning(warning, UncommittedWarning, __file__, 0)
