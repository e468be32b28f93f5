"""The files of features that ``bunkbed train`` is given."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from bunkbed.cli.shared.console import UsageProblem
from bunkbed.cli.shared.train_text import say_features
from bunkbed.core.types import Json
from bunkbed.train.features.features import SIDES
from bunkbed.train.features.reading import SideFile, parse_kinds, store_features
from bunkbed.train.settings.run_config import DATA_NAME


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
    return {
        side: SideFile(Path(asked[f"{side}_features"]), columns.get(f"{side}_col"))
        for side in SIDES
        if asked.get(f"{side}_features") is not None
    }


def add_features(folder: Path, about: Json, console: Console) -> bool:
    """Read the files of features that a run's configuration names; return whether there are any."""
    asked = about.get("features", {})
    files = side_files(asked, about.get("reading", {}))
    if files:
        with console.status("reading features"):
            found = store_features(folder / DATA_NAME, files, asked["feature_kinds"])
        say_features(console, found)
    return bool(files)
