"""Rows of users that a run has not seen, from their histories: steps on these rows alone, with items and head fixed.
Where users have features, a new user has the one that all share, and it is fixed, too.

The steps are those of the training: its loss, negatives, optimizer, learning rates and number of epochs. A batch has so
many pairs that a user has as many in it as in a batch of the training, and a pair has the weight that it has there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import bunkbed as bb
from bunkbed.core.init import Normal
from bunkbed.train.data.interactions import Interactions
from bunkbed.train.data.sampling import BatchSource, SeenPairs
from bunkbed.train.features.features import table_of
from bunkbed.train.models.featured import FeaturedRows, Rows, features_of_run, rows_of_run
from bunkbed.train.models.scorer import Scorer, head_of_run
from bunkbed.train.settings.config import TrainConfig

if TYPE_CHECKING:
    from bunkbed.run.run import Run

__all__ = ["scorer_of_new_users"]


def scorer_of_new_users(run: Run, config: TrainConfig, histories: Interactions, trained: Interactions) -> Scorer:
    """Train rows for new users, in RAM, and return their `Scorer`; a pure function of the arguments.

    Args:
        run: open at the commit whose items are used.
        histories: the pairs of the new users, at least one; items as in the run.
        trained: the training pairs, whose items say how popular each is.
    """
    head = head_of_run(run, config)
    head.requires_grad_(False)
    features = features_of_run(run)
    items, biases = rows_of_run(run, "item", features), run.table("item_bias") if config.bias else None
    num_users = run.table("user").num_rows
    assert num_users is not None
    rows = bb.create(
        None,
        dim=config.row_dim,
        num_rows=histories.num_users,
        optimizer=config.table_optimizer(),
        init=Normal(std=config.init_std),
        seed=2 * config.seed,
    )
    users: Rows = rows
    if "user" in features:
        users = FeaturedRows(rows, run.table(table_of("user")), features["user"].of_new(histories.num_users))
    source = BatchSource(
        histories,
        batch_size=max(1, round(config.step_pairs * histories.num_users / num_users)),
        negatives=config.negatives,
        shared=config.share_negatives,
        popular=config.sampling == "popularity",
        log_q=config.loss == "softmax",
        seed=config.seed,
        seen=SeenPairs(histories.users, histories.items, histories.num_items) if config.reject_seen else None,
        counted=trained,
        drawn=features["item"].with_row if "item" in features else None,
    )
    for epoch in range(1, int(run.meta["progress"]["epoch"]) + 1):
        rows.optimizer = config.table_optimizer(config.lr_at(epoch))
        for step in range(source.steps(epoch)):
            batch = source.batch(epoch, step)
            of_users = torch.from_numpy(users.lookup(batch.users)).requires_grad_()
            bias = None if biases is None else torch.from_numpy(biases.lookup(batch.items)[..., 0])
            if batch.log_q is not None:
                log_q = torch.from_numpy(batch.log_q)
                bias = -log_q if bias is None else bias - log_q
            loss = head.loss(
                of_users,
                torch.from_numpy(items.lookup(batch.items)),
                seen=None if batch.seen is None else torch.from_numpy(batch.seen),
                bias=bias,
                kind=config.loss,
                l2=config.l2,
                hardness=config.hardness,
            )
            (gradient,) = torch.autograd.grad(loss * (len(batch.users) / config.step_pairs), of_users)
            rows.update(batch.users, gradient.numpy())
    return Scorer(users, items, head, item_bias=biases)
