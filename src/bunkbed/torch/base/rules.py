r"""torch's optimizers as update rules of a table.

| torch | the table | what differs |
|---|---|---|
| `SGD` without momentum | `bunkbed.SGD` | nothing |
| `Adagrad` without `lr_decay` | `bunkbed.Adagrad` | nothing |
| `SparseAdam` | `bunkbed.Adam` | nothing |
| `Adam`, `AdamW`, no amsgrad | `bunkbed.Adam` | a step changes only the rows that it touches; torch's changes all |

Weight decay changes the rows that a step touches; torch's changes all rows. A setting that no rule has is an error.
"""

from __future__ import annotations

import torch

from bunkbed.core.optim import SGD, Adagrad, Adam, Optimizer
from bunkbed.core.types import Json

#: What a group may set that no rule of a table has, with the value that means "off".
_UNKNOWN = {"momentum": 0, "amsgrad": False, "maximize": False, "lr_decay": 0}
#: The keys of a group that `rule_of` reads.
SETTINGS = ("lr", "weight_decay", "betas", "eps", *_UNKNOWN)
_RULES = "bunkbed.SGD, bunkbed.Adagrad, bunkbed.RowwiseAdagrad or bunkbed.Adam"


def settings(group: Json) -> tuple[object, ...]:
    """Return what `rule_of` reads of a parameter group: equal settings have equal rules."""
    return tuple([float(value) if isinstance(value, torch.Tensor) else value for value in map(group.get, SETTINGS)])


def rule_of(dense: torch.optim.Optimizer, group: Json, name: str) -> Optimizer:
    """Return the update rule that follows a parameter group of a torch optimizer.

    Args:
        dense: the optimizer.
        group: its parameter group; what it lacks is in ``dense.defaults``.
        name: the table's name, for messages.

    Raises:
        ValueError: no rule has the optimizer's class, or one of its settings; the message lists the rules.
    """
    kind = type(dense)
    if kind not in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SparseAdam):
        raise _refused(name, f"{kind.__name__} is not a rule of a table")
    group = {**dense.defaults, **group}
    for key, off in _UNKNOWN.items():
        if group.get(key, off) != off:
            raise _refused(name, f"{kind.__name__} has {key}={group[key]!r}, which a table does not do")
    lr, decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
    if kind is torch.optim.SGD:
        return SGD(lr, weight_decay=decay)
    if kind is torch.optim.Adagrad:
        start = float(group["initial_accumulator_value"])
        return Adagrad(lr, float(group["eps"]), start, weight_decay=decay)
    first, second = group["betas"]
    decoupled = bool(decay) and bool(group.get("decoupled_weight_decay", False))
    betas = float(first), float(second)
    return Adam(lr, betas, float(group["eps"]), weight_decay=decay, decoupled=decoupled)


def _refused(name: str, what: str) -> ValueError:
    return ValueError(
        f"Optimizer: table {name!r} follows the optimizer of its parameter group, and {what}; use SGD, Adagrad, Adam, "
        f"AdamW or SparseAdam, or give the layer its own: Embedding(..., optimizer=...) with {_RULES}"
    )
