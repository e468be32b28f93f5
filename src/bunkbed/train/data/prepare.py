"""Conversion of a file of interactions of any size to the dataset of a run's folder, within a memory budget.

The files are those of `read_dataset` and `save_dataset`, so later code does not depend on which of the two made them.
Unfinished files must not be taken for a dataset: intermediate files are in a folder that is removed, and the
description, which makes the files a dataset, is written last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from bunkbed.files.durable import require_real
from bunkbed.train.data.interactions import Dataset, SourceOptions, open_sources
from bunkbed.train.data.reading import OnProgress, Reading
from bunkbed.train.data.sort import Sorter
from bunkbed.train.data.store import open_dataset, write_description, write_rows

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["OnProgress", "prepare_dataset"]

_ROW_GROUP = 1 << 17


def prepare_dataset(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    ram_bytes: int | None,
    test: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
    **options: Unpack[SourceOptions],
) -> Dataset:
    """Read interactions into `folder` and open the dataset there; its pairs and labels stay on disk.

    Args:
        folder: created if it does not exist; must not contain a dataset.
        path: the training interactions; this and `options` are arguments of
            `bunkbed.train.data.interactions.read_dataset`.
        ram_bytes: for sorting and grouping; the blocks of the source file are not included. None: half of the
            machine's memory.
        test: held-out interactions.
        on_progress: called with a description of the current work, and its finished rows or None.

    Raises:
        DataError: as `read_dataset`; or memory or disk are too small for DuckDB.
        OSError: a file cannot be read or written.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    require_real(root)
    sources = open_sources(path, test, **options)

    def keep(name: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        write_rows(root / f"{name}.parquet", schema, batches, row_group=_ROW_GROUP)

    with Sorter(root / "preparing", ram_bytes, is_stored=True) as sorter:
        about = Reading(
            sorter,
            sources,
            keep,
            on_progress or (lambda text, rows: None),
            split=options.get("split", "random"),
            min_rating=options.get("min_rating"),
        ).run()
    write_description(root, about)
    return open_dataset(root)
