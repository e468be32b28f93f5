"""A table's entry in ``state_dict()``: a `bunkbed.adapters.references.Reference` as a uint8 tensor of JSON.

Of a table in RAM only the state has the rows, too, as tensors: `bunkbed.adapters.ram_rows`.

Every format that stores tensors can store it (``torch.save`` with ``weights_only=True``, safetensors). It is padded to
a multiple of 256 bytes, so that its shape stays the same.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from bunkbed import _native
from bunkbed.adapters.ram_rows import MOST_BYTES, Array, Facts, bytes_of, is_in_ram, rows_of
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
    if not is_in_ram(table) or bytes_of(table) > MOST_BYTES:
        if table.path is None and table.run is None:
            _warn_of_rows(table)
        return {KEY: _tensor(references.save().fields())}
    reference = Reference(table.uuid, table.name, table.epoch, table.step)
    rows = {ROWS + name: torch.from_numpy(array) for name, array in rows_of(table).items()}
    return {KEY: _tensor({**reference.fields(), **Facts.of(table).fields()}), **rows}


def _tensor(fields: Json) -> Tensor:
    text = json.dumps(fields).encode()
    return torch.tensor(list(text.ljust(-len(text) // 256 * -256)), dtype=torch.uint8, device="cpu")


def _warn_of_rows(table: Table) -> None:
    size = f"{len(table):,} rows" if isinstance(table.core, _native.Table) else "rows of several processes"
    warnings.warn(
        f"table {table.name!r} is in RAM only, and its {size} are not in the state_dict, which refers to a copy in "
        f"this process (rows are saved up to {MOST_BYTES >> 20} MiB); give the layer a path= to keep them in files",
        stacklevel=2,
    )


def rows_in(state: Mapping[str, Tensor], prefix: str) -> dict[str, Array]:
    """Return the rows in a state_dict of the layer named by `prefix`; empty where it has none."""
    start = prefix + ROWS
    return {key.removeprefix(start): value.cpu().numpy() for key, value in state.items() if key.startswith(start)}


def facts_in(stored: Tensor) -> Facts | None:
    """Return the facts of rows that were saved; None where the entry is damaged."""
    try:
        return Facts.from_fields(json.loads(bytes(stored.to("cpu", torch.uint8).tolist())))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def damaged(table: Table) -> str:
    """Return the message for an entry that cannot be read."""
    return (
        f"table {table.name!r}: the reference in the state_dict is damaged; it must be the uint8 tensor that "
        "state_dict() put there"
    )


def load(references: References, stored: Tensor) -> str | None:
    """Rewind the table to the epoch of the reference; return the reason if that is impossible, else None."""
    try:
        fields = json.loads(bytes(stored.to("cpu", torch.uint8).tolist()))
        reference = Reference(fields["uuid"], fields["table"], fields["epoch"], fields["step"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return damaged(references.table)
    return references.load(reference)
