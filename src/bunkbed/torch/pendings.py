"""The `Pending` of every table that has a layer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from bunkbed.core.budget import Budget
from bunkbed.table.table import Table
from bunkbed.torch.base.types import Device
from bunkbed.torch.pending import Pending
from bunkbed.torch.rank_pending import RankPending
from bunkbed.torch.ranks.table import DistributedTable

_pendings: weakref.WeakValueDictionary[int, Pending] = weakref.WeakValueDictionary()


def pending_of(table: Table, device: Device = None, device_cache: int | str | Budget | None = None) -> Pending:
    """Return the one `Pending` of `table`; the first call makes it.

    The key is ``id(table)``: a `Pending` refers to its table, so the id is not reused while the entry exists.
    """
    pending = _pendings.get(id(table))
    if pending is None:
        if isinstance(table, DistributedTable):
            pending = RankPending(table, device, device_cache)
        else:
            pending = Pending(table, device, device_cache)
        _pendings[id(table)] = pending
    elif device_cache is not None:
        raise ValueError(
            f"table {pending.name!r}: its layers share one device cache, which the first layer chooses; leave "
            "device_cache= out of the others"
        )
    elif device is not None and torch.device(device) != pending.anchor.device:
        raise ValueError(
            f"table {pending.name!r}: its layers share one anchor, on {pending.anchor.device}; got device={device!r}"
        )
    return pending


def by_anchor() -> dict[int, Pending]:
    """Return id(anchor) -> `Pending` of every table that has a layer."""
    return {id(pending.anchor): pending for pending in list(_pendings.values())}


def distinct(pendings: Iterable[Pending]) -> list[Pending]:
    """Return the pendings without repetitions, in first-seen order."""
    return list({id(pending): pending for pending in pendings}.values())
