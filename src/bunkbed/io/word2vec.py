"""word2vec's files, text and binary: a line ``rows dim``, then each row's word and its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from bunkbed.io.exporting import Writing
from bunkbed.io.naming import words_of
from bunkbed.io.source import Chunk, Reading, Source
from bunkbed.io.text_rows import formatted, ids_in_order, parse

_BINARY = "word2vec-binary"
_LONGEST_WORD = 1 << 16
_BLOCK = 1 << 20


def read(reading: Reading) -> Source:
    """Rows named by words."""
    path = reading.path
    reading.refuse(name=reading.name, state=reading.state)
    if reading.id_column not in (None, "word"):
        raise ValueError(f'{path}: ids={reading.id_column!r}: the only column is "word"')
    if "weight" not in reading.slots:
        raise ValueError(f"{path} holds weights, got slots={reading.slots!r}")
    with path.open("rb") as file:
        header = file.readline(_LONGEST_WORD).split()
        start = file.tell()
    if len(header) != 2 or not all(one.isdigit() for one in header):
        raise ValueError(f"{path} is not a word2vec file: line 1 must be 'rows dim'")
    rows, dim = int(header[0]), int(header[1])
    if dim != reading.length("weight"):
        raise ValueError(f"{path}: rows must be float32[N, {reading.length('weight')}], got float32[{rows}, {dim}]")
    part = _binary if reading.format == _BINARY else _text

    def chunks() -> Iterator[Chunk]:
        with path.open("rb") as file:
            file.seek(start)
            yield from part(reading, file, rows, dim)

    return Source(rows, ("weight",), chunks)


def _text(reading: Reading, file: IO[bytes], rows: int, dim: int) -> Iterator[Chunk]:
    done, chunk = 0, reading.rows_of()
    words: list[str] = []
    numbers: list[bytes] = []
    for line in file:
        if done + len(words) == rows and not line.strip():
            continue  # an empty line at the end
        word, _, rest = line.partition(b" ")
        words.append(word.decode("utf-8", "surrogateescape"))
        numbers.append(rest)
        if len(words) == chunk:
            yield words, {"weight": parse(numbers, dim, reading.path, done + 2)}
            done += len(words)
            words, numbers = [], []
    if words:
        yield words, {"weight": parse(numbers, dim, reading.path, done + 2)}


def _binary(reading: Reading, file: IO[bytes], rows: int, dim: int) -> Iterator[Chunk]:
    data, at, chunk = b"", 0, reading.rows_of()
    for begin in range(0, rows, chunk):
        count = min(chunk, rows - begin)
        values = np.empty((count, dim), "<f4")
        words = []
        for row in range(count):
            space = data.find(b" ", at)
            while space < 0 or len(data) < space + 1 + 4 * dim:
                more = file.read(max(_BLOCK, 4 * dim))
                if not more or (space < 0 and len(data) - at > _LONGEST_WORD):
                    raise ValueError(f"{reading.path} breaks off within row {begin + row}; nothing was changed")
                data, at = data[at:] + more, 0
                space = data.find(b" ")
            # The original tool ends each row with a line feed, others do not.
            words.append(data[at:space].lstrip(b"\n").decode("utf-8", "surrogateescape"))
            values[row] = np.frombuffer(data, "<f4", dim, space + 1)
            at = space + 1 + 4 * dim
        yield words, {"weight": values}
    if (data[at:] + file.read(2)).strip(b"\n"):
        raise ValueError(f"{reading.path} goes on after the {rows} rows that it says it holds; nothing was changed")


def write(writing: Writing) -> int:
    """Stored rows by ascending id; a row's word is its vocabulary's, or its id."""
    if list(writing.lengths) != ["weight"]:
        raise ValueError(f"{writing.target}: word2vec files hold weights, got {', '.join(writing.lengths)}")
    ids, dim, chunk = ids_in_order(writing), writing.table.dim, writing.rows_of()
    words_of(writing.vocab, ids[-1:], writing.words)  # the greatest id has a word, or nothing is begun
    is_text = writing.format != _BINARY
    with writing.file.open("wb") as file:
        file.write(f"{len(ids)} {dim}\n".encode())
        for begin in range(0, len(ids), chunk):
            part = ids[begin : begin + chunk]
            words = words_of(writing.vocab, part, writing.words)
            _require_plain(writing, words, part)
            rows = writing.table.lookup(part, touch=False)
            named = [word.encode("utf-8", "surrogateescape") + b" " for word in words]
            if is_text:
                lines = [line.encode() for line in formatted(rows, " ")]
            else:
                lines = [row.tobytes() for row in np.ascontiguousarray(rows, "<f4")]
            file.writelines(word + line + b"\n" for word, line in zip(named, lines, strict=True))
            writing.report(begin + len(part), len(ids))
    return len(ids)


def _require_plain(writing: Writing, words: list[str], ids: Any) -> None:
    for word, one in zip(words, ids.tolist(), strict=True):
        if not word or word != "".join(word.split()):
            raise ValueError(f"{writing.target}: word {word!r} of id {one} is empty or has white space in it")
