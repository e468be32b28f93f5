"""Side features of users or of items: a sparse matrix of ids and features, stored with a run's interactions.

The vector of an id is its own row plus the sum of the rows of its features, each times a weight. An id without a pair
that is trained on has an own row that no step has trained, so it gets the sum alone, unless it has no feature either.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from bunkbed.core.types import Json
from bunkbed.files.durable import replace_file
from bunkbed.train.data.sequences import ranges
from bunkbed.train.data.store import write_rows
from bunkbed.train.data.stored import opened
from bunkbed.train.data.vocab import DataError, Float32Array, Int64Array

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "ABOUT_NAME",
    "FEATURE_FILES",
    "SIDES",
    "Bags",
    "Features",
    "load_features",
    "read_about",
    "read_names",
    "table_of",
    "write_about",
    "write_features",
]

SIDES = ("user", "item")
#: Written last: it completes the features in a folder.
ABOUT_NAME = "features.json"
#: Patterns of the names of all files of features.
FEATURE_FILES = (ABOUT_NAME, "*_features.parquet", "*_feature_names.parquet")


class Bags(NamedTuple):
    """The features of some ids, one id after another.

    Attributes:
        features: ``int64[M]``.
        weights: ``float32[M]``.
        starts: ``int64[N]``, where the features of each id start.
    """

    features: Int64Array
    weights: Float32Array
    starts: Int64Array


@dataclass(frozen=True, eq=False)
class Features:
    """The features of the ids of one side, in memory: 12 bytes a feature of an id, and 9 bytes an id.

    Attributes:
        starts: ``int64[N + 1]``, where the features of each id start.
        features: ``int64[M]`` in ``[0, num_features)``.
        weights: ``float32[M]``.
        num_features: rows of the table of features.
        has_row: ``bool[N]``, whether the own row of an id counts: it has a pair that is trained on, or no feature.
    """

    starts: Int64Array
    features: Int64Array
    weights: Float32Array
    num_features: int
    has_row: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.has_row)

    def bags(self, ids: Int64Array) -> Bags:
        """Return the features of ``int64[N]`` ids in their order; duplicates are allowed."""
        first, last = self.starts[ids], self.starts[ids + 1]
        at = ranges(first, last)
        ends = np.cumsum(last - first)
        return Bags(self.features[at], self.weights[at], ends - (last - first))

    @property
    def with_row(self) -> Int64Array:
        """The ids whose own row counts, ascending: ``int64[P]``."""
        return np.flatnonzero(self.has_row)

    def with_pairs(self, has_pairs: npt.NDArray[np.bool_]) -> Features:
        """Return the features where it is known which ids, ``bool[N]``, have a pair that is trained on."""
        return replace(self, has_row=has_pairs | (np.diff(self.starts) == 0))

    def grown(self, count: int, *, shared: bool) -> Features:
        """Return the features of `count` ids, of which the new ones have none.

        Args:
            shared: whether all ids, the new ones too, have feature 0.
        """
        new = count - len(self)
        starts = self.starts[-1] + np.arange(1, new + 1) * shared
        added = np.zeros(new * shared, np.int64)
        return Features(
            np.concatenate([self.starts, starts]),
            np.concatenate([self.features, added]),
            np.concatenate([self.weights, np.ones(len(added), np.float32)]),
            self.num_features,
            np.ones(count, np.bool_),
        )

    def of_new(self, count: int) -> Features:
        """Return the features of `count` other users, of whom a file of features says nothing: the shared one."""
        shared = np.zeros(count, np.int64)
        return Features(
            np.arange(count + 1), shared, np.ones(count, np.float32), self.num_features, np.ones(count, np.bool_)
        )


def table_of(side: str) -> str:
    """Return the name of the table of the rows of features of ``"user"`` or ``"item"``."""
    return f"{side}_feature"


def write_features(folder: Path, side: str, features: Features, names: list[tuple[str, str]]) -> None:
    """Write the features of one side, durably.

    Args:
        names: column and value of each feature.
    """
    import pyarrow as pa

    lists = [
        pa.LargeListArray.from_arrays(features.starts, pa.array(part)) for part in (features.features, features.weights)
    ]
    table = pa.table({"features": lists[0], "weights": lists[1], "has_row": features.has_row})
    write_rows(folder / f"{table_of(side)}s.parquet", table.schema, table.to_batches())
    table = pa.table(
        {
            part: pa.array(column, pa.string())
            for part, column in zip(("column", "value"), zip(*names, strict=True), strict=True)
        }
    )
    write_rows(folder / f"{table_of(side)}_names.parquet", table.schema, table.to_batches())


def write_about(folder: Path, about: Json) -> None:
    """Write what the features are, by side; this completes them."""
    replace_file(folder / ABOUT_NAME, (json.dumps({"version": 1, **about}, indent=2) + "\n").encode())


def read_about(folder: Path) -> Json:
    """Return what the features of a dataset's folder are, by side, as `write_about`; empty where it has none.

    Raises:
        DataError: the file is damaged.
    """
    path = folder / ABOUT_NAME
    try:
        about: Json = json.loads(path.read_text(encoding="utf-8"))
        if any(int(about[side]["features"]) < 1 for side in SIDES if side in about):
            raise ValueError("no features")
    except FileNotFoundError:
        return {}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: is damaged ({error}); put a copy of it back") from error
    return about


def read_names(folder: Path, side: str) -> list[tuple[str, str]]:
    """Return column and value of each feature of one side.

    Raises:
        DataError: the file is damaged or missing.
    """
    columns = _read(folder / f"{table_of(side)}_names.parquet", "column", "value")
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def load_features(folder: Path) -> dict[str, Features]:
    """Return the features of a dataset's folder by side; none where it has none.

    Raises:
        DataError: a file is damaged or missing.
    """
    about = read_about(folder)
    return {side: _load(folder, side, int(about[side]["features"])) for side in SIDES if side in about}


def _read(path: Path, *names: str) -> list[pa.ChunkedArray]:
    try:
        with opened(path) as file:
            table = file.read()
            return [table[name] for name in names]
    except FileNotFoundError as error:
        raise DataError(f"{path}: is missing; put a copy of it back") from error


def _load(folder: Path, side: str, num_features: int) -> Features:
    path = folder / f"{table_of(side)}s.parquet"
    lists, weights, has_row = (column.combine_chunks() for column in _read(path, "features", "weights", "has_row"))
    features = lists.values.to_numpy()
    if len(features) and not 0 <= features.min() <= features.max() < num_features:
        raise DataError(f"{path}: is damaged (a feature is not among {num_features:,}); put a copy of it back")
    return Features(
        lists.offsets.to_numpy(),
        features,
        weights.values.to_numpy(),
        num_features,
        has_row.to_numpy(zero_copy_only=False),
    )
