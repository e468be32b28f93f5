"""The objects that callers hand in: the answer that a plain array gives, or an error; never another answer."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.table.topk import best_rows
from bunkbed.testing import ReferenceTable

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


# ---- every form of array, for every array that a call takes


class Subclass(np.ndarray):
    pass


def forms(plain: Any) -> dict[str, Any]:
    """The values of a plain array in every form; each is taken as they are, or refused."""
    wide = np.repeat(plain, 2, axis=0)
    read_only = plain.copy()
    read_only.flags.writeable = False
    memory = bytearray(plain.nbytes + 1)
    unaligned = np.frombuffer(memory, np.uint8)[1:].view(plain.dtype).reshape(plain.shape)
    unaligned[...] = plain
    found = {
        "plain": plain.copy(),
        "big-endian": plain.astype(plain.dtype.newbyteorder()),
        "read-only": read_only,
        "strided": wide[::2],
        "reversed": plain[::-1].copy()[::-1],
        "unaligned": unaligned,
        "Fortran order": np.asfortranarray(plain),
        "subclass": plain.view(Subclass),
        "masked without a mask": np.ma.masked_array(plain.copy()),
        "memoryview": memoryview(plain.copy()),
    }
    if plain.dtype == np.int64:
        found |= {"list": plain.tolist(), "tuple": tuple(plain.tolist()), "int32": plain.astype(np.int32)}
        found |= {"uint64": plain.astype(np.uint64), "big-endian int16": plain.astype(">i2")}
    with contextlib.suppress(ImportError):
        import torch

        found |= {"tensor": torch.from_numpy(plain.copy()), "strided tensor": torch.from_numpy(wide)[::2]}
    return found


def refused(plain: Any) -> dict[str, Any]:
    """What looks like the array and has other values, or none: never taken."""
    masked = np.ma.masked_array(plain.copy(), mask=np.zeros(plain.shape, bool))
    masked[-1] = np.ma.masked
    found = {
        "masked": masked,
        "object": plain.astype(object),
        "bool": plain.astype(bool),
        "float64": plain.astype(np.float64),
        "complex": plain.astype(np.complex64),
        "text": plain.astype(str),
        "datetime": plain.astype(np.int64).astype("M8[s]"),
        "None": np.full(plain.shape, None),
    }
    if plain.dtype == np.int64:
        found |= {"beyond int64": np.array([3, 1, 2**63, 3], np.uint64), "ints beyond int64": [3, 1, 2**64, 3]}
    else:
        found |= {"float16": plain.astype(np.float16), "int64": plain.astype(np.int64), "list": plain.tolist()}
        with contextlib.suppress(ImportError):
            import torch

            needs_gradient = torch.from_numpy(plain.copy()).requires_grad_()
            found |= {"tensor with gradient": needs_gradient, "bfloat16": torch.from_numpy(plain).bfloat16()}
    return found


GRADS = np.arange(1, 17, dtype=np.float32).reshape(4, 4)
UNIQUE = np.array([3, 1, 7, 2], np.int64)


def imported(table: Any, ids: Any, folder: Path) -> int:
    np.save(folder / "rows.npy", GRADS)
    return bb.import_rows(table, folder / "rows.npy", ids=ids)


#: Name -> (what is handed in, the call with it). What a call returns and what it leaves in the table are compared.
CALLS: dict[str, tuple[Any, Callable[[Any, Any, Path], Any]]] = {
    "lookup": (IDS, lambda t, a, _: t.lookup(a)),
    "lookup_bags ids": (IDS, lambda t, a, _: t.lookup_bags(a, [0, 2])),
    "lookup_bags offsets": (np.array([0, 1, 1, 3]), lambda t, a, _: t.lookup_bags(IDS, a, pooling="sum")),
    "lookup_bags weights": (GRADS[0], lambda t, a, _: t.lookup_bags(IDS, [0, 2], weights=a)),
    "get": (IDS, lambda t, a, _: t.get(a, "exp_avg")),
    "contains": (IDS, lambda t, a, _: t.contains(a)),
    "batch": (IDS, lambda t, a, _: np.sort(t.batch(a).unique())),
    "stage": (IDS, lambda t, a, _: t.stage(a)),
    "topk queries": (GRADS, lambda t, a, _: t.topk(a, 3)),
    "topk ids": (IDS, lambda t, a, _: t.topk(GRADS, 3, ids=a)),
    "topk exclude": (
        IDS,
        lambda t, a, _: t.topk(GRADS, 3, exclude=np.asarray(a) if isinstance(a, (list, tuple)) else a),
    ),
    "topk exclude each": (IDS, lambda t, a, _: t.topk(GRADS, 3, exclude=[a, IDS[:0], IDS, a])),
    "neighbors": (IDS, lambda t, a, _: bb.neighbors(t, a, 2)),
    "update ids": (IDS, lambda t, a, _: t.update(a, GRADS)),
    "update grads": (GRADS, lambda t, a, _: t.update(IDS, a)),
    "update_batch sums": (GRADS, lambda t, a, _: t.update_batch(t.batch(UNIQUE), a)),
    "set ids": (UNIQUE, lambda t, a, _: t.set(a, GRADS)),
    "set values": (GRADS, lambda t, a, _: t.set(UNIQUE, a)),
    "import_rows ids": (UNIQUE, imported),
}


def outcome(kind: str, call: Callable[[Any, Any, Path], Any], handed_in: Any, folder: Path) -> Any:
    """What the call returns, and the table after it."""
    facts: dict[str, Any] = {"dim": 4, "num_rows": 10, "seed": 3}
    if kind == "sharded":
        made: Any = bb.ShardedTable.create(folder / "sharded", shards=2, ram="64MiB", **facts)
    else:
        made = bb.create(None, **facts)
    every = np.arange(10)
    try:
        made.update(every, np.ones((10, 4), np.float32))
        found = call(made, handed_in, folder)
        after = [made.get(every, slot).tobytes() for slot in ("weight", *made.slots)]
        results = found if isinstance(found, tuple) else (found,)
        return [(one.shape, one.tobytes()) if isinstance(one, np.ndarray) else one for one in results], after
    finally:
        made.close(False)
        shutil.rmtree(folder / "sharded", ignore_errors=True)


@pytest.mark.parametrize("kind", ["table", "sharded"])
@pytest.mark.parametrize("name", CALLS)
def test_every_form_of_an_array_is_taken_as_its_values_or_refused(tmp_path: Path, kind: str, name: str) -> None:
    plain, call = CALLS[name]
    expected = outcome(kind, call, plain, tmp_path)
    few = ("big-endian", "strided", "unaligned", "masked", "object")  # shards are behind the same door
    for form, handed_in in forms(plain).items():
        if kind == "sharded" and form not in few:
            continue
        assert outcome(kind, call, handed_in, tmp_path) == expected, form
    for form, handed_in in refused(plain).items():
        if kind == "sharded" and form not in few:
            continue
        with pytest.raises((TypeError, ValueError, IndexError)) as caught:
            outcome(kind, call, handed_in, tmp_path)
        assert "must be" in str(caught.value) or "masked" in str(caught.value) or "does not fit" in str(caught.value), (
            form
        )


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_other_shapes_are_taken_as_they_are(table: bb.Table) -> None:
    plain = np.array([[3, 1], [7, 3]], np.int64)
    for handed_in in (plain, np.asfortranarray(plain), plain.T.copy().T, np.matrix(plain), plain.tolist()):
        assert (table.lookup(handed_in) == table.lookup(plain.ravel()).reshape(2, 2, 4)).all()
        assert (table.contains(handed_in) == np.ones((2, 2))).all()
    for zero in (np.int64(3), np.array(3), 3):
        assert table.lookup(zero).shape == (4,) and (table.lookup(zero) == table.lookup([3])[0]).all()
    for nothing in ([], (), np.empty(0, np.int64), np.empty((0, 2), np.int32)):
        assert table.lookup(nothing).size == 0
    for each in ([IDS[:1], [1]], (memoryview(IDS[:1].copy()), (1,))):
        assert (table.topk(GRADS[:2], 9, exclude=each)[0][1] != 1).all()
        assert (table.topk(GRADS[:2], 9, exclude=each)[0][0] == 1).any()
    with pytest.raises(
        ValueError, match=r"exclude must be int64\[E\] for all queries, or a list .*, got int64\[2, 1\]"
    ):
        table.topk(GRADS[:2], 9, exclude=np.array([[3], [1]]))


# ---- buffers


def test_buffers_may_change_once_a_call_returned(tmp_path: Path) -> None:
    with bb.create(tmp_path / "t", dim=4, num_rows=1000, ram="16MiB") as table:
        table.update(np.arange(1000), np.random.default_rng(0).standard_normal((1000, 4)).astype(np.float32))
        table.commit()
        ids, grads = np.arange(500), np.ones((500, 4), np.float32)
        expected = table.lookup(np.arange(500))
        batch = table.batch(ids)
        table.stage(ids)
        ids[:] = 999
        assert (table.lookup_batch(batch, 500) == expected).all()
        assert (np.sort(batch.unique()) == np.arange(500)).all()
        sums = batch.sum(grads)[0]
        grads[:] = np.nan
        pending = table.begin_commit()
        table.update_batch(batch, sums)
        sums[:] = np.nan
        pending.wait()
        assert np.isfinite(table.lookup(np.arange(500))).all() and table.is_dirty


def test_arrays_that_a_call_returned_are_the_callers(table: bb.Table) -> None:
    before = table.lookup(np.arange(10)).tobytes()
    for returned in (
        table.lookup(IDS),
        table.lookup_bags(IDS, [0]),
        table.get(IDS),
        table.batch(IDS).unique(),
        *next(table.scan()),
        *table.topk(GRADS, 3),
    ):
        returned[...] = 0
    assert table.lookup(np.arange(10)).tobytes() == before


def test_sizes_that_are_not_those_of_the_batch_are_refused(table: bb.Table) -> None:
    batch = table.batch(IDS)
    for size in (0, 3, 5, 10**6):
        with pytest.raises(ValueError, match=rf"the batch has 4 ids, got size={size}"):
            table.lookup_batch(batch, size)
    for sums in (GRADS[:0], GRADS[:2], np.ones((4, 4), np.float32), GRADS[:3, :2].copy()):
        with pytest.raises(ValueError, match=r"sums must be float32\[3, 4\]"):
            table.update_batch(batch, sums)
    assert table.step == 1
