"""Sweeps: which rows go by a table's rules, and their removal.

The core finds the rows in the order in which they go (csrc/scan/removable.h). How many of these go is decided here,
from numbers of the whole table, so that a sweep removes the same rows for every budget and every number of shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bunkbed.core.arguments import Floats, Ids
from bunkbed.core.budget import format_bytes
from bunkbed.core.retention import Retention
from bunkbed.core.types import Json
from bunkbed.errors import BunkbedError
from bunkbed.table.core import Core

#: The time of a row that no sweep removes: kNeverGoes of csrc/format/record.h.
NEVER_GOES = 2**63 - 1
#: Of the key of a row that has not expired.
_NOT_EXPIRED = 1 << 63
#: Rows found by one read of the table: by its budget, of which they take a tenth while they are searched.
_FEWEST_AT_ONCE, _BYTES_OF_RAM = 1 << 16, 512


@dataclass(frozen=True)
class Bin:
    """Rows whose age, or count, is in [`low`, `high`]."""

    low: int
    high: int
    rows: int

    def __str__(self) -> str:
        """Return the span, ``4 to 7``."""
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"


@dataclass(frozen=True)
class Swept:
    """What a sweep removed, or would remove.

    Attributes:
        rows: stored rows before the sweep.
        expired: rows that went because they were not named for `Retention.expire` units of the clock.
        evicted: rows that went because there were more than `Retention.max_rows`.
        spared: expired rows that stay because of `Retention.keep`.
        freed_bytes: bytes that the records of these rows took: in the log, where compaction frees them; of a table in
            RAM only, in RAM.
        clock: the time of the table's clock.
        cut: of the last row that was evicted, by `Retention.evict`: its age in units of the clock, the number of
            updates that named it, or its norm; None where none was.
        ages: the rows before the sweep by age, in units of the clock; each bin begins at twice the age of the one
            before.
        counts: the same by the number of updates that named them.
        dry_run: whether nothing was removed.
    """

    rows: int
    expired: int
    evicted: int
    spared: int
    freed_bytes: int
    clock: int
    cut: float | None
    ages: tuple[Bin, ...]
    counts: tuple[Bin, ...]
    dry_run: bool

    @property
    def removed(self) -> int:
        """Rows that went, by either rule."""
        return self.expired + self.evicted

    def __str__(self) -> str:
        """Return the figures in one line, without the bins.

        >>> import bunkbed as bb
        >>> str(bb.create(None, dim=8, expire=30).sweep())
        '0 rows at clock 0: 0 expired and 0 beyond the most rows went, 0 spared; their records take 0 B'
        """
        went = "would go" if self.dry_run else "went"
        return (
            f"{self.rows:,} rows at clock {self.clock:,}: {self.expired:,} expired and {self.evicted:,} beyond the "
            f"most rows {went}, {self.spared:,} spared; their records take {format_bytes(self.freed_bytes)}"
        )


def removal_lines(swept: Swept, rules: Retention) -> list[tuple[str, str]]:
    """Return what goes by each rule and what stays nevertheless, for displays: ``("went", "3 that expired")``, ..."""
    goes, lines = "would go" if swept.dry_run else "went", []
    if rules.expire is not None:
        lines.append((goes, f"{swept.expired:,} that expired"))
    if rules.max_rows is not None:
        last = ""
        if swept.cut is not None:
            number = f"{swept.cut:,.6g}"
            what = {"oldest": f"of age {number}", "rarest": f"named {number} times", "smallest": f"of norm {number}"}
            last = f", the last one {what[rules.evict]}"
        lines.append((goes, f"{swept.evicted:,} beyond the most rows{last}"))
    if swept.spared:
        lines.append(("spared", f"{swept.spared:,} that expired, because of keep"))
    return lines


def expired_by_age(swept: Swept, expire: int | None) -> list[int]:
    """Return how many rows of each bin of `ages` had expired by the rule `expire`, the spared ones included."""
    if expire is None:
        return [0] * len(swept.ages)
    left = swept.expired + swept.spared - sum(one.rows for one in swept.ages if one.low >= expire)
    return [one.rows if one.low >= expire else left if one.high >= expire else 0 for one in swept.ages]


def as_usage(last_step: Ids, count: Ids) -> Floats:
    """Return int64[N] times and numbers of steps as the core moves them: float32[N, 3] with their bytes."""
    times = np.ascontiguousarray(last_step, np.int64).view(np.uint32).reshape(-1, 2)
    return np.ascontiguousarray(np.column_stack((times, count.astype(np.uint32)))).view(np.float32)


def from_usage(usage: Floats) -> tuple[Ids, Ids]:
    """Return int64[N] times and int64[N] numbers of steps of the float32[N, 3] that the core moves."""
    words = np.ascontiguousarray(usage).view(np.uint32)
    return np.ascontiguousarray(words[:, :2]).view(np.int64)[:, 0], words[:, 2].astype(np.int64)


def first_removable(parts: Sequence[Json], most: int) -> Json:
    """Return what `removable` of a core returns, of several cores that have parts of the rows."""
    if len(parts) == 1:
        return parts[0]
    keys = np.concatenate([part["keys"] for part in parts])
    ids = np.concatenate([part["ids"] for part in parts])
    first = np.lexsort((ids, keys))[:most]
    return {
        "rows": sum(part["rows"] for part in parts),
        "expired": sum(part["expired"] for part in parts),
        "changes": sum(part["changes"] for part in parts),
        "keys": keys[first],
        "ids": ids[first],
        "ages": [sum(rows) for rows in zip(*(part["ages"] for part in parts), strict=True)],
        "counts": [sum(rows) for rows in zip(*(part["counts"] for part in parts), strict=True)],
    }


def most_at_once(ram_bytes: int) -> int:
    """Return how many rows one read of a table finds; `ram_bytes`: its budget, 0 for none."""
    return max(_FEWEST_AT_ONCE, ram_bytes // _BYTES_OF_RAM) if ram_bytes else 1 << 20


def sweep(
    core: Core,
    name: str,
    rules: Retention,
    clock: int,
    ram_bytes: int,
    bytes_each: int,
    *,
    dry_run: bool,
) -> Swept:
    """Remove rows by `rules`, as many at once as `most_at_once` says; each read of the table removes the next ones.

    Args:
        core: of the table.
        name: of the table, for messages.
        rules: of which there is one.
        clock: the time by which rows expire.
        ram_bytes: the table's budget.
        bytes_each: bytes of a record.
        dry_run: find the rows only.

    Raises:
        BunkbedError: the table was changed meanwhile.
    """
    most, changes = most_at_once(ram_bytes), -1
    after, removed, expired, cut = (0, -1), 0, 0, None
    first: Json = {}
    while True:
        found = core.removable(rules.native(), clock, most, rules.max_rows is None, *after)
        if changes not in (-1, found["changes"]):
            raise BunkbedError(
                f"table '{name}' was changed during a sweep, after {0 if dry_run else removed:,} rows had gone; sweep "
                "it between two steps"
            )
        changes, first = found["changes"], first or found
        total = _number_that_goes(rules, first["rows"], first["expired"])
        ids: Ids = found["ids"][: total - removed]
        keys = found["keys"][: ids.size]
        if ids.size == 0:
            break
        if not dry_run:
            _, changes = core.erase(np.sort(ids), changes)
        expired += int((keys < _NOT_EXPIRED).sum())
        removed += ids.size
        after = (int(keys[-1]), int(ids[-1]))
        if after[0] >= _NOT_EXPIRED:
            cut = _cut(rules, after[0] - _NOT_EXPIRED, clock)
        if removed == total:
            break
    return Swept(
        rows=first["rows"],
        expired=expired,
        evicted=removed - expired,
        spared=first["expired"] - expired,
        freed_bytes=removed * bytes_each,
        clock=clock,
        cut=cut,
        ages=_bins(first["ages"]),
        counts=_bins(first["counts"]),
        dry_run=dry_run,
    )


def _number_that_goes(rules: Retention, rows: int, expired: int) -> int:
    too_many = 0 if rules.max_rows is None else rows - rules.max_rows
    return max(0, min(max(expired, too_many), rows - rules.keep))


def _cut(rules: Retention, key: int, clock: int) -> float:
    if rules.evict == "oldest":
        return clock - key
    if rules.evict == "rarest":
        return key
    return float(np.sqrt(np.array([key], np.uint64).view(np.float64)[0]))


def _bins(numbers: Sequence[int]) -> tuple[Bin, ...]:
    """Return the bins with rows: number i is that of values of i binary digits."""
    return tuple(Bin(1 << i >> 1, (1 << i) - 1, rows) for i, rows in enumerate(numbers) if rows)
