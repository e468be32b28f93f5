"""Several operations fail in one life, and the same process goes on; more of it in the torture part `several`."""

from __future__ import annotations

import contextlib
import gc
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torture.lives import scenario, several, table_scenario
from torture.parts import Child

import bunkbed as bb
from bunkbed import _native

FACTS: dict[str, Any] = {"dim": 4, "num_rows": 20, "optimizer": bb.SGD(lr=1.0), "init": bb.Zeros()}


@pytest.mark.parametrize("name", several.NAMES)
@pytest.mark.parametrize("story", [scenario, table_scenario])
def test_what_is_tried_again_fails_again(story: Any, name: str) -> None:
    states = story.expected(story.ACTIONS)

    def lives(send: Any) -> None:
        chance = random.Random(f"{name} {story.__name__}")
        there_are = several.operations(story, states)
        for begin in range(1, there_are, there_are // 12):
            for every, times in ((1, 2), (1, 3), (chance.randint(2, several.FURTHEST), 3)):
                at = begin + chance.randint(0, there_are // 12)
                send(f"{times} operations, {at} and each {every}th after it")
                several.live(story, states, at, every, times, name)

    child = Child(lives, 120.0)  # the settings of the core for torture stay there
    assert child.wait() == 0, child.sent[-2:]


@pytest.mark.parametrize("kind", ["table", "sharded", "run"])
def test_an_opening_that_fails_twice_leaves_no_lock_and_no_descriptor(kind: str, tmp_path: Path) -> None:
    def opened(**create: Any) -> Any:
        if kind == "run":
            run = bb.Run(tmp_path / "it", ram="8MiB")
            try:
                return run, run.table("t", create=create or None)
            except BaseException:
                run.close(commit=False)
                raise
        if not create:
            return (bb.open(tmp_path / "it", ram="8MiB"),) * 2
        make = bb.ShardedTable.create if kind == "sharded" else bb.create
        return (make(tmp_path / "it", ram="8MiB", **create, **({"shards": 2} if kind == "sharded" else {})),) * 2

    owner, table = opened(**FACTS)
    for _ in range(3):
        table.update([1, 2], np.ones((2, 4), np.float32))
        owner.commit()
    owner.close()
    gc.collect()
    before = several.held()
    faulty, at, is_over = _native.FaultVfs(), 0, False
    _native.use_vfs(faulty)
    try:
        while not is_over:
            at += 1
            faulty.set_fault(at, "error", 5)
            faulty.repeat_every(1, 2)
            for _ in range(3):
                with contextlib.suppress(OSError):
                    owner, table = opened()
                    break
                several.require_no_more(before, f"when operation {at} of opening failed")
            is_over = faulty.struck() == 0
            faulty.heal()
            assert table.lookup([1]).tolist() == [[-3.0] * 4]
            owner.close(commit=False)
    finally:
        _native.use_vfs(None)
    assert at > 4


def test_a_folder_that_cannot_be_listed_is_not_taken_for_one_that_is_in_use(tmp_path: Path) -> None:
    faulty = _native.FaultVfs()
    (tmp_path / "it").mkdir()
    (tmp_path / "file").touch()
    _native.use_vfs(faulty)
    try:
        faulty.fail_all("list", 5)
        with pytest.raises(OSError, match="Input/output error") as info:
            bb.create(tmp_path / "it", **FACTS)
        assert not isinstance(info.value, FileExistsError)
        faulty.heal()
        bb.create(tmp_path / "it", **FACTS).close()
        with pytest.raises(FileExistsError, match="not an empty directory"):
            bb.create(tmp_path / "file", **FACTS)
    finally:
        _native.use_vfs(None)
