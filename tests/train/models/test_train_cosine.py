"""The cosine contrastive loss, against the same formula spelled out for autograd; its scores, and its options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from bunkbed.train.models.cosine import cosine_contrastive_loss  # noqa: E402
from bunkbed.train.models.heads import make_head  # noqa: E402
from bunkbed.train.models.scorer import Scorer  # noqa: E402
from bunkbed.train.settings.config import TrainConfig  # noqa: E402

PAIRS, NEGATIVES, DIM = 6, 5, 8
SEEN = [2, 2 * NEGATIVES + 1, 2 * NEGATIVES + 2]


def rows(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def spelled_out(users: Any, items: Any, counts: Any, weights: Any, margin: float, negative_weight: float) -> Any:
    """`items[B, 1 + K, dim]`; `counts[B, K]` is 0 where a negative does not count."""
    cosines = functional.cosine_similarity(users[:, None], items, dim=-1)
    over = torch.relu(cosines[:, 1:] - margin) * counts
    return ((1 - cosines[:, 0] + negative_weight * over.mean(1)) * weights).mean()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("margin", "negative_weight"), [(-0.2, 3.0), (0.4, 50.0), (0.9, 0.0)])
def test_loss_and_gradients_are_those_of_autograd(
    shared: bool, weighted: bool, margin: float, negative_weight: float
) -> None:
    users = rows(PAIRS, DIM)
    items = rows(*((PAIRS + NEGATIVES,) if shared else (PAIRS, 1 + NEGATIVES)), DIM, seed=1)
    weights = torch.rand(PAIRS, generator=torch.Generator().manual_seed(2)) if weighted else None
    counts, own = torch.ones(PAIRS, NEGATIVES), items
    if shared:
        counts.view(-1)[SEEN] = 0
        own = torch.cat([items[:PAIRS, None], items[PAIRS:].expand(PAIRS, NEGATIVES, DIM)], 1)
    expected = spelled_out(users, own, counts, 1.0 if weights is None else weights, margin, negative_weight)
    actual = cosine_contrastive_loss(
        users,
        items,
        margin=margin,
        negative_weight=negative_weight,
        seen=torch.tensor(SEEN) if shared else None,
        pair_weights=weights,
    )
    torch.testing.assert_close(actual, expected)
    # Not 1, so that the gradient from above is seen to count.
    pairs = zip(
        torch.autograd.grad(3 * actual, (users, items)), torch.autograd.grad(3 * expected, (users, items)), strict=True
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)


def test_the_bits_do_not_depend_on_where_the_rows_stand_in_memory() -> None:
    users, items = rows(64, 24), rows(64 + 300, 24, seed=1)
    found = set()
    for offset in range(0, 16, 3):
        moved = [
            torch.cat([torch.zeros(offset), one.detach().view(-1)])[offset:].view_as(one) for one in (users, items)
        ]
        for one in moved:
            one.requires_grad_()
        loss = cosine_contrastive_loss(*moved, margin=0.1, negative_weight=20.0)
        loss.backward()
        found.add((loss.item(), *(one.grad.numpy().tobytes() for one in moved)))
    assert len(found) == 1


def test_scores_are_cosines_and_the_penalty_is_of_the_rows() -> None:
    config = TrainConfig(loss="ccl", dim=DIM, margin=0.2, negative_weight=7.0)
    head = make_head(config)
    users, items = rows(PAIRS, DIM), rows(PAIRS + NEGATIVES, DIM, seed=1)

    class Rows:
        def __init__(self, values: Any) -> None:
            self.values = values.detach().numpy()

        def lookup(self, ids: Any, *, touch: bool = True) -> Any:
            return self.values[ids]

    scorer = Scorer(Rows(users), Rows(items), head)
    expected = functional.cosine_similarity(users[:, None], items[None], dim=-1).detach()
    every, wanted = np.arange(PAIRS), np.arange(PAIRS + NEGATIVES)
    queries = scorer.queries(every)
    torch.testing.assert_close(scorer.pair_scores(queries, np.tile(wanted, (PAIRS, 1))), expected)
    out = torch.empty_like(expected)
    torch.testing.assert_close(scorer.all_scores(queries, scorer.vectors(wanted), None, out), expected)

    options: Any = {"seen": None, "bias": None, "kind": "ccl", "hardness": 0.0}
    plain, penalised = (head.loss(users, items, l2=l2, **options) for l2 in (0.0, 0.5))
    torch.testing.assert_close(plain, cosine_contrastive_loss(users, items, margin=0.2, negative_weight=7.0))
    squares = (users.square().sum() + items[:PAIRS].square().sum()) / PAIRS + items[PAIRS:].square().sum() / NEGATIVES
    torch.testing.assert_close(penalised, plain + 0.25 * squares)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"loss": "ccl", "model": "gmf"},
            ValueError,
            "loss=ccl scores by cosine: it needs model mf .* got model 'gmf'",
        ),
        ({"loss": "ccl", "bias": True}, ValueError, "loss=ccl scores by cosine: .* got bias"),
        ({"loss": "ccl", "margin": 1.0}, ValueError, "margin must be at least -1 and below 1, got 1.0"),
        ({"loss": "ccl", "margin": float("nan")}, ValueError, "margin must be at least -1 and below 1, got nan"),
        (
            {"loss": "ccl", "negative_weight": -1},
            ValueError,
            "negative_weight must be at least 0 and below inf, got -1",
        ),
        ({"loss": "ccl", "margin": "0.5"}, TypeError, "margin must be a number, got '0.5'"),
        ({"margin": 0.5}, ValueError, "margin=0.5 needs loss ccl, got loss 'bpr'"),
        ({"loss": "bce", "negative_weight": 3}, ValueError, "negative_weight=3 needs loss ccl, got loss 'bce'"),
        ({"loss": "ccl", "hardness": 1.0}, ValueError, "hardness=1.0 needs loss bpr, got loss 'ccl'"),
    ],
)
def test_bad_options(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TrainConfig(**options)
