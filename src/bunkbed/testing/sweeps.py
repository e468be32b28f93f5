"""The part of `TableTests` about rows that go by a table's rules."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.core.types import Json
from bunkbed.table import sweeps
from bunkbed.testing.compare import assert_same_rows
from bunkbed.testing.reference import ReferenceTable
from bunkbed.testing.suite_part import Pair, SuitePart, Tested

_RULES: list[Json] = [
    {"expire": 7},
    {"expire": 3, "keep": 500},
    {"max_rows": 150},
    {"max_rows": 150, "evict": "rarest"},
    {"max_rows": 150, "evict": "smallest", "dtype": "bfloat16"},
    {"expire": 9, "max_rows": 200, "evict": "smallest", "keep": 20, "optimizer": bb.SGD(lr=0.1)},
]
of_any_id = pytest.mark.parametrize("pair", [{"num_rows": None, **rules} for rules in _RULES], indirect=True, ids=str)


def assert_same_sweep(table: Tested, reference: ReferenceTable, *, dry_run: bool = False) -> bb.Swept:
    """Sweep both; compare what went and what is left."""
    found: bb.Swept = table.sweep(dry_run=dry_run)
    expected = reference.sweep(dry_run=dry_run)
    for name, value in vars(expected).items():
        if name != "freed_bytes":
            assert getattr(found, name) == value, (name, found, expected)
    assert len(table) == len(reference)
    return found


class SweepTests(SuitePart):
    """Sweeps, ages and counts, compared with `ReferenceTable`."""

    def reopen(self, table: Tested, *, mode: Literal["w", "r"] = "w", commit: bool = True) -> Tested:
        """See `CommitTests`."""
        raise NotImplementedError

    def skip_without_commits(self) -> None:
        """See `CommitTests`."""
        raise NotImplementedError

    @of_any_id
    def test_sweeps_are_those_of_the_reference(self, pair: Pair) -> None:
        table, reference = pair
        gone = 0
        for seed in range(4):
            self.train(table, reference, steps=4, seed=seed)
            table.set([seed, 990 + seed], np.full((2, self.dim), 0.5, np.float32))
            reference.set([seed, 990 + seed], np.full((2, self.dim), 0.5, np.float32))
            assert_same_sweep(table, reference, dry_run=True)
            gone += assert_same_sweep(table, reference).removed
            assert assert_same_sweep(table, reference).removed == 0
            assert_same_rows(table, reference, self.all_ids())
            if seed == 1:
                table.commit()
        assert gone > 100

    @of_any_id
    def test_a_sweep_that_finds_few_rows_at_once_removes_the_same(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sweeps, "most_at_once", lambda ram_bytes: 17)
        table, reference = pair
        self.train(table, reference, steps=12)
        assert_same_sweep(table, reference, dry_run=True)
        assert assert_same_sweep(table, reference).removed > 17
        assert_same_rows(table, reference, self.all_ids())

    @of_any_id
    def test_a_spared_row_stays(self, pair: Pair) -> None:
        table, reference = pair
        for one in (table, reference):
            one.set([3, 4], np.zeros((2, self.dim), np.float32))
            one.spare(3)
        self.train(table, reference, steps=14)
        for one in (table, reference):
            one.update(np.zeros(0, np.int64), np.zeros((0, self.dim), np.float32), step=40)
            one.update([3], np.ones((1, self.dim), np.float32))
        assert assert_same_sweep(table, reference).removed > 20
        assert table.contains([3]).all()
        assert_same_rows(table, reference, self.all_ids())

    @pytest.mark.parametrize("pair", [{"num_rows": None, "expire": 5, "clock": "event"}], indirect=True)
    def test_the_clock_of_events(self, pair: Pair) -> None:
        table, reference = pair
        assert table.clock == -1
        for change in (table.update, table.set):
            with pytest.raises(ValueError, match=r"not set; assign table\.clock"):
                change([1], np.ones((1, self.dim), np.float32))
        assert len(table) == 0
        for day in (0, 3, 4, 9, 9, 11):
            table.clock = reference.clock = day
            self.train(table, reference, steps=2, seed=day)
            assert_same_sweep(table, reference)
        with pytest.raises(ValueError, match="cannot go back from 11 to 10"):
            table.clock = 10
        for value, kind in ((-1, ValueError), (1.5, TypeError), ("12", TypeError)):
            with pytest.raises(kind, match="clock must be"):
                table.clock = value
        assert table.clock == 11
        with pytest.raises(ValueError, match="position 1"):
            table.update([1, 2], np.array([[0], [np.nan]], np.float32) * np.ones((2, self.dim), np.float32))
        assert_same_rows(table, reference, self.all_ids())

    @pytest.mark.parametrize("pair", [{"num_rows": None, "expire": 6, "clock": "event"}], indirect=True)
    def test_ages_and_clock_are_part_of_commits(self, pair: Pair) -> None:
        self.skip_without_commits()
        table, reference = pair
        for day in range(4):
            table.clock = reference.clock = 2 * day
            self.train(table, reference, steps=2, seed=day)
        table.commit(keep="before")
        reference.commit(keep="before")
        table.clock = reference.clock = 50
        self.train(table, reference, steps=1, seed=9)
        assert assert_same_sweep(table, reference).removed > 0
        table.rewind("before")
        reference.rewind("before")
        assert table.clock == 6
        assert assert_same_sweep(table, reference).removed > 0
        table.clock = reference.clock = 7
        if table.path is not None:
            table = self.reopen(table)
            assert (table.clock, table.retention) == (7, bb.Retention(expire=6, clock="event"))
            assert_same_sweep(table, reference, dry_run=True)
        assert_same_rows(table, reference, self.all_ids())
        table.close(commit=False)

    def test_rules_can_change(self, pair: Pair) -> None:
        table, _ = pair
        assert table.retention == bb.Retention() and not table.retention
        with pytest.raises(ValueError, match="no rule by which rows go"):
            table.sweep()
        if isinstance(table, ReferenceTable):
            return
        with pytest.raises(ValueError, match="made without expire= and max_rows="):
            table.retention = bb.Retention(expire=3)
        with pytest.raises(ValueError, match="clock is its step"):
            table.clock = 3

    @pytest.mark.parametrize("pair", [{"num_rows": None, "expire": 6, "max_rows": 900}], indirect=True)
    def test_new_rules_hold_for_the_next_sweep(self, pair: Pair) -> None:
        table, reference = pair
        self.train(table, reference, steps=5)
        table.retention = reference.retention = bb.Retention(max_rows=40, evict="rarest", keep=2)
        assert assert_same_sweep(table, reference).evicted > 40
        if isinstance(table, ReferenceTable):
            return
        for rules, message in (
            (bb.Retention(expire=3, clock="event"), "clock is 'step' in the table, 'event'"),
            (bb.Retention(), "cannot all go"),
        ):
            with pytest.raises(ValueError, match=message):
                table.retention = rules
        with pytest.raises(ValueError, match="step 1 is before step 5"):
            table.update([1], np.ones((1, self.dim), np.float32), step=1)
        assert_same_rows(table, reference, self.all_ids())
