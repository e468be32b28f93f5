"""The rules of tables by which rows come and go, and the ages of their rows."""

from __future__ import annotations

from dataclasses import dataclass

from bunkbed.core.budget import format_bytes
from bunkbed.core.retention import Retention, rules_text
from bunkbed.table.sweeps import Swept, expired_by_age, removal_lines
from bunkbed.table.table import Table


@dataclass(frozen=True)
class Ages:
    """Rules of a table, and what they mean for its rows.

    Attributes:
        clock: the time of the table's clock; -1: not set yet.
        counted_ids: ids that admission counts and has not stored.
        swept: what a sweep would remove now; None for a table with `admit` alone, whose rows have no age.
    """

    table: str
    rules: Retention
    clock: int
    stored_rows: int
    counted_ids: int
    swept: Swept | None


def ages_of(name: str, table: Table) -> Ages | None:
    """Return the rules and ages of a table, None if it has no rule. Reads the whole log of a table whose rows age."""
    rules = table.retention
    if not rules:
        return None
    stats = table.stats()
    return Ages(
        table=name,
        rules=rules,
        clock=table.clock,
        stored_rows=int(stats["stored_rows"]),
        counted_ids=int(stats["counted_ids"]),
        swept=table.sweep(dry_run=True) if rules.removes else None,
    )


def in_words(ages: Ages) -> list[tuple[str, str]]:
    """Return the names and values of what the page says of a table."""
    rules, swept = ages.rules, ages.swept
    lines = [("rules", rules_text(rules))]
    if swept is not None:
        unit = "its step" if rules.clock == "step" else "as it was last set"
        lines.append(("clock", f"{ages.clock:,}, {unit}" if ages.clock >= 0 else "not set yet"))
    lines.append(("rows stored", f"{ages.stored_rows:,}"))
    if rules.counts_steps or ages.counted_ids:
        lines.append(("ids counted", f"{ages.counted_ids:,} that steps have named and not stored"))
    if swept is None:
        return lines
    left = f"{swept.rows - swept.removed:,} rows; the others take {format_bytes(swept.freed_bytes)}"
    return [*lines, *removal_lines(swept, rules), ("after a sweep", left)]


def bars_of(ages: Ages) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return the bars of both pictures in figures: the title, and of each bar its span, rows and expired rows."""
    swept = ages.swept
    if swept is None:
        return []
    pictures = (("age", swept.ages, expired_by_age(swept, ages.rules.expire)), ("updates", swept.counts, None))
    return [
        (
            title,
            [
                (str(one), f"{one.rows:,}", "" if expired is None else f"{expired[index]:,}")
                for index, one in enumerate(bins)
            ],
        )
        for title, bins, expired in pictures
    ]
