"""`BlockSampler`: the batches of a `BlockOrder` through PyTorch's DataLoader."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import bunkbed as bb
from bunkbed.torch import BlockSampler, Embedding, Optimizer, lookahead

torch.set_num_threads(1)

SAMPLES, USERS, ITEMS, BATCH = 3_000, 400, 300, 50


def columns() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, USERS, SAMPLES), rng.integers(0, ITEMS, SAMPLES)


def test_the_loader_gives_the_batches_of_the_order() -> None:
    users, items = columns()
    order = bb.BlockOrder([users, items], blocks=3, seed=1)
    sampler = BlockSampler(order, BATCH)
    loader = DataLoader(TensorDataset(torch.from_numpy(users), torch.arange(SAMPLES)), batch_sampler=sampler)
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert sampler.epoch == epoch
        expected = [batch.indices.tolist() for batch in order.batches(epoch, BATCH)]
        found = list(loader)
        assert [indices.tolist() for _, indices in found] == expected
        assert len(loader) == len(sampler) == len(expected)
        assert all(np.array_equal(ids, users[indices]) for ids, indices in found)
        seen.append(expected)
    assert seen[0] != seen[1]


def test_a_run_resumes_within_an_epoch() -> None:
    sampler = BlockSampler(bb.BlockOrder([columns()[0]], blocks=4), BATCH)
    sampler.set_epoch(3)
    batches = list(sampler)
    sampler.set_epoch(3, first=7)
    assert list(sampler) == batches[7:] and len(sampler) == len(batches) - 7
    sampler.set_epoch(4)
    assert len(sampler) == len(list(sampler)) == sampler.order.num_batches(4, BATCH)


def test_workers_of_the_loader_give_the_same_batches() -> None:
    sampler = BlockSampler(bb.BlockOrder([columns()[0]], blocks=4), BATCH)
    data = TensorDataset(torch.arange(SAMPLES))
    loader = DataLoader(data, batch_sampler=sampler, num_workers=2, persistent_workers=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert [indices.tolist() for (indices,) in loader] == list(sampler)


def trained(path: Path, *, ahead: bool, ram: str) -> tuple[np.ndarray, list[float], int]:
    """Return the rows and losses of two epochs, and the rows that the second epoch missed."""
    users, items = columns()
    user = Embedding(USERS, 512, path=path / "user", ram=ram, optimizer=bb.Adagrad(0.1), seed=0)
    item = Embedding(ITEMS, 512, path=path / "item", ram=ram, optimizer=bb.Adagrad(0.1), seed=1)
    model = torch.nn.ModuleList([user, item])
    optimizer = Optimizer(model)
    sampler = BlockSampler(bb.BlockOrder([users, items], blocks=8, seed=1), BATCH)
    loader: Any = DataLoader(TensorDataset(torch.from_numpy(users), torch.from_numpy(items)), batch_sampler=sampler)
    if ahead:
        loader = lookahead(loader, model, ids=lambda batch: {user: batch[0], item: batch[1]})
    losses, missed = [], 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        missed = -sum(int(layer.table.stats()["misses"]) for layer in (user, item))
        for ids, others in loader:
            loss = (user(ids) * item(others)).sum(1).sub(1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        missed += sum(int(layer.table.stats()["misses"]) for layer in (user, item))
    rows = np.concatenate([user.table.get(np.arange(USERS)), item.table.get(np.arange(ITEMS))])
    for layer in (user, item):
        layer.table.close()
    return rows, losses, missed


def test_training_has_the_same_bits_for_every_budget_and_with_lookahead(tmp_path: Path) -> None:
    expected, losses, missed = trained(tmp_path / "all", ahead=False, ram="64MiB")
    assert missed == 0
    for name, ahead, ram in (("little", False, "1MiB"), ("ahead", True, "1MiB"), ("more", True, "1536KiB")):
        rows, found, missed = trained(tmp_path / name, ahead=ahead, ram=ram)
        assert np.array_equal(rows, expected) and found == losses
        # Blocks of users are loaded once; those of items once for each: far below one miss for each id.
        assert missed < SAMPLES, name


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("ahead", [False, True])
def test_lightning_sets_the_epoch(tmp_path: Path, ahead: bool) -> None:
    lightning = pytest.importorskip("lightning")
    order = bb.BlockOrder([columns()[0]], blocks=4)
    loader: Any = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_sampler=BlockSampler(order, BATCH))
    seen: list[list[int]] = []

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, index: int) -> Any:
            seen.append(batch[0].tolist())
            return (self.weight - 1).square().sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, enable_checkpointing=False, default_root_dir=tmp_path, **quiet
    )
    model = Model()
    if ahead:
        loader = lookahead(loader, model, ids=lambda batch: {})
    trainer.fit(model, loader)
    assert seen == [batch.indices.tolist() for epoch in range(2) for batch in order.batches(epoch, BATCH)]


def test_more_than_one_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = BlockSampler(bb.BlockOrder([np.arange(9)], blocks=2), 3)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match=r"BlockSampler: torch\.distributed runs with 2 processes"):
        next(iter(sampler))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert len(list(sampler)) == len(sampler)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1, 2], 3), TypeError, "order must be a bunkbed.BlockOrder, got list"),
        ((bb.BlockOrder([np.arange(4)], 2), 0), ValueError, "BlockSampler: batch_size must be in [1, "),
        ((bb.BlockOrder([np.arange(4)], 2), 2.5), TypeError, "BlockSampler: batch_size must be an int, got 2.5"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        BlockSampler(*arguments)


@pytest.mark.parametrize("arguments", [(-1,), (0, -1), (0, 100)])
def test_a_bad_epoch_changes_nothing(arguments: Any) -> None:
    sampler = BlockSampler(bb.BlockOrder([np.arange(40)], blocks=2), 3)
    sampler.set_epoch(2, first=1)
    before = list(sampler)
    with pytest.raises(ValueError, match="must be in"):
        sampler.set_epoch(*arguments)
    assert sampler.epoch == 2 and list(sampler) == before
