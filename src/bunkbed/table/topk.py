"""The exact best rows by dot product, found in one pass over chunks of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from bunkbed import _native
from bunkbed.core.arguments import Floats, Ids, as_array, as_ids, as_rows, describe, require_finite

if TYPE_CHECKING:
    from bunkbed.table.table import Table


def topk(
    table: Table, queries: ArrayLike, k: int, *, ids: ArrayLike | None, exclude: ArrayLike | None
) -> tuple[Ids, Floats]:
    """See `Table.topk`."""
    label = f"table '{table.name}'"
    array = as_array(queries, f"float32[Q, {table.dim}]", "queries", label)
    single = array.ndim == 1
    rows = array[None] if single else array
    rows = as_rows(rows, (len(rows) if rows.ndim else 1, table.dim), what="queries", table=label)
    require_finite(rows, what="queries", table=label)
    if k < 1:
        raise ValueError(f"{label}: k must be at least 1, got {k}")
    left_out: Ids | list[Ids] | None = None
    if exclude is not None:
        if isinstance(exclude, (list, tuple)) and exclude and np.ndim(exclude[0]) > 0:
            left_out = [as_ids(e, what="exclude", table=label).reshape(-1) for e in exclude]
            if len(left_out) != len(rows):
                raise ValueError(f"{label}: exclude holds {len(left_out)} arrays for {len(rows)} queries")
        else:
            left_out = as_ids(exclude, what="exclude", table=label)
            if left_out.ndim > 1:
                raise ValueError(
                    f"{label}: exclude must be int64[E] for all queries, or a list of an array for each, got "
                    f"{describe(left_out)}"
                )
            left_out = left_out.reshape(-1)
    best = best_rows(rows, k, _candidates(table, ids, len(rows)), left_out)
    return (best[0][0], best[1][0]) if single else best


def _candidates(table: Table, ids: ArrayLike | None, num_queries: int) -> Iterator[tuple[Ids, Floats]]:
    chunk = max(1024, min(65_536, (64 << 20) // (4 * max(1, num_queries))))
    if ids is None:
        yield from table.scan(chunk=chunk)
        return
    wanted = np.unique(as_ids(ids, table=f"table '{table.name}'"))
    for begin in range(0, len(wanted), chunk):
        part = wanted[begin : begin + chunk]
        yield part, table.lookup(part, touch=False)


def best_rows(
    queries: Floats, k: int, chunks: Iterable[tuple[Ids, Floats]], exclude: Ids | Sequence[Ids] | None
) -> tuple[Ids, Floats]:
    """Return the rows with the `k` highest scores of each query over all chunks.

    Scores are dot products over 16 fixed lanes, the same on every machine; of equal scores the lower id comes first. A
    row whose score is NaN because of overflow comes after all others.

    Args:
        queries: float32[Q, dim].
        k: rows wanted of each query, at least 1.
        chunks: (int64[n], float32[n, dim]) pairs; no id twice.
        exclude: ids left out, for all queries (int64[M]) or one array a query.

    Returns:
        (int64[Q, k], float32[Q, k]), best first; where fewer rows exist, id -1 and score -inf.
    """
    num_queries = len(queries)
    best_ids = np.full((num_queries, k), -1, np.int64)
    best_scores = np.full((num_queries, k), -np.inf, np.float32)
    for ids, values in chunks:
        scores = np.empty((num_queries, len(ids)), np.float32)
        _native.scores(queries, values, scores)
        for q in range(num_queries):
            row_ids, row_scores = ids, scores[q]
            if exclude is not None:
                left_out = exclude if isinstance(exclude, np.ndarray) else exclude[q]
                kept = ~np.isin(row_ids, left_out)
                row_ids, row_scores = row_ids[kept], row_scores[kept]
            # Only rows that reach the k-th best score so far can enter. An equal score can, by its id; so can NaN.
            reaching = ~(row_scores < best_scores[q, -1])
            row_ids = np.concatenate([best_ids[q], row_ids[reaching]])
            row_scores = np.concatenate([best_scores[q], row_scores[reaching]])
            class_of = np.where(row_ids < 0, 2, np.isnan(row_scores))  # a score, NaN, no row
            order = np.lexsort((row_ids, -row_scores, class_of))[:k]
            best_ids[q], best_scores[q] = row_ids[order], row_scores[order]
    return best_ids, best_scores
