"""Pictures of the suite's figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import Outcome


def draw(folder: Path, outcomes: Sequence[Outcome]) -> list[str]:
    """Draws what the outcomes allow and returns the file names."""
    return []
