"""The hot-row curve: the share of accesses of the hottest rows, counted in a run's saved pairs.

A table does not store use counts: the counts of its cache are small, aged, and lost when it is closed. But the training
pairs are saved with a run, and each pair is looked up once per epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_BATCH = 1 << 22  # pairs in memory at once
_POINTS = 200
#: With more rows the counts would take too much memory for a report.
MOST_ROWS = 1 << 26


@dataclass(frozen=True, eq=False)
class Curve:
    """Distribution of a run's pairs over the rows of one of its tables.

    Attributes:
        table: name of the table.
        pairs: number of counted pairs.
        rows: number of rows of the table.
        unused: number of rows in no pair.
        part: float64[n], ascending: fractions of the rows, the hottest first.
        share: float64[n]: the fraction of the pairs with these rows.
    """

    table: str
    pairs: int
    rows: int
    unused: int
    part: npt.NDArray[np.float64]
    share: npt.NDArray[np.float64]

    def share_of(self, part: float) -> float:
        """Return the share of the pairs with this fraction of the rows, the hottest first."""
        return float(np.interp(part, self.part, self.share))

    def rows_for(self, share: float) -> float:
        """Return the smallest fraction of the rows with this share of the pairs."""
        return float(np.interp(share, self.share, self.part))


def count_uses(data: Path, column: str, num_rows: int) -> npt.NDArray[np.int64]:
    """Count each row in a column of a run's saved pairs: int64[num_rows]. Streams, with 32 MiB of buffers.

    Raises:
        FileNotFoundError: no saved pairs. ValueError: no such column, or an index outside the rows.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = data / "train.parquet"
    if not file.is_file():
        raise FileNotFoundError(2, "no saved pairs", str(file))
    counts = np.zeros(num_rows, np.int64)
    try:
        with pq.ParquetFile(file) as pairs:
            if column not in pairs.schema_arrow.names:
                raise ValueError(f"{file} has no column {column!r}")
            for batch in pairs.iter_batches(_BATCH, columns=[column]):
                rows: Any = batch.column(0).to_numpy(zero_copy_only=False)
                if len(rows) and not (rows.dtype.kind in "iu" and rows.min() >= 0 and rows.max() < num_rows):
                    raise ValueError(f"{file}: column {column!r} names rows outside [0, {num_rows})")
                counts += np.bincount(rows, minlength=num_rows)
    except pa.ArrowException as error:
        raise ValueError(f"{file} is damaged ({error})") from error
    return counts


def curve(table: str, counts: npt.NDArray[np.int64]) -> Curve | None:
    """Return the curve of use counts, int64[rows]; None if all counts are 0.

    >>> hot = curve("user", np.array([1, 7, 0, 2]))
    >>> hot.share_of(0.25), hot.rows_for(0.9), hot.unused
    (0.7, 0.5, 1)
    """
    pairs, rows = int(counts.sum()), len(counts)
    if not pairs:
        return None
    total = np.cumsum(np.sort(counts)[::-1])
    # Logarithmic: a thousandth of the rows may have half of the pairs.
    ranks = np.unique(np.rint(np.geomspace(1, rows, _POINTS)).astype(np.int64))
    part = np.concatenate([[0.0], ranks / rows])
    share = np.concatenate([[0.0], total[ranks - 1] / pairs])
    return Curve(table, pairs, rows, int((counts == 0).sum()), part, share)
