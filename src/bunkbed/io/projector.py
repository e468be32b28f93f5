"""The TensorBoard projector's text: ``tensors.tsv`` of numbers, and beside it ``metadata.tsv``, which names the rows.

A metadata file of one column has no header; one of several has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from bunkbed.io.exporting import Writing
from bunkbed.io.naming import words_of
from bunkbed.io.source import Chunk, Reading, Source
from bunkbed.io.text_rows import formatted, ids_in_order, parse

_TENSORS, _METADATA = "tensors.tsv", "metadata.tsv"


def read(reading: Reading) -> Source:
    """Rows named by a column of the metadata, or by position where there is none."""
    reading.refuse(name=reading.name, state=reading.state)
    folder = reading.path if reading.path.is_dir() else reading.path.parent
    tensors = folder / _TENSORS if reading.path.is_dir() else reading.path
    metadata = folder / _METADATA
    if "weight" not in reading.slots:
        raise ValueError(f"{reading.path} holds weights, got slots={reading.slots!r}")
    with tensors.open("rb") as file:
        rows = sum(1 for _ in file)
    if metadata.exists():
        column, skip = _column(reading, metadata)
        with metadata.open("rb") as file:
            named = sum(1 for _ in file) - skip
        if named != rows:
            raise ValueError(f"{metadata} names {named} rows, {tensors} holds {rows}")
    elif reading.id_column is not None:
        raise ValueError(f"ids={reading.id_column!r}: there is no {metadata} to have such a column")

    def chunks() -> Iterator[Chunk]:
        words = _words(metadata, column, skip) if metadata.exists() else None
        chunk, done = reading.rows_of(), 0
        with tensors.open("rb") as file:
            while lines := list(islice(file, chunk)):
                values = parse(lines, reading.length("weight"), tensors, done + 1)
                yield None if words is None else list(islice(words, len(lines))), {"weight": values}
                done += len(lines)

    return Source(rows, ("weight",), chunks)


def _column(reading: Reading, metadata: Path) -> tuple[int, int]:
    """Position of the column that names rows, and lines before the first row."""
    with metadata.open("rb") as file:
        names = [name.decode("utf-8", "surrogateescape") for name in file.readline().rstrip(b"\r\n").split(b"\t")]
    if len(names) == 1:
        if reading.id_column not in (None, "word"):
            raise ValueError(f'{metadata} has one column without a name, ids="word", not {reading.id_column!r}')
        return 0, 0
    if reading.id_column not in names:
        raise ValueError(f"{metadata}: say with ids= which column names rows, one of {', '.join(names)}")
    return names.index(reading.id_column), 1


def _words(metadata: Path, column: int, skip: int) -> Iterator[str]:
    with metadata.open("rb") as file:
        for at, line in enumerate(islice(file, skip, None)):
            fields = line.rstrip(b"\r\n").split(b"\t")
            if len(fields) <= column:
                raise ValueError(f"{metadata}: line {at + skip + 1} has {len(fields)} columns; nothing was changed")
            yield fields[column].decode("utf-8", "surrogateescape")


def write(writing: Writing) -> int:
    """A folder of both files: stored rows by ascending id; a row's word is its vocabulary's, or its id."""
    if writing.target.suffix == ".tsv":
        raise ValueError(f"{writing.target}: an export is a folder of both files; name it .projector")
    if list(writing.lengths) != ["weight"]:
        raise ValueError(f"{writing.target}: the projector holds weights, got {', '.join(writing.lengths)}")
    ids, chunk = ids_in_order(writing), writing.rows_of()
    words_of(writing.vocab, ids[-1:], writing.words)  # the greatest id has a word, or nothing is begun
    writing.file.mkdir()
    tensors, metadata = writing.file / _TENSORS, writing.file / _METADATA
    with tensors.open("w") as rows, metadata.open("w", encoding="utf-8", errors="surrogateescape", newline="") as names:
        for begin in range(0, len(ids), chunk):
            part = ids[begin : begin + chunk]
            words = words_of(writing.vocab, part, writing.words)
            for word, one in zip(words, part.tolist(), strict=True):
                if set(word) & set("\t\r\n"):
                    raise ValueError(f"{writing.target}: word {word!r} of id {one} has a tab or a line break in it")
            names.writelines(f"{word}\n" for word in words)
            lines = formatted(writing.table.lookup(part, touch=False), "\t")
            rows.writelines(f"{line}\n" for line in lines)
            writing.report(begin + len(part), len(ids))
    return len(ids)
