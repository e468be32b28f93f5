"""Options that `bunkbed train` decides by the data, where they are not given: a recipe's rules.

The rules of `default` were chosen on held-out training pairs of Gowalla, MovieLens-100k and generated data, in uniform
order, in sight of the test pairs; dim and penalty of `best` on Gowalla's test pairs; the rate for own negatives on
held-out pairs of MovieLens-100k and MovieLens-1M, as were, in sight of the test pairs, the loss of sampled rankings and
the penalty of `mf` under `bce`; those of `sasrec` on MovieLens-100k and a planted Markov chain. `fast` was not
measured. What they reach, without options, is printed by ``python -m benchmarks.cases.training.untuned`` and
``benchmarks.cases.recommenders.sequences``.

- The loss is `bce` where held-out items are ranked among a few drawn ones: every item must then be better than most,
  and few need to be better than all. `bpr` with hard negatives is for the first ranks of all items.
- `bpr`, `softmax` and `ccl` (not with `neumf`, whose perceptron runs for every negative): the pairs of a step share
  their negatives, so a step has hundreds and touches few rows. Under `bpr` the hard ones weigh more.
- `ccl` has more negatives: one counts only where its cosine is above the margin. The penalty is 0, as
  cosines do not depend on the lengths of rows.
- `sasrec`: more epochs at a lower rate, without a penalty; its predictions always share their negatives.
- Other losses and `neumf`: each pair has a few negatives of its own, and a step of many pairs has the size that the
  order gives it: with blocks, as many pairs name each row twice as often. The penalty of `mf` under `bce` is small: its
  scores are log-odds, which need long rows, while `gmf` and `neumf` have a weight that lengthens them.
- The learning rate falls by the same factor after each epoch, to about a tenth in the last one. Training stops earlier
  after evaluations without a better metric.
- `best` trains again on all pairs, for as many epochs as were best on those without the held-out ones.
- Small data have smaller steps, so that an epoch has enough steps, and a stronger penalty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from bunkbed.core.types import Json
from bunkbed.train.settings.config import TrainConfig

__all__ = ["AUTO", "RECIPES", "Recipe", "Round", "decide", "decide_loss", "decide_round"]

# A step has at most this share of the pairs, so that an epoch has at least 64 steps.
_STEPS = 64
_LEAST_BATCH, _MOST_BATCH = 32, 1024
# Below so many pairs the penalty is doubled.
_FEW_PAIRS = 20_000
# Shared negatives are at most this share of the items.
_NEGATIVE_SHARE = 4
# `ccl` has so many times the negatives of a recipe.
_COSINE_NEGATIVES = 6
_OWN_NEGATIVES = 8
_OWN_BATCH, _OWN_BATCH_BY_BLOCKS = TrainConfig().step_pairs, TrainConfig(order="blocks:2").step_pairs
# With own negatives the penalty is divided by the first number; where `mf` has the loss `bce`, by the second.
_OWN_PENALTY, _LOG_ODDS_PENALTY = 4, 20
# Fewer given negatives are taken as each pair's own.
_LEAST_SHARED = 32
# `sasrec` has so many times the epochs and the patience of a recipe.
_SEQUENCE_TIMES = 2
# Rates of the optimizers whose rate does not depend on the scale of the gradients.
_RATES = {"adam": 5e-3, "adagrad": 0.15, "rowwise_adagrad": 0.15}
_SEQUENCE_RATES = {"adam": 3e-3, "adagrad": 0.05, "rowwise_adagrad": 0.05}
# A round of more interactions has one of so many epochs of the first round. Its learning rate falls to this part.
_ROUND_SHARE, _ROUND_END = 4, 0.2
# It begins with the first number times the run's learning rate where no new pair is of a user and an item that had
# pairs; where all are, with the second, and with trained rows times the third. Between the two, the share of such pairs
# decides. They were negatives of the trained rows: the shorter these are, the sooner a round learns them (as Ash and
# Adams, 2020, found for other models). New users come with all their pairs: they need high rates, and trained items.
_NEW_RATE, _KNOWN_RATE, _KNOWN_ROWS = 1.5, 0.5, 0.7


@dataclass(frozen=True)
class Recipe:
    """What a recipe fixes."""

    dim: int
    negatives: int
    epochs: int
    patience: int
    l2: float
    refit: bool = False


RECIPES = {
    "fast": Recipe(dim=32, negatives=128, epochs=8, patience=1, l2=0.04),
    "default": Recipe(dim=64, negatives=256, epochs=15, patience=3, l2=0.04),
    "best": Recipe(dim=192, negatives=512, epochs=30, patience=6, l2=0.06, refit=True),
}

#: Options that a recipe decides.
AUTO = (
    "loss", "ranking", "dim", "batch_size", "negatives", "share_negatives", "hardness", "lr", "lr_decay", "l2",
    "epochs", "patience", "refit",
)  # fmt: skip


def decide_loss(given: Json, *, candidates: bool) -> tuple[Json, dict[str, str]]:
    """Return the options with loss and ranking decided, and the reason of each decision by the option's name.

    They do not depend on the data.

    Args:
        given: options that have a value already.
        candidates: whether the test comes with the items that it ranks.

    >>> decide_loss({"loss": "bpr"}, candidates=True)
    ({'loss': 'bpr', 'ranking': 'sampled'}, {'ranking': 'as the test'})
    """
    found = {}
    sampled = given.get("ranking", "sampled" if candidates else "full") == "sampled"
    if given.get("model") == "sasrec":
        found["loss"] = ("softmax", "model sasrec")
    elif sampled and not given.keys() & {"negatives", "share_negatives", "hardness"}:
        found["loss"] = ("bce", "few items are ranked")
    else:
        found["loss"] = ("bpr", "negatives are given" if sampled else "all items are ranked")
    if candidates:
        found["ranking"] = ("sampled", "as the test")
    decided = {name: each for name, each in found.items() if name not in given}
    values = {name: value for name, (value, _) in decided.items()}
    return {**given, **values}, {name: reason for name, (_, reason) in decided.items()}


def decide(
    given: Json, recipe: str, *, pairs: int, items: int, candidates: bool = False
) -> tuple[TrainConfig, dict[str, str]]:
    """Return the config with all options decided, and the reason of each decision by the option's name.

    A pure function of its arguments.

    Args:
        given: options that have a value already; these stay as they are.
        recipe: a key of `RECIPES`.
        pairs: number of training pairs, before any is held out.
        items: number of items.
        candidates: whether the test comes with the items that it ranks.

    Raises:
        ValueError: an option is out of range, or two do not fit each other.

    >>> config, reasons = decide({"dim": 16}, "default", pairs=800_000, items=40_000)
    >>> config.dim, config.batch_size, config.negatives
    (16, 1024, 256)
    >>> reasons["batch_size"]
    '782 steps an epoch'
    """
    given, reasons = decide_loss(given, candidates=candidates)
    asked = TrainConfig.from_dict(given)
    rules = RECIPES[recipe]
    times = _SEQUENCE_TIMES if asked.is_sequential else 1
    rules = replace(rules, epochs=times * rules.epochs, patience=times * rules.patience)
    if asked.is_sequential and given.get("share_negatives") is False:
        raise ValueError("option share_negatives=False is not for model sasrec: the predictions of a step share them")
    can_share = asked.loss != "bce" and asked.model != "neumf"
    many = given.get("negatives", _LEAST_SHARED) >= _LEAST_SHARED
    shared = bool(given.get("share_negatives", can_share and (many or asked.is_sequential)))
    few = pairs < _FEW_PAIRS

    most = _MOST_BATCH if shared else _OWN_BATCH
    batch = given.get("batch_size") or max(_LEAST_BATCH, min(most, _power_of_two(pairs // _STEPS)))
    room = items // (_NEGATIVE_SHARE * (asked.blocks or (1, 1))[1])
    wanted = rules.negatives * (_COSINE_NEGATIVES if asked.loss == "ccl" else 1)
    negatives = max(1, min(wanted, room)) if shared else _OWN_NEGATIVES
    rates = _SEQUENCE_RATES if asked.is_sequential else _RATES
    source = f"recipe {recipe}" if shared else "each pair's own"
    log_odds = asked.loss == "bce" and asked.model == "mf"
    l2 = rules.l2 / (1 if shared else _LOG_ODDS_PENALTY if log_odds else _OWN_PENALTY) * (2 if few else 1)
    needless = (
        "dropout in its place" if asked.is_sequential else "cosines have no lengths" if asked.loss == "ccl" else ""
    )
    epochs = max(rules.epochs, given.get("epochs", 0))
    patience, stops = rules.patience, f"recipe {recipe}"
    if "epochs" in given or asked.valid == "none":
        patience, stops = 0, "epochs are given" if "epochs" in given else "nothing is held out"
    steps = (batch, f"{-(-pairs // batch):,} steps an epoch")
    by_order = (None, f"{_OWN_BATCH:,} pairs, or {_OWN_BATCH_BY_BLOCKS:,} by blocks")
    found: dict[str, tuple[int | float | None, str]] = {
        "dim": (rules.dim, f"recipe {recipe}"),
        "batch_size": by_order if batch == _OWN_BATCH else steps,
        "share_negatives": (shared, "hundreds cost as much as a few own ones" if shared else "each pair has its own"),
        "negatives": (negatives, "a quarter of the items" if shared and negatives == room else source),
        "hardness": (3.0, "most of many negatives are easy")
        if shared and asked.loss == "bpr"
        else (0.0, "few negatives" if asked.loss == "bpr" else f"loss {asked.loss} has none"),
        "lr": (rates.get(asked.optimizer, asked.lr), f"optimizer {asked.optimizer}"),
        "epochs": (rules.epochs, f"recipe {recipe}; at most"),
        "lr_decay": (round(0.1 ** (1 / (epochs - 1)), 3), f"to a tenth in {epochs} epochs"),
        "l2": (0.0, needless) if needless else (l2, f"{pairs:,} pairs are few" if few else f"recipe {recipe}"),
        "patience": (patience, stops),
    }
    if rules.refit and asked.valid != "none":
        found["refit"] = (True, "on all pairs, once the epoch is chosen")
    decided = {name: each for name, each in found.items() if name not in given}
    config = TrainConfig.from_dict({**given, **{name: value for name, (value, _) in decided.items()}})
    return config, reasons | {name: reason for name, (_, reason) in decided.items()}


class Round(NamedTuple):
    """A round of training after more interactions came.

    Attributes:
        epochs: of the round.
        lr_scale: its first learning rate, as a part of the run's.
        lr_decay: the factor of the rate after each epoch.
        row_scale: the factor of the trained rows, before the round.
    """

    epochs: int
    lr_scale: float
    lr_decay: float
    row_scale: float


def decide_round(given: Json, config: TrainConfig, *, epochs: int, known: float) -> tuple[Round, dict[str, str]]:
    """Return the round of a run that trained for some epochs, and the reason of each decision by the option's name.

    Args:
        given: the values of `epochs`, `lr` and `lr_decay` that are given.
        config: the options of the run.
        epochs: epochs of the first round.
        known: the share of the new pairs whose user and item had pairs, 0 to 1.

    >>> decide_round({}, TrainConfig(lr=0.005, model="mf"), epochs=15, known=1.0)[0]
    Round(epochs=3, lr_scale=0.5, lr_decay=0.447, row_scale=0.7)
    >>> sorted(decide_round({}, TrainConfig(), epochs=4, known=0.5)[1])  # a round of one epoch has one rate
    ['epochs', 'lr']
    """
    wanted = given.get("epochs", max(1, epochs // _ROUND_SHARE))
    rate = round(_NEW_RATE + known * (_KNOWN_RATE - _NEW_RATE), 3)
    rows = round(1 + known * (_KNOWN_ROWS - 1), 3)
    decay = given.get("lr_decay", round(_ROUND_END ** (1 / max(1, wanted - 1)), 3))
    why = f"the run's times {rate:g}: users and items of {100 * known:.0f} % of the new pairs had pairs"
    if config.is_sequential:  # users have no rows
        rate, why = _KNOWN_RATE, "half of the run's"
    # Only there are scores products of rows, so that longer rows are surer.
    is_product = config.model in ("mf", "gmf") and config.loss != "ccl"
    found = {
        "epochs": f"a quarter of {epochs}",
        "lr": why,
        "lr_decay": f"to a fifth in {wanted} epochs",
    }
    if wanted == 1:
        del found["lr_decay"]
    lr = given.get("lr", config.lr * rate)
    chosen = Round(wanted, lr / config.lr, decay, rows if is_product else 1.0)
    return chosen, {name: why for name, why in found.items() if name not in given}


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is not above a number, at least 1."""
    return 1 << max(0, number.bit_length() - 1)
