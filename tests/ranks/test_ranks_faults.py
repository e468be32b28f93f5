"""Faults and coincidences of ranks: errors on one rank, calls at odd moments, ids that happen to be in a plan."""

from __future__ import annotations

import datetime
import fcntl
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import bunkbed as bb
import bunkbed.torch as bt
from bunkbed.files import run_files
from bunkbed.torch.ranks import service
from rank_processes import GROUP_SECONDS, message_of, spawn

ROWS, DIM = 60, 4
EVERY = np.arange(ROWS)


class _Job:
    def __init__(self, **arguments: Any) -> None:
        self.layer = bt.Embedding(ROWS, DIM, seed=1, optimizer=bb.SGD(lr=0.5), **arguments)
        self.optimizer = bt.Optimizer(self.layer)
        self.table = self.layer.table
        self.rank = dist.get_rank()

    def step(self, ids: tuple[int, ...] = (1, 2, 3), *, steps: bool = True) -> None:
        self.layer(torch.tensor(ids)).sum().backward()
        if steps:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def rows(self) -> np.ndarray:
        return self.table.get(EVERY).copy()


def _both(worker: Callable[..., Any], *arguments: Any, world: int = 2) -> list[Any]:
    return spawn(world, worker, *arguments, seconds=GROUP_SECONDS + 15)


# ---- Commits


def _publishes_unsurely(rank: int, place: str) -> list[str]:
    job = _Job(path=place, ram="64MiB")
    job.step()
    job.table.commit()
    job.step()
    if rank == 0:
        real = run_files.sync_directory

        def fails(_: Any) -> None:
            run_files.sync_directory = real
            raise OSError(5, "Input/output error")

        run_files.sync_directory = fails
    found = [message_of(job.table.commit)]
    for _ in range(3):
        job.step()
        found.append(message_of(job.table.commit))
    dist.barrier()  # a slower rank may still ask for its last commit
    job.table.close(commit=False)
    return found


def test_a_commit_that_may_be_durable_ends_all_commits(tmp_path: Path) -> None:
    for first, *others in _both(_publishes_unsurely, str(tmp_path / "rows")):
        assert "Input/output error" in first
        assert all("takes no more commits" in text for text in others)
    assert not bb.check(tmp_path / "rows")
    with bb.open(tmp_path / "rows", mode="r") as table:
        assert table.step == 2


def _collects_badly(rank: int, place: str) -> None:
    job = _Job(path=place, ram="64MiB")
    if rank == 0:
        folder = job.table.core.commits.epochs._files.folder
        folder.collect = lambda: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    for _ in range(4):
        job.step()
        job.table.commit()
    if rank == 0:
        del folder.collect
    job.table.close(commit=False)


def test_a_removal_that_fails_does_not_fail_the_commit(tmp_path: Path) -> None:
    _both(_collects_badly, str(tmp_path / "rows"))
    assert not bb.check(tmp_path / "rows")
    with bb.open(tmp_path / "rows", mode="r") as table:
        assert table.step == 4


def _waits_in_any_order(rank: int) -> list[int]:
    job = _Job()
    job.step()
    first = job.table.begin_commit(keep="first")
    job.step()
    job.step()
    second = job.table.begin_commit(keep="second")
    found = [second.wait(), first.wait()]
    assert first.done and second.done
    return found


def test_commits_may_be_waited_for_in_any_order() -> None:
    assert _both(_waits_in_any_order) == [[2, 1]] * 2


def _keeps_the_old_copy(rank: int) -> None:
    service.STEP_PATIENCE = 0.5
    job = _Job()
    job.step()
    job.table.commit(keep="best")
    rows = job.rows()
    job.step(steps=False)
    if rank == 0:
        job.optimizer.step()
        assert "step on every rank first" in message_of(lambda: job.table.commit(keep="best"))
    dist.barrier()
    if rank == 1:
        job.optimizer.step()
    job.optimizer.zero_grad()
    # An error is not the answer to the same request of all ranks.
    assert message_of(lambda: job.table.commit(keep="other")) == "no error"
    job.table.rewind("best")
    assert (job.rows() == rows).all() and job.table.step == 1
    job.step()


