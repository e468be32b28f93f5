"""A table's entry in ``state_dict()``: a `bunkbed.adapters.references.Reference` as a uint8 tensor of JSON.

Of a table in RAM only the state has the rows, too, as tensors: `bunkbed.adapters.ram_rows`.

Every format that stores tensors can store it (``torch.save`` with ``weights_only=True``, safetensors). It is padded to
a multiple of 256 bytes, so that its shape stays the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from bunkbed.adapters.ram_rows import Array, Facts, saved
from bunkbed.adapters.references import Reference, References
from bunkbed.core.types import Json
from bunkbed.table.table import Table

#: Name of the reference in a layer's state_dict.
KEY = "table"
#: Prefix of the names under which state_dict() keeps epochs.
PREFIX = "state_dict-"
#: Prefix of the names of the rows in a layer's state_dict.
ROWS = "rows."


def save(references: References) -> dict[str, Tensor]:
    """Return the entries of a table by name: the reference, uint8[n], for which the table is committed; or its rows."""
    table = references.table
    found = saved(table)
    if found is None:
        return {KEY: _tensor(references.save().fields())}
    rows, facts = found
    reference = Reference(table.uuid, table.name, table.epoch, table.step)
    arrays = {ROWS + name: torch.from_numpy(array) for name, array in rows.items()}
    return {KEY: _tensor({**reference.fields(), **facts}), **arrays}


def _tensor(fields: Json) -> Tensor:
    text = json.dumps(fields).encode()
    return torch.tensor(list(text.ljust(-len(text) // 256 * -256)), dtype=torch.uint8, device="cpu")


#: What reading a damaged entry raises.
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError)


def _fields(stored: Tensor) -> Json:
    fields: Json = json.loads(bytes(stored.to("cpu", torch.uint8).tolist()))
    return fields


def rows_in(state: Mapping[str, Tensor], prefix: str) -> dict[str, Array]:
    """Return the rows in a state_dict of the layer named by `prefix`; empty where it has none."""
    start = prefix + ROWS
    return {key.removeprefix(start): value.cpu().numpy() for key, value in state.items() if key.startswith(start)}


def facts_in(stored: Tensor) -> Facts | None:
    """Return the facts of rows that were saved; None where the entry is damaged."""
    try:
        return Facts.from_fields(_fields(stored))
    except _DAMAGED:
        return None


def damaged(table: Table) -> str:
    """Return the message for an entry that cannot be read."""
    return (
        f"table {table.name!r}: the reference in the state_dict is damaged; it must be the uint8 tensor that "
        "state_dict() put there"
    )


def reference_in(stored: Tensor) -> Reference | None:
    """Return the reference in an entry; None where the entry is damaged."""
    try:
        fields = _fields(stored)
        also = tuple(map(int, fields.get("also", ())))
        return Reference(fields["uuid"], fields["table"], fields["epoch"], fields["step"], also)
    except _DAMAGED:
        return None


def load(references: References, stored: Tensor) -> str | None:
    """Rewind the table to the epoch of the reference; return the reason if that is impossible, else None."""
    reference = reference_in(stored)
    return damaged(references.table) if reference is None else references.load(reference)
