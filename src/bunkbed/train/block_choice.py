"""The choice of a run's order of pairs and its batch size, once, from the sizes of its tables and their RAM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bunkbed.table.table import Table
from bunkbed.train.data.blocks import PairBlocks
from bunkbed.train.data.vocab import Int64Array
from bunkbed.train.settings.config import TrainConfig

__all__ = ["decided"]

# The part of a cache that blocks may fill: blocks differ in size, and the window of coming batches takes some frames.
_FILLED = 0.9


def decided(
    config: TrainConfig, tables: Mapping[str, Table], processes: int = 1, drawn: Int64Array | None = None
) -> TrainConfig:
    """Return the config with a decided order and batch size.

    ``"auto"`` is uniform if the caches hold every row. Otherwise, and for ``"blocks"``, the item blocks are the least
    number of which one fits in the items' cache (more of these read every user more often, and leave fewer negatives to
    choose from), and the user blocks the least number of which two fit in the users' cache: one in use, and the next.

    Args:
        tables: of `bunkbed.train.models.recommender.create_tables`; they have joined their budget.
        processes: number of those that share the tables, each with a cache of this size.
        drawn: ``int64[M]``, the items from which negatives are drawn; None: all.
    """
    config = replace(config, order=_order(config, tables, processes, drawn))
    return replace(config, batch_size=config.step_pairs)


def _order(config: TrainConfig, tables: Mapping[str, Table], processes: int, drawn: Int64Array | None) -> str:
    if config.is_order_decided:
        return config.order
    if config.is_sequential:  # a sequence has items of every block
        return "uniform"
    tables = {name: tables[name] for name in ("user", "item", "item_bias") if name in tables}  # blocks divide their ids
    frames = {name: processes * int(table.stats()["frame_capacity"]) for name, table in tables.items()}
    rows = {name: int(table.num_rows or 0) for name, table in tables.items()}
    if config.order == "auto" and all(frames[name] >= rows[name] for name in rows):
        return "uniform"
    users = _blocks(rows["user"], frames["user"], resident=2)
    items = max(_blocks(rows[name], frames[name], resident=1) for name in rows if name != "user")
    if config.share_negatives and config.sampling == "uniform":
        while items > 1:  # the negatives of a step are different items of one block
            blocks = PairBlocks(rows["user"], rows["item"], (users, items), config.seed)
            if blocks.least_members(drawn) >= config.negatives:
                break
            items -= 1
    return f"blocks:{users}x{items}"


def _blocks(rows: int, frames: int, *, resident: int) -> int:
    """Return the least number of blocks such that `resident` of them fit in the frames."""
    if frames >= rows:
        return 1
    return min(rows, -(-rows * resident // max(1, int(_FILLED * frames))))
