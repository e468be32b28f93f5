"""The run's file of dense weights and the state of their optimizer."""

from __future__ import annotations

import io

import torch

from bunkbed.core.types import Json
from bunkbed.train.models.heads import Head

__all__ = ["DENSE_FILE", "dense_bytes", "dense_state"]

#: The name of the file in a commit of the run.
DENSE_FILE = "dense.pt"


def dense_bytes(head: Head, optimizer: torch.optim.Optimizer | None) -> bytes:
    """Return dense weights and the state of their optimizer as a file, for `Run.commit`."""
    buffer = io.BytesIO()
    weights = {name: value.detach().cpu() for name, value in head.state_dict().items()}
    torch.save({"weights": weights, "optimizer": optimizer.state_dict() if optimizer else None}, buffer)
    return buffer.getvalue()


def dense_state(data: bytes) -> Json:
    """Return the content that `dense_bytes` saved: ``{"weights": {name: tensor}, "optimizer": its state or None}``."""
    state: Json = torch.load(io.BytesIO(data), weights_only=True)
    return state
