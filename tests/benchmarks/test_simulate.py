"""The simulated caches of the benchmarks, against slow ones that are plain to see."""

import itertools

import numpy as np
import pytest
from benchmarks.cases.disk.simulate import (
    belady_misses,
    expected_static_misses,
    lru_misses,
    static_misses,
    zipf_probabilities,
)
from benchmarks.harness.common import zipf


def batches_of(seed, *, num_ids=30, steps=40, most=6):
    rng = np.random.default_rng(seed)
    weight = 1.0 / np.arange(1, num_ids + 1)
    sizes = rng.integers(0, most + 1, steps)
    return [1000 + 7 * rng.choice(num_ids, size, p=weight / weight.sum()) for size in sizes]


def slow_lru(batches, frames):
    cache, misses = [], []  # oldest first
    for batch in batches:
        rows = sorted(set(batch.tolist()))
        misses.append(len([row for row in rows if row not in cache]))
        cache = [row for row in cache if row not in rows] + rows
        cache = cache[max(0, len(cache) - frames) :]
    return misses


def fewest_misses(batches, frames, staged=0):
    """By trying every choice of what to evict; rows of the `staged` batches before are in use."""
    best = {frozenset(): 0}
    steps = [frozenset(batch.tolist()) for batch in batches]
    for now, rows in enumerate(steps):
        stays = rows.union(*steps[max(0, now - staged) : now])
        following = {}
        for cache, misses in best.items():
            others = cache - stays
            room = min(frames - len(stays), len(others))
            # Dropping more than needed never helps.
            for kept in itertools.combinations(sorted(others), room):
                state = stays | frozenset(kept)
                total = misses + len(rows - cache)
                following[state] = min(total, following.get(state, total))
        best = following
    return min(best.values())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("frames", [6, 9, 17, 100])
def test_lru_is_the_slow_one(seed, frames):
    batches = batches_of(seed)
    assert lru_misses(batches, frames).tolist() == slow_lru(batches, frames)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("frames", [3, 4, 5, 7])
def test_belady_is_the_best_of_all_choices(seed, frames):
    batches = batches_of(seed, num_ids=9, steps=14, most=3)
    assert belady_misses(batches, frames).sum() == fewest_misses(batches, frames)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("staged", "frames"), [(1, 6), (1, 7), (2, 9)])
def test_belady_that_stages_is_the_best_of_all_choices(seed, staged, frames):
    batches = batches_of(seed, num_ids=12, steps=14, most=3)
    misses = belady_misses(batches, frames, staged).sum()
    assert misses == fewest_misses(batches, frames, staged)
    assert misses >= belady_misses(batches, frames).sum()


def test_belady_that_stages_needs_room_for_the_batches_in_use():
    batches = [np.arange(3), np.arange(3, 6)]
    assert belady_misses(batches, 6, 1).tolist() == [3, 3]
    with pytest.raises(ValueError, match="batch 1 and the 1 before it do not fit the cache's 5 frames"):
        belady_misses(batches, 5, 1)


@pytest.mark.parametrize("seed", range(4))
def test_static_keeps_the_rows_it_is_given(seed):
    batches = batches_of(seed)
    ranked = np.random.default_rng(seed).permutation(1000 + 7 * np.arange(30))
    for frames in (0, 1, 12, 30):
        kept = set(ranked[:frames].tolist())
        expected = [len(set(batch.tolist()) - kept) for batch in batches]
        assert static_misses(batches, frames, ranked).tolist() == expected


@pytest.mark.parametrize("seed", range(4))
def test_static_in_hindsight_keeps_the_most_wanted(seed):
    batches = batches_of(seed, num_ids=8, steps=20)
    ids = sorted({int(row) for batch in batches for row in batch})
    for frames in (1, 3, 5):
        best = min(static_misses(batches, frames, np.array(kept)).sum() for kept in itertools.combinations(ids, frames))
        assert static_misses(batches, frames).sum() == best


def test_the_expected_static_misses_are_those_of_many_batches():
    probabilities = zipf_probabilities(2_000, 1.05)
    sample, rng = zipf(2_000, 1.05), np.random.default_rng(0)
    batches = [sample(rng, 500) for _ in range(400)]
    # `common.zipf` scatters its ranks over the ids: the most probable ones come up most.
    ids, counts = np.unique(np.concatenate(batches), return_counts=True)
    ranked = ids[np.argsort(-counts)]
    assert static_misses(batches, 300, ranked).mean() == pytest.approx(
        expected_static_misses(probabilities, 500, 300), rel=0.03
    )


def test_a_batch_larger_than_the_cache_is_refused():
    batches = [np.arange(3), np.arange(5)]
    for policy in (lru_misses, belady_misses):
        with pytest.raises(ValueError, match=r"batch 1 has 5 unique rows, more than the cache's 4 frames"):
            policy(batches, 4)


def test_no_batches_and_empty_batches():
    for policy in (lru_misses, belady_misses):
        assert policy([], 4).size == 0
        assert policy([np.empty(0, np.int64), np.array([3, 3])], 4).tolist() == [0, 1]
