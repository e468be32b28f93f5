"""word2vec's files, text and binary: a line ``rows dim``, then each row's word and its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from bunkbed import _native
from bunkbed.core.arguments import Floats, Ids
from bunkbed.io.common.naming import words_of
from bunkbed.io.common.source import Chunk, Reading, Source
from bunkbed.io.common.words import Words
from bunkbed.io.common.writing import Writing
from bunkbed.io.formats.text_rows import Output, Taking, parse, write_in_order

_BINARY = "word2vec-binary"
_LONGEST_WORD = 1 << 16


def read(reading: Reading) -> Source:
    """Return rows named by words."""
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
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            yield from part(reading, Taking(file), rows, dim)

    return Source(rows, ("weight",), chunks)


def _text(reading: Reading, taking: Taking, rows: int, dim: int) -> Iterator[Chunk]:
    path, done, chunk = reading.path, 0, reading.rows_of()
    while done < rows:
        text, ends = taking.lines(min(chunk, rows - done))
        if not len(ends):
            return
        words, word_ends, behind = _native.fields(text, ends, b" ", 0)
        yield Words(words, word_ends), {"weight": parse(text, behind, ends, dim, path, done + 2)}
        done += len(ends)
    while len(text := taking.lines(chunk)[0]):  # there may be empty lines at the end
        done += sum(1 for line in text.tobytes().split(b"\n") if line.strip())
    if done > rows:
        raise ValueError(f"{path} says that it holds {rows} rows, and holds {done}; nothing was changed")


def _binary(reading: Reading, taking: Taking, rows: int, dim: int) -> Iterator[Chunk]:
    path, chunk = reading.path, reading.rows_of()
    expected = 4 * dim + 8  # bytes of a row
    buffers = [np.empty((min(chunk, rows), dim), np.float32) for _ in range(2 if rows > chunk else 1)]
    for begin in range(0, rows, chunk):
        values = buffers[0][: min(chunk, rows - begin)]
        buffers.reverse()
        taking.fill(len(values) * expected)
        while True:
            words, ends, used = _native.split_records(taking.rest, values)
            if len(ends) == len(values):
                break
            rest = taking.rest[used:]
            has_word = len(rest) <= _LONGEST_WORD or b" " in rest.tobytes()
            if not taking.more() or not has_word:
                raise ValueError(f"{path} breaks off within row {begin + len(ends)}; nothing was changed")
        expected = -(-used // len(values))
        taking.took(used)
        yield Words(words, ends), {"weight": values}
    while not taking.rest.tobytes().strip(b"\n"):
        taking.took(len(taking.rest))
        if not taking.more():
            return
    raise ValueError(f"{path} goes on after the {rows} rows that it says it holds; nothing was changed")


def write(writing: Writing) -> int:
    """Write stored rows by ascending id; a row's word is from the vocabulary, or its id."""
    if list(writing.lengths) != ["weight"]:
        raise ValueError(f"{writing.target}: word2vec files hold weights, got {', '.join(writing.lengths)}")
    is_text = writing.format != _BINARY
    with writing.file.open("wb", buffering=0) as raw:
        file = Output(raw)

        total = len(writing.table)

        def begin() -> None:
            file.restart()
            file.write(f"{total} {writing.table.dim}\n".encode())

        def put(ids: Ids, rows: Floats) -> None:
            words = words_of(writing.vocab, ids, writing.words)
            if writing.vocab is not None:
                _require_plain(writing, words, ids)
            if is_text:
                file.write(_native.format_rows(rows, b" ", words.text, words.ends))
            else:
                file.write(_native.join_records(rows, words.text, words.ends))

        done = write_in_order(writing, begin, put)
    writing.require_all(done, total)
    return done


def _require_plain(writing: Writing, words: Sequence[str], ids: Ids) -> None:
    for word, one in zip(words, ids.tolist(), strict=True):
        if not word or word != "".join(word.split()):
            raise ValueError(f"{writing.target}: word {word!r} of id {one} is empty or has white space in it")
