"""Caches without values: how many rows each policy would miss, to compare with the rows that a table missed.

A step wants each unique row of its batch once and all rows at the same time, as the engine does: rows that are in the
cache are hits, the others are loaded, and no row of the batch may make room for another. So a batch must fit the
cache, and a row that will not come back soon still takes a frame for its step.

Every function takes the batches in order, each `int64[N]` of ids (any order, duplicates count once), and the
number of frames, starts with an empty cache, and returns `int64[steps]`: the rows missed in each step, first
touches included. Sum over the steps after the warm-up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NEVER = np.iinfo(np.int64).max


def lru_misses(batches: Sequence[np.ndarray], frames: int) -> np.ndarray:
    """The row unused for longest goes first; rows of one batch go in ascending order.

    Raises:
        ValueError: a batch has more unique rows than there are frames.
    """
    steps, num_rows = _steps(batches, frames)
    last = np.full(num_rows, -1, np.int64)  # step of the last use; of rows in the cache only
    misses = np.zeros(len(steps), np.int64)
    resident, oldest = 0, 0
    for now, rows in enumerate(steps):
        misses[now] = np.count_nonzero(last[rows] < 0)
        last[rows] = now
        resident += int(misses[now])
        while resident > frames:
            old = steps[oldest]
            old = old[last[old] == oldest]  # the others were used again since, or are gone
            gone = old[: resident - frames]
            last[gone] = -1
            resident -= gone.size
            if gone.size == old.size:
                oldest += 1
    return misses


def belady_misses(batches: Sequence[np.ndarray], frames: int, staged: int = 0) -> np.ndarray:
    """The row needed again last goes first: no policy that must load a batch whole misses less in total.

    Args:
        staged: so many batches before it is used a batch is loaded, while those before it are in use or wait for it:
            none of their rows may make room. What lookahead with this staging depth can reach at best.

    Raises:
        ValueError: a batch, or those that must be there together, have more unique rows than there are frames.
    """
    steps, num_rows = _steps(batches, frames)
    following = np.full(num_rows, NEVER, np.int64)
    next_uses: list[np.ndarray] = []  # of each step's rows, after that step
    for now in range(len(steps) - 1, -1, -1):
        next_uses.append(following[steps[now]])
        following[steps[now]] = now
    next_uses.reverse()

    next_use = np.full(num_rows, -1, np.int64)  # of rows in the cache; -1 elsewhere
    resident = np.empty(0, np.int64)
    misses = np.zeros(len(steps), np.int64)
    for now, rows in enumerate(steps):
        new = rows[next_use[rows] < 0]
        misses[now] = new.size
        next_use[new] = now
        resident = np.concatenate([resident, new])
        if resident.size > frames:
            # Rows of this batch, and of those before it that are not over, say so or less: they are the last to go.
            order = np.argpartition(next_use[resident], frames)
            if next_use[resident[order[frames:]]].min() <= now:
                raise ValueError(f"batch {now} and the {staged} before it do not fit the cache's {frames} frames")
            next_use[resident[order[frames:]]] = -1
            resident = resident[order[:frames]]
        if now >= staged:
            next_use[steps[now - staged]] = next_uses[now - staged]
    return misses


def static_misses(batches: Sequence[np.ndarray], frames: int, ranked: np.ndarray | None = None) -> np.ndarray:
    """A cache that always holds the same rows, from the first step on; the others are loaded and dropped.

    Args:
        ranked: `int64[M]`, ids from the most to the least wanted; the first `frames` are kept. Without it, the rows
            that the most of these very batches want: chosen in hindsight, which flatters it, the more so the fewer
            times a row of the tail comes up in them.
    """
    wanted = [np.unique(batch) for batch in batches]
    if ranked is None:
        ids, counts = np.unique(np.concatenate(wanted), return_counts=True)
        ranked = ids[np.argsort(-counts, kind="stable")]
    kept = np.sort(np.asarray(ranked)[:frames])
    if kept.size == 0:
        return np.array([rows.size for rows in wanted], np.int64)
    misses = []
    for rows in wanted:
        found = kept[np.minimum(np.searchsorted(kept, rows), kept.size - 1)]
        misses.append(np.count_nonzero(found != rows))
    return np.array(misses, np.int64)


def expected_static_misses(probabilities: np.ndarray, batch: int, frames: int) -> float:
    """Unique rows other than the `frames` most probable ones that `batch` independent draws want, on average.

    No cache that knows the probabilities and not the draws can miss fewer in steady state.

    Args:
        probabilities: `float64[num_rows]`, of a draw, in any order; they add up to 1.
    """
    rare = np.sort(probabilities)[::-1][frames:]
    return float(-np.expm1(batch * np.log1p(-rare)).sum())


def zipf_probabilities(num_rows: int, exponent: float) -> np.ndarray:
    """`float64[num_rows]`: of each rank, as `common.zipf` draws them (exactly so up to ten million rows)."""
    weight: np.ndarray = np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent
    weight /= weight.sum()
    return weight


def _steps(batches: Sequence[np.ndarray], frames: int) -> tuple[list[np.ndarray], int]:
    """Each batch's unique rows, ascending and renumbered densely from 0, and how many rows there are."""
    unique = [np.unique(batch) for batch in batches]
    for step, rows in enumerate(unique):
        if rows.size > frames:
            raise ValueError(f"batch {step} has {rows.size} unique rows, more than the cache's {frames} frames")
    if not unique:
        return [], 0
    ids, dense = np.unique(np.concatenate(unique), return_inverse=True)
    ends = np.cumsum([rows.size for rows in unique])
    return [part.astype(np.int64) for part in np.split(dense, ends[:-1])], int(ids.size)
