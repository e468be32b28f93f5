"""The objects that callers hand in: the answer that a plain array gives, or an error; never another answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.ram_snapshots import RamSnapshots
from bunkbed.testing import ReferenceTable
from bunkbed.topk import best_rows

IDS = np.array([3, 1, 7, 3], np.int64)


@pytest.fixture
def table() -> Iterator[bb.Table]:
    with bb.create(None, dim=4, num_rows=10, seed=3, dtype="bfloat16") as made:
        made.update(np.arange(10), np.ones((10, 4), np.float32))
        yield made


# ---- out=


@pytest.mark.parametrize("dtype", [">f4", ">u2"])
def test_out_of_the_other_byte_order_is_refused_and_not_written(table: bb.Table, dtype: str) -> None:
    out = np.full((4, 4), 7, dtype)
    with pytest.raises(ValueError, match=rf"out must be .* in native byte order, got {dtype}\[4, 4\]"):
        table.lookup(IDS, out=out)
    assert (out == 7).all()
    bags = np.full((1, 4), 7, ">f4")
    for pooling in ("sum", "none"):
        shaped = out if pooling == "none" else bags
        with pytest.raises(ValueError, match=r"out must be .* in native byte order"):
            table.lookup_bags(IDS, [0], pooling=pooling, out=shaped)
    assert (bags == 7).all()


def test_out_that_the_core_cannot_write_to_says_why(table: bb.Table) -> None:
    unaligned = np.frombuffer(bytearray(65), np.uint8)[1:].view(np.float32).reshape(4, 4)
    read_only = np.zeros((4, 4), np.float32)
    read_only.flags.writeable = False
    cases = {
        "not contiguous": np.zeros((4, 8), np.float32)[:, ::2],
        "read-only": read_only,
        "not aligned": unaligned,
    }
    for why, out in cases.items():
        with pytest.raises(ValueError, match=rf"out must be a writable, aligned, C-contiguous array .*, {why}"):
            table.lookup(IDS, out=out)
    masked = np.ma.masked_array(np.zeros((4, 4), np.float32), mask=np.eye(4))
    with pytest.raises(ValueError, match=r"out must be an array of .*, got MaskedArray"):
        table.lookup(IDS, out=masked)


def test_out_over_the_memory_of_what_is_read_is_refused(table: bb.Table) -> None:
    memory = np.zeros(16, np.int64)
    memory[:8] = np.arange(8)
    out = memory.view(np.float32).reshape(8, 4)
    with pytest.raises(ValueError, match=r"out shares memory with what is read; give it an array of its own"):
        table.lookup(memory[:8], out=out)
    with pytest.raises(ValueError, match=r"out shares memory with what is read"):
        table.lookup_bags(memory[:8], np.arange(8), out=out)
    weights = np.ones(32, np.float32)
    with pytest.raises(ValueError, match=r"out shares memory with what is read"):
        table.lookup_bags(np.arange(8), np.arange(8), weights=weights[:8], out=weights.reshape(8, 4))
    assert (memory[:8] == np.arange(8)).all() and (weights == 1).all()


# ---- StopIteration, which ends an iterator in silence


def test_object_ids_raise_no_stop_iteration(table: bb.Table) -> None:
    objects = np.array([3, 1], object)
    with pytest.raises(TypeError, match=r"ids must be int64\[N\], got object\[2\]; .*astype\(np.int64\)"):
        table.lookup(objects)
    with pytest.raises(TypeError, match=r"got object\[2\]"):
        list(map(table.lookup, [IDS, objects, IDS]))  # a map() that meets StopIteration only ends
    with pytest.raises(IndexError, match=rf"id {2**64} at position 1 does not fit int64"):
        table.lookup(np.array([3, 2**64], object))


def test_an_epoch_that_is_not_kept_in_ram_raises_no_stop_iteration(table: bb.Table) -> None:
    kept = RamSnapshots(table)
    kept.commit("best")
    with pytest.raises(ValueError, match=r"keeps no epoch 99; it keeps: {'best': \d+}"):
        kept.rewind(99)


# ---- the last step


@pytest.mark.parametrize("kind", ["table", "sharded"])
def test_the_number_of_a_step_does_not_overflow(tmp_path: Path, kind: str) -> None:
    if kind == "table":
        table: bb.Table = bb.create(None, dim=4, num_rows=10)
    else:
        table = bb.ShardedTable.create(tmp_path / "t", shards=2, dim=4, num_rows=10, ram="64MiB")
    ones = np.ones((4, 4), np.float32)
    with table:
        with pytest.raises(ValueError, match=rf"step must be in \[1, {2**63 - 2}\], got {2**63 - 1}"):
            table.update(IDS, ones, step=2**63 - 1)
        assert table.step == 0 and not table.contains(IDS).any()
        table.update(IDS, ones, step=2**63 - 2)
        before = table.lookup(IDS)
        with pytest.raises(ValueError, match=rf"step must be in \[1, {2**63 - 2}\], got {2**63 - 1}"):
            table.update(IDS, ones)
        with pytest.raises(ValueError, match=rf"step must be in \[1, {2**63 - 2}\], got {2**63 - 1}"):
            table.update_batch(table.batch(IDS[:1]), ones[:1])
        assert table.step == 2**63 - 2 and (table.lookup(IDS) == before).all()
        table.update(IDS, ones, step=7)
        assert table.step == 7


# ---- scores that are no numbers


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_queries_that_are_not_finite_are_refused(table: bb.Table, value: float) -> None:
    queries = np.zeros((3, 4), np.float32)
    queries[1, 2] = value
    with pytest.raises(ValueError, match=rf"queries must be finite, got {value} at position 1, element 2"):
        table.topk(queries, 2)


def test_rows_whose_score_is_nan_come_last_and_do_not_vanish() -> None:
    large = 3e38
    rows = np.array([[1, 0], [large, large], [-1, 0], [large, large], [-large, -large]], np.float32)
    query = np.array([large, -large], np.float32)  # 3e38 * 3e38 is inf, and inf - inf is NaN
    with bb.create(None, dim=2, num_rows=10) as table:
        table.set(np.arange(5), rows)
        reference = ReferenceTable(dim=2, num_rows=10)
        reference.set(np.arange(5), rows)
        for order in (None, [4, 3, 2, 1, 0]):
            ids, scores = table.topk(query, 7, ids=order)
            assert ids.tolist() == [0, 2, 1, 3, 4, -1, -1] == reference.topk(query, 7, ids=order)[0].tolist()
            assert np.isnan(scores[2:5]).all() and (scores[5:] == -np.inf).all()
            assert table.topk(query, 3, ids=order)[0].tolist() == [0, 2, 1]
        parts = iter([(np.array([at]), rows[at : at + 1]) for at in (3, 1, 2, 0, 4)])
        assert best_rows(query[None], 4, parts, None)[0].tolist() == [[0, 2, 1, 3]]


def test_neighbors_of_a_row_that_is_not_finite_say_so() -> None:
    with bb.create(None, dim=2, num_rows=10, optimizer=bb.SGD(lr=3e38), init=bb.Zeros()) as table:
        table.set([3, 4], np.ones((2, 2), np.float32))
        table.update([5], np.array([[9.0, 0.0]], np.float32))  # its weight overflows
        assert table.lookup([5]).tolist() == [[-np.inf, 0.0]]
        for metric in ("dot", "cosine"):
            with pytest.raises(ValueError, match=r"rows must be finite, got -inf at position 1, element 0"):
                bb.neighbors(table, [3, 5], 1, metric=metric)
            ids, scores = bb.neighbors(table, 3, 3, metric=metric)
            assert ids.tolist() == [4, 5, -1], metric
            assert np.isnan(scores[1]) == (metric == "cosine")
