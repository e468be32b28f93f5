"""Ranking metrics, from the ranks of held-out items.

The best rank is 1. Every figure is a mean over users with equal weights:

    HR@k      1 if any held-out item ranks at most k, else 0
    Recall@k  held-out items that rank at most k / all held-out items of the user
    NDCG@k    sum of 1 / log2(rank + 1) over held-out items that rank at most k, divided by the
              value of min(k, held-out items) items at the top (as in LightGCN)
    MRR       1 / rank of the user's best held-out item
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["ranking_metrics"]

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


def ranking_metrics(owners: Int64Array, ranks: Int64Array, ks: Sequence[int]) -> dict[str, float]:
    """Return the means over users of HR@k, NDCG@k, Recall@k for every k, and MRR.

    Args:
        owners: ``int64[Q]``: the user of each rank's held-out item, in any order.
        ranks: ``int64[Q]``, from 1; the ranks of one user differ.
        ks: cut-offs.

    Returns:
        ``{"hr@10": ..., "ndcg@10": ..., "recall@10": ..., ..., "mrr": ...}``

    Raises:
        ValueError: no ranks.

    >>> ranking_metrics(np.array([0, 1]), np.array([1, 30]), [10])
    {'hr@10': 0.5, 'ndcg@10': 0.5, 'recall@10': 0.5, 'mrr': 0.5166666666666667}
    """
    if len(ranks) == 0:
        raise ValueError("no held-out item to evaluate: the test pairs are empty")
    _, groups, counts = np.unique(owners, return_inverse=True, return_counts=True)
    num_users = len(counts)

    def per_user(values: Float64Array) -> Float64Array:
        return np.bincount(groups, weights=values, minlength=num_users).astype(np.float64, copy=False)

    result: dict[str, float] = {}
    for k in ks:
        hits = (ranks <= k).astype(np.float64)
        hits_of_user = per_user(hits)
        gains = per_user(hits / np.log2(ranks + 1.0))
        best = np.cumsum(1.0 / np.log2(np.arange(k) + 2.0))[np.minimum(counts, k) - 1]
        result[f"hr@{k}"] = float((hits_of_user > 0).mean())
        result[f"ndcg@{k}"] = float((gains / best).mean())
        result[f"recall@{k}"] = float((hits_of_user / counts).mean())
    first = np.full(num_users, np.iinfo(np.int64).max)
    np.minimum.at(first, groups, ranks)
    result["mrr"] = float((1.0 / first).mean())
    return result
