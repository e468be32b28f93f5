"""A table whose layer has no ``optimizer=`` follows its parameter group, as `nn.Embedding` does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import bunkbed as bb
from bunkbed.torch import Embedding, EmbeddingBag, Optimizer
from log_records import our_records
from rank_processes import spawn

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

ROWS, DIM = 12, 4
Rule = Callable[[Any], torch.optim.Optimizer]

#: Rules whose steps do not touch other rows, so that a table equals `nn.Embedding`.
EQUAL: dict[str, Rule] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.5),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.3, eps=1e-6, initial_accumulator_value=0.1),
    "SparseAdam": lambda groups: torch.optim.SparseAdam(groups, lr=0.05, betas=(0.8, 0.9), eps=1e-6),
}
#: Rules whose torch version moves every row: a table equals `SparseAdam`'s rows, or its reference.
MAPPED: dict[str, tuple[Rule, bb.Adam]] = {
    "Adam": (lambda groups: torch.optim.Adam(groups, lr=0.05), bb.Adam(0.05)),
    "Adam, decay": (
        lambda groups: torch.optim.Adam(groups, lr=0.05, weight_decay=0.1),
        bb.Adam(0.05, weight_decay=0.1),
    ),
    "AdamW": (
        lambda groups: torch.optim.AdamW(groups, lr=0.05, betas=(0.5, 0.6), eps=1e-5),
        bb.Adam(0.05, (0.5, 0.6), 1e-5, weight_decay=0.01, decoupled=True),
    ),
    "AdamW, no decay": (lambda groups: torch.optim.AdamW(groups, lr=0.05, weight_decay=0), bb.Adam(0.05)),
    "tensor lr": (lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.25)), bb.Adam(0.25)),
}


def rows(layer: Any) -> Any:
    return torch.from_numpy(layer.table.get(np.arange(layer.table.num_rows)))


class Pair:
    """A layer of ours and torch's, with equal rows, each with its optimizer."""

    def __init__(self, rule: Rule, path: Path | None = None, **group: Any) -> None:
        ram = None if path is None else "8MiB"
        self.ours = Embedding(ROWS, DIM, padding_idx=2, path=path, ram=ram)
        self.theirs = torch.nn.Embedding(ROWS, DIM, padding_idx=2, sparse=True)
        self.theirs.weight.data.copy_(rows(self.ours))
        self.dense = rule([{"params": self.ours.parameters(), **group}])
        self.optimizer = Optimizer(self.ours, dense=self.dense)
        self.reference = rule([{"params": self.theirs.parameters(), **group}])

    def train(self, steps: int = 4) -> None:
        ids = torch.tensor([[1, 3, 3], [0, 2, 1]])
        factors = torch.arange(6 * DIM).reshape(2, 3, DIM) * 0.1 - 1.0
        for _ in range(steps):
            for optimizer, layer in ((self.optimizer, self.ours), (self.reference, self.theirs)):
                optimizer.zero_grad()
                (layer(ids) * factors).sum().backward()
                optimizer.step()

    def require_equal(self) -> None:
        torch.testing.assert_close(rows(self.ours), self.theirs.weight.data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("name", EQUAL)
def test_a_table_has_the_rule_and_rate_of_its_group(name: str, in_files: bool, tmp_path: Path) -> None:
    pair = Pair(EQUAL[name], tmp_path / "rows" if in_files else None)
    pair.train()
    pair.require_equal()
    assert type(pair.ours.table.optimizer).__name__ == {"SparseAdam": "Adam"}.get(name, name)
    pair.ours.table.close()


@pytest.mark.parametrize("name", MAPPED)
def test_adam_becomes_lazy_adam(name: str) -> None:
    rule, expected = MAPPED[name]
    layer = EmbeddingBag(ROWS, DIM, mode="sum")
    Optimizer(layer, dense=rule(layer.parameters()))
    assert layer.table.optimizer == expected


def test_each_table_follows_the_group_that_held_it() -> None:
    model = torch.nn.ModuleDict({name: Embedding(ROWS, DIM) for name in ("slow", "fast", "own")})
    model["own"] = Embedding(ROWS, DIM, optimizer=bb.Adagrad(0.7))
    model["head"] = torch.nn.Linear(DIM, 1)
    dense = torch.optim.SGD(
        [
            {"params": [*model["slow"].parameters(), *model["head"].parameters()], "lr": 0.1},
            {"params": model["fast"].parameters(), "lr": 2.0, "weight_decay": 0.5},
            {"params": model["own"].parameters(), "lr": 9.0},
        ],
        lr=1.0,
    )
    optimizer = Optimizer(model, dense=dense)
    assert model["slow"].table.optimizer == bb.SGD(0.1)
    assert model["fast"].table.optimizer == bb.SGD(2.0, weight_decay=0.5)
    assert model["own"].table.optimizer == bb.Adagrad(0.7)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 2.0, 9.0, 0.1, 2.0, 0.7]


