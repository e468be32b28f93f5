"""Text file of unknown form: unpacks it, checks that it is text, reads lines, and the fields of rows."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TextIO, cast

from bunkbed.train.data.columns import shown
from bunkbed.train.data.vocab import DataError

#: Only files with these separators quote fields; a single quote in a TSV title is an ordinary character.
QUOTING = {",", ";"}

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
            raise IsADirectoryError(errno.EISDIR, "is a directory; give one file", path)
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

    @contextmanager
    def guarded(self) -> Iterator[IO[bytes]]:
        """As `open`, but damage in the gzip stream raises `DataError`."""
        with self.open() as file:
            try:
                yield file
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise DataError(f"{self.path}: the gzip stream is damaged or cut short ({error})") from error

    @contextmanager
    def text(self, *, newline: str | None = "") -> Iterator[TextIO]:
        """Open the text; invalid UTF-8 is decoded as surrogates. Ends of lines are unchanged, as `csv` needs them."""
        with (
            self.guarded() as file,
            io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline=newline) as text,
        ):
            yield text

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield number (from 1) and text of each line."""
        with self.text(newline=None) as text:
            for number, line in enumerate(text, start=1):
                yield number, line.rstrip("\n")

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


class TextRows:
    """The rows of a text file: an iterable of line numbers and fields, without blank rows and the header.

    Args:
        separator: between fields; None: any run of blanks.
        has_header: whether the first row names the columns.
    """

    def __init__(self, text: TextFile, separator: str | None, *, has_header: bool) -> None:
        self._text = text
        self._separator = separator
        self._has_header = has_header

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        separator, is_header = self._separator, self._has_header
        if separator in QUOTING:
            rows = self._quoted_rows(separator or "")
        else:
            rows = ((number, line.split(separator)) for number, line in self._text.lines())
        for number, row in rows:
            if number > self._text.blank_lines_above and (len(row) > 1 or (row and row[0].strip())):
                if is_header:
                    is_header = False
                else:
                    yield number, row

    def _quoted_rows(self, separator: str) -> Iterator[tuple[int, list[str]]]:
        """Yield rows whose fields may be quoted, and then have several lines.

        A field of several lines and more than 131,072 characters, Python's limit, counts as not closed: no label or
        title is that long, and the lines in the field would be lost without an error.
        """
        kept = [""]
        with self._text.text() as text:
            reader = csv.reader(_kept_lines(text, kept), delimiter=separator, strict=True)
            while True:
                number = reader.line_num + 1
                try:
                    yield number, next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    if reader.line_num > number:
                        place = f"{self._text.path} line {number}"
                        first = next(line for at, line in self._text.lines() if at == number)
                        raise _open_quote(place, first, error) from error
                    # Within one line, odd quotes do not affect other rows: they are text.
                    yield number, split_line(f"{self._text.path} line {number}", kept[0], separator)


def find_separator(lines: list[str]) -> str | None:
    """Return what separates the fields of sampled lines; None: blanks."""
    for line in lines[:20]:
        for separator in ("\t", "::", ",", ";", "|"):
            if separator in line:
                return separator
        if len(line.split()) > 1:
            return None
    return None


def split_line(path: str, line: str, separator: str | None) -> list[str]:
    """Return the fields of one line.

    Raises:
        DataError: a quote is not closed.
    """
    if separator in QUOTING:
        try:
            return next(csv.reader([line], delimiter=separator or ","))
        except csv.Error as error:
            raise _open_quote(path, line, error) from error
    return line.split(separator)


def _kept_lines(lines: Iterator[str], kept: list[str]) -> Iterator[str]:
    """Yield lines; the last one is in ``kept[0]``."""
    for line in lines:
        kept[0] = line
        yield line


def _open_quote(place: str, line: str, error: csv.Error) -> DataError:
    return DataError(
        f"{place}: a quote is opened and not closed where its field ends ({error}): {shown(line)}; "
        "close the quote, or double it where it is part of the text"
    )
