"""Choose the folder of a new run; tell runs and tables apart."""

from __future__ import annotations

import re
from pathlib import Path

from bunkbed.cli.shared.console import UsageProblem
from bunkbed.train.settings.run_config import CONFIG_NAME


def choose_folder(out: Path | None, source: Path) -> Path:
    """Return the folder of a new run: `out`, or the next free ``runs/NAME``, with the name of the data's file.

    Raises:
        UsageProblem: `out` exists and is not an empty folder.
    """
    if out is not None:
        if out.is_dir() and any(out.iterdir()):
            hint = f"resume it with --resume {out}, or " if (out / CONFIG_NAME).exists() else ""
            raise UsageProblem(f"{out} exists and is not empty; {hint}give another --out")
        if out.exists() and not out.is_dir():
            raise UsageProblem(f"{out} exists and is not a folder; give another --out")
        return out
    # A general name such as "train.tsv.gz" is replaced by the name of its folder.
    stem = source.name.split(".")[0] or "run"
    if stem in ("train", "data", "ratings", "interactions") and source.resolve().parent.name:
        stem = source.resolve().parent.name
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem)
    root = Path("runs")
    folder, number = root / stem, 1
    while folder.exists():
        number += 1
        folder = root / f"{stem}-{number}"
    return folder
