"""`TableTests`: the conformance suite for every kind of table. Subclass it, give it a factory, run pytest.

Needs pytest. Values are compared with `ReferenceTable` as bytes, so that 0 and -0 differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.core.types import Json
from bunkbed.testing.admission import AdmissionTests
from bunkbed.testing.arithmetic import IntArray
from bunkbed.testing.commits import CommitTests
from bunkbed.testing.compare import assert_same_bits, assert_same_rows, zipf_ids
from bunkbed.testing.narrow import ALL_NARROW, NARROW, NarrowTests, both_widths
from bunkbed.testing.reference import ReferenceTable
from bunkbed.testing.suite_part import Pair, Tested
from bunkbed.testing.sweeps import SweepTests
from bunkbed.window import Window

OPTIMIZERS = [
    bb.SGD(lr=0.1),
    bb.SGD(lr=0.1, weight_decay=0.01),
    bb.Adagrad(lr=0.1, initial_accumulator=0.1),
    bb.Adagrad(lr=0.1, weight_decay=0.01, decoupled=True),
    bb.RowwiseAdagrad(lr=0.1),
    bb.RowwiseAdagrad(lr=0.1, weight_decay=0.01),
    bb.Adam(lr=0.01),
    bb.Adam(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.01, decoupled=True),
    bb.Adam(lr=0.01, weight_decay=0.01),
]


class TableTests(NarrowTests, CommitTests, SweepTests, AdmissionTests):
    """A conformance suite for tables; subclass it as ``TestSomething`` and override `make_table`.

    A subclass must define `make_table`. Tests that need files skip if `table.path` is None. A subclass that opens
    tables in another way overrides `reopen` too. Set `num_rows` larger to force eviction.

    Example::

        class TestTiny(TableTests):
            def make_table(self, tmp_path, **kwargs):
                return bb.create(tmp_path / "table", ram="1MiB", **kwargs)
    """

    #: `num_rows` of the tables in these tests.
    num_rows = 1000
    dim = 8

    def make_table(self, tmp_path: Path, **kwargs: Any) -> Tested:
        """Return a new table with these arguments of ``bb.create`` (never `path` or `ram`)."""
        raise NotImplementedError("subclasses of TableTests override make_table(self, tmp_path, **kwargs)")

    # ---- fixtures

    @pytest.fixture
    def pair(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
        """Yield a table and its oracle, made with the same arguments."""
        kwargs = {
            "dim": self.dim,
            "num_rows": self.num_rows,
            "optimizer": bb.Adam(lr=0.01),
            "init": bb.Normal(std=0.1),
            "seed": 7,
            **getattr(request, "param", {}),
        }
        table = self.make_table(tmp_path, **kwargs)
        yield table, ReferenceTable(**kwargs)
        if not table.closed:
            table.close(commit=False)

    def train(self, table: Tested, reference: ReferenceTable, *, steps: int = 20, seed: int = 0) -> None:
        """Make the same updates, with duplicate ids, to both."""
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            ids = zipf_ids(rng, self.num_rows, 300)
            grads = rng.standard_normal((300, self.dim)).astype(np.float32)
            table.update(ids, grads)
            reference.update(ids, grads)

    def all_ids(self) -> IntArray:
        return np.arange(self.num_rows, dtype=np.int64)

    # ---- reading

    def test_untouched_rows_are_their_initial_value(self, pair: Pair) -> None:
        table, reference = pair
        ids = self.all_ids()
        assert_same_bits(table.lookup(ids), reference.lookup(ids))
        assert_same_bits(table.lookup(ids[::-1]), reference.lookup(ids[::-1]))
        assert not table.contains(ids).any()
        assert len(table) == 0

    @pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 3), (1, 2, 3, 4)])
    def test_lookup_keeps_the_shape_of_ids(self, pair: Pair, shape: tuple[int, ...]) -> None:
        table, reference = pair
        ids = np.random.default_rng(0).integers(0, self.num_rows, shape)
        ids = np.asarray(ids, np.int64)
        found = table.lookup(ids)
        assert found.shape == (*shape, self.dim) and found.dtype == np.float32
        assert_same_bits(found, reference.lookup(ids))
        assert table.contains(ids).shape == shape

    def test_ids_may_be_strided_or_a_list(self, pair: Pair) -> None:
        table, reference = pair
        ids = self.all_ids()[::3].reshape(2, -1).T
        assert_same_bits(table.lookup(ids), reference.lookup(ids))
        assert_same_bits(table.lookup([3, 1, 3]), reference.lookup([3, 1, 3]))

    def test_lookup_returns_a_copy(self, pair: Pair) -> None:
        table, reference = pair
        self.train(table, reference, steps=2)
        first = table.lookup([1, 2])
        first[:] = 99
        assert_same_bits(table.lookup([1, 2]), reference.lookup([1, 2]))

    def test_an_earlier_lookup_does_not_see_a_later_update(self, pair: Pair) -> None:
        table, reference = pair
        before, expected = table.lookup([5]), reference.lookup([5])
        table.update([5], np.ones((1, self.dim), np.float32))
        assert_same_bits(before, expected)
        assert table.lookup([5]).tobytes() != before.tobytes()

    def test_lookup_fills_out(self, pair: Pair) -> None:
        table, reference = pair
        out = np.full((3, self.dim), 99, np.float32)
        assert table.lookup([4, 5, 4], out=out) is out
        assert_same_bits(out, reference.lookup([4, 5, 4]))
        with pytest.raises(ValueError, match="out"):
            table.lookup([4, 5], out=out)

    def test_lookup_is_not_storage(self, pair: Pair) -> None:
        table, _ = pair
        for touch in (True, False):
            table.lookup(self.all_ids(), touch=touch)
            table.stage(self.all_ids()[:50])
            assert len(table) == 0
            assert not table.contains(self.all_ids()).any()
        assert list(table.scan()) == []

    def test_untouching_lookup_agrees_and_caches_nothing(self, pair: Pair) -> None:
        table, reference = pair
        self.train(table, reference)
        before = table.stats()["frames"]
        ids = self.all_ids()
        assert_same_bits(table.lookup(ids, touch=False), reference.lookup(ids))
        assert table.stats()["frames"] == before
        assert_same_bits(table.lookup(ids), reference.lookup(ids))

    @pytest.mark.parametrize("weighted", [False, True])
    @pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn", "none"])
    @pytest.mark.parametrize("touch", [True, False])
    def test_bags(self, pair: Pair, pooling: str, weighted: bool, touch: bool) -> None:
        table, reference = pair
        self.train(table, reference, steps=3)
        rng = np.random.default_rng(1)
        size = 1400
        ids = zipf_ids(rng, self.num_rows, size)
        offsets = np.sort(rng.integers(0, 201, 30))
        offsets[:2] = 0  # an empty bag first
        offsets[-2:] = 200, size  # an empty bag last, after a bag of 1,200 ids
        weights = rng.random(size).astype(np.float32) if weighted else None
        arguments: Json = {"pooling": pooling, "weights": weights, "touch": touch}
        found = table.lookup_bags(ids, offsets, **arguments)
        assert found.shape == (size if pooling == "none" else 30, self.dim)
        assert_same_bits(found, reference.lookup_bags(ids, offsets, **arguments))
        assert pooling == "none" or not (found[0].any() or found[-1].any())

    @pytest.mark.parametrize("pooling", ["mean", "sqrtn"])
    def test_bags_whose_weights_sum_to_0_are_zeros(self, pair: Pair, pooling: str) -> None:
        table, reference = pair
        self.train(table, reference, steps=1)
        weights = np.array([0.5, -0.5, 0, -0.0, 0, 2], np.float32)
        found = table.lookup_bags([4, 5, 4, 6, 7, 8], [0, 2, 4], pooling=pooling, weights=weights)
        expected = reference.lookup_bags([4, 5, 4, 6, 7, 8], [0, 2, 4], pooling=pooling, weights=weights)
        assert_same_bits(found, expected)
        assert found.any(axis=1).tolist() == [pooling == "sqrtn", False, True] and np.isfinite(found).all()

    @pytest.mark.parametrize("pooling", ["sum", "none"])
    def test_bags_fill_out(self, pair: Pair, pooling: str) -> None:
        table, reference = pair
        rows = 3 if pooling == "none" else 2
        out = np.full((rows, self.dim), 99, np.float32)
        arguments: Json = {"pooling": pooling, "weights": np.array([2, 3, 4], np.float32)}
        assert table.lookup_bags([4, 5, 4], [0, 1], **arguments, out=out) is out
        assert_same_bits(out, reference.lookup_bags([4, 5, 4], [0, 1], **arguments))
        with pytest.raises(ValueError, match="out"):
            table.lookup_bags([4, 5], [0], pooling=pooling, out=np.zeros((3, self.dim + 1), np.float32))

    def test_no_bags(self, pair: Pair) -> None:
        table, _ = pair
        none = np.zeros(0, np.int64)
        assert table.lookup_bags(none, none).shape == (0, self.dim)

    @both_widths
    @pytest.mark.parametrize("k", [1, 10])
    def test_topk_is_exact(self, pair: Pair, k: int) -> None:
        table, reference = pair
        self.train(table, reference)
        queries = np.random.default_rng(2).standard_normal((4, self.dim)).astype(np.float32)
        ids = np.random.default_rng(3).choice(self.num_rows, 200, replace=False)
        for arguments in (
            {"ids": ids},
            {},
            {"exclude": ids[:20]},
            {"ids": ids, "exclude": ids[:20]},
            {"exclude": [ids[:20], ids[:0], ids[5:90], ids]},
            {"ids": ids[:3]},
        ):
            found, scores = table.topk(queries, k, **arguments)
            expected, expected_scores = reference.topk(queries, k, **arguments)
            assert found.tolist() == expected.tolist()
            assert_same_bits(scores, expected_scores)
        best, _ = table.topk(queries[0], k)
        assert best.tolist() == reference.topk(queries, k)[0][0].tolist()

    @both_widths
    @pytest.mark.parametrize("chunk", [7, 65_536])
    def test_scan_yields_every_stored_row_once(self, pair: Pair, chunk: int) -> None:
        table, reference = pair
        self.train(table, reference)
        for slot in ("weight", *reference.slots):
            parts = [(ids.copy(), values.copy()) for ids, values in table.scan(slot=slot, chunk=chunk)]
            assert all(0 < ids.size <= chunk for ids, _ in parts)
            ids = np.concatenate([ids for ids, _ in parts])
            values = np.concatenate([values for _, values in parts])
            order = np.argsort(ids)
            stored = np.flatnonzero(reference.contains(self.all_ids()))
            assert ids[order].tolist() == stored.tolist()
            assert_same_bits(values[order], reference.get(stored, slot=slot), slot)

    # ---- writing

    @pytest.mark.parametrize("pair", [{"optimizer": o} for o in OPTIMIZERS], indirect=True, ids=repr)
    def test_updates_are_the_reference_to_the_last_bit(self, pair: Pair) -> None:
        table, reference = pair
        self.train(table, reference)
        assert_same_rows(table, reference, self.all_ids())
        assert len(table) == len(reference)

    def test_one_update_of_duplicates_is_one_step_of_their_sum(self, pair: Pair) -> None:
        table, reference = pair
        grads = np.arange(3 * self.dim, dtype=np.float32).reshape(3, self.dim)
        table.update([9, 4, 9], grads)
        reference.update([9, 4], np.stack([grads[0] + grads[2], grads[1]]))
        assert_same_rows(table, reference, np.array([4, 9]))
        assert table.step == 1

    def test_an_update_leaves_its_arguments_alone(self, pair: Pair) -> None:
        table, _ = pair
        ids, grads = np.array([3, 3, 8]), np.ones((3, self.dim), np.float32)
        table.update(ids, grads)
        assert ids.tolist() == [3, 3, 8] and (grads == 1).all()

    def test_an_empty_update_is_a_step(self, pair: Pair) -> None:
        table, reference = pair
        for t in (table, reference):
            t.update(np.zeros(0, np.int64), np.zeros((0, self.dim), np.float32))
        self.train(table, reference, steps=1)
        assert_same_rows(table, reference, self.all_ids())
        assert table.step == 2

    def test_lr_of_one_step(self, pair: Pair) -> None:
        table, reference = pair
        for t in (table, reference):
            t.update([1, 2], np.ones((2, self.dim), np.float32), lr=0.5)
            t.update([2, 3], np.ones((2, self.dim), np.float32), lr=0.0)
            t.update([3], np.ones((1, self.dim), np.float32))
        assert_same_rows(table, reference, self.all_ids())
        assert table.optimizer == bb.Adam(lr=0.01)

    def test_a_step_imposed_from_outside(self, pair: Pair) -> None:
        table, reference = pair
        for t in (table, reference):
            t.update([1, 2], np.ones((2, self.dim), np.float32), step=100)
            t.update([2], np.ones((1, self.dim), np.float32))
        assert table.step == 101
        assert_same_rows(table, reference, self.all_ids())

    def test_only_rows_of_the_step_change(self, pair: Pair) -> None:
        table, _ = pair
        before = table.lookup(self.all_ids())
        table.update([17], np.ones((1, self.dim), np.float32))
        after = table.lookup(self.all_ids())
        assert np.flatnonzero((before != after).any(axis=1)).tolist() == [17]
        assert np.flatnonzero(table.contains(self.all_ids())).tolist() == [17]

    def test_set_and_get_every_slot(self, pair: Pair) -> None:
        table, reference = pair
        self.train(table, reference, steps=2)
        rng = np.random.default_rng(4)
        for slot in ("weight", *reference.slots):
            ids = rng.choice(self.num_rows, 100, replace=False)
            values = rng.random((100, *reference.get(ids, slot=slot).shape[1:])).astype(np.float32)
            table.set(ids, values, slot=slot)
            reference.set(ids, values, slot=slot)
            assert_same_bits(table.get(ids, slot=slot), values)
        assert_same_rows(table, reference, self.all_ids())
        self.train(table, reference, steps=2, seed=9)  # training continues from the values set
        assert_same_rows(table, reference, self.all_ids())

    def test_set_keeps_the_last_of_duplicates(self, pair: Pair) -> None:
        table, _ = pair
        values = np.arange(3 * self.dim, dtype=np.float32).reshape(3, self.dim)
        table.set([6, 2, 6], values)
        assert_same_bits(table.get([6, 2]), values[[2, 1]])
        assert table.step == 0 and len(table) == 2

    def test_set_of_a_slot_stores_the_row_with_its_initial_weight(self, pair: Pair) -> None:
        table, reference = pair
        ones = np.ones((1, self.dim), np.float32)
        table.set([11], ones, slot="exp_avg")
        reference.set([11], ones, slot="exp_avg")
        assert_same_rows(table, reference, np.array([10, 11]))

    def test_a_deleted_row_is_its_initial_row(self, pair: Pair) -> None:
        table, reference = pair
        rng = np.random.default_rng(8)
        for seed in range(4):
            self.train(table, reference, steps=3, seed=seed)
            ids = rng.choice(self.num_rows, 150)
            assert table.delete(ids) == reference.delete(ids)
            assert not table.contains(ids).any() and len(table) == len(reference)
            assert table.delete(ids) == 0
            assert_same_rows(table, reference, self.all_ids())
        self.train(table, reference, steps=3, seed=9)  # deleted rows begin with fresh state
        assert_same_rows(table, reference, self.all_ids())
        assert table.delete([]) == 0

    def test_staging_moves_no_value(self, pair: Pair) -> None:
        table, reference = pair
        rng = np.random.default_rng(5)
        for again in range(10):
            ids = zipf_ids(rng, self.num_rows, 100)
            grads = rng.standard_normal((100, self.dim)).astype(np.float32)
            table.stage(ids)  # the update then changes rows that are being prefetched
            table.update(ids, grads)
            reference.update(ids, grads)
            if again % 2:
                table.stage(ids[::-1])
            assert_same_bits(table.lookup(ids), reference.lookup(ids))
        assert_same_rows(table, reference, self.all_ids())

    def test_a_window_moves_no_value(self, pair: Pair) -> None:
        table, reference = pair
        if isinstance(table, ReferenceTable):
            pytest.skip("the plain reference has nothing to plan")
        rng = np.random.default_rng(6)
        batches = [zipf_ids(rng, self.num_rows, 100) for _ in range(30)]
        with Window(table, batches=8) as window:
            for step, ids in enumerate(batches):
                for ahead in batches[step * 2 : step * 2 + 2]:
                    window.push(None if step == 5 else ahead)
                window.advance()
                grads = rng.standard_normal((100, self.dim)).astype(np.float32)
                assert_same_bits(table.lookup(ids), reference.lookup(ids))
                table.update(ids, grads)
                reference.update(ids, grads)
        assert_same_rows(table, reference, self.all_ids())

    @pytest.mark.parametrize("pair", [{"num_rows": None}], indirect=True)
    def test_an_unbounded_table_takes_any_id(self, pair: Pair) -> None:
        table, reference = pair
        ids = np.array([0, 1, 2**31, 2**40 + 3, 2**63 - 1, 2**63 - 1], np.int64)
        grads = np.random.default_rng(6).standard_normal((6, self.dim)).astype(np.float32)
        assert_same_bits(table.lookup(ids), reference.lookup(ids))
        for t in (table, reference):
            t.update(ids, grads)
        assert_same_rows(table, reference, np.append(ids, 5))
        assert table.num_rows is None and len(table) == 5

    @pytest.mark.parametrize(
        "pair",
        [{"dim": dim, **more} for more in ({}, *NARROW[-3:], ALL_NARROW) for dim in (1, 3, 17, 500)],
        indirect=True,
        ids=repr,
    )
    def test_any_dim(self, pair: Pair) -> None:
        table, reference = pair
        rng = np.random.default_rng(7)
        for _ in range(3):
            ids = zipf_ids(rng, self.num_rows, 40)
            grads = rng.standard_normal((40, table.dim)).astype(np.float32)
            table.update(ids, grads)
            reference.update(ids, grads)
        assert_same_rows(table, reference, self.all_ids()[:100])
        assert_same_rows(table, reference, ids)

    # ---- wrong arguments

    @pytest.mark.parametrize(
        ("ids", "kind", "message"),
        [
            ([1, -2, 3], IndexError, r"id -2 at position 1"),
            ([1, 2, 10**9], IndexError, r"id 1000000000 at position 2"),
            (np.array([2**63 + 5], np.uint64), IndexError, r"9223372036854775813"),
            ([1.0], TypeError, r"float64"),
            ([True], TypeError, r"bool"),
            (["a"], TypeError, r"<U1|str|object"),
        ],
        ids=repr,
    )
    def test_wrong_ids_change_nothing(self, pair: Pair, ids: Any, kind: type[Exception], message: str) -> None:
        table, reference = pair
        self.train(table, reference, steps=1)
        some = np.ones((len(ids), self.dim), np.float32)
        calls: list[Callable[[], Any]] = [
            lambda: table.lookup(ids),
            lambda: table.lookup_bags(ids, [0]),
            lambda: table.update(ids, some),
            lambda: table.set(ids, some),
            lambda: table.delete(ids),
            lambda: table.get(ids),
            lambda: table.contains(ids),
            lambda: table.stage(ids),
        ]
        for call in calls:
            with pytest.raises(kind, match=message):
                call()
        assert_same_rows(table, reference, self.all_ids())

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_gradient_that_is_not_finite_changes_nothing(self, pair: Pair, bad: float) -> None:
        table, reference = pair
        self.train(table, reference, steps=1)
        grads = np.ones((5, self.dim), np.float32)
        grads[3, 2] = bad
        with pytest.raises(ValueError, match=r"position 3.*(nan|inf)"):
            table.update([1, 2, 3, 4, 5], grads)
        assert_same_rows(table, reference, self.all_ids())

    @pytest.mark.parametrize(
        ("ids", "shape"),
        [([1, 2], (3, 8)), ([1, 2], (2, 7)), ([1, 2], (2,)), ([[1, 2]], (2, 8))],
        ids=repr,
    )
    def test_a_gradient_of_the_wrong_shape_changes_nothing(self, pair: Pair, ids: Any, shape: tuple[int, ...]) -> None:
        table, reference = pair
        with pytest.raises(ValueError, match=r"(float32|int64)\["):
            table.update(ids, np.ones(shape, np.float32))
        assert_same_rows(table, reference, self.all_ids())

    def test_an_unknown_slot_or_pooling_is_named(self, pair: Pair) -> None:
        table, _ = pair
        for call in (
            lambda: table.get([1], slot="momentum"),
            lambda: table.set([1], np.ones((1, self.dim), np.float32), slot="momentum"),
            lambda: list(table.scan(slot="momentum")),
        ):
            with pytest.raises(ValueError, match=r"momentum.*exp_avg"):
                call()
        with pytest.raises(ValueError, match=r"median"):
            table.lookup_bags([1], [0], pooling="median")

    # ---- facts and closing

    def test_facts(self, pair: Pair) -> None:
        table, reference = pair
        assert (table.dim, table.num_rows, table.step) == (self.dim, self.num_rows, 0)
        assert table.optimizer == bb.Adam(lr=0.01)
        assert table.init == bb.Normal(std=0.1) and table.seed == 7
        assert str(table.dtype) == "float32"
        assert [s for s in table.slots if s != "weight"] == list(reference.slots)
        assert table.closed is False and table.mode == "w"

    def test_stats_add_up(self, pair: Pair) -> None:
        table, reference = pair
        self.train(table, reference)
        table.lookup(self.all_ids())
        stats = table.stats()
        assert stats["hits"] + stats["misses"] + stats["first_touches"] == stats["unique_rows"]
        assert stats["updates"] == 20 and stats["stored_rows"] == len(table) == len(reference)
        assert stats["frames"] <= stats["frame_capacity"] or table.path is None
        assert all(isinstance(value, int | float) for value in stats.values())

    def test_a_closed_table_refuses_use(self, pair: Pair) -> None:
        table, _ = pair
        table.close()
        table.close()
        ones = np.ones((1, self.dim), np.float32)
        for call in (
            lambda: table.lookup([1]),
            lambda: table.update([1], ones),
            lambda: table.set([1], ones),
            lambda: table.delete([1]),
            lambda: table.get([1]),
            lambda: table.commit(),
            lambda: table.stage([1]),
            lambda: table.contains([1]),
            lambda: list(table.scan()),
        ):
            with pytest.raises(bb.TableClosedError, match="closed"):
                call()
