"""Interactions and labels that stay in their Parquet files and are read in parts.

The classes can be used as `Interactions` and `Vocab`; properties of whole arrays read the whole file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bunkbed.core.types import Array
from bunkbed.train.data.interactions import Interactions
from bunkbed.train.data.vocab import DataError, Float32Array, Int64Array, Vocab, numbers_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

__all__ = ["StoredInteractions", "StoredVocab", "opened"]


@contextmanager
def opened(path: Path) -> Iterator[ParquetFile]:
    """Open a Parquet file of a saved dataset for reading.

    Raises:
        DataError: it is damaged; this may be found only when a part is read. FileNotFoundError: it does not exist.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.exists():  # Arrow's own error has no file name
        raise FileNotFoundError(2, "no such file", str(path))
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (pa.ArrowException, OSError, KeyError) as error:
        if getattr(error, "errno", None) is not None:  # an error of the system; the file may be sound
            raise
        why = " ".join(str(error).split())  # Arrow's messages have several lines
        raise DataError(
            f"{path}: is damaged ({why}); put a copy of it back, or start a new run from the interactions"
        ) from error


class StoredVocab(Vocab):
    """`Vocab` in a Parquet file, without data in memory between calls. Calls read the whole file, `decode` parts."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._path = path
        with opened(path) as file:
            kind = file.schema_arrow.field("label").type
            self.kind = "int" if pa.types.is_integer(kind) else "str"
            groups = [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(groups, dtype=np.int64)]).astype(np.int64)

    @property
    def array(self) -> pa.Array:
        """Read and return all labels."""
        with opened(self._path) as file:
            return Vocab(file.read()["label"].combine_chunks()).array

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _parts(self, wanted: Int64Array | None = None) -> Iterator[tuple[int, pa.Array]]:
        groups = np.arange(len(self._starts) - 1)
        if wanted is not None:
            groups = np.unique(np.searchsorted(self._starts, wanted, side="right") - 1)
        with opened(self._path) as file:
            for group in groups.tolist():
                yield int(self._starts[group]), Vocab(file.read_row_group(group)["label"].combine_chunks()).array


class StoredInteractions(Interactions):
    """`Interactions` in a Parquet file of columns ``user``, ``item`` and, with weights, ``weight``.

    `batches` reads one row group at a time.
    """

    def __init__(self, path: Path, user_vocab: Vocab, item_vocab: Vocab, **about: str | float | list[int]) -> None:
        with opened(path) as file:
            length = file.metadata.num_rows
            is_weighted = "weight" in file.schema_arrow.names
        fields = {
            "_path": path,
            "_length": length,
            "_is_weighted": is_weighted,
            "user_vocab": user_vocab,
            "item_vocab": item_vocab,
            **about,
        }
        for name, value in fields.items():  # a frozen dataclass allows no other way to set fields
            object.__setattr__(self, name, value)

    _path: Path
    _length: int
    _is_weighted: bool

    @property
    def users(self) -> Int64Array:
        """All users; each access reads the file."""
        return self._read("user")

    @property
    def items(self) -> Int64Array:
        """All items; each access reads the file."""
        return self._read("item")

    @property
    def weights(self) -> Float32Array | None:
        """All weights; each access reads the file."""
        return self._read("weight") if self._is_weighted else None

    @property
    def is_weighted(self) -> bool:
        """As `Interactions.is_weighted`."""
        return self._is_weighted

    def _read(self, column: str) -> Array:
        with opened(self._path) as file:
            values: Array = numbers_of(file.read(columns=[column])[column])
        return values

    def __len__(self) -> int:
        return self._length

    def batches(self) -> Iterator[tuple[Int64Array, Int64Array]]:
        """As `Interactions.batches`."""
        with opened(self._path) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                yield numbers_of(table["user"]), numbers_of(table["item"])

    def weight_batches(self) -> Iterator[Float32Array | None]:
        """As `Interactions.weight_batches`."""
        with opened(self._path) as file:
            for group in range(file.num_row_groups):
                yield (
                    numbers_of(file.read_row_group(group, columns=["weight"])["weight"]) if self._is_weighted else None
                )

    def replace(self, users: Int64Array, items: Int64Array, weights: Float32Array | None = None) -> Interactions:
        """As `Interactions.replace`; the result is in memory."""
        about = self.source, self.duplicates, self.form
        return Interactions(users, items, self.user_vocab, self.item_vocab, *about, weights=weights)
