"""The part of `TableTests` about rows that updates store with a probability, or from the n-th step that names them."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.core.types import Json
from bunkbed.testing.compare import assert_same_bits, assert_same_rows, counts_of
from bunkbed.testing.reference import ReferenceTable
from bunkbed.testing.suite_part import Pair, SuitePart, Tested
from bunkbed.testing.sweeps import assert_same_sweep

_TABLES: list[Json] = [
    {"admit": 0.3},
    {"admit": 0.02, "seed": 2**63 + 11},
    {"admit": 0.97, "optimizer": bb.SGD(lr=0.1, weight_decay=0.01)},
    {"admit": 0.2, "dtype": "bfloat16", "optimizer": bb.Adam(lr=0.01, state_dtype="bfloat16")},
    {"admit": 0.2, "max_rows": 60, "evict": "rarest"},
    {"admit": 0.4, "expire": 5, "optimizer": bb.RowwiseAdagrad(lr=0.1)},
    {"admit": 2},
    {"admit": 3, "dtype": "bfloat16", "optimizer": bb.Adam(lr=0.01, state_dtype="bfloat16")},
    {"admit": 3, "max_rows": 60, "evict": "rarest"},
    {"admit": 4, "expire": 5, "optimizer": bb.RowwiseAdagrad(lr=0.1)},
]
admitting = pytest.mark.parametrize("pair", [{"num_rows": None, **one} for one in _TABLES], indirect=True, ids=str)
of_3_steps = pytest.mark.parametrize("pair", [{"num_rows": None, "admit": 3}], indirect=True)
of_0_3 = pytest.mark.parametrize("pair", [{"num_rows": None, "admit": 0.3}], indirect=True)


def assert_same_counts(table: Tested, reference: ReferenceTable) -> None:
    """Fail unless both have admitted and refused the same numbers of rows, and have the same counts."""
    assert counts_of(table).tolist() == counts_of(reference).tolist()
    ours, theirs = table.stats(), reference.stats()
    for name in ("admitted_rows", "refused_rows", "counted_ids"):
        assert ours[name] == theirs[name], (name, ours[name], theirs[name])
    assert ours["hits"] + ours["misses"] + ours["first_touches"] == ours["unique_rows"]


class AdmissionTests(SuitePart):
    """Which rows steps store, compared with `ReferenceTable`."""

    def reopen(self, table: Tested, *, mode: Literal["w", "r"] = "w", commit: bool = True) -> Tested:
        """See `CommitTests`."""
        raise NotImplementedError

    def skip_without_commits(self) -> None:
        """See `CommitTests`."""
        raise NotImplementedError

    @admitting
    def test_steps_admit_the_rows_of_the_reference(self, pair: Pair) -> None:
        table, reference = pair
        gone = 0
        for seed in range(3):
            self.train(table, reference, steps=6, seed=seed)
            assert_same_rows(table, reference, self.all_ids())
            assert len(table) == len(reference)
            if reference.retention.removes:
                gone += assert_same_sweep(table, reference).removed
            if seed == 1:
                table.commit()
        assert_same_counts(table, reference)
        assert reference.stats()["refused_rows"] > 0 and len(table) > 0
        assert (gone > 0) == reference.retention.removes

    @of_0_3
    def test_order_and_duplicates_in_a_batch_do_not_matter(self, pair: Pair) -> None:
        table, reference = pair
        ids = np.arange(200, dtype=np.int64)
        grads = np.ones((200, self.dim), np.float32)
        twice = np.concatenate([ids, ids[::-1]])
        table.update(twice[::-1], np.ones((400, self.dim), np.float32))
        reference.update(ids, grads + grads)
        assert_same_rows(table, reference, self.all_ids())

    @of_0_3
    def test_a_row_that_is_not_admitted_is_its_initial_row(self, pair: Pair) -> None:
        table, reference = pair
        ids = self.all_ids()
        before = table.lookup(ids)
        grads = np.ones((ids.size, self.dim), np.float32)
        table.update(ids, grads)
        reference.update(ids, grads)
        stored = table.contains(ids)
        assert stored.tolist() == reference.contains(ids).tolist() and 0 < stored.sum() < ids.size
        assert_same_bits(table.lookup(ids)[~stored], before[~stored])
        assert not table.get(ids, slot="exp_avg")[~stored].any()
        assert len(table) == stored.sum() == sum(part.size for part, _ in table.scan())

    @of_0_3
    def test_set_and_stored_rows_need_no_admission(self, pair: Pair) -> None:
        table, reference = pair
        ids, values = self.all_ids()[:100], np.full((100, self.dim), 0.5, np.float32)
        for one in (table, reference):
            one.set(ids, values)
            assert one.contains(ids).all()
            one.update(ids, values)
        assert_same_rows(table, reference, self.all_ids())
        assert table.stats()["refused_rows"] == 0
        assert (table.lookup(ids) != 0.5).any(axis=1).all()

    @of_0_3
    def test_a_deleted_row_must_be_admitted_again(self, pair: Pair) -> None:
        table, reference = pair
        ids = self.all_ids()[:300]
        for one in (table, reference):
            one.set(ids, np.zeros((300, self.dim), np.float32))
            one.delete(ids[:200])
            one.update(ids, np.ones((300, self.dim), np.float32))
        assert 20 < table.contains(ids[:200]).sum() < 110 and table.contains(ids[200:]).all()
        assert_same_rows(table, reference, self.all_ids())
        assert_same_counts(table, reference)

    @of_0_3
    def test_a_step_imposed_from_outside_draws_with_its_number(self, pair: Pair) -> None:
        table, reference = pair
        grads = np.ones((self.num_rows, self.dim), np.float32)
        for one in (table, reference):
            one.update(self.all_ids(), grads, step=2**32 + 5)
            one.update(self.all_ids(), grads, step=2**40)
            one.update(self.all_ids(), grads)
        assert_same_rows(table, reference, self.all_ids())

    @of_0_3
    def test_a_step_that_admits_no_row_is_a_step(self, pair: Pair) -> None:
        table, reference = pair
        ids = self.all_ids()
        for one in (table, reference):
            one.update(ids, np.ones((ids.size, self.dim), np.float32))
        refused = ids[~reference.contains(ids)][:1]
        for _ in range(12):
            before = reference.contains(refused)[0]
            for one in (table, reference):
                one.update(refused, np.ones((1, self.dim), np.float32))
            if before:
                break
        assert_same_rows(table, reference, ids)
        with pytest.raises(ValueError, match=r"position 0|nan"):  # also of a row that no step would admit
            table.update(ids, np.full((ids.size, self.dim), np.nan, np.float32))
        assert_same_rows(table, reference, ids)

    @of_0_3
    def test_admission_goes_on_after_opening_and_going_back(self, pair: Pair) -> None:
        self.skip_without_commits()
        table, reference = pair
        self.train(table, reference, steps=3)
        table.commit(keep="before")
        reference.commit(keep="before")
        self.train(table, reference, steps=3, seed=1)
        table.rewind("before")
        reference.rewind("before")
        assert_same_rows(table, reference, self.all_ids())
        self.train(table, reference, steps=2, seed=2)
        if table.path is not None:
            table = self.reopen(table)
            assert table.retention == bb.Retention(admit=0.3)
        self.train(table, reference, steps=3, seed=3)
        assert_same_rows(table, reference, self.all_ids())
        table.close(commit=False)

    @of_0_3
    def test_the_probability_can_change(self, pair: Pair) -> None:
        table, reference = pair
        for number, rules in enumerate((bb.Retention(admit=0.05), bb.Retention(), bb.Retention(admit=0.6))):
            self.train(table, reference, steps=2, seed=number)
            table.retention = reference.retention = rules
            self.train(table, reference, steps=2, seed=10 + number)
            assert_same_rows(table, reference, self.all_ids())
        assert table.retention == bb.Retention(admit=0.6)

    @of_3_steps
    def test_the_third_step_that_names_a_row_stores_it(self, pair: Pair) -> None:
        table, _ = pair
        ids, other = self.all_ids()[:5], self.all_ids()[5:7]
        before = table.lookup(ids)
        for named in (np.concatenate([ids, ids[::-1]]), other, ids):  # a repeated id is one of a step
            table.update(named, np.ones((named.size, self.dim), np.float32))
            assert not table.contains(self.all_ids()[:7]).any() and len(table) == 0
            assert_same_bits(table.lookup(ids), before)
            table.lookup(ids)  # names nothing
        assert counts_of(table)[:, :2].tolist() == [[row, 2] for row in ids.tolist()] + [
            [row, 1] for row in other.tolist()
        ]
        table.update(ids[:3], np.ones((3, self.dim), np.float32))
        assert table.contains(ids).tolist() == [True] * 3 + [False] * 2
        assert (table.lookup(ids[:3]) != before[:3]).all()
        stats = table.stats()
        assert (stats["admitted_rows"], stats["refused_rows"], stats["counted_ids"]) == (3, 12, 4)

    @of_3_steps
    def test_order_and_duplicates_in_a_batch_do_not_count(self, pair: Pair) -> None:
        table, reference = pair
        rng = np.random.default_rng(0)
        for _ in range(4):
            ids = rng.integers(0, self.num_rows, 150)
            grads = np.ones((150, self.dim), np.float32)
            reference.update(ids, grads)
            table.update(rng.permutation(ids), grads)
        assert_same_rows(table, reference, self.all_ids())
        assert_same_counts(table, reference)

    @of_3_steps
    def test_deleted_rows_and_ids_begin_at_0(self, pair: Pair) -> None:
        table, reference = pair
        ids = self.all_ids()[:60]
        grads = np.ones((60, self.dim), np.float32)
        for one in (table, reference):
            one.set(ids[:20], grads[:20])
            for _ in range(2):
                one.update(ids, grads)
            assert one.delete(ids[10:40]) == 10
            assert one.contains(ids).sum() == 10
            one.update(ids, grads)
        assert table.contains(ids).tolist() == [True] * 10 + [False] * 30 + [True] * 20
        assert_same_rows(table, reference, self.all_ids())
        assert_same_counts(table, reference)

    @pytest.mark.parametrize("pair", [{"num_rows": None, "admit": 4, "expire": 6}], indirect=True)
    def test_a_sweep_takes_old_counts(self, pair: Pair) -> None:
        table, reference = pair
        for first in (0, 50, 100):
            ids = self.all_ids()[first : first + 50]
            for one in (table, reference):
                for _ in range(2):
                    one.update(ids, np.ones((50, self.dim), np.float32))
        assert_same_sweep(table, reference)
        assert table.stats()["counted_ids"] == 150
        for steps, left in ((3, 100), (2, 50)):
            for one in (table, reference):
                for _ in range(steps):
                    one.update(self.all_ids()[:1], np.ones((1, self.dim), np.float32))
            assert_same_sweep(table, reference, dry_run=True)
            assert_same_sweep(table, reference)
            assert_same_counts(table, reference)
            assert table.stats()["counted_ids"] == left
        if table.path is not None:
            table.commit()
            table = self.reopen(table)
            assert counts_of(table).tolist() == counts_of(reference).tolist()
            table.close(commit=False)

    @of_3_steps
    def test_counts_are_committed_and_rewound(self, pair: Pair) -> None:
        self.skip_without_commits()
        table, reference = pair
        self.train(table, reference, steps=3)
        for one in (table, reference):
            one.commit(keep="before")
        self.train(table, reference, steps=2, seed=1)
        for one in (table, reference):
            one.rewind("before")
        assert counts_of(table).tolist() == counts_of(reference).tolist() != []
        self.train(table, reference, steps=2, seed=2)
        if table.path is not None:
            table = self.reopen(table)
            reference.commit()
            assert table.retention == bb.Retention(admit=3)
            self.train(table, reference, steps=2, seed=3)
            table = self.reopen(table, commit=False)
            reference.revert()
        self.train(table, reference, steps=3, seed=4)
        assert_same_rows(table, reference, self.all_ids())
        assert counts_of(table).tolist() == counts_of(reference).tolist()
        table.close(commit=False)

    @of_3_steps
    def test_the_number_of_steps_can_change(self, pair: Pair) -> None:
        table, reference = pair
        for number, admit in enumerate((2, None, 6, 0.5, 128, 3)):
            self.train(table, reference, steps=2, seed=number)
            table.retention = reference.retention = bb.Retention(admit=admit)
            self.train(table, reference, steps=2, seed=10 + number)
            assert_same_rows(table, reference, self.all_ids())
            assert counts_of(table).tolist() == counts_of(reference).tolist()

    def test_a_table_with_a_number_of_rows_stores_every_row(self, pair: Pair) -> None:
        table, _ = pair
        if isinstance(table, ReferenceTable):
            return
        with pytest.raises(ValueError, match=r"admit=0\.5 is for a table of any id"):
            table.retention = bb.Retention(admit=0.5)
        assert table.retention == bb.Retention()
