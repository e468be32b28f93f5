"""What the tests of sharded tables share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from bunkbed.testing.compare import assert_same_bits, zipf_ids

ROWS = 2_000
FACTS: dict[str, Any] = {
    "dim": 20,
    "num_rows": ROWS,
    "optimizer": bb.Adam(lr=0.01, state_dtype="bfloat16"),
    "init": bb.Normal(0.1),
    "seed": 3,
    "dtype": "bfloat16",
}
EVERY = np.arange(ROWS)


def make(path: Path, shards: int | None = 3, **kwargs: Any) -> bb.ShardedTable:
    return bb.ShardedTable.create(path, **{"ram": "32MiB", **FACTS, "shards": shards, **kwargs})


def batches(steps: int, size: int = 700, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        (zipf_ids(rng, ROWS, size), rng.standard_normal((size, FACTS["dim"])).astype(np.float32)) for _ in range(steps)
    ]


def train(*tables: Any, steps: int = 5, seed: int = 0) -> None:
    for ids, grads in batches(steps, seed=seed):
        for table in tables:
            table.update(ids, grads)


def assert_same_tables(ours: Any, other: Any, ids: np.ndarray = EVERY) -> None:
    for slot in ("weight", *other.slots):
        assert_same_bits(ours.get(ids, slot), other.get(ids, slot), slot)
    assert ours.contains(ids).tolist() == other.contains(ids).tolist()
    assert (ours.step, len(ours), ours.nbytes) == (other.step, len(other), other.nbytes)
