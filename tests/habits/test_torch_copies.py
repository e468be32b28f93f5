"""Copies of models, checkpoints of tables in RAM only, and code that walks over parameters."""

from __future__ import annotations

import copy
import io
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bunkbed as bb
from bunkbed.adapters import ram_rows
from bunkbed.torch import Embedding, EmbeddingBag, EmbeddingCollection, Optimizer, anchors

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

ROWS, DIM = 30, 4
ADAM = bb.Adam(0.1)


def rows(layer: Any, slot: str = "weight") -> Any:
    return torch.from_numpy(layer.table.get(np.arange(ROWS), slot=slot))


def train(model: Any, steps: int = 3, first: int = 0) -> None:
    optimizer = Optimizer(model, replace=True)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        (model(torch.tensor([1, 5, 1, 7 + step])) * (step + 1)).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()


def require_equal(one: Any, other: Any) -> None:
    assert one.table.step == other.table.step and len(one.table) == len(other.table)
    np.testing.assert_array_equal(one.table.contains(np.arange(ROWS)), other.table.contains(np.arange(ROWS)))
    for slot in ("weight", *one.table.slots):
        np.testing.assert_array_equal(rows(one, slot), rows(other, slot))


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ---- Copies


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device_cache", [None, "1MiB"])
def test_a_copy_has_the_rows_and_goes_on_alone(dtype: str, device_cache: Any) -> None:
    layer = Embedding(ROWS, DIM, padding_idx=5, optimizer=ADAM, dtype=dtype, device_cache=device_cache, seed=1)
    train(layer)
    model = torch.nn.ModuleDict({"emb": layer, "head": torch.nn.Linear(DIM, 1)})
    made = copy.deepcopy(model)
    assert made["emb"].table is not layer.table and made["emb"].anchor is not layer.anchor
    assert made["emb"].table.uuid != layer.table.uuid and made["emb"].padding_idx == 5
    require_equal(made["emb"], layer)
    before = rows(layer)
    train(made["emb"], first=3)
    assert torch.equal(rows(layer), before) and made["emb"].table.step == 6
    train(layer, first=3)
    require_equal(made["emb"], layer)


def test_layers_on_one_table_share_its_copy_and_facts_stay() -> None:
    first = Embedding(ROWS, DIM, optimizer=ADAM, keep_checkpoints=9)
    second = EmbeddingBag(ROWS, DIM, mode="sum", table=first.table, keep_checkpoints=9)
    first.anchor.requires_grad = False
    made = copy.deepcopy(EmbeddingCollection({"first": first, "second": second}).double())
    one, two = made["first"], made["second"]
    assert one.table is two.table and one.anchor is two.anchor is not first.anchor
    assert not one.anchor.requires_grad and one.anchor.dtype == torch.float64 and one.keep_checkpoints == 9
    assert two.mode == "sum" and two(torch.tensor([[1, 2]])).dtype == torch.float64


def test_a_copy_follows_its_own_optimizer() -> None:
    made = copy.deepcopy(Embedding(ROWS, DIM))
    Optimizer(made, dense=torch.optim.SGD(made.parameters(), lr=0.5))
    assert made.table.optimizer == bb.SGD(0.5)


def test_pending_gradients_are_not_copied() -> None:
    layer = Embedding(ROWS, DIM, optimizer=ADAM)
    optimizer = Optimizer(layer)
    layer(torch.tensor([1])).sum().backward()
    made = copy.deepcopy(layer)
    Optimizer(made).step()
    assert made.table.step == 0 and made.anchor.grad is None
    optimizer.step()
    assert layer.table.step == 1


def test_tables_in_files_and_of_runs_are_not_copied(tmp_path: Path) -> None:
    with bb.Run(tmp_path / "run", ram="16MiB") as run:
        of_run = Embedding(ROWS, DIM, table=run.table("user", create={"dim": DIM, "num_rows": ROWS}))
        in_files = Embedding(ROWS, DIM, path=tmp_path / "user", ram="8MiB")
        for layer in (of_run, in_files):
            with pytest.raises(TypeError, match="cannot be copied: table 'user' has one writer"):
                copy.deepcopy(layer)
        in_files.table.close()


