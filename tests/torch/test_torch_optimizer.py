"""`Optimizer`: the same updates as torch's, one object for schedulers and state, clear misuse."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import bunkbed as bb
from bunkbed.testing import ReferenceTable
from bunkbed.torch import Embedding, EmbeddingBag, Optimizer

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

OPTIMIZERS: list[tuple[Any, Any]] = [
    (bb.SGD(lr=0.05), lambda p: torch.optim.SGD(p, lr=0.05)),
    (bb.Adagrad(lr=0.05), lambda p: torch.optim.Adagrad(p, lr=0.05)),
    (
        bb.Adagrad(lr=0.05, eps=1e-6, initial_accumulator=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-6, initial_accumulator_value=0.1),
    ),
    (bb.Adam(lr=0.01), lambda p: torch.optim.SparseAdam(p, lr=0.01)),
    (
        bb.Adam(lr=0.01, betas=(0.8, 0.99), eps=1e-6),
        lambda p: torch.optim.SparseAdam(p, lr=0.01, betas=(0.8, 0.99), eps=1e-6),
    ),
]


def rows(layer: Any) -> Any:
    return torch.from_numpy(layer.table.get(np.arange(layer.table.num_rows)))


def make(**kwargs: Any) -> tuple[Any, Any, Any]:
    """(model, layer, head)."""
    emb = Embedding(20, 4, **kwargs)
    head = torch.nn.Linear(4, 1)
    return torch.nn.ModuleDict({"emb": emb, "head": head}), emb, head


# ---- updates


@pytest.mark.parametrize(("ours", "theirs"), OPTIMIZERS)
def test_200_steps_equal_torch_on_sparse_gradients(ours: Any, theirs: Any) -> None:
    torch.manual_seed(0)
    emb = Embedding(300, 8, optimizer=ours, init=bb.Normal(0.1))
    initial = rows(emb)
    ref = torch.nn.Embedding.from_pretrained(initial.clone(), freeze=False, sparse=True)
    opt, ref_opt = Optimizer(emb), theirs(list(ref.parameters()))
    touched = torch.zeros(300, dtype=torch.bool)
    for _ in range(200):
        ids = (torch.rand(64) ** 3 * 200).long()  # skewed: many duplicates, and a third never touched
        touched[ids] = True
        target = torch.randn(64, 8)
        for layer, optimizer in ((emb, opt), (ref, ref_opt)):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(layer(ids), target).backward()
            optimizer.step()
    torch.testing.assert_close(rows(emb), ref.weight.data, rtol=1e-6, atol=1e-6)
    assert torch.equal(rows(emb)[~touched], initial[~touched]) and (~touched).sum() >= 100
    assert not emb.table.contains(torch.nonzero(~touched)[:, 0].numpy()).any()
    assert emb.table.step == 200


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "optimizer",
    [
        bb.SGD(lr=0.1),
        bb.Adagrad(lr=0.1),
        bb.RowwiseAdagrad(lr=0.1),
        bb.Adam(lr=0.1, weight_decay=0.01),
        bb.Adagrad(lr=0.1, state_dtype="bfloat16"),
        bb.RowwiseAdagrad(lr=0.1, state_dtype="bfloat16"),
        bb.Adam(lr=0.1, weight_decay=0.01, state_dtype="bfloat16"),
    ],
)
def test_every_optimizer_and_dtype_equals_the_reference_bit_for_bit(optimizer: Any, dtype: str) -> None:
    emb = Embedding(50, 5, optimizer=optimizer, init=bb.Normal(0.1), seed=3, dtype=dtype)
    reference = ReferenceTable(dim=5, num_rows=50, optimizer=optimizer, init=bb.Normal(0.1), seed=3, dtype=dtype)
    opt = Optimizer(emb)
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids, grads = rng.integers(0, 40, 60), rng.standard_normal((60, 5)).astype(np.float32)
        opt.zero_grad()
        (emb(torch.from_numpy(ids)) * torch.from_numpy(grads)).sum().backward()
        opt.step()
        reference.update(ids, grads)
    everything = np.arange(50)
    for slot in ("weight", *reference.slots):
        assert emb.table.get(everything, slot=slot).tobytes() == reference.get(everything, slot).tobytes()


def test_the_states_dtype_stands_in_the_group_and_cannot_change() -> None:
    emb = Embedding(20, 4, optimizer=bb.Adam(lr=0.1, state_dtype="bfloat16"))
    opt = Optimizer(emb)
    assert opt.param_groups[0]["state_dtype"] == "bfloat16"
    opt.param_groups[0]["lr"] = 0.5
    emb(torch.tensor([1])).sum().backward()
    opt.step()
    opt.param_groups[0]["state_dtype"] = "float32"
    emb(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"state_dtype is 'bfloat16' in the table, 'float32' was asked for"):
        opt.step()


def test_a_closure_is_evaluated_once_with_gradients_on() -> None:
    model, emb, head = make(optimizer=bb.SGD(lr=1.0))
    opt = Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=1.0))
    before = rows(emb)

    def closure() -> Any:
        opt.zero_grad()
        loss = emb(torch.tensor([1])).sum() + head.weight.sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert opt.step(closure).shape == ()
    assert torch.equal(rows(emb)[1], before[1] - 1) and emb.table.step == 1


# ---- parameter groups


def test_anchors_leave_the_dense_groups_and_tables_come_last() -> None:
    model, emb, head = make(optimizer=bb.Adam(lr=0.5, betas=(0.8, 0.9), weight_decay=0.1))
    dense = torch.optim.SGD([{"params": [emb.anchor, head.bias], "lr": 0.3}, {"params": [head.weight], "lr": 0.2}])
    opt = Optimizer(model, dense=dense)
    assert [group["lr"] for group in opt.param_groups] == [0.3, 0.2, 0.5]
    assert [p is head.bias for p in opt.param_groups[0]["params"]] == [True]
    assert opt.param_groups[0] is dense.param_groups[0]
    group = opt.param_groups[2]
    assert group["params"][0] is emb.anchor and group["table"] == "table" and group["optimizer"] == "Adam"
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.9), 1e-8, 0.1)


def test_named_parameters_lose_the_names_of_anchors_too() -> None:
    model, _, _ = make()
    dense = torch.optim.SGD(model.named_parameters(), lr=0.1)
    opt = Optimizer(model, dense=dense)
    assert dense.param_groups[0]["param_names"] == ["head.weight", "head.bias"]
    assert opt.param_groups[1]["param_names"] == ["emb.anchor"]


def test_a_model_of_tables_only() -> None:
    emb = Embedding(20, 4, optimizer=bb.SGD(lr=1.0))
    opt = Optimizer(emb, dense=torch.optim.AdamW(emb.parameters()))  # nothing is left for it
    before = rows(emb)
    emb(torch.tensor([1])).sum().backward()
    opt.step()
    assert torch.equal(rows(emb)[1], before[1] - 1)


def test_the_groups_lr_and_other_hyperparameters_take_effect() -> None:
    emb = Embedding(20, 4, optimizer=bb.Adam(lr=0.1), init=bb.Normal(1.0), seed=0)
    opt = Optimizer(emb)
    references = ReferenceTable(dim=4, num_rows=20, optimizer=bb.Adam(lr=0.1), init=bb.Normal(1.0), seed=0)
    ids = np.array([1, 2, 1])
    for changes in (
        {},
        {"lr": 0.01},
        {"betas": (0.5, 0.9)},
        {"eps": 1e-3, "weight_decay": 0.1},
        {"decoupled": True, "betas": [0.6, 0.9]},
        {"lr": torch.tensor(0.5)},
    ):
        opt.param_groups[0].update(changes)
        group = opt.param_groups[0]
        references.optimizer = bb.Adam(
            lr=float(group["lr"]),
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled"],
        )
        opt.zero_grad()
        emb(torch.from_numpy(ids)).sum().backward()
        opt.step()
        references.update(ids, np.ones((3, 4), np.float32))
        assert emb.table.get(np.arange(20)).tobytes() == references.get(np.arange(20)).tobytes()


def test_hyperparameters_that_cannot_change() -> None:
    emb = Embedding(20, 4, optimizer=bb.Adagrad(initial_accumulator=0.1))
    opt = Optimizer(emb)
    opt.param_groups[0]["initial_accumulator"] = 0.2
    emb(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"cannot change from 0\.1 to 0\.2; make a new table"):
        opt.step()
    opt.param_groups[0]["initial_accumulator"] = 0.1
    opt.param_groups[0]["eps"] = -1.0
    with pytest.raises(ValueError, match=r"eps must be finite, at least 0, got -1.0"):
        opt.step()
    assert emb.table.step == 0


def test_add_param_group_takes_dense_parameters_and_new_layers() -> None:
    model, _, _ = make()
    opt = Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=0.1))
    later = torch.nn.ModuleList([Embedding(5, 2, optimizer=bb.SGD(lr=1.0)), torch.nn.Linear(2, 1)])
    opt.add_param_group({"params": later.parameters(), "lr": 0.7})
    assert [group["lr"] for group in opt.param_groups] == [0.1, 0.1, 0.7, 1.0]
    before = rows(later[0])
    later[0](torch.tensor([1])).sum().backward()
    opt.step()
    assert torch.equal(rows(later[0])[1], before[1] - 1)
    with pytest.raises(ValueError, match="table 'table' is in a parameter group already"):
        opt.add_param_group({"params": [later[0].anchor]})
    with pytest.raises(ValueError, match="has no dense optimizer to take parameters"):
        Optimizer(Embedding(5, 2)).add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


# ---- schedulers

SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 0.9**step),
    "LambdaLR, one each": lambda opt: lr_scheduler.LambdaLR(opt, [lambda s: 0.9**s, lambda s: 0.5**s]),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda step: 0.9),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 2),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [1, 3]),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 4),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 2),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=8),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)], milestones=[2]
    ),
    "SWALR": lambda opt: torch.optim.swa_utils.SWALR(opt, 0.05, anneal_epochs=3),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR's own doing
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_scale_tables_as_they_scale_dense_weights(name: str) -> None:
    """A table and a dense parameter with the same rule, lr and gradients stay equal under every scheduler."""
    emb = Embedding(1, 4, optimizer=bb.Adam(lr=0.1), init=bb.Zeros())
    weight = torch.nn.Parameter(torch.zeros(1, 4))
    opt = Optimizer(emb, dense=torch.optim.Adam([weight], lr=0.1))
    scheduler = SCHEDULERS[name](opt)
    seen = set()
    for step in range(6):
        opt.zero_grad()
        factor = torch.tensor([1.0, -2.0, 0.5, step])
        ((emb(torch.tensor([0])) * factor).sum() + (weight * factor).sum()).backward()
        opt.step()
        scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
        seen.add(opt.param_groups[1]["lr"])
        if "each" not in name:
            torch.testing.assert_close(rows(emb), weight.data, rtol=1e-5, atol=1e-7)
    assert len(seen) > 1
    saved = scheduler.state_dict()
    scheduler.load_state_dict(saved)


def test_cycling_momentum_over_groups_without_it_is_refused_by_torch() -> None:
    model, _, _ = make(optimizer=bb.SGD(lr=0.1))
    opt = Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(ValueError, match="optimizer must support momentum or beta1"):
        lr_scheduler.OneCycleLR(opt, 0.1, total_steps=5)
    lr_scheduler.OneCycleLR(opt, 0.1, total_steps=5, cycle_momentum=False)


# ---- state


def test_state_dict_round_trip_goes_on_exactly() -> None:
    torch.manual_seed(0)
    model, emb, head = make(optimizer=bb.Adam(lr=0.1), seed=0)
    opt = Optimizer(model, dense=torch.optim.AdamW(model.parameters(), lr=0.1))
    scheduler = lr_scheduler.ExponentialLR(opt, 0.9)

    def train(steps: int) -> None:
        torch.manual_seed(1)
        for _ in range(steps):
            opt.zero_grad()
            head(emb(torch.randint(0, 20, (6,)))).pow(2).sum().backward()
            opt.step()
            scheduler.step()

    train(3)
    saved = io.BytesIO()
    torch.save([model.state_dict(), opt.state_dict(), scheduler.state_dict()], saved)
    train(3)
    expected = rows(emb), head.weight.detach().clone()
    saved.seek(0)
    states = torch.load(saved, weights_only=True)
    assert not any(t.numel() > 80 for t in torch.utils._pytree.tree_leaves(states[1]) if isinstance(t, torch.Tensor))
    for owner, state in zip((model, opt, scheduler), states, strict=True):
        owner.load_state_dict(state)
    assert emb.table.step == 3
    train(3)
    assert torch.equal(rows(emb), expected[0]) and torch.equal(head.weight, expected[1])
    assert opt.param_groups[0] is opt.dense.param_groups[0]


def test_loading_the_dense_optimizer_directly_is_followed() -> None:
    model, _, _ = make()
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = Optimizer(model, dense=dense)
    state = dense.state_dict()
    state["param_groups"][0]["lr"] = 0.7
    dense.load_state_dict(state)
    assert opt.param_groups[0] is dense.param_groups[0] and opt.param_groups[0]["lr"] == 0.7
    assert len(opt.param_groups) == 2


def test_a_state_of_other_groups_is_refused() -> None:
    model, _, _ = make(optimizer=bb.Adam())
    opt = Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=0.1))
    other, _, _ = make(optimizer=bb.SGD())
    saved = Optimizer(other, dense=torch.optim.SGD(other.parameters(), lr=0.1)).state_dict()
    with pytest.raises(ValueError, match="its parameter group was saved for SGD, but it is trained with Adam"):
        opt.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"has 1 parameter groups, this Optimizer 2 \(1 of tables\)"):
        opt.load_state_dict(opt.dense.state_dict())


# ---- misuse


def test_a_second_optimizer_is_refused_until_the_first_is_gone() -> None:
    model, emb, _ = make()
    first = Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = lr_scheduler.ExponentialLR(first, 0.9)  # makes the optimizer part of a reference cycle
    with pytest.raises(RuntimeError, match=r"table 'table' already has an Optimizer.*release it with `first\.detach"):
        Optimizer(emb)
    gc.disable()
    try:
        del first, scheduler
        second = Optimizer(emb)
    finally:
        gc.enable()
    second.detach()
    third = Optimizer(emb)
    emb(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="this Optimizer was detached from it, or replaced by another; step that"):
        second.step()
    third.step()
    fourth = Optimizer(emb, replace=True)
    with pytest.raises(RuntimeError, match="or replaced by another"):
        third.step()
    fourth.step()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda m: ([m],), TypeError, "model must be a torch.nn.Module, got list"),
        (
            lambda m: (m, torch.nn.Linear(1, 1)),
            TypeError,
            "dense must be a torch.optim optimizer, got Linear",
        ),
        (
            lambda m: (m, torch.optim.LBFGS(m.parameters())),
            TypeError,
            "dense=LBFGS evaluates the model several",
        ),
        (lambda m: (torch.nn.Linear(1, 1),), ValueError, "Linear has no trainable bunkbed.torch layer"),
    ],
)
def test_wrong_arguments(arguments: Any, error: Any, message: str) -> None:
    model, _, _ = make()
    with pytest.raises(error, match=message):
        Optimizer(*arguments(model))


def test_stepping_the_dense_optimizer_alone_would_leave_rows_out() -> None:
    model, emb, head = make()
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = Optimizer(model, dense=dense)
    head.weight.sum().backward()
    dense.step()  # no rows wait
    head(emb(torch.tensor([1]))).sum().backward()
    with pytest.raises(RuntimeError, match="has pending rows, which stepping the dense optimizer alone"):
        dense.step()
    opt.step()
    opt.zero_grad()
    dense.step()


def test_an_optimizer_is_not_copied_or_pickled() -> None:
    opt = Optimizer(Embedding(5, 2))
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"Optimizer cannot be copied or pickled: .* save its state_dict"):
            copying(opt)


def test_everything_goes_with_its_last_user() -> None:
    emb = Embedding(5, 2)
    opt = Optimizer(torch.nn.Sequential(emb), dense=torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    emb(torch.tensor([1])).sum().backward()
    opt.step()
    loss = emb(torch.tensor([1])).sum()
    table = weakref.ref(emb.table)
    gc.collect()
    gc.disable()  # neither a reference cycle nor a graph keeps a table (and its lock) alive
    try:
        del emb, opt
        assert table() is None
    finally:
        gc.enable()
    with pytest.raises(RuntimeError, match="reached a table whose layers and Optimizer are gone; keep the model"):
        loss.backward()


def test_a_dense_optimizer_of_ours_is_refused() -> None:
    emb = Embedding(5, 2)
    first = Optimizer(emb)
    with pytest.raises(TypeError, match=r"dense is a bunkbed.torch.Optimizer already"):
        Optimizer(emb, dense=first)


def test_readers_look_up_but_do_not_train(tmp_path: Any) -> None:
    emb = Embedding(20, 4, path=tmp_path / "t")
    emb.table.commit()
    reader = bb.open(tmp_path / "t", mode="r")
    served = EmbeddingBag(20, 4, table=reader, padding_idx=3)
    assert not served.anchor.requires_grad
    assert torch.equal(served(torch.tensor([[1, 3]])), rows(emb)[1:2])
    assert torch.equal(Embedding(20, 4, table=reader, padding_idx=3)(torch.tensor([3])), torch.zeros(1, 4))
    with pytest.raises(ValueError, match=r"has no trainable bunkbed.torch layer"):
        Optimizer(served)
    served.anchor.requires_grad = True
    with pytest.raises(bb.ReadOnlyError, match="table 't' is open with mode='r'"):
        Optimizer(served)
    with pytest.raises(bb.ReadOnlyError, match=r"cannot be trained; set layer.anchor.requires_grad = False"):
        served(torch.tensor([[1]])).sum().backward()
    reader.close()
    emb.table.close()


def test_the_compiler_is_not_imported() -> None:
    """It takes a second, in each start of a program that trains tables alone."""
    code = """
import sys, torch
from bunkbed.torch import Embedding, Optimizer

layer = Embedding(10, 2, path=None)
optimizer = Optimizer(layer)
for _ in range(2):
    optimizer.zero_grad()
    layer(torch.tensor([1])).sum().backward()
    optimizer.step()
saved = optimizer.state_dict()
assert "torch._dynamo" not in sys.modules
import torch._dynamo
assert Optimizer(torch.nn.Sequential(Embedding(10, 2, path=None))).state_dict().keys() == saved.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
