"""Side features of users or items from a file with one row an id, as `Features`.

Each other column is a feature of one kind:

- ``"category"``: each value is a feature of weight 1.
- ``"values"``: several values, each a feature of weight 1, between ``|``, ``;``, ``,`` or blanks: the first of these
  that the column has anywhere. A list column of Parquet is of this kind. RecBole's ``token_seq`` has blanks.
- ``"number"``: one feature, whose weight is the number, less the mean of the column, divided by its standard deviation.
  Numbers that are all 0 or 1 are weights as they are.
- ``"skip"``: none.

Kinds that are not given: of a name such as ``genre:token_seq``, as RecBole writes it, the type says the kind; otherwise
columns of numbers are numbers, text with a ``|`` is values, and other text is categories. A missing value is no
feature. A value that one id alone has says nothing about others, so it gets no row.

Features keep their numbers, and columns their kinds, separators, means and deviations, when a run gets a later file
(``before``): the rows of the features are trained by then. The later file says all: features of ids that it does not
have are gone.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from bunkbed.core.types import Json
from bunkbed.train.data.columns import ITEM_NAMES, USER_NAMES, looks_like_header, named_columns, shown
from bunkbed.train.data.interactions import Interactions
from bunkbed.train.data.reading import INTEGER, MISSING_WORDS
from bunkbed.train.data.store import load_vocabs, write_rows
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
_WELL_KNOWN = {"user": USER_NAMES, "item": ITEM_NAMES}
# A standard deviation below this part of the mean is that of rounding.
_LEAST_DEVIATION = 1e-9
# A weight is at most this, or the most that a number can be among so many.
_FURTHEST = 1000.0
#: Kinds of the types in RecBole's names of columns.
_TYPES = {"token": "category", "token_seq": "values", "float": "number"}
#: One value, or the values of a list column.
Cell = str | list[str]


class SideFile(NamedTuple):
    """A file of features.

    Attributes:
        path: of the file.
        id_col: name of the column of ids, if the file has it; otherwise a well-known name, or the first column.
        header: whether line 1 names the columns; None: detected.
    """

    path: Path
    id_col: str | None = None
    header: bool | None = None


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
        separator: of values.
    """

    name: str
    kind: str
    features: int
    left_out: int = 0
    mean: float = 0.0
    deviation: float = 1.0
    separator: str = ""


class _Before(NamedTuple):
    """What a run already knows of one side: features, column and value of each, columns by name, and those skipped."""

    features: Features
    names: list[tuple[str, str]]
    columns: dict[str, Column]
    skipped: Collection[str]


class _Found(NamedTuple):
    """The features of one side before it is known which ids have pairs, their names, and what is said of them."""

    features: Features
    names: list[tuple[str, str]]
    about: Json


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
    trained: Callable[[], Interactions],
    before: Path | None = None,
) -> Json:
    """Read files of features into a dataset's folder; ids without interactions become users or items without pairs.

    Args:
        folder: has a dataset (`bunkbed.train.data.store.save_dataset`).
        files: by side, ``"user"`` or ``"item"``.
        kinds: of columns, by name or position.
        trained: returns the pairs that are trained on, without those held out. It is called when `folder` has all ids.
        before: the folder of the run's smaller dataset with features, whose ids are the first ones of `folder`. A side
            without a file keeps its features, and its new ids have none.

    Returns:
        By side: ``source``; ``ids``, of the file; ``id_column``; ``new``, ids without interactions; ``features``, of
        all columns; ``columns``, as `Column`; ``skipped``, names of others; of a later file ``lost``, ids that had
        features and are not there, and ``absent``, columns that are not there.

    Raises:
        DataError: a file cannot be read, has rows of unequal length, an id twice or missing, no id of the interactions,
            two columns of one name, no clear header or column of ids, or a number that is none or too far from the
            others; or no file has a column of `kinds`; or the run has no features of a file's side, or another kind of
            a column. OSError: a file cannot be read or written.
    """
    found: dict[str, _Found] = {}
    named: list[str] = []
    known: Json = {} if before is None else read_about(before)
    for side in SIDES:
        if side in files:
            if before is not None and side not in known:
                raise DataError(f"{files[side].path}: the run has no features of {side}s; start a new run with them")
            vocab = load_vocabs(folder)[SIDES.index(side)]
            file = _read(files[side], side, kinds, vocab)
            named += file.names
            of_side = None
            if before is not None:
                columns = {each["name"]: Column(**each) for each in known[side]["columns"]}
                of_side = _Before(
                    load_features(before)[side], read_names(before, side), columns, known[side]["skipped"]
                )
                _refuse_other_kinds(file, columns, kinds)
            found[side] = _features(folder, side, vocab, file, files[side].id_col, kinds, of_side)
        elif before is not None and side in known:
            count = len(load_vocabs(folder)[SIDES.index(side)])
            grown = load_features(before)[side].grown(count, shared=side == "user")
            found[side] = _Found(grown, read_names(before, side), known[side])
    for name in kinds:
        if name not in named and not (name.isdecimal() and named):
            raise DataError(
                f"{', '.join(str(file.path) for file in files.values())}: no column {name!r}, which --feature-kinds "
                f"names; there are {', '.join(named)}"
            )
    if found:
        pairs = trained()
        for side, (features, names, _) in found.items():
            write_features(folder, side, features.with_pairs(_has_pairs(pairs, side, len(features))), names)
        write_about(folder, {side: of_side.about for side, of_side in found.items()})
    return {side: of_side.about for side, of_side in found.items()}


