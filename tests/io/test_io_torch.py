"""torch checkpoints in and out: weights by name, state of the optimizer that trained them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.core.optim import Optimizer

torch = pytest.importorskip("torch")
torch.sparse.check_sparse_tensor_invariants.disable()  # or torch warns that they are disabled

EVERY = np.arange(40)
OPTIMIZERS = {"adam": bb.Adam(lr=0.1), "adagrad": bb.Adagrad(lr=0.1, initial_accumulator=0.25)}


def trained(optimizer: Optimizer, seed: int = 0) -> bb.Table:
    rng = np.random.default_rng(seed)
    table = bb.create(None, dim=5, num_rows=40, optimizer=optimizer, seed=seed)
    for _ in range(3):
        table.update(rng.integers(0, 40, 15), rng.standard_normal((15, 5)).astype(np.float32))
    return table


@pytest.fixture
def adam() -> Iterator[bb.Table]:
    with trained(bb.Adam()) as table:
        yield table


@pytest.fixture
def empty() -> Iterator[bb.Table]:
    with bb.create(None, dim=5, num_rows=40, seed=9) as table:
        yield table


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_records_come_back_bit_for_bit_and_train_on(kind: str, tmp_path: Path) -> None:
    optimizer = OPTIMIZERS[kind]
    with trained(optimizer) as table, bb.create(None, dim=5, num_rows=40, optimizer=optimizer, seed=9) as other:
        slots = ("weight", *table.slots)
        seen: list[tuple[int, int]] = []
        count = bb.export_rows(
            table, tmp_path / "rows.pt", slots=slots, name="user.weight", progress=lambda *at: seen.append(at)
        )
        assert count == 40 and seen[-1] == (40, 40)
        assert bb.import_rows(other, tmp_path / "rows.pt", chunk=7) == 40
        assert other.step == 3
        for one in (table, other):
            one.update(EVERY, np.ones((40, 5), np.float32))
        for slot in slots:
            np.testing.assert_array_equal(other.get(EVERY, slot), table.get(EVERY, slot))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("named", [False, True])
def test_torch_trains_on_with_what_we_export(kind: str, named: bool, tmp_path: Path) -> None:
    with trained(OPTIMIZERS[kind]) as table:
        bb.export_rows(table, tmp_path / "rows.pt", slots=("weight", *table.slots))
        found = torch.load(tmp_path / "rows.pt", weights_only=True)
        layer = torch.nn.Embedding(40, 5, sparse=True)
        layer.load_state_dict(found["model"])
        parameters: Any = layer.named_parameters() if named else layer.parameters()
        optimizer = (torch.optim.SparseAdam if kind == "adam" else torch.optim.Adagrad)(parameters)
        optimizer.load_state_dict(found["optimizer"])
        ids, grads = np.array([3, 7, 11]), np.random.default_rng(5).standard_normal((3, 5)).astype(np.float32)
        layer(torch.from_numpy(ids)).backward(torch.from_numpy(grads))
        optimizer.step()
        table.update(ids, grads)
        np.testing.assert_allclose(layer.weight.detach().numpy(), table.lookup(EVERY), atol=1e-6)
        bb.export_rows(table, tmp_path / "plain.pt")
        plain = torch.load(tmp_path / "plain.pt", weights_only=True)
        assert list(plain) == ["weight"]
        np.testing.assert_array_equal(plain["weight"].numpy(), table.lookup(EVERY))


@pytest.mark.parametrize("kind", ["SparseAdam", "Adam", "Adagrad"])
def test_what_torch_trained_comes_in_with_its_state(kind: str, tmp_path: Path) -> None:
    """A model has several tables, chosen by name; the state is found through named parameters, or `state=` names it."""
    torch.manual_seed(0)
    sparse = kind != "Adam"
    model = torch.nn.ModuleDict({name: torch.nn.Embedding(40, 5, sparse=sparse) for name in ("user", "item")})
    ours = bb.Adagrad(lr=0.1) if kind == "Adagrad" else bb.Adam(lr=0.1)
    for named in (False, True):
        parameters: Any = model.named_parameters() if named else model.parameters()
        optimizer = getattr(torch.optim, kind)(parameters, lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            ids = torch.tensor([1, 5, step])
            (model["user"](ids).sum() + (model["item"](ids) ** 2).sum()).backward()
            optimizer.step()
        file = tmp_path / f"{kind}-{named}.pth"
        torch.save({"epoch": 3, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        state = optimizer.state[model["item"].weight]
        with bb.create(None, dim=5, num_rows=40, optimizer=ours) as table:
            if not named:
                with pytest.raises(ValueError, match=r"does not say which optimizer state .*'optimizer.state.0'"):
                    bb.import_rows(table, file, name="item.weight")
                assert len(table) == 0
            bb.import_rows(table, file, name="item.weight", state=None if named else "optimizer.state.1", chunk=9)
            np.testing.assert_array_equal(table.lookup(EVERY), model["item"].weight.detach().numpy())
            for slot in table.slots:
                np.testing.assert_array_equal(table.get(EVERY, slot), state[slot].numpy())
            assert table.step == 2
            with pytest.raises(ValueError, match=r"no optimizer state 'optimizer.state.7' .*optimizers are: optimizer"):
                bb.import_rows(table, file, name="item.weight", state="optimizer.state.7")


def test_state_of_another_tensor_is_never_taken(tmp_path: Path) -> None:
    """Only `user` was trained: the one entry has the shape of `item` too."""
    model = torch.nn.ModuleDict({name: torch.nn.Embedding(40, 5) for name in ("user", "item")})
    model["item"].weight.requires_grad_(False)
    optimizer = torch.optim.Adam(model["user"].parameters())
    model["user"](torch.tensor([1])).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    named = torch.optim.Adam((f"user.{name}", one) for name, one in model["user"].named_parameters())
    named.load_state_dict({**optimizer.state_dict(), "param_groups": named.state_dict()["param_groups"]})
    torch.save({"model": model.state_dict(), "optimizer": named.state_dict()}, tmp_path / "b.pt")
    with bb.create(None, dim=5, num_rows=40) as table:
        with pytest.raises(ValueError, match=r"does not say which optimizer state is that of model\.item\.weight"):
            bb.import_rows(table, tmp_path / "a.pt", name="item.weight")
        bb.import_rows(table, tmp_path / "b.pt", name="item.weight")
        assert table.step == 0 and not table.get(EVERY, "exp_avg").any()
        bb.import_rows(table, tmp_path / "b.pt", name="user.weight")
        assert table.step == 1 and table.get([1], "exp_avg").all()


def test_names(empty: bb.Table, tmp_path: Path) -> None:
    file = tmp_path / "rows.pt"
    torch.save({"a": {"w": torch.zeros(3, 5)}, "b": {"w": torch.ones(4, 5), "bias": torch.ones(5)}}, file)
    with pytest.raises(ValueError, match=r"has 2 matrices, say which one with name=: a.w \[3, 5\], b.w \[4, 5\]"):
        bb.import_rows(empty, file)
    with pytest.raises(ValueError, match=r"has no tensor 'c.w'; its matrices are: a.w"):
        bb.import_rows(empty, file, name="c.w")
    with pytest.raises(ValueError, match=r"has several tensors 'w': a.w, b.w"):
        bb.import_rows(empty, file, name="w")
    assert bb.import_rows(empty, file, name="b.w", ids=[0, 2, 4, 39]) == 4
    assert empty.lookup([39]).tolist() == [[1.0] * 5]
    with pytest.raises(ValueError, match=r"b.bias must be float32\[N, 5\], got float32\[5\]"):
        bb.import_rows(empty, file, name="bias")


def test_what_is_no_such_checkpoint_is_named(empty: bb.Table, tmp_path: Path) -> None:
    file = tmp_path / "rows.pt"
    for content in (b"", b"nothing of the kind"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"rows.pt is not a torch checkpoint of tensors alone"):
            bb.import_rows(empty, file)
    torch.save(torch.nn.Embedding(3, 5), file)  # a pickled module: loading it could run anything
    with pytest.raises(ValueError, match=r"rows.pt is not a torch checkpoint of tensors alone"):
        bb.import_rows(empty, file)
    torch.save({"weight": torch.zeros(3, 5, dtype=torch.float64)}, file)
    with pytest.raises(TypeError, match=r"weight must be float32\[N, 5\], got float64\[3, 5\]"):
        bb.import_rows(empty, file)
    torch.save({"weight": torch.zeros(41, 5)}, file)
    with pytest.raises(ValueError, match="holds 41 rows, table 'table' has 40; nothing was changed"):
        bb.import_rows(empty, file)
    assert len(empty) == 0
    halves = torch.randn(5, 8).bfloat16().t()  # of 16 bits, and not contiguous
    torch.save({"weight": halves[:3, :5]}, file)
    bb.import_rows(empty, file)
    np.testing.assert_array_equal(empty.lookup(np.arange(3)), halves[:3, :5].float().numpy())


def test_a_checkpoint_larger_than_memory_is_read(empty: bb.Table, tmp_path: Path) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rows = memory // (4 * 1024) + (1 << 20)  # and 4 GiB more, of which the disk sees nothing
    (tmp_path / "room").touch()
    os.truncate(tmp_path / "room", 4 * 1024 * rows)
    large = torch.from_file(str(tmp_path / "room"), shared=True, size=1024 * rows).reshape(rows, 1024)
    with torch.serialization.skip_data():
        torch.save({"large": large, "small": torch.zeros(3, 5)}, tmp_path / "rows.pt")
    with pytest.raises(ValueError, match=rf"large must be float32\[N, 5\], got float32\[{rows}, 1024\]"):
        bb.import_rows(empty, tmp_path / "rows.pt", name="large")
    assert bb.import_rows(empty, tmp_path / "rows.pt", name="small") == 3
    assert not empty.lookup(np.arange(3)).any()


def test_state_that_torch_has_no_optimizer_for_is_refused(adam: bb.Table, tmp_path: Path) -> None:
    with trained(bb.RowwiseAdagrad()) as table:
        with pytest.raises(ValueError, match="torch has no optimizer with the state of RowwiseAdagrad"):
            bb.export_rows(table, tmp_path / "rows.pt", slots=("weight", "sum"))
        bb.export_rows(table, tmp_path / "rows.pt")
    with pytest.raises(ValueError, match="load all of exp_avg, exp_avg_sq or nothing, got exp_avg"):
        bb.export_rows(adam, tmp_path / "more.pt", slots=("weight", "exp_avg"))
    with pytest.raises(ValueError, match="holds the weights; name them among slots"):
        bb.export_rows(adam, tmp_path / "more.pt", slots=("exp_avg",))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.pt"]
