"""Checkpoints as people write them: the last one every epoch, the best one when it is better, another process."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import bunkbed as bb
from bunkbed.adapters import references
from bunkbed.torch import Embedding, Optimizer
from log_records import our_records

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

ROWS, DIM = 40, 4


class Job:
    """A model with a dense part, as a script makes it."""

    def __init__(self, path: Path | None, **arguments: Any) -> None:
        torch.manual_seed(0 if path is not None else 1)
        layer = Embedding(ROWS, DIM, path=path, ram=None if path is None else "8MiB", **arguments)
        self.model = torch.nn.Sequential(layer, torch.nn.Linear(DIM, 1))
        self.optimizer = Optimizer(self.model, dense=torch.optim.Adam(self.model.parameters(), lr=0.1))

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        (self.model(torch.tensor([1, 2, number % ROWS])) * (1 + number)).square().sum().backward()
        self.optimizer.step()

    def save(self, file: Path) -> None:
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)

    def load(self, file: Path) -> None:
        saved = torch.load(file, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    @property
    def outputs(self) -> Any:
        with torch.no_grad():
            return self.model(torch.arange(ROWS))

    def close(self) -> None:
        self.model[0].table.close()


@pytest.mark.parametrize("in_ram", [False, True])
def test_last_and_best(in_ram: bool, tmp_path: Path) -> None:
    path = None if in_ram else tmp_path / "user"
    job = Job(path)
    best = None
    for epoch in range(8):
        job.step(epoch)
        job.save(tmp_path / "last.pt")
        if epoch == 1:
            job.save(tmp_path / "best.pt")
            best = job.outputs
    last = job.outputs
    job.step(8)
    after = job.outputs
    job.close()
    again = Job(path)  # another process; a table in RAM has another seed
    again.load(tmp_path / "best.pt")
    assert torch.equal(again.outputs, best) and again.model[0].table.step == 2
    again.load(tmp_path / "last.pt")
    assert torch.equal(again.outputs, last)
    again.step(8)
    assert torch.equal(again.outputs, after)
    again.close()


def test_a_version_that_is_dropped_is_warned_of_once(caplog: Any, tmp_path: Path) -> None:
    job = Job(tmp_path / "user", keep_checkpoints=2)
    shown = []
    with caplog.at_level(logging.INFO, logger="bunkbed"):
        for epoch in range(4):
            caplog.clear()
            job.step(epoch)
            job.save(tmp_path / f"{epoch}.pt")
            shown.append([(one.levelno, one.getMessage()) for one in our_records(caplog)])
    assert shown[:2] == [[], []] and [level for ((level, _),) in shown[2:]] == [logging.WARNING, logging.INFO]
    assert shown[2][0][1] == (
        "table 'user': commit 1 is dropped, as keep_checkpoints=2: "
        "a state_dict that needs it does not load; None keeps all"
    )
    with pytest.raises(RuntimeError, match=r"commit 1 was dropped.*commit\(keep='best'\), then the state_dict"):
        job.load(tmp_path / "0.pt")
    job.close()


def test_the_remedy_of_a_dropped_version_works(tmp_path: Path) -> None:
    job = Job(tmp_path / "user", keep_checkpoints=1)
    job.step(0)
    best = job.outputs
    job.model[0].table.commit(keep="best")
    job.save(tmp_path / "best.pt")
    for epoch in range(3):
        job.step(epoch)
        job.save(tmp_path / "last.pt")
    job.load(tmp_path / "best.pt")
    assert torch.equal(job.outputs, best)
    job.close()


@pytest.mark.parametrize("keep", [None, 3])
def test_a_file_loads_after_the_name_that_it_had_moved(keep: int | None, tmp_path: Path) -> None:
    job = Job(tmp_path / "user", keep_checkpoints=keep)
    job.step(0)
    first = job.outputs
    job.model[0].table.commit(keep="best")
    job.save(tmp_path / "last.pt")
    job.step(1)
    job.model[0].table.commit(keep="best")  # and a crash before the next file
    job.load(tmp_path / "last.pt")
    assert torch.equal(job.outputs, first)
    job.close()


def test_a_named_version_is_not_said_to_be_dropped(caplog: Any, tmp_path: Path) -> None:
    job = Job(tmp_path / "user", keep_checkpoints=1)
    job.step(0)
    job.model[0].table.commit(keep="best")
    job.save(tmp_path / "best.pt")
    job.step(1)
    job.save(tmp_path / "last.pt")
    assert [one.getMessage() for one in our_records(caplog) if one.levelno >= logging.WARNING] == []
    job.step(2)
    job.save(tmp_path / "last.pt")
    assert "commit 3" in our_records(caplog)[-1].getMessage() and "is dropped" in our_records(caplog)[-1].getMessage()
    job.close()


def test_a_reader_at_a_name_loads_the_file_of_that_commit(tmp_path: Path) -> None:
    job = Job(tmp_path / "user")
    for epoch in range(3):
        job.step(epoch)
        if epoch == 1:
            best = job.outputs
            job.model[0].table.commit(keep="best")
            job.save(tmp_path / "best.pt")
        job.save(tmp_path / "last.pt")
    state = torch.load(tmp_path / "best.pt", weights_only=True)["model"]
    with bb.open(tmp_path / "user", mode="r", snapshot="best") as reader:
        model = torch.nn.Sequential(Embedding(ROWS, DIM, table=reader), torch.nn.Linear(DIM, 1))
        model.load_state_dict(state)
        assert torch.equal(model(torch.arange(ROWS)), best)
    with bb.open(tmp_path / "user", mode="r") as reader:  # at the newest commit
        model = torch.nn.Sequential(Embedding(ROWS, DIM, table=reader), torch.nn.Linear(DIM, 1))
        with pytest.raises(RuntimeError, match=r"refers to commit \d+, but .* open it with snapshot='best'"):
            model.load_state_dict(state)
    job.close()


def test_kept_versions_that_take_much_are_warned_of(caplog: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(references, "_MANY_BYTES", 4096)
    layer = Embedding(2000, 64, path=tmp_path / "user", ram="16MiB", optimizer=bb.SGD(1.0))
    optimizer = Optimizer(layer)
    shown = []
    for _ in range(8):
        optimizer.zero_grad()
        layer(torch.arange(2000)).sum().backward()
        optimizer.step()
        caplog.clear()
        layer.state_dict()
        shown.append([one.getMessage() for one in our_records(caplog)])
    assert shown[:2] == [[], []] and 1 <= sum(map(len, shown)) <= 3, shown
    (line,) = next(lines for lines in shown if lines)
    assert "commits that a state_dict may refer to" in line and "keep_checkpoints=" in line
    assert len(layer.table.snapshots()) == 8
    layer.table.close()