def test_a_commit_that_failed_leaves_the_copy_of_its_name() -> None:
    _both(_keeps_the_old_copy)


def _saves_together(rank: int, place: str) -> list[int]:
    job = _Job(path=place, ram="64MiB", keep_checkpoints=1)
    found = []
    for _ in range(40):
        job.step()
        job.layer.state_dict()
        found.append(job.table.epoch)
    job.table.close()
    return found


def test_saves_of_all_ranks_are_one_commit(tmp_path: Path) -> None:
    assert _both(_saves_together, str(tmp_path / "rows")) == [list(range(1, 41))] * 2


def _saves_at_once(rank: int) -> None:
    for _ in range(20):
        job = _Job()
        if rank == 0:
            job.table.commit(keep="new")
    dist.barrier()


def test_a_new_table_may_be_saved_at_once() -> None:
    _both(_saves_at_once)


# ---- Going back


def _goes_back(rank: int, place: str) -> None:
    job = _Job(path=place, ram="64MiB")
    job.step()
    job.table.commit(keep="good")
    rows = job.rows()
    job.step()
    assert "no snapshot 'nothing'" in message_of(lambda: job.table.rewind("nothing"))
    assert message_of(job.table.commit) == "no error"  # a wrong name changes nothing
    job.step()
    if rank == 1:
        real = job.table.core.commits.epochs.rewind

        def fails(_: Any) -> None:
            job.table.core.commits.epochs.rewind = real
            raise OSError(5, "Input/output error")

        job.table.core.commits.epochs.rewind = fails
    assert "Input/output error" in message_of(lambda: job.table.rewind("good"))
    for call in (job.rows, job.table.commit, job.layer.state_dict, job.step):
        assert "go back to a commit" in message_of(call)
    job.table.rewind("good")
    assert (job.rows() == rows).all() and job.table.step == 1
    job.step()
    job.table.close()


def test_going_back_fails_on_one_rank_and_then_succeeds(tmp_path: Path) -> None:
    _both(_goes_back, str(tmp_path / "rows"))
    assert not bb.check(tmp_path / "rows")


# ---- Lookups and plans


def _meets_a_plan(rank: int) -> int:
    def group() -> Any:
        return dist.new_group([0, 1], timeout=datetime.timedelta(seconds=15))

    # The plan has the lookups in another order than the model; on one rank they are equal, as both are empty.
    job = _Job(process_group=group())
    pairs = [
        (torch.tensor([i + 1][: rank == 0 or i < 3]), torch.tensor([i + 7][: rank == 0 or i < 3])) for i in range(5)
    ]
    pairs = [(one.long(), other.long()) for one, other in pairs]
    for one, other in bt.lookahead(pairs, job.layer, ids=lambda pair: {job.layer: list(pair)}):
        (job.layer(other).sum() + job.layer(one).sum()).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    # A lookup of all ranks whose ids are those of the batch on one.
    probe = _Job(process_group=group())
    batches = [torch.tensor([i + rank]) for i in range(4)]
    for batch in bt.lookahead(batches, probe.layer, ids=lambda batch: {probe.layer: batch}):
        with torch.no_grad():
            assert (probe.layer(torch.tensor([2])).numpy() == probe.table.get([2])).all()
        probe.step(tuple(batch.tolist()))
    # An old loop that ends later on one rank.
    old = _Job(process_group=group())
    left = iter(bt.lookahead(batches, old.layer, ids=lambda batch: {old.layer: batch}))
    old.step(tuple(next(left).tolist()))
    for number, batch in enumerate(bt.lookahead(batches, old.layer, ids=lambda batch: {old.layer: batch})):
        if number == 2 and rank == 1:
            left.close()
        old.step(tuple(batch.tolist()))
    left.close()
    return job.table.step + probe.table.step + old.table.step


