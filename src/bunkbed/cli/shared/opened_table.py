"""Open a table for reading, given a table or a run, together with the labels of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bunkbed.cli.shared.console import UsageProblem, need
from bunkbed.files.kinds import kind_of
from bunkbed.table.table import Table
from bunkbed.train.settings.run_config import CONFIG_NAME, DATA_NAME

if TYPE_CHECKING:
    from bunkbed.train.data.vocab import Vocab


@dataclass(frozen=True)
class OpenedTable:
    """A table that is open for reading.

    Args:
        table: the table; `open_rows` closes it.
        snapshot: the kept commit that is open; None: the newest commit.
        vocab: labels of a training run's users or items; None: the rows have no labels, only ids.
        what: "user" or "item", if there are labels.
        has_features: whether the rows are of users or items with features, which are in another table.
    """

    table: Table
    snapshot: str | None
    vocab: Vocab | None = None
    what: str = ""
    has_features: bool = False


@contextmanager
def open_rows(
    path: Path, name: str | None, snapshot: str | None, ram: str, *, command: str, default: str | None = None
) -> Iterator[OpenedTable]:
    """Open a table, or table `name` of a run. Without `snapshot`, a training run is opened at its kept "best" commit.

    Args:
        default: the table of a run if `name` is None; None: `name` is required for a run.
    """
    import bunkbed as bb

    if kind_of(path) != "run":
        if name is not None:
            raise UsageProblem(f"{path} is one table; leave --table out")
        with bb.open(path, mode="r", ram=ram, snapshot=snapshot) as table:
            yield OpenedTable(table, snapshot)
        return
    is_trained = (path / CONFIG_NAME).exists()
    if is_trained:
        need("pyarrow", command=command)
        if snapshot is None and "best" in bb.snapshots(path):
            snapshot = "best"
    with bb.Run(path, mode="r", ram=ram, snapshot=snapshot) as run:
        wanted = name or default
        if wanted not in run.table_names:
            has_none = f"run {path} holds several tables" if wanted is None else f"run {path} has no table {wanted!r}"
            raise UsageProblem(f"{has_none}; give --table as one of {', '.join(run.table_names)}")
        if not is_trained:
            yield OpenedTable(run.table(wanted), snapshot)
            return
        from bunkbed.train.data.store import load_vocabs

        users, items = load_vocabs(path / DATA_NAME)
        vocab, what = {"user": (users, "user"), "item": (items, "item"), "item_bias": (items, "item")}.get(
            str(wanted), (None, "")
        )
        has_features = f"{wanted}_feature" in run.table_names
        yield OpenedTable(run.table(wanted), snapshot, vocab, what, has_features)
