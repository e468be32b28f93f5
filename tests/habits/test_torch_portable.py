"""`save_portable`: a model and its tables in one folder, which another machine opens."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bunkbed as bb
from bunkbed.adapters import ram_rows
from bunkbed.torch import Embedding, EmbeddingBag, Optimizer, portable, save_portable

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

ROWS, DIM = 40, 4
EVERY = torch.arange(ROWS)


class Model(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A table with files, one with shards, one in RAM, and a second layer on the first."""

    def __init__(self, folder: Path, *, user: str = "user", item: str = "item", **kept: Any) -> None:
        super().__init__()
        self.towers = torch.nn.ModuleDict(
            {
                "user": Embedding(ROWS, DIM, path=folder / user, ram="8MiB", **kept),
                "a/b": Embedding(ROWS, DIM, path=folder / item, ram="8MiB", shards=2),
            }
        )
        self.tags = Embedding(ROWS, DIM)
        self.bag = EmbeddingBag(ROWS, DIM, table=self.towers["user"].table, **kept)
        self.head = torch.nn.Linear(DIM, 1)

    def forward(self, ids: Any) -> Any:
        rows = self.towers["user"](ids) + self.towers["a/b"](ids) * self.tags(ids)
        return self.head(rows + self.bag(ids[:, None]))


class Job:
    """A model and its training."""

    def __init__(self, folder: Path, **arguments: Any) -> None:
        self.model = Model(folder, **arguments)
        self.optimizer = Optimizer(self.model, dense=torch.optim.Adam(self.model.parameters(), lr=0.1))

    def train(self, first: int, steps: int) -> None:
        for number in range(first, first + steps):
            self.optimizer.zero_grad()
            self.model(torch.tensor([1, 2, number % ROWS])).square().sum().backward()
            self.optimizer.step()

    @property
    def outputs(self) -> Any:
        with torch.no_grad():
            return self.model(EVERY)

    def close(self) -> None:
        for layer in self.model.towers.values():
            layer.table.close()


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def there(folder: Path) -> Job:
    """Return the job that a portable folder has, as a user of another machine opens it."""
    torch.manual_seed(9)
    job = Job(folder / "tables", user="towers.user", item="towers.a%2Fb")
    job.model.load_state_dict(torch.load(folder / "model.pt"))
    job.optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
    return job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    torch.manual_seed(0)
    job = Job(tmp_path / "here")
    job.train(0, 3)
    return job


def test_a_folder_moves_and_goes_on_with_the_same_bits(job: Job, tmp_path: Path) -> None:
    save_portable(job.model, tmp_path / "out" / "portable")
    torch.save(job.optimizer.state_dict(), tmp_path / "out" / "portable" / "optimizer.pt")
    job.train(3, 4)
    wanted = job.outputs
    job.close()
    shutil.rmtree(tmp_path / "here")  # the machine that trained it
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    moved = tmp_path / "elsewhere" / "portable"
    assert names(moved) == ["model.pt", "optimizer.pt", "tables"]
    assert names(moved / "tables") == ["towers.a%2Fb", "towers.user"]
    other = there(moved)
    assert other.model.towers["user"].table.step == 3
    other.train(3, 4)
    assert torch.equal(other.outputs, wanted)
    other.model.load_state_dict(torch.load(moved / "model.pt"))  # the rows of that moment stay
    other.optimizer.load_state_dict(torch.load(moved / "optimizer.pt"))
    other.train(3, 4)
    assert torch.equal(other.outputs, wanted)
    other.close()


def test_the_folder_does_not_follow_the_tables(job: Job, tmp_path: Path) -> None:
    wanted = job.outputs
    save_portable(job.model, tmp_path / "portable")
    torch.save(job.optimizer.state_dict(), tmp_path / "portable" / "optimizer.pt")
    job.train(3, 2)
    job.close()
    other = there(tmp_path / "portable")
    assert torch.equal(other.outputs, wanted)
    other.close()


def test_a_layer_alone(tmp_path: Path) -> None:
    layer = Embedding(ROWS, DIM, path=tmp_path / "user", ram="8MiB")
    save_portable(layer, tmp_path / "portable")
    other = Embedding(ROWS, DIM, path=tmp_path / "portable" / "tables" / "user", ram="8MiB")
    other.load_state_dict(torch.load(tmp_path / "portable" / "model.pt"))
    assert torch.equal(other(EVERY), layer(EVERY))


