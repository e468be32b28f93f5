"""Interactions and labels that stay in their Parquet files and are read in parts.

The classes can be used as `Interactions` and `Vocab`; properties of whole arrays read the whole file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bunkbed.train.data.interactions import Interactions
from bunkbed.train.data.vocab import DataError, Int64Array, Label, Vocab

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

    def _parts(self) -> Iterator[tuple[int, Vocab]]:
        with opened(self._path) as file:
            for at, start in enumerate(self._starts[:-1].tolist()):
                yield start, Vocab(file.read_row_group(at)["label"].combine_chunks())

    def batches(self) -> Iterator[list[Label]]:
        """As `Vocab.batches`."""
        for _, part in self._parts():
            yield part.array.to_pylist()

    def encode(self, labels: Sequence[Label] | pa.Array) -> Int64Array:
        """As `Vocab.encode`."""
        result = np.full(len(labels), -1, dtype=np.int64)
        for start, part in self._parts():
            found = part.encode(labels)
            known = found >= 0
            result[known] = found[known] + start
        return result

    def decode(self, indices: Int64Array | Sequence[int]) -> list[Label]:
        """As `Vocab.decode`."""
        wanted = np.asarray(indices, dtype=np.int64)
        outside = np.flatnonzero((wanted < 0) | (wanted >= len(self)))
        if outside.size:
            at = int(outside[0])
            raise IndexError(f"index {wanted[at]} at position {at} is outside [0, {len(self)})")
        groups = np.searchsorted(self._starts, wanted, side="right") - 1
        labels: list[Label] = [0] * len(wanted)
        with opened(self._path) as file:
            for group in np.unique(groups).tolist():
                places = np.flatnonzero(groups == group)
                part = Vocab(file.read_row_group(group)["label"].combine_chunks())
                for place, label in zip(
                    places.tolist(), part.decode(wanted[places] - self._starts[group]), strict=True
                ):
                    labels[place] = label
        return labels

    def nearest(self, label: Label, *, count: int = 3) -> list[Label]:
        """As `Vocab.nearest`, from the nearest labels of each part."""
        near = [found for _, part in self._parts() for found in part.nearest(label, count=count)]
        return Vocab.of(near).nearest(label, count=count) if near else []


class StoredInteractions(Interactions):
    """`Interactions` in a Parquet file of columns ``user`` and ``item``; `batches` reads one row group at a time."""

    def __init__(
        self,
        path: Path,
        user_vocab: Vocab,
        item_vocab: Vocab,
        *,
        source: str = "",
        duplicates: int = 0,
        form: str = "",
        malformed: int = 0,
        first_malformed: str = "",
        empty_users: int = 0,
    ) -> None:
        with opened(path) as file:
            length = file.metadata.num_rows
        fields = {
            "_path": path,
            "_length": length,
            "user_vocab": user_vocab,
            "item_vocab": item_vocab,
            "source": source,
            "duplicates": duplicates,
            "form": form,
            "malformed": malformed,
            "first_malformed": first_malformed,
            "empty_users": empty_users,
        }
        for name, value in fields.items():  # a frozen dataclass allows no other way to set fields
            object.__setattr__(self, name, value)

    _path: Path
    _length: int

    @property
    def users(self) -> Int64Array:
        """All users; each access reads the file."""
        return self._read("user")

    @property
    def items(self) -> Int64Array:
        """All items; each access reads the file."""
        return self._read("item")

    def _read(self, column: str) -> Int64Array:
        with opened(self._path) as file:
            values: Int64Array = file.read(columns=[column])[column].to_numpy()
        return values

    def __len__(self) -> int:
        return self._length

    def batches(self) -> Iterator[tuple[Int64Array, Int64Array]]:
        """As `Interactions.batches`."""
        with opened(self._path) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                yield table["user"].to_numpy(), table["item"].to_numpy()

    def replace(self, users: Int64Array, items: Int64Array) -> Interactions:
        """As `Interactions.replace`; the result is in memory."""
        return Interactions(users, items, self.user_vocab, self.item_vocab, self.source, self.duplicates, self.form)