@pytest.mark.parametrize("average", ["swa", "ema", "by hand"])
def test_averages_of_weights_are_refused(average: str) -> None:
    model = torch.nn.ModuleDict({"emb": Embedding(ROWS, DIM, optimizer=ADAM), "head": torch.nn.Linear(DIM, 1)})
    if average == "by hand":
        averaged = copy.deepcopy(model)
        with torch.no_grad():
            for mine, other in zip(averaged.parameters(), model.parameters(), strict=True):
                mine.mul_(0.9).add_(other, alpha=0.1)
    else:
        whole = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9) if average == "ema" else None)
        averaged = whole.module
        averaged["emb"](torch.tensor([1]))
        for _ in range(2):
            whole.update_parameters(model)
    with pytest.raises(RuntimeError, match=r"an average of weights: EMA, SWA.*rows would stay"):
        averaged["emb"](torch.tensor([1]))
    averaged["emb"].load_state_dict(model["emb"].state_dict())
    averaged["emb"](torch.tensor([1]))


def test_a_target_network_takes_rows_over() -> None:
    model = Embedding(ROWS, DIM, optimizer=ADAM)
    target = copy.deepcopy(model)
    for _ in range(2):
        train(model)
        target.load_state_dict(model.state_dict())
        require_equal(target, model)
        target(torch.tensor([1]))


# ---- Checkpoints of tables in RAM only


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_rows", [ROWS, None])
@pytest.mark.parametrize("rule", [bb.SGD(0.1), bb.Adagrad(0.1), bb.RowwiseAdagrad(0.1), ADAM])
def test_rows_go_through_a_file(rule: Any, num_rows: Any, dtype: str) -> None:
    layer = Embedding(num_rows, DIM, optimizer=rule, seed=1, dtype=dtype)
    train(layer)
    saved = through_a_file(layer.state_dict())
    before = [layer.table.get(np.arange(ROWS), slot) for slot in ("weight", *layer.table.slots)]
    train(layer, first=3)  # of which nothing may be left
    other = Embedding(num_rows, DIM, optimizer=rule, seed=1, dtype=dtype)
    train(other, 1, first=12)
    for each in (other, layer):
        each.load_state_dict(saved)
        assert each.table.step == 3 and len(each.table) == 5
        for slot, values in zip(("weight", *layer.table.slots), before, strict=True):
            np.testing.assert_array_equal(each.table.get(np.arange(ROWS), slot), values)
    require_equal(layer, other)
    train(layer, first=3)
    train(other, first=3)
    require_equal(layer, other)


def test_the_state_has_the_rows_that_are_stored_in_order() -> None:
    layer = Embedding(ROWS, DIM, optimizer=ADAM)
    assert layer.state_dict()["rows.ids"].tolist() == []
    layer(torch.tensor([9, 2]))
    train(layer, 1)
    state = layer.state_dict()
    assert list(state) == ["anchor", "table", "rows.ids", "rows.weight", "rows.exp_avg", "rows.exp_avg_sq"]
    assert state["rows.ids"].tolist() == [1, 5, 7] and torch.equal(state["rows.weight"], rows(layer)[[1, 5, 7]])
    state["rows.weight"].zero_()  # a copy
    assert rows(layer)[[1, 5, 7]].all()


