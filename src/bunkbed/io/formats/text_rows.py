"""Rows as decimal numbers, for the formats that are text, and what these share with word2vec's binary files.

Every float32 comes back bit for bit, also through the float64 that text is mostly parsed to.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from bunkbed import _native
from bunkbed.core.arguments import Floats, Ids
from bunkbed.io.common.ahead import ahead
from bunkbed.io.common.naming import words_of
from bunkbed.io.common.writing import Writing

Bytes = npt.NDArray[np.uint8]

_BLOCK = 1 << 20
#: Bytes after which the disk is told to begin with them.
_DISK_BYTES = 16 << 20


class Taking:
    """Bytes of a file from where the last ones that were taken ended. Holds what is asked for, twice at most.

    Args:
        file: unbuffered, where to begin.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._buffer: Bytes = np.empty(_BLOCK, np.uint8)
        self._begin = self._end = self._taken = 0

    @property
    def rest(self) -> Bytes:
        """What is in memory, until `more` is called."""
        return self._buffer[self._begin : self._end]

    def took(self, count: int) -> None:
        """So many of them are not wanted again."""
        self._begin += count

    def fill(self, count: int) -> None:
        """Reads until there are so many bytes, and some more, or no more."""
        while len(self.rest) < count and self.more(count + count // 8):
            pass

    def more(self, wanted: int = 0) -> bool:
        """Reads on; False at the end of the file."""
        rest = self.rest
        have = len(rest)
        end = max(wanted, have + max(_BLOCK, have // 2))
        if end > len(self._buffer):
            self._buffer = np.empty(end, np.uint8)
        self._buffer[:have] = rest
        count: int = self._file.readinto(memoryview(self._buffer)[have:end])  # type: ignore[attr-defined]
        self._begin, self._end = 0, have + count
        return count > 0

    def lines(self, most: int) -> tuple[Bytes, Ids]:
        """The next lines, fewer than `most` only where there are no more: (uint8[n], int64[lines] where each ends)."""
        self.fill(self._taken)  # it will be about as much as last time
        is_last = False
        while len(ends := _native.line_ends(self.rest, most, is_last)) < most and not is_last:
            is_last = not self.more()
        text = self.rest[: ends[-1] if len(ends) else 0]
        self._taken = len(text)
        self.took(self._taken)
        return text, ends


def count_lines(path: Path) -> int:
    """Lines of a file, the last one with or without a line feed."""
    count, last = 0, b"\n"
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


def parse(text: Bytes, begins: Ids, ends: Ids, length: int, path: Path, first_line: int) -> Floats:
    """float32[N, length] of numbers between white space, those of ``text[begins[i] : ends[i]]`` in row i.

    Most lines are rounded to float32 once, as is right; a line with a number that is written in another way than usual
    (a plus sign, less than the least float32) goes through float64, as all did before.

    Raises:
        ValueError: a line that does not hold so many numbers; names the first, counted from `first_line`.
    """
    rows = np.empty((len(ends), length), np.float32)
    refused = _native.parse_rows(text, begins, ends, rows).tolist()
    if refused:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # what older versions of NumPy say of what is no number
            for at in refused:
                line = text[begins[at] : ends[at]].tobytes()
                rows[at] = _parse_with_care(line, length, f"{path}: line {first_line + at}")
    return rows


def _parse_with_care(line: bytes, length: int, where: str) -> Floats:
    numbers = line.split()
    if len(numbers) != length:
        raise ValueError(f"{where} holds {len(numbers)} numbers, expected {length}; nothing was changed")
    row = np.empty(length, np.float32)
    for at, number in enumerate(numbers):
        try:
            (row[at],) = np.fromstring(number, np.float32, sep=" ")
        except (ValueError, DeprecationWarning):
            text = number.decode(errors="replace")
            raise ValueError(f"{where} holds {text!r}, which is no number; nothing was changed") from None
    return row


class Output:
    """An unbuffered file of which the disk gets a part as soon as it is written, not all at once when it is synced."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._begun = self._end = 0

    def restart(self) -> None:
        """The file is empty again."""
        self._file.seek(0)
        self._file.truncate()
        self._begun = self._end = 0

    def write(self, data: bytes) -> None:
        """All of it."""
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._end += len(data)
        if self._end - self._begun >= _DISK_BYTES:
            os.posix_fadvise(self._file.fileno(), self._begun, self._end - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = self._end


def write_in_order(writing: Writing, begin: Callable[[], None], put: Callable[[Ids, Floats], None]) -> int:
    """Calls `put` with every stored row by ascending id, a chunk at a time; returns how many.

    `begin` is called first. A log in that order, as an import leaves it, is read once. Where it turns out to be in
    another, or `put` finds an id without a word or a word that it cannot write, the rest is read for its ids only (8
    bytes a row in memory, beside text that takes hundreds), `begin` is called to start anew, and rows are looked up in
    order: so the first word that is wrong is the one named.

    Raises:
        ValueError: an id without a word, the greatest is named; what `put` raises.
    """
    table, total = writing.table, len(writing.table)
    seen, reported, last = [np.empty(0, np.int64)], 0, -1
    is_going = True
    begin()
    with closing(ahead(table.scan("weight", writing.rows_of()))) as parts:
        for ids, rows in parts:
            seen.append(ids)
            is_going = is_going and ids[0] > last and bool((ids[1:] > ids[:-1]).all())
            if not is_going:
                continue
            try:
                put(ids, rows)
            except ValueError:
                is_going = False
                continue
            last = int(ids[-1])
            reported += len(ids)
            writing.report(reported, total)
    if is_going:
        return reported
    ids = np.sort(np.concatenate(seen))
    words_of(writing.vocab, ids[-1:], writing.words)
    begin()
    done, chunk = 0, writing.rows_of()
    while done < len(ids):
        part = ids[done : done + chunk]
        put(part, table.lookup(part, touch=False))
        done += len(part)
        if done > reported:  # what was reported stays so
            writing.report(done, len(ids))
    return done
