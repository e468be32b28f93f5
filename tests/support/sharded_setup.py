"""What the tests of sharded tables share."""

from __future__ import annotations

import subprocess
import sys
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


def reshard_and_die(path: Path, name: str, nth: int) -> None:
    """Reshard to 3 in a process that dies at a failpoint the nth time, or before (1) or after (2) the exchange."""
    code = f"""
import bunkbed as bb
from bunkbed import _native
if {name!r} == "exchange":
    from bunkbed.files import durable
    import os, signal
    real = durable.exchange
    def exchange(one, other):
        if {nth} == 2:
            real(one, other)
        os.kill(os.getpid(), signal.SIGKILL)
    durable.exchange = exchange
else:
    _native.arm_failpoint({name!r}, {nth}, "die")
bb.reshard({str(path)!r}, shards=3, ram="128MiB")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert ended.returncode not in (0, 1), ended.stderr
