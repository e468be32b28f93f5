"""Ranks on hosts without a shared disk: each host has another directory at the path of the table or run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import bunkbed as bb
import bunkbed.torch as bt
from bunkbed import _native
from bunkbed.files.run_files import RunFiles
from bunkbed.torch.ranks.group import Ranks
from bunkbed.torch.ranks.table import DistributedTable
from rank_disks import Disks
from rank_processes import message_of, why_no_own_disks

WHY_NOT = why_no_own_disks()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"no folder can be mounted: {WHY_NOT}")

ROWS, DIM, STEPS = 500, 8, 4
EVERY = np.arange(ROWS)
#: Failpoints of a commit, in its order: of the shards of a rank, and of a manifest or its copy.
POINTS = ("commit.begin", "commit.flushed", "commit.sealed", "manifest.linked", "commit.published", "run.published")


def _open(disks: Disks, **more: Any) -> DistributedTable:
    layer = bt.Embedding(ROWS, DIM, path=disks.rows, ram="64MiB", optimizer=bb.Adam(lr=0.1), seed=3, **more)
    assert isinstance(layer.table, DistributedTable)
    return layer.table


def _batch(step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([step, rank])
    return rng.integers(0, ROWS, 200), rng.standard_normal((200, DIM)).astype(np.float32)


def _train(table: DistributedTable, steps: int = 1) -> np.ndarray:
    for _ in range(steps):
        table.update(*_batch(table.step, dist.get_rank()))
    return table.get(EVERY).copy()


def _alone(world: int, steps: int) -> np.ndarray:
    table = bb.create(None, dim=DIM, num_rows=ROWS, optimizer=bb.Adam(lr=0.1), init=bb.Normal(std=1.0), seed=3)
    for step in range(steps):
        parts = [_batch(step, rank) for rank in range(world)]
        table.update(np.concatenate([ids for ids, _ in parts]), np.concatenate([grads for _, grads in parts]))
    return table.get(EVERY)


def _trains(rank: int, disks: Disks, more: dict[str, Any]) -> int:
    table = _open(disks, **more)
    _train(table, STEPS)
    table.commit()
    dist.barrier()
    table.close()
    return table.step


@pytest.mark.parametrize(
    ("hosts", "more", "shards"),
    [
        ([0, 1], {}, [["shard-0000"], ["shard-0001"]]),
        ([0, 1, 1, 2], {}, [["shard-0000"], ["shard-0001", "shard-0002"], ["shard-0003"]]),
        ([0, 1, 0, 1], {}, [["shard-0000", "shard-0002"], ["shard-0001", "shard-0003"]]),
        ([0, 1], {"shards": 3}, [["shard-0000", "shard-0001"], ["shard-0002"]]),
    ],
)
def test_rows_have_the_bits_of_one_process(
    hosts: list[int], more: dict[str, Any], shards: list[list[str]], tmp_path: Path
) -> None:
    disks = Disks(tmp_path, hosts)
    for turn in (1, 2):
        assert disks.spawn(_trains, more) == [turn * STEPS] * len(hosts)
        assert [disks.shards(host) for host in range(len(shards))] == shards
        assert all(disks.manifests(host) == disks.manifests(0) for host in range(len(shards)))
        with bb.open(disks.merge(), mode="r") as table:
            assert table.step == turn * STEPS
            assert (table.get(EVERY) == _alone(len(hosts), turn * STEPS)).all()
    assert not list(disks.rows.parent.iterdir())  # each was seen through its own mount alone


def _keeps(rank: int, disks: Disks, parts: int = 4) -> list[Any]:
    table, facts = _open(disks), []

    def say() -> None:
        dist.barrier()
        facts.append((table.epoch, table.snapshots(), sorted(path.name for path in disks.rows.glob("run-*"))))
        dist.barrier()

    first = _train(table)
    table.commit(keep="one")
    say()
    for _ in range(3):
        _train(table)
        table.commit()
    say()
    if parts == 2:
        table.close()
        return facts
    table.rewind("one")
    assert (table.get(EVERY) == first).all() and table.step == 1
    say()
    if rank == 1:
        table.drop("one")
    say()
    table.close()
    return facts


def test_kept_commits_are_on_every_disk(tmp_path: Path) -> None:
    disks = Disks(tmp_path, [0, 1])
    first, other = disks.spawn(_keeps)
    assert first == other
    assert [set(snapshots) for _, snapshots, _ in first] == [{"one"}, {"one"}, {"one"}, set()]
    assert [len(names) for _, _, names in first] == [2, 3, 3, 2]
    assert disks.manifests(0) == disks.manifests(1)
    disks.merge()


def test_a_damaged_commit_is_copied_as_it_is(tmp_path: Path) -> None:
    disks = Disks(tmp_path, [0, 1])
    disks.spawn(_keeps, 2)
    for host in (0, 1):
        (disks.disk(host) / "rows" / "run-0000000000000001").write_bytes(b"damaged \xff")
    assert disks.spawn(_goes_on) == [5, 5]
    assert disks.manifests(0) == disks.manifests(1)
    (disks.disk(1) / "rows" / "run-0000000000000001").unlink()
    assert disks.spawn(_goes_on) == [6, 6]
    assert disks.manifests(0) == disks.manifests(1)
    assert disks.manifests(1)["run-0000000000000001"] == b"damaged \xff"


def _loads(rank: int, disks: Disks) -> bool:
    layer = bt.Embedding(ROWS, DIM, path=disks.rows, ram="64MiB", optimizer=bb.Adam(lr=0.1), seed=3)
    assert isinstance(layer.table, DistributedTable)
    before = _train(layer.table)
    state = layer.state_dict()
    _train(layer.table, STEPS)
    layer.load_state_dict(state)
    same = bool((layer.table.get(EVERY) == before).all())
    layer.table.close()
    return same


def test_a_checkpoint_goes_back_on_every_disk(tmp_path: Path) -> None:
    disks = Disks(tmp_path, [0, 1])
    assert disks.spawn(_loads) == [True, True]
    with bb.open(disks.merge(), mode="r") as table:
        assert table.step == 1


def _dies(rank: int, disks: Disks, dying: int, point: str) -> dict[str, Any]:
    table = _open(disks)
    found: dict[str, Any] = {"before": _train(table)}
    table.commit()
    found["after"] = _train(table)
    if rank == dying:
        _native.arm_failpoint(point, 1, "die")
    dist.barrier()
    return {**found, "message": message_of(table.commit)}


def _goes_on(rank: int, disks: Disks) -> int:
    table = _open(disks)
    _train(table)
    table.commit()
    table.close()
    return table.step


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_is_killed_in_a_commit(dying: int, point: str, tmp_path: Path) -> None:
    disks = Disks(tmp_path, [0, 1])
    survivor = next(one for one in disks.spawn(_dies, dying, point, dying=dying) if one is not None)
    with bb.open(disks.merge(), mode="r") as table:
        is_new = table.step == 2
        assert (table.get(EVERY) == survivor["after" if is_new else "before"]).all()
        assert is_new or (table.step == 1 and survivor["message"] != "no error")
    assert is_new or point != "run.published"
    assert disks.spawn(_goes_on) == [2 + is_new] * 2
    assert disks.manifests(0) == disks.manifests(1)
    disks.merge()


def _is_made(rank: int, disks: Disks, dying: int, point: str) -> str:
    if rank == dying:
        _native.arm_failpoint(point, 1, "die")
    return message_of(lambda: _open(disks))


@pytest.mark.parametrize(("dying", "point"), [(0, "run.published"), (1, "run.published"), (1, "manifest.linked")])
def test_a_rank_is_killed_while_the_table_is_made(dying: int, point: str, tmp_path: Path) -> None:
    disks = Disks(tmp_path, [0, 1])
    disks.spawn(_is_made, dying, point, dying=dying)
    assert disks.spawn(_goes_on) == [1, 1]
    with bb.open(disks.merge(), mode="r") as table:
        assert (table.get(EVERY) == _alone(2, 1)).all()


def _opens(rank: int, disks: Disks) -> str:
    return message_of(lambda: _open(disks))


def _files(disks: Disks) -> dict[Path, bytes]:
    """Every file but locks, which name the process that has them."""
    every = (path for host in set(disks.hosts) for path in disks.disk(host).rglob("*"))
    return {path: path.read_bytes() for path in every if path.is_file() and path.name != "lock"}


def _refused(disks: Disks) -> list[str]:
    before = _files(disks)
    messages: list[str] = disks.spawn(_opens)
    assert _files(disks) == before
    return messages


def test_hosts_in_another_order_are_refused(tmp_path: Path) -> None:
    disks = Disks(tmp_path, [0, 1])
    disks.spawn(_goes_on)
    for message in _refused(Disks(tmp_path, [1, 0])):
        assert "has no table; put the files of shard-000" in message
        assert "or start the hosts in the order of the last time" in message
    shutil.rmtree(disks.disk(1) / "rows")
    for message in _refused(disks):
        assert "rank 1 does not see the directory that rank 0 has" in message and "has no directory there" in message


@pytest.mark.parametrize("lost", [0, 1])
def test_an_older_folder_is_refused(lost: int, tmp_path: Path) -> None:
    disks = Disks(tmp_path, [0, 1])
    disks.spawn(_goes_on)
    shutil.copytree(disks.disk(lost), tmp_path / "older")
    for _ in range(3):
        disks.spawn(_goes_on)
    shutil.rmtree(disks.disk(lost))
    shutil.copytree(tmp_path / "older", disks.disk(lost))
    expected = "which the directory of rank 0 does not have" if lost == 0 else "shard-0001"
    for message in disks.spawn(_opens):
        assert expected in message


def test_a_folder_of_another_table_is_refused(tmp_path: Path) -> None:
    disks, others = (Disks(tmp_path / name, [0, 1]) for name in ("one", "other"))
    for each in (disks, others):
        each.spawn(_goes_on)
    shutil.rmtree(disks.disk(1))
    shutil.copytree(others.disk(1), disks.disk(1))
    for message in _refused(disks):
        assert "which the directory of rank 0 does not have (its newest is 1)" in message


def test_a_new_table_of_rank_0_does_not_replace_shards(tmp_path: Path) -> None:
    disks = Disks(tmp_path, [0, 1])
    disks.spawn(_goes_on)
    shutil.rmtree(disks.disk(0) / "rows")
    for message in disks.spawn(_opens):
        assert "which the directory of rank 0 does not have (it has none)" in message
    assert disks.shards(1) == ["shard-0001"]


def test_a_table_of_one_process_stays(tmp_path: Path) -> None:
    disks = Disks(tmp_path, [0, 1])
    bb.create(disks.disk(1) / "rows", dim=DIM, num_rows=ROWS, optimizer=bb.Adam()).close()
    for message in _refused(disks):
        assert "on its host is a table of one process" in message


def _locks(rank: int, disks: Disks) -> str:
    """Open the table while rank 1's host has a job of its own on that directory."""
    locked = RunFiles(disks.rows).lock("another job") if rank == 1 else None
    dist.barrier()
    found = message_of(lambda: _open(disks))
    if locked is not None:
        RunFiles(disks.rows).unlock(locked)
    dist.barrier()
    _open(disks).close()
    return found


