"""Rows as decimal numbers, for text formats, and code that these share with word2vec's binary files.

Every float32 is read back bit for bit, also by programs that parse text to float64.
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
#: Bytes after which write-back is started.
_DISK_BYTES = 16 << 20


class Taking:
    """Buffered reader of a file's bytes. It holds at most twice the bytes that a call asks for.

    Args:
        file: unbuffered, at the first byte to read.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._buffer: Bytes = np.empty(_BLOCK, np.uint8)
        self._begin = self._end = self._taken = 0

    @property
    def rest(self) -> Bytes:
        """The bytes in memory that were not taken; valid until `more` is called."""
        return self._buffer[self._begin : self._end]

    def took(self, count: int) -> None:
        """Drop the first `count` bytes of `rest`."""
        self._begin += count

    def fill(self, count: int) -> None:
        """Read until `rest` has at least `count` bytes or the file ends."""
        while len(self.rest) < count and self.more(count + count // 8):
            pass

    def more(self, wanted: int = 0) -> bool:
        """Read more bytes; return False at the end of the file."""
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
        """Take the next `most` lines, fewer at the end of the file: (uint8[n], int64[lines], the end of each)."""
        self.fill(self._taken)  # about as many bytes as the last call took
        is_last = False
        while len(ends := _native.line_ends(self.rest, most, is_last)) < most and not is_last:
            is_last = not self.more()
        text = self.rest[: ends[-1] if len(ends) else 0]
        self._taken = len(text)
        self.took(self._taken)
        return text, ends


def count_lines(path: Path) -> int:
    """Return the number of lines of a file, the last one with or without a line feed."""
    count, last = 0, b"\n"
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


def parse(text: Bytes, begins: Ids, ends: Ids, length: int, path: Path, first_line: int) -> Floats:
    """Return float32[N, length] of numbers between white space; row i has those of ``text[begins[i] : ends[i]]``.

    The core rounds the numbers of most lines to float32 once. A line with an unusual number (a plus sign, less than the
    least float32) is parsed by NumPy, through float64.

    Raises:
        ValueError: a line without exactly `length` numbers; has the first one's number, counted from `first_line`.
    """
    rows = np.empty((len(ends), length), np.float32)
    refused = _native.parse_rows(text, begins, ends, rows).tolist()
    if refused:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # from older NumPy, for text that is no number
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
    """An unbuffered file whose write-back starts during the writes, so that the sync has less to write."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._begun = self._end = 0

    def restart(self) -> None:
        """Empty the file."""
        self._file.seek(0)
        self._file.truncate()
        self._begun = self._end = 0

    def write(self, data: bytes) -> None:
        """Write all bytes."""
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._end += len(data)
        if self._end - self._begun >= _DISK_BYTES:
            os.posix_fadvise(self._file.fileno(), self._begun, self._end - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = self._end


def write_in_order(writing: Writing, begin: Callable[[], None], put: Callable[[Ids, Floats], None]) -> int:
    """Call `put` with every stored row by ascending id, a chunk at a time; return the number of rows.

    `begin` is called first. A log in this order, as an import leaves it, is read once. If the log has another order, or
    `put` finds an id without a word or a word that it cannot write, then the scan only collects the remaining ids (8
    bytes per row in memory, small compared with a row's text). `begin` is called again, and rows are looked up in
    order, so an error names the first wrong word by id.

    Raises:
        ValueError: an id without a word (the greatest id is named), or an error of `put`.
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
        if done > reported:  # progress must not go back
            writing.report(done, len(ids))
    return done
