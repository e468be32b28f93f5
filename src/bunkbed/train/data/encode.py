"""From batches of labels to dense indices, one dictionary at a time.

Every label is compared as text, so that ``7`` in one file and ``"7"`` in another are one user while ``007``
stays another; at the end labels that are all plain integers become integers again. Arrow hashes each batch;
only the few distinct labels of a batch meet the growing dictionary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bunkbed.train.data.vocab import Int64Array, Vocab

if TYPE_CHECKING:
    import pyarrow as pa

# Written by other tools where a number is missing. A label only where all others are strings too.
MISSING_WORDS = frozenset({"na", "n/a", "nan", "null", "none", "nil", "\\n", "?"})
_INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"


class LabelEncoder:
    """Numbers labels by first appearance, after those of `known`. Not thread-safe; owns its labels."""

    def __init__(self, known: Vocab | None = None) -> None:
        import pyarrow as pa

        self._index: dict[str, int] = {}
        self._labels: list[str] = []
        if known is not None:
            self._labels = known.array.cast(pa.large_string()).to_pylist()
            self._index = {label: at for at, label in enumerate(self._labels)}

    def add(self, labels: pa.Array) -> Int64Array:
        """Dense indices ``int64[N]`` of a batch of labels (Arrow integers or strings, no nulls)."""
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
        """Labels that stand for "no value": the empty one, and ``NA`` and the like amid integers."""
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
        """The labels so far: integers when every one is written as a plain integer, else strings."""
        import pyarrow as pa
        import pyarrow.compute as pc

        labels = pa.array(self._labels, pa.large_string())
        if len(labels) and pc.all(pc.match_substring_regex(labels, _INTEGER)).as_py():
            return Vocab(labels.cast(pa.int64()))
        return Vocab(labels)
