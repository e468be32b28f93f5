"""What a layer does where a table is at its path already, and what it says about it."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import bunkbed as bb
from bunkbed.torch import Embedding, EmbeddingBag, Optimizer
from log_records import our_records
from rank_processes import message_of, spawn

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

ROWS, DIM = 1200, 4


def make(path: Path, **kwargs: Any) -> Any:
    return Embedding(ROWS, DIM, path=path, ram="8MiB", **kwargs)


def train(layer: Any, steps: int = 3) -> Any:
    optimizer = Optimizer(layer, replace=True)
    for _ in range(steps):
        optimizer.zero_grad()
        layer(torch.arange(1005)).sum().backward()
        optimizer.step()
    return optimizer


def stored(path: Path, steps: int = 3) -> None:
    layer = make(path)
    train(layer, steps)
    layer.table.close()


@contextlib.contextmanager
def shown(caplog: Any) -> Any:
    lines: list[str] = []
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="bunkbed"):
        yield lines
    lines += [record.getMessage() for record in our_records(caplog) if "row" in record.getMessage()]


def test_opening_stored_rows_is_one_line(caplog: Any, tmp_path: Path) -> None:
    path = tmp_path / "user"
    with shown(caplog) as lines:
        stored(path)
        Embedding(5, 2)
    assert lines == [f"new table {path}: no row is stored"]  # and none of a table in RAM
    with shown(caplog) as lines:
        first = make(path)
    assert lines == [f"opened {path}: 1,005 rows, step 3"]
    assert {record.levelno for record in our_records(caplog) if "row" in record.getMessage()} == {logging.WARNING}
    with shown(caplog) as lines:
        second = make(path)
    assert lines == [f"shares the open table {path}: 1,005 rows, step 3"] and second.table is first.table


def test_exist_error(tmp_path: Path) -> None:
    path = tmp_path / "user"
    layer = make(path, exist="error")
    with pytest.raises(FileExistsError, match=r'exist="open" goes on with its rows, exist="new" removes them'):
        make(path, exist="error")
    layer.table.close()
    with pytest.raises(FileExistsError, match="there is a table"):
        make(path, exist="error")
    (tmp_path / "empty").mkdir()
    make(tmp_path / "empty", exist="error").table.close()


@pytest.mark.parametrize("kind", ["plain", "sharded", "kept", "bag"])
def test_exist_new(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "user"
    arguments: Any = {"shards": 2} if kind == "sharded" else {}
    layer = Embedding(ROWS, DIM, path=path, ram="32MiB", seed=1, **arguments)
    train(layer)
    if kind == "kept":
        layer.table.commit(keep="best")
    layer.table.close()
    make_again = EmbeddingBag if kind == "bag" else Embedding
    again: Any = make_again(ROWS, 7, path=path, ram="32MiB", seed=2, exist="new", **arguments)  # of another width
    assert (again.table.step, again.table.epoch, len(again.table)) == (0, 0, 0)
    assert again.table.snapshots() == {}
    fresh = bb.create(None, dim=7, num_rows=ROWS, init=bb.Normal(1.0), seed=2)
    np.testing.assert_array_equal(again.table.get(np.arange(9)), fresh.get(np.arange(9)))
    assert [entry.name for entry in tmp_path.iterdir()] == ["user"]
    again.table.close()


def test_a_scratch_table_is_new_in_any_case(tmp_path: Path) -> None:
    for _ in range(2):
        layer = make(tmp_path / "user", exist="new", durability="scratch")
        train(layer)
        layer.table.close()
    assert layer.table.step == 3


def test_pretrained_rows_replace_a_table(tmp_path: Path) -> None:
    stored(tmp_path / "user")
    weight = torch.ones(7, DIM)
    with pytest.raises(FileExistsError, match='exist="new"'):
        Embedding.from_pretrained(weight, path=tmp_path / "user", ram="8MiB")
    layer = Embedding.from_pretrained(weight, path=tmp_path / "user", ram="8MiB", exist="new")
    assert torch.equal(layer(torch.arange(7)), weight)
    layer.table.close()


def _holds(path: Path, ready: Any, done: Any) -> None:
    with bb.open(path, ram="8MiB"):
        ready.set()
        done.wait(60)


def test_exist_new_removes_a_table_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "user"
    stored(path)
    rows = bb.open(path, mode="r", ram="8MiB").get(np.arange(20))

    def refused(error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            make(path, exist="new")

    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    holder = context.Process(target=_holds, args=(path, ready, done))
    holder.start()
    assert ready.wait(60)
    refused(bb.TableLockedError, f"is being written by process {holder.pid}")
    done.set()
    holder.join(60)
    (path / "notes.txt").write_text("mine")
    refused(FileExistsError, r"also holds notes\.txt")
    (path / "notes.txt").unlink()
    (path / "segment-0000000000000009").symlink_to(tmp_path)
    refused(FileExistsError, "also holds segment-0000000000000009")
    (path / "segment-0000000000000009").unlink()
    (tmp_path / "letter").write_text("mine")
    (path / "segment-0000000000000009").symlink_to(tmp_path / "letter")
    refused(FileExistsError, "also holds segment-0000000000000009")
    (path / "segment-0000000000000009").unlink()
    np.testing.assert_array_equal(bb.open(path, mode="r", ram="8MiB").get(np.arange(20)), rows)
    away = tmp_path / "elsewhere"
    path.rename(away)
    path.symlink_to(away)
    refused(FileExistsError, "is not a directory")
    path.unlink()
    path.mkdir()
    (path / "letter").write_text("mine")
    refused(FileExistsError, "holds none")
    assert (path / "letter").read_text() == "mine"


def test_exist_new_leaves_shards_elsewhere_and_tables_of_runs(tmp_path: Path) -> None:
    far = bb.ShardedTable.create(
        tmp_path / "far", dim=DIM, num_rows=ROWS, ram="32MiB", directories=[tmp_path / "a", tmp_path / "b"]
    )
    far.close()
    with pytest.raises(FileExistsError, match=f"has shards elsewhere, as {tmp_path}"):
        make(tmp_path / "far", exist="new")
    with bb.Run(tmp_path / "run", ram="32MiB") as run:
        run.table("user", create={"dim": DIM, "num_rows": ROWS})
        run.commit()
    with pytest.raises(FileExistsError, match="belongs to a run"):
        make(tmp_path / "run" / "tables" / "user", exist="new")
    with bb.Run(tmp_path / "run", ram="32MiB") as run:
        assert run.table("user").num_rows == ROWS


def test_other_values_and_tables_that_are_given() -> None:
    with pytest.raises(ValueError, match='exist must be "open", "error" or "new", got \'replace\''):
        Embedding(5, 2, exist="replace")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exist= cannot be given together with table="):
        Embedding(5, 2, table=bb.create(None, dim=2, num_rows=5), exist="new")


# ---- Reruns


def test_folds_begin_with_untouched_rows(tmp_path: Path) -> None:
    losses: list[float] = []
    before: Any = None
    for _ in range(3):
        torch.manual_seed(0)
        layer = make(tmp_path / "user", exist="new")
        optimizer = Optimizer(layer, dense=torch.optim.SGD(layer.parameters(), lr=0.1))
        for _ in range(3):
            loss = layer(torch.arange(50)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        layer.state_dict()
        if losses[1:]:
            with pytest.raises(bb.TableClosedError):
                before(torch.tensor([1]))
        before = layer  # the fold before is there still
    assert len(set(losses)) == 1
    layer.table.close()


def test_a_cell_that_runs_twice_replaces_its_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Sequential(make(tmp_path / "user"))
    optimizer = Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = optimizer  # as a notebook keeps it until the name is assigned
    model[0].table.commit()
    model = torch.nn.Sequential(make(tmp_path / "user"))
    optimizer = Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="replaced by another; step that"):
        before.step()
    with pytest.raises(RuntimeError, match="already has an Optimizer"):
        Optimizer(model)
    assert scheduler.optimizer is before
    model[0].table.close()


def test_an_optimizer_of_layers_that_live_is_not_stale() -> None:
    first, second = Embedding(5, 2), Embedding(5, 2)
    optimizer = Optimizer(torch.nn.ModuleList([first, second]))  # the list is gone, its layers live
    gc.collect()
    with pytest.raises(RuntimeError, match="already has an Optimizer"):
        Optimizer(first)
    table = first.table
    again = Embedding(5, 2, table=table)
    del first
    Optimizer(again)
    with pytest.raises(RuntimeError, match="replaced by another"):
        optimizer.step()


# ---- Several processes


def _ranks(rank: int, path: str) -> list[Any]:
    def layer(**kwargs: Any) -> Any:
        return Embedding(ROWS, DIM, path=path, ram="32MiB", seed=1, **kwargs)

    one = layer(exist="error")
    optimizer = Optimizer(one)
    one(torch.arange(20)).sum().backward()
    optimizer.step()
    one.table.close()
    said = [message_of(lambda: layer(exist="error"))]
    with caplog_of() as lines:
        found = layer()
    said += [lines, found.table.step]
    (Path(path) / f"mine-{rank}").touch()
    said += [message_of(lambda: layer(exist="new")), len(found.table.get(np.arange(2)))]
    (Path(path) / f"mine-{rank}").unlink()
    new = layer(exist="new")
    said += [new.table.step, len(new.table)]
    new.table.close()
    return said


@contextlib.contextmanager
def caplog_of() -> Any:
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("bunkbed")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)


def test_ranks_replace_a_table_together(tmp_path: Path) -> None:
    first, second = spawn(2, _ranks, str(tmp_path / "user"))
    assert first[0].startswith("FileExistsError") and "there is a table" in second[0]
    assert first[1] == [f"opened {tmp_path}/user: 20 rows, step 1"] and second[1] == []
    assert first[2] == second[2] == 1
    assert "also holds mine-" in first[3] and "rank 0 failed" in second[3] and first[4] == second[4] == 2
    assert first[5:] == second[5:] == [0, 0]
