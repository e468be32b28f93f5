"""Side features of users or items from a file with one row an id, as `Features`.

Each other column is a feature of one kind:

- ``"category"``: each value is a feature of weight 1.
- ``"values"``: several values between ``|``, ``;``, ``,`` or blanks (the first of these that the column has), each a
  feature of weight 1. A list column of Parquet is of this kind. RecBole's ``token_seq`` has blanks.
- ``"number"``: one feature, whose weight is the number, less the mean of the column, divided by its standard deviation.
  Numbers that are all 0 or 1 are weights as they are.
- ``"skip"``: none.

Kinds that are not given: of a name such as ``genre:token_seq``, as RecBole writes it, the type says the kind; otherwise
columns of numbers are numbers, text with a ``|`` is values, and other text is categories. A missing value is no
feature. A value that one id alone has says nothing about others, so it gets no row.

Features keep their numbers, and columns their kinds, means and deviations, when a run gets a later file (``before``):
the rows of the features are trained by then. The later file says all: features of ids that it does not have are gone.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from bunkbed.core.types import Json
from bunkbed.train.data.columns import ITEM_NAMES, USER_NAMES, looks_like_header, shown, well_known
from bunkbed.train.data.reading import INTEGER, MISSING_WORDS
from bunkbed.train.data.store import load_vocabs, open_known_pairs, write_rows
from bunkbed.train.data.text import TextFile, TextRows, check_utf8, find_separator, split_line
from bunkbed.train.data.vocab import DataError, Float32Array, Int64Array, Vocab
from bunkbed.train.features.features import (
    SIDES,
    Features,
    load_features,
    read_about,
    read_names,
    write_about,
    write_features,
)

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["KINDS", "SideFile", "parse_kinds", "store_features"]

KINDS = ("category", "values", "number", "skip")
_WELL_KNOWN = {"user": USER_NAMES | {"id"}, "item": ITEM_NAMES | {"id"}}
#: Kinds of the types in RecBole's names of columns.
_TYPES = {"token": "category", "token_seq": "values", "float": "number"}
#: One value, or the values of a list column.
Cell = str | list[str]


class SideFile(NamedTuple):
    """A file of features.

    Attributes:
        path: of the file.
        id_col: name of the column of ids, if the file has it; otherwise a well-known name, or the first column.
    """

    path: Path
    id_col: str | None = None


@dataclass(frozen=True)
class Column:
    """What a column became.

    Attributes:
        name: of the column, or its position.
        kind: one of `KINDS`.
        features: its features.
        left_out: values of one id alone.
        mean: what is taken from its numbers.
        deviation: what they are divided by then.
    """

    name: str
    kind: str
    features: int
    left_out: int = 0
    mean: float = 0.0
    deviation: float = 1.0


class _Before(NamedTuple):
    """What a run already knows of one side: column and value of each feature, and its columns by name."""

    names: list[tuple[str, str]]
    columns: dict[str, Column]


class _File(NamedTuple):
    """The content of a file: cells by column, and what an error calls each row and column."""

    path: str
    names: list[str]
    columns: list[Sequence[Cell]]
    places: Sequence[str]
    kinds: list[str | None]
    has_blanks: Sequence[bool]  # between values, whatever else is in the column


class _Part(NamedTuple):
    """The features of one column: ``int64`` rows and features, ``float32`` weights."""

    rows: Int64Array
    features: Int64Array
    weights: Float32Array


def parse_kinds(text: str) -> dict[str, str]:
    """Return the kinds of an option such as ``"zip=category,title=skip"``.

    Raises:
        ValueError: a part is not NAME=KIND, a name is there twice, or there is no such kind.

    >>> parse_kinds("zip=category,title=skip")
    {'zip': 'category', 'title': 'skip'}
    """
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, equals, kind = part.rpartition("=")
        if not equals or not name or kind not in KINDS:
            raise ValueError(f"option feature_kinds must be NAME=KIND with {', '.join(KINDS)}, got {part!r}")
        if name in found:
            raise ValueError(f"option feature_kinds names {name!r} twice")
        found[name] = kind
    return found


def store_features(
    folder: Path,
    files: Mapping[str, SideFile],
    kinds: Mapping[str, str],
    before: Path | None = None,
    kinds_before: Mapping[str, str] | None = None,
) -> Json:
    """Read files of features into a dataset's folder; ids without interactions become users or items without pairs.

    Args:
        folder: has a dataset (`bunkbed.train.data.store.save_dataset`).
        files: by side, ``"user"`` or ``"item"``.
        kinds: of columns, by name or position.
        before: the folder of the run's smaller dataset with features, whose ids are the first ones of `folder`. A side
            without a file keeps its features, and its new ids have none.
        kinds_before: those that were given for it.

    Returns:
        By side: ``source``; ``ids``, of the file; ``new``, those without interactions; ``features``, of all columns;
        ``columns``, as `Column`.

    Raises:
        DataError: a file cannot be read, has rows of unequal length, an id twice or missing, no id of the interactions,
            two columns of one name, or a number that is none; or no file has a column of `kinds`; or the run has no
            features of a file's side. OSError: a file cannot be read or written.
    """
    about: Json = {}
    named: set[str] = set()
    known: Json = {} if before is None else read_about(before)
    for side in SIDES:
        if side in files:
            if before is not None and side not in known:
                raise DataError(f"{files[side].path}: the run has no features of {side}s; start a new run with them")
            file = _read(files[side], side, {**(kinds_before or {}), **kinds})
            named.update(name for at, name in enumerate(file.names) for name in (name, str(at)))
            of_side = None
            if before is not None:
                columns = {each["name"]: Column(**each) for each in known[side]["columns"]}
                of_side = _Before(read_names(before, side), columns)
            about[side] = _store(folder, side, file, files[side].id_col, of_side)
        elif before is not None and side in known:
            about[side] = known[side]
            vocab = load_vocabs(folder)[SIDES.index(side)]
            has_pairs = _has_pairs(folder, side, len(vocab))
            grown = load_features(before)[side].grown(has_pairs, shared=side == "user")
            write_features(folder, side, grown, read_names(before, side))
    for name in kinds:
        if name not in named:
            paths = ", ".join(str(file.path) for file in files.values())
            raise DataError(f"{paths}: no column {name!r}, which --feature-kinds names")
    if about:
        write_about(folder, about)
    return about


def _store(folder: Path, side: str, file: _File, id_col: str | None, before: _Before | None) -> Json:
    at = _id_column(file, side, id_col)
    vocab = load_vocabs(folder)[SIDES.index(side)]
    labels = _labels(file, at, side, vocab)
    grown, ids = vocab.extended(labels)
    new = len(grown) - len(vocab)
    if new == len(ids):
        raise DataError(
            f"{file.path}: none of its {len(ids):,} {side}s is among the {len(vocab):,} of the interactions; the "
            f"column of ids is {file.names[at]!r}"
        )
    parts, columns = [], []
    # What every user has in common; of items it would add the same to all scores of a user.
    names = [("", "every user")] if side == "user" else []
    numbers = _Numbers(names if before is None else before.names)
    for place, cells in enumerate(file.columns):
        known = None if before is None else before.columns.get(file.names[place])
        if place != at and file.kinds[place] != "skip":
            part, column = _column(file, place, cells, numbers, known)
            parts.append(part._replace(rows=ids[part.rows]))
            columns.append(column)
    if not any(column.features for column in columns):
        raise DataError(f"{file.path}: has no feature that two {side}s share; leave it out")
    if side == "user":
        every = np.arange(len(grown))
        parts.insert(0, _Part(every, np.zeros_like(every), np.ones(len(every), np.float32)))
    if new:
        import pyarrow as pa

        table = pa.table({"label": grown.array})
        write_rows(folder / f"{side}s.parquet", table.schema, table.to_batches())
    features = _joined(parts, len(numbers.names), _has_pairs(folder, side, len(grown)))
    write_features(folder, side, features, numbers.names)
    found = {"source": file.path, "ids": len(ids), "new": new, "features": len(numbers.names)}
    absent = [] if before is None else [each for name, each in before.columns.items() if name not in file.names]
    return {**found, "columns": [asdict(column) for column in (*columns, *absent)]}


class _Numbers:
    """The numbers of features by column and value, by first appearance after those of `names`."""

    def __init__(self, names: Sequence[tuple[str, str]]) -> None:
        self.names = list(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def has(self, column: str, value: str) -> bool:
        return (column, value) in self._numbers

    def of(self, column: str, value: str) -> int:
        """Return the number of a feature, a new one if it has none."""
        number = self._numbers.setdefault((column, value), len(self.names))
        if number == len(self.names):
            self.names.append((column, value))
        return number


def _joined(parts: Sequence[_Part], num_features: int, has_pairs: npt.NDArray[np.bool_]) -> Features:
    """Return the features of all columns, by id; those of an id are in the order of the columns."""
    rows, features, weights = (np.concatenate([part[field] for part in parts]) for field in range(3))
    order = np.argsort(rows, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(has_pairs)))])
    return Features(starts, features[order], weights[order], num_features, has_pairs)


def _has_pairs(folder: Path, side: str, count: int) -> npt.NDArray[np.bool_]:
    found = np.zeros(count, np.bool_)
    for pair in open_known_pairs(folder)[0].batches():
        found[pair[SIDES.index(side)]] = True
    return found


def _id_column(file: _File, side: str, id_col: str | None) -> int:
    if id_col in file.names:
        return file.names.index(id_col)
    found = well_known(file.names, _WELL_KNOWN[side])
    return 0 if found is None else found


def _labels(file: _File, at: int, side: str, vocab: Vocab) -> pa.Array:
    """Return the ids of the rows as text.

    Raises:
        DataError: one is missing, there twice, or text where those of the interactions are integers.
    """
    import pyarrow as pa

    seen: dict[str, int] = {}
    for row, cell in enumerate(file.columns[at]):
        if not isinstance(cell, str):
            raise DataError(f"{file.path}: column {file.names[at]!r} holds lists, {side}s must be integers or strings")
        problem = "" if cell else "is missing"
        if cell in seen:
            problem = f"{cell!r} is there a second time (first at {file.places[seen[cell]]}); write each once"
        if vocab.kind == "int" and cell and not re.fullmatch(INTEGER, cell):
            problem = f"{cell!r} is no integer, as those of the interactions are; were columns mixed up?"
        if problem:
            raise DataError(f"{file.path} {file.places[row]}: the {side} {problem}")
        seen[cell] = row
    return pa.array(list(seen), pa.large_string())


def _column(
    file: _File, at: int, cells: Sequence[Cell], numbers: _Numbers, known: Column | None
) -> tuple[_Part, Column]:
    """Return the features of one column.

    Args:
        known: what the run knows of the column, or None.
    """
    kind = known.kind if known is not None else file.kinds[at] or _guessed(cells)
    name, size = file.names[at], len(numbers.names)
    if kind == "number":
        part, mean, deviation = _weights(file, at, cells, numbers, known)
        return part, Column(name, kind, int(numbers.has(name, "")), 0, mean, deviation)
    separator = None if kind == "category" else " " if file.has_blanks[at] else _separator(cells)
    lists = [_split(cell, separator) for cell in cells]
    part, left_out = _values(name, lists, numbers)
    return part, Column(name, kind, len(numbers.names) - size + (known.features if known else 0), left_out)


def _guessed(cells: Sequence[Cell]) -> str:
    given = [cell for cell in cells if isinstance(cell, list) or not _is_missing(cell)]
    if any(isinstance(cell, list) for cell in given):
        return "values"
    if given and not any(math.isnan(_number(str(cell))) for cell in given):
        return "number"
    return "values" if any("|" in cell for cell in given) else "category"


def _is_missing(cell: str) -> bool:
    return not cell or cell.lower() in MISSING_WORDS


def _number(cell: str) -> float:
    """Return a finite number, or NaN."""
    try:
        value = float(cell)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) and "_" not in cell else math.nan


def _split(cell: Cell, separator: str | None) -> list[str]:
    """Return the distinct values of a cell, in their order; None: the cell is one."""
    parts = cell if isinstance(cell, list) else [cell] if separator is None else cell.split(separator)
    stripped = (part.strip() for part in parts)
    return list(dict.fromkeys(part for part in stripped if not _is_missing(part)))


def _separator(cells: Sequence[Cell]) -> str:
    """Return what separates the values of a column's cells."""
    text = [cell for cell in cells if isinstance(cell, str)]
    return next((mark for mark in ("|", ";", ",") if any(mark in cell for cell in text)), " ")


