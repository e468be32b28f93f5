"""Words of a chunk of rows, kept as the bytes they are.

A `str` a row costs more than the row where its word is an id and no more: it is made where somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from bunkbed import _native
from bunkbed.core.arguments import Ids


class Words(Sequence[str]):
    """As a sequence: the words as text, what is not UTF-8 as surrogates.

    Args:
        text: the words, a line feed behind each.
        ends: int64[N], where those line feeds stand; others belong to a word.
    """

    def __init__(self, text: bytes, ends: Ids) -> None:
        self.text = text
        self.ends = ends

    @classmethod
    def of_ids(cls, ids: Ids) -> Words:
        """Ids in decimal."""
        return cls(*_native.words_of_ids(ids))

    @classmethod
    def of(cls, words: Sequence[str]) -> Words:
        """The same words as bytes."""
        parts = [word.encode("utf-8", "surrogateescape") for word in words]
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        return cls(b"".join(part + b"\n" for part in parts), np.cumsum(lengths + 1) - 1)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        begin = int(self.ends[at - 1]) + 1 if at else 0
        return self.text[begin : self.ends[at]].decode("utf-8", "surrogateescape")

    def numbers(self) -> Ids | None:
        """int64[N] of words that are all ids in decimal, otherwise None."""
        return _native.ids_of_words(self.text, self.ends)
