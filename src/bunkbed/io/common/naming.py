"""Conversion of a file's names of rows to ids: by position, by a column, or by a vocabulary of words.

A vocabulary is a text file of one word per line; the line's number, from 0, is the word's id. Bytes that are not UTF-8
are kept (surrogateescape).
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bunkbed.core.arguments import Ids, as_ids
from bunkbed.files.durable import make_file, sync_directory
from bunkbed.io.common.words import Words
from bunkbed.table.table import Table


class Naming:
    """Ids of an import's rows. Holds only the vocabulary in memory.

    Args:
        ids: int64[N] by position, or None for the file's ids.
        column: whether the caller named the column of the ids: words in it are then numbers.
        vocab: the vocabulary's file; if it exists, it decides the ids, otherwise `finish` writes it.
    """

    def __init__(self, table: Table, path: Path, rows: int, ids: Any, column: bool, vocab: Path | None) -> None:
        self._table = table
        self._path = path
        self._rows = rows
        self._given = None if ids is None else as_ids(ids, table=f"table '{table.name}'").reshape(-1)
        if self._given is not None and self._given.size != rows:
            raise ValueError(f"{path} holds {rows} rows, ids names {self._given.size}")
        self._column = column
        self._vocab = vocab
        self._is_new = vocab is not None and not vocab.exists()
        self._words: dict[str, int] = {}
        self._used = vocab is None
        if vocab is not None and not self._is_new:
            self._words = {word: at for at, word in enumerate(read_vocabulary(vocab))}

    def ids_of(self, keys: Ids | Sequence[str] | None, begin: int, count: int) -> Ids:
        """Return the ids of the rows from `begin` to ``begin + count`` of the file, all inside the table.

        Raises:
            IndexError: an id outside the table. ValueError: more rows by position than the table has, a word that is
            not an id or not in the vocabulary, or a word that occurs twice in a new vocabulary.
        """
        if self._given is not None:
            ids = self._given[begin : begin + count]
        elif keys is None:
            if self._table.num_rows is not None and self._rows > self._table.num_rows:
                raise ValueError(
                    f"{self._path} holds {self._rows} rows, table '{self._table.name}' has {self._table.num_rows}; "
                    "nothing was changed"
                )
            ids = np.arange(begin, begin + count)
        elif isinstance(keys, np.ndarray):
            ids = as_ids(keys, table=str(self._path))
        else:
            ids = self._of_words(keys, begin)
        bad = ids < 0
        if self._table.num_rows is not None:
            bad |= ids >= self._table.num_rows
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            room = "must not be negative" if self._table.num_rows is None else f"is outside [0, {self._table.num_rows})"
            raise IndexError(
                f"{self._path}: id {ids[at]} at position {begin + at} {room} of table '{self._table.name}'; "
                "nothing was changed"
            )
        return ids

    def _of_words(self, words: Sequence[str], begin: int) -> Ids:
        if self._vocab is None and not self._column:
            raise ValueError(
                f"{self._path} names its rows by words, such as {words[0]!r}; give vocab= (a file of one word a line, "
                "written where there is none), ids= as an array, or the column whose words are ids"
            )
        self._used = True
        if self._vocab is None:
            return self._numbers(words, begin)
        if not self._is_new:
            try:
                return np.array([self._words[word] for word in words], np.int64)
            except KeyError as error:
                at = words.index(error.args[0])
                raise ValueError(
                    f"{self._path}: word {words[at]!r} at position {begin + at} is not among the {len(self._words)} "
                    f"of {self._vocab}; nothing was changed"
                ) from None
        for at, word in enumerate(words):
            if self._words.setdefault(word, begin + at) != begin + at:
                raise ValueError(
                    f"{self._path}: word {word!r} at position {begin + at} stands at position {self._words[word]} "
                    "already; nothing was changed"
                )
        return np.arange(begin, begin + len(words))

    def _numbers(self, words: Sequence[str], begin: int) -> Ids:
        ids = (words if isinstance(words, Words) else Words.of(words)).numbers()
        if ids is not None:
            return ids
        # One by one, to name the first bad word.
        return np.array([self._number(word, begin + at) for at, word in enumerate(words)], np.int64)

    def _number(self, word: str, at: int) -> int:
        is_number = word.isascii() and word.isdecimal() and len(word.lstrip("0")) < 20
        if is_number and int(word) < 2**63:
            return int(word)
        raise ValueError(f"{self._path}: {word!r} at position {at} is no id; nothing was changed")

    def require_used(self) -> None:
        """Raise ValueError if a vocabulary was given for a file without words."""
        if not self._used:
            raise ValueError(f"{self._path} names no rows by words; leave vocab= out")

    def finish(self) -> None:
        """Write a new vocabulary, whole or not at all."""
        if self._vocab is not None and self._is_new:
            write_vocabulary(self._vocab, list(self._words))


def read_vocabulary(path: Path) -> list[str]:
    """Return the words in id order.

    Raises:
        ValueError: a word occurs twice; the message has both lines.
    """
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        words = file.read().split("\n")
    if words[-1] == "":
        words.pop()
    if len(set(words)) != len(words):
        first: dict[str, int] = {}
        for at, word in enumerate(words):
            if first.setdefault(word, at) != at:
                raise ValueError(f"{path}: word {word!r} is in line {first[word] + 1} and in line {at + 1}")
    return words


def write_vocabulary(path: Path, words: Iterable[str]) -> None:
    """Write one word per line, under a temporary name until complete.

    Raises:
        ValueError: a word with a line break; names the first.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with io.TextIOWrapper(make_file(part), encoding="utf-8", errors="surrogateescape", newline="") as file:
            for at, word in enumerate(words):
                if "\n" in word:
                    raise ValueError(
                        f"{path}: word {word!r} of id {at} has a line break, which a vocabulary cannot hold"
                    )
                file.write(f"{word}\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    sync_directory(path.absolute().parent)


def words_of(vocab: Path | None, ids: Ids, words: Sequence[str] | None) -> Words:
    """Return the words of exported ids: from a vocabulary, or the ids as text.

    Raises:
        ValueError: an id past the vocabulary; names the first.
    """
    if words is None:
        return Words.of_ids(ids)
    if ids.size and int(ids.max()) >= len(words):
        first = int(ids[ids >= len(words)][0])
        raise ValueError(f"id {first} has no word in {vocab}, which names {len(words)}")
    return Words.of([words[one] for one in ids.tolist()])
