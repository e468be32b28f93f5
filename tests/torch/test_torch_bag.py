"""`EmbeddingBag` against `torch.nn.EmbeddingBag`: pooling, padding, weights and their gradient, offsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import bunkbed as bb
from bunkbed.torch import EmbeddingBag, Optimizer
from bunkbed.torch.bag import _Bags

torch.set_num_threads(1)


def rows(layer: Any) -> Any:
    return torch.from_numpy(layer.table.get(np.arange(layer.table.num_rows)))


def pair(**kwargs: Any) -> tuple[EmbeddingBag, Any]:
    """A layer and torch's with the same rows."""
    ours = EmbeddingBag(20, 3, optimizer=bb.SGD(lr=1.0), **kwargs)
    theirs = torch.nn.EmbeddingBag.from_pretrained(rows(ours), freeze=False, **kwargs)
    return ours, theirs


def check(ours: EmbeddingBag, theirs: Any, *inputs: Any, weights: Any = None) -> None:
    """The same output, row gradients and gradient of per_sample_weights."""
    opt = Optimizer(ours)
    before = rows(ours)
    found = {}
    for name, layer in (("ours", ours), ("theirs", theirs)):
        own = None if weights is None else weights.detach().clone().requires_grad_()
        out = layer(*inputs, **({} if own is None else {"per_sample_weights": own}))
        (out * torch.linspace(-1, 2, out.numel()).reshape(out.shape)).sum().backward()
        found[name] = (out.detach(), None if own is None else own.grad)
    torch.testing.assert_close(found["ours"], found["theirs"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.anchor.grad[0], theirs.weight.grad.double().norm(), rtol=1e-6, atol=0)
    opt.step()
    torch.testing.assert_close(before - rows(ours), theirs.weight.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_two_dimensional_input(mode: str, padding_idx: int | None) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 20, (6, 5))
    ids[2] = 3  # a bag of nothing but padding
    ids[4, 1:3] = 3
    check(*pair(mode=mode, padding_idx=padding_idx), ids)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_offsets_with_empty_bags(mode: str, padding_idx: int | None, dtype: Any) -> None:
    torch.manual_seed(1)
    ids = torch.randint(0, 20, (12,), dtype=dtype)
    ids[:4] = torch.tensor([3, 3, 5, 5])
    offsets = torch.tensor([0, 0, 2, 2, 7, 11, 12], dtype=dtype)
    check(*pair(mode=mode, padding_idx=padding_idx), ids, offsets)


def test_include_last_offset() -> None:
    torch.manual_seed(2)
    ids = torch.randint(0, 20, (12,))
    check(*pair(mode="sum", include_last_offset=True), ids, torch.tensor([0, 4, 4, 12]))


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_per_sample_weights_and_their_gradient(padding_idx: int | None) -> None:
    torch.manual_seed(3)
    ids = torch.randint(0, 5, (4, 6))
    check(*pair(mode="sum", padding_idx=padding_idx), ids, weights=torch.randn(4, 6))
    flat = ids.reshape(-1)
    offsets = torch.tensor([0, 5, 5, 20])
    check(*pair(mode="sum", padding_idx=padding_idx), flat, offsets, weights=torch.randn(24))


def test_per_sample_weights_train_over_a_frozen_table() -> None:
    ours, theirs = pair(mode="sum")
    ours.anchor.requires_grad = False
    ids = torch.randint(0, 20, (4, 6))
    weights = [torch.ones(4, 6, requires_grad=True) for _ in range(2)]
    ours(ids, per_sample_weights=weights[0]).sum().backward()
    theirs(ids, per_sample_weights=weights[1]).sum().backward()
    torch.testing.assert_close(weights[0].grad, weights[1].grad)
    assert ours.anchor.grad is None


def test_weights_may_change_between_forward_and_backward() -> None:
    ours = EmbeddingBag(20, 3, mode="sum", optimizer=bb.SGD(lr=1.0))
    opt = Optimizer(ours)
    before = rows(ours)
    ids, weights = torch.tensor([[1, 2]]), torch.tensor([[2.0, 3.0]])
    offsets = torch.tensor([0])
    loss = ours(ids.reshape(-1), offsets, per_sample_weights=weights.reshape(-1)).sum()
    weights.zero_()
    offsets.fill_(1)
    loss.backward()
    opt.step()
    assert torch.equal((before - rows(ours))[[0, 1, 2], 0].round(), torch.tensor([0.0, 2.0, 3.0]))


def test_ids_changed_between_forward_and_backward_are_an_error_or_no_concern() -> None:
    """As for torch's layer, where the tensor's own memory is kept; a copy of ours stays what it was."""
    ours = EmbeddingBag(20, 3, mode="sum", optimizer=bb.SGD(lr=1.0), padding_idx=7)
    opt = Optimizer(ours)
    before = rows(ours)
    ids = torch.tensor([[1, 2]])
    loss = ours(ids).sum()
    ids.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    opt.zero_grad()
    for ids in (torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([[1, 7, 2]]), torch.tensor([[1, 2], [2, 3]]).T):
        loss = ours(ids).sum()
        ids.zero_()
        loss.backward()
    strided = torch.tensor([1, 0, 2, 0])
    loss = ours(strided[::2], torch.tensor([0])).sum()
    strided.zero_()
    loss.backward()
    opt.step()
    assert torch.equal((before - rows(ours))[:4, 0].round(), torch.tensor([0.0, 4.0, 5.0, 1.0]))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_fused_gradients_are_the_spread_ones_summed(mode: str, weighted: bool) -> None:
    """Bit for bit, over blocks of the fused sum, -0.0 too."""
    rng = np.random.default_rng(0)
    ids = (400 * rng.random(3000) ** 3).astype(np.int64)
    offsets = np.sort(rng.integers(0, 3001, 300))
    offsets[:3], offsets[-1] = 0, 3000
    factors = rng.standard_normal(3000).astype(np.float32) if weighted else None
    for dim in (5, 64):
        bags = _Bags(ids, offsets, factors, None, mode == "mean")
        grads = rng.standard_normal((300, dim)).astype(np.float32)
        grads[::2] = -0.0
        batch = bb.create(None, dim=dim, num_rows=400).batch(ids)
        sums, norm = bags.sum_in(batch, grads)
        expected, expected_norm = batch.sum(bags.spread(grads))
        assert sums.tobytes() == expected.tobytes()
        assert norm == pytest.approx(expected_norm, rel=1e-12)


def test_two_lookups_of_bags_add_up_in_forward_order() -> None:
    """Several lookups of one step take the other way than one does; the rows must not show it."""
    found = []
    for split in (False, True):
        bag = EmbeddingBag(50, 4, mode="mean", optimizer=bb.SGD(lr=1.0), seed=1)
        opt = Optimizer(bag)
        ids = torch.randint(0, 50, (40, 5), generator=torch.Generator().manual_seed(0))
        scale = torch.linspace(-1, 2, 160).reshape(40, 4)
        parts = [(ids[:15], scale[:15]), (ids[15:], scale[15:])] if split else [(ids, scale)]
        torch.stack([(bag(part) * factor).sum() for part, factor in parts]).sum().backward()
        opt.step()
        found.append(rows(bag))
    assert torch.equal(found[0], found[1])


def test_eval_and_no_grad() -> None:
    ours, theirs = pair(mode="mean")
    ids = torch.randint(0, 20, (4, 6))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids))
    assert ours.eval()(ids).requires_grad
    assert ours(ids[:0]).shape == (0, 3)