def test_a_model_without_layers_of_ours(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    save_portable(model, str(tmp_path / "portable"))
    assert torch.equal(torch.load(tmp_path / "portable" / "model.pt")["weight"], model.weight)


def test_it_keeps_no_version_and_drops_none(tmp_path: Path) -> None:
    job = Job(tmp_path / "here", keep_checkpoints=1)
    table = job.model.towers["user"].table
    job.train(0, 1)
    best, outputs = copy.deepcopy(job.model.state_dict()), job.outputs
    kept = table.snapshots()
    job.train(1, 2)
    save_portable(job.model, tmp_path / "portable")
    assert table.snapshots() == kept and not table.is_dirty
    assert job.model.towers["user"].keep_checkpoints == 1
    job.model.load_state_dict(best)
    assert torch.equal(job.outputs, outputs)
    job.close()


@pytest.mark.parametrize("versions", ["one", "two"])
def test_a_reader(versions: str, tmp_path: Path) -> None:
    path = tmp_path / "user"
    with bb.create(path, dim=DIM, num_rows=ROWS, ram="8MiB") as table:
        table.update(np.array([1]), np.ones((1, DIM), np.float32))
        table.commit(keep="first")
        if versions == "two":
            table.update(np.array([1]), np.ones((1, DIM), np.float32))
            table.commit()
    with bb.open(path, mode="r", snapshot="first") as table:
        layer = Embedding(ROWS, DIM, table=table)
        save_portable(layer, tmp_path / "portable")
        with bb.open(tmp_path / "portable" / "tables" / "user", mode="r") as other:
            assert torch.equal(torch.from_numpy(other.get(EVERY.numpy())), layer(EVERY))


def test_a_reader_of_a_commit_that_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "user"
    with bb.create(path, dim=DIM, num_rows=ROWS, ram="8MiB") as table:
        table.commit()
        with bb.open(path, mode="r") as reader:
            table.update(np.array([1]), np.ones((1, DIM), np.float32))
            table.commit()
            layer = Embedding(ROWS, DIM, table=reader)
            with pytest.raises(ValueError, match=r"is at commit 1, and the last is 2; refresh\(\) the table"):
                save_portable(layer, tmp_path / "portable")
            assert names(tmp_path) == ["user"]
            reader.refresh()
            save_portable(layer, tmp_path / "portable")


def test_what_is_there_stays(job: Job, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "folder", "link", "here"):
        with pytest.raises(FileExistsError, match=f"{name} exists and would be overwritten; give another path"):
            save_portable(job.model, tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine" and not (tmp_path / "nowhere").exists()
    assert job.model.towers["user"].table.is_dirty  # refused before anything was committed
    (tmp_path / "empty").mkdir()
    save_portable(job.model, tmp_path / "empty")
    assert (tmp_path / "empty" / "model.pt").exists()
    job.close()


def test_what_cannot_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bb.Run(tmp_path / "run", ram="16MiB") as run:
        layer = Embedding(ROWS, DIM, table=run.table("user", create={"dim": DIM, "num_rows": ROWS}))
        with pytest.raises(ValueError, match=r"table 'user' belongs to the run .*bunkbed\.copy\(run\.path, path\)"):
            save_portable(layer, tmp_path / "portable")
    layer = Embedding(ROWS, DIM)
    layer(EVERY)
    layer.table.set(EVERY.numpy(), layer.table.get(EVERY.numpy()))
    monkeypatch.setattr(portable, "MOST_BYTES", ram_rows.bytes_of(layer.table) - 1)
    with pytest.raises(ValueError, match=r"is in RAM only, .* give its layer a path="):
        save_portable(layer, tmp_path / "portable")
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got dict"):
        save_portable({}, tmp_path / "portable")
    assert names(tmp_path) == ["run"]


def test_a_failure_leaves_nothing(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".portable.part" / "tables" / "other").mkdir(parents=True)  # of a call that was killed
    whole, calls = bb.copy, []

    def fails(*arguments: Any, **keywords: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return whole(*arguments, **keywords)

    monkeypatch.setattr(bb, "copy", fails)
    with pytest.raises(OSError, match="No space left"):
        save_portable(job.model, tmp_path / "portable")
    assert names(tmp_path) == ["here"]
    assert [layer.table.snapshots() for layer in job.model.towers.values()] == [{}, {}]
    save_portable(job.model, tmp_path / "portable")
    assert names(tmp_path / "portable") == ["model.pt", "tables"]
    job.close()
