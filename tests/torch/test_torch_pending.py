"""The anchor: what torch does to a gradient happens to the pending rows, and nothing else is taken
silently."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import bunkbed as bb
from bunkbed import _native
from bunkbed.testing import ReferenceTable
from bunkbed.torch import Embedding, EmbeddingBag, Optimizer, anchors

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()


def rows(layer: Any) -> Any:
    return torch.from_numpy(layer.table.get(np.arange(layer.table.num_rows)))


def make(num: int = 20, dim: int = 4, **kwargs: Any) -> tuple[Any, Any, Any, Optimizer]:
    """(model, layer, head, optimizer); the head keeps clipping honest about dense gradients."""
    kwargs.setdefault("optimizer", bb.SGD(lr=1.0))
    emb = Embedding(num, dim, seed=0, **kwargs)
    head = torch.nn.Linear(dim, 1)
    model = torch.nn.ModuleDict({"emb": emb, "head": head})
    return model, emb, head, Optimizer(model, dense=torch.optim.SGD(model.parameters(), lr=1.0))


def norm_of(grads: Any) -> float:
    return float(np.linalg.norm(np.asarray(grads, np.float64)))


# ---- the norm


def test_grad_is_the_float64_norm_of_the_summed_rows() -> None:
    _, emb, _, opt = make()
    weight = torch.randn(4, 4)
    ids = torch.tensor([1, 2, 1, 5])
    (emb(ids) * weight).sum().backward()
    sums = torch.stack([weight[0] + weight[2], weight[1], weight[3]])
    assert emb.anchor.grad.shape == (1,) and emb.anchor.grad.dtype == torch.float64
    assert emb.anchor.grad.item() == pytest.approx(norm_of(sums), rel=1e-7)
    (emb(ids[:1]) * weight[:1]).sum().backward()  # accumulates, as any gradient
    sums[0] += weight[0]
    assert emb.anchor.grad.item() == pytest.approx(norm_of(sums), rel=1e-7)
    opt.zero_grad()
    assert emb.anchor.grad is None


def test_the_norm_of_large_gradients_does_not_overflow() -> None:
    _, emb, _, _opt = make()
    (emb(torch.tensor([1, 2])) * 1e30).sum().backward()
    assert emb.anchor.grad.item() == pytest.approx(8**0.5 * 1e30)


def test_the_anchor_is_not_a_weight() -> None:
    """What walks over all parameters finds a 0, so an L2 term adds nothing, and a warning says so."""
    model, emb, _, opt = make()
    before = rows(emb)
    loss = emb(torch.tensor([1])).sum() + sum(p.pow(2).sum() for p in model.parameters())
    with pytest.warns(UserWarning, match="as an L2 penalty, reached its anchor"):
        loss.backward()
    opt.step()
    assert torch.equal(rows(emb)[1], before[1] - 1)
    opt.zero_grad()
    sum(p.pow(2).sum() for p in model.parameters()).backward()  # no lookup at all: zeros, which count as a step
    opt.step()
    assert emb.table.step == 2 and len(emb.table) == 1


# ---- one update, in forward order


def order_cases() -> dict[str, Callable[[list[Any]], None]]:
    def one_backward(losses: list[Any]) -> None:
        sum(reversed(losses)).backward()

    def in_order(losses: list[Any]) -> None:
        for loss in losses:
            loss.backward()

    def reversed_order(losses: list[Any]) -> None:
        for loss in reversed(losses[:2]):
            loss.backward()
        losses[2].backward()

    return {"one": one_backward, "in order": in_order, "reversed": reversed_order}


@pytest.mark.parametrize("case", order_cases())
def test_several_lookups_are_one_update_summed_in_forward_order(case: str) -> None:
    """Bit for bit what one update with the concatenated batch does, whatever order backward takes."""
    rng = np.random.default_rng(0)
    emb = Embedding(10, 4, optimizer=bb.Adam(lr=0.1), seed=1)
    reference = ReferenceTable(dim=4, num_rows=10, optimizer=bb.Adam(lr=0.1), init=bb.Normal(1.0), seed=1)
    opt = Optimizer(emb)
    for _ in range(3):
        ids = [rng.integers(0, 10, 30) for _ in range(3)]
        # Magnitudes so different that any other order of summing shows.
        grads = [(rng.standard_normal((30, 4)) * 10.0 ** rng.integers(-4, 4, (30, 1))).astype(np.float32) for _ in ids]
        losses = [(emb(torch.from_numpy(i)) * torch.from_numpy(g)).sum() for i, g in zip(ids, grads, strict=True)]
        opt.zero_grad()
        order_cases()[case](losses)
        opt.step()
        reference.update(np.concatenate(ids), np.concatenate(grads))
    assert emb.table.step == 3
    for slot in ("weight", *reference.slots):
        assert emb.table.get(np.arange(10), slot=slot).tobytes() == reference.get(np.arange(10), slot).tobytes()


def test_a_graph_used_twice_counts_twice() -> None:
    _, emb, _, opt = make()
    before = rows(emb)
    loss = emb(torch.tensor([1, 2])).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert emb.anchor.grad.item() == pytest.approx((8 * 4) ** 0.5)
    opt.step()
    assert torch.equal(rows(emb)[1:3], before[1:3] - 2)


def test_step_keeps_gradients_until_zero_grad_as_torch_does() -> None:
    _, emb, _, opt = make()
    before = rows(emb)
    emb(torch.tensor([1])).sum().backward()
    opt.step()
    opt.step()
    assert torch.equal(rows(emb)[1], before[1] - 2) and emb.table.step == 2


# ---- dropping


def drops() -> dict[str, Callable[[Any, Any, Any], None]]:
    def by_hand(model: Any, emb: Any, opt: Any) -> None:
        emb.anchor.grad = None

    def zeroed_by_hand(model: Any, emb: Any, opt: Any) -> None:
        emb.anchor.grad.zero_()

    def replaced_by_zeros(model: Any, emb: Any, opt: Any) -> None:
        emb.anchor.grad = torch.zeros_like(emb.anchor.grad)

    return {
        "optimizer": lambda model, emb, opt: opt.zero_grad(),
        "optimizer, zeros": lambda model, emb, opt: opt.zero_grad(set_to_none=False),
        "model": lambda model, emb, opt: model.zero_grad(),
        "model, zeros": lambda model, emb, opt: model.zero_grad(set_to_none=False),
        "grad = None": by_hand,
        "grad.zero_()": zeroed_by_hand,
        "grad = zeros": replaced_by_zeros,
    }


@pytest.mark.parametrize("then", ["backward", "step"])
@pytest.mark.parametrize("how", drops())
def test_zero_grad_drops_pending_rows(how: str, then: str) -> None:
    model, emb, _, opt = make()
    before = rows(emb)
    emb(torch.tensor([1, 2])).sum().backward()
    drops()[how](model, emb, opt)
    if then == "backward":
        emb(torch.tensor([2])).sum().backward()
        assert emb.anchor.grad.item() == 2.0
    opt.step()
    assert torch.equal(rows(emb)[1], before[1])
    assert torch.equal(rows(emb)[2], before[2] - (1 if then == "backward" else 0))


def test_gradients_that_are_really_zero_still_count_as_a_step() -> None:
    """Adam moves a row with a zero gradient; clipping the zero norm must not read as zero_grad."""
    _, emb, _, opt = make(optimizer=bb.Adam(lr=0.1))
    ids = torch.tensor([1])
    emb(ids).sum().backward()
    opt.step()
    opt.zero_grad()
    moved = rows(emb)[1]
    (emb(ids) * 0.0).sum().backward()
    assert emb.anchor.grad.item() == 0.0
    torch.nn.utils.clip_grad_norm_([emb.anchor], 1.0)
    opt.step()
    assert emb.table.step == 2 and not torch.equal(rows(emb)[1], moved)
    opt.zero_grad()
    opt.step()
    assert emb.table.step == 2


@pytest.mark.parametrize("device_cache", [None, "1MiB"])
def test_zeroed_gradients_count_as_a_step_as_sparse_adam_counts_them(device_cache: Any) -> None:
    emb = Embedding(20, 4, optimizer=bb.Adam(lr=0.1), device_cache=device_cache)
    ref = torch.nn.Embedding.from_pretrained(rows(emb), freeze=False, sparse=True)
    sides = [(emb, Optimizer(emb)), (ref, torch.optim.SparseAdam(ref.parameters(), lr=0.1))]
    for layer, optimizer in sides:
        for used in (True, False, False, True):
            optimizer.zero_grad(set_to_none=False)
            if used:
                (layer(torch.tensor([1, 2])) * 3.0).sum().backward()
            optimizer.step()
    assert emb.table.step == 4
    torch.testing.assert_close(rows(emb), ref.weight.data, rtol=1e-5, atol=1e-6)


def test_a_layer_that_is_frozen_after_its_backward_is_stepped_once_as_in_torch() -> None:
    _, emb, _, opt = make(optimizer=bb.SGD(lr=1.0))
    before = rows(emb)
    emb(torch.tensor([1])).sum().backward()
    emb.requires_grad_(False)
    opt.step()
    assert torch.equal(rows(emb)[1], before[1] - 1)
    opt.zero_grad()
    opt.step()
    assert emb.table.step == 1


# ---- scaling


def test_rows_are_scaled_as_the_anchor_was() -> None:
    _, emb, _, opt = make()
    before = rows(emb)
    emb(torch.tensor([1])).sum().backward()
    emb.anchor.grad.mul_(0.5)
    emb(torch.tensor([1])).sum().backward()  # later gradients are added unscaled
    assert emb.anchor.grad.item() == pytest.approx(1.5 * 2)
    emb.anchor.grad.mul_(-2.0)
    opt.step()
    assert torch.equal(rows(emb)[1], before[1] + 3)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulation_with_clipping_equals_torch(foreach: bool | None, accumulate: int) -> None:
    torch.manual_seed(0)
    model, emb, head, opt = make(optimizer=bb.Adam(lr=0.05))
    ref = torch.nn.Embedding.from_pretrained(rows(emb), freeze=False)
    ref_head = torch.nn.Linear(4, 1)
    ref_head.load_state_dict(head.state_dict())
    for _ in range(20):
        opt.zero_grad()
        ref.zero_grad()
        ref_head.zero_grad()
        for _ in range(accumulate):
            ids, target = torch.randint(0, 20, (8,)), torch.randn(8, 1) * 30
            torch.nn.functional.mse_loss(head(emb(ids)), target).backward()
            torch.nn.functional.mse_loss(ref_head(ref(ids)), target).backward()
        ours = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7, foreach=foreach)
        everything = [*ref_head.parameters(), *ref.parameters()]
        theirs = torch.nn.utils.clip_grad_norm_(everything, 0.7, foreach=foreach)
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-5, atol=0)
        torch.testing.assert_close(head.weight.grad, ref_head.weight.grad, rtol=1e-4, atol=1e-6)
        held = emb._pending
        assert held.reconcile()  # what step does first
        torch.testing.assert_close(
            torch.from_numpy(held.sums), ref.weight.grad[torch.from_numpy(held.batch.unique())], rtol=1e-4, atol=1e-6
        )
        opt.step()
        with torch.no_grad():
            ref.weight.copy_(rows(emb))
            ref_head.load_state_dict(head.state_dict())


def test_grad_scaler_with_an_inf_step_equals_unscaled_training() -> None:
    results = []
    for scaled, poison in itertools.product([False, True], [False, True]):
        torch.manual_seed(0)
        model, emb, head, opt = make(optimizer=bb.Adam(lr=0.05))
        torch.nn.init.ones_(head.weight)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for step, ids in enumerate(torch.randint(0, 20, (12, 8))):
            bad = step == 5
            if bad and not (scaled and poison):
                continue
            opt.zero_grad()
            loss = (head(emb(ids)) ** 2).mean() * (float("inf") if bad else 1.0)
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            steps = emb.table.step
            scaler.step(opt)
            scaler.update()
            assert emb.table.step == steps + (0 if bad else 1)
        assert not scaled or scaler.get_scale() == (512.0 if poison else 1024.0)
        results.append((rows(emb), head.weight.detach().clone()))
    for found in results[1:]:  # the scale is a power of two, so it changes no bit
        torch.testing.assert_close(found, results[0], rtol=1e-6, atol=1e-7)


def test_inf_in_the_rows_alone_makes_grad_scaler_skip() -> None:
    _, emb, head, opt = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = rows(emb), head.weight.detach().clone()
    factor = torch.ones(2, 4)
    factor[1, 2] = float("inf")
    scaler.scale((emb(torch.tensor([1, 2])) * factor).sum() + head.weight.sum()).backward()
    assert not torch.isfinite(emb.anchor.grad).any()
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert torch.equal(rows(emb), before[0]) and torch.equal(head.weight, before[1])


# ---- errors


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_unscaled_step_raises_on_nan_before_anything_changes(bad: float, clip: bool) -> None:
    model, emb, head, opt = make()
    before = rows(emb), head.weight.detach().clone()
    factor = torch.ones(3, 4)
    factor[1, 2] = bad
    (head(emb(torch.tensor([4, 7, 4]))).sum() + (emb(torch.tensor([4, 7, 4])) * factor).sum()).backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    message = r"table 'table': the gradient of id \d+ is -?(nan|inf) at column \d; nothing was changed"
    with pytest.raises(ValueError, match=message if clip else message.replace(r"\d+", "7", 1)):
        opt.step()
    assert torch.equal(rows(emb), before[0]) and torch.equal(head.weight, before[1])
    assert emb.table.step == 0


def test_a_nan_of_dense_weights_reaches_the_rows_by_clipping_and_is_reported() -> None:
    model, emb, head, opt = make()
    (emb(torch.tensor([4])).sum() + head.weight.sum() * float("nan")).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ValueError, match="the gradient of id 4 is nan"):
        opt.step()


@pytest.mark.parametrize("then", ["backward", "step"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: setattr(p, "grad", p.grad * 0.5), "anchor.grad was replaced by another tensor"),
        (lambda p: p.grad.fill_(float("inf")), "is inf at column"),
    ],
)
def test_changes_that_are_no_scaling(change: Any, message: str, then: str) -> None:
    _, emb, _, opt = make()
    emb(torch.tensor([1])).sum().backward()
    change(emb.anchor)
    with pytest.raises((RuntimeError, ValueError), match=message):
        if then == "backward":
            emb(torch.tensor([1])).sum().backward()
        opt.step()


@pytest.mark.parametrize("bound", [0.1, 1.0, 2.5])
def test_clipping_by_value_is_refused(bound: float) -> None:
    model, emb, head, opt = make()
    before = rows(emb)
    weight = torch.tensor([[3.1, 0, 0.3, 0], [0, 4.7, 0, 0]])
    ((emb(torch.tensor([1, 2])) * weight).sum() + head.weight.sum()).backward()
    torch.nn.utils.clip_grad_value_([head.weight, emb.anchor], bound)
    with pytest.raises(RuntimeError, match=rf"exactly {bound:g}, as clip_grad_value_ sets it.*use clip_grad_norm_"):
        opt.step()
    assert torch.equal(rows(emb), before)
    opt.zero_grad()
    ((emb(torch.tensor([1, 2])) * weight).sum() + head.weight.sum()).backward()
    torch.nn.utils.clip_grad_value_([p for p in [head.weight, emb.anchor] if p not in anchors(model)], bound)
    torch.nn.utils.clip_grad_norm_([emb.anchor], bound)
    opt.step()
    assert emb.table.step == 1


def test_clipping_a_large_norm_to_its_bound_is_a_scaling() -> None:
    _, emb, _, opt = make()
    before = rows(emb)
    (emb(torch.tensor([1])) * 1.234567e10).sum().backward()
    torch.nn.utils.clip_grad_norm_([emb.anchor], 0.5)
    assert emb.anchor.grad.item() == 0.5
    opt.step()
    assert torch.allclose(rows(emb)[1], before[1] - 0.25)


def test_clipping_a_norm_of_few_digits_by_value_scales_rows() -> None:
    """The anchor's gradient is one number. Only its digits show whether it was scaled or clipped."""
    _, emb, _, opt = make()
    before = rows(emb)
    weight = torch.tensor([[3.0, 0, 0, 0], [0, 4.0, 0, 0]])
    (emb(torch.tensor([1, 2])) * weight).sum().backward()
    torch.nn.utils.clip_grad_value_([emb.anchor], 1.0)
    opt.step()
    assert torch.allclose(rows(emb)[[1, 2]], before[[1, 2]] - weight / 5)


