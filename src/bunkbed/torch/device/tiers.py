"""Choice of the device cache for a layer's ``device_cache`` argument."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from bunkbed import _native
from bunkbed.core.budget import Budget
from bunkbed.table.table import Table
from bunkbed.torch.device.tier import DeviceTier
from bunkbed.torch.device.transfer import TransferTier

Tier = DeviceTier | TransferTier


def make_tier(table: Table, size: float | str | Budget, anchor: Callable[[], Tensor]) -> Tier:
    """Return a device cache of `size` bytes; for 0, rows stay in RAM and each batch copies its rows to the device.

    Raises:
        ValueError: the table is a reader, sharded, or admits rows by `admit`. MemoryError: not one record fits.
    """
    label = f"table {table.name!r}"
    if table.mode == "r":
        raise ValueError(f"{label}: device_cache is for training; a table open with mode='r' has no use for it")
    if type(table.core) is not _native.Table:
        raise ValueError(f"{label} is sharded: a device cache lies above one table; leave device_cache out")
    if size == 0 and not isinstance(size, bool):
        return TransferTier(table, anchor)
    if table.retention.admit is not None:
        raise ValueError(
            f"{label}: a device_cache stores every row that a step names, and admit={table.retention.admit} does not; "
            "leave device_cache out or give device_cache=0, or make the table without admit="
        )
    return DeviceTier(table, size, anchor)
