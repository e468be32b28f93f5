"""Leaving training: a frozen copy traces, exports and runs elsewhere; the live model says so, or carries the layer."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bunkbed as bb
from bunkbed.torch import Embedding, EmbeddingBag, EmbeddingCollection, Optimizer, freeze

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

#: What torch, and the libraries of ONNX, say of themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:# The axis name"),
    pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

USERS, ITEMS, DIM = 50, 70, 8
IDS = torch.tensor([3, 7, 49, 0]), torch.tensor([1, 69, 2, 2])


class GMF(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Generalised matrix factorisation (He et al. 2017)."""

    def __init__(self, **users: Any) -> None:
        super().__init__()
        self.user = Embedding(USERS, DIM, seed=1, **users)
        self.item = Embedding(ITEMS, DIM, seed=2, padding_idx=2)
        self.head = torch.nn.Linear(DIM, 1)

    def forward(self, user: Any, item: Any) -> Any:
        return torch.sigmoid(self.head(self.user(user) * self.item(item))).squeeze(-1)


def trained(**users: Any) -> GMF:
    torch.manual_seed(0)
    model = GMF(**users)
    optimizer = Optimizer(model, dense=torch.optim.Adam(model.parameters(), lr=0.05))
    for _ in range(5):
        optimizer.zero_grad()
        model(*IDS).sum().backward()
        optimizer.step()
    return model.eval()


def outputs(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(USERS), torch.arange(20, 20 + USERS))