def test_a_norm_of_zero_cannot_become_another_value() -> None:
    _, emb, _, opt = make()
    (emb(torch.tensor([1])) * 0).sum().backward()
    emb.anchor.grad.add_(1.0)
    with pytest.raises(RuntimeError, match="changed from 0 to 1, which is no scaling of the row gradients"):
        opt.step()


def test_a_value_without_pending_rows() -> None:
    _, emb, _, opt = make()
    emb.anchor.grad = torch.ones(1, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="holds 1 but no row gradients are pending"):
        opt.step()


def test_a_norm_that_was_not_finite_cannot_be_repaired() -> None:
    _, emb, _, opt = make()
    (emb(torch.tensor([1])) * float("inf")).sum().backward()
    torch.nan_to_num(emb.anchor.grad, posinf=1e5, out=emb.anchor.grad)
    with pytest.raises(RuntimeError, match="changed from inf to 100000, which is no scaling"):
        opt.step()


def test_a_restored_copy_of_the_same_value_is_fine() -> None:
    _, emb, _, opt = make()
    before = rows(emb)
    emb(torch.tensor([1])).sum().backward()
    emb.anchor.grad = emb.anchor.grad.clone()
    opt.step()
    assert torch.equal(rows(emb)[1], before[1] - 1)


def test_create_graph_is_refused_but_penalties_on_the_output_work() -> None:
    _, emb, head, opt = make()
    ids = torch.tensor([1, 2])
    loss = emb(ids).pow(2).sum()
    with pytest.raises(RuntimeError, match="create_graph=True reached its rows"):
        torch.autograd.grad(loss, emb.anchor, create_graph=True)
    opt.zero_grad()
    out = emb(ids)
    (slope,) = torch.autograd.grad(torch.tanh(head(out)).sum(), out, create_graph=True)
    (slope.norm(dim=1) - 1).pow(2).mean().backward()
    assert emb.anchor.grad.item() > 0
    opt.step()
    assert emb.table.step == 1


