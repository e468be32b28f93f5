"""Records of weight and Adam state kept by something that only reads and writes them: the home-made recipe.

A record is `float32[3 * dim]`: weight, exp_avg, exp_avg_sq, as ours are. A step reads the batch's unique records in
ascending order, hands out the lookup, makes Adam's step in NumPy and writes them back. That is less than ours does
(no torch, no checks, equal gradients summed by counting), in the peers' favour.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import numpy as np

DIM = 64
WIDTH = 3 * DIM
RECORD_BYTES = 4 * WIDTH


class Records(ABC):
    """A store of every record, opened for training within `budget_bytes` of memory of its own."""

    #: Its settings, for the report.
    settings = ""

    @abstractmethod
    def read(self, rows: np.ndarray) -> np.ndarray:
        """Unique ascending `int64[U]` -> `float32[U, WIDTH]`."""

    @abstractmethod
    def write(self, rows: np.ndarray, records: np.ndarray) -> None:
        """Puts `float32[U, WIDTH]` back at the unique ascending `int64[U]`."""

    def progress(self) -> str:
        """What it can say about its own state."""
        return ""

    def close(self) -> None:  # noqa: B027  most have nothing to close
        """Closes its files."""


class Training:
    """Adam on `Records`."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.count = 0

    def step(self, ids: np.ndarray) -> None:
        self.count += 1
        unique, inverse = np.unique(ids, return_inverse=True)
        rows = self.records.read(unique)
        rows[inverse, :DIM]  # the lookup
        grad = np.bincount(inverse).astype(np.float32)[:, None] * np.float32(0.01)  # equal gradients, summed
        weight, exp_avg, exp_avg_sq = rows[:, :DIM], rows[:, DIM : 2 * DIM], rows[:, 2 * DIM :]
        exp_avg += (grad - exp_avg) * np.float32(0.1)
        exp_avg_sq += (grad * grad - exp_avg_sq) * np.float32(0.001)
        size = 1e-3 * np.sqrt(1 - 0.999**self.count) / (1 - 0.9**self.count)
        weight -= np.float32(size) * (exp_avg / (np.sqrt(exp_avg_sq) + np.float32(1e-8)))
        self.records.write(unique, rows)


def initial(num_rows: int, chunk: int = 100_000) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every row in ascending order with random weights and no state: `int64[n]`, `float32[n, WIDTH]`."""
    rng = np.random.default_rng(0)
    records = np.zeros((min(chunk, num_rows), WIDTH), np.float32)
    records[:, :DIM] = rng.standard_normal((len(records), DIM))
    for start in range(0, num_rows, chunk):
        rows = np.arange(start, min(start + chunk, num_rows), dtype=np.int64)
        yield rows, records[: rows.size]


def keys(rows: np.ndarray) -> list[bytes]:
    """Eight bytes each, big-endian, so that they sort as the rows do."""
    found: list[bytes] = rows.astype(">u8").view("V8").tolist()
    return found


def values(records: np.ndarray) -> list[bytes]:
    """Each record's bytes."""
    found: list[bytes] = np.ascontiguousarray(records).view(f"V{RECORD_BYTES}").ravel().tolist()
    return found


def joined(found: list[bytes]) -> np.ndarray:
    """`float32[n, WIDTH]`, writable, from each record's bytes."""
    return np.frombuffer(bytearray().join(found), np.float32).reshape(-1, WIDTH)


def folder_bytes(folder: Path) -> int:
    """Bytes allocated on disk, as ``du`` counts them."""
    paths = [folder, *folder.rglob("*")] if folder.is_dir() else [folder]
    return sum(path.stat().st_blocks * 512 for path in paths if path.exists())
