"""The `Pending` of every table that has a layer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from bunkbed.adapters.ram_rows import copy_of
from bunkbed.core.budget import Budget
from bunkbed.core.optim import SGD, Optimizer, from_native, have_same_slots
from bunkbed.table.table import Table
from bunkbed.torch.base.types import Device
from bunkbed.torch.making import Maker
from bunkbed.torch.pending import Pending
from bunkbed.torch.rank_pending import RankPending
from bunkbed.torch.ranks.table import DistributedTable

_pendings: weakref.WeakValueDictionary[int, Pending] = weakref.WeakValueDictionary()


def pending_of(
    table: Table,
    device: Device = None,
    device_cache: int | str | Budget | None = None,
    maker: Maker | None = None,
) -> Pending:
    """Return the one `Pending` of `table`; the first call makes it, with `maker`.

    The key is ``id(table)``: a `Pending` refers to its table, so the id is not reused while the entry exists.
    """
    pending = _pendings.get(id(table))
    if pending is None:
        if isinstance(table, DistributedTable):
            pending = RankPending(table, device, device_cache)
        else:
            pending = Pending(table, device, device_cache)
        pending.maker = maker
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


def copy_of_pending(pending: Pending) -> Pending:
    """Return a `Pending` on a copy of a table in RAM, without gradients."""
    made = pending_of(copy_of(pending.table), pending.anchor.device, pending.device_cache, pending.maker)
    made.anchor.requires_grad = pending.anchor.requires_grad
    made.move_anchor(pending.anchor.detach())
    made.is_copy = True
    made.is_local = pending.is_local
    made.references.keep = pending.references.keep
    return made


def require_can_follow(pending: Pending, rule: Optimizer) -> None:
    """Raise ValueError if the rows of a table have the state of another rule, and were trained or committed."""
    table, rule = pending.table, _as_stored(pending, rule)
    if have_same_slots(table.optimizer, rule) or Maker.can_make_again(table):
        return
    present = type(table.optimizer).__name__
    raise ValueError(
        f"Optimizer: the rows of table {pending.name!r} have the state of {table.optimizer!r}, and its parameter group "
        f"asks for {rule!r}; give the layer the rule that its rows have, "
        f"Embedding(..., optimizer=bunkbed.{present}(...)), or another path for a new table"
    )


def follow(pending: Pending, rule: Optimizer) -> None:
    """Give a table that follows an optimizer its rule. Collective where ranks share the table.

    Requires: `require_can_follow`, and ``pending.maker``.
    """
    table, maker, rule = pending.table, pending.maker, _as_stored(pending, rule)
    if have_same_slots(table.optimizer, rule):
        if table.optimizer != rule:
            table.optimizer = rule
        return
    assert maker is not None
    pending.drop()
    replace_table(pending, maker.make_again(table, rule))


def replace_table(pending: Pending, made: Table) -> None:
    """Let the layers of a table use another one, and close theirs."""
    old = pending.table
    if made is old:
        return
    keep = pending.references.keep
    old.close(commit=False)
    del _pendings[id(old)]
    pending.use(made)
    pending.references.keep = keep
    _pendings[id(made)] = pending


def _as_stored(pending: Pending, rule: Optimizer) -> Optimizer:
    """Return a rule with the table's dtype of the state, which a torch optimizer does not have."""
    present = pending.table.optimizer
    if type(rule) is not type(present) or isinstance(rule, SGD):
        return rule
    native = rule.native()
    native["state_dtype"] = present.native()["state_dtype"]
    return from_native(native)


def by_anchor() -> dict[int, Pending]:
    """Return id(anchor) -> `Pending` of every table that has a layer."""
    return {id(pending.anchor): pending for pending in list(_pendings.values())}


def distinct(pendings: Iterable[Pending]) -> list[Pending]:
    """Return the pendings without repetitions, in first-seen order."""
    return list({id(pending): pending for pending in pendings}.values())