def _values(name: str, lists: Sequence[Sequence[str]], numbers: _Numbers) -> tuple[_Part, int]:
    """Return the features of a column, and how many values are left out: new ones of one row alone."""
    counts = Counter(value for values in lists for value in values)
    chosen = {value: numbers.of(name, value) for value in counts if counts[value] > 1 or numbers.has(name, value)}
    pairs = [(row, chosen[value]) for row, values in enumerate(lists) for value in values if value in chosen]
    rows, features = np.array(pairs, np.int64).reshape(-1, 2).T
    return _Part(rows, features, np.ones(len(pairs), np.float32)), len(counts) - len(chosen)


def _weights(
    file: _File, at: int, cells: Sequence[Cell], features: _Numbers, known: Column | None
) -> tuple[_Part, float, float]:
    """Return the feature of a column of numbers, none where all are equal; with the mean and the deviation."""
    given = [(row, cell) for row, cell in enumerate(cells) if isinstance(cell, list) or not _is_missing(cell)]
    numbers = np.array([math.nan if isinstance(cell, list) else _number(cell) for _, cell in given], np.float64)
    bad = np.flatnonzero(np.isnan(numbers))
    if len(bad):
        row, cell = given[int(bad[0])]
        raise DataError(
            f"{file.path} {file.places[row]}: {file.names[at]!r} is not a finite number (found {shown(str(cell))}); "
            f"correct it, or give --feature-kinds {file.names[at]}=category"
        )
    rows = np.array([row for row, _ in given], np.int64)
    mean, deviation = (0.0, 1.0) if known is None else (known.mean, known.deviation)
    if known is None and not np.isin(numbers, (0, 1)).all():
        mean, deviation = float(numbers.mean()), float(numbers.std()) or 1.0
    numbers = (numbers - mean) / deviation
    has = numbers != 0
    feature = features.of(file.names[at], "") if has.any() else 0
    part = _Part(rows[has], np.full(int(has.sum()), feature), numbers[has].astype(np.float32))
    return part, mean, deviation