def test_autograd_grad_leaves_nothing_pending() -> None:
    _, emb, _, opt = make()
    before = rows(emb)
    torch.autograd.grad(emb(torch.tensor([1])).sum(), emb.anchor)
    emb(torch.tensor([2])).sum().backward()
    opt.step()
    assert torch.equal(rows(emb)[1], before[1]) and torch.equal(rows(emb)[2], before[2] - 1)


def test_a_backward_that_failed_half_way_leaves_nothing_pending() -> None:
    class Fails(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            raise ValueError("half way")

    _, emb, _, opt = make()
    before = rows(emb)
    good = emb(torch.tensor([1])).sum()
    bad = Fails.apply(emb(torch.tensor([2]))).sum()
    with pytest.raises(ValueError, match="half way"):
        (bad + good).backward()
    opt.zero_grad()
    emb(torch.tensor([3])).sum().backward()
    opt.step()
    assert torch.equal(rows(emb)[:3], before[:3]) and torch.equal(rows(emb)[3], before[3] - 1)


def test_backward_needs_an_optimizer_but_lookups_do_not() -> None:
    emb = Embedding(10, 2)
    loss = emb(torch.tensor([1])).sum()
    with pytest.raises(RuntimeError, match=r"no Optimizer steps them; write\n.*Optimizer\(model, dense="):
        loss.backward()
    opt = Optimizer(emb)
    emb(torch.tensor([1])).sum().backward()
    del opt
    with pytest.raises(RuntimeError, match="no Optimizer steps them"):  # a dead one does not count
        emb(torch.tensor([1])).sum().backward()


def test_a_retained_output_gradient_is_not_the_rows_memory() -> None:
    _, emb, _, opt = make()
    before = rows(emb)
    out = emb(torch.tensor([1]))
    out.retain_grad()
    (out * 2.0).sum().backward()
    out.grad.zero_()
    opt.step()
    assert torch.equal(rows(emb)[1], before[1] - 2)


# ---- all of it at once


@pytest.mark.parametrize("seed", range(40))
def test_any_sequence_of_calls_does_what_it_does_to_a_dense_parameter(seed: int) -> None:
    """Random lookups, backward calls, scalings, zero_grads and steps, compared with `nn.Embedding` and SGD."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    emb = Embedding(12, 3, optimizer=bb.SGD(lr=0.1))
    bag = EmbeddingBag(12, 3, mode="mean", padding_idx=2, table=emb.table)
    ref = torch.nn.Embedding.from_pretrained(rows(emb), freeze=False)
    model = torch.nn.ModuleList([emb, bag])
    opt, ref_opt = Optimizer(model), torch.optim.SGD(ref.parameters(), lr=0.1)
    graphs: list[tuple[Any, Any]] = []
    stepped = 0

    def look_up() -> None:
        ids, weight = torch.from_numpy(rng.integers(0, 12, (4, 2))), torch.randn(4, 3)
        if rng.random() < 0.5:
            ours, theirs = emb(ids).sum(1), ref(ids).sum(1)
        else:
            ours = bag(ids)
            theirs = torch.nn.functional.embedding_bag(ids, ref.weight, mode="mean", padding_idx=2)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        graphs.append(((ours * weight).sum(), (theirs * weight).sum()))

    def backward() -> None:
        count = int(rng.integers(1, len(graphs) + 1))
        chosen = [graphs[i] for i in rng.permutation(len(graphs))[:count]]
        for side in range(2):
            sum(pair[side] for pair in chosen).backward(retain_graph=True)

    def scale() -> None:
        factor = float(rng.choice([0.5, 3.0, -1.0, 1e-3]))
        for parameter in (emb.anchor, ref.weight):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def clip() -> None:
        for parameter in (emb.anchor, ref.weight):
            torch.nn.utils.clip_grad_norm_([parameter], 0.5)

    def zero() -> None:
        to_none = bool(rng.integers(2))
        (opt if rng.random() < 0.5 else model).zero_grad(set_to_none=to_none)
        ref_opt.zero_grad(set_to_none=to_none)

    def step() -> None:
        graphs.clear()  # torch refuses a backward after the weight changed under it
        opt.step()
        ref_opt.step()
        torch.testing.assert_close(rows(emb), ref.weight.data, rtol=1e-4, atol=1e-5)

    for _ in range(60):
        choices = [look_up, look_up, scale, clip, zero, step] + [backward] * (3 if graphs else 0)
        choice = choices[int(rng.integers(len(choices)))]
        choice()
        stepped += choice is step
        if choice is backward:
            assert emb.anchor.grad.item() == pytest.approx(ref.weight.grad.double().norm().item(), rel=1e-4, abs=1e-6)
    assert stepped > 0


def test_a_warm_step_takes_no_memory_from_the_system() -> None:
    emb = Embedding(100_000, 32, optimizer=bb.Adam(), init=bb.Zeros(), seed=0)
    opt = Optimizer(emb)
    batches = [torch.randint(100_000, (70_000,), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    grad = torch.ones(70_000, 32)
    mapped = []
    for i in range(12):
        opt.zero_grad()
        emb(batches[i % 2]).backward(grad)
        opt.step()
        mapped.append(_native.blocks_mapped())
    assert mapped[3] > 0
    assert mapped[6] == mapped[-1]
