"""Exact nearest neighbours: the stored rows with the highest scores for a given row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from bunkbed.core.arguments import Floats, Ids, as_ids, require_finite
from bunkbed.core.typed import typed
from bunkbed.table.table import Table
from bunkbed.table.topk import best_rows

METRICS = ("dot", "cosine")
_CHUNK_BYTES = 4 << 20


@typed
def neighbors(table: Table, ids: ArrayLike, k: int = 10, *, metric: str = "dot") -> tuple[Ids, Floats]:
    """Return the `k` stored rows most similar to each given row, exactly, in one pass over all stored rows.

    Args:
        table: an open table; a reader is accepted.
        ids: int64[N], or one id; each row must be stored. No row is its own neighbour.
        k: rows wanted, at least 1.
        metric: ``"dot"``, the score of `Table.topk`, or ``"cosine"``; a row of zeros has the cosine 0 with every row.

    Returns:
        (int64[N, k], float32[N, k]) ids and scores, best first, of equal scores the lower id first; without the leading
        axis for one id. Rows whose score is NaN come last. Where fewer rows exist: id -1, score -inf.

    Raises:
        IndexError: an id outside the table.
        ValueError: an id that was never updated or set, or whose row is not finite, with its position; k below 1;
            another metric.

    >>> import bunkbed as bb, numpy as np
    >>> with bb.create(None, dim=2, num_rows=9) as table:
    ...     table.set([2, 5, 7], np.array([[1, 0], [2, 1], [0, 3]], np.float32))
    ...     bb.neighbors(table, 2, k=2)
    (array([5, 7]), array([2., 0.], dtype=float32))
    """
    with table.at_one_commit():
        return _neighbors(table, ids, k, metric)


def _neighbors(table: Table, ids: ArrayLike, k: int, metric: str) -> tuple[Ids, Floats]:
    label = f"table '{table.name}'"
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    if k < 1:
        raise ValueError(f"{label}: k must be at least 1, got {k}")
    wanted = as_ids(ids, table=label).reshape(-1)
    queries = table.lookup(wanted, touch=False)  # raises for an id outside the table
    absent = np.flatnonzero(~table.contains(wanted))
    if absent.size:
        at = int(absent[0])
        raise ValueError(
            f"{label}: id {wanted[at]} at position {at} was never updated or set: its row is its initial value; "
            "choose one that Table.contains tells of"
        )
    require_finite(queries, what="rows", table=label)
    itself = [wanted[at : at + 1] for at in range(len(wanted))]
    if not wanted.size:
        found: tuple[Ids, Floats] = np.empty((0, k), np.int64), np.empty((0, k), np.float32)
    elif metric == "dot":
        found = table.topk(queries, k, exclude=itself)
    else:
        found = best_rows(_directions(queries), k, _all_directions(table), itself)
    return (found[0][0], found[1][0]) if np.ndim(ids) == 0 else found


def _all_directions(table: Table) -> Iterator[tuple[Ids, Floats]]:
    for ids, rows in table.scan(chunk=max(256, min(65_536, _CHUNK_BYTES // (4 * table.dim)))):
        yield ids, _directions(rows)


def _directions(rows: Floats) -> Floats:
    # In float64, because the square of a float32 may overflow or underflow in float32.
    lengths = np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float64))
    with np.errstate(invalid="ignore"):  # the direction of a row that is not finite is NaN
        return (rows / np.where(lengths > 0, lengths, 1.0)[:, None]).astype(np.float32)
