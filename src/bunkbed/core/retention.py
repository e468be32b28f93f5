"""`Retention`: the rules by which rows of a table come and go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, cast

import numpy as np

from bunkbed import _native
from bunkbed.core.arguments import as_whole

CLOCKS = ("step", "event")
ORDERS = ("oldest", "rarest", "smallest")
#: The largest `Retention.admit` that is a number of steps: kMostAdmitFrom of csrc/base/types.h.
MOST_ADMIT_FROM = 128
_MOST = 2**63 - 1


@dataclass(frozen=True)
class Retention:
    """Which rows `bunkbed.Table.sweep` removes, and which rows updates store. Without a rule every row comes and stays.

    A table with `expire` or `max_rows` stores with each row when it was last named, by an update or by ``set``, and how
    many updates named it: 12 bytes. A lookup does not name a row, and a row that was only set counts 0 updates.

    Args:
        expire: a row expires when its age is this many units of `clock`, at least 1; None: no row expires. Expired rows
            go before those beyond `max_rows` are counted.
        clock: ``"step"``: the table's `step`; ``"event"``: `bunkbed.Table.clock`, which the caller sets before the
            first update, such as a day or a second of the data. It is never the machine's time, so that a run that is
            repeated has the same rows.
        max_rows: the most rows that a sweep leaves, at least 1; None: any number.
        evict: which rows go first where there are more: ``"oldest"``: those named longest ago; ``"rarest"``: by the
            fewest updates; ``"smallest"``: those whose weights have the smallest norm. Of equal rows the lower id goes.
        keep: no sweep goes below this number of rows, by either rule: of the expired ones those named last stay.
        admit: which steps store a row that they name and that is not stored; None: every step does. A float above 0
            and below 1: each with this probability, a function of the table's seed, the id and the number of the step;
            takes no bytes. An int n, 2 to 128: the n-th step that names the id; takes about 17 bytes of `ram` for each
            id that was named and is not stored. Of a row that is not admitted the gradient is dropped, and it looks up
            as its initial row. ``set`` and imports store every row.

    Raises:
        ValueError, TypeError: an argument out of range; `keep` above `max_rows`; an argument without a rule.

    >>> Retention(expire=30, clock="event", keep=1000)
    Retention(expire=30, clock='event', max_rows=None, evict='oldest', keep=1000, admit=None)
    """

    expire: int | None = None
    clock: Literal["step", "event"] = "step"
    max_rows: int | None = None
    evict: Literal["oldest", "rarest", "smallest"] = "oldest"
    keep: int = 0
    admit: float | None = None

    def __post_init__(self) -> None:
        if self.admit is not None:
            object.__setattr__(self, "admit", _as_admission(self.admit))
        if self.expire is not None:
            object.__setattr__(self, "expire", as_whole(self.expire, what="expire", low=1, high=_MOST))
        if self.max_rows is not None:
            object.__setattr__(self, "max_rows", as_whole(self.max_rows, what="max_rows", low=1, high=_MOST))
        object.__setattr__(self, "keep", as_whole(self.keep, what="keep", low=0, high=_MOST))
        if self.clock not in CLOCKS:
            raise ValueError(f'clock must be "step" or "event", got {self.clock!r}')
        if self.evict not in ORDERS:
            raise ValueError(f'evict must be "oldest", "rarest" or "smallest", got {self.evict!r}')
        if self.max_rows is not None and self.keep > self.max_rows:
            raise ValueError(
                f"keep={self.keep} is above max_rows={self.max_rows}: a sweep cannot leave at least the first and at "
                "most the second"
            )
        if not self.removes and (self.clock, self.evict, self.keep) != ("step", "oldest", 0):
            raise ValueError("clock=, evict= and keep= say how rows go by expire= or max_rows=; give one of these")
        if self.evict != "oldest" and self.max_rows is None:
            raise ValueError(f"evict={self.evict!r} says which rows go where max_rows= is exceeded; give max_rows=")

    def __bool__(self) -> bool:
        """Return whether there is a rule."""
        return self.removes or self.admit is not None

    @property
    def removes(self) -> bool:
        """Whether sweeps remove rows, so that rows have an age: whether there is `expire` or `max_rows`."""
        return self.expire is not None or self.max_rows is not None

    @property
    def counts_steps(self) -> bool:
        """Whether `admit` is a number of steps, so that ids that are not stored have counts."""
        return self.admit is not None and self.admit > 1

    def native(self) -> _native.Retention:
        """Return the rules as the core takes them."""
        return _native.Retention(
            expire=self.expire or 0,
            clock=CLOCKS.index(self.clock),
            max_rows=self.max_rows or 0,
            evict=ORDERS.index(self.evict),
            keep=self.keep,
            admit=0.0 if self.counts_steps else self.admit or 0.0,
            admit_from=int(self.admit or 0) if self.counts_steps else 0,
        )

    @classmethod
    def from_native(cls, rules: _native.Retention) -> Self:
        """Return the rules that the core has."""
        return cls(
            expire=rules.expire or None,
            clock=cast("Literal['step', 'event']", CLOCKS[rules.clock]),
            max_rows=rules.max_rows or None,
            evict=cast("Literal['oldest', 'rarest', 'smallest']", ORDERS[rules.evict]),
            keep=rules.keep,
            admit=rules.admit or rules.admit_from or None,
        )


def rules_text(rules: Retention) -> str:
    """Return the rules as text: ``expire after 30 (event), keep 1,000, admit 0.1``."""
    parts = []
    if rules.expire is not None:
        parts.append(f"expire after {rules.expire:,} ({rules.clock})")
    if rules.max_rows is not None:
        parts.append(f"at most {rules.max_rows:,} rows, {rules.evict} go first")
    if rules.keep:
        parts.append(f"keep {rules.keep:,}")
    if rules.counts_steps:
        parts.append(f"store a row at {rules.admit} steps that name it")
    elif rules.admit is not None:
        parts.append(f"admit {rules.admit:g}")
    return ", ".join(parts) or "none"


def _as_admission(admit: object) -> float:
    wanted = (
        "admit must be a float above 0 and below 1, the probability with which a step stores a new row, or an int from "
        f"2 to {MOST_ADMIT_FROM}, the number of steps that name a row until it is stored"
    )
    if isinstance(admit, (bool, np.bool_)) or not isinstance(admit, (int, float, np.integer, np.floating)):
        raise TypeError(f"{wanted}, got {admit!r}; admit=None stores every row")
    if isinstance(admit, (int, np.integer)) and 2 <= admit <= MOST_ADMIT_FROM:
        return int(admit)
    if isinstance(admit, (int, np.integer)) or not 0 < admit < 1:
        raise ValueError(f"{wanted}, got {admit!r}; admit=None stores every row")
    return float(admit)
