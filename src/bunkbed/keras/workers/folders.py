"""The error of one process at the path of a table that several workers trained."""

from __future__ import annotations

import shlex
from pathlib import Path

from bunkbed.files.workers import folders_of_workers


def require_whole(path: Path) -> None:
    """Raise ValueError if `path`, where one process makes a table, has parts of a table of workers."""
    found = folders_of_workers(path)
    if found:
        raise ValueError(
            f"Embedding: {path} holds {found[0]}, of a table that several workers trained; open a replica by its own "
            f"path, {path / found[0]} (a saved model with bunkbed.keras.moved), make one table of all shards with "
            f"bunkbed reshard {shlex.quote(str(path))} --shards 1, or start as many workers as there were"
        )
