"""Figures that are stored in a run's folder: on its test pairs (``test.json``), of baselines (``baselines.json``).

Needs no torch, so that a report can show them without.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bunkbed import _native
from bunkbed.core.types import Json
from bunkbed.files.durable import replace_file
from bunkbed.train.settings.config import TrainConfig

__all__ = [
    "FIGURES",
    "JUDGED_BY",
    "Baseline",
    "EvalResult",
    "judged_by",
    "load_baselines",
    "load_test",
    "save_baselines",
    "save_test",
]

#: Files of figures in a run's folder.
FIGURES = _TEST, _BASELINES = "test.json", "baselines.json"
# Of the baselines' definitions: figures of another version are computed again.
_VERSION = 1
#: Options that must agree, or the validation figures of two runs are not comparable.
JUDGED_BY = ("split", "valid", "ranking", "eval_negatives", "eval_users", "seed")


@dataclass(frozen=True)
class EvalResult:
    """Figures of an evaluation, and their meaning.

    Attributes:
        metrics: the result of `bunkbed.train.evaluate.metrics.ranking_metrics`.
        ranking: description of the competitors of each held-out item, of the users, and of the split.
        num_users: number of users over which the figures are means.
        split: ``"test"``, ``"test candidates"`` or ``"validation"``.
    """

    metrics: dict[str, float]
    ranking: str
    num_users: int
    split: str


@dataclass(frozen=True)
class Baseline:
    """Figures of a baseline, judged as a run.

    Attributes:
        name: ``"popular"``, ``"item-item"`` or ``"als"``.
        about: how it scores.
        seconds: for its model, without the ranking.
        validation: as the evaluations during the training; None where the run holds nothing out.
        test: as the evaluation after it; None where the data has no test.
    """

    name: str
    about: str
    seconds: float
    validation: EvalResult | None
    test: EvalResult | None

    @property
    def best(self) -> dict[str, float]:
        """The figures on the validation; none where nothing is held out."""
        return {} if self.validation is None else self.validation.metrics


def judged_by(config: TrainConfig) -> Json:
    """Return the options of a run on which the figures of its baselines depend."""
    return {name: getattr(config, name) for name in (*JUDGED_BY, "stream")}  # with stream, a test has `eval_users` too


def save_test(folder: Path, result: EvalResult, *, step: int) -> None:
    """Store the figures of a run that has done `step` steps, durably and atomically."""
    replace_file(folder / _TEST, (json.dumps({"step": step, **asdict(result)}, indent=2) + "\n").encode())


def load_test(folder: Path, *, step: int) -> EvalResult | None:
    """Return the figures of `save_test`; None if there are no figures, or the run has continued since.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / _TEST
    try:
        values: Json = json.loads(_native.read_file(str(path)))
        of_step = values.pop("step")
        result = EvalResult(**values)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: is damaged ({error}); bunkbed eval ranks again, and the file may go") from error
    return result if of_step == step else None


def save_baselines(folder: Path, found: Sequence[Baseline], *, judged_by: Json) -> None:
    """Store baselines in a run's folder, durably and atomically.

    Args:
        judged_by: what the figures depend on: options of the run and, for `bunkbed compare`, the data.
    """
    values = {"version": _VERSION, "judged_by": judged_by, "baselines": [asdict(one) for one in found]}
    replace_file(folder / _BASELINES, (json.dumps(values, indent=2) + "\n").encode())


def load_baselines(folder: Path, *, judged_by: Json, cutoffs: Sequence[int]) -> list[Baseline]:
    """Return the figures of `save_baselines` that have the same `judged_by` and all `cutoffs`.

    Args:
        judged_by: all or a part of what was given to `save_baselines`.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / _BASELINES
    try:
        values: Json = json.loads(_native.read_file(str(path)))
        if values["version"] != _VERSION or any(values["judged_by"].get(name) != judged_by[name] for name in judged_by):
            return []
        found = [
            Baseline(one["name"], one["about"], one["seconds"], _result(one["validation"]), _result(one["test"]))
            for one in values["baselines"]
        ]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: is damaged ({error}); remove it, bunkbed compare --baselines makes it") from error
    return [one for one in found if all(_has(result, cutoffs) for result in (one.validation, one.test))]


def _result(values: Json | None) -> EvalResult | None:
    return None if values is None else EvalResult(**values)


def _has(result: EvalResult | None, cutoffs: Sequence[int]) -> bool:
    return result is None or all(f"hr@{k}" in result.metrics for k in cutoffs)
