"""With a GPU: outputs, gradients and the anchor live there, the table stays where it is."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

import bunkbed as bb
import bunkbed.torch as bt
from bunkbed.torch import Embedding, EmbeddingBag, Optimizer
from bunkbed.torch.device.kernels.choice import Chooser, chooser
from bunkbed.torch.device.kernels.operations import Gather, Scatter, SumPieces, update_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


ADAM = bb.Adam(lr=0.01)
STEPS = [
    bb.SGD(lr=0.0005, weight_decay=0.1),
    bb.Adagrad(lr=0.1, weight_decay=0.01, decoupled=True),
    bb.RowwiseAdagrad(lr=0.1, weight_decay=0.01),
    ADAM,
    bb.Adam(lr=0.01, weight_decay=0.1, decoupled=True),
]
DIMS = (1, 7, 64, 100, 256)


def rows(layer: Any) -> Any:
    return torch.from_numpy(layer.table.get(np.arange(layer.table.num_rows)))


def make() -> tuple[Any, Any, Any, Optimizer]:
    emb = Embedding(20, 4, optimizer=bb.SGD(lr=1.0), seed=0)
    model = torch.nn.ModuleDict({"emb": emb, "head": torch.nn.Linear(4, 1)})
    opt = Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=1.0))
    return model.to("cuda"), emb, model["head"], opt


def test_output_and_gradients_are_on_the_gpu() -> None:
    model, emb, _, opt = make()
    before = rows(emb)
    assert emb.anchor.device.type == "cuda"
    for ids in (torch.tensor([1, 2, 1]), torch.tensor([1, 2, 1], device="cuda", dtype=torch.int32)):
        out = emb(ids)
        assert out.device.type == "cuda" and torch.equal(out.detach().cpu(), before[[1, 2, 1]])
        opt.zero_grad()
        out.sum().backward()
        assert emb.anchor.grad.device.type == "cuda" and emb.anchor.grad.item() == pytest.approx((4 * 5) ** 0.5)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 20**0.5 / 2)
    opt.step()
    torch.testing.assert_close(rows(emb)[1:3], before[1:3] - torch.tensor([[1.0], [0.5]]))


def test_bags_on_the_gpu() -> None:
    bag = EmbeddingBag(20, 4, mode="sum", optimizer=bb.SGD(lr=1.0), device="cuda")
    opt = Optimizer(bag)
    before = rows(bag)
    weights = torch.ones(2, 2, device="cuda", requires_grad=True)
    bag(torch.tensor([[1, 2], [2, 3]], device="cuda"), per_sample_weights=weights).sum().backward()
    assert weights.grad is not None and weights.grad.device.type == "cuda"
    torch.testing.assert_close(weights.grad.cpu(), before[[1, 2, 2, 3]].sum(1).reshape(2, 2))
    opt.step()
    torch.testing.assert_close(rows(bag)[1:4], before[1:4] - torch.tensor([[1.0], [2.0], [1.0]]))


def test_grad_scaler_under_autocast_skips_an_inf_step() -> None:
    _, emb, head, opt = make()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)
    for step in range(3):
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = head(emb(torch.tensor([1, 2], device="cuda"))).float().sum() * (float("inf") if step == 1 else 1.0)
        before = rows(emb), emb.table.step
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        skipped = scaler.get_scale() < scale
        assert emb.table.step == before[1] + (0 if skipped else 1)
        assert torch.equal(rows(emb), before[0]) == skipped
    assert scaler.get_scale() < 2.0**24


def test_pending_rows_move_with_the_module() -> None:
    model, emb, _, opt = make()
    before = rows(emb)
    emb(torch.tensor([1])).sum().backward()
    model.cpu()
    assert emb.anchor.grad.device.type == "cpu" and emb.anchor.grad.item() == 2.0
    emb(torch.tensor([1])).sum().backward()
    opt.step()
    assert torch.equal(rows(emb)[1], before[1] - 2)


def trained(cache: Any, lookahead: bool, optimizer: Any = ADAM) -> tuple[Any, Any]:
    """Rows after training on the GPU with such a device cache, and the layer's statistics."""
    emb = Embedding(2000, 16, optimizer=optimizer, init=bb.Normal(std=0.1), seed=1, device_cache=cache)
    model = torch.nn.ModuleDict({"emb": emb, "head": torch.nn.Linear(16, 1, bias=False)}).to("cuda")
    torch.nn.init.constant_(model["head"].weight, 0.5)
    opt = Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=0.0))
    rng = np.random.default_rng(0)
    stream = [torch.from_numpy(rng.zipf(1.2, 300) % 2000) for _ in range(60)]
    loader: Any = bt.lookahead(stream, model, ids=lambda ids: {emb: ids}) if lookahead else stream
    for ids in loader:
        opt.zero_grad()
        model["head"](emb(ids)).square().sum().backward()
        opt.step()
    found, stats = rows(emb), emb.table.stats()
    emb.table.close()
    return found, stats


def test_a_device_cache_has_the_same_bits_with_every_size() -> None:
    plain, _ = trained(None, False)
    record = 16 * 4 * 3
    found = {}
    for cache in (300 * record, 2000 * record, 0):
        for lookahead in (False, True):
            found[cache, lookahead], stats = trained(cache, lookahead)
            assert cache == 0 or stats["device_bytes"] <= cache
    first = found[300 * record, False]
    torch.testing.assert_close(first, plain, rtol=0, atol=1e-6)
    assert all(torch.equal(other, first) for (cache, _), other in found.items() if cache), "of the caches"
    torch.testing.assert_close(found[0, True], plain, rtol=0, atol=1e-6)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("lookahead", [False, True], ids=["plain", "lookahead"])
@pytest.mark.parametrize("optimizer", STEPS, ids=repr)
def test_kernels_and_plain_operations_train_the_same_bits(optimizer: Any, lookahead: bool) -> None:
    """The whole of a small cache's life through kernels alone, through plain operations alone, and as it is chosen."""
    found = []
    for is_kernel in (False, True, None):
        with contextlib.nullcontext() if is_kernel is None else chooser.forced(is_kernel):
            found.append(trained(300 * 4 * 3 * 16, lookahead, optimizer)[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("dim", DIMS)
def test_trials_find_every_kernel_equal(dim: int) -> None:
    """On this card; whether one is faster too, is the card's affair."""
    made = [update_of(optimizer, dim) for optimizer in STEPS]
    fresh, before = Chooser(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for operation in (Gather(3 * dim, dim, torch.float32), Scatter(3 * dim), SumPieces(dim), *made):
        assert operation is not None
        args = [v.cuda() if isinstance(v, torch.Tensor) else v for v in operation.sample(np.random.default_rng(1))]
        fresh.run(operation, *args)
        del args
    assert [choice.speedup is not None for choice in fresh.choices] == [True] * (3 + len(STEPS)), fresh.choices
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before <= 80 << 20


def test_nothing_is_tried_while_a_graph_is_captured() -> None:
    fresh, operation = Chooser(), Gather(8, 8, torch.float32)
    source, index = torch.randn(5, 8, device="cuda"), torch.tensor([4, 4, 0], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fresh.run(operation, source, index)
    graph.replay()
    assert fresh.choices == [] and torch.equal(found, source[index])
