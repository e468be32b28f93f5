"""The closed-form loss against the same thing spelled out for autograd."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from bunkbed import _native  # noqa: E402
from bunkbed.train.models import losses, plain_losses  # noqa: E402
from bunkbed.train.models.losses import pair_loss, shared_loss  # noqa: E402


def spelled_out(users, items, weight, bias, kind, l2, hardness=0.0, counts=None):
    """`counts[B, K]` is 0 where a negative does not compete."""
    scores = (users[:, None] * (1 if weight is None else weight) * items).sum(-1)
    if bias is not None:
        scores = scores + bias
    positive, negative = scores[:, :1], scores[:, 1:]
    counts = torch.ones_like(negative) if counts is None else counts
    if kind == "bpr":
        shares = counts / negative.shape[1]
        if hardness:
            shares = torch.softmax((hardness * negative.detach()).masked_fill(counts == 0, -torch.inf), 1)
        loss = (functional.softplus(negative - positive) * shares).sum(1).mean()
    elif kind == "softmax":
        competing = torch.cat([positive, negative.masked_fill(counts == 0, -torch.inf)], 1)
        loss = functional.cross_entropy(competing, torch.zeros(len(users), dtype=torch.int64))
    else:
        labels = torch.zeros_like(scores)
        labels[:, 0] = 1
        every = functional.binary_cross_entropy_with_logits(scores, labels, reduction="none")
        loss = torch.cat([every[:, :1], every[:, 1:] * counts], 1).mean()
    squares = users.square().sum() + items[:, 0].square().sum()
    squares = squares + items[:, 1:].square().sum() / (items.shape[1] - 1)
    return loss + l2 / 2 * squares / len(users)


def assert_same_gradients(actual, expected, leaves):
    torch.testing.assert_close(actual, expected)
    # Not 1, so that the gradient from above is seen to count.
    for ours, theirs in zip(
        torch.autograd.grad(3 * actual, leaves), torch.autograd.grad(3 * expected, leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def leaves_of(*shapes):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*s, generator=generator).requires_grad_() for s in shapes]


@pytest.mark.parametrize(("kind", "hardness"), [("bpr", 0.0), ("bpr", 0.7), ("bce", 0.0), ("softmax", 0.0)])
@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("l2", [0.0, 0.3])
@pytest.mark.parametrize("negatives", [1, 4])
def test_loss_and_gradients_are_those_of_autograd(kind, hardness, with_weight, with_bias, l2, negatives):
    users, items, weight, bias = leaves_of((6, 8), (6, 1 + negatives, 8), (8,), (6, 1 + negatives))
    weight, bias = weight if with_weight else None, bias if with_bias else None
    expected = spelled_out(users, items, weight, bias, kind, l2, hardness)
    actual = pair_loss(users, items, kind=kind, weight=weight, bias=bias, l2=l2, hardness=hardness)
    assert_same_gradients(actual, expected, [x for x in (users, items, weight, bias) if x is not None])


@pytest.mark.parametrize(("kind", "hardness"), [("bpr", 0.0), ("bpr", 0.7), ("bce", 0.0), ("softmax", 0.0)])
@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("l2", [0.0, 0.3])
@pytest.mark.parametrize("with_seen", [False, True])
def test_shared_negatives_are_own_negatives_that_are_alike(kind, hardness, with_weight, with_bias, l2, with_seen):
    users, items, weight, bias = leaves_of((6, 8), (6 + 5, 8), (8,), (6 + 5,))
    weight, bias = weight if with_weight else None, bias if with_bias else None

    def own(x):
        return torch.cat([x[:6, None], x[6:].expand(6, *x[6:].shape)], 1)

    seen, counts = None, torch.ones(6, 5)
    if with_seen:
        seen = torch.tensor([0 * 5 + 4, 2 * 5 + 0, 2 * 5 + 1])
        counts.view(-1)[seen] = 0
    expected = spelled_out(users, own(items), weight, None if bias is None else own(bias), kind, l2, hardness, counts)
    actual = shared_loss(users, items, kind=kind, seen=seen, weight=weight, bias=bias, l2=l2, hardness=hardness)
    assert_same_gradients(actual, expected, [x for x in (users, items, weight, bias) if x is not None])


def test_the_bits_do_not_depend_on_where_the_rows_stand_in_memory():
    users, items = torch.randn(512, 64), torch.randn(512, 9, 64)

    def run(offset):
        buffer = torch.empty(items.numel() + offset)[offset:].view_as(items).copy_(items)
        moved = buffer.requires_grad_()
        own = users.clone().requires_grad_()
        loss = pair_loss(own, moved, kind="bpr", l2=0.01)
        return loss, *torch.autograd.grad(loss, [own, moved])

    expected = run(0)
    for offset in range(1, 16):
        assert all(torch.equal(a, b) for a, b in zip(run(offset), expected, strict=True))


def test_the_bits_of_the_shared_loss_do_not_depend_on_where_the_rows_stand_in_memory():
    users, items = torch.randn(512, 64), torch.randn(512 + 100, 64)

    def run(offset):
        moved = [torch.empty(x.numel() + offset)[offset:].view_as(x).copy_(x).requires_grad_() for x in (users, items)]
        loss = shared_loss(*moved, kind="bpr", l2=0.01, hardness=1.0)
        return loss, *torch.autograd.grad(loss, moved)

    expected = run(0)
    for offset in range(1, 16):
        assert all(torch.equal(a, b) for a, b in zip(run(offset), expected, strict=True))


def test_scores_far_apart_neither_overflow_nor_vanish():
    users = torch.tensor([[1.0], [1.0]]).requires_grad_()
    items = torch.tensor([[[500.0], [-500.0]], [[-500.0], [500.0]]])
    loss = pair_loss(users, items, kind="bpr")
    assert loss.item() == 500.0
    (grad,) = torch.autograd.grad(loss, users)
    assert grad.tolist() == [[0.0], [500.0]]


@pytest.mark.parametrize("hardness", [0.0, 2.0])
def test_a_user_who_has_every_negative_adds_nothing(hardness):
    users, items = leaves_of((2, 8), (2 + 3, 8))
    alone = shared_loss(
        users[:1], torch.cat([items[:1], items[2:]]), kind="bpr", seen=torch.tensor([1]), hardness=hardness
    )
    both = shared_loss(users, items, kind="bpr", seen=torch.tensor([1, 3, 4, 5]), hardness=hardness)
    torch.testing.assert_close(2 * both, alone)  # a mean over two users
    user_grads, item_grads = torch.autograd.grad(both, (users, items))
    assert (user_grads[1] == 0).all() and (item_grads[1] == 0).all() and (user_grads[0] != 0).any()


@pytest.mark.parametrize(("kind", "hardness"), [("bpr", 0.0), ("bpr", 0.7), ("bce", 0.0), ("softmax", 0.0)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("module", [losses, plain_losses])
def test_a_weight_multiplies_the_loss_of_its_pair(kind, hardness, shared, module):
    pair_weights = torch.tensor([1.0, 0.0, 2.5, 0.5, 1.0, 3.0])
    users, items = leaves_of((6, 8), (6 + 5, 8) if shared else (6, 5, 8))
    bias = torch.randn(items.shape[:-1], generator=torch.Generator().manual_seed(4))
    options = {"kind": kind, "hardness": hardness, "weight": None}

    def loss(at, l2=0.0, **more):
        if not shared:
            return module.pair_loss(users[at], items[at], bias=bias[at], l2=l2, **options, **more)
        of = torch.cat([torch.arange(6)[at], torch.arange(6, 11)])
        seen = torch.tensor([4, 12, 13]) if at == slice(None) else None
        return module.shared_loss(users[at], items[of], bias=bias[of], seen=seen, l2=l2, **options, **more)

    def alone(at):
        if not shared:
            return loss(slice(at, at + 1))
        seen = {0: torch.tensor([4]), 2: torch.tensor([2, 3])}.get(at)
        of = torch.tensor([at, *range(6, 11)])
        return module.shared_loss(users[at : at + 1], items[of], bias=bias[of], seen=seen, l2=0.0, **options)

    expected = sum(pair_weights[at] * alone(at) for at in range(6)) / 6
    assert_same_gradients(loss(slice(None), pair_weights=pair_weights), expected, (users, items))
    # The penalty has no weights.
    penalty = [
        loss(slice(None), 0.3, **more) - loss(slice(None), **more) for more in ({}, {"pair_weights": pair_weights})
    ]
    assert_same_gradients(penalty[1], penalty[0], (users, items))
    # Ones are no weights.
    torch.testing.assert_close(loss(slice(None), pair_weights=torch.ones(6)), loss(slice(None)))


def test_weights_of_other_pairs_are_refused():
    scores = [np.zeros(shape, np.float32) for shape in (2, (2, 3), 3)]
    with pytest.raises(ValueError, match="3 weights, but negative has 2 rows"):
        _native.bpr_slopes(scores[0], scores[1], 0.0, scores[2])
