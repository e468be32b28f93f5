"""The members of `TableTests` that every part of the conformance suite uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from bunkbed.testing.arithmetic import IntArray
from bunkbed.testing.reference import ReferenceTable

#: A table that is tested: a `bunkbed.Table`, or another class with its methods, such as `ReferenceTable` itself.
Tested: TypeAlias = Any
#: The table under test, and its oracle.
Pair: TypeAlias = tuple[Tested, ReferenceTable]


class SuitePart:
    """Base class of the groups of tests in `TableTests`, which has the factory, `train` and the fixture ``pair``."""

    num_rows: int
    dim: int

    def make_table(self, tmp_path: Path, **kwargs: Any) -> Tested:
        raise NotImplementedError

    def train(self, table: Tested, reference: ReferenceTable, *, steps: int = 20, seed: int = 0) -> None:
        raise NotImplementedError

    def all_ids(self) -> IntArray:
        raise NotImplementedError
