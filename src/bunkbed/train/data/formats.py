"""Files of interactions of any form, read as batches of (user labels, item labels).

1. Detect by the first bytes: gzip is unpacked, Parquet has its own reader, other binary files are refused.
2. Detect by the first lines: the separator of fields, columns (equal numbers of fields) or adjacency (different
   numbers), and a header.
3. Stream: Arrow's CSV reader for one-character separators, a plain line reader for blanks and adjacency.
4. If Arrow refuses a line, read again with the plain reader to find the line and its content, because Arrow's messages
   count rows of a block, not lines of the file.
5. Not strict: rows with another number of columns, or without a user or an item, are left out and counted. If there are
   such rows, the file is read again up to the first one, to find its line.
6. An unclosed quote takes the lines below into its field without an error of Arrow. If a file with quotes has more
   lines than rows, the plain reader checks it, to distinguish an unclosed quote from a text of several lines.
"""

from __future__ import annotations

import csv
import os
import re
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from bunkbed.train.data.columns import HeaderChoice, LayoutChoice, find_columns, looks_like_header, shown
from bunkbed.train.data.pairs import Pairs
from bunkbed.train.data.text import CountedLines, TextFile, check_utf8, text_of
from bunkbed.train.data.vocab import DataError

if TYPE_CHECKING:
    import pyarrow as pa

_BLOCK_BYTES = 4 * 1024 * 1024
# Only files with these separators quote fields; a single quote in a TSV title is an ordinary character.
_QUOTING = {",", ";"}
_SEPARATOR_NAMES = {
    ",": "CSV",
    "\t": "TSV",
    ";": "semicolon-separated",
    "|": "bar-separated",
    "::": "'::'-separated",
}


def open_pairs(
    path: str | os.PathLike[str],
    *,
    user_col: int | str | None = None,
    item_col: int | str | None = None,
    header: HeaderChoice = "auto",
    layout: LayoutChoice = "auto",
    strict: bool = True,
) -> Pairs:
    """Detect the form of a file and return its reader; given arguments restrict the detection.

    Args:
        strict: a malformed row is an error; otherwise it is left out and counted.

    Raises:
        DataError: empty, not text, or its columns are not recognized.
        OSError: the file cannot be opened.
    """
    pairs = _open_pairs(os.fspath(path), user_col, item_col, header, layout)
    pairs.is_strict = strict
    return pairs


def _open_pairs(
    name: str, user_col: int | str | None, item_col: int | str | None, header: HeaderChoice, layout: LayoutChoice
) -> Pairs:
    text = TextFile(name)
    if text.magic.startswith(b"PAR1"):
        return ParquetPairs(name, user_col, item_col)
    lines = text.sample_lines()
    separator = _find_separator(lines)
    rows = [_split(name, line, separator) for line in lines]
    if layout == "auto":
        asked_for_columns = user_col is not None or item_col is not None or header is True
        can_be_adjacency = separator in (None, "\t") and not asked_for_columns
        layout = "adjacency" if can_be_adjacency and _is_ragged(rows, separator) else "columns"
    if layout == "adjacency":
        return AdjacencyPairs(text)
    has_header = looks_like_header(rows, user_col, item_col) if header == "auto" else header
    names = [field.strip() for field in rows[0]] if has_header else None
    columns = find_columns(
        name,
        names,
        len(rows[0]),
        user_col,
        item_col,
        first_line=lines[0],
        first_line_number=text.blank_lines_above + 1,
    )
    where = Layout(separator, len(rows[0]), columns[0], columns[1], names)
    return BlankSeparatedPairs(text, where) if separator is None else DelimitedPairs(text, where)


@dataclass(frozen=True)
class Layout:
    """Positions of users and items in a text file with columns."""

    separator: str | None  # None: any run of blanks
    width: int
    user: int
    item: int
    names: list[str] | None

    def describe(self) -> str:
        kind = "blank-separated" if self.separator is None else _SEPARATOR_NAMES[self.separator]
        where = [repr(self.names[at]) if self.names else str(at) for at in (self.user, self.item)]
        return f"{kind}, users from column {where[0]}, items from column {where[1]}"


