"""Recommendation of the best items for one user."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from bunkbed.train.models.scorer import Float32Array, Int64Array, scorer_of_run
from bunkbed.train.settings.config import TrainConfig

if TYPE_CHECKING:
    from bunkbed.run.run import Run

__all__ = ["recommend"]

_CHUNK = 65_536


def recommend(
    run: Run, config: TrainConfig, user_index: int, k: int, exclude: Int64Array | None = None
) -> tuple[Int64Array, Float32Array]:
    """Return the `k` items with the highest scores for a user, best first; equal scores by smaller index.

    Reads every item's row once, in chunks, whatever the size of the table.

    Args:
        run: committed at least once, open for reading or writing.
        user_index: dense index of the user.
        k: at least 1; the result is shorter if fewer items remain.
        exclude: ``int64[M]`` items not to recommend, such as items that the user has.

    Returns:
        ``int64[k]`` dense item indices and their ``float32[k]`` scores.

    Raises:
        ValueError: `k` below 1.
        IndexError: no such user.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    scorer = scorer_of_run(run, config)
    query = scorer.queries(np.array([user_index], dtype=np.int64))
    num_items = run.table("item").num_rows
    assert num_items is not None  # a trainer's tables have a fixed number of rows
    hidden = np.unique(np.asarray([] if exclude is None else exclude, dtype=np.int64))
    best_items = np.empty(0, dtype=np.int64)
    best_scores = np.empty(0, dtype=np.float32)
    for start in range(0, num_items, _CHUNK):
        items = np.arange(start, min(start + _CHUNK, num_items), dtype=np.int64)
        out = torch.empty(1, len(items))
        scores = scorer.all_scores(query, scorer.vectors(items), scorer.biases(items), out)[0].numpy()
        keep = ~np.isin(items, hidden)
        items = np.concatenate([best_items, items[keep]])
        scores = np.concatenate([best_scores, scores[keep]])
        order = np.lexsort((items, -scores))[:k]
        best_items, best_scores = items[order], scores[order]
    return best_items, best_scores
