"""What every part of the conformance suite finds in `TableTests`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bunkbed.testing.arithmetic import IntArray
from bunkbed.testing.reference import ReferenceTable


class SuitePart:
    """A group of tests of `TableTests`, which has the factory, the training and the fixture ``pair``."""

    num_rows: int
    dim: int

    def make_table(self, tmp_path: Path, **kwargs: Any) -> Any:
        raise NotImplementedError

    def train(self, table: Any, reference: ReferenceTable, *, steps: int = 20, seed: int = 0) -> None:
        raise NotImplementedError

    def all_ids(self) -> IntArray:
        raise NotImplementedError
