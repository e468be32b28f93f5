"""Directories below the path of a table that several workers trained."""

from __future__ import annotations

import re
from pathlib import Path

_OF_A_WORKER = re.compile(r"(shard|replica)-\d{4}-of-\d{4}")


def folders_of_workers(path: Path) -> list[str]:
    """Return the names of workers' directories below the path of a table."""
    try:
        return sorted(part.name for part in path.iterdir() if _OF_A_WORKER.fullmatch(part.name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def require_whole(path: Path) -> None:
    """Raise ValueError if `path`, where one process makes a table, has parts of a table of workers."""
    found = folders_of_workers(path)
    if found:
        raise ValueError(
            f"Embedding: {path} holds {found[0]}, of a table that several workers trained; open a replica by its own "
            f"path, {path / found[0]} (a saved model with bunkbed.keras.moved), copy the rows of all shards into one "
            "table (see bunkbed.keras.workers_table), or start as many workers as there were"
        )
