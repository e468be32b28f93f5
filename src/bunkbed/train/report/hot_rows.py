"""The hot-row curve: what share of the accesses the hottest rows take, counted in a run's saved pairs.

A table keeps no counts of uses: its cache's are small, aged, and gone when it is closed. The pairs a run is trained on
are saved with it, and each is looked up once an epoch: they tell what no table can.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_BATCH = 1 << 22  # pairs in memory at a time
_POINTS = 200
#: Beyond this many rows the counts take more memory than a report should.
MOST_ROWS = 1 << 26


@dataclass(frozen=True, eq=False)
class Curve:
    """How the pairs of a run fall on the rows of one of its tables.

    Attributes:
        table: its name.
        pairs: counted.
        rows: of the table.
        unused: of them, those in no pair.
        part: float64[n], ascending: a part of the rows, the hottest ones.
        share: float64[n]: the part of the pairs that goes to them.
    """

    table: str
    pairs: int
    rows: int
    unused: int
    part: npt.NDArray[np.float64]
    share: npt.NDArray[np.float64]

    def share_of(self, part: float) -> float:
        """The share of the pairs that this part of the rows takes, the hottest ones."""
        return float(np.interp(part, self.part, self.share))

    def rows_for(self, share: float) -> float:
        """The part of the rows that takes this share of the pairs."""
        return float(np.interp(share, self.share, self.part))


def count_uses(data: Path, column: str, num_rows: int) -> npt.NDArray[np.int64]:
    """How often each row stands in a column of a run's saved pairs: int64[num_rows]. Streams; 32 MiB beside the counts.

    Raises:
        FileNotFoundError: no pairs are saved there. ValueError: no such column, or an index outside the rows.
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
    """The curve of counted uses, int64[rows]; None where nothing was counted.

    >>> hot = curve("user", np.array([1, 7, 0, 2]))
    >>> hot.share_of(0.25), hot.rows_for(0.9), hot.unused
    (0.7, 0.5, 1)
    """
    pairs, rows = int(counts.sum()), len(counts)
    if not pairs:
        return None
    total = np.cumsum(np.sort(counts)[::-1])
    # By logarithm: a thousandth of the rows may take half of the pairs.
    ranks = np.unique(np.rint(np.geomspace(1, rows, _POINTS)).astype(np.int64))
    part = np.concatenate([[0.0], ranks / rows])
    share = np.concatenate([[0.0], total[ranks - 1] / pairs])
    return Curve(table, pairs, rows, int((counts == 0).sum()), part, share)
