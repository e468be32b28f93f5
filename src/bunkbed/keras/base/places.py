"""Present paths of the tables of saved models that were moved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path

_moved: list[dict[Path, Path]] = []


@contextlib.contextmanager
def moved(places: Mapping[str | PathLike[str], str | PathLike[str]]) -> Iterator[None]:
    """Open tables at their new paths within the context; `places` maps old path to new path.

    For loading a ``.keras`` file whose tables were moved::

        with bunkbed.keras.moved({"tables/user": "/data/user"}):
            model = keras.models.load_model("model.keras")
    """
    _moved.append({_absolute(old): _absolute(new) for old, new in places.items()})
    try:
        yield
    finally:
        _moved.pop()


def current_path(path: Path) -> Path:
    """Return the present path of the table of `path`."""
    for places in reversed(_moved):
        found = places.get(_absolute(path))
        if found is not None:
            return found
    return path


def _absolute(path: str | PathLike[str]) -> Path:
    return Path(path).expanduser().absolute()