def test_from_pretrained_and_repr() -> None:
    weight = torch.randn(4, 2)
    bag = EmbeddingBag.from_pretrained(weight, mode="sum", padding_idx=1)
    assert not bag.anchor.requires_grad
    assert torch.equal(bag(torch.tensor([[0, 1]])), weight[:1])
    assert repr(bag) == "EmbeddingBag(4, 2, mode='sum', padding_idx=1, ram only, optimizer=Adam)"


@pytest.mark.parametrize(
    ("mode", "message"),
    [("max", "mode='max' is not supported"), ("min", "must be 'sum' or 'mean', got 'min'")],
)
def test_unsupported_modes(mode: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmbeddingBag(10, 2, mode=mode)


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        (
            torch.zeros(2, 2, dtype=torch.int64),
            torch.tensor([0]),
            "offsets must be None for 2-dimensional input",
        ),
        (torch.zeros(4, dtype=torch.int64), None, "offsets must be given for 1-dimensional input"),
        (torch.zeros(4, dtype=torch.int64), torch.tensor([[0]]), r"must be 1-dimensional, got int64\[1, 1\]"),
        (torch.zeros(4, dtype=torch.int64), torch.tensor([1, 2]), "offsets must start with 0, got 1"),
        (torch.zeros(4, dtype=torch.int64), torch.tensor([0, 3, 2]), "got 3 at position 1, then 2"),
        (torch.zeros(4, dtype=torch.int64), torch.tensor([0, 5]), "got 5 at position 1, then 4"),
        (torch.zeros(1, 1, 1, dtype=torch.int64), None, r"must be 1- or 2-dimensional, got int64\[1, 1, 1\]"),
    ],
)
def test_wrong_inputs(ids: Any, offsets: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmbeddingBag(10, 2)(ids, offsets)


def test_wrong_weights_and_last_offsets() -> None:
    ids = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="needs mode='sum', but this layer has mode='mean'"):
        EmbeddingBag(10, 2)(ids, per_sample_weights=torch.ones(2, 2))
    bag = EmbeddingBag(10, 2, mode="sum", include_last_offset=True)
    with pytest.raises(ValueError, match=r"must have input's shape \[2, 2\], got \[4\]"):
        bag(ids, per_sample_weights=torch.ones(4))
    with pytest.raises(TypeError, match=r"must have the layer's dtype, torch\.float32, got torch\.int64"):
        bag(ids, per_sample_weights=ids)
    with pytest.raises(ValueError, match="must not pass the 4 ids, got 5 at position 1"):
        bag(ids.reshape(-1), torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="must end with the number of ids, 4, got 3"):
        bag(ids.reshape(-1), torch.tensor([0, 3]))
    with pytest.raises(TypeError, match="offsets must be an int64 or int32 tensor, got float32"):
        bag(ids.reshape(-1), torch.tensor([0.0]))
    with pytest.raises(IndexError, match="id 10 at position 1 is outside"):
        EmbeddingBag(10, 2)(torch.tensor([[1, 10]]))
