"""The files of features that ``bunkbed train`` is given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from bunkbed.cli.shared.console import UsageProblem
from bunkbed.cli.shared.train_text import say_features
from bunkbed.core.types import Json
from bunkbed.train.features.features import SIDES, load_features
from bunkbed.train.features.reading import SideFile, parse_kinds, store_features
from bunkbed.train.settings.config import TrainConfig
from bunkbed.train.settings.run_config import DATA_NAME

if TYPE_CHECKING:
    from bunkbed.train.data.interactions import Dataset, Interactions


def parsed_kinds(text: str) -> dict[str, str]:
    """Return the kinds that --feature-kinds names."""
    try:
        return parse_kinds(text)
    except ValueError as error:
        raise UsageProblem(str(error)) from error


def stored_features(features: Json) -> Json:
    """Return what a run's configuration says of its files of features."""
    files = {name: str(value.resolve()) for name, value in features.items() if isinstance(value, Path)}
    return {"features": {**features, **files}} if files else {}


def side_files(asked: Json, columns: Json) -> dict[str, SideFile]:
    """Return the files of features by side."""
    header = columns.get("header", "auto")
    return {
        side: SideFile(
            Path(asked[f"{side}_features"]), columns.get(f"{side}_col"), None if header == "auto" else header
        )
        for side in SIDES
        if asked.get(f"{side}_features") is not None
    }


def add_features(folder: Path, about: Json, config: TrainConfig, console: Console) -> bool:
    """Read the files of features that a run's configuration names; return whether there are any.

    Args:
        folder: of the run, whose interactions are stored.
    """
    from bunkbed.train.data.store import load_dataset, open_dataset
    from bunkbed.train.evaluate.evaluator import open_parts

    def trained() -> Interactions:
        return open_parts((open_dataset if config.stream else load_dataset)(folder / DATA_NAME), config, folder).train

    asked = about.get("features", {})
    files = side_files(asked, about.get("reading", {}))
    if files:
        with console.status("reading features"):
            found = store_features(folder / DATA_NAME, files, asked["feature_kinds"], trained)
        say_features(console, found)
    return bool(files)


def num_drawn(folder: Path, data: Dataset) -> int:
    """Return from how many items a run draws negatives."""
    features = load_features(folder / DATA_NAME)
    return len(features["item"].with_row) if "item" in features else data.num_items
