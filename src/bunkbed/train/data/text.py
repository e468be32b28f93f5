"""Text file of interactions of unknown form: unpacks it, checks that it is text, reads lines."""

from __future__ import annotations

import errno
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, cast

import numpy as np

from bunkbed.train.data.vocab import DataError

_SAMPLE_BYTES = 256 * 1024
_SAMPLE_LINES = 1000
_OTHER_ARCHIVES = {
    b"PK\x03\x04": "a zip archive",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"7z\xbc\xaf": "a 7z archive",
}


class TextFile:
    """Text file, plain or gzip, that can be opened repeatedly.

    Attributes:
        blank_lines_above: number of blank lines before the first other line; set by `sample_lines`.

    Raises:
        DataError: empty, an archive of another kind, damaged gzip.
        OSError: missing, a directory, not readable.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.blank_lines_above = 0
        if Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a directory; give one file of interactions", path)
        with Path(path).open("rb") as file:
            self.magic = file.read(8)
        if not self.magic:
            raise DataError(f"{path}: is empty")
        for magic, kind in _OTHER_ARCHIVES.items():
            if self.magic.startswith(magic):
                raise DataError(f"{path}: is {kind}; unpack it, or compress it with gzip")
        self.is_gzip = self.magic.startswith(b"\x1f\x8b")

    def open(self) -> IO[bytes]:
        """Open the unpacked bytes from the start."""
        opener = gzip.open if self.is_gzip else open
        return cast(IO[bytes], opener(self.path, "rb"))

    def lines(self, skip: int = 0) -> Iterator[tuple[int, str]]:
        """Yield number (from 1) and text of lines after the first `skip`; invalid UTF-8 is decoded as surrogates."""
        with self.guarded() as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape")
            for number, line in islice(enumerate(text, start=1), skip, None):
                yield number, line.rstrip("\n")

    def guarded(self) -> _Guarded:
        """As `open`, but damage in the gzip stream raises `DataError`."""
        return _Guarded(self)

    def sample_lines(self) -> list[str]:
        """Return the first lines that are not blank; of a long file without the last one, which may be incomplete.

        Raises:
            DataError: not text, or only blanks.
        """
        with self.guarded() as file:
            sample = file.read(_SAMPLE_BYTES)
        if sample.startswith(b"PAR1"):
            raise DataError(f"{self.path}: is a gzip of a Parquet file; unpack it first")
        self._check_text(sample)
        text = sample.decode("utf-8-sig", errors="surrogateescape")
        lines = re.split(r"\r\n|\n|\r", text)
        if len(sample) == _SAMPLE_BYTES and len(lines) > 1:
            lines.pop()
        self.blank_lines_above = next((at for at, line in enumerate(lines) if line.strip()), 0)
        lines = [line for line in lines if line.strip()]
        if not lines:
            raise DataError(f"{self.path}: {'holds only blank lines' if sample else 'is empty'}")
        return lines[:_SAMPLE_LINES]

    def _check_text(self, sample: bytes) -> None:
        if sample.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise DataError(f"{self.path}: is UTF-16 text; save it as UTF-8")
        bad = re.search(rb"[\x00-\x08\x0e-\x1f\x7f]", sample)
        if bad is not None:
            at = bad.start()
            raise DataError(
                f"{self.path}: is not text (byte 0x{sample[at]:02x} at offset {at}); "
                "expected CSV, TSV, Parquet, adjacency lines, or gzip of a text form"
            )


class _Guarded:
    """Context manager of an open `TextFile`."""

    def __init__(self, text: TextFile) -> None:
        self._text = text

    def __enter__(self) -> IO[bytes]:
        self._file = self._text.open()
        return self._file

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._file.close()
        if isinstance(error, (EOFError, gzip.BadGzipFile, zlib.error)):
            message = f"{self._text.path}: the gzip stream is damaged or cut short ({error})"
            raise DataError(message) from error


class CountedLines(io.BufferedIOBase):
    """File for Arrow that counts the lines that are read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._ends = {b"\n": 0, b"\r": 0}
        self._last = b"\n"
        self.has_quotes = False

    @property
    def num_lines(self) -> int:
        return max(self._ends.values()) + (self._last not in self._ends)

    def read(self, size: int | None = -1, /) -> bytes:
        part = self._file.read(-1 if size is None else size)
        codes = np.frombuffer(part, np.uint8)
        for end in self._ends:  # bytes.count takes several times as long for many lines
            self._ends[end] += int(np.count_nonzero(codes == ord(end)))
        self._last = part[-1:] or self._last
        self.has_quotes = self.has_quotes or b'"' in part
        return part

    def readable(self) -> bool:
        return True


def text_of(file: IO[bytes]) -> io.TextIOWrapper:
    """Return text for `csv.reader`, which finds the ends of lines itself."""
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")


def check_utf8(path: str, number: int, what: str, field: str) -> None:
    if not field.isascii():
        try:
            field.encode("utf-8")
        except UnicodeEncodeError as error:
            raw = field.encode("utf-8", "surrogateescape")
            byte = raw[len(field[: error.start].encode("utf-8", "surrogateescape"))]
            raise DataError(
                f"{path} line {number}: the {what} is not UTF-8 text (byte 0x{byte:02x}); save the file as UTF-8"
            ) from error
