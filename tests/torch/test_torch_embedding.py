"""`Embedding` against `torch.nn.Embedding`: values, gradients, devices and dtypes, what trains and what is shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import bunkbed as bb
from bunkbed.torch import Embedding, EmbeddingBag, Optimizer

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()  # or torch warns that they are disabled


def rows(layer: Any) -> Any:
    """All rows as a tensor, float32[num, dim]."""
    return torch.from_numpy(layer.table.get(np.arange(layer.table.num_rows)))


def twin(layer: Embedding, **kwargs: Any) -> Any:
    """A `torch.nn.Embedding` with the layer's rows."""
    return torch.nn.Embedding.from_pretrained(rows(layer), freeze=False, sparse=True, **kwargs)


# ---- values


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 3), (1, 2, 3)])
def test_output_is_the_rows_for_any_shape(shape: tuple[int, ...]) -> None:
    emb = Embedding(20, 4)
    ids = torch.randint(0, 20, shape)
    out = emb(ids)
    assert out.shape == (*shape, 4) and out.dtype == torch.float32
    assert torch.equal(out, rows(emb)[ids])


def test_outputs_are_aligned() -> None:
    """MKL's bits depend on it, and so would a model's losses."""
    emb, bag = Embedding(20, 3), EmbeddingBag(20, 3)
    for size in (*range(1, 12), 4000):
        ids = torch.randint(0, 20, (size, 2))
        with torch.no_grad():
            assert all(layer(ids).data_ptr() % 64 == 0 for layer in (emb, bag))
        assert all(layer(ids).data_ptr() % 64 == 0 for layer in (emb, bag))


def test_int32_ids_and_strided_ids() -> None:
    emb = Embedding(20, 4)
    ids = torch.randint(0, 20, (6, 8))
    assert torch.equal(emb(ids.int()), rows(emb)[ids])
    assert torch.equal(emb(ids[::2, 1::3]), rows(emb)[ids[::2, 1::3]])
    assert torch.equal(emb(ids.T), rows(emb)[ids.T])


def test_default_initialisation_is_standard_normal_and_seeded_by_torch() -> None:
    torch.manual_seed(3)
    first, second = Embedding(500, 16), Embedding(500, 16)
    torch.manual_seed(3)
    again = Embedding(500, 16)
    assert abs(rows(first).mean()) < 0.05 and abs(rows(first).std() - 1) < 0.05
    assert torch.equal(rows(first), rows(again))
    assert not torch.equal(rows(first), rows(second))  # two layers never start with the same rows


def test_explicit_init_and_seed() -> None:
    one = Embedding(10, 4, init=bb.Uniform(-0.5, 0.5), seed=4)
    two = Embedding(10, 4, init=bb.Uniform(-0.5, 0.5), seed=4)
    assert torch.equal(rows(one), rows(two)) and rows(one).abs().max() <= 0.5


def test_unbounded_ids() -> None:
    emb = Embedding(None, 4)
    assert emb(torch.tensor([2**62])).shape == (1, 4)


def test_output_is_a_copy_that_may_be_changed_in_place() -> None:
    emb = Embedding(5, 2)
    before = rows(emb)
    opt = Optimizer(emb)
    out = emb(torch.tensor([1, 2]))
    out.mul_(3.0)
    out.sum().backward()
    assert torch.equal(rows(emb), before)
    opt.step()
    assert not torch.equal(rows(emb), before)


# ---- gradients


def test_a_plain_loop_equals_nn_embedding() -> None:
    torch.manual_seed(0)
    emb = Embedding(30, 4, padding_idx=-1, optimizer=bb.Adam(lr=0.01))
    ref = twin(emb, padding_idx=29)
    head, ref_head = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    ref_head.load_state_dict(head.state_dict())
    model = torch.nn.ModuleDict({"emb": emb, "head": head})
    opt = Optimizer(model, dense=torch.optim.Adam(model.parameters(), lr=0.01))
    ref_opts = [
        torch.optim.SparseAdam(list(ref.parameters()), lr=0.01),
        torch.optim.Adam(ref_head.parameters(), lr=0.01),
    ]
    for _ in range(30):
        ids, target = torch.randint(0, 30, (6, 3)), torch.randn(6, 3, 1)
        opt.zero_grad()
        loss = torch.nn.functional.mse_loss(head(emb(ids)), target)
        loss.backward()
        opt.step()
        for ref_opt in ref_opts:
            ref_opt.zero_grad()
        ref_loss = torch.nn.functional.mse_loss(ref_head(ref(ids)), target)
        ref_loss.backward()
        for ref_opt in ref_opts:
            ref_opt.step()
        torch.testing.assert_close(loss, ref_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rows(emb), ref.weight.data, rtol=1e-6, atol=1e-6)
    assert torch.equal(rows(emb)[29], torch.zeros(4))


