"""Files of interactions of any form, read into a table of user and item labels.

1. Detect by the first bytes: gzip is unpacked, Parquet has its own reader, other binary files are refused.
2. Detect by the first lines: the separator of fields, columns (equal numbers of fields) or adjacency (different
   numbers), and a header.
3. DuckDB reads Parquet, and text in which every row is sound and has one meaning (`TextPairs._is_plain`), in one
   statement that inserts all rows or none.
4. `TextRows` reads all other text: runs of blanks, adjacency, quotes, malformed rows, text that is not UTF-8. It
   splits fields as Python's `csv` and `str.split` do, and knows the line of each row. It takes four times as long.

DuckDB's table of rejected rows is not used: with ``ignore_errors``, DuckDB 2.0 drops the rows below a quote that is not
closed without an entry in that table, and without ``strict_mode`` it joins them into one field.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bunkbed.train.data.columns import (
    HeaderChoice,
    LayoutChoice,
    find_columns,
    find_others,
    looks_like_header,
    shown,
)
from bunkbed.train.data.sort import Sorter, path_literal
from bunkbed.train.data.text import QUOTING, TextFile, TextRows, check_utf8, find_separator, split_line
from bunkbed.train.data.vocab import DataError

if TYPE_CHECKING:
    import pyarrow as pa

_BLOCK_BYTES = 4 * 1024 * 1024
_BATCH_ROWS = 1 << 17
_SEPARATOR_NAMES = {
    ",": "CSV",
    "\t": "TSV",
    ";": "semicolon-separated",
    "|": "bar-separated",
    "::": "'::'-separated",
}
_SIDES = ("user", "item")
#: What `str.strip` removes, as text in SQL.
_BLANKS = "".join(filter(str.isspace, map(chr, range(0x3001))))


#: User, items, and the further fields of a row with one item.
_Row = tuple[str, list[str], Sequence[str]]


class Pairs(ABC):
    """Reader of one file of interactions.

    Attributes:
        path: the given path, for messages.
        form: how the file is read, as text.
        emptiness: description of the file if it has no pairs.
        is_strict: a malformed row is an error; otherwise it is left out and counted.
        malformed: number of rows that were left out.
        first_malformed: the problem of the first malformed row.
        remedy: advice for a file with mostly malformed rows.
        empty_users: number of adjacency lines of a user without items, which are not malformed.
        others: what the further columns hold, in the order of `insert`.
    """

    path: str
    form: str
    emptiness: str = "a header line"
    is_strict: bool = True
    malformed: int = 0
    first_malformed: str = ""
    remedy: str = ""
    empty_users: int = 0
    others: tuple[str, ...] = ()

    @property
    def types(self) -> tuple[str, str]:
        """SQL types of the labels of users and items."""
        return "VARCHAR", "VARCHAR"

    @abstractmethod
    def insert(self, sorter: Sorter, table: str) -> None:
        """Append user, item and `others` of each sound row to a table, in the order of the file, without blanks around
        text. The others are text, also where they are missing.

        Raises:
            DataError: a row is malformed and the reader is strict; text is not UTF-8; a quote is not closed.
        """

    @abstractmethod
    def raise_value(self, what: str, words: set[str], problem: str) -> None:
        """Raise a `DataError` that names the first row whose `what` ("user", "item" or one of `others`) is one of
        `words`, and says the problem."""

    def check_read(self, num_rows: int) -> None:
        """Check a file after all of it was read, with `num_rows` pairs.

        Raises:
            DataError: no pairs; or more rows are malformed than not, because then the form of the file was not
                recognized, and a model of the few other rows would be useless.
        """
        if self.malformed > num_rows:
            total = self.malformed + num_rows
            count = f"{self.malformed:,} of {total:,}" if num_rows else f"all {total:,}"
            raise DataError(
                f"{self.path}: {count} rows are malformed, read as {self.form}; "
                f"the first: {self.first_malformed}; {self.remedy}"
            )
        if not num_rows:
            raise DataError(f"{self.path}: holds no pairs of user and item, only {self.emptiness}")


def open_pairs(
    path: str | os.PathLike[str],
    *,
    user_col: int | str | None = None,
    item_col: int | str | None = None,
    header: HeaderChoice = "auto",
    layout: LayoutChoice = "auto",
    strict: bool = True,
    others: Mapping[str, int | str] | None = None,
) -> Pairs:
    """Detect the form of a file and return its reader; given arguments restrict the detection.

    Args:
        strict: a malformed row is an error; otherwise it is left out and counted.
        others: names or positions of further columns, by what they hold, such as "time".

    Raises:
        DataError: empty, not text, or its columns are not recognized.
        OSError: the file cannot be opened.
    """
    text = TextFile(os.fspath(path))
    pairs: Pairs
    if text.magic.startswith(b"PAR1"):
        pairs = ParquetPairs(text.path, user_col, item_col, others or {})
    else:
        pairs = TextPairs(text, _find_layout(text, user_col, item_col, header, layout, others or {}))
    pairs.is_strict = strict
    pairs.others = tuple(others or ())
    return pairs


def _find_layout(
    text: TextFile,
    user_col: int | str | None,
    item_col: int | str | None,
    header: HeaderChoice,
    layout: LayoutChoice,
    others: Mapping[str, int | str],
) -> Columns | None:
    """Return the columns of a text file, or None for adjacency lines.

    Raises:
        DataError: a column is asked for that is not there.
    """
    lines = text.sample_lines()
    separator = find_separator(lines)
    rows = [split_line(text.path, line, separator) for line in lines]
    if layout == "auto":
        asked_for_columns = user_col is not None or item_col is not None or header is True or bool(others)
        can_be_adjacency = separator in (None, "\t") and not asked_for_columns
        layout = "adjacency" if can_be_adjacency and _is_ragged(rows, separator) else "columns"
    if layout == "adjacency":
        for what in others:
            raise DataError(
                f"{text.path}: adjacency lines (user item item ...) have no column of {what}s; leave out --{what}-col, "
                "or give a file with one pair a line"
            )
        return None
    has_header = looks_like_header(rows, (user_col, item_col, *others.values())) if header == "auto" else header
    names = [field.strip() for field in rows[0]] if has_header else None
    first = text.blank_lines_above + 1, lines[0]
    user, item = find_columns(text.path, names, len(rows[0]), user_col, item_col, first)
    more = find_others(text.path, names, len(rows[0]), others, (user, item), first)
    return Columns(separator, len(rows[0]), user, item, names, more)


class ParquetPairs(Pairs):
    """Reader of columns of a Parquet file, with DuckDB."""

    emptiness = "a schema"
    remedy = "choose other columns with --user-col and --item-col, or drop such rows"

    def __init__(
        self, path: str, user_col: int | str | None, item_col: int | str | None, others: Mapping[str, int | str]
    ) -> None:
        import duckdb
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        self._source = f"read_parquet({path_literal(path)}, file_row_number = true)"
        try:
            # Several columns may have one name, which DuckDB changes: columns are found by their position.
            names = list(pq.read_schema(path).names)
            with duckdb.connect() as connection:
                described = connection.execute(f"DESCRIBE SELECT * FROM {self._source}").fetchall()
        except (pa.ArrowException, duckdb.Error) as error:
            raise self._damaged(error) from error
        at = find_columns(path, names, len(names), user_col, item_col)
        more = find_others(path, names, len(names), others, at)
        self._names = [names[place] for place in at]
        self._columns = ['"' + described[place][0].replace('"', '""') + '"' for place in (*at, *more.values())]
        #: The further columns as text, by what they hold; times as whole numbers.
        self._others = {
            what: _as_text(column, described[place][1])
            for column, (what, place) in zip(self._columns[2:], more.items(), strict=True)
        }
        self._types = (described[at[0]][1], described[at[1]][1])
        for name, kind in zip(self._names, self._types, strict=True):
            if kind != "VARCHAR" and not re.fullmatch(r"U?(TINY|SMALL|BIG)?INT(EGER)?", kind):
                raise DataError(
                    f"{path}: column {name!r} holds {kind.lower()}, users and items must be integers or strings; "
                    "cast it and write the file again"
                )
        self.form = f"Parquet, {_say_columns(names, *at, more)}"

    @property
    def types(self) -> tuple[str, str]:
        """As `Pairs.types`; text for UBIGINT, because its upper half does not fit BIGINT."""
        user, item = ("VARCHAR" if kind in ("VARCHAR", "UBIGINT") else "BIGINT" for kind in self._types)
        return user, item

    def insert(self, sorter: Sorter, table: str) -> None:
        """As `Pairs.insert`."""
        is_text = [kind == "VARCHAR" for kind in self._types]
        values = [_trimmed(name) if text else name for name, text in zip(self._columns[:2], is_text, strict=True)]
        sound = [f"{name} <> ''" if text else f"{name} IS NOT NULL" for name, text in zip(values, is_text, strict=True)]
        is_sound = " AND ".join(sound)
        with sorter.reading(self._damaged):
            (total,) = sorter.row(f"SELECT count(*) FROM {self._source}")
            wanted = ", ".join([*values, *self._others.values()])
            kept = sorter.insert(f"INSERT INTO {table} SELECT {wanted} FROM {self._source} WHERE {is_sound}")
            self.malformed = total - kept
            if not self.malformed:
                return
            row, user_is_sound = sorter.row(
                f"SELECT file_row_number, ({sound[0]}) IS TRUE FROM {self._source} WHERE ({is_sound}) IS NOT TRUE "
                "ORDER BY file_row_number LIMIT 1"
            )
        side = int(user_is_sound)
        self.first_malformed = f"the {_SIDES[side]} of row {row} (from 0) is missing"
        if self.is_strict:
            self._raise_row(sorter, row, side)

    def _raise_row(self, sorter: Sorter, row: int, side: int) -> None:
        value = sorter.row(f"SELECT {self._columns[side]} FROM {self._source} WHERE file_row_number = {row}")[0]
        if value is None:
            raise DataError(f"{self.path} row {row}: column {self._names[side]!r} is missing (null); drop such rows")
        raise DataError(f"{self.path} row {row}: the {_SIDES[side]} is missing ({shown(value)}); drop such rows")

    def raise_value(self, what: str, words: set[str], problem: str) -> None:
        """As `Pairs.raise_value`."""
        at = (*_SIDES, *self.others).index(what)
        column = self._others[what] if what in self._others else _trimmed(f"CAST({self._columns[at]} AS VARCHAR)")
        listed = ", ".join("'" + word.replace("'", "''") + "'" for word in sorted(words))
        with Sorter(None) as sorter, sorter.reading(self._damaged):
            row, value = sorter.row(
                f"SELECT file_row_number, CAST({self._columns[at]} AS VARCHAR) FROM {self._source} "
                f"WHERE {column} IN ({listed}) ORDER BY file_row_number LIMIT 1"
            )
        found = "null" if value is None else shown(value)
        remedy = f"correct or drop such rows, or give another --{what}-col" if what in self.others else "drop such rows"
        raise DataError(f"{self.path} row {row}: the {what} {problem} ({found}); {remedy}")

    def _damaged(self, error: BaseException) -> DataError:
        return DataError(f"{self.path}: is damaged Parquet ({str(error).splitlines()[0]})")


@dataclass(frozen=True)
class Columns:
    """Positions of users and items in a text file with columns."""

    separator: str | None  # None: any run of blanks
    width: int
    user: int
    item: int
    names: list[str] | None
    others: Mapping[str, int]

    def describe(self) -> str:
        """Return the form as text."""
        kind = "blank-separated" if self.separator is None else _SEPARATOR_NAMES[self.separator]
        return f"{kind}, {_say_columns(self.names, self.user, self.item, self.others)}"

    def place_of(self, what: str) -> int:
        """Return the position of the column that holds "user", "item" or one of `others`."""
        return {"user": self.user, "item": self.item, **self.others}[what]


class TextPairs(Pairs):
    """Reader of a text file with columns, or of ``user item item ...`` lines (`columns` is None)."""

    def __init__(self, text: TextFile, columns: Columns | None) -> None:
        self.path = text.path
        self._text = text
        self._columns = columns
        self._separator = None if columns is None else columns.separator
        self._rows = TextRows(text, self._separator, has_header=columns is not None and columns.names is not None)
        if columns is None:
            self.form = "adjacency lines (user item item ...)"
            self.emptiness = "users without items"
        else:
            self.form = columns.describe()
            self.remedy = (
                f"line {text.blank_lines_above + 1} says how many columns there are: correct it, or the rows below; "
                "other columns are chosen with --user-col and --item-col"
            )

    def insert(self, sorter: Sorter, table: str) -> None:
        """As `Pairs.insert`."""
        import pyarrow as pa

        if self._insert_plain(sorter, table):
            return
        schema = pa.schema([(name, pa.string()) for name in (*_SIDES, *self.others)])
        labels = self._lines_of_items() if self._columns is None else self._sound_rows(self._columns)
        sorter.stream("source", schema, _batches(labels, schema))
        sorter.insert(f"INSERT INTO {table} SELECT * FROM source")

    def _insert_plain(self, sorter: Sorter, table: str) -> bool:
        """Insert all rows with DuckDB and return True, or none."""
        columns, separator = self._columns, self._separator
        if columns is None or separator is None or self._text.blank_lines_above or not self._is_plain():
            return False
        labels = [_trimmed(f"f{at}") for at in (columns.user, columns.item)]
        values = [f"CASE WHEN {label} <> '' THEN {label} ELSE error('missing') END" for label in labels]
        values += [f"coalesce({_trimmed(f'f{at}')}, '')" for at in columns.others.values()]
        names = ", ".join(f"'f{at}': 'VARCHAR'" for at in range(columns.width))
        return sorter.attempt(
            f"INSERT INTO {table} SELECT {', '.join(values)} FROM read_csv({path_literal(self.path)}, "
            f"columns = {{{names}}}, auto_detect = false, header = false, skip = {int(columns.names is not None)}, "
            f"delim = '{separator}', quote = '', escape = '', strict_mode = true, "
            f"compression = '{'gzip' if self._text.is_gzip else 'none'}')"
        )

    def _is_plain(self) -> bool:
        """Return whether DuckDB would see the rows of `TextRows`, if it accepts the text.

        It drops blanks around a quoted field, misses a quote that is not closed in a column that is not selected, and
        keeps a lone carriage return in its field. It does not verify the checksums of gzip: they are verified here.
        """
        is_plain = True
        last = b""
        with self._text.guarded() as file:
            while (part := file.read(_BLOCK_BYTES)) and (is_plain or self._text.is_gzip):
                block = last + part
                is_plain = is_plain and not (self._separator in QUOTING and b'"' in block)
                if is_plain and b"\r" in block:
                    is_plain = block.count(b"\r") - block.endswith(b"\r") == block.count(b"\r\n")
                last = block[-1:]
        return is_plain and last != b"\r"

    def _sound_rows(self, columns: Columns) -> Iterator[_Row]:
        """Yield user, item and further fields of each row with both; leave out and count the other rows."""
        wanted = (("user", columns.user), ("item", columns.item))
        others = tuple(columns.others.items())
        for number, row in self._rows:
            problem = ""
            if len(row) != columns.width:
                if not (self._separator or "").join(row).strip():  # tabs, but fewer than columns: blank
                    continue
                found = shown(", ".join(row))
                problem = f"line {number}: expected {columns.width} columns, found {len(row)}: {found}"
            else:
                user, item = row[columns.user].strip(), row[columns.item].strip()
                if user and item:
                    if not (user.isascii() and item.isascii()):
                        for what, at in wanted:
                            check_utf8(self.path, number, what, row[at])
                    for what, at in others:
                        check_utf8(self.path, number, what, row[at])
                    yield user, [item], [row[at].strip() for _, at in others]
                    continue
                what, at = wanted[bool(user)]
                problem = f"line {number}: the {what} is missing (found {row[at]!r})"
            if self.is_strict and self._separator not in QUOTING:
                raise DataError(f"{self.path} {problem}")
            self.malformed += 1
            self.first_malformed = self.first_malformed or problem
        if self.is_strict and self.malformed:  # only now, because a quote that is not closed is the worse mistake
            raise DataError(f"{self.path} {self.first_malformed}")

    def _lines_of_items(self) -> Iterator[_Row]:
        """Yield user and items of each adjacency line."""
        for number, row in self._rows:
            for field in row:
                check_utf8(self.path, number, "line", field)
            self.empty_users += len(row) == 1
            yield row[0], row[1:], ()

    def raise_value(self, what: str, words: set[str], problem: str) -> None:
        """As `Pairs.raise_value`."""
        columns = self._columns
        for number, row in self._rows:
            if columns is None:
                fields = row[:1] if what == "user" else row[1:]
            else:
                is_sound = len(row) == columns.width and row[columns.user].strip() and row[columns.item].strip()
                fields = [row[columns.place_of(what)]] if is_sound else []
            for field in fields:
                if field.strip() in words:
                    remedy = f"; correct or drop such rows, or give another --{what}-col" if what in self.others else ""
                    raise DataError(f"{self.path} line {number}: the {what} {problem} (found {field!r}){remedy}")


def read_candidate_lines(path: str | os.PathLike[str]) -> tuple[pa.Array, pa.Array, int]:
    """Read ``(user,item)<TAB>negative ...`` lines.

    Returns:
        User labels ``[Q]``, item labels ``[Q * (1 + C)]`` (the held-out item first in each row), and C.

    Raises:
        DataError: a line of another form, or with another number of negatives.
    """
    import pyarrow as pa

    text = TextFile(os.fspath(path))
    text.sample_lines()
    users: list[str] = []
    items: list[str] = []
    width = 0
    for number, line in text.lines():
        row = line.split()
        if not row:
            continue
        pair = re.fullmatch(r"\(([^,]+),([^,]+)\)", row[0])
        if pair is None or len(row) < 2:
            raise DataError(
                f"{text.path} line {number}: expected '(user,item)' and its negatives separated by tabs, "
                f"found {shown(line)}"
            )
        if width and len(row) - 1 != width:
            raise DataError(
                f"{text.path} line {number}: has {len(row) - 1} negatives where the lines above have {width}"
            )
        width = len(row) - 1
        for field in row:
            check_utf8(text.path, number, "line", field)
        users.append(pair[1])
        items.append(pair[2])
        items += row[1:]
    return pa.array(users, pa.string()), pa.array(items, pa.string()), width


def _batches(rows: Iterator[_Row], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    def batch() -> pa.RecordBatch:
        return pa.record_batch([pa.array(column, pa.string()) for column in (users, items, *others)], schema=schema)

    users: list[str] = []
    items: list[str] = []
    others: list[list[str]] = [[] for _ in schema.names[2:]]
    for user, of_user, others_of_user in rows:
        users += [user] * len(of_user)
        items += of_user
        for column, value in zip(others, others_of_user, strict=True):
            column.append(value)
        if len(items) >= _BATCH_ROWS:
            yield batch()
            users, items, others = [], [], [[] for _ in others]
    yield batch()


def _say_columns(names: Sequence[str] | None, user: int, item: int, others: Mapping[str, int]) -> str:
    """Return the positions of columns as text."""
    places = {"user": user, "item": item, **others}
    return ", ".join(f"{what}s from column {repr(names[at]) if names else at}" for what, at in places.items())


def _as_text(column: str, kind: str) -> str:
    """Return SQL for a Parquet column of an SQL type as text; dates and times as numbers."""
    if kind.startswith(("TIMESTAMP", "DATE")):
        column = f"{'epoch_ns' if kind == 'TIMESTAMP_NS' else 'epoch_us'}({column})"
    text = f"coalesce(CAST({column} AS VARCHAR), '')"
    return _trimmed(text) if kind == "VARCHAR" else text


def _trimmed(column: str) -> str:
    """Return SQL for a text without the blanks around it. All ASCII blanks sort up to the space."""
    is_trimmed = f"strlen({column}) = length({column}) AND left({column}, 1) > ' ' AND right({column}, 1) > ' '"
    return f"CASE WHEN {is_trimmed} THEN {column} ELSE trim({column}, '{_BLANKS}') END"


def _is_ragged(rows: list[list[str]], separator: str | None) -> bool:
    """Return whether most lines differ in length (adjacency), or only few (malformed lines)."""
    share = Counter(map(len, rows)).most_common(1)[0][1] / len(rows)
    # Blanks mostly separate adjacency, tabs mostly columns, so tabs need more evidence.
    return share < (0.75 if separator is None else 0.5)
