"""The rules for types in the package: few uses of `Any`."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "bunkbed"
MOST_ANY = 400


def test_any_is_rare() -> None:
    counts = {path: len(re.findall(r"\bAny\b", path.read_text())) for path in PACKAGE.rglob("*.py")}
    most = sorted(counts, key=lambda path: -counts[path])[:5]
    assert sum(counts.values()) <= MOST_ANY, f"name the type, or use an alias; most are in {most}"
