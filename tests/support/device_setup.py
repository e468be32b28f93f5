"""What the tests of the device cache share: training the same batches through a layer with and without one.

The device is the CPU, whose sums and updates are the core's to the last bit, so any stale, lost or doubled row shows
against a layer without a device cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb

torch = pytest.importorskip("torch")
import bunkbed.torch as bt  # noqa: E402

NUM_ROWS, DIM, BATCH = 400, 8, 48


def batches(steps: int, seed: int = 0, num_rows: int = NUM_ROWS, size: int = BATCH) -> list[Any]:
    """Batches of ids of a power law: int64[size] tensors, with repetitions, each as likely to come from the tail."""
    rng = np.random.default_rng(seed)
    ranks = np.minimum(rng.zipf(1.3, (steps, size)) - 1, num_rows - 1)
    shuffled = rng.permutation(num_rows)
    return [torch.from_numpy(shuffled[row].astype(np.int64)) for row in ranks]


def most_rows(stream: list[Any]) -> int:
    """Unique rows of the largest batch: the smallest device cache that can work."""
    return max(len(torch.unique(ids)) for ids in stream)


def make_layer(path: Path | None = None, **kwargs: Any) -> Any:
    """An `Embedding` of the tests' size on a table at `path`."""
    defaults: dict[str, Any] = {"optimizer": bb.Adam(lr=0.01), "init": bb.Normal(std=0.1), "seed": 3}
    return bt.Embedding(NUM_ROWS, DIM, path=path, **{**defaults, **kwargs})


def loss_of(layer: Any, ids: Any) -> Any:
    """A loss whose gradients differ by row, place and step."""
    rows = layer(ids)
    places = torch.linspace(0.5, 1.5, rows.shape[0])[:, None]
    return (rows * rows * places).sum() + (rows * torch.linspace(-1, 1, rows.shape[1])).sum()


def train(layer: Any, stream: list[Any], opt: Any = None, **lookahead: Any) -> Any:
    """One step for each batch; with `lookahead` arguments through it. Returns the optimizer."""
    opt = bt.Optimizer(layer) if opt is None else opt
    loader: Any = bt.lookahead(stream, layer, ids=lambda ids: {layer: ids}, **lookahead) if lookahead else stream
    for ids in loader:
        opt.zero_grad()
        loss_of(layer, ids).backward()
        opt.step()
    return opt


def contents(layer: Any) -> dict[str, bytes]:
    """Every slot of every row, and the step."""
    table, ids = layer.table, np.arange(NUM_ROWS)
    found = {slot: table.get(ids, slot).tobytes() for slot in ("weight", *table.slots)}
    return {**found, "step": str(table.step).encode(), "stored": table.contains(ids).tobytes()}


def cache_of(rows: int, layer_args: dict[str, Any] | None = None) -> int:
    """Bytes of a device cache of so many rows."""
    probe = make_layer(**(layer_args or {}))
    size = rows * probe.table.record_bytes
    probe.table.close()
    return int(size)
