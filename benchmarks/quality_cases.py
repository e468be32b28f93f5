"""The data sets of `benchmarks.quality` as cases of the suite."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks import quality
from benchmarks.figures import Figure, Settings


def movielens(settings: Settings) -> list[Figure]:
    """GMF with cross-entropy on MovieLens-1M, within a quarter of the records' bytes and all in RAM."""
    return measure(settings, "ml1m-bce", "hr@10")


def gowalla(settings: Settings) -> list[Figure]:
    """MF-BPR on Gowalla, within a quarter of the records' bytes and all in RAM."""
    return measure(settings, "gowalla", "recall@20")


def measure(settings: Settings, name: str, metric: str) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "figures.json"
        arguments = [name, "--dir", str(settings.dir), "--data", str(settings.data), "--seed", str(settings.seed)]
        arguments += ["--json", str(answer), *settings.pick(["--tiny"], ["--epochs", "1"], [])]
        quality.main(arguments)
        found = json.loads(answer.read_text())
    wanted = quality.TARGETS[name][metric] if settings.size == "full" else None
    figures = [
        Figure(
            f"{metric}, {which}",
            found[which]["metrics"][metric],
            note=f"{found[which]['ranking']}; {found[which]['step_ms']:.1f} ms a step",
            at_least=wanted,
        )
        for which in ("roomy", "tight")
    ]
    different = (not found["same_losses"]) + (not found["same_rows"])
    return [*figures, Figure("losses or rows that differ between the budgets", different, at_most=0)]