@pytest.mark.parametrize("padding", [None, 0])
def test_small_lookups_train_the_same_deduped_before_backward_or_in_it(padding: int | None, monkeypatch: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randint(0, 30, shape, generator=generator) for shape in [(40,), (5, 8), (0,), (200,)]]
    grads = [torch.randn(*ids.shape, 4, generator=generator) for ids in batches]
    trained = []
    for few in (0, 1000):
        monkeypatch.setattr("bunkbed.torch.embedding.FEW_IDS", few)
        emb = Embedding(30, 4, padding_idx=padding, seed=1)
        opt = Optimizer(emb)
        outputs = []
        for ids, grad in zip(batches, grads, strict=True):
            opt.zero_grad()
            first, second = emb(ids), emb(ids.flatten())
            torch.autograd.backward([first, second], [grad, grad.flatten(0, -2)])
            opt.step()
            outputs += [first.detach(), second.detach()]
        trained.append([*outputs, rows(emb)])
    for eager, lazy in zip(*trained, strict=True):
        assert torch.equal(eager, lazy)


def test_padding_row_is_zeros_and_gets_no_gradient() -> None:
    emb = Embedding(10, 3, padding_idx=2, optimizer=bb.SGD(lr=1.0))
    opt = Optimizer(emb)
    ids = torch.tensor([[2, 1], [2, 2]])
    assert torch.equal(emb(ids)[ids == 2], torch.zeros(3, 3))
    emb(ids).sum().backward()
    assert emb.anchor.grad.item() == pytest.approx(3**0.5)
    opt.step()
    assert torch.equal(rows(emb)[2], torch.zeros(3))


def test_a_batch_of_nothing_but_padding_is_a_step_without_rows() -> None:
    emb = Embedding(10, 3, padding_idx=0, optimizer=bb.SGD(lr=1.0))
    opt = Optimizer(emb)
    before = rows(emb)
    emb(torch.zeros(4, dtype=torch.int64)).sum().backward()
    assert emb.anchor.grad.item() == 0.0
    opt.step()
    assert torch.equal(rows(emb), before)


def test_padding_row_may_be_set_to_something_else() -> None:
    weight = torch.arange(6.0).reshape(3, 2)
    emb = Embedding.from_pretrained(weight, padding_idx=1)
    assert torch.equal(emb(torch.tensor([1])), weight[1:2])


def test_changing_ids_before_backward_is_noticed() -> None:
    emb = Embedding(10, 3)
    opt = Optimizer(emb)
    ids = torch.tensor([1, 2])
    loss = emb(ids).sum()
    ids[0] = 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert opt.step() is None


def test_expanded_and_transposed_gradients() -> None:
    emb = Embedding(10, 3, optimizer=bb.SGD(lr=1.0))
    ref = twin(emb)
    opt = Optimizer(emb)
    ids = torch.tensor([[1, 2], [3, 1]])
    for layer in (emb, ref):
        out = layer(ids)
        (out.sum() + (out.permute(2, 0, 1) * torch.arange(12.0).reshape(3, 2, 2)).sum()).backward()
    opt.step()
    torch.optim.SGD(ref.parameters(), lr=1.0).step()
    torch.testing.assert_close(rows(emb), ref.weight.data)


# ---- device and dtype


def test_output_follows_the_dtype_of_the_module() -> None:
    emb = Embedding(10, 4, optimizer=bb.SGD(lr=1.0))
    model = torch.nn.Sequential(emb, torch.nn.Linear(4, 1))
    opt = Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=0.0))
    ids = torch.tensor([1, 1, 2])
    exact = rows(emb)
    for convert, dtype in [("bfloat16", torch.bfloat16), ("double", torch.float64), ("float", torch.float32)]:
        getattr(model, convert)()
        assert emb(ids).dtype == dtype
        assert torch.equal(emb(ids), exact[ids].to(dtype))
        model(ids).sum().backward()
        assert emb.anchor.grad.dtype == torch.float64
        expected = (5**0.5) * model[1].weight.double().norm().item()
        assert emb.anchor.grad.item() == pytest.approx(expected, rel=1e-6)
        opt.zero_grad()


def test_outputs_have_torchs_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = torch.nn.Sequential(Embedding(10, 4), torch.nn.Linear(4, 1))
        assert model(torch.tensor([1])).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_pending_rows_survive_a_change_of_dtype() -> None:
    emb = Embedding(10, 4, optimizer=bb.SGD(lr=1.0))
    opt = Optimizer(emb)
    before = rows(emb)
    emb(torch.tensor([1])).sum().backward()
    emb.half()
    emb.float()
    opt.step()
    assert torch.equal(rows(emb)[1], before[1] - 1)