def test_the_directory_of_every_host_is_locked(tmp_path: Path) -> None:
    disks = Disks(tmp_path, [0, 1])
    disks.spawn(_goes_on)
    for message in disks.spawn(_locks):
        assert "is being written by process" in message


def _opens_again(rank: int, disks: Disks) -> list[str]:
    table = _open(disks)
    found = [message_of(lambda: bb.open(disks.rows, mode="w")), message_of(lambda: bb.open(disks.rows, mode="r"))]
    dist.barrier()
    table.close()
    return found


def test_a_table_of_ranks_is_not_opened_beside_them(tmp_path: Path) -> None:
    for message, _ in Disks(tmp_path, [0, 0]).spawn(_opens_again):
        assert "as a table that several processes train; use the `table` of its layer" in message
    for rank, (message, reading) in enumerate(Disks(tmp_path / "apart", [0, 1]).spawn(_opens_again)):
        assert "as a table that several processes train" in message
        assert f"shard-000{1 - rank}" in reading  # a host has its own shards alone


# ---- A run, which has dense files too

CREATE = {"dim": DIM, "num_rows": ROWS, "optimizer": bb.Adam(lr=0.1), "init": bb.Normal(std=1.0), "seed": 3}
#: Bytes of the dense files: several pieces, one, and none.
SIZES = {"large": (5 << 19) + 1, "small": 5, "empty": 0}


