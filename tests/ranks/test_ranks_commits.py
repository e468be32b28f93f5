"""Commits of a table that processes share: by one rank alone, by all, while training goes on, and going back."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel

import bunkbed as bb
import bunkbed.torch as bt
from bunkbed.torch.ranks.group import RanksError
from rank_processes import message_of, spawn

ROWS, DIM = 3_000, 8
EVERY = np.arange(ROWS)


class _Model(nn.Module):
    def __init__(self, **places: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = bt.Embedding(ROWS, DIM, optimizer=bb.Adam(lr=1e-2), seed=3, **places)
        self.dense = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.dense(self.rows(ids)).squeeze(-1)
        return output


class _Job:
    """A model of one rank, and its training."""

    def __init__(self, **places: Any) -> None:
        self.model = _Model(**places)
        several = dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if several else 0
        self.whole = DistributedDataParallel(self.model) if several else self.model
        self.optimizer = bt.Optimizer(self.whole, dense=torch.optim.SGD(self.model.dense.parameters(), 0.0))
        self.table = self.model.rows.table

    def train(self, steps: int) -> np.ndarray:
        """Train; return all rows."""
        for _ in range(steps):
            rng = np.random.default_rng([self.table.step, self.rank])
            self.whole(torch.from_numpy((rng.zipf(1.2, 300) - 1) % ROWS)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.table.get(EVERY).copy()


def _commits(rank: int, place: str | None, shards: int) -> dict[str, Any]:
    places: dict[str, Any] = {} if place is None else {"path": place, "ram": "64MiB", "shards": shards}
    job = _Job(**places)
    table = job.table
    first = job.train(3)
    if rank == 0:  # alone: the others are on their way to the barrier
        job.model.state_dict()
        assert not table.is_dirty
    dist.barrier()
    assert not table.is_dirty
    saved = job.model.state_dict()  # all at once: nothing has changed, so there is no new commit
    epoch = table.epoch
    assert table.snapshots() == [(f"state_dict-{epoch}", epoch)] or len(table.snapshots()) == 1
    second = job.train(2)
    assert (first != second).any()
    pending = table.begin_commit(meta={"by": "all"}, keep="two")
    job.train(1)
    assert pending.wait() == epoch + 1
    assert table.is_dirty and table.meta == {"by": "all"}
    job.model.load_state_dict(saved)
    assert (table.get(EVERY) == first).all() and table.step == 3
    assert (job.train(2) == second).all()  # the same steps have the same bits again
    if rank == dist.get_world_size() - 1:
        table.commit(keep="alone")
        assert "alone" in dict(table.snapshots())
        table.drop("alone")
    dist.barrier()
    assert "alone" not in dict(table.snapshots()) and "two" in dict(table.snapshots())
    job.train(1)
    table.rewind("two")
    assert (table.get(EVERY) == second).all() and table.step == 5
    last = job.model.state_dict()
    if place is not None:
        with bb.open(place, mode="r") as reader:
            assert (reader.get(EVERY) == second).all()
    if rank == 0:
        table.close()  # the others go on to have their rows open
    dist.barrier()
    table.close()
    references = [value for key, value in last.items() if "dense" not in key]
    digest = hashlib.sha256(pickle.dumps([torch.as_tensor(one).tolist() for one in references])).hexdigest()
    return {"rows": second, "reference": digest, "step": 5}


@pytest.mark.parametrize(("world", "shards"), [(2, 2), (2, 3), (2, 6), (3, 3)])
def test_commits_in_files(world: int, shards: int, tmp_path: Path) -> None:
    place = tmp_path / "rows"
    found = spawn(world, _commits, str(place), shards)
    assert len({one["reference"] for one in found}) == 1  # a checkpoint of any rank is that of all
    assert not bb.check(place)
    with bb.open(place, ram="64MiB") as table:
        assert isinstance(table, bb.ShardedTable) and table.num_shards == shards
        assert (table.get(EVERY) == found[0]["rows"]).all() and table.step == 5


def test_commits_in_ram() -> None:
    spawn(2, _commits, None, 2)


# ---- Checkpoints


def _save(rank: int, place: str, checkpoint: str) -> np.ndarray:
    job = _Job(path=place, ram="64MiB", shards=4)
    rows = job.train(3)
    dcp.save({"model": job.model.state_dict()}, checkpoint_id=checkpoint)
    get_state_dict(job.whole, job.optimizer)
    assert job.table.step == 3 and (job.table.get(EVERY) == rows).all()
    if rank == 0:
        torch.save(job.model.state_dict(), f"{checkpoint}/alone.pt")
    dist.barrier()
    job.train(2)  # lost: nothing saves it
    dist.barrier()
    job.table.close(commit=False)
    return rows


def _load(rank: int, place: str, checkpoint: str) -> np.ndarray:
    job = _Job(path=place, ram="64MiB", shards=4)
    job.train(1)
    state = {"model": job.model.state_dict()}
    dcp.load(state, checkpoint_id=checkpoint)
    job.model.load_state_dict(state["model"])
    rows = job.table.get(EVERY).copy()
    job.train(1)
    job.model.load_state_dict(torch.load(f"{checkpoint}/alone.pt"))
    assert (job.table.get(EVERY) == rows).all() and job.table.step == 3
    job.table.close()
    return rows


def test_a_checkpoint_of_two_processes_loads_in_four_and_in_one(tmp_path: Path) -> None:
    place, checkpoint = str(tmp_path / "rows"), str(tmp_path / "checkpoint")
    saved = spawn(2, _save, place, checkpoint)
    for rows in spawn(4, _load, place, checkpoint):
        assert (rows == saved[0]).all()
    job = _Job(path=place, ram="64MiB")
    state = {"model": job.model.state_dict()}
    with pytest.warns(UserWarning, match="in a single process"):
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    job.model.load_state_dict(state["model"])
    assert (job.table.get(EVERY) == saved[0]).all()
    job.table.close()


def _save_portable(rank: int, place: str, folder: str) -> np.ndarray:
    job = _Job(path=place, ram="64MiB", shards=4)
    rows = job.train(3)
    bt.save_portable(job.whole, folder)
    assert not job.table.is_dirty and job.table.snapshots() == {}
    with pytest.raises(RanksError if rank else FileExistsError, match="exists and would be overwritten"):
        bt.save_portable(job.whole, folder)
    with pytest.raises(RanksError if rank else ValueError, match="is in RAM only"):
        bt.save_portable(_Job().whole, f"{folder}-ram")
    job.train(2)
    job.table.close()
    return rows


def test_a_portable_folder_of_two_processes_opens_in_one(tmp_path: Path) -> None:
    saved = spawn(2, _save_portable, str(tmp_path / "rows"), str(tmp_path / "portable"))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["portable", "rows"]
    job = _Job(path=tmp_path / "portable" / "tables" / "module.rows", ram="64MiB")
    state = torch.load(tmp_path / "portable" / "model.pt")
    job.model.load_state_dict({key.removeprefix("module."): value for key, value in state.items()})
    assert (job.table.get(EVERY) == saved[0]).all() and job.table.step == 3
    job.table.close()


# ---- Another number of processes


def _open_with(rank: int, place: str, shards: int | None) -> str:
    def train() -> None:
        job = _Job(path=place, ram="64MiB", shards=shards)
        job.train(2)
        job.table.commit()
        job.table.close()

    return message_of(train)


def test_another_number_of_processes_wants_a_reshard(tmp_path: Path) -> None:
    place = tmp_path / "rows"
    assert spawn(2, _open_with, str(place), None) == ["no error"] * 2
    for text in spawn(3, _open_with, str(place), None):
        assert "has 2 shards, and 3 processes want one each" in text
        assert f"bunkbed reshard {place} --shards 3" in text
    bb.reshard(place, shards=3)
    assert spawn(3, _open_with, str(place), None) == ["no error"] * 3
    with bb.open(place, mode="r") as table:
        assert table.step == 4


def test_shards_in_one_process(tmp_path: Path) -> None:
    place = tmp_path / "rows"
    job = _Job(path=place, ram="64MiB", shards=4)
    job.train(2)
    job.table.close(commit=True)
    assert spawn(2, _open_with, str(place), 4) == ["no error"] * 2
    assert _Job(path=place, ram="64MiB", shards=4).table.step == 4
    with pytest.raises(ValueError, match=r"has 4 shards, not shards=2; divide it with: bunkbed reshard"):
        _Job(path=place, ram="64MiB", shards=2)


def test_a_table_of_one_process_wants_a_reshard(tmp_path: Path) -> None:
    place = tmp_path / "rows"
    with bb.create(place, dim=DIM, num_rows=ROWS, ram="64MiB", optimizer=bb.Adam(lr=1e-2), seed=3) as table:
        table.update(EVERY, np.ones((ROWS, DIM), np.float32))
    for text in spawn(2, _open_with, str(place), None):
        assert f"divide it with: bunkbed reshard {place} --shards 2" in text
    bb.reshard(place, shards=2)
    assert spawn(2, _open_with, str(place), None) == ["no error"] * 2


def test_a_shard_that_one_rank_cannot_open_leaves_the_table_closed(tmp_path: Path) -> None:
    place = tmp_path / "rows"
    spawn(2, _open_with, str(place), None)
    hidden = place / "tables" / "shard-0001"
    hidden.rename(tmp_path / "hidden")
    found = spawn(2, _open_with, str(place), None)
    assert "shard-0001" in found[0] and "rank 1" in found[0] and "shard-0001" in found[1]
    (tmp_path / "hidden").rename(hidden)
    assert spawn(2, _open_with, str(place), None) == ["no error"] * 2


def test_a_table_that_another_process_writes_is_locked_on_every_rank(tmp_path: Path) -> None:
    place = tmp_path / "rows"
    spawn(2, _open_with, str(place), None)
    with bb.open(place, ram="64MiB"):
        found = spawn(2, _open_with, str(place), None)
    assert "TableLockedError" in found[0] and "rank 0 failed in opening a table: TableLockedError" in found[1]
    assert spawn(2, _open_with, str(place), None) == ["no error"] * 2
