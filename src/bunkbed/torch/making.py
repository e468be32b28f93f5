"""`Maker`: makes the table of a layer, and makes it again while no rule has trained it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from bunkbed.adapters.ram_rows import is_in_ram
from bunkbed.adapters.tables import TableArguments, log_opening
from bunkbed.core.optim import Optimizer
from bunkbed.table.opening import path_lock
from bunkbed.table.table import Table
from bunkbed.torch.ranks.group import Ranks
from bunkbed.torch.ranks.sharing import Sharing
from bunkbed.torch.ranks.table import DistributedTable, shared_table


@dataclass(frozen=True)
class Maker:
    """Opens or makes the table of a layer.

    Attributes:
        arguments: of the layer, without its optimizer.
        sharing: how the table is placed among several processes.
        ranks: the processes that share it; None: this process alone.
    """

    arguments: TableArguments
    sharing: Sharing
    ranks: Ranks | None

    def make(self, optimizer: Optimizer | None) -> Table:
        """Open the table, or make it; see `TableArguments.settle` and `created`, and `shared_table`."""
        arguments, ranks = self.arguments, self.ranks
        if ranks is None:
            arguments.settle()
            table = replace(arguments, shards=self.sharing.shards).created(optimizer)
            log_opening(table, len(table))
            return table
        arguments.settle(lambda call: self._on_first(ranks, call))
        shared = shared_table(arguments, optimizer, ranks, self.sharing)
        num_rows = sum(ranks.gather("making a layer", lambda: len(shared)))
        if ranks.is_first:
            log_opening(shared, num_rows)
        return shared

    @staticmethod
    def _on_first(ranks: Ranks, call: Callable[[], None]) -> None:
        ranks.gather("making a layer", lambda: call() if ranks.is_first else None)

    @staticmethod
    def can_make_again(table: Table) -> bool:
        """Return whether no step and no commit of a table would be lost."""
        return table.step == 0 and not (table.snapshots() if is_in_ram(table) else table.epoch)

    def make_again(self, table: Table, optimizer: Optimizer) -> Table:
        """Replace a table by one whose rows have the state of another optimizer; its rows stay. Collective.

        The rows pass through RAM: they are a padding row, or the tensor that `from_pretrained` was given.

        Requires: `can_make_again`.
        """
        local = table.local if isinstance(table, DistributedTable) else table
        rows = [*local.scan()]
        place = None if self.arguments.path is None else self.arguments.path.expanduser()
        with path_lock(place):
            self._remove(table)
            made = self.make(optimizer)
        ids = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in rows)])
        values = np.concatenate([np.empty((0, table.dim), np.float32), *(values for _, values in rows)])
        if len(ids) or self.ranks is not None:
            made.set(ids, values)
        return made

    def _remove(self, table: Table) -> None:
        """Close a table, and remove its files."""
        table.release()
        ranks, path = self.ranks, table.path
        if ranks is not None:
            ranks.gather("closing a table", lambda: None)
        if path is not None and (ranks is None or ranks.is_first):
            shutil.rmtree(path)
        if ranks is not None:
            ranks.gather("making a table", lambda: None)
