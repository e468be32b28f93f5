"""What ranks do wrong ends with an error on every rank, within seconds, and names the rank."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import bunkbed as bb
import bunkbed.torch as bt
from bunkbed.torch.ranks import group, service
from rank_processes import free_port, message_of, spawn, start_group

ROWS, DIM = 50, 4
TIMEOUT = 12.0  # of a process group; a loaded machine may pause


class _Job:
    """A table of both ranks in a process group of its own: each misuse breaks its group."""

    def __init__(self, rank: int, timeout: float = TIMEOUT, **arguments: Any) -> None:
        self.rank = rank
        self.group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=timeout))
        self.arguments = {"seed": 1, "process_group": self.group, **arguments}

    def make(self, **arguments: Any) -> bt.Embedding:
        self.layer = bt.Embedding(ROWS, DIM, **{**self.arguments, **arguments})
        self.optimizer = bt.Optimizer(self.layer)
        return self.layer

    def look_up(self, *ids: int) -> torch.Tensor:
        rows: torch.Tensor = self.layer(torch.tensor(ids or (1, 2)))
        return rows

    def backward(self, factor: float = 1.0) -> None:
        (self.look_up().sum() * factor).backward()

    def step(self, factor: float = 1.0) -> None:
        self.backward(factor)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _skips_a_step(job: _Job) -> None:
    job.make()
    job.step()
    job.backward()
    if job.rank == 0:
        job.optimizer.step()
    job.optimizer.zero_grad()
    job.look_up()


def _another_learning_rate(job: _Job) -> None:
    job.make()
    for group_of_table in job.optimizer.param_groups:
        group_of_table["lr"] = 0.1 * (1 + job.rank)
    job.step()
    job.look_up()


def _another_seed(job: _Job) -> None:
    job.make(seed=job.rank)


def _another_dim(job: _Job) -> None:
    bt.Embedding(ROWS, DIM + job.rank, **job.arguments)


def _a_bad_id(job: _Job) -> None:
    job.make()
    job.look_up(1, ROWS if job.rank else 2)


def _a_gradient_that_is_not_finite(job: _Job) -> None:
    job.make()
    job.step(float("nan") if job.rank else 1.0)


def _a_lookup_on_one_rank(job: _Job) -> None:
    job.make()
    if job.rank == 0:
        job.look_up()
    else:
        job.layer.table.contains(np.array([1]))


def _a_lookup_and_a_backward(job: _Job) -> None:
    job.make()
    loss = job.look_up().sum()
    if job.rank == 0:
        loss.backward()
    else:
        job.look_up()


def _uneven_loaders(job: _Job) -> None:
    layer = job.make()
    batches = [torch.tensor([1, 2])] * (3 + job.rank)
    for batch in bt.lookahead(batches, layer, ids=lambda ids: {layer: ids}):
        layer(batch).sum().backward()
        job.optimizer.step()
        job.optimizer.zero_grad()


def _a_loader_that_fails(job: _Job) -> None:
    layer = job.make()

    def batches() -> Any:
        yield torch.tensor([1])
        if job.rank:
            raise OSError("no such file")
        yield torch.tensor([2])

    for batch in bt.lookahead(batches(), layer, ids=lambda ids: {layer: ids}):
        layer(batch)


def _a_save_before_the_step(job: _Job) -> None:
    patience, service.STEP_PATIENCE = service.STEP_PATIENCE, 0.5
    job.make()
    job.backward()
    try:
        if job.rank == 0:
            job.optimizer.step()
            job.layer.state_dict()
    finally:
        dist.barrier()
        service.STEP_PATIENCE = patience


def _other_tables_in_a_batch(job: _Job) -> None:
    layers = nn.ModuleList([job.make(), job.make()])
    layers[job.rank](torch.tensor([1]))


def _a_device_cache(job: _Job) -> None:
    job.make(device_cache="1MiB")


def _a_scratch_table(job: _Job) -> None:
    job.make(durability="scratch")


def _too_few_shards(job: _Job) -> None:
    job.make(shards=1)


def _topk(job: _Job) -> None:
    job.make().table.topk(np.zeros((1, DIM), np.float32), k=1)


def _a_scan(job: _Job) -> None:
    list(job.make().table.scan())


def _an_export(job: _Job) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bb.export_rows(job.make().table, f"{folder}/rows.npy")


def _reads_of_two_tables(job: _Job) -> None:
    tables = [job.make().table, job.make().table]
    tables[job.rank].get(np.array([1]))


def _reads_of_two_slots(job: _Job) -> None:
    table = job.make().table
    table.get(np.array([1]), slot=("exp_avg", "exp_avg_sq")[job.rank])


def _sets_of_two_tables(job: _Job) -> None:
    tables = [job.make().table, job.make().table]
    tables[job.rank].set(np.array([1]), np.ones((1, DIM), np.float32))


def _other_hyperparameters(job: _Job) -> None:
    table = job.make().table
    if job.rank == 0:
        table.optimizer = bb.Adam(lr=0.5)
    job.look_up()


def _other_clocks(job: _Job) -> None:
    """They differ by less than float64 tells apart."""
    rules = bb.Retention(expire=3, clock="event")
    table = bt.Embedding(None, DIM, retention=rules, **job.arguments).table
    table.clock = (1 << 62) + job.rank
    table.get(np.array([1]))


def _going_back_to_nothing(job: _Job) -> None:
    job.make().table.rewind("nothing")


def _going_back_to_two_commits(job: _Job) -> None:
    table = job.make().table
    table.commit(keep="a")
    job.step()
    table.commit(keep="b")
    table.rewind("ab"[job.rank])


def _a_wrong_argument(job: _Job) -> None:
    job.make(placement="somewhere")


#: By misuse: what the message of each rank contains.
MISUSES: dict[Callable[[_Job], None], tuple[str, str]] = {
    _skips_a_step: (2 * ("the ranks do not do the same: rank 0 is at a lookup ('table': step 2",)),
    _another_learning_rate: (2 * ("last with 0.1",)),
    _another_seed: (2 * ("Embedding: seed must be equal on all ranks, got rank 0: 0; rank 1: 1",)),
    _another_dim: (2 * ("Embedding: dim must be equal on all ranks, got rank 0: 4; rank 1: 5",)),
    _a_bad_id: ("rank 1 failed in a lookup: IndexError", "IndexError"),
    _a_gradient_that_is_not_finite: (2 * ("the gradient of id 1 is nan at column 0; nothing was changed",)),
    _a_lookup_on_one_rank: (2 * ("rank 0 is at a lookup; rank 1 is at a contains of table 0, 'table'",)),
    _a_lookup_and_a_backward: (2 * ("rank 0 is at a backward; rank 1 is at a lookup",)),
    _uneven_loaders: (2 * ("rank 0",)),
    _a_loader_that_fails: ("rank 1 failed", "OSError: no such file"),
    _a_save_before_the_step: ("rank 1 has made 0; step on every rank first", "no error"),
    _other_tables_in_a_batch: (2 * ("look up different tables in one batch",)),
    _a_device_cache: (2 * ("device_cache= is for a table of one process",)),
    _a_scratch_table: (2 * ('durability="scratch" is for a table of one process',)),
    _too_few_shards: (2 * ("shards must be at least 2, one for each rank, got 1",)),
    _topk: (2 * ("topk() needs all rows",)),
    _a_scan: (2 * ("scan() needs all rows",)),
    _an_export: (2 * ("scan() needs all rows",)),
    _reads_of_two_tables: (2 * ("rank 0 is at a get of field 0 of table 0, 'table'; rank 1 is at a get of field 0",)),
    _reads_of_two_slots: (2 * ("rank 0 is at a get of field 1 of table 0, 'table'; rank 1 is at a get of field 2",)),
    _sets_of_two_tables: (2 * ("rank 0 is at a set of field 0 of table 0, 'table'; rank 1 is at a set of field 0",)),
    _other_hyperparameters: (2 * ("rank 0 is at new hyperparameters of table 0; rank 1 is at a lookup",)),
    _other_clocks: (2 * ("the ranks do not do the same",)),
    _going_back_to_nothing: (2 * ("ValueError: table 'table' keeps no commit 'nothing'",)),
    _going_back_to_two_commits: (2 * ("want to go back to different commits",)),
    _a_wrong_argument: (2 * ('placement must be "sharded" or "local"',)),
}


def _misuse(rank: int) -> dict[str, str]:
    found, kept = {}, []
    for misuse in MISUSES:
        job = _Job(rank)
        found[misuse.__name__] = message_of(lambda: misuse(job))  # noqa: B023  # called at once
        kept.append(job)
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def messages() -> list[dict[str, str]]:
    return spawn(2, _misuse)


@pytest.mark.parametrize("misuse", MISUSES)
def test_every_rank_raises(messages: list[dict[str, str]], misuse: Callable[[_Job], None]) -> None:
    found = [messages[rank][misuse.__name__] for rank in range(2)]
    missing = [rank for rank, expected in enumerate(MISUSES[misuse]) if expected not in found[rank]]
    assert not missing, "\n".join(found)


# ---- Ranks that do not come


def _waits(rank: int) -> tuple[str, list[str]]:
    warnings: list[str] = []
    group.PATIENCE = datetime.timedelta(seconds=0.3)
    group._GRACE = datetime.timedelta(seconds=0.2)
    group.log.warning = lambda text, *values: warnings.append(text % values)  # type: ignore[method-assign]
    job = _Job(rank, timeout=4.0)
    job.make()
    text = message_of(job.look_up) if rank == 0 else ""
    dist.barrier()
    return text, warnings


def test_a_rank_that_does_not_come_is_named_and_then_an_error() -> None:
    text, warnings = spawn(2, _waits)[0]
    assert len(warnings) == 1 and "rank 0 has waited" in warnings[0] and "in a lookup for rank 1;" in warnings[0]
    assert "did not come within 4 s" in text and "start all ranks again" in text


def _stops(rank: int) -> int:
    job = _Job(rank)
    layer = job.make()
    batches = [torch.tensor([1, 2])] * (3 + 2 * rank)
    steps = 0
    for batch in bt.lookahead(batches, layer, ids=lambda ids: {layer: ids}, uneven="stop"):
        layer(batch).sum().backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        steps += 1
    assert layer.table.step == steps
    return steps


def test_uneven_loaders_may_stop_together() -> None:
    assert spawn(2, _stops) == [3, 3]


# ---- Before and without a process group


def _without_a_group(rank: int, port: int) -> list[str]:
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank)}
    found = [message_of(lambda: bt.Embedding(ROWS, DIM))]
    local = bt.Embedding(ROWS, DIM, placement="local", seed=rank)
    alone = bb.create(None, dim=DIM, num_rows=ROWS)
    start_group(rank, 2, port)
    found.append(message_of(lambda: bt.Embedding(ROWS, DIM, table=alone)))
    optimizer = bt.Optimizer(local)
    local(torch.tensor([rank])).sum().backward()
    optimizer.step()
    found.append(f"step {local.table.step}")
    # A layer of one process that was made before the group would train a copy on each rank.
    del os.environ["WORLD_SIZE"]
    return found


def test_a_layer_before_the_process_group() -> None:
    for found in spawn(2, _without_a_group, free_port(), group=False):
        assert "torch.distributed is not initialised" in found[0] and "configure_model()" in found[0]
        assert "RuntimeError" in found[1]
        assert found[2] == "step 1"


def _made_before(rank: int, port: int) -> list[str]:
    layer = bt.Embedding(ROWS, DIM)
    optimizer = bt.Optimizer(layer)
    loss = layer(torch.tensor([1])).sum()
    start_group(rank, 2, port)
    found = [message_of(loss.backward), message_of(lambda: bt.Optimizer(layer))]
    optimizer.zero_grad()
    return found


def test_a_layer_of_one_process_is_refused_in_a_backward() -> None:
    for found in spawn(2, _made_before, free_port(), group=False):
        assert "every rank would train its own copy" in found[0]