def _refuse_other_kinds(file: _File, columns: Mapping[str, Column], kinds: Mapping[str, str]) -> None:
    """Raise where `kinds` change what a run knows of a column."""
    for at, name in enumerate(file.names):
        kind = kinds.get(name, kinds.get(str(at)))
        if name in columns and kind not in (None, columns[name].kind):
            raise DataError(
                f"{file.path}: column {name!r} is of kind {columns[name].kind} in this run and cannot become {kind}; "
                "start a new run for it"
            )


def _features(
    folder: Path,
    side: str,
    vocab: Vocab,
    file: _File,
    id_col: str | None,
    kinds: Mapping[str, str],
    before: _Before | None,
) -> _Found:
    """Return the features of a file; write the labels of ids that have no interactions."""
    at = _id_column(file, side, id_col)
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
    skipped = []
    for place, cells in enumerate(file.columns):
        name = file.names[place]
        known = None if before is None else before.columns.get(name)
        is_given = name in kinds or str(place) in kinds
        if file.kinds[place] == "skip" or (before is not None and name in before.skipped and not is_given):
            skipped.append(name)
        elif place != at:
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
    features = _joined(parts, len(numbers.names), len(grown))
    about: Json = {"source": file.path, "ids": len(ids), "id_column": file.names[at], "new": new}
    about |= {"features": len(numbers.names), "columns": [asdict(column) for column in columns], "skipped": skipped}
    if before is not None:
        kept = {column.name for column in columns}
        about["columns"] += [asdict(column) for name, column in before.columns.items() if name not in kept]
        had = np.diff(before.features.starts) > (side == "user")
        had[ids[ids < len(had)]] = False
        about |= {"lost": int(had.sum()), "absent": [name for name in before.columns if name not in file.names]}
    return _Found(features, numbers.names, about)


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


def _joined(parts: Sequence[_Part], num_features: int, count: int) -> Features:
    """Return the features of all columns, by id; those of an id are in the order of the columns."""
    rows, features, weights = (np.concatenate([part[field] for part in parts]) for field in range(3))
    order = np.argsort(rows, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))])
    return Features(starts, features[order], weights[order], num_features, np.ones(count, np.bool_))


def _has_pairs(pairs: Interactions, side: str, count: int) -> npt.NDArray[np.bool_]:
    found = np.zeros(count, np.bool_)
    for pair in pairs.batches():
        found[pair[SIDES.index(side)]] = True
    return found


def _id_column(file: _File, side: str, id_col: str | None) -> int:
    """Return the position of the column of ids.

    Raises:
        DataError: several columns, or that of the other side, may be it.
    """
    if _is_name(id_col) and id_col in file.names:
        return file.names.index(id_col)
    for names in (_WELL_KNOWN[side], frozenset(("id",))):
        found = named_columns(file.names, names)
        if len(found) > 1:
            raise DataError(
                f"{file.path}: cannot tell which column holds the {side}s: "
                f"{', '.join(repr(file.names[at]) for at in found)}; rename the others, or name it as the interactions "
                f"do and give --{side}-col"
            )
        if found:
            return found[0]
    other = SIDES[1 - SIDES.index(side)]
    if named_columns(file.names[:1], _WELL_KNOWN[other]):
        raise DataError(
            f"{file.path}: the first column, {file.names[0]!r}, holds {other}s; give it with --{other}-features, or "
            f"name the column of {side}s"
        )
    return 0


