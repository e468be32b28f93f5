"""NumPy's `memmap`: the textbook recipe, and the same with one line of `madvise`."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from benchmarks.peers.records import WIDTH, Records, initial


def build(path: Path, num_rows: int) -> None:
    with path.open("wb") as file:
        for _, records in initial(num_rows):
            file.write(records.tobytes())


class Memmap(Records):
    """``rows = memmap[ids]``, then ``memmap[ids] = rows``; the page cache is its cache."""

    settings = "np.memmap, unique ids ascending"

    def __init__(self, path: Path, budget_bytes: int) -> None:
        self.file = np.memmap(path, np.float32, "r+").reshape(-1, WIDTH)

    def read(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self.file[rows])

    def write(self, rows: np.ndarray, records: np.ndarray) -> None:
        self.file[rows] = records


class Advised(Memmap):
    """Without it, each fault may read 128 KiB around the row."""

    settings = "np.memmap with madvise(MADV_RANDOM), which not every textbook has"

    def __init__(self, path: Path, budget_bytes: int) -> None:
        super().__init__(path, budget_bytes)
        self.file._mmap.madvise(mmap.MADV_RANDOM)
