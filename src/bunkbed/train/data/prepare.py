"""Conversion of a file of interactions of any size to the dataset of a run's folder, within a memory budget.

The labels, numbers, pairs and files are those of `read_dataset` and `save_dataset`, so later code does not depend on
which of the two made them. This is done as follows:

1. Labels are numbered by first appearance, in the training file first, and compared as text. Each label has the place
   of its first appearance; labels are sorted by this place, so a label's number is its row in the Parquet file.
2. Whether labels are integers, or mean a missing value, is known only after all labels are read: it is decided from
   the distinct labels, before the other steps.
3. Of equal pairs the first is kept, and pairs keep the order of the file: joins and grouping lose the order, so each
   pair carries its place, and the last step sorts by it.
4. Unfinished files must not be taken for a dataset: intermediate files are in a folder that is removed, and the
   description, which makes the files a dataset, is written last.

`bunkbed.train.data.formats` reads files and reports errors; DuckDB joins, groups and sorts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bunkbed.core.types import Json
from bunkbed.files.durable import make_file, put_in_place, require_real
from bunkbed.train.data.columns import HeaderChoice, LayoutChoice
from bunkbed.train.data.encode import MISSING_WORDS
from bunkbed.train.data.formats import open_pairs
from bunkbed.train.data.interactions import Column, Dataset
from bunkbed.train.data.pairs import Pairs
from bunkbed.train.data.sort import Sorter
from bunkbed.train.data.store import open_dataset, write_description

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["OnProgress", "prepare_dataset"]

# Called with a description of the current work, and the number of finished rows if known.
OnProgress = Callable[[str, int | None], object]

# As `encode._INTEGER`: 18 digits always fit int64.
_INTEGER = "(0|-?[1-9][0-9]{0,17})"
_TOO_LONG = 10**18
_ROW_GROUP = 1 << 17


@dataclass
class _Part:
    """Source file."""

    name: str
    pairs: Pairs
    batches: Iterator[tuple[pa.Array, pa.Array]]
    kinds: tuple[pa.DataType, ...]
    rows: int = 0

    @classmethod
    def open(cls, name: str, pairs: Pairs) -> _Part:
        import pyarrow as pa

        batches = pairs.whole_rows()
        first = next(batches, None)
        if first is None:
            return cls(name, pairs, iter(()), (pa.string(), pa.string()))
        return cls(name, pairs, chain([first], batches), tuple(labels.type for labels in first))


def prepare_dataset(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    ram_bytes: int,
    test: str | os.PathLike[str] | None = None,
    user_col: Column = None,
    item_col: Column = None,
    header: HeaderChoice = "auto",
    layout: LayoutChoice = "auto",
    strict: bool = True,
    on_progress: OnProgress | None = None,
) -> Dataset:
    """Read interactions into `folder` and open the dataset there; its pairs and labels stay on disk.

    Args:
        folder: created if it does not exist; must not contain a dataset.
        path: the training interactions; this and the other arguments are those of
            `bunkbed.train.data.interactions.read_interactions`.
        ram_bytes: for sorting and grouping; the reader's blocks are not included.
        test: held-out interactions.
        on_progress: called with a description of the current work, and its finished rows or None.

    Raises:
        DataError: as `read_dataset`; or memory or disk are too small for DuckDB.
        OSError: a file cannot be read or written.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    require_real(root)
    tell = on_progress or (lambda text, rows: None)
    parts = []
    for name, source in (("train", path), ("test", test)):
        if source is not None:
            pairs = open_pairs(
                source, user_col=user_col, item_col=item_col, header=header, layout=layout, strict=strict
            )
            parts.append(_Part.open(name, pairs))
    with Sorter(root / "preparing", ram_bytes, is_stored=True) as sorter:
        about = _Preparation(sorter, root, parts, tell).run()
    write_description(root, about)
    return open_dataset(root)


