"""Every option of a training run, with its default and its valid values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from bunkbed.core.budget import parse_bytes
from bunkbed.core.optim import SGD, Adagrad, Adam, Optimizer, RowwiseAdagrad
from bunkbed.core.types import Json
from bunkbed.train.settings.option import EVALUATION, LEARNING, MEMORY, MODEL, RUN, Option, option, option_of

__all__ = ["OPTIMIZERS", "TrainConfig", "check_split", "first_share", "num_first"]

OPTIMIZERS: dict[str, type[Adam | Adagrad | RowwiseAdagrad | SGD]] = {
    "adam": Adam,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowwiseAdagrad,
    "sgd": SGD,
}

# With streaming, 1 / _DATA_SHARE of the budget is for sorting, the rest for the tables.
_DATA_SHARE = 4
_STEP_PAIRS, _STEP_PAIRS_OF_BLOCKS = 4096, 2048
_ORDER = re.compile(r"auto|uniform|blocks(?::([1-9][0-9]*)(?:x([1-9][0-9]*))?)?")
_DEVICE = re.compile(r"[a-z]+(?::[0-9]+)?")
_METRIC = re.compile(r"(?:hr|ndcg|recall)@[1-9][0-9]*|mrr")
_BY_TIME = "time:"


def first_share(name: str, value: str) -> float | None:
    """Return the share of an option such as ``"time:0.9"``, or None if it is another word.

    Raises:
        ValueError: the share is not between 0 and 1.

    >>> first_share("split", "time:0.9"), first_share("split", "last")
    (0.9, None)
    """
    if not isinstance(value, str) or not value.startswith(_BY_TIME):
        return None
    try:
        share = float(value.removeprefix(_BY_TIME))
    except ValueError:
        share = math.nan
    if not 0 < share < 1:
        raise ValueError(f"option {name} must have a share between 0 and 1 after {_BY_TIME} such as 0.9, got {value!r}")
    return share


def num_first(count: int, share: float) -> int:
    """Return the nearest number of pairs to a share of `count`, but at least 1."""
    return max(1, round(count * share))


def check_split(split: str) -> None:
    """Raise `ValueError` for another value of the option than last, random and a share of the time."""
    if split not in ("last", "random") and first_share("split", split) is None:
        raise ValueError(f"option split must be last, random or a share of the time such as time:0.9, got {split!r}")


def _whole_numbers(name: str, text: str, *, such_as: str) -> tuple[int, ...]:
    """Return the numbers of an option that is a list, each at least 1."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except (AttributeError, ValueError):
        raise ValueError(
            f'option {name} must be whole numbers between commas such as "{such_as}", got {text!r}'
        ) from None
    if min(numbers) < 1:
        raise ValueError(f"option {name} must be at least 1, got {min(numbers)}")
    return numbers


