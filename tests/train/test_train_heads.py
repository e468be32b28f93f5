"""The loss of every head, against the same scores one by one and torch's own losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

import bunkbed as bb  # noqa: E402
from bunkbed.train.models.heads import make_head  # noqa: E402
from bunkbed.train.models.recommender import Recommender, create_tables  # noqa: E402
from bunkbed.train.settings.config import TrainConfig  # noqa: E402

USERS, NEGATIVES = 5, 4
MODELS = pytest.mark.parametrize("model", ["mf", "gmf", "neumf", "two-tower"])


def scores_one_by_one(head: Any, users: Any, items: Any) -> Any:
    """``[B, dim]`` and ``[B, K, dim]`` -> ``[B, K]``."""
    rows = [
        torch.stack([head.pair_scores(head.queries(user[None]), head.vectors(item[None, None]))[0, 0] for item in own])
        for user, own in zip(users, items, strict=True)
    ]
    return torch.stack(rows)


@MODELS
@pytest.mark.parametrize("kind", ["bpr", "bce", "softmax"])
@pytest.mark.parametrize("shared", [False, True])
def test_the_loss_is_that_of_the_scores_with_its_gradients(model: str, kind: str, shared: bool) -> None:
    config = TrainConfig(model=model, dim=4, layers="6,5" if model in ("neumf", "two-tower") else "", seed=1)
    head, dim, generator = make_head(config), config.row_dim, torch.Generator().manual_seed(0)
    users = torch.randn(USERS, dim, generator=generator).requires_grad_()
    shape = (USERS + NEGATIVES,) if shared else (USERS, 1 + NEGATIVES)
    items = torch.randn(*shape, dim, generator=generator).requires_grad_()
    bias = torch.randn(*shape, generator=generator).requires_grad_()
    seen = torch.tensor([2, 2 * NEGATIVES + 1]) if shared else None

    def own(values: Any) -> Any:
        """Shared negatives as each user's own."""
        if not shared:
            return values
        negatives = values[USERS:].expand(USERS, *values[USERS:].shape)
        return torch.cat([values[:USERS, None], negatives], 1)

    scores = scores_one_by_one(head, users, own(items)) + own(bias)
    competing = torch.ones(USERS, NEGATIVES, dtype=torch.bool)
    if seen is not None:
        competing.view(-1)[seen] = False
    positive, negative = scores[:, 0], scores[:, 1:].masked_fill(~competing, -torch.inf)
    if kind == "softmax":
        every = torch.cat([positive[:, None], negative], 1)
        expected = functional.cross_entropy(every, torch.zeros(USERS, dtype=torch.int64))
    elif kind == "bpr":
        expected = functional.softplus(negative - positive[:, None]).sum() / (USERS * NEGATIVES)
    else:
        expected = (functional.softplus(-positive).sum() + functional.softplus(negative).sum()) / scores.numel()
    squares = users.square().sum() + own(items)[:, 0].square().sum() + own(items)[:, 1:].square().sum() / NEGATIVES
    expected = expected + 0.3 / 2 * squares / USERS

    loss = head.loss(users, items, seen=seen, bias=bias, kind=kind, l2=0.3, hardness=0.0)
    torch.testing.assert_close(loss, expected)
    leaves = [users, items, bias, *head.parameters()]
    for ours, theirs in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@MODELS
@pytest.mark.parametrize("bias", [False, True])
def test_how_likely_items_were_is_taken_off_their_scores(tmp_path: Path, model: str, bias: bool) -> None:
    config = TrainConfig(model=model, loss="softmax", dim=4, bias=bias)
    rng = np.random.default_rng(0)
    with bb.Run(tmp_path / "run", ram="8MiB") as run:
        recommender = Recommender(config, create_tables(run, config, 20, 30))
        if bias:
            run.tables["item_bias"].set(np.arange(30), rng.normal(size=(30, 1)).astype(np.float32))
        users, items = torch.arange(6), torch.from_numpy(rng.integers(0, 30, (6, 5)))
        log_q = torch.from_numpy(rng.normal(size=(6, 5)).astype(np.float32))
        with torch.no_grad():
            rows = recommender.user(users), recommender.item(items)
            scores = recommender.head.pair_scores(recommender.head.queries(rows[0]), recommender.head.vectors(rows[1]))
            if bias:
                scores = scores + recommender.item_bias(items)[..., 0]
            expected = functional.cross_entropy(scores - log_q, torch.zeros(6, dtype=torch.int64))
            torch.testing.assert_close(recommender(users, items, None, log_q), expected)
        del recommender


def test_a_head_is_a_function_of_the_seed_alone() -> None:
    config = TrainConfig(model="neumf", dim=4, seed=5)
    state = torch.random.get_rng_state()
    one = make_head(config).state_dict()
    assert torch.equal(torch.random.get_rng_state(), state), "the program's own random numbers moved"
    torch.rand(3)
    other, third = make_head(config).state_dict(), make_head(TrainConfig(model="neumf", dim=4, seed=6)).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not all(torch.equal(one[name], third[name]) for name in one)
