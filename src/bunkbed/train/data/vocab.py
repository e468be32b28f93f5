"""Labels of a file, and the dense indices that are the ids of tables."""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from bunkbed.core.types import Array
from bunkbed.errors import BunkbedError

if TYPE_CHECKING:
    import pyarrow as pa

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Label = int | str

# Difflib compares with every label; with more labels, only neighbours in sorted order are compared.
_MAX_COMPARED_LABELS = 20_000
_BATCH_LABELS = 1 << 17
# 18 digits always fit int64.
_PLAIN_INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"


class DataError(BunkbedError, ValueError):
    """An interactions file cannot be read, or lacks requested data."""


# In place of `pa.array` and `to_numpy`, which import pandas where it is installed: 0.4 s.
def arrow_of(numbers: npt.NDArray[np.generic]) -> pa.Array:
    """Return an array ``[N]``, contiguous, as Arrow; both use the same memory."""
    import pyarrow as pa

    return pa.Array.from_buffers(pa.from_numpy_dtype(numbers.dtype), len(numbers), [None, pa.py_buffer(numbers)])


def numbers_of(column: pa.ChunkedArray) -> Array:
    """Return Arrow numbers ``[N]`` without nulls as an array that cannot be written."""
    return np.from_dlpack(column.combine_chunks())


