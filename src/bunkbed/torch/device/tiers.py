"""Which tier a layer's ``device_cache`` asks for."""

from __future__ import annotations

from typing import Any

from bunkbed import _native
from bunkbed.core.budget import Budget
from bunkbed.torch.device.tier import DeviceTier
from bunkbed.torch.device.transfer import TransferTier

Tier = DeviceTier | TransferTier


def make_tier(table: Any, size: int | str | Budget, anchor: Any) -> Tier:
    """A cache of `size` bytes, or for 0 none: then rows stay in RAM and batches send theirs.

    Raises:
        ValueError: a reader, or a table of several shards. MemoryError: not one record fits.
    """
    label = f"table {table.name!r}"
    if table.mode == "r":
        raise ValueError(f"{label}: device_cache is for training; a table open with mode='r' has no use for it")
    if type(table._native) is not _native.Table:
        raise ValueError(f"{label} is sharded: a device cache lies above one table; leave device_cache out")
    if size == 0 and not isinstance(size, bool):
        return TransferTier(table, anchor)
    return DeviceTier(table, size, anchor)