def test_a_loaded_layer_has_the_rule_of_its_rows() -> None:
    layer = Embedding(ROWS, DIM)
    optimizer = Optimizer(layer, dense=torch.optim.SGD(layer.parameters(), lr=0.5))
    layer(torch.tensor([3])).sum().backward()
    optimizer.step()
    saved = through_a_file(layer.state_dict())
    other = Embedding(ROWS, DIM)
    other.load_state_dict(saved)
    Optimizer(other, dense=torch.optim.SGD(other.parameters(), lr=0.25))
    require_equal(layer, other)
    own = Embedding(ROWS, DIM, optimizer=ADAM)
    with pytest.raises(RuntimeError, match=r"its rows have the state of Adam\(.*saved that of SGD\("):
        own.load_state_dict(saved)
    assert own.table.step == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_loading_leaves_the_rates_that_an_optimizer_has_set(seed: int) -> None:
    def make(rate: float, decay: float) -> Any:
        layer = Embedding(ROWS, DIM, seed=seed)
        return layer, Optimizer(layer, dense=torch.optim.AdamW(layer.parameters(), lr=rate, weight_decay=decay))

    first, optimizer = make(0.5, 0.3)
    first(torch.tensor([1])).sum().backward()
    optimizer.step()
    seed += 1
    layer, optimizer = make(0.1, 0.0)
    layer.load_state_dict(first.state_dict())
    assert layer.table.optimizer == bb.Adam(0.1) and optimizer.param_groups[-1]["weight_decay"] == 0.0
    layer(torch.tensor([1])).sum().backward()
    layer.load_state_dict(layer.state_dict())  # the gradients stay, as in torch
    other = Embedding(ROWS, DIM, seed=9, optimizer=bb.Adam(0.1))
    with pytest.raises(RuntimeError, match=r"gradients wait for a step; take it, or zero_grad\(\)"):
        layer.load_state_dict(other.state_dict())
    optimizer.step()
    assert layer.table.step == 2


def test_rows_move_into_files_that_are_new(tmp_path: Path) -> None:
    layer = Embedding(ROWS, DIM, optimizer=ADAM, seed=2)
    train(layer)
    saved = layer.state_dict()
    other = Embedding(ROWS, DIM, optimizer=ADAM, seed=3, path=tmp_path / "other", ram="8MiB")
    with pytest.raises(
        RuntimeError, match=r"its untouched rows have init=.*seed=3, .* give the layer init=Normal.*seed=2"
    ):
        other.load_state_dict(saved)
    assert len(other.table) == 0
    stored = Embedding(ROWS, DIM, optimizer=ADAM, seed=2, path=tmp_path / "user", ram="8MiB")
    stored.load_state_dict(saved)
    require_equal(layer, stored)
    stored.table.commit()
    with pytest.raises(RuntimeError, match=r"it was trained or committed.*give a new path"):
        stored.load_state_dict(saved)
    stored.table.close()
    again = Embedding(ROWS, DIM, path=tmp_path / "user", ram="8MiB")
    require_equal(layer, again)
    again.table.close()


def test_rows_that_do_not_fit_are_refused() -> None:
    layer = Embedding(ROWS, DIM, optimizer=ADAM)
    train(layer)
    saved = layer.state_dict()
    few = Embedding(9, DIM, optimizer=ADAM)
    with pytest.raises(RuntimeError, match=r"a row with id 9 was saved, and the table has ids in \[0, 9\)"):
        few.load_state_dict(saved)
    wide = Embedding(ROWS, DIM + 1, optimizer=ADAM)
    with pytest.raises(RuntimeError, match=r"the saved 'weight' must be float32\[5, 5\], got \[5, 4\]"):
        wide.load_state_dict(saved)
    assert few.table.step == wide.table.step == 0
    for change in (lambda s: s.pop("rows.exp_avg"), lambda s: s.pop("rows.ids"), lambda s: s["table"].zero_()):
        damaged = copy.deepcopy(saved)
        change(damaged)
        with pytest.raises(RuntimeError, match=r"'exp_avg' must be|is damaged"):
            layer.load_state_dict(damaged)
    assert layer.table.step == 3


def test_a_table_beyond_the_bound_says_that_its_rows_are_not_saved(monkeypatch: Any) -> None:
    monkeypatch.setattr(ram_rows, "MOST_BYTES", 5 * (8 + 3 * DIM * 4) - 1)
    layer = Embedding(ROWS, DIM, optimizer=ADAM)
    train(layer)
    with pytest.warns(UserWarning, match=r"is in RAM only, and its 5 rows are not saved.*give .*path="):
        saved = layer.state_dict()
    assert set(saved) == {"anchor", "table"}
    train(layer)
    layer.load_state_dict(saved)
    assert layer.table.step == 3


