"""The part of the conformance suite for commits: their contents, rewind, opening files again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.testing.compare import assert_same_bits, assert_same_rows
from bunkbed.testing.narrow import both_widths
from bunkbed.testing.suite_part import Pair, SuitePart, Tested


class CommitTests(SuitePart):
    """Tests of `TableTests` that commit, rewind and open again."""

    #: False for tables whose commits keep nothing, such as scratch tables; tests that need a kept commit are skipped.
    keeps_commits = True

    def reopen(self, table: Tested, *, mode: Literal["w", "r"] = "w", commit: bool = True) -> Tested:
        """Close the writer and open its files again; skip the test if the table has no files."""
        self.skip_without_commits()
        if table.path is None:
            pytest.skip("a table in RAM only has no files")
        table.close(commit=commit)
        return bb.open(table.path, mode=mode)

    def skip_without_commits(self) -> None:
        """Skip the test if the table's commits keep nothing."""
        if not self.keeps_commits:
            pytest.skip("nothing of these tables is kept")

    def test_commit_counts_epochs_and_keeps_meta(self, pair: Pair) -> None:
        table, reference = pair
        self.train(table, reference, steps=1)
        first = table.commit(meta={"step": 1, "note": "ü", "nested": {"list": [1, 2.5, None, True]}})
        assert table.epoch == first and not table.is_dirty
        assert table.commit() == first, "nothing changed: no new epoch"
        assert table.meta == {"step": 1, "note": "ü", "nested": {"list": [1, 2.5, None, True]}}
        self.train(table, reference, steps=1, seed=1)
        assert table.is_dirty
        assert table.commit() > first
        assert table.meta["step"] == 1, "commit() without meta keeps the last"
        assert_same_rows(table, reference, self.all_ids())

    def test_a_commit_holds_what_was_there_when_it_began(self, pair: Pair) -> None:
        self.skip_without_commits()
        table, reference = pair
        self.train(table, reference, steps=3)
        pending = table.begin_commit(meta={"at": "started"}, keep="started")
        reference.commit(meta={"at": "started"}, keep="started")
        self.train(table, reference, steps=3, seed=1)
        assert_same_rows(table, reference, self.all_ids())
        assert pending.wait() == table.epoch and pending.done and table.meta == {"at": "started"}
        assert table.is_dirty
        for t in (table, reference):
            t.rewind("started")
        assert_same_rows(table, reference, self.all_ids())

    @both_widths
    def test_rewind_returns_everything(self, pair: Pair) -> None:
        self.skip_without_commits()
        table, reference = pair
        self.train(table, reference, steps=3)
        for t in (table, reference):
            t.commit(keep="good", meta={"at": "good"})
        kept = table.epoch
        self.train(table, reference, steps=3, seed=1)
        for t in (table, reference):
            t.commit()
        self.train(table, reference, steps=1, seed=2)
        for name in ("good", kept):
            table.rewind(name)
            reference.rewind("good")
            assert_same_rows(table, reference, self.all_ids())
            assert len(table) == len(reference) and table.meta == {"at": "good"}
            self.train(table, reference, steps=2, seed=3)
            assert_same_rows(table, reference, self.all_ids())

    def test_an_unknown_snapshot_lists_those_there_are(self, pair: Pair) -> None:
        self.skip_without_commits()
        table, reference = pair
        self.train(table, reference, steps=1)
        table.commit(keep="good")
        with pytest.raises(ValueError, match=r"bad.*good"):
            table.rewind("bad")
        assert_same_rows(table, reference, self.all_ids())
        table.drop("good")
        with pytest.raises(ValueError, match=r"good"):
            table.rewind("good")

    @both_widths
    def test_a_commit_survives_reopening(self, pair: Pair) -> None:
        table, reference = pair
        for round_ in range(3):
            self.train(table, reference, steps=3, seed=round_)
            table = self.reopen(table)
            assert_same_rows(table, reference, self.all_ids())
        table.close()

    def test_what_was_not_committed_is_gone(self, pair: Pair) -> None:
        table, reference = pair
        self.train(table, reference, steps=3)
        for t in (table, reference):
            t.commit()
        self.train(table, reference, steps=3, seed=1)
        reference.revert()
        table = self.reopen(table, commit=False)
        assert_same_rows(table, reference, self.all_ids())
        assert len(table) == len(reference)
        self.train(table, reference, steps=3, seed=2)
        assert_same_rows(table, reference, self.all_ids())
        table.close(commit=False)

    @both_widths
    def test_a_reader_sees_the_last_commit_and_may_not_write(self, pair: Pair) -> None:
        table, reference = pair
        self.train(table, reference, steps=3)
        reader = self.reopen(table, mode="r")
        ids = self.all_ids()
        assert_same_bits(reader.lookup(ids), reference.lookup(ids))
        for slot in ("weight", *reference.slots):
            assert_same_bits(reader.get(ids, slot=slot), reference.get(ids, slot=slot), slot)
        assert reader.contains(ids).tolist() == reference.contains(ids).tolist()
        ones = np.ones((1, self.dim), np.float32)
        calls: list[Callable[[], Any]] = [
            lambda: reader.update([1], ones),
            lambda: reader.set([1], ones),
            lambda: reader.commit(),
            lambda: reader.rewind(1),
        ]
        for call in calls:
            with pytest.raises(bb.ReadOnlyError, match="read"):
                call()
        reader.close()

    def test_a_with_block_commits_unless_left_by_an_exception(self, pair: Pair) -> None:
        self.skip_without_commits()
        table, reference = pair
        if table.path is None:
            pytest.skip("a table in RAM only has no files")
        with table:
            self.train(table, reference, steps=1)
        assert table.closed
        with pytest.raises(RuntimeError, match="boom"), bb.open(table.path) as again:
            again.update([1], np.ones((1, self.dim), np.float32))
            raise RuntimeError("boom")
        with bb.open(table.path) as again:
            assert_same_rows(again, reference, self.all_ids())
