"""Interactions from files of any size to numbered labels and distinct pairs, within a memory budget.

The same statements serve results in memory (`bunkbed.train.data.interactions.read_dataset`) and on disk
(`bunkbed.train.data.prepare.prepare_dataset`), so that labels, numbers and pairs are equal:

1. Labels are numbered by first appearance, in the training file first, and compared as text: ``7`` in one file and
   ``"7"`` in another are one user, and ``007`` is another. The table of labels is sorted by the place of the first
   appearance, so a label's number is its row.
2. Whether labels are integers, or mean a missing value, is known only after all labels are read: it is decided from
   the distinct labels, before the other steps. Labels that are all plain integers become integers.
3. Of equal pairs the first is kept, and pairs keep the order of the rows: joins and grouping lose the order, so each
   pair carries its place, and the last step sorts by it.
4. With times the rows are put in their order first (equal times in that of the file), so that "first" and "last" mean
   the time in all other steps, and no later code needs the times. A split then is a question of places.

`bunkbed.train.data.formats` reads files and reports errors; DuckDB joins, groups and sorts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from bunkbed.train.data.formats import Pairs
from bunkbed.train.data.sort import Sorter
from bunkbed.train.data.vocab import DataError
from bunkbed.train.settings.config import first_share, num_first

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["INTEGER", "OnProgress", "Reading", "count_cold", "take_test"]

# Called with a description of the current work, and the number of finished rows if known.
OnProgress = Callable[[str, int | None], object]
#: Takes the name of a table of the result ("users", "items", "train", "test"), its schema and its rows.
Keep = Callable[[str, "pa.Schema", "Iterator[pa.RecordBatch]"], object]

# Written by other tools for a missing number. Among integers these are missing values, among strings labels.
MISSING_WORDS = ("na", "n/a", "nan", "null", "none", "nil", "\\n", "?")
# 18 digits always fit int64.
INTEGER = "(0|-?[1-9][0-9]{0,17})"
_TOO_LONG = 10**18
# Types of times. A number keeps nine decimals, a date and time microseconds; an offset from UTC counts.
_NUMBER, _DATE = "DECIMAL(38, 9)", "TIMESTAMPTZ"


class Reading:
    """Conversion of files to tables of labels and pairs.

    Args:
        sorter: has no tables yet.
        sources: readers by the name of their table of pairs, "train" first.
        keep: stores the rows of one table.
        split: takes the test out of the pairs of the first file, as `TrainConfig.split` says.
        min_rating: keep only rows with this rating or more; None: ratings are weights, where there are any.
    """

    def __init__(
        self,
        sorter: Sorter,
        sources: Mapping[str, Pairs],
        keep: Keep,
        tell: OnProgress,
        *,
        split: str,
        min_rating: float | None,
    ) -> None:
        self._sorter = sorter
        self._sources = sources
        self._keep = keep
        self._tell = tell
        self._split = split
        self._min_rating = min_rating
        self._is_weighted = min_rating is None and "rating" in sources["train"].others
        self._low_ratings: list[int] = []
        self._mean_rating = 0.0
        self._rows: list[int] = []
        self._end_of_train = 0  # all rows of the first file are before this one

    def run(self) -> dict[str, Any]:
        """Store all tables; return the description of the dataset.

        Raises:
            DataError: a file is malformed, or memory or disk are too small for DuckDB.
        """
        self._read()
        about: dict[str, Any] = {"version": 1, "split": self._split}
        for what in ("user", "item"):
            self._number(what)
        self._join()
        if self._split != "random":
            self._tell("splitting the pairs", None)
            take_test(self._sorter, self._split, next(iter(self._sources.values())).path)
        for what in ("user", "item"):
            can_be_cold = self._split != "random" or len(self._sources) > 1
            about[f"cold_{what}s"] = count_cold(self._sorter, what) if can_be_cold else 0
        for at, (name, source) in enumerate(self._sources.items()):
            kept = self._keep_pairs(at, name)
            about[name] = {
                "source": source.path,
                "duplicates": self._rows[at] - kept,
                "form": source.form + self._say_options(source),
                "malformed": source.malformed,
                "first_malformed": source.first_malformed,
                "empty_users": source.empty_users,
                "low_ratings": self._low_ratings[at],
                "mean_rating": 0.0 if at else self._mean_rating,
                "rounds": [],
            }
        if self._split != "random":
            train = about["train"]
            train["duplicates"] -= self._keep_pairs(1, "test")
            about["test"] = {"source": train["source"], "form": train["form"]}
        return about

    def _say_options(self, source: Pairs) -> str:
        """Return how the ratings of a file count, and the order of its pairs if a split goes by it."""
        said = ""
        if "rating" in source.others:
            said = ", as weights" if self._is_weighted else f", of at least {self._min_rating:g}"
        if self._split != "random" and "time" not in source.others:
            said += ", in the order of the file"
        return said

    def _read(self) -> None:
        """Make one table of the rows of all files, in order."""
        # Labels of two files are compared as text if one file has text.
        kinds = [set(kinds) for kinds in zip(*(source.types for source in self._sources.values()), strict=True)]
        user, item = ("BIGINT" if kind == {"BIGINT"} else "VARCHAR" for kind in kinds)
        columns = f'"user" {user}, "item" {item}'
        self._sorter.run(f"CREATE TABLE raw ({columns}{f', weight {_NUMBER}' if self._is_weighted else ''})")
        for source in self._sources.values():
            self._tell(f"reading {source.path}", None)
            self._insert(source, columns)
            total, end = self._sorter.row("SELECT count(*), coalesce(max(rowid), -1) + 1 FROM raw")
            self._end_of_train = self._end_of_train if self._rows else end
            self._rows.append(total - sum(self._rows))
            source.check_read(self._rows[-1])

    def _insert(self, source: Pairs, columns: str) -> None:
        """Append the rows of a file with enough rating to the table of all, in the order of their times if given."""
        self._low_ratings.append(0)
        if not source.others:
            source.insert(self._sorter, 'raw ("user", "item")')
            return
        sorter = self._sorter
        more = ", ".join(f'"{what}" VARCHAR' for what in source.others)
        sorter.run(f"CREATE TABLE texts ({columns}, {more})")
        source.insert(sorter, "texts")
        (count,) = sorter.row("SELECT count(*) FROM texts")
        source.check_read(count)
        wanted, enough, order = '"user", "item"', "true", "rowid"
        if "time" in source.others:
            self._tell("sorting by time", None)
            order = f"{self._checked_time(source)}, rowid"
        if "rating" in source.others:
            rating = self._checked_rating(source)
            if self._is_weighted:
                wanted += f", {rating}"
            else:
                enough = f"{rating} >= {self._min_rating!r}"
        kept = sorter.insert(f"INSERT INTO raw SELECT {wanted} FROM texts WHERE {enough} ORDER BY {order}")
        if not kept:
            (highest,) = sorter.row(f"SELECT max({rating}) FROM texts")
            raise DataError(
                f"{source.path}: no rating is {self._min_rating:g} or more, the highest is {float(highest):g}; "
                "give a lower --min-rating"
            )
        self._low_ratings[-1] = count - kept
        sorter.run("DROP TABLE texts")

    def _checked_time(self, source: Pairs) -> str:
        """Return SQL for the time of a row of the table of texts.

        Raises:
            DataError: a time is not of the kind of the first one.
        """
        sorter = self._sorter
        (is_number,) = sorter.row(f'SELECT TRY_CAST("time" AS {_NUMBER}) IS NOT NULL FROM texts ORDER BY rowid LIMIT 1')
        if not is_number:
            sorter.run("SET TimeZone = 'UTC'")  # of dates without an offset
        value = f'TRY_CAST("time" AS {_NUMBER if is_number else _DATE})'
        is_bad = f"isfinite({value}) IS NOT TRUE"
        (row,) = sorter.row(f"SELECT min(rowid) FROM texts WHERE {is_bad}")
        problem = f"is not a {'number' if is_number else 'date'}, as those above are"
        if row == 0:
            problem = "is neither a number nor a date such as 2024-05-31 or 2024-05-31T12:00:00+02:00"
        self._refuse(source, "time", is_bad, problem)
        return value

    def _checked_rating(self, source: Pairs) -> str:
        """Return SQL for the rating of a row of the table of texts.

        Raises:
            DataError: a rating is not a number; or is a weight and below 0.
        """
        value = f"TRY_CAST(rating AS {_NUMBER})"
        self._refuse(source, "rating", f"{value} IS NULL", "is not a number")
        if self._is_weighted:
            problem = "is below 0, which no weight is; --min-rating X selects rows instead"
            self._refuse(source, "rating", f"{value} < 0", problem)
        return value

    def _refuse(self, source: Pairs, what: str, condition: str, problem: str) -> None:
        """Raise the first row of the table of texts for which the condition is true, if there is one."""
        (row,) = self._sorter.row(f"SELECT min(rowid) FROM texts WHERE {condition}")
        if row is not None:
            (text,) = self._sorter.row(f'SELECT "{what}" FROM texts WHERE rowid = {row}')
            source.raise_value(what, {text}, problem)

    def _number(self, what: str) -> None:
        """Store the labels of one side in the order of their numbers."""
        import pyarrow as pa

        sorter = self._sorter
        self._tell(f"numbering the {what}s", None)
        sorter.insert(
            f'CREATE TABLE {what}s AS SELECT "{what}" AS label, min(rowid) AS place FROM raw '
            "GROUP BY label ORDER BY place"
        )
        (is_text,) = sorter.row(f"SELECT coalesce(any_value(typeof(label)) = 'VARCHAR', false) FROM {what}s")
        is_integer = f"regexp_full_match(label, '{INTEGER}')"
        if is_text:
            self._check_missing(what, is_integer)
        else:
            is_integer = f"label < {_TOO_LONG} AND label > -{_TOO_LONG}"
        (others,) = sorter.row(f"SELECT count(*) FROM {what}s WHERE NOT ({is_integer})")
        kind = pa.large_string() if others else pa.int64()
        schema = pa.schema([("label", kind)])
        labels = (batch.cast(schema) for batch in sorter.batches(f"SELECT label FROM {what}s ORDER BY rowid"))
        self._keep(f"{what}s", schema, labels)

    def _check_missing(self, what: str, is_integer: str) -> None:
        known = ", ".join("'" + word + "'" for word in MISSING_WORDS)
        integers, others, unknown = self._sorter.row(
            f"SELECT count(*) FILTER (WHERE {is_integer}), count(*) FILTER (WHERE NOT {is_integer}), "
            f"count(*) FILTER (WHERE NOT {is_integer} AND lower(label) NOT IN ({known})) FROM {what}s"
        )
        if integers and others and not unknown:
            (words,) = self._sorter.row(f"SELECT list(label) FROM {what}s WHERE NOT {is_integer}")
            for source in self._sources.values():
                source.raise_value(what, set(words), "is missing")

    def _join(self) -> None:
        """Make a table of distinct pairs, as numbers, with the place of the first of each."""
        self._tell("looking for repeated pairs", None)
        numbers = []
        for what in ("user", "item"):
            count, end = self._sorter.row(f"SELECT count(*), max(rowid) + 1 FROM {what}s")
            assert count == end, "rowid is not the place of the row"
            numbers.append(f"CAST({what}s.rowid AS {'INTEGER' if count <= 2**31 else 'BIGINT'})")
        first = ", arg_min(weight, raw.rowid) AS weight" if self._is_weighted else ""
        self._sorter.run(
            f'CREATE TABLE pairs AS SELECT raw.rowid >= {self._end_of_train} AS is_test, {numbers[0]} AS "user", '
            f'{numbers[1]} AS "item", min(raw.rowid) AS place{first} FROM raw JOIN users ON raw."user" = users.label '
            'JOIN items ON raw."item" = items.label GROUP BY ALL'
        )
        self._sorter.run("DROP TABLE raw")

    def _keep_pairs(self, at: int, name: str) -> int:
        """Store the pairs for training, or those of the test (`at` 1), in their order; return their number."""
        import pyarrow as pa

        kept = 0
        schema = pa.schema([("user", pa.int64()), ("item", pa.int64())])
        wanted, is_test = '"user", "item"', "is_test" if at else "NOT is_test"
        if self._is_weighted and not at:
            schema = schema.append(pa.field("weight", pa.float32()))
            total, count = self._sorter.row(f"SELECT sum(weight), count(*) FROM pairs WHERE {is_test}")  # exact
            if not total:
                path = self._sources[name].path
                raise DataError(f"{path}: no pair for training has a rating above 0; leave out --rating-col")
            self._mean_rating = float(total) / count
            wanted += f", CAST(weight AS DOUBLE) / {self._mean_rating!r} AS weight"

        def batches() -> Iterator[pa.RecordBatch]:
            nonlocal kept
            self._tell("sorting the pairs", None)
            for batch in self._sorter.batches(f"SELECT {wanted} FROM pairs WHERE {is_test} ORDER BY place"):
                kept += len(batch)
                yield batch.cast(schema)
                self._tell("writing the pairs", kept)

        self._keep(name, schema, batches())
        return kept


def take_test(sorter: Sorter, split: str, source: str) -> None:
    """Mark the pairs that a split makes the test, in the table ``pairs``.

    Raises:
        DataError: there are none.
    """
    share = first_share("split", split)
    if share is None:
        held, few = 'max(place) AS place FROM pairs GROUP BY "user" HAVING count(*) > 1', "no user has two items"
    else:
        (total,) = sorter.row("SELECT count(*) FROM pairs")
        held = f"place FROM pairs ORDER BY place OFFSET {num_first(total, share)}"
        few = f"it has {total:,} different pairs"
    sorter.run(f"CREATE TABLE held AS SELECT {held}")
    if not sorter.row("SELECT count(*) FROM held")[0]:
        raise DataError(f"{source}: split {split} leaves no test: {few}; use --split random")
    sorter.run("CREATE TABLE divided AS SELECT * REPLACE (place IN (SELECT place FROM held) AS is_test) FROM pairs")
    sorter.run("DROP TABLE held")
    sorter.run("DROP TABLE pairs")
    sorter.run("ALTER TABLE divided RENAME TO pairs")


def count_cold(sorter: Sorter, what: str) -> int:
    """Return how many users or items have pairs only in the test, by the table ``pairs``."""
    cold = f'SELECT "{what}" FROM pairs GROUP BY "{what}" HAVING bool_and(is_test)'
    (count,) = sorter.row(f"SELECT count(*) FROM ({cold})")
    return int(count)