def test_two_layers_on_one_table_are_loaded() -> None:
    def make() -> Any:
        first = Embedding(ROWS, DIM, optimizer=ADAM, seed=1)
        return torch.nn.ModuleList([first, EmbeddingBag(ROWS, DIM, mode="sum", table=first.table)])

    model, other = make(), make()
    train(model[0])
    other.load_state_dict(through_a_file(model.state_dict()))
    require_equal(other[0], model[0])
    assert json.loads(bytes(model.state_dict()["1.table"].tolist()))["step"] == 3


# ---- Code that walks over parameters


@pytest.mark.parametrize("kind", ["embedding", "bag", "collection"])
def test_an_initialiser_over_all_parameters_is_refused(kind: str) -> None:
    layer: Any = Embedding(ROWS, DIM) if kind == "embedding" else EmbeddingBag(ROWS, DIM, mode="sum")
    model = torch.nn.ModuleDict({"emb": layer, "head": torch.nn.Linear(DIM, 1)})
    ids = torch.tensor([[1, 2]])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    with pytest.raises(RuntimeError, match=r"wrote .* into its anchor.*init=bunkbed.Normal\(std=...\)"):
        EmbeddingCollection({"emb": layer})({"emb": ids}) if kind == "collection" else layer(ids)
    with pytest.raises(RuntimeError, match="wrote"), torch.no_grad():
        layer(ids)
    with torch.no_grad():
        layer.anchor.zero_()
    layer(ids)
    for parameter in set(model.parameters()) - anchors(model):
        torch.nn.init.normal_(parameter)
    layer(ids)


def test_writes_that_mean_nothing_pass() -> None:
    model = torch.nn.Sequential(Embedding(ROWS, DIM, optimizer=ADAM), torch.nn.Linear(DIM, 1))
    ids = torch.tensor([1, 2])
    for change in (
        lambda: model.load_state_dict(model.state_dict()),
        lambda: [parameter.detach().zero_() for parameter in anchors(model)],
        lambda: model.double().float(),
        lambda: model.to("cpu"),
        lambda: torch.nn.utils.vector_to_parameters(
            torch.nn.utils.parameters_to_vector(model.parameters()), model.parameters()
        ),
        lambda: [torch.nn.init.xavier_uniform_(p) for p in model.parameters() if p.dim() > 1],
    ):
        change()
        model(ids)
        with torch.inference_mode():
            model(ids)
    with torch.inference_mode():
        inside = Embedding(ROWS, DIM)
        inside(ids)


@pytest.mark.parametrize(
    "penalty",
    [lambda p: p.square().sum(), lambda p: p.abs().sum(), lambda p: p.pow(2).mean() * 0.1, lambda p: p.norm()],
)
def test_a_penalty_over_all_parameters_warns_once(penalty: Any) -> None:
    model = torch.nn.Sequential(Embedding(ROWS, DIM, optimizer=ADAM), torch.nn.Linear(DIM, 1))
    optimizer = Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> None:
        optimizer.zero_grad()
        loss = model(torch.tensor([1, 2])).square().sum()
        (loss + sum(penalty(parameter) for parameter in model.parameters())).backward()
        optimizer.step()

    with pytest.warns(UserWarning, match=r"as an L2 penalty, reached its anchor.*weight_decay="):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    assert model[0].table.step == 2


def test_ordinary_steps_do_not_warn() -> None:
    model = torch.nn.Sequential(Embedding(ROWS, DIM, optimizer=ADAM), torch.nn.Linear(DIM, 1))
    optimizer = Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for set_to_none in (True, False, False, True):
            optimizer.zero_grad(set_to_none=set_to_none)
            for factor in (1.0, 0.0, 2.0):
                (model(torch.tensor([1, 2])) * factor).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