@pytest.mark.parametrize("of", ["dense", "ours"])
@pytest.mark.parametrize("name", EQUAL)
def test_a_scheduler_of_either_optimizer_reaches_the_table(name: str, of: str) -> None:
    pair = Pair(EQUAL[name])
    mine = lr_scheduler.ExponentialLR(pair.dense if of == "dense" else pair.optimizer, 0.5)
    theirs = lr_scheduler.ExponentialLR(pair.reference, 0.5)
    for _ in range(4):
        pair.train(1)
        mine.step()
        theirs.step()
    pair.require_equal()


def test_a_rate_that_is_set_by_hand_reaches_the_table() -> None:
    pair = Pair(EQUAL["SparseAdam"])
    for key, value in (("lr", 0.5), ("betas", (0.3, 0.4)), ("eps", 0.1)):
        pair.optimizer.param_groups[0][key] = pair.reference.param_groups[0][key] = value
        pair.train(2)
        pair.require_equal()
        assert pair.optimizer.param_groups[1][key] == value


def test_what_is_written_into_the_tables_group_is_its_own() -> None:
    pair = Pair(EQUAL["SGD"])
    dense, table = pair.optimizer.param_groups
    dense["lr"], table["lr"] = 0.1, 0.5  # written, though it is what it was
    pair.train(1)
    assert table["lr"] == 0.5 and pair.ours.table.step == 1
    pair.require_equal()
    dense["lr"] = pair.reference.param_groups[0]["lr"] = 0.2
    pair.train(1)
    assert table["lr"] == 0.2
    pair.require_equal()


def test_a_scheduler_with_a_factor_for_each_group() -> None:
    pair = Pair(EQUAL["SGD"])
    mine = lr_scheduler.LambdaLR(pair.optimizer, [lambda step: 0.1**step, lambda step: 1.0])
    for _ in range(3):
        pair.train(1)
        mine.step()
    pair.require_equal()
    assert pair.optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)


def test_loading_a_state_keeps_what_was_saved() -> None:
    pair = Pair(EQUAL["SGD"])
    pair.optimizer.param_groups[0]["lr"] = 0.125
    pair.train(1)
    saved = pair.optimizer.state_dict()
    other = Pair(EQUAL["SGD"])
    other.optimizer.load_state_dict(saved)
    other.reference.param_groups[0]["lr"] = 0.125
    other.train(2)
    other.require_equal()
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.125, 0.125]


def test_a_state_that_is_saved_after_a_scheduler_of_dense_has_stepped() -> None:
    pair, other = Pair(EQUAL["SGD"]), Pair(EQUAL["SGD"])
    mine = lr_scheduler.ExponentialLR(pair.dense, 0.5)
    pair.train(1)
    mine.step()
    other.optimizer.load_state_dict(pair.optimizer.state_dict())
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.25, 0.25]


def test_a_group_that_is_added_later(caplog: Any) -> None:
    model = torch.nn.ModuleDict({"first": Embedding(ROWS, DIM), "head": torch.nn.Linear(DIM, 1)})
    optimizer = Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=0.1))
    later = Embedding(ROWS, DIM)
    optimizer.add_param_group({"params": later.parameters(), "lr": 0.7})
    assert later.table.optimizer == bb.SGD(0.7) and optimizer.param_groups[2]["lr"] == 0.7
    again = Embedding(ROWS, DIM)
    (shown,) = _shown(caplog, lambda: optimizer.add_param_group({"params": again.parameters()}))
    assert shown[0] == logging.INFO and "which follows its parameter group of SGD" in shown[1]


