"""What ``state_dict()`` holds of a table: a reference to a kept epoch, never rows.

The reference is a uint8 tensor of JSON, so it survives every format that stores tensors (``torch.save`` with
``weights_only=True``, safetensors), padded so that its shape does not change: the table's uuid and name, the epoch,
the step. Saving commits the table and keeps that epoch under a name of ours; the oldest of those beyond
`Pending.keep_checkpoints` are dropped. Loading rewinds the writer to the epoch, optimizer state included.

- Saving twice without a change in between is one commit, so a stray ``state_dict()`` costs no kept epoch, and
  two layers on one table commit once.
- A table of a `bunkbed.Run` is committed by its run only: the reference then just names the table, and
  ``run.rewind`` puts tables and dense weights back together.
- A table in RAM only keeps its epochs as copies in this process (`RamSnapshots`): going back to the best epoch works
  as with files, loading in another process is an error that says to give a path.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from bunkbed.torch.pending import Pending
from bunkbed.torch.ram_snapshots import RamSnapshots

#: Name of the reference in a layer's state_dict.
KEY = "table"
_PREFIX = "state_dict-"


def save(pending: Pending) -> Any:
    """Commits the table if it changed, and returns the reference, uint8[n]."""
    table = pending.table
    epoch = _commit(pending) if table.mode != "r" and table.run is None else table.epoch
    fields = {"uuid": table.uuid, "table": table.name, "epoch": epoch, "step": pending.step}
    text = json.dumps(fields).encode()
    return torch.tensor(list(text.ljust(-len(text) // 256 * -256)), dtype=torch.uint8, device="cpu")


def _kept(pending: Pending) -> Any:
    """Who keeps the table's epochs: the table, or for one in RAM only our copies."""
    if pending.table.path is not None:
        return pending.table
    if pending.ram_snapshots is None:
        pending.ram_snapshots = RamSnapshots(pending)
    return pending.ram_snapshots


def _commit(pending: Pending) -> int:
    table, kept = pending.table, _kept(pending)
    snapshots: dict[str, int] = kept.snapshots()
    if not table.is_dirty:
        epoch: int = table.epoch
        if pending.same_as is not None and pending.same_as[0] == epoch:
            epoch = pending.same_as[1]
        if epoch in snapshots.values():
            return epoch
    ours = sorted(int(name.removeprefix(_PREFIX)) for name in snapshots if _is_ours(name))
    epoch = kept.commit(keep=f"{_PREFIX}{ours[-1] + 1 if ours else 1:06d}")
    if pending.keep_checkpoints is not None:
        # The new one first: an epoch is let go only once its successor is durable.
        for number in ours[: max(0, len(ours) + 1 - pending.keep_checkpoints)]:
            kept.drop(f"{_PREFIX}{number:06d}")
    return epoch


def _is_ours(name: str) -> bool:
    return name.startswith(_PREFIX) and name.removeprefix(_PREFIX).isdigit()


def load(pending: Pending, reference: Any) -> str | None:
    """Puts the table back to the epoch of `reference`; returns what prevents it, or None."""
    table = pending.table
    try:
        fields = json.loads(bytes(reference.to("cpu", torch.uint8).tolist()))
        uuid, name, epoch = fields["uuid"], fields["table"], fields["epoch"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return (
            f"table {pending.name!r}: the reference in the state_dict is damaged; it must be the uint8 tensor that "
            "state_dict() put there"
        )
    if uuid != table.uuid:
        if table.path is None:
            return (
                f"table {pending.name!r}: the state_dict refers to table {name!r}, but this layer's table is another "
                "one, in RAM only; such a table ends with its process, so give path= to the layer that is saved and "
                "to this one"
            )
        return (
            f"table {pending.name!r}: the state_dict refers to table {name!r} (uuid {uuid}), but the layer has "
            f"opened another one, {table.path} (uuid {table.uuid}); give the layer the path of that table"
        )
    if table.run is not None:
        return None  # the run puts its tables and files back together
    current = table.epoch
    if pending.same_as is not None and pending.same_as[0] == current:
        current = pending.same_as[1]
    if epoch == current and (table.mode == "r" or not table.is_dirty):
        return None
    if table.mode == "r":
        return (
            f"table {name!r}: the state_dict refers to epoch {epoch}, but this reader is at epoch {table.epoch}; "
            "open it with snapshot=, one of bunkbed.snapshots(path)"
        )
    snapshots: dict[str, int] = _kept(pending).snapshots()
    if epoch not in snapshots.values():
        kept = ", ".join(f"{key!r} (epoch {value})" for key, value in sorted(snapshots.items(), key=lambda x: x[1]))
        return (
            f"table {name!r}: epoch {epoch} was dropped; it keeps {kept or 'none'}; raise keep_checkpoints= of the "
            "layer, or name what must stay: layer.table.commit(keep='best')"
        )
    _kept(pending).rewind(epoch)
    pending.same_as = (table.epoch, epoch)
    return None
