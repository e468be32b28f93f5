"""`RankReferences`: checkpoint references of a table that ranks share.

Any rank may save alone. Every rank must load, and the same reference.
"""

from __future__ import annotations

from bunkbed.adapters.references import References
from bunkbed.torch.base.checkpoint import PREFIX
from bunkbed.torch.ranks.group import RanksError
from bunkbed.torch.ranks.table import DistributedTable


class RankReferences(References):
    """See `References`."""

    table: DistributedTable

    def __init__(self, table: DistributedTable) -> None:
        super().__init__(table, PREFIX, "state_dict", can_hold_also=True)

    def _is_at(self, epoch: int) -> bool:
        """See `References`. Collective, because ranks that saved alone know more epochs with the same contents."""
        core = self.table.core
        wanted = [one for (one,) in core.settle("load_state_dict", epoch)]
        if any(one != epoch for one in wanted):
            raise RanksError(f"table {self.table.name!r}: the ranks load different epochs: {wanted}")
        return all(is_at for (is_at,) in core.settle("load_state_dict", super()._is_at(epoch)))