# ---- Rows that exist


def test_pretrained_rows_stay_when_the_rule_changes(tmp_path: Path) -> None:
    weight = torch.randn(300, DIM)
    for path in (None, tmp_path / "rows"):
        layer = Embedding.from_pretrained(weight, freeze=False, path=path, ram=None if path is None else "8MiB")
        optimizer = Optimizer(layer, dense=torch.optim.SGD(layer.parameters(), lr=1.0))
        assert torch.equal(rows(layer), weight) and layer.table.optimizer == bb.SGD(1.0)
        layer(torch.tensor([7])).sum().backward()
        optimizer.step()
        assert torch.equal(rows(layer)[7], weight[7] - 1.0)
    layer.table.close()
    with bb.open(tmp_path / "rows", ram="8MiB") as table:
        assert table.optimizer == bb.SGD(1.0) and table.step == 1


def test_a_folder_that_holds_something_else_is_not_replaced(tmp_path: Path) -> None:
    layer = Embedding(ROWS, DIM, padding_idx=1, path=tmp_path / "rows", ram="8MiB")
    (tmp_path / "rows" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"nothing else would be removed, and this also holds notes\.txt"):
        Optimizer(layer, dense=torch.optim.SGD(layer.parameters(), lr=1.0))
    assert layer.table.optimizer == bb.Adam(1e-3) and not rows(layer)[1].any()
    (tmp_path / "rows" / "notes.txt").unlink()
    Optimizer(layer, dense=torch.optim.SGD(layer.parameters(), lr=1.0))
    assert layer.table.optimizer == bb.SGD(1.0)
    layer.table.close()


def test_a_table_with_shards_is_made_again(tmp_path: Path) -> None:
    layer = Embedding(ROWS, DIM, padding_idx=3, path=tmp_path / "rows", ram="32MiB", shards=2, seed=4)
    before = rows(layer)
    Optimizer(layer, dense=torch.optim.SGD(layer.parameters(), lr=1.0))
    assert layer.table.optimizer == bb.SGD(1.0) and layer.table.num_shards == 2
    assert torch.equal(rows(layer), before) and not rows(layer)[3].any()


def test_a_device_cache_is_made_again() -> None:
    layer = Embedding(ROWS, DIM, device_cache="1MiB", seed=4)
    optimizer = Optimizer(layer, dense=torch.optim.SGD(layer.parameters(), lr=1.0))
    before = rows(layer)
    layer(torch.tensor([5])).sum().backward()
    optimizer.step()
    assert torch.equal(rows(layer)[5], before[5] - 1.0)


def test_keep_checkpoints_and_a_second_layer_stay(tmp_path: Path) -> None:
    first = Embedding(ROWS, DIM, path=tmp_path / "rows", ram="8MiB", keep_checkpoints=7)
    second = EmbeddingBag(ROWS, DIM, path=tmp_path / "rows", mode="sum", keep_checkpoints=2)
    model = torch.nn.ModuleList([first, second])
    optimizer = Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=1.0))
    assert first.table is second.table and first.keep_checkpoints == 7
    before = rows(first)
    (first(torch.tensor([1])).sum() + second(torch.tensor([[1, 4]])).sum()).backward()
    optimizer.step()
    assert torch.equal(rows(first)[[1, 4]], before[[1, 4]] - torch.tensor([[2.0], [1.0]]))
    model.load_state_dict(model.state_dict())


def test_an_explicit_rule_of_any_layer_on_the_table_counts() -> None:
    first = Embedding(ROWS, DIM, path=None)
    second = Embedding(ROWS, DIM, table=bb.create(None, dim=DIM, num_rows=ROWS, optimizer=bb.Adagrad(0.3)))
    third = Embedding(ROWS, DIM, table=first.table)
    model = torch.nn.ModuleList([first, second, third])
    Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=1.0))
    assert first.table.optimizer == bb.SGD(1.0) and third.table is first.table
    assert second.table.optimizer == bb.Adagrad(0.3)


