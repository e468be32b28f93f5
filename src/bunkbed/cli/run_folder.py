"""A run's folder as the commands see it: where it goes, its configuration, whether a path is one."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any, Literal

from bunkbed.cli.common import UsageProblem
from bunkbed.errors import BunkbedError, FormatError
from bunkbed.opening import is_sharded

CONFIG_NAME = "config.json"
DATA_NAME = "data"


def choose_folder(out: Path | None, source: Path) -> Path:
    """Where a new run goes: `out`, or the next free ``runs/NAME`` after the data's file.

    Raises:
        UsageProblem: `out` is there already and is not an empty folder.
    """
    if out is not None:
        if out.is_dir() and any(out.iterdir()):
            hint = f"resume it with --resume {out}, or " if (out / CONFIG_NAME).exists() else ""
            raise UsageProblem(f"{out} exists and is not empty; {hint}give another --out")
        if out.exists() and not out.is_dir():
            raise UsageProblem(f"{out} exists and is not a folder; give another --out")
        return out
    # "train.tsv.gz" says less than the folder it lies in.
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


def write_config(folder: Path, values: dict[str, Any]) -> None:
    """Write a run's configuration, durably and all at once."""
    path = folder / CONFIG_NAME
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(values, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration a run was started with.

    Raises:
        FileNotFoundError: no such folder.
        FormatError: the folder is not a training run, or its configuration is damaged.
    """
    if not folder.is_dir():
        raise FileNotFoundError(2, "no such run", str(folder))
    path = folder / CONFIG_NAME
    if not path.exists():
        raise FormatError(f"{folder} is not a training run: it has no {CONFIG_NAME}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: is damaged ({error}); restore it or start a new run") from error
    if not isinstance(values, dict) or not isinstance(values.get("train"), dict):
        raise FormatError(f"{path}: is damaged (no 'train' section); restore it or start a new run")
    return values


def kind_of(path: Path) -> Literal["run", "sharded table", "table"]:
    """Whether a folder holds a run (several tables), or one table, sharded or not; damage is no concern here.

    Raises:
        FileNotFoundError: no such path.
        FormatError: it is a file.
    """
    if not path.exists():
        raise FileNotFoundError(2, "no such table or run", str(path))
    if not path.is_dir():
        raise FormatError(f"{path}: is a file; give the folder of a table or of a run")
    if not (path / "tables").is_dir():
        return "table"
    with contextlib.suppress(BunkbedError, OSError):
        if is_sharded(path):
            return "sharded table"
    return "run"