def _read(given: SideFile, side: str, kinds: Mapping[str, str]) -> _File:
    """Read the whole file."""
    text = TextFile(os.fspath(given.path))
    file = _read_parquet(text.path) if text.magic.startswith(b"PAR1") else _read_text(text, side, given.id_col, kinds)
    if len(file.names) < 2:
        raise DataError(f"{file.path}: has one column; features need a column of ids and at least one other")
    if not file.places:
        raise DataError(f"{file.path}: has a header and no rows")
    for name, count in Counter(file.names).items():
        if count > 1:
            raise DataError(f"{file.path}: {count} columns are called {name!r}; give each a name of its own")
    found = [
        kinds.get(name, kinds.get(str(at), kind))
        for at, (name, kind) in enumerate(zip(file.names, file.kinds, strict=True))
    ]
    return file._replace(kinds=found)


def _read_text(text: TextFile, side: str, id_col: str | None, kinds: Mapping[str, str]) -> _File:
    lines = text.sample_lines()
    separator = find_separator(lines)
    sample = [split_line(text.path, line, separator) for line in lines]
    header = [field.strip() for field in sample[0]]
    has_header = (
        id_col in header
        or well_known(header, _WELL_KNOWN[side]) is not None
        or any(name in kinds and not name.isdecimal() for name in header)
        or looks_like_header(sample, ())
    )
    names = header if has_header else [str(at) for at in range(len(header))]
    columns: list[list[Cell]] = [[] for _ in names]
    places: list[str] = []
    for number, row in TextRows(text, separator, has_header=has_header):
        if len(row) != len(names):
            raise DataError(
                f"{text.path} line {number}: expected {len(names)} columns, found {len(row)}: {shown(', '.join(row))}"
            )
        for name, column, field in zip(names, columns, row, strict=True):
            check_utf8(text.path, number, f"column {name!r}", field)
            column.append(field.strip())
        places.append(f"line {number}")
    types = [name.rpartition(":") for name in names]
    found = [_TYPES.get(kind) if plain else None for plain, _, kind in types]
    names = [(types[at][0] if found[at] else name) or str(at) for at, name in enumerate(names)]
    return _File(text.path, names, [*columns], places, found, [kind == "token_seq" for _, _, kind in types])


def _read_parquet(path: str) -> _File:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except pa.ArrowException as error:
        raise DataError(f"{path}: is damaged Parquet ({str(error).splitlines()[0]})") from error
    columns = [[_cell(value) for value in column.to_pylist()] for column in table.columns]
    places = [f"row {row}" for row in range(len(table))]
    return _File(path, list(table.column_names), [*columns], places, [None] * len(columns), [False] * len(columns))


def _cell(value: object) -> Cell:
    """Return a value of Parquet as text."""
    if isinstance(value, list):
        return ["" if part is None else str(part) for part in value]
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value).strip()
