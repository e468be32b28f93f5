"""Figures of a run on its test pairs, stored in the run's folder: ``test.json``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from bunkbed import _native
from bunkbed.core.types import Json
from bunkbed.files.durable import replace_file
from bunkbed.train.evaluate.evaluator import EvalResult

__all__ = ["load_test", "save_test"]

_NAME = "test.json"


def save_test(folder: Path, result: EvalResult, *, step: int) -> None:
    """Store the figures of a run that has done `step` steps, durably and atomically."""
    replace_file(folder / _NAME, (json.dumps({"step": step, **asdict(result)}, indent=2) + "\n").encode())


def load_test(folder: Path, *, step: int) -> EvalResult | None:
    """Return the figures of `save_test`; None if there are no figures, or the run has continued since.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / _NAME
    try:
        values: Json = json.loads(_native.read_file(str(path)))
        of_step = values.pop("step")
        result = EvalResult(**values)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: is damaged ({error}); bunkbed eval ranks again, and the file may go") from error
    return result if of_step == step else None
