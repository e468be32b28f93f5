"""`Maker`: makes the table of a layer, and makes it again while no rule has trained it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bunkbed.adapters.ram_rows import is_in_ram, rows_of
from bunkbed.adapters.tables import TableArguments, log_opening
from bunkbed.core.optim import Optimizer
from bunkbed.table.opening import path_lock
from bunkbed.table.sweeps import as_usage
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
        arguments.settle(self._once)
        if ranks is None:
            table = replace(arguments, shards=self.sharing.shards).created(optimizer)
            log_opening(table, len(table))
            return table
        shared = shared_table(arguments, optimizer, ranks, self.sharing)
        num_rows = sum(ranks.gather("making a layer", lambda: len(shared)))
        if ranks.is_first:
            log_opening(shared, num_rows)
        return shared

    def _once(self, call: Callable[[], None]) -> None:
        """Make a call on one of the processes that share the table; its error is raised on all."""
        ranks = self.ranks
        if ranks is None:
            call()
        else:
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
        rows = rows_of(table.local if isinstance(table, DistributedTable) else table, ("weight",))
        clock = table.clock if table.retention.clock == "event" else -1
        place = None if self.arguments.path is None else self.arguments.path.expanduser()
        with path_lock(place):
            replace(self.arguments, exist="new").settle(self._once)  # closes a table with files on every process
            if not table.closed:
                table.release()
            made = self.make(optimizer)
        if clock >= 0 and made.retention.clock == "event":
            made.clock = clock
        if len(rows["ids"]) or self.ranks is not None:
            made.put(rows["ids"], rows["weight"], 0)
            for field, _ in made.usage_fields:
                made.put(rows["ids"], as_usage(*rows["usage"].T), field)
        return made
