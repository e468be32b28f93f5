"""The TensorBoard projector's text: ``tensors.tsv`` with numbers, and ``metadata.tsv`` with names of the rows.

A metadata file of one column has no header; one of several has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bunkbed import _native
from bunkbed.core.arguments import Floats, Ids
from bunkbed.io.common.naming import words_of
from bunkbed.io.common.source import Chunk, Reading, Source
from bunkbed.io.common.words import Words
from bunkbed.io.common.writing import Writing
from bunkbed.io.formats.text_rows import Output, Taking, count_lines, parse, write_in_order

_TENSORS, _METADATA = "tensors.tsv", "metadata.tsv"


def read(reading: Reading) -> Source:
    """Return rows named by a column of the metadata, or by position if there is no metadata."""
    reading.refuse(name=reading.name, state=reading.state)
    folder = reading.path if reading.path.is_dir() else reading.path.parent
    tensors = folder / _TENSORS if reading.path.is_dir() else reading.path
    metadata = folder / _METADATA
    if "weight" not in reading.slots:
        raise ValueError(f"{reading.path} holds weights, got slots={reading.slots!r}")
    rows = count_lines(tensors)
    if metadata.exists():
        column, skip = _column(reading, metadata)
        named = count_lines(metadata) - skip
        if named != rows:
            raise ValueError(f"{metadata} names {named} rows, {tensors} holds {rows}")
    elif reading.id_column is not None:
        raise ValueError(f"ids={reading.id_column!r}: there is no {metadata} to have such a column")

    def chunks() -> Iterator[Chunk]:
        chunk, done = reading.rows_of(), 0
        with ExitStack() as files:
            taking = Taking(files.enter_context(tensors.open("rb", buffering=0)))
            naming = Taking(files.enter_context(metadata.open("rb", buffering=0))) if metadata.exists() else None
            if naming is not None:
                naming.lines(skip)
            while len((lines := taking.lines(chunk))[1]):
                text, ends = lines
                begins = np.concatenate(([0], ends[:-1]))
                values = parse(text, begins, ends, reading.length("weight"), tensors, done + 1)
                words = None if naming is None else _words(metadata, naming, len(ends), column, done + skip + 1)
                yield words, {"weight": values}
                done += len(ends)

    return Source(rows, ("weight",), chunks)


def _column(reading: Reading, metadata: Path) -> tuple[int, int]:
    """Return the position of the column that names rows, and the number of lines before the first row."""
    with metadata.open("rb") as file:
        names = [name.decode("utf-8", "surrogateescape") for name in file.readline().rstrip(b"\r\n").split(b"\t")]
    if len(names) == 1:
        if reading.id_column not in (None, "word"):
            raise ValueError(f'{metadata} has one column without a name, ids="word", not {reading.id_column!r}')
        return 0, 0
    if reading.id_column not in names:
        raise ValueError(f"{metadata}: say with ids= which column names rows, one of {', '.join(names)}")
    return names.index(reading.id_column), 1


def _words(metadata: Path, taking: Taking, count: int, column: int, first_line: int) -> Words:
    text, ends = taking.lines(count)
    words, word_ends, behind = _native.fields(text, ends, b"\t", column)
    if (behind < 0).any():
        at = int(np.flatnonzero(behind < 0)[0])
        line = text[ends[at - 1] if at else 0 : ends[at]].tobytes()
        columns = line.rstrip(b"\r\n").count(b"\t") + 1
        raise ValueError(f"{metadata}: line {first_line + at} has {columns} columns; nothing was changed")
    return Words(words, word_ends)


def write(writing: Writing) -> int:
    """Write a folder of both files: stored rows by ascending id; a row's word is from the vocabulary, or its id."""
    if writing.target.suffix == ".tsv":
        raise ValueError(f"{writing.target}: an export is a folder of both files; name it .projector")
    if list(writing.lengths) != ["weight"]:
        raise ValueError(f"{writing.target}: the projector holds weights, got {', '.join(writing.lengths)}")
    writing.file.mkdir()
    with ExitStack() as files:
        tensors, metadata = (
            Output(files.enter_context((writing.file / name).open("wb", buffering=0))) for name in (_TENSORS, _METADATA)
        )

        def begin() -> None:
            tensors.restart()
            metadata.restart()

        def put(ids: Ids, rows: Floats) -> None:
            words = words_of(writing.vocab, ids, writing.words)
            if writing.vocab is not None:
                _require_one_line(writing, words, ids)
            metadata.write(words.text)
            tensors.write(_native.format_rows(rows, b"\t"))

        return write_in_order(writing, begin, put)


def _require_one_line(writing: Writing, words: Sequence[str], ids: Ids) -> None:
    for word, one in zip(words, ids.tolist(), strict=True):
        if set(word) & set("\t\r\n"):
            raise ValueError(f"{writing.target}: word {word!r} of id {one} has a tab or a line break in it")
