"""A run of several tables and dense files that ranks train and commit together, with the bits of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import bunkbed as bb
import bunkbed.torch as bt
from bunkbed import _native
from bunkbed.files import run_files
from bunkbed.run.run import Run
from rank_processes import GROUP_SECONDS, message_of, spawn

USERS, ITEMS, DIM = 400, 90, 4
TABLES = {"user": USERS, "item": ITEMS}


def _definition(name: str, **more: Any) -> dict[str, Any]:
    optimizer = bb.Adam(lr=0.1) if name == "user" else bb.Adagrad(lr=0.1)
    return {"dim": DIM, "num_rows": TABLES[name], "optimizer": optimizer, "seed": len(name), **more}


def _draws(step: int, rank: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng([step, rank])
    return {name: torch.from_numpy(rng.integers(0, rows, 50)) for name, rows in TABLES.items()}


class _Job:
    """Two tables of a run, and a dense file with the number of steps."""

    def __init__(self, place: str, rank: int, **more: Any) -> None:
        self.rank = rank
        self.run = bt.open_run(place, ram="256MiB")
        self.layers = torch.nn.ModuleDict(
            {
                name: bt.Embedding(rows, DIM, table=self.run.table(name, create=_definition(name, **more)))
                for name, rows in TABLES.items()
            }
        )
        self.optimizer = bt.Optimizer(self.layers)

    @property
    def step(self) -> int:
        return int(self.run.tables["user"].step)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            draws = _draws(self.step, self.rank)
            user, item = (self.layers[name](draws[name]) for name in TABLES)
            (user * item).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def commit(self, keep: str | None = None) -> int:
        return self.run.commit(files={"steps": str(self.step).encode()}, meta={"step": self.step}, keep=keep)

    def rows(self) -> dict[str, np.ndarray]:
        return {name: self.run.tables[name].get(np.arange(rows)).copy() for name, rows in TABLES.items()}


def _one_process(place: str, steps: int, world: int) -> dict[str, np.ndarray]:
    """Train a run of one process: the ranks' batches one after another, each loss divided by their number."""
    with Run(place, ram="256MiB") as run:
        layers = {
            name: bt.Embedding(rows, DIM, table=run.table(name, create=_definition(name)))
            for name, rows in TABLES.items()
        }
        optimizer = bt.Optimizer(torch.nn.ModuleDict(layers))
        for step in range(steps):
            for rank in range(world):
                draws = _draws(step, rank)
                user, item = (layers[name](draws[name]) for name in TABLES)
                ((user * item).sum() / world).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: run.table(name).get(np.arange(rows)).copy() for name, rows in TABLES.items()}


def _same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all((one[name] == other[name]).all() for name in TABLES)


def _stored(place: Path, snapshot: str | None = None) -> tuple[dict[str, np.ndarray], int, int, int]:
    """Return the rows, the step of the tables, of the meta and of the file, as a reader in one process sees them."""
    assert not bb.check(place)
    with Run(place, mode="r", snapshot=snapshot) as run:
        rows = {name: run.table(name).get(np.arange(count)) for name, count in TABLES.items()}
        steps = {run.table(name).step for name in TABLES}
        assert len(steps) == 1
        return rows, steps.pop(), run.meta["step"], int(run.read("steps"))


