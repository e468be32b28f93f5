"""Words of a chunk of rows, kept as bytes.

A `str` for each row costs more than the row if its word is only an id, so a `str` is made at access.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from bunkbed import _native
from bunkbed.core.arguments import Ids


class Words(Sequence[str]):
    """A sequence of words as text; bytes that are not UTF-8 become surrogates.

    Args:
        text: the words, with a line feed after each.
        ends: int64[N], the positions of these line feeds; other line feeds are part of a word.
    """

    def __init__(self, text: bytes, ends: Ids) -> None:
        self.text = text
        self.ends = ends

    @classmethod
    def of_ids(cls, ids: Ids) -> Words:
        """Make the words of ids, in decimal."""
        return cls(*_native.words_of_ids(ids))

    @classmethod
    def of(cls, words: Sequence[str]) -> Words:
        """Make `Words` of text words."""
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
        """Return int64[N] if all words are ids in decimal, otherwise None."""
        return _native.ids_of_words(self.text, self.ends)
