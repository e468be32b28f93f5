"""Holding pairs out of training: leave one out, or a fraction of every user's pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bunkbed.train.data.interactions import Interactions
from bunkbed.train.data.sampling import STREAM_SPLIT, random_order
from bunkbed.train.settings.config import TrainConfig

__all__ = ["Split", "split"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Split:
    """Training pairs, and held-out pairs (None if no pairs are held out)."""

    train: Interactions
    valid: Interactions | None


def split(interactions: Interactions, config: TrainConfig) -> Split:
    """Hold out pairs as `config.valid` says: a pure function of the pairs, `valid` and `seed`.

    A user with one pair keeps it for training. A fraction is rounded to the nearest number of a user's pairs, but one
    pair always remains for training.

    Raises:
        ValueError: no user has two pairs, or no user has enough pairs for the fraction.
    """
    if config.valid == "none":
        return Split(interactions, None)
    users = interactions.users
    if config.valid == "last":
        place = np.arange(len(users), dtype=np.int64)
    else:
        place = np.empty(len(users), dtype=np.int64)
        place[random_order(config.seed, STREAM_SPLIT, 0, len(users))] = np.arange(len(users))
    order = np.lexsort((place, users))  # by user, with the pairs to hold out last
    counts = np.bincount(users, minlength=interactions.num_users)
    ends = np.cumsum(counts)
    if config.valid_fraction is None:
        held = np.minimum(1, np.maximum(counts - 1, 0))
    else:
        wanted = np.rint(counts * config.valid_fraction).astype(np.int64)
        held = np.minimum(wanted, np.maximum(counts - 1, 0))
    is_held = np.zeros(len(users), dtype=bool)
    sorted_users = users[order]
    is_held[order] = np.arange(len(users)) >= (ends - held)[sorted_users]
    if not is_held.any():
        raise ValueError(
            f"option valid={config.valid!r} holds nothing out: no user of "
            f"{interactions.source or 'the data'} has enough pairs; use --valid none"
        )
    keep = ~is_held
    return Split(
        interactions.replace(users[keep], interactions.items[keep]),
        interactions.replace(users[is_held], interactions.items[is_held]),
    )
