"""What ``state_dict()`` holds of a table: a `bunkbed.adapters.references.Reference` as a uint8 tensor of JSON.

As a tensor it survives every format that stores tensors (``torch.save`` with ``weights_only=True``, safetensors); it
is padded so that its shape does not change.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from bunkbed.adapters.references import Reference, References

#: Name of the reference in a layer's state_dict.
KEY = "table"
#: Of the names of the epochs that state_dict() keeps.
PREFIX = "state_dict-"


def save(references: References) -> Any:
    """Commits the table if it changed, and returns the reference, uint8[n]."""
    text = json.dumps(references.save().fields()).encode()
    return torch.tensor(list(text.ljust(-len(text) // 256 * -256)), dtype=torch.uint8, device="cpu")


def load(references: References, stored: Any) -> str | None:
    """Puts the table back to the epoch of the reference; returns what prevents it, or None."""
    try:
        fields = json.loads(bytes(stored.to("cpu", torch.uint8).tolist()))
        reference = Reference(fields["uuid"], fields["table"], fields["epoch"], fields["step"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return (
            f"table {references.table.name!r}: the reference in the state_dict is damaged; it must be the uint8 tensor "
            "that state_dict() put there"
        )
    return references.load(reference)