@pytest.mark.parametrize("kind", ["ram", "files", "sharded"])
def test_a_frozen_model_has_the_outputs_of_the_live_one(kind: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {} if kind == "ram" else {"path": tmp_path / "user", "ram": "32MiB"}
    model = trained(**arguments, **({"shards": 2} if kind == "sharded" else {}))
    frozen = freeze(model)
    assert torch.equal(outputs(frozen), outputs(model))
    assert type(frozen.user) is torch.nn.Embedding and frozen.item.padding_idx == 2
    assert not frozen.user.weight.requires_grad and frozen.head.weight is not model.head.weight
    assert not frozen.training and "table" not in str(frozen)
    expected = outputs(model)
    model.user.table.set(np.arange(USERS), np.zeros((USERS, DIM), np.float32))
    assert torch.equal(outputs(frozen), expected)
    model.user.table.close()


def test_export_and_onnx_give_the_bits_of_the_live_model(tmp_path: Path) -> None:
    import onnxruntime

    model = trained()
    everything = torch.arange(USERS), torch.arange(20, 20 + USERS)
    expected = outputs(model)
    for frozen in (freeze(model), freeze(model, rows=np.arange(ITEMS)[:USERS]), freeze(model, max_bytes="4KiB")):
        batch = torch.export.Dim("batch")
        exported = torch.export.export(frozen, IDS, dynamic_shapes=({0: batch}, {0: batch}))
        torch.export.save(exported, tmp_path / "model.pt2")
        found = torch.export.load(tmp_path / "model.pt2").module()(*everything)
        is_whole = type(frozen.user) is torch.nn.Embedding
        last = USERS if is_whole else 30  # of items 20 .. 49
        assert torch.equal(found[:last], expected[:last]) and bool(found[last:].isnan().all())
        torch.onnx.export(
            frozen, IDS, tmp_path / "model.onnx", dynamic_shapes=({0: batch}, {0: batch}), dynamo=True, verbose=False
        )
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
        names = [one.name for one in session.get_inputs()]
        (ran,) = session.run(None, dict(zip(names, (ids.numpy() for ids in everything), strict=True)))
        np.testing.assert_allclose(ran[:last], expected[:last].numpy(), rtol=1e-6)
        assert np.isnan(ran[last:]).all()
        traced = torch.jit.trace(frozen, IDS)
        assert torch.equal(traced(*everything)[:last], expected[:last])


def test_onnx_gives_the_bits_of_the_rows(tmp_path: Path) -> None:
    import onnxruntime

    model = trained()
    for rows in (None, np.arange(USERS)):
        frozen = freeze(model.user, rows=rows)
        torch.onnx.export(frozen, (IDS[0],), tmp_path / "rows.onnx", dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(tmp_path / "rows.onnx", providers=["CPUExecutionProvider"])
        (ran,) = session.run(None, {session.get_inputs()[0].name: IDS[0].numpy()})
        np.testing.assert_array_equal(ran, model.user.table.get(IDS[0].numpy()))


def test_a_frozen_model_is_shipped_without_bunkbed(tmp_path: Path) -> None:
    model = trained()
    torch.save(freeze(model).user, tmp_path / "user.pt")
    script = f"""
        import sys, torch
        sys.modules["bunkbed"] = None
        user = torch.load({str(tmp_path / "user.pt")!r}, weights_only=False)
        torch.save(user(torch.tensor([3, 7])), {str(tmp_path / "out.pt")!r})
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)
    assert torch.equal(torch.load(tmp_path / "out.pt"), model.user(torch.tensor([3, 7])).detach())


# ---- Which rows


def test_some_rows_by_layer_and_unknown_ids() -> None:
    model = trained()
    frozen = freeze(model, rows={model.user: torch.tensor([7, 3, 3])})
    assert frozen.user.ids.tolist() == [3, 7] and type(frozen.item) is torch.nn.Embedding
    ids = torch.tensor([[7, 4], [3, 49]])
    found, live = frozen.user(ids), model.user(ids)
    assert torch.equal(found[:, 0], live[:, 0]) and bool(found[:, 1].isnan().all())
    assert bool(freeze(model.user, rows=[])(ids).isnan().all())
    with pytest.raises(IndexError, match=r"50"):
        freeze(model, rows=[50])


def test_rows_of_a_table_of_unknown_size_are_those_that_are_stored() -> None:
    layer = Embedding(None, DIM, optimizer=bb.SGD(1.0))
    layer.table.update([10**12, 4], np.ones((2, DIM), np.float32))
    frozen = freeze(layer)
    assert frozen.ids.tolist() == [4, 10**12]
    assert torch.equal(frozen(torch.tensor([10**12])), layer(torch.tensor([10**12])))
    assert bool(frozen(torch.tensor([5])).isnan().all())


def test_the_search_of_exported_graphs() -> None:
    for size in (1, 2, 3, 4, 5, 7, 8, 9, 31, 33):
        ids = np.cumsum(np.random.default_rng(size).integers(1, 4, size)) + 3
        frozen = freeze(Embedding(500, 2), rows=ids)
        everything = torch.arange(int(ids[-1]) + 5)
        assert torch.equal(frozen._search(everything), torch.searchsorted(frozen.ids, everything))


def test_the_bound_counts_each_table_once() -> None:
    model = torch.nn.ModuleList([trained()])
    model.append(EmbeddingBag(USERS, DIM, mode="sum", table=model[0].user.table))
    needed = (USERS + ITEMS) * DIM * 4
    frozen = freeze(model, max_bytes=needed)
    assert frozen[1].weight is frozen[0].user.weight
    with pytest.raises(
        ValueError, match=rf"the rows take {needed:,} bytes, and max_bytes allows 100; give max_bytes={needed}"
    ):
        freeze(model, max_bytes=100)
    with pytest.raises(ValueError, match="the rows take 32,000,000,000,000 bytes, and max_bytes allows 1,073,741,824"):
        freeze(Embedding(10**12, DIM))
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got int"):
        freeze(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("rows", [None, [1, 2, 5, 9]])
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_bags(mode: str, rows: Any, include_last_offset: bool) -> None:
    bag = EmbeddingBag(10, DIM, mode=mode, padding_idx=9, include_last_offset=include_last_offset, seed=3)
    frozen = freeze(bag, rows=rows)
    ids, offsets = torch.tensor([1, 2, 9, 5, 1]), torch.tensor([0, 3, 3, 5])
    torch.testing.assert_close(frozen(ids, offsets), bag(ids, offsets), rtol=1e-6, atol=1e-6)
    weights = torch.rand(5)
    if mode == "sum":
        expected = bag(ids, offsets, weights)
        torch.testing.assert_close(frozen(ids, offsets, weights), expected, rtol=1e-6, atol=1e-6)
    two = torch.tensor([[1, 2], [9, 5]])
    torch.testing.assert_close(frozen(two), bag(two), rtol=1e-6, atol=1e-6)


def test_collections_dtypes_and_uses_of_one_layer_twice() -> None:
    model = torch.nn.ModuleDict(
        {"emb": EmbeddingCollection({"a": Embedding(9, DIM), "b": EmbeddingBag(9, DIM, mode="sum")})}
    ).double()
    model["again"] = model["emb"]["a"]
    inputs = {"a": torch.tensor([1, 2]), "b": (torch.tensor([1, 2, 3]), torch.tensor([0, 1]))}
    frozen = freeze(model)
    found, live = frozen["emb"](inputs), model["emb"](inputs)
    assert list(found) == ["a", "b"] and found["a"].dtype == torch.float64
    assert torch.equal(found["a"], live["a"])
    torch.testing.assert_close(found["b"], live["b"])
    assert frozen["again"] is frozen["emb"]["a"]
    copy.deepcopy(frozen)


# ---- The live model


@pytest.mark.parametrize("layer", [Embedding(9, DIM), EmbeddingBag(9, DIM, mode="sum")])
def test_graphs_of_a_live_layer_are_refused_by_name(layer: Any, tmp_path: Path) -> None:
    model, ids = torch.nn.Sequential(layer), torch.tensor([[1, 2]])
    with pytest.raises(RuntimeError, match=r"torch.jit.trace makes a graph without tables.*bunkbed.torch.freeze"):
        torch.jit.trace(model, ids)
    with pytest.raises(RuntimeError, match=r"torch.jit.script makes a graph without tables.*bunkbed.torch.freeze"):
        torch.jit.script(model)
    for strict in (False, True):
        with pytest.raises(Exception, match=r"torch.export makes a graph without tables.*bunkbed.torch.freeze"):
            torch.export.export(model, (ids,), strict=strict)
    with pytest.raises(Exception, match=r"makes a graph without tables.*bunkbed.torch.freeze"):
        torch.onnx.export(model, (ids,), tmp_path / "m.onnx", dynamo=False)


def test_a_collection_is_refused_by_name() -> None:
    emb = EmbeddingCollection({"a": Embedding(9, DIM)})
    with pytest.raises(RuntimeError, match=r"torch.export makes a graph without tables"):
        torch.export.export(emb, ({"a": torch.tensor([1])},), strict=False)


@pytest.mark.parametrize("kind", ["embedding", "bag"])
def test_torch_fx_keeps_the_layer(kind: str) -> None:
    layer: Any = Embedding(9, DIM) if kind == "embedding" else EmbeddingBag(9, DIM, mode="sum")
    model, ids = torch.nn.Sequential(layer, torch.nn.Linear(DIM, 1)), torch.tensor([[1, 2]])
    graph = torch.fx.symbolic_trace(model)
    assert graph.get_submodule("0") is layer
    before = model(ids)
    assert torch.equal(graph(ids), before)
    optimizer = Optimizer(graph)
    graph(ids).sum().backward()
    optimizer.step()
    assert layer.table.step == 1 and not torch.equal(graph(ids), before)


# ---- Arguments and tensors as torch takes them


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pretrained_rows_keep_a_dtype_of_16_bits(dtype: Any) -> None:
    weight = torch.randn(7, DIM).to(dtype)
    ours, theirs = Embedding.from_pretrained(weight), torch.nn.Embedding.from_pretrained(weight)
    ids = torch.tensor([1, 6])
    assert ours(ids).dtype == dtype and torch.equal(ours(ids), theirs(ids)) and ours.table.record_bytes < 4 * DIM * 3
    assert Embedding.from_pretrained(weight, dtype="float32").table.dtype == "float32"


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
def test_pretrained_rows_of_other_dtypes_are_refused(dtype: Any, kind: Any) -> None:
    with pytest.raises(TypeError, match=r"embeddings must be float32, bfloat16 or float16, .*embeddings.float\(\)"):
        kind.from_pretrained(torch.ones(3, 2).to(dtype))


def test_reset_parameters_as_tools_call_it(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = torch.nn.Sequential(Embedding(20, DIM, padding_idx=3), torch.nn.Linear(DIM, 1))
    optimizer = Optimizer(model, dense=torch.optim.Adam(model.parameters(), lr=0.1))
    seen = []
    for _ in range(2):
        model.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
        table = model[0].table
        assert (table.step, len(table)) == (0, 1) and not table.get([3]).any()
        seen.append(table.get(np.arange(20)))
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert model[0].table.step == 1
    assert not np.array_equal(*seen)
    model(torch.tensor([1])).sum().backward()
    model[0].reset_parameters()
    optimizer.step()
    assert model[0].table.step == 0
    stored = Embedding(20, DIM, path=tmp_path / "user", ram="8MiB")
    with pytest.raises(RuntimeError, match=r"rows of table 'user' are in files; to start over .*exist=\"new\""):
        stored.reset_parameters()
    stored.table.close()


def test_nested_tensors_of_jagged_layout() -> None:
    ours = Embedding(9, DIM, optimizer=bb.SGD(1.0))
    theirs = torch.nn.Embedding.from_pretrained(torch.from_numpy(ours.table.get(np.arange(9))), freeze=False)
    optimizer = Optimizer(ours)
    ids = torch.nested.nested_tensor([torch.tensor([1, 2, 2]), torch.tensor([4])], layout=torch.jagged)
    one, two = ours(ids), theirs(ids)
    assert one.is_nested and torch.equal(one.values(), two.values()) and torch.equal(one.offsets(), ids.offsets())
    for rows in (one, two):
        rows.values().sum().backward()
    optimizer.step()
    expected = theirs.weight.data - theirs.weight.grad
    np.testing.assert_allclose(ours.table.get(np.arange(9)), expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize("grad", [False, True])
def test_tensors_without_values_that_can_be_seen(grad: bool) -> None:
    layer, bag, ids = Embedding(9, DIM), EmbeddingBag(9, DIM, mode="sum"), torch.tensor([[1, 2]])
    with torch.set_grad_enabled(grad):
        for each in (layer, bag):
            with pytest.raises(TypeError, match=r"input is a tensor on the meta device, which has no values"):
                each(ids.to("meta"))
            with pytest.raises(TypeError, match=r"input is a sparse tensor; use to_dense\(\)"):
                each(ids.to_sparse())
        with pytest.raises(TypeError, match=r"a nested tensor of strided layout; use layout=torch.jagged"):
            layer(torch.nested.nested_tensor([ids[0]]))
        with pytest.raises((TypeError, RuntimeError), match=r"torch.func transform.*freeze\(model\)"):
            torch.func.vmap(layer)(ids)
        with pytest.raises((TypeError, RuntimeError), match=r"torch.func transform.*freeze\(model\)"):
            torch.func.vmap(bag)(ids[None])
    assert torch.equal(layer(torch.nn.Parameter(ids, requires_grad=False)), layer(ids))
