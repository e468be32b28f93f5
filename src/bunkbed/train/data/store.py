"""Storage of a dataset in a run's folder, so that resuming, evaluating and recommending need no other file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bunkbed.core.types import Json
from bunkbed.files.durable import make_file, put_in_place, replace_file, require_real
from bunkbed.train.data.interactions import ABOUT, Dataset, dataset_of
from bunkbed.train.data.stored import StoredInteractions, StoredVocab, opened
from bunkbed.train.data.vocab import DataError, Int64Array, Vocab, numbers_of

if TYPE_CHECKING:
    import pyarrow as pa

PathLike = str | os.PathLike[str]

# Small row groups: `seen_items` skips groups whose bounds exclude the user.
_ROW_GROUP = 1 << 17


def save_dataset(folder: PathLike, dataset: Dataset) -> None:
    """Write a dataset as Parquet files in `folder`, durably; the description is written last and completes it.

    Raises:
        OSError: the folder cannot be written.
    """
    import pyarrow as pa

    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    require_real(root)
    train = dataset.train
    _write(root / "users.parquet", {"label": train.user_vocab.array})
    _write(root / "items.parquet", {"label": train.item_vocab.array})
    about: Json = {"version": 1, "split": dataset.split}
    about |= {"cold_users": dataset.cold_users, "cold_items": dataset.cold_items}
    for name, pairs in (("train", train), ("test", dataset.test)):
        if pairs is not None:
            columns = {"user": pa.array(pairs.users), "item": pa.array(pairs.items)}
            if pairs.weights is not None:
                columns["weight"] = pa.array(pairs.weights)
            _write(root / f"{name}.parquet", columns)
            about[name] = {field: getattr(pairs, field) for field in ABOUT}
    if dataset.candidates is not None:
        rows = dataset.candidates
        width = rows.negatives.shape[1]
        negatives = pa.FixedSizeListArray.from_arrays(pa.array(rows.negatives.ravel()), width)
        columns = {"user": pa.array(rows.users), "positive": pa.array(rows.positives), "negatives": negatives}
        _write(root / "candidates.parquet", columns)
        about["candidates"] = {"source": rows.source}
    write_description(root, about)


def write_description(root: Path, about: Json) -> None:
    """Write the description, which makes the files in a folder a dataset: last, durably and atomically."""
    replace_file(root / "dataset.json", (json.dumps(about, indent=2) + "\n").encode())


def load_dataset(folder: PathLike) -> Dataset:
    """Read a dataset of `save_dataset`.

    Raises:
        DataError: no dataset, or it is incomplete.
    """
    root = Path(folder)
    with _description(root) as about:
        return dataset_of(about, lambda name: _read(root / f"{name}.parquet"))


def open_dataset(folder: PathLike) -> Dataset:
    """Open a dataset of `save_dataset`, with pairs and labels on disk until they are read.

    Raises:
        DataError: no dataset, it is incomplete, or it has candidates, which `load_dataset` reads into memory.
    """
    root = Path(folder)
    with _description(root) as about:
        if "candidates" in about:
            raise DataError(f"{root}: has given candidates, which option stream cannot keep on disk; leave it off")
        users, items = StoredVocab(root / "users.parquet"), StoredVocab(root / "items.parquet")
        pairs = {
            name: StoredInteractions(root / f"{name}.parquet", users, items, **about[name])
            for name in ("train", "test")
            if name in about
        }
        cold = about["cold_users"], about["cold_items"]
        return Dataset(pairs["train"], pairs.get("test"), None, *cold, about.get("split", "random"))


def open_known_pairs(folder: PathLike) -> list[StoredInteractions]:
    """Open the pairs of the training file of `save_dataset`, on disk until they are read.

    Returns:
        The training pairs; and the test, if the split took it out of the same file.

    Raises:
        DataError: no dataset, or it is incomplete.
    """
    root = Path(folder)
    with _description(root) as about:
        vocabs = load_vocabs(root)
        return [StoredInteractions(root / f"{name}.parquet", *vocabs, **about[name]) for name in _known(about)]


def _known(about: Json) -> tuple[str, ...]:
    """Return the names of the tables with the pairs of the training file."""
    return ("train",) if about.get("split", "random") == "random" else ("train", "test")


@contextmanager
def _description(root: Path) -> Iterator[Json]:
    """Read the description of a dataset; convert errors of reading it and the other files."""
    import pyarrow as pa

    try:
        yield json.loads((root / "dataset.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _absent(root, error) from error
    except (KeyError, json.JSONDecodeError, pa.ArrowException) as error:
        raise DataError(f"{root}: the saved interactions are damaged ({error})") from error


def load_vocabs(folder: PathLike) -> tuple[Vocab, Vocab]:
    """Open only the labels of users and items of `save_dataset`, on disk.

    Raises:
        DataError: no dataset, or it is damaged.
    """
    root = Path(folder)
    try:
        return StoredVocab(root / "users.parquet"), StoredVocab(root / "items.parquet")
    except FileNotFoundError as error:
        raise _absent(root, error) from error


def seen_items(folder: PathLike, user: int) -> Int64Array:
    """Return items ``int64[M]`` of one user's pairs in the training file, streamed from the saved dataset, in order."""
    root = Path(folder)
    parts = [np.empty(0, np.int64)]
    with _description(root) as about:
        for name in _known(about):
            with opened(root / f"{name}.parquet") as file:
                for group in range(file.num_row_groups):
                    bounds = file.metadata.row_group(group).column(0).statistics
                    if bounds is not None and not bounds.min <= user <= bounds.max:
                        continue
                    table = file.read_row_group(group)
                    parts.append(numbers_of(table["item"])[numbers_of(table["user"]) == user])
    return np.concatenate(parts)


def _absent(root: Path, error: FileNotFoundError) -> DataError:
    return DataError(f"{root}: holds no saved interactions ({Path(error.filename).name} is missing)")


def _write(path: Path, columns: dict[str, pa.Array]) -> None:
    import pyarrow as pa

    table = pa.table(columns)
    write_rows(path, table.schema, table.to_batches())


def write_rows(
    path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], *, row_group: int = _ROW_GROUP
) -> None:
    """Write a table as Parquet, durably."""
    import pyarrow.parquet as pq

    temporary = path.with_suffix(".tmp")
    with (
        make_file(temporary) as file,
        pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer,
    ):
        for batch in batches:
            writer.write_batch(batch, row_group_size=row_group)
    put_in_place(temporary, path)


def _read(path: Path) -> pa.Table:
    with opened(path) as file:
        return file.read()