@dataclass(frozen=True)
class TrainConfig:
    """Options of one training run; each is a flag of ``bunkbed train`` and a key of its YAML file.

    Two runs that differ only in `ram`, `stream`, `device_cache`, `lookahead` and `window` (with equal data, machine and
    library versions) end with equal rows and losses, bit for bit, if their `order` is equal: ``"auto"`` depends on
    `ram`.

    Args:
        model: ``"mf"``: score = <user, item>; ``"gmf"``: sum of w * user * item with a dense w (He et al.
            2017, without its sigmoid, which keeps every ranking); ``"neumf"``: gmf plus a perceptron over a second part
            of the rows (same paper); ``"two-tower"``: <tower(user), tower(item)>, two perceptrons (Yi et al. 2019);
            ``"sasrec"``: <what two blocks of causal self-attention make of the user's last items, item> (Kang and
            McAuley 2018), for the next item of each user. Only items have rows. It needs ``loss="softmax"``, has no
            `bias`, always has `share_negatives`, and holds out the ``"last"`` pairs, not random ones.
        length: of a user's pairs, the last ones that its score depends on, and the most that are predicted together in
            training; None: 50. For ``model="sasrec"``.
        dropout: share of the numbers that each step drops from the inputs and the blocks; None: 0.2. For
            ``model="sasrec"``.
        layers: widths of a perceptron's hidden layers, such as ``"64,32,16"``; empty: for neumf dim, dim / 2 and
            dim / 4, for two-tower 2 * dim. The other models have none.
        loss: ``"bpr"``: mean of softplus(negative - positive); ``"bce"``: mean binary cross-entropy of one
            positive and its negatives; ``"softmax"``: cross-entropy of the positive among itself and its negatives;
            ``"ccl"``: cosine contrastive, 1 - cos(user, item) + `negative_weight` * mean of max(0, cos(user, negative)
            - `margin`) (Mao et al. 2021). Its score is the cosine; for ``model="mf"`` without a bias.
        dim: weights per row; rows of neumf have twice as many, one half for each part.
        ram: bytes, or a string such as ``"256MiB"``: one budget for all tables.
        stream: keep the interactions on disk, for more interactions than RAM holds: labels, splits, seen items and the
            order of every epoch. A quarter of `ram` (but at least 64 MiB) is then for sorting, the rest for the tables.
            Evaluations then need `eval_users`, also after the training.
        order: the order of the pairs in an epoch. ``"uniform"``: random. ``"blocks:PxQ"``: users in P and items in Q
            blocks, regrouped in every epoch (`bunkbed.BlockOrder`); the pairs of one user block and one item block
            together, one block changes at a time, and negatives are items of the resident block. ``"blocks:P"``:
            P blocks of both. ``"blocks"``: as few as the tables' RAM allows. ``"auto"``: uniform if the RAM holds every
            row, otherwise blocks. The last two are decided once, when the run is created; the run stores the decision.
        optimizer: of the tables; dense weights always have Adam.
        dtype: of the stored weights: ``"float32"``, or ``"bfloat16"`` or ``"float16"``, rounded stochastically (by
            seed, so that equal runs stay equal); sums and optimizer state are float32 in any case.
        lr: learning rate.
        lr_decay: the learning rate is multiplied by this after each epoch.
        l2: adds l2 / 2 * (|user|^2 + |item|^2 + mean |negative|^2), averaged over the batch, to the loss. It
            applies only to rows of the batch, once per occurrence.
        bias: an item bias, kept as a third table of dim 1.
        epochs: passes over the training pairs.
        batch_size: positive pairs a step. None: 4,096, or 2,048 in an order by blocks. There a step has about twice as
            many pairs of each row that it trains, and the row has half as many steps of the optimizer. (``bunkbed
            train`` decides this and other options by the data: `bunkbed.train.settings.auto`.)
        negatives: items sampled for each positive pair, again in every epoch.
        sampling: ``"uniform"``, or ``"popularity"``: in proportion to 1 + the item's training pairs; shared negatives
            are then this many draws, without duplicates. For ``loss="softmax"`` log q is subtracted from every score,
            where q is the probability that an item is drawn. So the loss still approximates that of all items (Bengio
            and Senecal 2008; Yi et al. 2019). Uniform negatives need no correction.
        share_negatives: one set of negatives for all pairs of a step, instead of a set for each pair. A step then
            touches far fewer rows, which matters when rows come from disk, and can use hundreds of negatives.
        hardness: weighs the negatives of a pair by softmax(hardness * score), so that negatives with high scores
            weigh most (Sun et al. 2019, eq. 5); 0 gives equal weights. For ``loss="bpr"``.
        margin: cosine above which a negative counts, at least -1 and below 1; None: 0.6. For ``loss="ccl"``.
        negative_weight: weight of the negatives' mean; None: 100. For ``loss="ccl"``.
        reject_seen: never sample an item that the user has in training (unless the user has every item).
        split: which pairs of the file are the test, as the data were read
            (`bunkbed.train.data.interactions.read_dataset`): ``"last"``: of each user the last one; ``"time:0.9"``: all
            after the first 90 %; ``"random"``: none, the figures are those of `valid`.
        valid: held out of the pairs for training. ``"random"`` or ``"last"``: one pair of every user who has two or
            more; a fraction such as ``"0.1"`` of every user's pairs; ``"time:0.9"``: all after the first 90 %;
            ``"none"``: train on everything, evaluate nothing. Last and first in the order of the pairs: by time if they
            were read with times, otherwise by file. Empty: as `split`, but ``"last"`` for ``model="sasrec"``. With
            that model, and with another split than ``"random"``, a random pair or a fraction is an error: training
            would see what comes after the held-out pairs.
        refit: after the best epoch is chosen, train again, from new rows and for as many epochs, on all pairs, also on
            those that were held out (`bunkbed.train.refit`). The second training is then the run's; until its end the
            first one is. It needs the disk of both. For ``bunkbed train``; a `Trainer` does not look at it.
        patience: stop after this many evaluations without a better `metric`; 0 never stops early.
        metric: selects the best epoch: ``"hr@k"``, ``"ndcg@k"``, ``"recall@k"``, ``"mrr"``.
        ks: cut-offs of the reported metrics, such as ``"10,20"``.
        ranking: of the validation: ``"full"`` against every item that the user does not have in training, or
            ``"sampled"`` against `eval_negatives` such items.
        eval_negatives: number of items that compete with a held-out item in sampled ranking.
        eval_every: epochs between evaluations.
        eval_users: users of an evaluation during training, drawn by seed: the same ones in every evaluation; 0: all.
            The evaluation at the end of ``bunkbed train`` and ``bunkbed eval`` use all users, except with `stream`.
        commit_every: epochs between commits. The best epoch is always committed.
        init_std: standard deviation of the initial rows.
        seed: of the rows, the order of pairs, negatives and splits.
        device: the torch device of the model: ``"cpu"``, ``"cuda"``, ``"cuda:1"``. Another device may
            differ in the last bits.
        device_cache: memory of that device for hot rows of all tables, bytes or ``"2GiB"``; 0: rows are trained in RAM
            and each batch transfers its rows; None: as 0, but each lookup transfers its rows. Rows never depend on it.
        lookahead: batches whose rows are prefetched from disk; 0: none; None: as many as hide the reads.
        window: coming batches whose ids rank eviction; None: up to 32, depending on the size of the cache.
        threads: of torch and the tables; 0: every core for the tables, and all but one for torch. The remaining core
            makes batches and reads, because torch's threads spin and would wait for a thread on a shared core. Results
            may differ in the last bits between thread counts, because torch splits its sums by thread.

    Raises:
        ValueError: an option is out of range; the message names it, its value and its valid values.
        TypeError: an option has the wrong type.

    >>> TrainConfig(model="gmf", loss="bce").dim
    64
    """

    model: str = option(
        "mf",
        MODEL,
        "Dot product (mf), weighted (gmf), gmf and a perceptron (neumf), a perceptron per side (two-tower), or "
        "self-attention over the last items (sasrec).",
        choices=("mf", "gmf", "neumf", "two-tower", "sasrec"),
    )
    layers: str = option(
        "", MODEL, "Widths of the hidden layers of a perceptron; default: chosen by --dim.", metavar="N,N"
    )
    length: int | None = option(
        None, MODEL, "sasrec: score by this many of the user's last items; default: 50.", least=1
    )
    dropout: float | None = option(None, MODEL, "sasrec: drop this share of the numbers in a step; default: 0.2.")
    loss: str = option(
        "bpr",
        LEARNING,
        "Minimise a pairwise (bpr), pointwise (bce), sampled softmax or cosine contrastive (ccl) loss.",
        choices=("bpr", "bce", "softmax", "ccl"),
    )
    dim: int = option(64, MODEL, "Numbers per row.", least=1)
    ram: str | int = option("1GiB", MEMORY, "RAM budget of all tables together.", metavar="BYTES")
    stream: bool = option(
        False,
        MEMORY,
        "Keep the interactions on disk, if RAM is too small for them; uses a quarter of --ram to sort them.",
    )
    order: str = option(
        "auto",
        MEMORY,
        "Visit the pairs in random order (uniform), or by blocks of users and items whose rows fit in RAM (blocks, "
        "blocks:P or blocks:PxQ); auto: uniform if every row fits.",
        metavar="ORDER",
    )
    optimizer: str = option("adam", LEARNING, "Optimizer of the tables.", choices=tuple(OPTIMIZERS))
    dtype: str = option(
        "float32",
        MODEL,
        "Store weights in this type; 16 bits: with stochastic rounding and float32 sums.",
        choices=("float32", "bfloat16", "float16"),
    )
    lr: float = option(1e-3, LEARNING, "Learning rate.", above=0.0)
    lr_decay: float = option(1.0, LEARNING, "Multiply the learning rate by this after each epoch.", above=0.0)
    l2: float = option(0.0, LEARNING, "Weight of the L2 penalty on the rows of a batch.", above=0.0, least=0)
    bias: bool = option(False, MODEL, "Learn an item bias.")
    epochs: int = option(20, LEARNING, "Number of passes over the pairs.", least=1)
    batch_size: int | None = option(None, LEARNING, "Number of positive pairs per step.", least=1)
    negatives: int = option(4, LEARNING, "Number of sampled negatives per pair.", least=1)
    sampling: str = option(
        "uniform",
        LEARNING,
        "Sample negatives uniformly, or in proportion to their popularity.",
        choices=("uniform", "popularity"),
    )
    share_negatives: bool = option(
        False, LEARNING, "Use the same negatives for all pairs of a step, which needs fewer rows."
    )
    hardness: float = option(
        0.0, LEARNING, "bpr: weight the negatives by softmax(hardness * score).", above=0.0, least=0
    )
    margin: float | None = option(None, LEARNING, "ccl: count negatives whose cosine is above this; default: 0.6.")
    negative_weight: float | None = option(None, LEARNING, "ccl: weight of the mean over negatives; default: 100.")
    reject_seen: bool = option(True, LEARNING, "Never sample items of the user as negatives.")
    split: str = option(
        "random",
        EVALUATION,
        "Test on the 'last' pair of each user, or on those after the first share of the time (time:0.9); 'random': no "
        "test, only validation. Default with --time-col: last.",
        metavar="last|time:SHARE|random",
    )
    valid: str = option(
        "",
        EVALUATION,
        "Hold out for validation: a 'random' or the 'last' pair of each user, a share, those after the first share of "
        "the time (time:0.9), or 'none'; default: as --split, for sasrec 'last'.",
    )
    refit: bool = option(
        False, EVALUATION, "Once the best epoch is chosen, train again for as many epochs on all pairs."
    )
    patience: int = option(0, EVALUATION, "Stop after this many evaluations without improvement; 0: never.", least=0)
    metric: str = option("ndcg@10", EVALUATION, "Choose the best epoch by hr@k, ndcg@k, recall@k or mrr.")
    ks: str = option("10,20", EVALUATION, "Cut-offs of the metrics.", metavar="K,K")
    ranking: str = option("full", EVALUATION, "Rank all items, or sampled ones.", choices=("full", "sampled"))
    eval_negatives: int = option(99, EVALUATION, "Number of items sampled for each held-out one.", least=1)
    eval_every: int = option(1, EVALUATION, "Evaluate after every this many epochs.", least=1)
    eval_users: int = option(
        10_000, EVALUATION, "Evaluate a sample of this many users during training; 0: all.", least=0
    )
    commit_every: int = option(1, RUN, "Commit after every this many epochs.", least=1)
    init_std: float = option(0.05, MODEL, "Standard deviation of the initial rows.", above=0.0)
    seed: int = option(0, LEARNING, "Seed of initial rows, order and negatives.", least=0)
    device: str = option("cpu", MEMORY, "Compute the model on this device: cpu, cuda, cuda:1.")
    device_cache: str | int | None = option(
        None, MEMORY, "Keep hot rows of all tables in so much device memory; 0: none.", metavar="BYTES"
    )
    lookahead: int | None = option(
        None,
        MEMORY,
        "Prefetch this many batches from disk; 0: none; default: chosen by measured times.",
        least=0,
        most=64,
    )
    window: int | None = option(
        None,
        MEMORY,
        "Rank eviction by the ids of this many coming batches; default: up to 32.",
        least=1,
        most=64,
    )
    threads: int = option(0, MEMORY, "Number of compute threads; 0: one per core.", least=0)

    def __post_init__(self) -> None:
        for each in fields(self):
            self._check(each.name, each.default, option_of(each))
        if self.lr_decay > 1:
            raise ValueError(f"option lr_decay must be above 0 and at most 1, got {self.lr_decay}")
        if self.hardness and self.loss != "bpr":
            raise ValueError(f"option hardness={self.hardness} needs loss bpr, got loss {self.loss!r}")
        self._check_cosine()
        _ = self.layer_widths
        if self.seed >= 2**63:
            raise ValueError(f"option seed must be below 2^63, got {self.seed}")
        try:
            parse_bytes(self.ram)
        except (ValueError, TypeError) as error:
            raise type(error)(f"option ram: {error}") from None
        _ = self.device_cache_bytes
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise ValueError(
                f"option device must be a device of torch such as cpu, cuda or cuda:1, got {self.device!r}"
            )
        _ = self.blocks
        check_split(self.split)
        if self.is_sequential:
            object.__setattr__(self, "share_negatives", True)  # a frozen dataclass allows no other way to set fields
        if self.valid == "":
            valid = "last" if self.is_sequential and self.split == "random" else self.split
            object.__setattr__(self, "valid", valid)
        if self.split != "random" and (self.valid == "random" or self.valid_fraction is not None):
            raise ValueError(
                f"option valid={self.valid!r} would train on what comes after the held-out pairs; with "
                f"split={self.split!r} it is last, none or a share of the time such as time:0.9"
            )
        if self.refit and self.valid == "none":
            raise ValueError("option refit needs held-out pairs to choose the epoch by; with valid none there are none")
        _ = self.valid_fraction
        self._check_sequential()
        if not isinstance(self.metric, str) or not _METRIC.fullmatch(self.metric):
            raise ValueError(f"option metric must be hr@k, ndcg@k, recall@k or mrr, got {self.metric!r}")
        _ = self.cutoffs
        if self.stream and self.valid != "none" and not self.eval_users:
            raise ValueError(
                "option stream needs to know how many users an evaluation asks: "
                "give eval_users, such as 10000, or valid none"
            )

    def _check(self, name: str, default: object, offered: Option) -> None:
        """Check the value of one option by itself."""
        value = getattr(self, name)
        if offered.choices and value not in offered.choices:
            raise ValueError(f"option {name} must be one of {', '.join(offered.choices)}, got {value!r}")
        if isinstance(default, bool) and not isinstance(value, bool):
            raise TypeError(f"option {name} must be true or false, got {value!r}")
        if offered.above is not None:
            self._check_number(name, offered.above, offered.least is not None)
        elif offered.least is not None and (value is not None or default is not None):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"option {name} must be a whole number, got {value!r}")
            if offered.most is not None and not offered.least <= value <= offered.most:
                raise ValueError(f"option {name} must be {offered.least} to {offered.most}, got {value}")
            if value < offered.least:
                raise ValueError(f"option {name} must be at least {offered.least}, got {value}")

    def _check_cosine(self) -> None:
        for name, least, below in (("margin", -1.0, 1.0), ("negative_weight", 0.0, math.inf)):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"option {name} must be a number, got {value!r}")
            if not least <= value < below:
                raise ValueError(f"option {name} must be at least {least:g} and below {below:g}, got {value!r}")
            if self.loss != "ccl":
                raise ValueError(f"option {name}={value} needs loss ccl, got loss {self.loss!r}")
        if self.loss == "ccl" and (self.model != "mf" or self.bias):
            given = "bias" if self.model == "mf" else f"model {self.model!r}"
            raise ValueError(f"option loss=ccl scores by cosine: it needs model mf without bias, got {given}")

    def _check_sequential(self) -> None:
        """Check the options of a model of sequences."""
        if not self.is_sequential:
            for name in ("length", "dropout"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"option {name}={getattr(self, name)} needs model sasrec, got model {self.model!r}"
                    )
            return
        if isinstance(self.dropout_or_default, bool) or not isinstance(self.dropout_or_default, (int, float)):
            raise TypeError(f"option dropout must be a number, got {self.dropout!r}")
        if not 0 <= self.dropout_or_default < 1:
            raise ValueError(f"option dropout must be at least 0 and below 1, got {self.dropout!r}")
        if self.loss != "softmax":
            raise ValueError(f"option model=sasrec needs loss softmax, got loss {self.loss!r}")
        if self.bias:
            raise ValueError("option model=sasrec has no bias; leave bias off")
        if self.blocks not in (None, (1, 1)) or self.order == "blocks":
            raise ValueError(
                f"option order={self.order!r} is not for model sasrec: a sequence has items of every block; use uniform"
            )
        if self.valid == "random" or self.valid_fraction is not None:
            raise ValueError(
                f"option valid={self.valid!r} would train on what comes after the held-out pairs; with model sasrec it "
                "is last, none or a share of the time such as time:0.9"
            )

    def _check_number(self, name: str, lowest: float, inclusive: bool) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            # YAML 1.1 reads 1e-3 (no dot) as a string; the message explains this.
            hint = " (in YAML write 1.0e-3)" if isinstance(value, str) else ""
            raise TypeError(f"option {name} must be a number, got {value!r}{hint}")
        if not math.isfinite(value) or value < lowest or (value == lowest and not inclusive):
            bound = "at least" if inclusive else "above"
            raise ValueError(f"option {name} must be finite and {bound} {lowest:g}, got {value!r}")

    @property
    def table_ram_bytes(self) -> int:
        """The tables' part of `ram`."""
        total = parse_bytes(self.ram)
        return total - total // _DATA_SHARE if self.stream else total

    @property
    def data_ram_bytes(self) -> int:
        """The part of `ram` for sorting interactions; 0 where the interactions are in memory."""
        return parse_bytes(self.ram) - self.table_ram_bytes

    @property
    def device_cache_bytes(self) -> int:
        """Device memory for hot rows; 0 where there is none."""
        if self.device_cache in (None, 0, "0"):
            return 0
        try:
            return parse_bytes(self.device_cache)
        except (ValueError, TypeError) as error:
            raise type(error)(f"option device_cache: {error}") from None

    @property
    def valid_fraction(self) -> float | None:
        """The fraction of pairs that is held out, or None when `valid` is a word."""
        if self.valid in ("random", "last", "none") or self.valid_first is not None:
            return None
        try:
            fraction = float(self.valid)
        except (TypeError, ValueError):
            fraction = math.nan
        if not 0 < fraction < 1:
            raise ValueError(
                f"option valid must be random, last, none, a share of the time such as time:0.9, or a fraction between "
                f"0 and 1 such as 0.1, got {self.valid!r}"
            )
        return fraction

    @property
    def valid_first(self) -> float | None:
        """The first share of the pairs, after which `valid` holds out the rest; None if it holds out others."""
        return first_share("valid", self.valid)

    @property
    def blocks(self) -> tuple[int, int] | None:
        """The number of user blocks and of item blocks; None: no blocks, or undecided."""
        match = _ORDER.fullmatch(self.order) if isinstance(self.order, str) else None
        if match is None:
            raise ValueError(
                f"option order must be auto, uniform, blocks, blocks:P such as blocks:4, or blocks:PxQ for P blocks of "
                f"users and Q of items, got {self.order!r}"
            )
        users, items = match.groups()
        return (int(users), int(items or users)) if users else None

    @property
    def step_pairs(self) -> int:
        """`batch_size`, or its default."""
        if self.batch_size is not None:
            return self.batch_size
        return _STEP_PAIRS if self.blocks in (None, (1, 1)) else _STEP_PAIRS_OF_BLOCKS

    @property
    def is_order_decided(self) -> bool:
        """Whether `order` says what the order is, without the sizes of the tables."""
        return self.order == "uniform" or self.blocks is not None

    @property
    def layer_widths(self) -> tuple[int, ...]:
        """`layers` as numbers; the default of the model where it is empty."""
        if self.layers in ("", None):
            chosen = {"neumf": (self.dim, self.dim // 2, self.dim // 4), "two-tower": (2 * self.dim,)}
            return tuple(max(1, width) for width in chosen.get(self.model, ()))
        if self.model not in ("neumf", "two-tower"):
            raise ValueError(f"option layers={self.layers!r} needs model neumf or two-tower, got model {self.model!r}")
        return _whole_numbers("layers", self.layers, such_as="64,32")

    @property
    def margin_or_default(self) -> float:
        """`margin`, or its default."""
        return 0.6 if self.margin is None else float(self.margin)

    @property
    def negative_weight_or_default(self) -> float:
        """`negative_weight`, or its default."""
        return 100.0 if self.negative_weight is None else float(self.negative_weight)

    @property
    def is_sequential(self) -> bool:
        """Whether the model scores by the order of a user's items."""
        return self.model == "sasrec"

    @property
    def length_or_default(self) -> int:
        """`length`, or its default."""
        return 50 if self.length is None else self.length

    @property
    def dropout_or_default(self) -> float:
        """`dropout`, or its default."""
        return 0.2 if self.dropout is None else self.dropout

    @property
    def row_dim(self) -> int:
        """Weights per row of the user and item tables."""
        return 2 * self.dim if self.model == "neumf" else self.dim

    @property
    def cutoffs(self) -> tuple[int, ...]:
        """`ks` as numbers, ascending, with the cut-off of `metric`."""
        ks = set(_whole_numbers("ks", self.ks, such_as="10,20"))
        if "@" in self.metric:
            ks.add(int(self.metric.partition("@")[2]))
        return tuple(sorted(ks))

    def table_optimizer(self, lr: float | None = None) -> Optimizer:
        """Return the optimizer of every table."""
        return OPTIMIZERS[self.optimizer](lr=self.lr if lr is None else lr)

    def record_bytes(self, dim: int | None = None) -> int:
        """Return the bytes of weights and state of a row of `dim` weights; by default of users and items."""
        dim = self.row_dim if dim is None else dim
        optimizer = self.table_optimizer()
        return dim * (4 if self.dtype == "float32" else 2) + 4 * len(optimizer.slots) * optimizer.slot_dim(dim)

    def lr_at(self, epoch: int) -> float:
        """Return the learning rate of an epoch, counted from 1: a pure function, so that a resumed run agrees."""
        return self.lr * self.lr_decay ** (epoch - 1)

    def to_dict(self) -> Json:
        """Return the options as plain values, for JSON and YAML."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Return the config of `to_dict` values; options left out have their defaults.

        Raises:
            ValueError: an option does not exist; the message lists the options.
        """
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(f"unknown option {name!r}; the options are {', '.join(known)}")
        # YAML and JSON parse a fraction as a number.
        fixed: Json = {name: str(v) if name in ("valid", "ks", "layers") else v for name, v in values.items()}
        return cls(**fixed)

    @classmethod
    def of_run(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Return the config that a run has stored; releases without `order` trained in uniform order."""
        return cls.from_dict({"order": "uniform", **values})

    def with_decisions_of(self, stored: TrainConfig) -> TrainConfig:
        """Return this config with the order and the batch size of a stored run, where this one leaves them open."""
        is_open = self.order == "auto" or (self.order == "blocks" and stored.blocks is not None)
        return replace(
            self,
            order=stored.order if is_open else self.order,
            batch_size=stored.batch_size if self.batch_size is None else self.batch_size,
        )