def _dense(step: int) -> dict[str, bytes]:
    return {name: bytes([step]) * size for name, size in SIZES.items()}


def _open_in_run(disks: Disks, **more: Any) -> tuple[bb.Run, DistributedTable]:
    run = bt.open_run(disks.rows, ram="64MiB")
    table = run.table("user", create={**CREATE, **more})
    assert isinstance(table, DistributedTable)
    return run, table


def _require_alike(disks: Disks) -> None:
    """Check that every disk has the manifests and dense files of rank 0's, and no other ones."""
    for host in disks.hosts:
        assert disks.manifests(host) == disks.manifests(disks.hosts[0])
        assert disks.dense(host) == disks.dense(disks.hosts[0])
        assert not list((disks.disk(host) / "rows").glob("new-run-table-*"))


def _trains_run(rank: int, disks: Disks, more: dict[str, Any]) -> list[Any]:
    run, table = _open_in_run(disks, **more)
    _train(table, 2)
    files = _dense(table.step) if rank == 0 else {"small": b"of another rank"}  # those of rank 0 count
    run.commit(files=files, meta={"step": table.step})
    found = [run.read(name) == _dense(table.step)[name] for name in SIZES]
    _train(table, STEPS - 2)
    pending = run.begin_commit(files={"small": b"later"}, meta={"step": table.step})
    rows = table.get(EVERY).copy()
    _train(table)  # no part of the commit
    pending.wait()
    found += [run.read("small") == b"later", run.read("large") == _dense(table.step - STEPS + 1)["large"]]
    run.rewind(run.epoch)
    found += [bool((table.get(EVERY) == rows).all()), run.meta == {"step": table.step}]
    run.close()
    return found


