"""`BlockOrder`: every sample once per epoch, block by block, a function of its arguments alone."""

from __future__ import annotations

import hashlib
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bunkbed as bb
from bunkbed.order.cells import cells_of, mix_id


def columns_of(rng: np.random.Generator, samples: int, *distinct: int) -> list[np.ndarray]:
    """Return columns with exactly `distinct` different ids each, spread over a large range."""
    columns = []
    for count in distinct:
        ids = rng.choice(2**40, count, replace=False)
        columns.append(rng.permutation(np.concatenate([ids, rng.choice(ids, samples - count)])))
    return columns


@st.composite
def orders(draw: st.DrawFn) -> tuple[list[np.ndarray], tuple[int, ...], int, int, int]:
    """Return columns, blocks, seed, epoch and batch size."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    distinct = draw(st.lists(st.integers(1, 60), min_size=1, max_size=2))
    columns = columns_of(rng, draw(st.integers(max(distinct), 400)), *distinct)
    blocks = tuple(draw(st.integers(1, count)) for count in distinct)
    whole = st.integers(0, 2**63 - 1)
    return columns, blocks, draw(whole), draw(whole), draw(st.integers(1, 100))


@settings(deadline=None, max_examples=60)
@given(orders())
def test_an_epoch_has_every_sample_once_in_batches_of_one_pair(
    case: tuple[list[np.ndarray], tuple[int, ...], int, int, int],
) -> None:
    columns, blocks, seed, epoch, size = case
    order = bb.BlockOrder(columns, blocks, seed=seed)
    batches = list(order.batches(epoch, size))

    assert len(batches) == order.num_batches(epoch, size)
    assert np.array_equal(np.sort(np.concatenate([batch.indices for batch in batches])), np.arange(len(columns[0])))
    for batch in batches:
        assert batch.indices.dtype == np.int64 and 1 <= len(batch.indices) <= size
        for at, column in enumerate(columns):
            assert set(order.block_of(column[batch.indices], epoch, at)) == {batch.blocks[at]}
    # A pair is visited once, and its batches have equal sizes.
    visited = [batch.blocks for i, batch in enumerate(batches) if i == 0 or batch.blocks != batches[i - 1].blocks]
    assert len(visited) == len(set(visited))
    for batch, after in pairwise(batches):
        assert abs(len(batch.indices) - len(after.indices)) <= 1 or batch.blocks != after.blocks
    # The number of batches is that of the worst case, in every epoch.
    samples, pairs = len(columns[0]), min(int(np.prod(blocks)), len(columns[0]))
    assert len(batches) == (samples - pairs) // size + pairs == order.num_batches(0, size)
    assert -(-samples // size) <= len(batches) < samples // size + pairs + 1


@settings(deadline=None, max_examples=30)
@given(orders(), st.data())
def test_an_epoch_continues_from_any_batch(
    case: tuple[list[np.ndarray], tuple[int, ...], int, int, int], data: st.DataObject
) -> None:
    columns, blocks, seed, epoch, size = case
    batches = list(bb.BlockOrder(columns, blocks, seed=seed).batches(epoch, size))
    first = data.draw(st.integers(0, len(batches)))
    rest = list(bb.BlockOrder(columns, blocks, seed=seed).batches(epoch, size, first=first))
    assert len(rest) == len(batches) - first
    for one, same in zip(rest, batches[first:], strict=True):
        assert one.blocks == same.blocks and np.array_equal(one.indices, same.indices)


@settings(deadline=None, max_examples=30)
@given(orders())
def test_members_are_the_ids_of_a_block(case: tuple[list[np.ndarray], tuple[int, ...], int, int, int]) -> None:
    columns, blocks, seed, epoch, _ = case
    order = bb.BlockOrder(columns, blocks, seed=seed)
    for at, column in enumerate(columns):
        distinct = np.unique(column)
        of = order.block_of(distinct, epoch, at)
        for block in range(blocks[at]):
            found = order.members(epoch, at, block)
            assert found.dtype == np.int64 and np.array_equal(found, distinct[of == block])


@pytest.mark.parametrize("sizes", [(300, 200), (200, 300)])
def test_one_block_changes_at_a_time_and_the_larger_columns_once(sizes: tuple[int, int]) -> None:
    order = bb.BlockOrder(columns_of(np.random.default_rng(0), 20_000, *sizes), blocks=(5, 4))
    visited = list(dict.fromkeys(batch.blocks for batch in order.batches(0, 64)))
    assert len(visited) == 20  # every pair has samples here
    assert all(sum(a != b for a, b in zip(one, after, strict=True)) == 1 for one, after in pairwise(visited))
    outer = int(np.argmax(sizes))
    assert sum(one[outer] != after[outer] for one, after in pairwise(visited)) == order.blocks[outer] - 1


def test_blocks_are_regrouped_and_samples_shuffled_in_each_epoch() -> None:
    columns = columns_of(np.random.default_rng(0), 5_000, 1_000, 500)
    order = bb.BlockOrder(columns, blocks=4)
    ids = np.unique(columns[0])
    of = [order.block_of(ids, epoch, 0) for epoch in range(3)]
    for one, other in pairwise(of):
        # Two ids share a block by chance, so one in four keeps its block number.
        assert 0.1 < (one == other).mean() < 0.45
    # Pairs of ids that were together are separated, and their cells stay whole.
    together = of[0][:, None] == of[0][None, :]
    assert 0.1 < (of[1][:, None] == of[1][None, :])[together].mean() < 0.6
    for blocks in of:
        for cell in range(64):
            assert len(set(blocks[cells_of(ids, 64) == cell])) <= 1
    # The columns are regrouped independently, and all samples are shuffled when there is one block.
    assert not np.array_equal(order.block_of(ids, 0, 0), order.block_of(ids, 0, 1))
    shuffle = bb.BlockOrder(columns[:1], blocks=1)
    first, second = (np.concatenate([b.indices for b in shuffle.batches(e, 100)]) for e in range(2))
    assert (first == second).mean() < 0.01 and abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert abs(np.corrcoef(first, np.arange(len(first)))[0, 1]) < 0.05


def test_blocks_have_about_equal_sizes() -> None:
    order = bb.BlockOrder([np.arange(100_000)], blocks=10)
    sizes = [len(order.members(1, 0, block)) for block in range(10)]
    assert sum(sizes) == 100_000 and max(abs(size - 10_000) for size in sizes) < 500


def test_another_seed_regroups_cells_and_keeps_them() -> None:
    ids = np.arange(1_000)
    one, other = (bb.BlockOrder([ids], blocks=4, seed=seed).block_of(ids, 0, 0) for seed in (1, 2))
    assert not np.array_equal(one, other)
    cells = cells_of(ids, 64)
    assert all(len(set(blocks[cells == cell])) == 1 for blocks in (one, other) for cell in set(cells))


def test_the_order_is_the_same_on_every_machine() -> None:
    numbers = np.arange(3_000, dtype=np.int64)
    order = bb.BlockOrder([numbers * numbers % 1_009, numbers * 7919 % 503], blocks=(6, 3), seed=11)
    digest = hashlib.sha256()
    for epoch in (0, 5):
        for batch in order.batches(epoch, 37):
            digest.update(batch.indices.astype("<i8").tobytes() + bytes([len(batch.indices), *batch.blocks]))
    assert digest.hexdigest() == "bf56dd0b9ee0667b0793b32eb4c220147cec0f3c2d78100f3a2cdf5d335952b4"


#: csrc/tests/directory/test_directory.cc has the same values: the log groups records by this hash.
HASHES = {
    0: 0,
    1: 0x4179B061E0C0E0D0,
    2: 0x1C9963305FEBC252,
    41: 0xA32BFDEE79DE1057,
    1_000_000_007: 0x003C1C9C002037F0,
    2**40 + 3: 0x07CF43F504CFE2F7,
    2**63 - 1: 0xB6D2958BA3F08589,
}


def test_cells_are_ranges_of_the_cores_hash() -> None:
    ids = np.array(list(HASHES), np.int64)
    assert mix_id(ids).tolist() == list(HASHES.values())
    for cells in (16, 96, 16 * 5_000, 2**32 - 1):
        found = cells_of(ids, cells)
        assert found.tolist() == [(value >> 32) * cells >> 32 for value in HASHES.values()]
    assert cells_of(ids, 2**16).dtype == np.uint16


def test_the_columns_may_change_later() -> None:
    column = np.arange(100)
    order = bb.BlockOrder([column], blocks=3)
    before = [batch.indices.tolist() for batch in order.batches(0, 10)]
    column[:] = 0
    assert [batch.indices.tolist() for batch in order.batches(0, 10)] == before
    assert sum(len(order.members(0, 0, block)) for block in range(3)) == 100


IDS = np.array([4, 9, 4, 2])


@pytest.mark.parametrize(
    ("columns", "blocks", "error", "message"),
    [
        ([], 1, ValueError, "BlockOrder: one or two columns are needed, got 0; pass a list of arrays"),
        ([IDS] * 3, 1, ValueError, "one or two columns are needed, got 3"),
        (IDS, 1, ValueError, "one or two columns are needed, got 4"),
        ([IDS, IDS[:3]], 1, ValueError, "equal lengths, got 4 ids in column 0 and 3 in column 1"),
        ([IDS, IDS], [2], ValueError, "blocks must be an int or one per column, got 1 for 2 columns"),
        ([IDS], [2, 2], ValueError, "blocks must be an int or one per column, got 2 for 1 columns"),
        ([IDS], 0, ValueError, "blocks of column 0 must be in [1, 268435455], got 0"),
        ([IDS], 2**28, ValueError, "blocks of column 0 must be in [1, 268435455], got 268435456"),
        ([IDS, IDS], (3, 4), ValueError, "blocks of column 1 must be at most its number of distinct ids, 3, got 4"),
        ([IDS[:0]], 1, ValueError, "blocks of column 0 must be at most its number of distinct ids, 0, got 1"),
        ([IDS], 2.0, TypeError, "blocks of column 0 must be an int, got 2.0"),
        ([IDS], True, TypeError, "blocks of column 0 must be an int, got True"),
        ([IDS, IDS * 1.0], 1, TypeError, "column 1 must be int64[N], got float64[4]"),
        ([IDS.reshape(2, 2)], 1, ValueError, "column 0 must be int64[N], got int64[2, 2]"),
        ([IDS, np.array([1, 5, -3, -4])], 1, IndexError, "column 1 must not be negative, got id -3 at position 2"),
    ],
)
def test_bad_columns_and_blocks_are_refused(columns: Any, blocks: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        bb.BlockOrder(columns, blocks)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_bad_seeds_are_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=f"seed must be in .*, got {seed}"):
        bb.BlockOrder([IDS], 1, seed=seed)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda o: o.batches(-1, 2), ValueError, "epoch must be in [0, 9223372036854775807], got -1"),
        (lambda o: o.batches(0.5, 2), TypeError, "epoch must be an int, got 0.5"),
        (lambda o: o.batches(0, 0), ValueError, "batch_size must be in [1, 9223372036854775807], got 0"),
        (lambda o: o.batches(0, 2, first=-1), ValueError, "first must be in [0, 2], got -1"),
        (lambda o: o.batches(0, 2, first=4), ValueError, "first must be in [0, 2], got 4"),
        (lambda o: o.num_batches(-1, 2), ValueError, "epoch must be in"),
        (lambda o: o.num_batches(0, True), TypeError, "batch_size must be an int, got True"),
        (lambda o: o.members(-1, 0, 0), ValueError, "epoch must be in"),
        (lambda o: o.members(0, 1, 0), ValueError, "column must be in [0, 0], got 1"),
        (lambda o: o.members(0, 0, 2), ValueError, "block must be in [0, 1], got 2"),
        (lambda o: o.members(0, 0, -1), ValueError, "block must be in [0, 1], got -1"),
        (lambda o: o.block_of([1, -2], 0, 0), IndexError, "ids must not be negative, got id -2 at position 1"),
        (lambda o: o.block_of([1], 0, 2), ValueError, "column must be in [0, 0], got 2"),
        (lambda o: o.block_of([1.5], 0, 0), TypeError, "ids must be int64[N], got float64[1]"),
    ],
)
def test_bad_arguments_of_an_epoch_are_refused(call: Any, error: type[Exception], message: str) -> None:
    order = bb.BlockOrder([np.array([1, 2, 3])], blocks=2)
    with pytest.raises(error, match=re.escape(message)):
        call(order)
