"""Encoding of batches of labels as dense indices.

Labels are compared as text, so ``7`` in one file and ``"7"`` in another are one user, and ``007`` is another. At the
end, if all labels are plain integers, they become integers again. Arrow hashes each batch; only the distinct labels of
a batch are looked up in the growing dictionary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bunkbed.train.data.vocab import Int64Array, Vocab

if TYPE_CHECKING:
    import pyarrow as pa

# Written by other tools for a missing number. Among integers these are missing values, among strings labels.
MISSING_WORDS = frozenset({"na", "n/a", "nan", "null", "none", "nil", "\\n", "?"})
_INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"


class LabelEncoder:
    """Encoder that numbers labels by first appearance, after those of `known`. Not thread-safe; owns its labels."""

    def __init__(self, known: Vocab | None = None) -> None:
        import pyarrow as pa

        self._index: dict[str, int] = {}
        self._labels: list[str] = []
        if known is not None:
            self._labels = known.array.cast(pa.large_string()).to_pylist()
            self._index = {label: at for at, label in enumerate(self._labels)}

    def add(self, labels: pa.Array) -> Int64Array:
        """Return dense indices ``int64[N]`` of a batch of labels (Arrow integers or strings, no nulls)."""
        import pyarrow as pa
        import pyarrow.compute as pc

        encoded = labels if pa.types.is_dictionary(labels.type) else labels.dictionary_encode()
        text = encoded.dictionary.cast(pa.large_string())
        if not pa.types.is_integer(encoded.dictionary.type):
            text = pc.utf8_trim_whitespace(text)
        numbers = np.empty(len(text), np.int64)
        index = self._index
        for at, label in enumerate(text.to_pylist()):
            number = index.get(label)
            if number is None:
                number = index[label] = len(self._labels)
                self._labels.append(label)
            numbers[at] = number
        positions = encoded.indices.to_numpy(zero_copy_only=False)
        result: Int64Array = numbers[positions]
        return result

    def missing_labels(self) -> set[str]:
        """Return labels that mean "no value": the empty label, and words such as ``NA`` among integers."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if "" in self._index:
            return {""}
        labels = pa.array(self._labels, pa.large_string())
        is_integer = pc.match_substring_regex(labels, _INTEGER)
        others = labels.filter(pc.invert(is_integer)).to_pylist()
        if others and len(others) < len(labels) and all(word.lower() in MISSING_WORDS for word in others):
            return set(others)
        return set()

    def vocab(self) -> Vocab:
        """Return the labels so far: integers if every label is written as a plain integer, otherwise strings."""
        import pyarrow as pa
        import pyarrow.compute as pc

        labels = pa.array(self._labels, pa.large_string())
        if len(labels) and pc.all(pc.match_substring_regex(labels, _INTEGER)).as_py():
            return Vocab(labels.cast(pa.int64()))
        return Vocab(labels)
