"""Helpers and choices for the options of ``bunkbed train``.

Every field of `TrainConfig` has an option; a test compares the fields with the options.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import typer

from bunkbed.train.settings.config import TrainConfig

DEFAULTS = TrainConfig()
DATA, MODEL, LEARNING, MEMORY, JUDGING, RUN = (
    "Data",
    "Model",
    "Learning",
    "Memory and speed",
    "Evaluation",
    "Run",
)


def option(panel: str, text: str, *names: str, metavar: str | None = None) -> Any:
    """Return an option in one panel of the help."""
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=panel)


class Model(StrEnum):
    """Recommender models."""

    mf = "mf"
    gmf = "gmf"
    neumf = "neumf"
    two_tower = "two-tower"


class Loss(StrEnum):
    """Losses on sampled negatives."""

    bpr = "bpr"
    bce = "bce"
    softmax = "softmax"


class Sampling(StrEnum):
    """Distributions of sampled negatives."""

    uniform = "uniform"
    popularity = "popularity"


class OptimizerName(StrEnum):
    """Optimizers of the tables."""

    adam = "adam"
    adagrad = "adagrad"
    rowwise_adagrad = "rowwise_adagrad"
    sgd = "sgd"


class RowType(StrEnum):
    """Types of stored weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Ranking(StrEnum):
    """Items that held-out items are ranked with."""

    full = "full"
    sampled = "sampled"


class FileLayout(StrEnum):
    """Layouts of the lines of a text file."""

    auto = "auto"
    columns = "columns"
    adjacency = "adjacency"


MODEL_DEFAULT = Model(DEFAULTS.model)
LOSS_DEFAULT = Loss(DEFAULTS.loss)
SAMPLING_DEFAULT = Sampling(DEFAULTS.sampling)
OPTIMIZER_DEFAULT = OptimizerName(DEFAULTS.optimizer)
DTYPE_DEFAULT = RowType(DEFAULTS.dtype)
RANKING_DEFAULT = Ranking(DEFAULTS.ranking)
