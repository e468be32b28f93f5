"""`EmbeddingCollection`: the bits, rows and counts of its layers called one by one, in one call of the core."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bunkbed as bb
from bunkbed import _native
from bunkbed.torch import Embedding, EmbeddingBag, EmbeddingCollection, Optimizer, lookahead

torch.set_num_threads(1)

ROWS, DIM = 3000, 16
IDS = torch.tensor([1])
ONES = bb.Uniform(1.0, 1.0)
NAMES = ("user", "item", "tags", "text")
#: Facts that depend on times: compaction reads as much as it has time for.
UNLIKE = {"open_s", "stall_s", "read_wait_s", "reads", "read_bytes"}
UNLIKE |= {"read_records", "single_records", "merged_records", "swept_records"}
Layers = dict[str, Any]


def stored(path: Path, **kwargs: Any) -> Path:
    """A table that is fully written and larger than the RAM that the tests open it with."""
    with bb.create(path, dim=DIM, num_rows=ROWS, optimizer=bb.Adam(lr=0.1), ram="64MiB", **kwargs) as table:
        values = np.random.default_rng(5).standard_normal((ROWS, DIM)).astype(np.float32)
        table.set(np.arange(ROWS), values)
    return path


def in_ram(folder: Path) -> Layers:
    """Layers of other sizes, dtypes and optimizers; two share one table."""
    user = Embedding(ROWS, DIM, seed=1, padding_idx=7, optimizer=bb.Adam(lr=0.1))
    return {
        "user": user,
        "item": Embedding(500, 5, seed=2, dtype="bfloat16", optimizer=bb.Adagrad(lr=0.1)),
        "tags": EmbeddingBag(500, 8, seed=3, mode="sum", padding_idx=3, optimizer=bb.SGD(lr=0.1)),
        "text": EmbeddingBag(ROWS, DIM, table=user.table),
    }


def on_disk(folder: Path) -> Layers:
    """Most rows are beyond RAM."""
    layers = {name: Embedding(ROWS, DIM, path=stored(folder / name), ram="320KiB") for name in NAMES[:2]}
    return {
        **layers,
        "tags": EmbeddingBag(ROWS, DIM, path=stored(folder / "tags"), ram="320KiB"),
        "text": EmbeddingBag(ROWS, DIM, table=layers["item"].table, mode="sum"),
    }


def sharded(folder: Path) -> Layers:
    """A table in shards, which two layers share, next to others."""
    table = bb.ShardedTable.create(folder / "item", shards=2, dim=DIM, num_rows=ROWS, ram="64MiB", seed=4)
    return {
        **in_ram(folder),
        "item": Embedding(ROWS, DIM, table=table),
        "text": EmbeddingBag(ROWS, DIM, table=table),
    }


def on_device(folder: Path) -> Layers:
    """A device cache, simulated on the CPU, next to others."""
    return {**in_ram(folder), "item": Embedding(500, 5, seed=2, device_cache="1MiB", optimizer=bb.Adam(lr=0.1))}


KINDS = {make.__name__: make for make in (in_ram, on_disk, sharded, on_device)}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Layers]]:
    """Make the layers of a kind; every call makes others."""
    made: list[Layers] = []

    def layers() -> Layers:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(KINDS[request.param](folder))
        return made[-1]

    yield layers
    for layer in (layer for layers in made for layer in layers.values()):
        layer.table.close(commit=False)


def batch(rng: np.random.Generator, layers: Layers, size: int) -> dict[str, Any]:
    """Ids of each layer, with repetitions and padding; a tuple for a bag."""
    inputs: dict[str, Any] = {}
    for name, layer in layers.items():
        ids = torch.from_numpy(np.minimum(rng.zipf(1.2, size), 10**6) * 7 % layer.num_embeddings)
        if isinstance(layer, EmbeddingBag):
            offsets = np.sort(rng.integers(0, size + 1, size // 4))
            offsets[:1] = 0
            weights = (torch.from_numpy(rng.standard_normal(size).astype(np.float32)),) if layer.mode == "sum" else ()
            inputs[name] = (ids, torch.from_numpy(offsets), *weights)
        else:
            inputs[name] = ids.reshape(2, -1) if name == "user" else ids.int()
    return inputs


def one_by_one(layers: Layers) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def call(inputs: dict[str, Any]) -> dict[str, Any]:
        return {name: layer(*(x if isinstance(x := inputs[name], tuple) else (x,))) for name, layer in layers.items()}

    return call


def loss_of(rows: dict[str, Any]) -> Any:
    """A loss whose gradients differ by layer, row and column."""
    return sum(
        (values * values * torch.linspace(0.5, 2, values.shape[-1]) * k).sum()
        for k, values in enumerate(rows.values(), 1)
    )


def bits(layers: Layers) -> dict[str, Any]:
    """Every slot of every row, and the counters."""
    found: dict[str, Any] = {}
    for name, layer in layers.items():
        found[name] = {
            slot: layer.table.get(np.arange(layer.num_embeddings), slot).tobytes() for slot in layer.table.slots
        }
        found[name]["stats"] = {k: v for k, v in layer.table.stats().items() if k not in UNLIKE}
    return found


@pytest.mark.parametrize("size", [8, 1200])
def test_bits_are_those_of_the_layers_one_by_one(make: Callable[[], Layers], size: int) -> None:
    threads = bb.get_num_threads()
    bb.set_num_threads(3)
    try:
        sides = []
        for wrap in (EmbeddingCollection, one_by_one):
            layers = make()
            sides.append((layers, wrap(layers), Optimizer(torch.nn.ModuleDict(layers))))
        rng = np.random.default_rng(1)
        for _ in range(6):
            inputs = batch(rng, sides[0][0], size)
            outputs, norms = [], []
            for layers, call, optimizer in sides:
                optimizer.zero_grad()
                rows = call(inputs)
                loss_of(rows).backward()
                norms.append([layer.anchor.grad.item() for layer in layers.values()])
                optimizer.step()
                outputs.append({name: values.detach().numpy().tobytes() for name, values in rows.items()})
            assert outputs[0] == outputs[1]
            assert list(outputs[0]) == list(NAMES)
            assert norms[0] == norms[1]
        first, second = bits(sides[0][0]), bits(sides[1][0])
        for name in NAMES:
            assert first[name] == second[name], name
    finally:
        bb.set_num_threads(threads)


def wanted(collection: EmbeddingCollection, inputs: dict[str, Any]) -> dict[Any, Any]:
    return {collection: inputs}


def test_lookahead_plans_for_the_layers(tmp_path: Path) -> None:
    rows = {}
    for name, ahead in (("with", True), ("without", False)):
        (tmp_path / name).mkdir()
        layers = on_disk(tmp_path / name)
        collection = EmbeddingCollection(layers)
        optimizer = Optimizer(collection)
        rng = np.random.default_rng(2)
        loader: Any = [batch(rng, layers, 200) for _ in range(8)]
        if ahead:
            loader = lookahead(loader, collection, ids=functools.partial(wanted, collection))
        for inputs in loader:
            optimizer.zero_grad()
            loss_of(collection(inputs)).backward()
            optimizer.step()
        assert (layers["user"].table.stats()["staged_rows"] > 0) == ahead
        rows[name] = {n: layer.table.get(np.arange(ROWS)).tobytes() for n, layer in layers.items()}
        for layer in layers.values():
            layer.table.close(commit=False)
    assert rows["with"] == rows["without"]


def test_the_core_is_entered_once_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entered: list[str] = []
    for name in ("lookup_many", "sum_many", "update_many"):
        call = getattr(_native, name)
        monkeypatch.setattr(_native, name, lambda *a, call=call, name=name: entered.append(name) or call(*a))
    for name in ("lookup", "lookup_bags", "lookup_batch", "update_batch"):
        monkeypatch.setattr(bb.Table, name, lambda *_, name=name, **__: pytest.fail(f"{name} was called"))
    collection = EmbeddingCollection(in_ram(tmp_path))
    optimizer = Optimizer(collection)
    loss_of(collection(batch(np.random.default_rng(0), dict(collection.items()), 8))).backward()
    optimizer.step()
    assert entered == ["lookup_many", "sum_many", "update_many"]


def two(**kwargs: Any) -> EmbeddingCollection:
    """Two tables of ten rows, all ones, stepped by SGD with lr 1."""
    options: dict[str, Any] = {"init": ONES, "optimizer": bb.SGD(lr=1.0), **kwargs}
    return EmbeddingCollection({"a": Embedding(10, 2, **options), "b": Embedding(10, 3, **options)})


def test_a_layer_that_the_loss_does_not_use_gets_no_gradient() -> None:
    emb = two(optimizer=bb.Adam(lr=1.0))
    optimizer = Optimizer(emb)
    rows = emb({"a": torch.tensor([1]), "b": torch.tensor([2])})
    rows["a"].sum().backward()
    assert emb["b"].anchor.grad is None
    optimizer.step()
    assert (len(emb["a"].table), len(emb["b"].table)) == (1, 0)


def test_gradients_of_columns_of_one_tensor() -> None:
    """A model often concatenates the rows: the gradients are then columns of one tensor."""
    layers = {"a": Embedding(10, 2, optimizer=bb.SGD(lr=1.0)), "b": Embedding(10, 4, optimizer=bb.SGD(lr=1.0))}
    emb = EmbeddingCollection(layers)
    optimizer = Optimizer(emb)
    before = {name: layer.table.get(np.arange(10)) for name, layer in layers.items()}
    grad = torch.arange(18, dtype=torch.float32).reshape(3, 6)
    rows = emb({"a": torch.tensor([1, 2, 1]), "b": torch.tensor([3, 3, 4])})
    torch.cat(list(rows.values()), 1).backward(grad)
    optimizer.step()
    expected = {name: np.zeros_like(values) for name, values in before.items()}
    np.add.at(expected["a"], [1, 2, 1], grad[:, :2].numpy())
    np.add.at(expected["b"], [3, 3, 4], grad[:, 2:].numpy())
    for name, layer in layers.items():
        np.testing.assert_array_equal(layer.table.get(np.arange(10)), before[name] - expected[name])


def test_several_calls_and_a_scaled_gradient_before_one_step() -> None:
    emb, alone = two(), two()
    optimizer, other = Optimizer(emb), Optimizer(alone)
    for ids in (torch.tensor([1, 1, 2]), torch.tensor([2, 5, 1])):
        (emb({"a": ids, "b": ids})["a"].sum() * 0.3).backward()
        (alone["a"](ids).sum() * 0.3).backward()
    for layers in (emb, alone):
        torch.nn.utils.clip_grad_norm_([layers["a"].anchor], 0.25)
    optimizer.step()
    other.step()
    assert emb["a"].table.get(np.arange(10)).tobytes() == alone["a"].table.get(np.arange(10)).tobytes()


def test_a_backward_without_rows_keeps_the_scale() -> None:
    emb = two()
    optimizer = Optimizer(emb)
    emb({"a": IDS, "b": IDS})["a"].sum().backward()
    emb["a"].anchor.grad.mul_(0.5)
    (emb["a"].anchor * 0.0).sum().backward()  # as an L2 term over all parameters
    assert emb["a"].anchor.grad.item() == pytest.approx(2**0.5 / 2)
    optimizer.step()
    assert emb["a"].table.get(IDS.numpy())[0].tolist() == [0.5, 0.5]


def test_a_backward_refuses_a_gradient_that_was_set_by_hand() -> None:
    emb = two()
    optimizer = Optimizer(emb)
    emb["a"].anchor.grad = torch.tensor([5.0], dtype=torch.float64)
    with pytest.raises(RuntimeError, match="it cannot be set by hand"):
        emb({"a": IDS, "b": IDS})["a"].sum().backward()
    optimizer.zero_grad()


def test_the_caller_may_change_its_ids_and_the_rows() -> None:
    emb = two()
    optimizer = Optimizer(emb)
    ids = torch.tensor([1, 2])
    rows = emb({"a": ids, "b": ids})
    rows["a"].mul_(3.0)
    ids.fill_(9)
    (rows["a"].sum() + rows["b"].sum()).backward()
    optimizer.step()
    np.testing.assert_array_equal(emb["a"].table.get(np.array([1, 2, 9]))[:, 0], [-2.0, -2.0, 1.0])


def test_weights_of_bags_get_their_gradient() -> None:
    bag = EmbeddingBag(10, 2, mode="sum", init=bb.Uniform(2.0, 2.0), optimizer=bb.SGD(lr=1.0))
    emb = EmbeddingCollection({"bag": bag, "same": Embedding(10, 2, table=bag.table)})
    optimizer = Optimizer(emb)
    weights = torch.tensor([1.0, 3.0], requires_grad=True)
    rows = emb({"bag": (torch.tensor([1, 2]), torch.tensor([0]), weights), "same": torch.tensor([1])})
    (rows["bag"].sum() + rows["same"].sum()).backward()
    optimizer.step()
    assert weights.grad.tolist() == [4.0, 4.0]
    assert bag.table.get(np.array([1, 2]))[:, 0].tolist() == [0.0, -1.0]


def test_gradients_are_summed_in_the_order_of_the_collection() -> None:
    """Also where one layer on a table is called by itself, which would otherwise come last."""
    bag = EmbeddingBag(10, 1, mode="sum", init=bb.Zeros(), optimizer=bb.SGD(lr=1.0))
    first, last = (Embedding(10, 1, table=bag.table) for _ in range(2))
    emb = EmbeddingCollection({"first": first, "bag": bag, "last": last})
    optimizer = Optimizer(emb)
    rows = emb({"first": IDS, "bag": (IDS, torch.tensor([0]), torch.ones(1, requires_grad=True)), "last": IDS})
    (rows["first"] * 1e8 + rows["bag"] - rows["last"] * 1e8).sum().backward()
    optimizer.step()
    assert bag.table.get(IDS.numpy()).item() == 0.0  # (1e8 + 1) - 1e8 in float32; (1e8 - 1e8) + 1 is 1


def test_evaluation_frozen_layers_and_16_bit_outputs() -> None:
    emb = two()
    emb["a"].anchor.requires_grad = False
    inputs = {"a": torch.tensor([1]), "b": torch.tensor([2])}
    rows = emb(inputs)
    assert (rows["a"].requires_grad, rows["b"].requires_grad) == (False, True)
    with torch.no_grad():
        assert not emb(inputs)["b"].requires_grad
    emb["b"].table.set(np.array([2]), np.ones((1, 3), np.float32))
    emb["b"].table.update(np.array([5]), np.ones((1, 3), np.float32))  # a row counts once in a step
    emb.eval()
    before = emb["b"].table.stats()["unique_rows"]
    emb(inputs)
    assert emb["b"].table.stats()["unique_rows"] == before
    emb.to(torch.bfloat16)
    assert emb(inputs)["b"].dtype is torch.bfloat16


def test_a_reader_writes_zeros_for_a_padding_row_that_is_not_stored(tmp_path: Path) -> None:
    bb.create(tmp_path / "t", dim=2, num_rows=10, init=ONES).close()
    layer = Embedding(10, 2, padding_idx=3, table=bb.open(tmp_path / "t", mode="r"))
    layer.anchor.requires_grad = False
    rows = EmbeddingCollection({"a": layer})({"a": torch.tensor([[3, 4]])})["a"]
    assert rows.tolist() == [[[0.0, 0.0], [1.0, 1.0]]]
    layer.table.close()


def test_layers_with_hooks_are_called() -> None:
    emb = two()
    emb["b"].register_forward_hook(lambda *_: torch.full((1, 3), 5.0))
    assert emb({"a": torch.tensor([1]), "b": torch.tensor([2])})["b"].tolist() == [[5.0] * 3]


def test_a_state_dict_names_the_layers_and_loads() -> None:
    emb = two()
    optimizer = Optimizer(emb)
    saved = copy.deepcopy(emb.state_dict())
    assert {key.split(".")[0] for key in saved} == {"a", "b"}
    sum(rows.sum() for rows in emb({"a": torch.tensor([1]), "b": torch.tensor([2])}).values()).backward()
    optimizer.step()
    assert emb["a"].table.get(IDS.numpy())[0].tolist() == [0.0, 0.0]
    emb.load_state_dict(saved)
    assert emb["a"].table.get(IDS.numpy())[0].tolist() == [1.0, 1.0]
    assert [name for name, _ in emb.named_parameters()] == ["a.anchor", "b.anchor"]
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(emb)
    assert copy.deepcopy(emb)["a"].table.get(IDS.numpy())[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ([IDS, IDS], TypeError, r"EmbeddingCollection: inputs must be \{name: ids\}, got list"),
        ({"a": IDS}, ValueError, "EmbeddingCollection: got no ids for 'b'; give ids for each of a, b"),
        (
            {"a": IDS, "b": IDS, "c": IDS},
            ValueError,
            "got ids for 'c', which is not one of its layers; give ids for each",
        ),
        ({"a": IDS, "b": [1]}, TypeError, r"inputs\['b'\] must be an int64 or int32 tensor, got list"),
        ({"a": IDS, "b": (IDS, IDS)}, TypeError, r"inputs\['b'\] must be an int64 or int32 tensor, got tuple"),
        ({"a": IDS, "b": torch.tensor([1.0])}, TypeError, r"inputs\['b'\] must be .* got float32\[1\]"),
        ({"a": IDS, "b": torch.tensor([4, 10])}, IndexError, r"id 10 at position 1 is outside \[0, 10\)"),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_wrong_inputs_look_nothing_up(inputs: Any, error: type[Exception], message: str, grad: bool) -> None:
    emb = two()
    with torch.set_grad_enabled(grad), pytest.raises(error, match=message):
        emb(inputs)
    assert emb["a"].table.stats()["lookups"] == 0


def test_wrong_layers_and_wrong_bags() -> None:
    with pytest.raises(TypeError, match=r"layers must be \{name: layer\}, got list"):
        EmbeddingCollection([Embedding(5, 2)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"'a' must be an Embedding or EmbeddingBag of bunkbed.torch, got Linear"):
        EmbeddingCollection({"a": torch.nn.Linear(2, 2)})
    with pytest.raises(TypeError, match=r"'a' must be an Embedding or EmbeddingBag"):
        two()["a"] = torch.nn.Embedding(5, 2)
    bag = EmbeddingCollection({"bag": EmbeddingBag(5, 2)})
    with pytest.raises(ValueError, match=r"inputs\['bag'\] must be ids, \(ids, offsets\) or .* got a tuple of 0"):
        bag({"bag": ()})
    with pytest.raises(ValueError, match="offsets must start with 0, got 1"):
        bag({"bag": (IDS, IDS)})
    assert EmbeddingCollection({})({}) == {}


@pytest.mark.parametrize("how", ["a gradient", "a closed table", "the rate"])
def test_a_step_that_one_table_refuses_changes_none(how: str) -> None:
    emb = two()
    optimizer = Optimizer(emb)
    rows = emb({"a": IDS, "b": IDS})
    (rows["a"].sum() + rows["b"].sum() * (torch.inf if how == "a gradient" else 1.0)).backward()
    if how == "a closed table":
        emb["b"].table.close(commit=False)
    if how == "the rate":
        optimizer.param_groups[1]["lr"] = float("nan")
    with pytest.raises((ValueError, bb.TableClosedError)):
        optimizer.step()
    assert emb["a"].table.step == 0
    assert len(emb["a"].table) == 0
