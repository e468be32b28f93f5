"""The objects that callers hand in: the answer that a plain array gives, or an error; never another answer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.ram_snapshots import RamSnapshots

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