@pytest.mark.parametrize(
    ("hosts", "more"), [([0, 1], {}), ([0, 1, 1, 2], {}), ([0, 1, 0, 1], {}), ([0, 1], {"shards": 3})]
)
def test_a_run_has_the_bits_of_one_process(hosts: list[int], more: dict[str, Any], tmp_path: Path) -> None:
    disks = Disks(tmp_path, hosts)
    for turn in (1, 2):
        for found in disks.spawn(_trains_run, more):
            assert all(found), found
        _require_alike(disks)
        with bb.Run(disks.merge(), mode="r") as run:
            assert run.meta == {"step": turn * STEPS} and run.read("small") == b"later"
            table = run.table("user")
            assert table.step == turn * STEPS
            assert (table.get(EVERY) == _alone(len(hosts), turn * STEPS)).all()


def _is_late(rank: int, disks: Disks, late_rank: int) -> bool:
    run, table = _open_in_run(disks)
    _train(table)
    gather = Ranks.gather

    def late(self: Ranks, what: str, say: Callable[[], Any]) -> list[Any]:
        said = gather(self, what, say)
        time.sleep(0.3 * (rank == late_rank))
        return said

    Ranks.gather = late  # type: ignore[method-assign]
    run.commit(files=_dense(1))
    Ranks.gather = gather  # type: ignore[method-assign]
    found = run.read("large") == _dense(1)["large"]
    run.close()
    return found


