"""One table to read from, whether a command was given a table or a run, and what its rows are called outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bunkbed.cli.shared.console import UsageProblem, need
from bunkbed.cli.shared.run_folder import kind_of
from bunkbed.table.table import Table
from bunkbed.train.settings.run_config import CONFIG_NAME, DATA_NAME

if TYPE_CHECKING:
    from bunkbed.train.data.vocab import Vocab


@dataclass(frozen=True)
class OpenedTable:
    """A table that is open, to be read from.

    Args:
        table: closed by who opened it.
        snapshot: the kept commit that it shows; None: the newest.
        vocab: labels of a training run's users or items; None: rows are called by their ids.
        what: "user" or "item", where there are labels.
    """

    table: Table
    snapshot: str | None
    vocab: Vocab | None = None
    what: str = ""


@contextmanager
def open_rows(
    path: Path, name: str | None, snapshot: str | None, ram: str, *, command: str, default: str | None = None
) -> Iterator[OpenedTable]:
    """A table, or table `name` of a run: of a training run's best commit, where it kept one.

    Args:
        default: which table of a run is meant where `name` is None; None: it must be said.
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
        is_user = wanted == "user"
        yield OpenedTable(run.table(wanted), snapshot, users if is_user else items, "user" if is_user else "item")
