"""The closed-form loss against the same thing spelled out for autograd."""

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from bunkbed.train.losses import pair_loss  # noqa: E402


def spelled_out(users, items, weight, bias, kind, l2):
    scores = (users[:, None] * (1 if weight is None else weight) * items).sum(-1)
    if bias is not None:
        scores = scores + bias
    positive, negative = scores[:, :1], scores[:, 1:]
    if kind == "bpr":
        loss = functional.softplus(negative - positive).mean()
    else:
        labels = torch.zeros_like(scores)
        labels[:, 0] = 1
        loss = functional.binary_cross_entropy_with_logits(scores, labels)
    squares = users.square().sum() + items[:, 0].square().sum()
    squares = squares + items[:, 1:].square().sum() / (items.shape[1] - 1)
    return loss + l2 / 2 * squares / len(users)


@pytest.mark.parametrize("kind", ["bpr", "bce"])
@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("l2", [0.0, 0.3])
@pytest.mark.parametrize("negatives", [1, 4])
def test_loss_and_gradients_are_those_of_autograd(kind, with_weight, with_bias, l2, negatives):
    generator = torch.Generator().manual_seed(3)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    users, items = leaf(6, 8), leaf(6, 1 + negatives, 8)
    weight = leaf(8) if with_weight else None
    bias = leaf(6, 1 + negatives) if with_bias else None
    leaves = [x for x in (users, items, weight, bias) if x is not None]
    expected = spelled_out(users, items, weight, bias, kind, l2)
    actual = pair_loss(users, items, kind=kind, weight=weight, bias=bias, l2=l2)
    torch.testing.assert_close(actual, expected)
    # Not 1, so that the gradient from above is seen to count.
    for ours, theirs in zip(
        torch.autograd.grad(3 * actual, leaves), torch.autograd.grad(3 * expected, leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


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


def test_scores_far_apart_neither_overflow_nor_vanish():
    users = torch.tensor([[1.0], [1.0]]).requires_grad_()
    items = torch.tensor([[[500.0], [-500.0]], [[-500.0], [500.0]]])
    loss = pair_loss(users, items, kind="bpr")
    assert loss.item() == 500.0
    (grad,) = torch.autograd.grad(loss, users)
    assert grad.tolist() == [[0.0], [500.0]]
