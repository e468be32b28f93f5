"""A training run's ``config.json``: the options and the data of the run."""

from __future__ import annotations

import json
from pathlib import Path

from bunkbed import _native
from bunkbed.core.types import Json
from bunkbed.errors import CorruptionError, FormatError
from bunkbed.files.durable import replace_file

__all__ = ["CHOICE_NAME", "CONFIG_NAME", "DATA_NAME", "LOG_NAME", "SCALARS_NAME", "read_config", "write_config"]

CONFIG_NAME = "config.json"
#: The folder of the run's copy of its data.
DATA_NAME = "data"
#: The reports of the training; and those of an earlier one, which chose the epoch (`bunkbed.train.refit`).
LOG_NAME, CHOICE_NAME = "metrics.jsonl", "choice.jsonl"
#: The folder of the scalars for TensorBoard.
SCALARS_NAME = "tensorboard"


def write_config(folder: Path, values: Json) -> None:
    """Write a run's configuration, durably and atomically."""
    replace_file(folder / CONFIG_NAME, (json.dumps(values, indent=2) + "\n").encode())


def read_config(folder: Path) -> Json:
    """Return the configuration with which a run was started.

    Raises:
        FileNotFoundError: no such folder.
        FormatError: the folder is not a training run.
        CorruptionError: its configuration is damaged.
    """
    if not folder.is_dir():
        raise FileNotFoundError(2, "no such run", str(folder))
    path = folder / CONFIG_NAME
    if not path.exists():
        raise FormatError(f"{folder} is not a training run: it has no {CONFIG_NAME}")
    try:
        values = json.loads(_native.read_file(str(path)))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptionError(f"{path}: is damaged ({error}); restore it or start a new run") from error
    if not isinstance(values, dict) or not isinstance(values.get("train"), dict):
        raise CorruptionError(f"{path}: is damaged (no 'train' section); restore it or start a new run")
    return values