@pytest.mark.parametrize("how", ["trained", "committed"])
def test_the_state_of_rows_that_exist_is_not_dropped(how: str, tmp_path: Path) -> None:
    layer = Embedding(ROWS, DIM, path=tmp_path / "rows", ram="8MiB")
    if how == "trained":
        layer.table.update([1], np.ones((1, DIM), np.float32))
    else:
        layer.table.set([1], np.ones((1, DIM), np.float32))
        layer.table.commit()
    dense = torch.optim.SGD(layer.parameters(), lr=1.0)
    with pytest.raises(
        ValueError, match=r"rows of table 'rows' have the state of Adam\(.*asks for SGD\(.*bunkbed.Adam"
    ):
        Optimizer(layer, dense=dense)
    assert layer.table.contains([1])[0] and dense.param_groups[0]["params"] == [layer.anchor]
    Optimizer(layer, dense=torch.optim.AdamW(layer.parameters(), lr=0.5))
    assert layer.table.optimizer == bb.Adam(0.5, weight_decay=0.01, decoupled=True)


def test_a_stored_table_follows_with_the_dtype_of_its_state(tmp_path: Path) -> None:
    stored = bb.Adam(0.1, state_dtype="bfloat16")
    bb.create(tmp_path / "rows", dim=DIM, num_rows=ROWS, optimizer=stored, ram="8MiB").close()
    layer = Embedding(ROWS, DIM, path=tmp_path / "rows", ram="8MiB")
    Optimizer(layer, dense=torch.optim.Adam(layer.parameters(), lr=0.5))
    assert layer.table.optimizer == bb.Adam(0.5, state_dtype="bfloat16")


def test_nothing_changes_when_one_table_cannot_follow(tmp_path: Path) -> None:
    model = torch.nn.ModuleList([Embedding(ROWS, DIM), Embedding(ROWS, DIM)])
    model[1].table.update([1], np.ones((1, DIM), np.float32))
    with pytest.raises(ValueError, match="have the state of Adam"):
        Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=1.0))
    assert all(layer.table.optimizer == bb.Adam(1e-3) for layer in model)


# ---- Rules that no table has

REFUSED: dict[str, tuple[Rule, str]] = {
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), r"SGD has momentum=0\.9"),
    "amsgrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), "AdamW has amsgrad=True"),
    "maximize": (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), "SGD has maximize=True"),
    "lr_decay": (lambda p: torch.optim.Adagrad(p, lr_decay=0.1), r"Adagrad has lr_decay=0\.1"),
    "RMSprop": (lambda p: torch.optim.RMSprop(p), "RMSprop is not a rule"),
    "NAdam": (lambda p: torch.optim.NAdam(p), "NAdam is not a rule"),
    "Adadelta": (lambda p: torch.optim.Adadelta(p), "Adadelta is not a rule"),
    "a class of one's own": (lambda p: type("Mine", (torch.optim.SGD,), {})(p, lr=0.1), "Mine is not a rule"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_rule_without_a_counterpart_is_refused(name: str) -> None:
    rule, message = REFUSED[name]
    layer, own = Embedding(ROWS, DIM), Embedding(ROWS, DIM, optimizer=bb.SGD(1.0))
    dense = rule([{"params": layer.parameters()}])
    with pytest.raises(ValueError, match=message) as info:
        Optimizer(layer, dense=dense)
    assert "optimizer=...) with bunkbed.SGD" in str(info.value)
    assert layer.table.optimizer == bb.Adam(1e-3) and dense.param_groups[0]["params"] == [layer.anchor]
    Optimizer(own, dense=rule([{"params": own.parameters()}]))
    assert own.table.optimizer == bb.SGD(1.0)


@pytest.mark.parametrize("how", ["pretrained", "stored"])
def test_a_frozen_layer_need_not_follow(how: str, caplog: Any, tmp_path: Path) -> None:
    if how == "stored":
        bb.create(tmp_path / "rows", dim=DIM, num_rows=ROWS, optimizer=bb.Adam(0.1), ram="8MiB").close()
        layer = Embedding(ROWS, DIM, path=tmp_path / "rows", ram="8MiB")
        layer.table.update([1], np.ones((1, DIM), np.float32))
        layer.requires_grad_(False)
    else:
        layer = Embedding.from_pretrained(torch.randn(ROWS, DIM))
    model = torch.nn.Sequential(layer, torch.nn.Linear(DIM, 1))
    made: list[Any] = []
    momentum = 0.0 if how == "stored" else 0.9

    def make() -> None:
        made.append(Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)))

    (shown,) = _shown(caplog, make)
    assert shown[0] == logging.INFO and "is frozen, and could not be trained: Optimizer:" in shown[1]
    (optimizer,) = made
    before, weight = rows(layer), model[1].weight.detach().clone()
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert torch.equal(rows(layer), before) and not torch.equal(model[1].weight, weight)
    optimizer.load_state_dict(optimizer.state_dict())
    layer.requires_grad_(True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"have the state of Adam|SGD has momentum=0\.9"):
        optimizer.step()
    assert torch.equal(rows(layer), before)
    layer.table.close(commit=False)