class _Preparation:
    def __init__(self, sorter: Sorter, root: Path, parts: list[_Part], tell: OnProgress) -> None:
        self._sorter = sorter
        self._root = root
        self._parts = parts
        self._tell = tell

    def run(self) -> Json:
        """Write all files but the description, and return the description."""
        self._read()
        cold_users = self._number("user")
        cold_items = self._number("item")
        self._join()
        about: Json = {"version": 1, "cold_users": cold_users, "cold_items": cold_items}
        for at, part in enumerate(self._parts):
            kept = self._write_pairs(at, part)
            about[part.name] = {
                "source": part.pairs.path,
                "duplicates": part.rows - kept,
                "form": part.pairs.form,
                "malformed": part.pairs.malformed,
                "first_malformed": part.pairs.first_malformed,
                "empty_users": part.pairs.empty_users,
            }
        return about

    def _read(self) -> None:
        import pyarrow as pa

        # Labels of two files are compared as text if one file has text.
        kinds = []
        for side in (0, 1):
            is_number = all(_is_number(part.kinds[side]) for part in self._parts)
            kinds.append(pa.int64() if is_number else pa.string())
        schema = pa.schema([("part", pa.int8()), ("place", pa.int64()), ("user", kinds[0]), ("item", kinds[1])])

        def batches() -> Iterator[pa.RecordBatch]:
            place = 0
            for at, part in enumerate(self._parts):
                for users, items in part.batches:
                    count = len(users)
                    columns = [
                        pa.repeat(pa.scalar(at, pa.int8()), count),
                        pa.array(np.arange(place, place + count, dtype=np.int64)),
                        _labels(users, kinds[0]),
                        _labels(items, kinds[1]),
                    ]
                    part.rows += count
                    place += count
                    yield pa.record_batch(columns, schema=schema)
                    self._tell(f"reading {part.pairs.path}", part.rows)

        self._sorter.stream("source", schema, batches())
        self._sorter.run("CREATE TABLE raw AS SELECT * FROM source")
        for part in self._parts:
            part.pairs.check_read(part.rows)

    def _number(self, what: str) -> int:
        """Write the labels of one side in the order of their numbers; return how many are only in the test file."""
        import pyarrow as pa

        sorter = self._sorter
        self._tell(f"numbering the {what}s", None)
        sorter.run(f'CREATE TABLE labels AS SELECT "{what}" AS label, min(place) AS first FROM raw GROUP BY "{what}"')
        (is_text,) = sorter.row("SELECT coalesce(any_value(typeof(label)) = 'VARCHAR', false) FROM labels")
        if is_text:
            is_integer = f"regexp_full_match(label, '{_INTEGER}')"
            self._check_missing(what, is_integer)
            (others,) = sorter.row(f"SELECT count(*) FROM labels WHERE NOT {is_integer}")
        else:
            (others,) = sorter.row(f"SELECT count(*) FROM labels WHERE label >= {_TOO_LONG} OR label <= -{_TOO_LONG}")
        kind = pa.large_string() if others else pa.int64()
        labels = (
            pa.record_batch([batch.column(0).cast(kind)], names=["label"])
            for batch in sorter.batches("SELECT label FROM labels ORDER BY first")
        )
        _write(self._labels_path(what), pa.schema([("label", kind)]), labels)
        (cold,) = sorter.row(f"SELECT count(*) FROM labels WHERE first >= {self._parts[0].rows}")
        sorter.run("DROP TABLE labels")
        return int(cold)

    def _check_missing(self, what: str, is_integer: str) -> None:
        sorter = self._sorter
        words = set(sorter.column("SELECT label FROM labels WHERE label = ''"))
        if not words:
            known = ", ".join("'" + word + "'" for word in sorted(MISSING_WORDS))
            integers, others, unknown = sorter.row(
                f"SELECT count(*) FILTER (WHERE {is_integer}), count(*) FILTER (WHERE NOT {is_integer}), "
                f"count(*) FILTER (WHERE NOT {is_integer} AND lower(label) NOT IN ({known})) FROM labels"
            )
            if integers and others and not unknown:
                words = set(sorter.column(f"SELECT label FROM labels WHERE NOT {is_integer}"))
        if words:
            for part in self._parts:
                part.pairs.raise_missing(what, words)

    def _join(self) -> None:
        """Make a table of distinct pairs, as numbers, with their first places."""
        import pyarrow.parquet as pq

        self._tell("looking for repeated pairs", None)

        def numbered(what: str) -> str:
            path = str(self._labels_path(what)).replace("'", "''")
            kind = "INTEGER" if pq.read_metadata(self._labels_path(what)).num_rows <= 2**31 else "BIGINT"
            return (
                f"(SELECT label, CAST(file_row_number AS {kind}) AS number FROM read_parquet("
                f"'{path}', file_row_number = true)) AS {what}s "
                f'ON raw."{what}" = CAST({what}s.label AS {self._sql_type(what)})'
            )

        self._sorter.run(
            "CREATE TABLE pairs AS "
            'SELECT part, users.number AS "user", items.number AS "item", min(place) AS place '
            f"FROM raw JOIN {numbered('user')} JOIN {numbered('item')} GROUP BY part, users.number, items.number"
        )
        self._sorter.run("DROP TABLE raw")

    def _sql_type(self, what: str) -> str:
        (name,) = self._sorter.row(
            f"SELECT data_type FROM duckdb_columns() WHERE table_name = 'raw' AND column_name = '{what}'"
        )
        return str(name)

    def _write_pairs(self, at: int, part: _Part) -> int:
        """Write the pairs of a part in the order of its file; return their number."""
        import pyarrow as pa

        kept = 0
        schema = pa.schema([("user", pa.int64()), ("item", pa.int64())])

        def batches() -> Iterator[pa.RecordBatch]:
            nonlocal kept
            ordered = f'SELECT "user", "item" FROM pairs WHERE part = {at} ORDER BY place'
            self._tell("sorting the pairs", None)
            for batch in self._sorter.batches(ordered):
                kept += len(batch)
                yield batch.cast(schema)
                self._tell("writing the pairs", kept)

        _write(self._root / f"{part.name}.parquet", schema, batches())
        return kept

    def _labels_path(self, what: str) -> Path:
        return self._root / f"{what}s.parquet"


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind)) and kind != pa.uint64()  # the upper half of uint64 does not fit int64


def _labels(labels: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a batch of labels as type `kind`; text without surrounding blanks."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_integer(labels.type):
        return labels.cast(kind)
    return pc.utf8_trim_whitespace(labels.cast(kind))


def _write(path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    """Write row groups as in `save_dataset`, durably."""
    import pyarrow.parquet as pq

    temporary = path.with_suffix(".tmp")
    with (
        make_file(temporary) as file,
        pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer,
    ):
        for batch in batches:
            writer.write_batch(batch, row_group_size=_ROW_GROUP)
    put_in_place(temporary, path)