def _trains(rank: int, place: str, more: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    job = _Job(place, rank, **more)
    job.train(3)
    first = job.rows()
    assert job.run.is_behind() and job.commit(keep="three") == 1
    assert job.run.epoch == 1 and not job.run.is_behind()
    job.train(2)
    pending = job.run.begin_commit(files={"steps": b"5"}, meta={"step": 5})
    job.train(1)  # not part of the commit, but of that of `close`
    assert pending.wait() == 2 and pending.done
    assert job.run.read("steps") == b"5" and job.run.meta == {"step": 5} and job.run.files == ["steps"]
    assert job.run.snapshots() == {"three": 1} and set(job.run.tables) == set(TABLES)
    last = job.rows()
    job.run.close()
    return [first, last]


@pytest.mark.parametrize("world, shards", [(2, None), (2, 5), (4, None)])
def test_a_run_of_ranks_has_the_bits_of_one_process(world: int, shards: int | None, tmp_path: Path) -> None:
    place, more = tmp_path / "run", {} if shards is None else {"shards": shards}
    for first, last in spawn(world, _trains, str(place), more):
        assert _same(first, _stored(place, "three")[0])
        assert _same(last, _stored(place)[0])
    assert _stored(place, "three")[1:] == (3, 3, 3)
    assert _stored(place)[1:] == (6, 5, 5)  # close() commits the last step, with the files and meta of before
    assert _same(_stored(place)[0], _one_process(str(tmp_path / "one"), 6, world))


def _goes_back(rank: int, place: str) -> list[Any]:
    job = _Job(place, rank, shards=4)
    job.train(2)
    job.commit(keep="two")
    job.train(2)
    job.commit()
    job.train(1)
    assert job.run.rewind("two") == 3
    rows, found = job.rows(), [job.step, job.run.meta, job.run.read("steps").decode()]
    job.train(2)
    job.commit()
    if rank == 1:
        job.run.drop("two")  # one rank alone
    dist.barrier()
    assert job.run.snapshots() == {}
    messages = [message_of(lambda: job.run.rewind("two")), message_of(job.run.tables["user"].commit)]
    job.run.close()
    return [rows, found, messages, job.run.tables["user"].closed]


def test_a_run_goes_back(tmp_path: Path) -> None:
    place = tmp_path / "run"
    expected = _one_process(str(tmp_path / "one"), 2, 2)
    for rows, found, messages, closed in spawn(2, _goes_back, str(place)):
        assert _same(rows, expected) and found == [2, {"step": 2}, "2"] and closed
        assert "has no snapshot 'two'" in messages[0] and "run.commit()" in messages[1]
    assert _stored(place)[1:] == (4, 4, 4)
    assert _same(_stored(place)[0], _one_process(str(tmp_path / "four"), 4, 2))


def _adds(rank: int, place: str, steps: int) -> None:
    job = _Job(place, rank)
    job.train(steps)
    job.commit()
    job.run.close()


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    spawn(2, _goes_back, place)
    spawn(4, _adds, place, 1)
    job_rows, *steps = _stored(tmp_path / "run")
    assert steps == [5, 5, 5]
    with Run(place, ram="256MiB") as run:  # one process writes it, too
        table = run.table("user", create=_definition("user"))
        assert (table.get(np.arange(USERS)) == job_rows["user"]).all()
        run.table("item").update(np.arange(3), np.ones((3, DIM), np.float32))
    assert Run(place, mode="r").table("item").step == 6


# ---- Failures


def _fails(rank: int, place: str) -> list[str]:
    job = _Job(place, rank)
    job.train(1)
    job.commit()
    job.train(1)
    if rank == 0:
        real = run_files.RunFiles.publish

        def fails(*_: Any) -> None:
            run_files.RunFiles.publish = real
            raise OSError(28, "No space left on device")

        run_files.RunFiles.publish = fails
    found = [message_of(job.commit)]
    dist.barrier()
    job.train(1)
    job.run.commit()  # it has the file and the meta of the commit that failed
    found.append(json.dumps([job.run.epoch, job.run.meta, job.run.read("steps").decode()]))
    job.run.close()
    return found


def test_the_next_commit_has_the_files_of_one_that_failed(tmp_path: Path) -> None:
    for failed, found in spawn(2, _fails, str(tmp_path / "run")):
        assert "No space left on device" in failed
        assert json.loads(found) == [2, {"step": 2}, "2"]
    assert _stored(tmp_path / "run")[1:] == (3, 2, 2)


def _dies(rank: int, place: str, dying: int, point: str) -> str:
    job = _Job(place, rank)
    job.train(1)
    job.commit()
    job.train(1)
    if rank == dying:
        _native.arm_failpoint(point, 1, "die")
    dist.barrier()
    return message_of(job.commit)


@pytest.mark.parametrize(
    "dying, point",
    [
        (1, "commit.published"),
        (0, "run.tables"),
        (0, "run.files"),
        (0, "run.published"),
    ],
)
def test_a_rank_is_killed_in_a_commit_of_a_run(dying: int, point: str, tmp_path: Path) -> None:
    place = tmp_path / "run"
    found = spawn(2, _dies, str(place), dying, point, dying=dying)
    rows, *steps = _stored(place)
    assert steps in ([1, 1, 1], [2, 2, 2])
    if found[1 - dying] == "no error":
        assert steps == [2, 2, 2]
    if point != "run.published":
        assert steps == [1, 1, 1]
    assert _same(rows, _one_process(str(tmp_path / "one"), steps[0], 2))
    spawn(2, _adds, str(place), 1)
    assert _stored(place)[1:] == (steps[0] + 1,) * 3


# ---- Misuse


def _misuses(rank: int, place: str) -> list[str]:
    run = bt.open_run(f"{place}/run", ram="256MiB")
    user = run.table("user", create=_definition("user", disk="1GiB"))
    assert (
        user is run.table("user", create=_definition("user", disk="1GiB"))
        and user.local.stats()["disk_limit_bytes"] == 512 << 20
    )
    if rank == 1:  # only this rank cannot make its shard
        (run.path / "tables" / "item.shard-0001").mkdir()
        (run.path / "tables" / "item.shard-0001" / "stranger").touch()
    found = [
        message_of(lambda: run.table("item", create=_definition("item", shards=1))),
        message_of(lambda: run.table("item", create={**_definition("item"), "dim": 4 + rank})),
        message_of(lambda: run.table("item")),
        message_of(lambda: run.table("bad/name", create=_definition("item"))),
        message_of(lambda: run.table("user", create=_definition("user", shards=7))),
        message_of(lambda: run.table("user", create={**_definition("user"), "dim": 9})),
        message_of(lambda: run.table("user", create=_definition("user", disk="2GiB"))),
        message_of(lambda: run.table("item", create=_definition("item"))),
        message_of(lambda: run.commit(meta={"rank": rank})),
        message_of(lambda: run.commit(files={"": b""})),
        message_of(lambda: run.tables["user"].begin_commit()),
        message_of(lambda: bt.open_run(f"{place}/run")),
        message_of(lambda: bt.open_run(f"{place}/table")),
        message_of(lambda: bt.open_run(f"{place}/sharded")),
        message_of(lambda: bt.open_run(f"{place}/run-{rank}")),
        message_of(lambda: bt.open_run(f"{place}/other", gradients="median")),
    ]
    run.commit()
    run.close()
    run = bt.open_run(f"{place}/plain", ram="256MiB")
    found.append(message_of(lambda: run.table("user")))
    run.close()
    found.append(message_of(run.commit))
    assert run.commit  # closed twice is no error
    run.close()
    return found


def test_misuse_of_a_run_is_an_error_on_every_rank(tmp_path: Path) -> None:
    bb.create(tmp_path / "table", dim=2, num_rows=5).close()
    bb.ShardedTable.create(tmp_path / "sharded", dim=2, num_rows=5, shards=2).close()
    _one_process(str(tmp_path / "plain"), 1, 1)
    expected = [
        "has 1 shards, and 2 processes want one each",
        "Run.table: create must be equal on all ranks",
        "has no table 'item' (it has: none)",
        "a table's name is",
        "has 2 shards, got shards=7",
        "dim",
        "is open already with disk=1073741824",
        "which is no file of a table",
        "the ranks commit with different meta or keep",
        "a file's name is",
        "run.begin_commit()",
        "is being written by process",
        "is a table, not a run",
        "is one sharded table",
        "path must be equal on all ranks",
        "gradients must be",
        "table 'user' is not sharded, and 2 processes want a shard each",
        "is closed",
    ]
    for found in spawn(2, _misuses, str(tmp_path), seconds=GROUP_SECONDS + 30):
        assert len(found) == len(expected)
        for text, part in zip(found, expected, strict=True):
            assert part in text, text
    with Run(tmp_path / "run", mode="r") as run:
        assert run.table_names == ["user"] and run.epoch == 1
        assert sorted(run.manifest.tables) == ["user.shard-0000", "user.shard-0001"]


def test_one_process_opens_an_ordinary_run(tmp_path: Path) -> None:
    with bt.open_run(tmp_path / "run", ram="64MiB") as run:
        assert type(run) is Run
