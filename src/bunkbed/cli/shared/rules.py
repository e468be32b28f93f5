"""The rules of a table as text."""

from __future__ import annotations

from bunkbed.core.retention import Retention


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
        parts.append(f"admit from the step number {rules.admit} that names it")
    elif rules.admit is not None:
        parts.append(f"admit {rules.admit:g}")
    return ", ".join(parts) or "none"