class ParquetPairs(Pairs):
    """Reader of two columns of a Parquet file."""

    emptiness = "a schema"
    remedy = "choose other columns with --user-col and --item-col, or drop such rows"

    def __init__(self, path: str, user_col: int | str | None, item_col: int | str | None) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        try:
            self._schema = pq.read_schema(path)
        except pa.ArrowException as error:
            raise DataError(f"{path}: is damaged Parquet ({_first_line(error)})") from error
        names = list(self._schema.names)
        user, item = find_columns(path, names, len(names), user_col, item_col)
        self._columns = [names[user], names[item]]
        # Several columns may have one name: all these columns are read, and the rank selects one.
        self._ranks = [names[:at].count(names[at]) for at in (user, item)]
        for at in (user, item):
            self._check_type(names[at], self._schema.field(at).type)
        self.form = f"Parquet, users from column {self._columns[0]!r}, items from column {self._columns[1]!r}"

    def _check_type(self, name: str, kind: pa.DataType) -> None:
        import pyarrow as pa

        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(
                f"{self.path}: column {name!r} holds {kind}, users and items must be integers or strings; "
                "cast it and write the file again"
            )

    def batches(self) -> Iterator[tuple[pa.Array, pa.Array]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        done = 0
        try:
            with pq.ParquetFile(self.path) as file:
                # One group at a time: given all groups, Arrow keeps the bytes of finished groups.
                groups = (
                    file.iter_batches(row_groups=[at], columns=self._columns) for at in range(file.num_row_groups)
                )
                for batch in chain.from_iterable(groups):
                    columns = [
                        batch.column(sorted(batch.schema.get_all_field_indices(name))[rank])
                        for name, rank in zip(self._columns, self._ranks, strict=True)
                    ]
                    for name, column in zip(self._columns, columns, strict=True):
                        if column.null_count and self.is_strict:
                            at = done + column.is_null().to_pylist().index(True)
                            raise DataError(f"{self.path} row {at}: column {name!r} is missing (null); drop such rows")
                    # A dictionary may have labels in another order, and labels that no row has.
                    plain = [
                        column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
                        for column in columns
                    ]
                    yield plain[0], plain[1]
                    done += len(batch)
        except pa.ArrowException as error:
            raise DataError(f"{self.path}: is damaged Parquet ({_first_line(error)})") from error

    def raise_missing(self, what: str, words: set[str]) -> None:
        import pyarrow as pa

        done = 0
        for columns in self.batches():
            labels = columns[0 if what == "user" else 1].cast(pa.string()).to_pylist()
            for at, label in enumerate(labels):
                if label is not None and label.strip() in words:
                    raise DataError(
                        f"{self.path} row {done + at}: the {what} is missing ({shown(label)}); drop such rows"
                    )
            done += len(labels)


class DelimitedPairs(Pairs):
    """Reader of columns separated by one character (or ``::``), with Arrow."""

    def __init__(self, text: TextFile, layout: Layout) -> None:
        self.path = text.path
        self._text = text
        self._layout = layout
        self.form = layout.describe()
        self.remedy = _layout_remedy(text)
        self._num_ragged = 0
        self._quoted = layout.separator in _QUOTING

    def batches(self) -> Iterator[tuple[pa.Array, pa.Array]]:
        import pyarrow as pa
        import pyarrow.csv as arrow_csv

        layout = self._layout
        assert layout.separator is not None
        # Arrow separates by one character; an unused empty column is between the two ':'.
        stride = len(layout.separator)
        names = [f"f{at}" for at in range((layout.width - 1) * stride + 1)]
        columns = [f"f{layout.user * stride}", f"f{layout.item * stride}"]
        try:
            with self._text.guarded() as file:
                counted = CountedLines(file) if self._quoted else None
                reader = arrow_csv.open_csv(
                    counted or file,
                    read_options=arrow_csv.ReadOptions(
                        use_threads=False,
                        column_names=names,
                        # Counts lines; the next option counts rows: a header of several lines, or a blank line, is one.
                        skip_rows=self._text.blank_lines_above,
                        skip_rows_after_names=1 if layout.names is not None else 0,
                        block_size=_BLOCK_BYTES,
                    ),
                    parse_options=arrow_csv.ParseOptions(
                        delimiter=layout.separator[0],
                        quote_char='"' if self._quoted else False,
                        newlines_in_values=self._quoted,
                        invalid_row_handler=self._take_row,
                    ),
                    convert_options=arrow_csv.ConvertOptions(
                        include_columns=columns, column_types=dict.fromkeys(columns, pa.string())
                    ),
                )
                num_rows = 0
                for batch in reader:
                    num_rows += len(batch)
                    yield batch.column(0), batch.column(1)
            if counted is not None and counted.has_quotes:
                num_rows += self._num_ragged + (layout.names is not None) + self._text.blank_lines_above
                if counted.num_lines > num_rows:
                    self._check_quotes()
        except pa.ArrowInvalid as error:
            self._raise_first_bad_line(set())
            message = f"{self.path}: cannot be read as {layout.describe()} ({_first_line(error)})"
            raise DataError(message) from error

    def raise_missing(self, what: str, words: set[str]) -> None:
        self._raise_first_bad_line(words, only=what)

    def _take_row(self, row: Any) -> Literal["skip", "error"]:
        if not row.text.strip():
            return "skip"  # blank, like an empty line
        if self.is_strict:
            return "error"
        # Arrow sees a column between the two ':' of a separator.
        stride = len(self._layout.separator or ",")
        found = (row.actual_columns - 1) // stride + 1
        self._num_ragged += 1
        self._leave_out(1, f"expected {self._layout.width} columns, found {found}: {shown(row.text)}", self._done)
        return "skip"

    def _rows(self, skip: int = 0) -> Iterator[tuple[int, list[str]]]:
        """Yield line number and fields of each row below the header that is not blank, with Python's reader.

        Args:
            skip: number of rows to skip, including blank ones.
        """
        above = self._text.blank_lines_above
        has_header = self._layout.names is not None
        if not self._quoted:
            separator = self._layout.separator or ","
            for number, content in self._text.lines(above + has_header + skip):
                if content.strip() or separator in content:
                    yield number, content.split(separator)
            return
        line = above + 1
        try:
            with self._text.guarded() as file:
                text = text_of(file)
                deque(islice(text, above), maxlen=0)
                reader = csv.reader(text, delimiter=self._layout.separator or ",")
                deque(islice(reader, has_header + skip), maxlen=0)
                line = above + reader.line_num + 1
                for row in reader:
                    if len(row) > 1 or (row and row[0].strip()):
                        yield line, row
                    line = above + reader.line_num + 1
        except csv.Error as error:
            self._raise_open_quote(line, error)

    def _check_quotes(self) -> None:
        """Raise a `DataError` for a quoted field of several lines that is not closed.

        A field of several lines and more than 131,072 characters, Python's limit, counts as not closed: no label or
        title is that long, and the lines in the field would be lost without an error.
        """
        with self._text.guarded() as file:
            reader = csv.reader(text_of(file), delimiter=self._layout.separator or ",", strict=True)
            line = 1
            while True:
                try:
                    for _ in reader:
                        line = reader.line_num + 1
                    return
                except csv.Error as error:
                    # Within one line, odd quotes do not affect other rows; Arrow reads them as text.
                    if reader.line_num > line:
                        self._raise_open_quote(line, error)
                    line = reader.line_num + 1

    def _raise_open_quote(self, number: int, error: csv.Error) -> NoReturn:
        _, line = next(self._text.lines(number - 1), (number, ""))
        raise _open_quote(f"{self.path} line {number}", line, error) from error

    def _first_problem(self, skip: int) -> str:
        layout = self._layout
        with suppress(DataError):  # a field too long for Python's reader, but not for Arrow
            for number, row in self._rows(skip):
                if len(row) != layout.width:
                    return _ragged(number, layout.width, row)
                for what, column in (("user", layout.user), ("item", layout.item)):
                    if not row[column].strip():
                        return f"line {number}: the {what} is missing (found {row[column]!r})"
        return ""

    def _raise_first_bad_line(self, words: set[str], *, only: str | None = None) -> None:
        layout = self._layout
        wanted = [("user", layout.user), ("item", layout.item)]
        for number, row in self._rows():
            if len(row) != layout.width:
                if self.is_strict:
                    raise DataError(f"{self.path} {_ragged(number, layout.width, row)}")
                continue
            for what, column in wanted:
                field = row[column]
                if only in (None, what) and words and field.strip() in words:
                    raise DataError(f"{self.path} line {number}: the {what} is missing (found {field!r})")
                check_utf8(self.path, number, what, field)


class BlankSeparatedPairs(Pairs):
    """Reader of columns separated by runs of blanks."""

    def __init__(self, text: TextFile, layout: Layout) -> None:
        self.path = text.path
        self._text = text
        self._layout = layout
        self.form = layout.describe()
        self.remedy = _layout_remedy(text)

    def batches(self) -> Iterator[tuple[pa.Array, pa.Array]]:
        import pyarrow as pa

        layout = self._layout
        users: list[str] = []
        items: list[str] = []
        for number, row in self._rows():
            if len(row) != layout.width:
                problem = _ragged(number, layout.width, row)
                if self.is_strict:
                    raise DataError(f"{self.path} {problem}")
                self._leave_out(1, problem, self._done)
                continue
            for what, at in (("user", layout.user), ("item", layout.item)):
                check_utf8(self.path, number, what, row[at])
            users.append(row[layout.user])
            items.append(row[layout.item])
            if len(users) >= 1 << 18:
                yield pa.array(users, pa.string()), pa.array(items, pa.string())
                users, items = [], []
        yield pa.array(users, pa.string()), pa.array(items, pa.string())

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        is_header = self._layout.names is not None
        for number, line in self._text.lines():
            row = line.split()
            if row and is_header:
                is_header = False
            elif row:
                yield number, row

    def raise_missing(self, what: str, words: set[str]) -> None:
        at = self._layout.user if what == "user" else self._layout.item
        for number, row in self._rows():
            if len(row) == self._layout.width and row[at] in words:
                raise DataError(f"{self.path} line {number}: the {what} is missing (found {row[at]!r})")


class AdjacencyPairs(Pairs):
    """Reader of ``user item item ...`` lines, separated by blanks; a user without items is left out and counted."""

    emptiness = "users without items"

    def __init__(self, text: TextFile) -> None:
        self.path = text.path
        self._text = text
        self.form = "adjacency lines (user item item ...)"

    def batches(self) -> Iterator[tuple[pa.Array, pa.Array]]:
        import pyarrow as pa

        users: list[str] = []
        items: list[str] = []
        for number, line in self._text.lines():
            row = line.split()
            if not row:
                continue
            if not line.isascii():
                for field in row:
                    check_utf8(self.path, number, "line", field)
            self.empty_users += len(row) == 1
            users += [row[0]] * (len(row) - 1)
            items += row[1:]
            if len(items) >= 1 << 18:
                yield pa.array(users, pa.string()), pa.array(items, pa.string())
                users, items = [], []
        yield pa.array(users, pa.string()), pa.array(items, pa.string())

    def raise_missing(self, what: str, words: set[str]) -> None:
        for number, line in self._text.lines():
            row = line.split()
            fields = row[:1] if what == "user" else row[1:]
            for field in fields:
                if field in words:
                    raise DataError(f"{self.path} line {number}: the {what} is missing (found {field!r})")


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


def _find_separator(lines: list[str]) -> str | None:
    for line in lines[:20]:
        for separator in ("\t", "::", ",", ";", "|"):
            if separator in line:
                return separator
        if len(line.split()) > 1:
            return None
    return None


def _split(path: str, line: str, separator: str | None) -> list[str]:
    if separator in _QUOTING:
        try:
            return next(csv.reader([line], delimiter=separator or ","))
        except csv.Error as error:
            raise _open_quote(path, line, error) from error
    return line.split(separator)


def _open_quote(place: str, line: str, error: csv.Error) -> DataError:
    return DataError(
        f"{place}: a quote is opened and not closed where its field ends ({error}): {shown(line)}; "
        "close the quote, or double it where it is part of the text"
    )


def _is_ragged(rows: list[list[str]], separator: str | None) -> bool:
    """Return whether most lines differ in length (adjacency), or only few (malformed lines)."""
    share = Counter(map(len, rows)).most_common(1)[0][1] / len(rows)
    # Blanks mostly separate adjacency, tabs mostly columns, so tabs need more evidence.
    return share < (0.75 if separator is None else 0.5)


def _ragged(number: int, width: int, row: list[str]) -> str:
    return f"line {number}: expected {width} columns, found {len(row)}: {shown(', '.join(row))}"


def _layout_remedy(text: TextFile) -> str:
    return (
        f"line {text.blank_lines_above + 1} says how many columns there are: correct it, or the rows below; "
        "other columns are chosen with --user-col and --item-col"
    )


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
