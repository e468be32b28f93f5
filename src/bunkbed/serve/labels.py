"""The ids of labels, found without a search through all labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from bunkbed.core.arguments import Ids
from bunkbed.train.data.vocab import Label, Vocab, as_int


class LabelIndex:
    """The labels of a run's users or items, sorted. Immutable; takes 16 bytes a label in addition to the labels.

    Integers are sorted by value, texts by their hash in this process.
    """

    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab
        keys = np.fromiter(self._all_keys(), np.int64, len(vocab))
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]

    def _all_keys(self) -> Iterator[int]:
        is_int = self.vocab.kind == "int"
        for labels in self.vocab.batches():
            yield from (int(label) if is_int else hash(label) for label in labels)

    def find(self, labels: Sequence[Label]) -> Ids:
        """Return the ids ``int64[N]`` of labels, -1 where one is unknown. Duplicates are allowed."""
        if self.vocab.kind == "int":
            numbers = [as_int(label) for label in labels]
            keys = np.array([0 if number is None else number for number in numbers], np.int64)
            known = np.array([number is not None for number in numbers], np.bool_)
        else:
            labels = [str(label) for label in labels]
            keys, known = np.array([hash(label) for label in labels], np.int64), np.ones(len(labels), np.bool_)
        first, last = (np.searchsorted(self._keys, keys, side) for side in ("left", "right"))
        found = np.full(len(keys), -1, np.int64)
        for place in np.flatnonzero(known & (first < last)).tolist():
            candidates = self._order[first[place] : last[place]]
            found[place] = candidates[0] if self.vocab.kind == "int" else self._spelled(candidates, labels[place])
        return found

    def _spelled(self, candidates: Ids, label: Label) -> int:
        """Return the id of a text among those with its hash, or -1."""
        spelled = self.vocab.decode(candidates)
        return int(candidates[spelled.index(label)]) if label in spelled else -1
