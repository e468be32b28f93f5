"""A Hypothesis state machine: any order of operations, and the table still is the reference."""

from __future__ import annotations

import copy
import dataclasses
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.cases.exactness import smallest_ram
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import bunkbed as bb
from bunkbed import _native
from bunkbed.testing import ReferenceTable
from bunkbed.testing.conformance import OPTIMIZERS, assert_same_bits, assert_same_rows

DIM = 16
NUM_ROWS = 3000
NAMES = ("a", "b", "c")

few_ids = st.lists(st.integers(0, NUM_ROWS - 1), max_size=12)
# A seed gives a batch: hundreds of ids, most rows of the table over a few steps, so that frames run out.
seeds = st.integers(0, 2**32 - 1)

_smallest: dict[str, int] = {}


def many_ids(seed: int, size: int = 400) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (NUM_ROWS * rng.random(size) ** 1.5).astype(np.int64)


class TableMachine(RuleBasedStateMachine):
    """One writer, at most one reader, and the oracle."""

    @initialize(
        optimizer=st.sampled_from(OPTIMIZERS),
        bounded=st.booleans(),
        dtype=st.sampled_from(["float32", "float32", "bfloat16", "float16"]),
        narrow_state=st.booleans(),
        tight=st.sampled_from([True, True, False]),
    )
    def make(self, optimizer: Any, bounded: bool, dtype: str, narrow_state: bool, tight: bool) -> None:
        if narrow_state and optimizer.slots:
            optimizer = dataclasses.replace(optimizer, state_dtype="bfloat16")
        self.folder = Path(tempfile.mkdtemp(prefix="bunkbed-"))
        kwargs: dict[str, Any] = {
            "dim": DIM,
            "num_rows": NUM_ROWS if bounded else None,
            "optimizer": optimizer,
            "init": bb.Normal(std=0.1),
            "seed": 3,
            "dtype": dtype,
        }
        self.ram = 64 << 20
        if tight:
            key = repr(kwargs)
            if key not in _smallest:
                probes = iter(range(1000))
                _smallest[key] = smallest_ram(
                    lambda ram: bb.create(self.folder / f"probe-{next(probes)}", ram=ram, **kwargs)
                )
            self.ram = _smallest[key]
            if not bounded:  # ids never seen need room in the directory, which no table can know when it opens
                self.ram += 64 * NUM_ROWS
        self.path = self.folder / "table"
        _native.set_index_snapshots(20, in_line=True)  # small tables too are opened from index snapshots
        self.table = bb.create(self.path, ram=self.ram, **kwargs)
        self.oracle = ReferenceTable(**kwargs)
        self.committed = copy.deepcopy(self.oracle)
        self.commits = 0
        self.compacted = False
        self.pending: Any = None
        self.reader: Any = None
        self.seen: ReferenceTable | None = None

    def teardown(self) -> None:
        _native.set_index_snapshots()
        if not hasattr(self, "table"):
            return
        try:
            assert_same_rows(self.table, self.oracle, np.arange(NUM_ROWS))
            self.table.close(commit=False)
            assert bb.check(self.path) == []
        finally:
            if self.reader is not None:
                self.reader.close()
            if not self.table.closed:
                self.table.close(commit=False)
            shutil.rmtree(self.folder)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "table"):
            assert self.table.step == self.oracle.step
            assert len(self.table) == len(self.oracle)

    # ---- reading

    @rule(ids=few_ids, touch=st.booleans())
    def lookup_few(self, ids: list[int], touch: bool) -> None:
        assert_same_bits(self.table.lookup(ids, touch=touch), self.oracle.lookup(ids))

    @rule(seed=seeds, touch=st.booleans())
    def lookup_many(self, seed: int, touch: bool) -> None:
        ids = many_ids(seed)
        assert_same_bits(self.table.lookup(ids, touch=touch), self.oracle.lookup(ids))

    @rule(
        seed=seeds,
        pooling=st.sampled_from(["sum", "mean", "sqrtn"]),
        weighted=st.booleans(),
        touch=st.booleans(),
    )
    def lookup_bags(self, seed: int, pooling: str, weighted: bool, touch: bool) -> None:
        rng = np.random.default_rng(seed)
        ids = many_ids(seed, 60)
        offsets = np.append(0, np.sort(rng.integers(0, 61, 9)))
        weights = rng.random(60).astype(np.float32) if weighted else None
        arguments: dict[str, Any] = {"pooling": pooling, "weights": weights, "touch": touch}
        assert_same_bits(
            self.table.lookup_bags(ids, offsets, **arguments),
            self.oracle.lookup_bags(ids, offsets, **arguments),
        )

    @rule(ids=few_ids, data=st.data())
    def get_a_slot(self, ids: list[int], data: Any) -> None:
        slot = data.draw(st.sampled_from(["weight", *self.oracle.slots]))
        assert_same_bits(self.table.get(ids, slot=slot), self.oracle.get(ids, slot=slot), slot)

    @rule(seed=seeds)
    def contains(self, seed: int) -> None:
        ids = many_ids(seed)
        assert self.table.contains(ids).tolist() == self.oracle.contains(ids).tolist()

    @rule(chunk=st.sampled_from([1000, 65_536]))
    def scan(self, chunk: int) -> None:
        parts = list(self.table.scan(chunk=chunk))
        ids = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in parts)])
        assert sorted(ids.tolist()) == sorted(self.oracle._places)
        for part, values in parts:
            assert_same_bits(values, self.oracle.lookup(part))

    # ---- writing

    @rule(ids=few_ids, seed=seeds, lr=st.sampled_from([None, 0.5]))
    def update_few(self, ids: list[int], seed: int, lr: float | None) -> None:
        self.update(np.array(ids, np.int64), seed, lr)

    @rule(seed=seeds)
    def update_many(self, seed: int) -> None:
        self.update(many_ids(seed), seed, None)

    def update(self, ids: np.ndarray, seed: int, lr: float | None) -> None:
        grads = np.random.default_rng(seed).standard_normal((ids.size, DIM)).astype(np.float32)
        for table in (self.table, self.oracle):
            table.update(ids, grads, lr=lr)

    @rule(ids=few_ids, seed=seeds, data=st.data())
    def set_a_slot(self, ids: list[int], seed: int, data: Any) -> None:
        slot = data.draw(st.sampled_from(["weight", *self.oracle.slots]))
        width = self.oracle.get([0], slot=slot).shape[-1]
        values = np.random.default_rng(seed).random((len(ids), width)).astype(np.float32)
        for table in (self.table, self.oracle):
            table.set(np.array(ids, np.int64), values, slot=slot)

    @rule(seed=seeds)
    def stage(self, seed: int) -> None:
        self.table.stage(many_ids(seed, 100))

    @rule(seed=seeds)
    def refused_update(self, seed: int) -> None:
        ids = many_ids(seed, 50)
        grads = np.ones((50, DIM), np.float32)
        grads[seed % 50, 3] = np.nan
        try:
            self.table.update(ids, grads)
        except ValueError:
            return
        raise AssertionError("a NaN gradient was taken")

    @rule()
    def evict_everything(self) -> None:
        """Touches every row once: whatever was cached has to go."""
        for start in range(0, NUM_ROWS, 500):
            self.table.lookup(np.arange(start, start + 500))

    @rule()
    def write_dirty(self) -> None:
        """What an import does after each chunk."""
        self.table.core.write_dirty()

    @rule()
    def compact(self) -> None:
        self.table.compact()
        self.compacted = True

    # ---- commits

    @rule(keep=st.sampled_from([None, None, *NAMES]))
    def commit(self, keep: str | None) -> None:
        self.settle()
        before = self.table.epoch
        self.commits += 1
        self.compacted = False
        meta = {"step": self.oracle.step, "commits": self.commits}
        assert self.table.commit(meta=meta, keep=keep) == self.table.epoch > before
        self.oracle.commit(meta=meta, keep=keep)
        self.committed = copy.deepcopy(self.oracle)
        assert self.table.meta == meta
        assert set(bb.snapshots(self.path)) == set(self.oracle.snapshots())

    @rule(keep=st.sampled_from([None, None, *NAMES]))
    def begin_commit(self, keep: str | None) -> None:
        """The next rules run during the commit, until a rule waits for it."""
        self.commits += 1
        self.compacted = False
        meta = {"step": self.oracle.step, "commits": self.commits}
        self.pending = self.table.begin_commit(meta=meta, keep=keep)
        self.oracle.commit(meta=meta, keep=keep)
        self.committed = copy.deepcopy(self.oracle)

    def settle(self) -> None:
        if self.pending is not None:
            assert self.pending.wait() > 0
        self.pending = None

    @rule()
    def commit_without_words(self) -> None:
        """Without changes it is no new epoch, but after compact(), to free files."""
        self.settle()
        before, changed = self.table.epoch, self.oracle.is_dirty
        is_new = self.table.commit() > before
        assert is_new == (changed or not before) or (self.compacted and is_new)
        assert self.table.commit() == self.table.epoch >= before + is_new
        self.compacted = False
        self.oracle.commit()
        self.committed = copy.deepcopy(self.oracle)

    @precondition(lambda self: self.oracle.snapshots())
    @rule(data=st.data())
    def drop(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.oracle.snapshots())))
        self.table.drop(name)
        self.oracle.drop(name)

    @precondition(lambda self: self.oracle.snapshots())
    @rule(data=st.data())
    def rewind(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.oracle.snapshots())))
        self.table.rewind(name)
        self.oracle.rewind(name)
        self.committed = copy.deepcopy(self.oracle)
        assert self.table.meta == self.oracle.meta

    @precondition(lambda self: self.oracle.snapshots())
    @rule(data=st.data())
    def open_a_snapshot(self, data: Any) -> None:
        self.settle()
        name = data.draw(st.sampled_from(sorted(self.oracle.snapshots())))
        old = copy.deepcopy(self.oracle)
        old.rewind(name)
        with bb.open(self.path, mode="r", snapshot=name, ram=64 << 20) as reader:
            ids = np.arange(0, NUM_ROWS, 7)
            assert_same_bits(reader.lookup(ids), old.lookup(ids))

    @rule(commit=st.booleans())
    def reopen(self, commit: bool) -> None:
        self.table.close(commit=commit)
        if commit:
            self.oracle.commit()
            self.committed = copy.deepcopy(self.oracle)
        else:
            self.oracle.revert()
        self.table = bb.open(self.path, ram=self.ram)
        assert self.table.meta == self.oracle.meta

    @precondition(lambda self: self.reader is None)
    @rule()
    def open_reader(self) -> None:
        self.settle()
        self.reader = bb.open(self.path, mode="r", ram=64 << 20)
        self.seen = copy.deepcopy(self.committed)

    @precondition(lambda self: self.reader is not None)
    @rule(seed=seeds, touch=st.booleans())
    def reader_lookup(self, seed: int, touch: bool) -> None:
        assert self.seen is not None
        ids = many_ids(seed)
        assert_same_bits(self.reader.lookup(ids, touch=touch), self.seen.lookup(ids))
        assert self.reader.contains(ids).tolist() == self.seen.contains(ids).tolist()

    @precondition(lambda self: self.reader is not None)
    @rule()
    def reader_refresh(self) -> None:
        self.settle()
        self.reader.refresh()
        self.seen = copy.deepcopy(self.committed)
        assert self.reader.step == self.seen.step
        assert len(self.reader) == len(self.seen)

    @precondition(lambda self: self.reader is not None)
    @rule()
    def close_reader(self) -> None:
        self.reader.close()
        self.reader = None


hunting = os.environ.get("HYPOTHESIS_PROFILE") == "hunt"
TableMachine.TestCase.settings = settings(max_examples=1000 if hunting else 120, stateful_step_count=50)
TestTableMachine = TableMachine.TestCase