@pytest.mark.parametrize(("hosts", "late_rank"), [([0, 1], 1), ([0, 0], 0)])
def test_a_commit_waits_until_every_rank_has_the_files(hosts: list[int], late_rank: int, tmp_path: Path) -> None:
    assert Disks(tmp_path, hosts).spawn(_is_late, late_rank) == [True, True]


def _keeps_run(rank: int, disks: Disks) -> list[Any]:
    run, table = _open_in_run(disks)
    facts: list[Any] = []

    def say() -> None:
        dist.barrier()
        names = sorted(path.name for path in disks.rows.glob("run-*"))
        facts.append((run.epoch, run.snapshots(), run.meta, names, len(list((disks.rows / "files").iterdir()))))
        dist.barrier()

    for step in range(1, 6):
        _train(table)
        run.commit(files={"small": bytes([step])}, meta={"step": step}, keep="one" if step == 1 else None)
    say()
    run.rewind("one")
    assert run.read("small") == bytes([1]) and table.step == 1
    say()
    if rank == 1:
        run.drop("one")
    say()
    run.commit(meta={"step": 1})
    run.commit(files={"small": b"new"}, meta={"step": 1})
    run.commit(meta={"step": 1})
    say()
    run.close()
    return facts


def test_dense_files_of_kept_commits_are_on_every_disk(tmp_path: Path) -> None:
    disks = Disks(tmp_path, [0, 1])
    first, other = disks.spawn(_keeps_run)
    assert first == other
    assert [num_files for *_, num_files in first] == [3, 2, 2, 1]
    _require_alike(disks)
    disks.merge()


def _dies_in_run(rank: int, disks: Disks, dying: int, point: str, commits: int) -> dict[str, Any]:
    run, table = _open_in_run(disks)
    for step in range(1, commits + 1):
        _train(table)
        run.commit(files=_dense(step), meta={"step": step})
    _train(table)
    if rank == dying:
        _native.arm_failpoint(point, 1, "die")
    dist.barrier()
    return {"message": message_of(lambda: run.commit(files=_dense(commits + 1), meta={"step": commits + 1}))}


def _goes_on_with_run(rank: int, disks: Disks) -> tuple[int, Any, list[bytes]]:
    run, table = _open_in_run(disks)
    found = table.step, run.meta, [run.read(name) for name in run.files]
    _train(table)
    run.commit(files={"small": b"went on"}, meta={"step": table.step})
    run.close()
    return found


@pytest.mark.parametrize("commits", [0, 1])
@pytest.mark.parametrize(
    ("dying", "point"),
    [
        *((0, point) for point in ("commit.begin", "commit.published", "run.tables", "run.files", "run.published")),
        *((1, point) for point in ("commit.begin", "commit.published", "run.files", "run.published")),
    ],
)
def test_a_rank_is_killed_in_a_commit_of_a_run(dying: int, point: str, commits: int, tmp_path: Path) -> None:
    disks = Disks(tmp_path, [0, 1])
    survivor = next(one for one in disks.spawn(_dies_in_run, dying, point, commits, dying=dying) if one is not None)
    first, other = disks.spawn(_goes_on_with_run)
    step, meta, contents = first
    assert first == other and step in (commits, commits + 1)
    assert step == commits + 1 or (point != "run.published" and survivor["message"] != "no error")
    assert (meta, contents) == (({"step": step}, [_dense(step)[name] for name in sorted(SIZES)]) if step else ({}, []))
    _require_alike(disks)
    with bb.Run(disks.merge(), mode="r") as run:
        assert (run.table("user").get(EVERY) == _alone(2, step + 1)).all() and run.read("small") == b"went on"


def _fails_in_run(rank: int, disks: Disks) -> list[Any]:
    run, table = _open_in_run(disks)
    _train(table)
    if rank == 1:
        _native.arm_failpoint("run.files", 1, "error")
    failed = message_of(lambda: run.commit(files=_dense(1), meta={"step": 1}))
    _train(table)
    run.commit(files={"small": b"second"})  # the files and meta of the failed commit are owed
    found = [failed, run.epoch, run.meta, run.read("small"), run.read("large") == _dense(1)["large"]]
    run.close()
    return found


