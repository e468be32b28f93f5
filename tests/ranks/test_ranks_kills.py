"""A rank dies in a commit: the others hear of it within seconds, and the table is at one commit, as a whole."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import bunkbed as bb
import bunkbed.torch as bt
from bunkbed import _native
from rank_processes import GROUP_SECONDS, message_of, spawn

ROWS, DIM = 2_000, 8
EVERY = np.arange(ROWS)
#: Failpoints that a commit of a shard reaches, from the first to the last.
POINTS = ("commit.begin", "commit.flushed", "commit.sealed", "manifest.linked", "commit.published", "collect.durable")


class _Job:
    def __init__(self, place: str) -> None:
        self.layer = bt.Embedding(ROWS, DIM, path=place, ram="64MiB", optimizer=bb.Adam(lr=0.1), seed=3)
        self.optimizer = bt.Optimizer(self.layer)
        self.table = self.layer.table

    def train(self) -> np.ndarray:
        rng = np.random.default_rng([self.table.step, dist.get_rank()])
        self.layer(torch.from_numpy(rng.integers(0, ROWS, 300))).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.table.get(EVERY).copy()


def _dies(rank: int, place: str, dying: int, point: str) -> dict[str, Any]:
    job = _Job(place)
    found = {"before": job.train()}
    job.table.commit()
    found["after"] = job.train()
    if rank == dying:
        _native.arm_failpoint(point, 1, "die")
    dist.barrier()  # another rank's commit begins here, too
    started = time.monotonic()
    return {**found, "message": message_of(job.table.commit), "seconds": time.monotonic() - started}


def _goes_on(rank: int, place: str) -> int:
    job = _Job(place)
    job.train()
    job.table.commit()
    step = job.table.step
    job.table.close()
    return step


def _kill(place: Path, world: int, dying: int, point: str) -> None:
    found = spawn(world, _dies, str(place), dying, point, dying=dying)
    survivor = next(one for one in found if one is not None)
    for one in found:
        if one is not None and one["message"] != "no error":
            assert "can no longer reach the others" in one["message"] and "start all ranks again" in one["message"]
            assert one["seconds"] < GROUP_SECONDS / 2
    assert not bb.check(place)
    with bb.open(place, mode="r") as table:
        is_new = table.step == 2
        assert is_new or table.step == 1
        assert (table.get(EVERY) == survivor["after" if is_new else "before"]).all()
        if any(one is not None and one["message"] == "no error" for one in found):
            assert is_new
    assert spawn(world, _goes_on, str(place)) == [2 + is_new] * world
    assert not bb.check(place)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_is_killed_in_a_commit(dying: int, point: str, tmp_path: Path) -> None:
    _kill(tmp_path / "rows", 2, dying, point)


def test_rank_0_is_killed_when_it_has_published_the_commit(tmp_path: Path) -> None:
    _kill(tmp_path / "rows", 3, 0, "run.published")


def _dies_in_training(rank: int, place: str) -> tuple[str, float]:
    job = _Job(place)
    job.train()
    job.table.commit()
    job.train()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    return message_of(job.train), time.monotonic() - started


def test_a_rank_is_killed_in_training(tmp_path: Path) -> None:
    text, seconds = spawn(2, _dies_in_training, str(tmp_path / "rows"), dying=1)[0]
    assert "a rank left" in text and "the table opens at its last commit" in text and seconds < GROUP_SECONDS / 2
    assert not bb.check(tmp_path / "rows")
    assert spawn(2, _goes_on, str(tmp_path / "rows")) == [2, 2]