def test_ids_that_are_those_of_a_plan_on_one_rank() -> None:
    assert _both(_meets_a_plan) == [5 + 4 + 5] * 2


def _steps_within_a_plan(rank: int) -> None:
    job = _Job()
    pairs = [(torch.tensor([1, 2 + rank]), torch.tensor([1, 2, 3]))] * 3
    for first, second in bt.lookahead(pairs, job.layer, ids=lambda pair: {job.layer: list(pair)}):
        before = job.layer(first).detach().numpy()
        job.step((4,))
        job.table.set([1], np.full((1, DIM), job.table.step, np.float32))
        after = job.layer(second).detach().numpy()
        assert (after == job.table.get(second.numpy())).all() and (after[0] != before[0]).all()


def test_a_step_between_the_lookups_of_a_plan() -> None:
    _both(_steps_within_a_plan)


def _has_two_losses(rank: int) -> None:
    first, second = _Job(), _Job()
    optimizer = bt.Optimizer(nn.ModuleList([first.layer, second.layer]), replace=True)
    a, b = first.layer(torch.tensor([1])).sum(), second.layer(torch.tensor([2])).sum()
    (a + b if rank == 0 else a).backward(retain_graph=True)
    (a + b).backward()
    optimizer.step()
    optimizer.zero_grad()
    first.layer(torch.tensor([1]))


def test_a_loss_that_reaches_a_table_on_one_rank_only() -> None:
    _both(_has_two_losses)


# ---- Misuse that would train silently wrong


def _drops_gradients(rank: int) -> str:
    job = _Job()
    job.step(steps=False)
    if rank == 1:
        job.optimizer.zero_grad()
    return message_of(lambda: job.step(steps=False))


def test_gradients_that_one_rank_drops() -> None:
    for text in _both(_drops_gradients):
        assert "the ranks do not do the same" in text


def _overflows(rank: int) -> str:
    job = _Job()
    before = job.rows()
    large = np.full((2, DIM), 3e38, np.float32)
    text = message_of(lambda: job.table.update(np.array([1, 1]), large))
    assert (job.rows() == before).all() and job.table.step == 0
    return text


def test_gradients_whose_sum_overflows() -> None:
    for text in _both(_overflows):
        assert "overflow float32 when summed; nothing was changed" in text


def _opens_twice(rank: int, place: str) -> list[str]:
    job = _Job(path=place, ram="64MiB")
    more = [{"gradients": "sum"}, {"shards": 6}]
    found = [message_of(lambda: _Job(path=place, ram="64MiB", **one)) for one in more]  # noqa: B023
    found.append(message_of(lambda: bt.Embedding(ROWS, DIM, table=job.table, gradients="sum")))
    job.table.close()
    return found


def test_another_sharing_of_an_open_table(tmp_path: Path) -> None:
    for gradients, shards, given in _both(_opens_twice, str(tmp_path / "rows")):
        assert "with another gradients=" in gradients and "with another shards=" in shards
        assert "gradients= comes with table=" in given


# ---- Process groups, forks


def _has_other_groups(rank: int) -> str:
    group = dist.new_group([0, 1])  # of which rank 2 is no member
    assert message_of(_Job) == "no error"
    return message_of(lambda: _Job(process_group=group))


def test_groups_that_not_every_rank_is_in() -> None:
    found = _both(_has_other_groups, world=3)
    assert found[:2] == ["no error"] * 2 and "(rank 2) is not in process_group" in found[2]


def _forks(rank: int, place: str) -> None:
    job = _Job(path=place, ram="64MiB")
    job.step()
    if rank == 0:
        child = os.fork()
        if child == 0:
            refused = "forked" in message_of(job.rows)
            job.table.core.close()
            job.table.__del__()
            del job
            gc.collect()
            os._exit(0 if refused else 1)
        assert os.waitpid(child, 0)[1] == 0
        with Path(place, "lock").open("rb") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    job.step()
    job.table.close()


def test_a_forked_child_leaves_the_table_alone(tmp_path: Path) -> None:
    _both(_forks, str(tmp_path / "rows"))