def test_a_copy_that_fails_fails_the_commit(tmp_path: Path) -> None:
    disks = Disks(tmp_path, [0, 1])
    for failed, *found in disks.spawn(_fails_in_run):
        assert "run.files" in failed
        assert found == [1, {"step": 1}, b"second", True]
    _require_alike(disks)


def test_a_copy_that_is_lost_comes_again(tmp_path: Path) -> None:
    disks = Disks(tmp_path, [0, 1])
    disks.spawn(_goes_on_with_run)
    disks.spawn(_goes_on_with_run)
    whole = disks.dense(0)
    assert len(whole) == 2 and whole == disks.dense(1)
    one, other = (disks.disk(1) / "rows" / "files" / name for name in sorted(whole))
    one.unlink()
    other.write_bytes(b"damaged")
    disks.spawn(_opens_run)
    assert disks.dense(0) == disks.dense(1) == whole
    # Of a file that is damaged on rank 0's disk there is nothing to copy.
    (disks.disk(0) / "rows" / "files" / other.name).write_bytes(b"damaged")
    other.unlink()
    for message, is_there in zip(disks.spawn(_opens_run), ("fails its checksum", "is missing"), strict=True):
        assert is_there in message
    assert one.read_bytes() == whole[one.name] and not other.exists()


def _cannot_copy(rank: int, disks: Disks) -> str:
    def write_file(self: RunFiles, number: int, data: bytes) -> tuple[int, int, str]:
        raise OSError(28, f"no space left for file {number}")

    RunFiles.write_file = write_file  # type: ignore[method-assign]
    return message_of(lambda: bt.open_run(disks.rows, ram="64MiB"))


def test_a_copy_that_cannot_be_written_ends_the_opening_on_all_ranks(tmp_path: Path) -> None:
    disks = Disks(tmp_path, [0, 1])
    disks.spawn(_goes_on_with_run)
    shutil.rmtree(disks.disk(1) / "rows" / "files")
    for message in disks.spawn(_cannot_copy):
        assert "no space left for file 1" in message
    disks.spawn(_opens_run)
    _require_alike(disks)


def _fails_once_published(rank: int, disks: Disks) -> list[Any]:
    run, table = _open_in_run(disks)
    run.commit(files=_dense(1))
    snapshots = RunFiles.snapshots

    def fail(self: RunFiles) -> dict[str, int]:
        raise OSError(24, "too many open files")

    _train(table)
    if rank == 0:
        RunFiles.snapshots = fail  # type: ignore[method-assign]
    failed = message_of(lambda: run.commit(files={"small": b"a"}, meta={"step": 1}))
    RunFiles.snapshots = snapshots  # type: ignore[method-assign]
    _train(table)
    run.commit(files={"large": b"b"}, meta={"step": 2})
    found = [failed, run.read("small"), run.read("large"), run.read("empty"), run.meta]
    run.close()
    return found


def test_rank_0_fails_after_it_has_published(tmp_path: Path) -> None:
    disks = Disks(tmp_path, [0, 1])
    for failed, *found in disks.spawn(_fails_once_published):
        assert "too many open files" in failed
        assert found == [b"a", b"b", b"", {"step": 2}]
    disks.spawn(_opens_run)
    _require_alike(disks)


def _opens_run(rank: int, disks: Disks) -> str:
    run, _ = _open_in_run(disks)
    found = message_of(lambda: run.read("small"))
    run.close()
    return found


def _opens_run_of_a_command(rank: int, disks: Disks) -> str:
    return message_of(lambda: bt.open_run(disks.rows, _one_disk=True))


def test_a_run_of_bunkbed_train_needs_one_disk(tmp_path: Path) -> None:
    disks = Disks(tmp_path, [0, 1])
    for message in disks.spawn(_opens_run_of_a_command):
        assert "rank 1 does not see the directory that rank 0 has" in message
        assert "the ranks of this run must share it" in message