@pytest.mark.parametrize("grad", [1.0, 0.0])
def test_pending_rows_survive_the_meta_device(grad: float) -> None:
    emb = Embedding(10, 4, optimizer=bb.SGD(lr=1.0))
    opt = Optimizer(emb)
    before = rows(emb)
    (grad * emb(torch.tensor([1]))).sum().backward()
    emb.anchor.grad.mul_(0.5)  # as clipping does it
    emb.to("meta")
    emb.bfloat16()
    assert emb.anchor.grad.is_meta
    emb.to_empty(device="cpu")
    opt.step()
    assert torch.equal(rows(emb)[1], before[1] - grad / 2)
    assert emb.table.step == 1


def test_transforms_of_torch_func_are_refused() -> None:
    emb, ids = Embedding(10, 4), torch.tensor([[1, 2], [3, 4]])
    for transformed in (
        lambda: torch.func.vmap(emb)(ids),
        lambda: torch.func.grad(lambda weight: (emb(ids) * weight).sum())(torch.ones(4)),
    ):
        with pytest.raises(RuntimeError, match=r"are no part of a torch.func transform.*freeze\(model\)"):
            transformed()


def test_the_table_stays_when_the_module_moves() -> None:
    emb = Embedding(10, 4, device="meta")
    assert emb.anchor.device.type == "meta"
    emb.to_empty(device="cpu")
    assert torch.equal(emb(torch.tensor([3])), rows(emb)[3:4])


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16])
def test_16_bit_rows_widen_to_float32(dtype: Any) -> None:
    emb = Embedding(10, 4, dtype=dtype)
    out = emb(torch.tensor([1]))
    narrow = torch.bfloat16 if dtype == "bfloat16" else dtype
    assert out.dtype == torch.float32 and torch.equal(out, out.to(narrow).float())


def test_autocast_leaves_rows_in_float32_as_nn_embedding_does() -> None:
    emb = Embedding(10, 4)
    model = torch.nn.Sequential(emb, torch.nn.Linear(4, 2))
    opt = Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert emb(torch.tensor([1])).dtype == torch.float32
        loss = model(torch.tensor([1])).float().sum()
    loss.backward()
    opt.step()
    assert emb.table.step == 1


# ---- eval, no_grad, freezing


class Spy:
    """A table that notes how it was looked up."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self.touched: list[bool] = []

    def lookup(self, ids: Any, *, touch: bool = True, out: Any = None) -> Any:
        self.touched.append(touch)
        return self._table.lookup(ids, touch=touch, out=out)

    def lookup_batch(self, batch: Any, size: int, *, touch: bool = True) -> Any:
        self.touched.append(touch)
        return self._table.lookup_batch(batch, size, touch=touch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)


def test_only_training_lookups_touch_the_cache() -> None:
    spy = Spy(bb.create(None, dim=2, num_rows=10))
    emb = Embedding(10, 2, table=spy)
    ids = torch.tensor([1])
    emb(ids)
    with torch.no_grad():
        emb(ids)
    with torch.inference_mode():
        emb(ids)
    emb.eval()
    assert emb(ids).requires_grad
    emb.train()
    emb.anchor.requires_grad = False
    assert not emb(ids).requires_grad
    assert spy.touched == [True, False, False, False, True]


def test_freezing_the_anchor_freezes_the_table() -> None:
    emb = Embedding(10, 2, optimizer=bb.SGD(lr=1.0))
    model = torch.nn.Sequential(emb, torch.nn.Linear(2, 1))
    opt = Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=0.1))
    emb.requires_grad_(False)
    before = rows(emb)
    model(torch.tensor([1])).sum().backward()
    opt.step()
    assert torch.equal(rows(emb), before) and emb.anchor.grad is None
    emb.requires_grad_(True)
    model(torch.tensor([1])).sum().backward()
    opt.step()
    assert not torch.equal(rows(emb), before)


# ---- shared tables


def test_layers_on_one_table_share_its_anchor_and_one_update() -> None:
    user = Embedding(10, 2, optimizer=bb.SGD(lr=1.0))
    other = Embedding(10, 2, padding_idx=3, table=user.table)
    bag = EmbeddingBag(10, 2, mode="sum", table=user.table)
    model = torch.nn.ModuleList([user, other, bag])
    assert len(list(model.parameters())) == 1
    opt = Optimizer(model)
    before = rows(user)
    out = user(torch.tensor([1])).sum() + other(torch.tensor([1, 3])).sum()
    (out + bag(torch.tensor([[1, 2]])).sum()).backward()
    assert user.anchor.grad.item() == pytest.approx((2 * 3**2 + 2 * 1) ** 0.5)
    opt.step()
    assert user.table.step == 1
    assert torch.equal(rows(user)[1:4], before[1:4] - torch.tensor([[3.0], [1.0], [0.0]]))