def test_momentum_that_is_set_later_is_refused_at_the_step() -> None:
    pair = Pair(EQUAL["SGD"])
    pair.optimizer.param_groups[0]["momentum"] = 0.9
    pair.ours(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"SGD has momentum=0\.9"):
        pair.optimizer.step()
    assert pair.ours.table.step == 0


# ---- What is shown


def _shown(caplog: Any, make: Callable[[], Any]) -> list[tuple[int, str]]:
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="bunkbed.torch"):
        make()
    return [(record.levelno, record.getMessage()) for record in our_records(caplog)]


def test_the_rule_of_each_table_is_shown_once(caplog: Any) -> None:
    layer, own, alone = Embedding(ROWS, DIM), Embedding(ROWS, DIM, optimizer=bb.SGD(1.0)), Embedding(ROWS, DIM)
    model = torch.nn.ModuleList([layer, own])
    made: list[Any] = []
    shown = _shown(caplog, lambda: made.append(Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=0.5))))
    assert [level for level, _ in shown] == [logging.INFO] * 2
    assert "'table' is trained by SGD(lr=0.5" in shown[0][1] and "follows its parameter group of SGD" in shown[0][1]
    assert "by its own optimizer SGD(lr=1.0" in shown[1][1]
    shown = _shown(caplog, lambda: made.append(Optimizer(alone)))
    assert len(shown) == 1 and "by Adam(lr=0.001" in shown[0][1] and "has no optimizer=" in shown[0][1]
    other = Embedding(ROWS, DIM)
    dense = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    (shown,) = _shown(caplog, lambda: made.append(Optimizer(other, dense=dense)))
    assert (
        shown[0] == logging.WARNING and "is in no parameter group of SGD, so it is trained by Adam(lr=0.001" in shown[1]
    )


def test_a_scheduler_that_misses_a_table_is_shown_once(caplog: Any) -> None:
    own = Embedding(ROWS, DIM, optimizer=bb.SGD(1.0))
    dense = torch.optim.SGD([*own.parameters(), torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    optimizer = Optimizer(own, dense=dense)
    scheduler = lr_scheduler.ExponentialLR(dense, 0.5)

    def train() -> None:
        for _ in range(3):
            own(torch.tensor([1])).sum().backward()
            optimizer.step()
            scheduler.step()

    (shown,) = _shown(caplog, train)
    assert shown[0] == logging.WARNING and "table 'table' does not follow" in shown[1].replace("which table", "table")
    assert _shown(caplog, train) == []


# ---- Several processes


def _follows(rank: int, path: str | None) -> Any:
    layer = Embedding(ROWS, DIM, padding_idx=1, path=path, ram="32MiB", seed=3)
    kept = layer.table.optimizer
    optimizer = Optimizer(layer, dense=torch.optim.SGD(layer.parameters(), lr=1.0))
    before = layer.table.get(np.arange(ROWS))
    layer(torch.tensor([1, 4 + rank])).sum().backward()
    optimizer.step()
    after = layer.table.get(np.arange(ROWS))
    layer.table.close()
    return kept, layer.table.optimizer, before - after, not before[1].any()


@pytest.mark.parametrize("in_files", [False, True])
def test_ranks_follow_together(in_files: bool, tmp_path: Path) -> None:
    expected = np.zeros((ROWS, DIM), np.float32)
    expected[4] = expected[5] = 0.5
    for kept, rule, moved, is_zero in spawn(2, _follows, str(tmp_path / "rows") if in_files else None):
        assert kept == bb.Adam(1e-3) and rule == bb.SGD(1.0) and is_zero
        np.testing.assert_allclose(moved, expected, atol=1e-6)