def _is_name(col: str | None) -> bool:
    """Return whether an option names a column, not a position."""
    return col is not None and not col.isdecimal()


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
    separator = ""
    if kind == "values":
        separator = (known and known.separator) or (" " if file.has_blanks[at] else _separator(cells))
    lists = [_split(cell, separator or None) for cell in cells]
    part, left_out = _values(name, lists, numbers)
    size = len(numbers.names) - size + (known.features if known else 0)
    return part, Column(name, kind, size, left_out, separator=separator)


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
    """Return what separates the values of a column's cells; nothing where all are lists."""
    text = [cell for cell in cells if isinstance(cell, str) and cell]
    return "" if not text else next((mark for mark in ("|", ";", ",") if any(mark in cell for cell in text)), " ")


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
    is_known = known is not None and features.has(known.name, "")
    mean, deviation = (known.mean, known.deviation) if known is not None and is_known else (0.0, 1.0)
    if not is_known and not np.isin(numbers, (0, 1)).all():
        with np.errstate(over="ignore", invalid="ignore"):
            mean, deviation = float(numbers.mean()), float(numbers.std())
        if not math.isfinite(deviation):
            deviation = math.nan  # no number is a weight
        elif deviation <= _LEAST_DEVIATION * abs(mean):
            deviation = math.inf  # all are equal, but for rounding
    numbers = (numbers - mean) / deviation
    far = np.flatnonzero(~(np.abs(numbers) <= max(_FURTHEST, len(numbers) ** 0.5)))
    if len(far):
        row, cell = given[int(far[0])]
        raise DataError(
            f"{file.path} {file.places[row]}: {file.names[at]!r} is too far from the other numbers to be a weight "
            f"(found {shown(str(cell))}); correct it, or give --feature-kinds {file.names[at]}=category"
        )
    deviation = deviation if math.isfinite(deviation) else 1.0
    has = numbers != 0
    feature = features.of(file.names[at], "") if has.any() else 0
    part = _Part(rows[has], np.full(int(has.sum()), feature), numbers[has].astype(np.float32))
    return part, mean, deviation


def _read(given: SideFile, side: str, kinds: Mapping[str, str], vocab: Vocab) -> _File:
    """Read the whole file."""
    text = TextFile(os.fspath(given.path))
    file = (
        _read_parquet(text.path, kinds)
        if text.magic.startswith(b"PAR1")
        else _read_text(text, side, given, kinds, vocab)
    )
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


def _read_text(text: TextFile, side: str, given: SideFile, kinds: Mapping[str, str], vocab: Vocab) -> _File:
    lines = text.sample_lines()
    separator = find_separator(lines)
    sample = [split_line(text.path, line, separator) for line in lines]
    header = [field.strip() for field in sample[0]]
    has_header = given.header
    if has_header is None:
        has_header = _is_header(text.path, side, sample, {given.id_col, *kinds}, vocab)
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
    is_typed = [bool(plain) and kind in (*_TYPES, "float_seq") for plain, _, kind in types]
    names = [(types[at][0] if is_typed[at] else name) or str(at) for at, name in enumerate(names)]
    for name, (_, _, kind) in zip(names, types, strict=True):
        if kind == "float_seq" and kinds.get(name) != "skip":
            raise DataError(
                f"{text.path}: column {name!r} holds lists of numbers, which are no features; give --feature-kinds "
                f"{name}=skip"
            )
    return _File(text.path, names, [*columns], places, found, [kind == "token_seq" for _, _, kind in types])


def _is_header(
    path: str, side: str, sample: Sequence[Sequence[str]], asked: Collection[str | None], vocab: Vocab
) -> bool:
    """Return whether the first row names the columns.

    Raises:
        DataError: it may be a header or an id that has no interactions.
    """
    header = [field.strip() for field in sample[0]]
    if any(_is_name(name) and name in header for name in asked):
        return True
    if named_columns(header, _WELL_KNOWN[side] | {"id"}) or any(name.rpartition(":")[2] in _TYPES for name in header):
        return True
    known = vocab.encode([row[0].strip() for row in sample]) >= 0
    if known[0]:
        return False
    if looks_like_header(sample, ()):
        return True
    if known[1:].sum() * 2 < len(known) - 1 or len(known) < 2:
        return False
    raise DataError(
        f"{path}: line 1 is a header, or {header[0]!r} is one of the {side}s and has no interactions; --header or "
        "--no-header says which, for all files"
    )


def _read_parquet(path: str, kinds: Mapping[str, str]) -> _File:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except pa.ArrowException as error:
        raise DataError(f"{path}: is damaged Parquet ({str(error).splitlines()[0]})") from error
    for field in table.schema:
        kind = field.type
        of_list = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind
        is_odd = pa.types.is_nested(of_list) or (of_list is not kind and pa.types.is_floating(of_list))
        if is_odd and kinds.get(field.name) != "skip":
            raise DataError(
                f"{path}: column {field.name!r} holds {kind}, which is no feature; give --feature-kinds "
                f"{field.name}=skip"
            )
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
