"""Pairs of features: each occurs in a story against the oracle, each hole raises its error, and none is forgotten."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torture.stories import pairs
from torture.stories.features import small_tables

import bunkbed as bb

PARTS = 8
GROUPS = pairs.covering(6, 0)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_pair_that_can_be_combined_is_right(part: int) -> None:
    pytest.importorskip("torch")
    wrong = [text for number, group in enumerate(GROUPS[part::PARTS]) if (text := pairs.tell(group, number)[1])]
    assert not wrong, "\n".join(wrong)


def test_every_hole_raises_its_error() -> None:
    pytest.importorskip("torch")
    found = pairs.holes()
    wrong = [text for pair in found if (text := pairs.tell(pair, 0)[1])]
    assert len(found) > 30 and not wrong, "\n".join(wrong)


def test_every_public_name_and_argument_is_in_a_feature(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with pairs.watched() as used, small_tables():
        for number, feature in enumerate(pairs.FEATURES):
            pairs.story((feature,), number, _new(tmp_path / str(number)), length=4)
        for number in range(4):  # each of two ways to make shards, and to copy
            pairs.story(("sharded", "copy"), number, _new(tmp_path / f"copy {number}"), length=4)
        pairs.story(("device cache", "expire", "sweep"), 0, _new(tmp_path / "device cache"), length=9)
        for number, place in enumerate(("run", "sharded", "Budget")):
            more = ("facts", "drop", "begin_commit", "commit meta", "budget changes", "snapshot reader", "rewind")
            more += ("reopen with another optimizer", "reader", "delete", "changes")
            for kind in ("bfloat16", "disk"):
                pairs.story((place, kind, *more), number, _new(tmp_path / f"{place} {kind}"), length=40)
            for rule in ("expire", "max_rows", "clock of events", "admit", "admit the third"):
                pairs.story((place, rule, "sweep"), number, _new(tmp_path / f"{place} {rule}"), length=4)
    forgotten, stale = pairs.missing(used)
    assert not forgotten, f"in no feature of torture/stories/features.py: {', '.join(forgotten)}"
    assert not stale, f"said to be in no feature, and are, or are gone: {', '.join(stale)}"


def _new(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize("commit", [True, False])
def test_new_hyperparameters_are_committed_when_the_table_is_and_only_then(tmp_path: Path, commit: bool) -> None:
    with small_tables():  # an index snapshot is due when it is closed
        table = bb.create(tmp_path / "t", dim=4, num_rows=100, optimizer=bb.SGD(lr=0.5), ram="8MiB")
        for _ in range(9):
            table.update(np.arange(100), np.ones((100, 4), np.float32))
        table.commit()
        if commit:  # none is, any more
            table.close()
            table = bb.open(tmp_path / "t", ram="8MiB")
        table.optimizer = bb.SGD(lr=0.25)
        table.close(commit=commit)
        with bb.open(tmp_path / "t", mode="r", ram="8MiB") as table:
            assert table.optimizer == bb.SGD(lr=0.25 if commit else 0.5)
