"""More interactions for a dataset: the old pairs, then those of another file that it does not have.

1. Users and items keep their numbers. New labels get the next ones, in the order of their first appearance.
2. The old pairs come first, in their order: those for training, then those of a test that was split off. The new ones
   follow, in the order of their file or of their times. Times are not stored: that the new file is the later one is the
   caller's promise. New pairs that the dataset has, also in a separate test, are left out.
3. A split by order (``last``, ``time:F``) is taken from all pairs again. Pairs are only appended, so its test, and the
   validation, only move to later pairs: no pair that was trained on becomes a held-out one. A random validation goes by
   rounds (`bunkbed.train.data.splits`), so the number of old pairs is stored in `Interactions.rounds`.
4. Weights keep their scale: a new rating is divided by the mean of the first file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bunkbed.core.types import Json
from bunkbed.train.data.interactions import Dataset, Interactions
from bunkbed.train.data.reading import INTEGER, count_cold, take_test
from bunkbed.train.data.sort import Sorter
from bunkbed.train.data.store import open_dataset, write_description, write_rows
from bunkbed.train.data.stored import StoredVocab, opened
from bunkbed.train.data.vocab import DataError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Merged", "merge_datasets"]


@dataclass(frozen=True)
class Merged:
    """What a file added to a dataset.

    Attributes:
        pairs: new pairs.
        known: the new pairs whose user and item both had pairs, for training or split off as a test.
        users: new users.
        items: new items.
        repeated: pairs of the file that are left out, because the file or the dataset has them already.
    """

    pairs: int
    known: int
    users: int
    items: int
    repeated: int


def merge_datasets(old: Path, new: Path, into: Path, ram_bytes: int | None) -> Merged:
    """Write the dataset of `old` with the pairs of `new` to the folder `into`, which exists.

    Args:
        new: a dataset without a test.
        ram_bytes: for sorting and joining; None: half of the machine's.

    Raises:
        DataError: no pair is new; a label is text where those of `old` are integers; one has weights and the other has
            none, or the old weights are not fully known; or `old` has given candidates.
    """
    about: Json = json.loads((old / "dataset.json").read_text(encoding="utf-8"))
    data, more = open_dataset(old), open_dataset(new).train
    _require_weights(data, more)
    with Sorter(into / "merging", ram_bytes, is_stored=True) as sorter:
        added = {what: _merge_labels(sorter, what, old, new, into, more) for what in ("user", "item")}
        repeated, known = _merge_pairs(sorter, data, more)
        if data.split != "random":
            take_test(sorter, data.split, more.source)
        for name in ("train", "test"):
            if name in about:
                _write_pairs(sorter, into, name, is_weighted=data.train.is_weighted and name == "train")
        if "test" in about:
            about |= {f"cold_{what}s": count_cold(sorter, what) for what in ("user", "item")}
    if data.split == "random":
        about["train"]["rounds"] = [*data.train.rounds, len(data.train)]
    write_description(into, about)
    return Merged(len(more) - repeated, known, added["user"], added["item"], repeated + more.duplicates)


def _require_weights(data: Dataset, more: Interactions) -> None:
    """Raise unless the weights of new pairs have the scale of the old ones."""
    if not data.train.is_weighted and more.is_weighted:
        raise DataError(f"{more.source}: cannot be added with --rating-col: the run has no weights; leave it out")
    if not data.train.is_weighted:
        return
    if not more.is_weighted:
        raise DataError(f"{more.source}: cannot be added without ratings: the run has weights; give --rating-col")
    if data.split != "random":
        raise DataError(
            f"{more.source}: cannot be added to a run with --rating-col and --split {data.split}: no rating is stored "
            "of held-out pairs, which may now be trained on; start a new run from all interactions"
        )
    if not data.train.mean_rating:
        raise DataError(
            f"{more.source}: cannot be added: the run was made by a release that did not store the mean rating; start "
            "a new run from all interactions"
        )


def _merge_labels(sorter: Sorter, what: str, old: Path, new: Path, into: Path, more: Interactions) -> int:
    """Write the labels of one side; return the number of new ones. Makes the table ``WHATs`` of new numbers by old."""
    import pyarrow as pa

    kinds = []
    for name, folder in (("known", old), ("fresh", new)):
        path = folder / f"{what}s.parquet"
        kinds.append(StoredVocab(path).kind)
        schema = pa.schema([("label", pa.int64() if kinds[-1] == "int" else pa.large_string())])
        sorter.stream("labels", schema, _labels(path, schema))
        sorter.insert(f"CREATE TABLE {name} AS SELECT label FROM labels")
    label = "fresh.label" if kinds[0] == kinds[1] else "CAST(fresh.label AS VARCHAR)"
    if kinds == ["int", "str"]:
        (first,) = sorter.row(
            f"SELECT label FROM fresh WHERE NOT regexp_full_match(label, '{INTEGER}') ORDER BY rowid LIMIT 1"
        )
        raise DataError(
            f"{more.source}: the {what} {first!r} is no integer, as all {what}s of the run are; were columns mixed up? "
            f"--user-col and --item-col name them; text needs a new run from all interactions"
        )
    (count,) = sorter.row("SELECT count(*) FROM known")
    sorter.run(
        f"CREATE TABLE {what}s AS SELECT fresh.rowid AS old, {label} AS label, coalesce(known.rowid, {count} - 1 + "
        "row_number() OVER (PARTITION BY known.rowid IS NULL ORDER BY fresh.rowid)) AS number "
        f"FROM fresh LEFT JOIN known ON {label} = known.label"
    )
    schema = pa.schema([("label", pa.int64() if kinds[0] == "int" else pa.large_string())])
    added = 0

    def every() -> Iterator[pa.RecordBatch]:
        nonlocal added
        yield from _labels(old / f"{what}s.parquet", schema)
        for batch in sorter.batches(f"SELECT label FROM {what}s WHERE number >= {count} ORDER BY number"):
            added += len(batch)
            yield batch.cast(schema)

    write_rows(into / f"{what}s.parquet", schema, every())
    sorter.run("DROP TABLE known")
    sorter.run("DROP TABLE fresh")
    return added


def _labels(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with opened(path) as file:
        for batch in file.iter_batches():
            yield batch.cast(schema)


def _merge_pairs(sorter: Sorter, data: Dataset, more: Interactions) -> tuple[int, int]:
    """Make the table ``pairs`` as of `Reading`; return how many new pairs are left out, and `Merged.known`.

    Raises:
        DataError: no pair is new.
    """
    sorter.run('CREATE TABLE pairs ("user" BIGINT, "item" BIGINT, place BIGINT, is_test BOOLEAN, weight FLOAT)')
    end = 0
    for pairs, is_test in ((data.train, False), (data.test, data.split == "random")):
        if pairs is not None:
            _stream(sorter, pairs)
            end += sorter.insert(
                f'INSERT INTO pairs SELECT "user", "item", {end} + place, {is_test}, weight FROM given'
            )
    _stream(sorter, more)
    weight = "weight"
    if data.train.is_weighted:
        weight = f"CAST(CAST(weight AS DOUBLE) * {more.mean_rating / data.train.mean_rating!r} AS FLOAT)"
    kept = sorter.insert(
        f"INSERT INTO pairs SELECT users.number, items.number, {end} + place, false, {weight} "
        'FROM given JOIN users ON users.old = given."user" JOIN items ON items.old = given."item" '
        'WHERE NOT EXISTS (SELECT 1 FROM pairs WHERE pairs."user" = users.number AND pairs."item" = items.number)'
    )
    if not kept:
        raise DataError(f"{more.source}: has no new pair: the run has each of its {len(more):,} pairs already")
    had = " AND ".join(
        f'"{what}" IN (SELECT "{what}" FROM pairs WHERE place < {end} AND NOT is_test)' for what in ("user", "item")
    )
    (known,) = sorter.row(f"SELECT count(*) FROM pairs WHERE place >= {end} AND {had}")
    return len(more) - kept, known


def _stream(sorter: Sorter, pairs: Interactions) -> None:
    """Name pairs with places and weights ``given``."""
    import numpy as np
    import pyarrow as pa

    kinds = pa.int64(), pa.int64(), pa.int64(), pa.float32()
    schema = pa.schema(list(zip(("user", "item", "place", "weight"), kinds, strict=True)))

    def batches() -> Iterator[pa.RecordBatch]:
        place = 0
        for (users, items), weights in zip(pairs.batches(), pairs.weight_batches(), strict=True):
            factors = np.ones(len(users), np.float32) if weights is None else weights
            columns = users, items, np.arange(place, place + len(users)), factors
            yield pa.record_batch([pa.array(one).cast(kind) for one, kind in zip(columns, kinds, strict=True)], schema)
            place += len(users)

    sorter.stream("given", schema, batches())


def _write_pairs(sorter: Sorter, into: Path, name: str, *, is_weighted: bool) -> None:
    import pyarrow as pa

    schema = pa.schema([("user", pa.int64()), ("item", pa.int64())])
    if is_weighted:
        schema = schema.append(pa.field("weight", pa.float32()))
    wanted = ", ".join(f'"{column}"' for column in schema.names)
    answer = sorter.batches(
        f"SELECT {wanted} FROM pairs WHERE {'' if name == 'test' else 'NOT '}is_test ORDER BY place"
    )
    write_rows(into / f"{name}.parquet", schema, (batch.cast(schema) for batch in answer))