class Vocab:
    """Labels (integers or strings) of users or items, numbered by first appearance.

    Immutable, can be shared between threads; owns its labels (about 8 bytes an integer label, the text for strings) and
    no file.

    Args:
        labels: Arrow ``int64[n]`` or ``string[n]``, distinct, without nulls; position is the dense index.

    >>> vocab = Vocab.of(["ann", "bob"])
    >>> vocab.index("bob"), len(vocab), vocab.kind
    (1, 2, 'str')
    """

    def __init__(self, labels: pa.Array) -> None:
        import pyarrow as pa

        if pa.types.is_integer(labels.type):
            self.kind: Literal["int", "str"] = "int"
            self.array: pa.Array = labels.cast(pa.int64())
        else:
            self.kind = "str"
            self.array = labels.cast(pa.large_string())

    @classmethod
    def of(cls, labels: Iterable[Label]) -> Vocab:
        """Return a vocabulary of the given distinct labels, in order."""
        import pyarrow as pa

        return cls(pa.array(list(labels)))

    def __len__(self) -> int:
        return len(self.array)

    def __repr__(self) -> str:
        return f"Vocab({len(self):,} {self.kind} labels)"

    @property
    def labels(self) -> npt.NDArray[np.generic]:
        """All labels in index order: ``int64[n]``, or ``object[n]`` of str."""
        result: npt.NDArray[np.generic] = self.array.to_numpy(zero_copy_only=False)
        return result

    def _parts(self, wanted: Int64Array | None = None) -> Iterator[tuple[int, pa.Array]]:
        """Yield first index and labels of each part; with `wanted` at least of the parts that have these indices."""
        yield 0, self.array

    def batches(self) -> Iterator[list[Label]]:
        """Yield all labels in index order, in parts."""
        for _, labels in self._parts():
            for start in range(0, len(labels), _BATCH_LABELS):
                yield labels.slice(start, _BATCH_LABELS).to_pylist()

    def encode(self, labels: Sequence[Label] | pa.Array) -> Int64Array:
        """Return dense indices ``int64[N]`` of `labels`, -1 where a label is unknown. Duplicates are allowed."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if not isinstance(labels, pa.Array):
            if self.kind == "int":
                numbers = [as_int(label) for label in labels]
                labels = pa.array(numbers, pa.int64())
            else:
                labels = pa.array([str(label) for label in labels], pa.large_string())
        result = np.full(len(labels), -1, dtype=np.int64)
        for start, known in self._parts():
            found = pc.index_in(labels.cast(known.type), value_set=known, skip_nulls=True).fill_null(-1).to_numpy()
            result[found >= 0] = found[found >= 0] + start
        return result

    def extended(self, labels: pa.Array) -> tuple[Vocab, Int64Array]:
        """Return the vocabulary with new ``string[N]`` labels after the known ones, and the indices of `labels`."""
        import pyarrow as pa
        import pyarrow.compute as pc

        known = self.array.cast(pa.large_string())
        encoded = pa.concat_arrays([known, labels.cast(pa.large_string())]).dictionary_encode()  # by first appearance
        all_labels = encoded.dictionary
        if self.kind == "int" and pc.all(pc.match_substring_regex(all_labels, _PLAIN_INTEGER)).as_py():
            all_labels = all_labels.cast(pa.int64())
        return Vocab(all_labels), encoded.indices[len(known) :].to_numpy().astype(np.int64)

    def index(self, label: Label, *, what: str = "label") -> int:
        """Return the dense index of one label; ``"42"`` finds the integer label 42.

        Raises:
            DataError: unknown; the message names the nearest labels.
        """
        position = int(self.encode([label])[0])
        if position < 0:
            near = ", ".join(map(str, self.nearest(label)))
            raise DataError(f"{what} {label!r} is not among the {len(self):,} known; the nearest are {near}")
        return position

    def decode(self, indices: Int64Array | Sequence[int]) -> list[Label]:
        """Return labels of dense indices ``int64[N]`` in ``[0, len)``.

        Raises:
            IndexError: an index is outside the range.
        """
        wanted = np.asarray(indices, dtype=np.int64)
        self._require_known(wanted)
        labels: list[Label] = [0] * len(wanted)
        for start, part in self._parts(wanted):
            places = np.flatnonzero((wanted >= start) & (wanted < start + len(part)))
            found = part.take(arrow_of(wanted[places] - start)).to_pylist()
            for place, label in zip(places.tolist(), found, strict=True):
                labels[place] = label
        return labels

    def take(self, indices: Int64Array) -> pa.Array:
        """Return labels of dense indices ``int64[N]`` as Arrow int64 or string; each label is read once."""
        import pyarrow as pa

        self._require_known(indices)
        distinct, parts = np.unique(indices), []
        for start, part in self._parts(distinct):
            here = slice(*np.searchsorted(distinct, [start, start + len(part)]))
            parts.append(part.take(arrow_of(distinct[here] - start)))
        labels = pa.chunked_array(parts, pa.int64() if self.kind == "int" else pa.large_string()).combine_chunks()
        labels = labels if self.kind == "int" else labels.cast(pa.string())
        return labels.take(arrow_of(np.searchsorted(distinct, indices)))

    def _require_known(self, indices: Int64Array) -> None:
        outside = np.flatnonzero((indices < 0) | (indices >= len(self)))
        if outside.size:
            at = int(outside[0])
            raise IndexError(f"index {indices[at]} at position {at} is outside [0, {len(self)})")

    def nearest(self, label: Label, *, count: int = 3) -> list[Label]:
        """Return the most similar labels, best first: by difference for integers, by spelling for strings."""
        near = [found for _, part in self._parts() for found in _nearest(part, label, count)]
        # The nearest of each part are compared again.
        return _nearest(Vocab.of(near).array, label, count) if len(near) > count else near


def _nearest(labels: pa.Array, label: Label, count: int) -> list[Label]:
    import pyarrow as pa

    if pa.types.is_integer(labels.type):
        number = as_int(label)
        values = labels.to_numpy()
        if number is None:
            return [int(value) for value in values[:count]]
        # As float64: the difference of two int64 may not fit int64.
        order = np.argsort(np.abs(values.astype(np.float64) - float(number)), kind="stable")
        return [int(value) for value in values[order[:count]]]
    text = str(label)
    known = sorted(labels.to_pylist())
    if len(known) > _MAX_COMPARED_LABELS:
        at = bisect_left(known, text)
        known = known[max(0, at - 50) : at + 50]
    lowered = {item.lower(): item for item in reversed(known)}
    close = difflib.get_close_matches(text.lower(), list(lowered), n=count, cutoff=0.5)
    return [lowered[item] for item in close] or list(labels.slice(0, count).to_pylist())


def as_int(label: Label) -> int | None:
    """Return the integer of a label, or None if the label is not an integer that fits int64."""
    if isinstance(label, str) and not re.fullmatch(r"\s*(0|-?[1-9][0-9]*)\s*", label):
        return None
    value = int(label)
    return value if -(2**63) <= value < 2**63 else None
