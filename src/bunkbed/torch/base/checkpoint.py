"""A table's entry in ``state_dict()``: a `bunkbed.adapters.references.Reference` as a uint8 tensor of JSON.

Every format that stores tensors can store it (``torch.save`` with ``weights_only=True``, safetensors). It is padded to
a multiple of 256 bytes, so that its shape stays the same.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from bunkbed.adapters.references import Reference, References

#: Name of the reference in a layer's state_dict.
KEY = "table"
#: Prefix of the names under which state_dict() keeps epochs.
PREFIX = "state_dict-"


def save(references: References) -> Tensor:
    """Commit the table if it changed, and return the reference, uint8[n]."""
    text = json.dumps(references.save().fields()).encode()
    return torch.tensor(list(text.ljust(-len(text) // 256 * -256)), dtype=torch.uint8, device="cpu")


def load(references: References, stored: Tensor) -> str | None:
    """Rewind the table to the epoch of the reference; return the reason if that is impossible, else None."""
    try:
        fields = json.loads(bytes(stored.to("cpu", torch.uint8).tolist()))
        reference = Reference(fields["uuid"], fields["table"], fields["epoch"], fields["step"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return (
            f"table {references.table.name!r}: the reference in the state_dict is damaged; it must be the uint8 tensor "
            "that state_dict() put there"
        )
    return references.load(reference)
