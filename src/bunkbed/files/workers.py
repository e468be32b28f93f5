"""The folders of a table that several Keras workers train: one for each worker, below the table's path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

Placement = Literal["sharded", "replicated"]

_FOLDER = {"sharded": "shard", "replicated": "replica"}
_OF_A_WORKER = re.compile(r"(shard|replica)-\d{4}-of-\d{4}")


def folder_of_worker(placement: Placement, index: int, count: int) -> str:
    """Return the name of a worker's folder.

    >>> folder_of_worker("sharded", 1, 2)
    'shard-0001-of-0002'
    """
    return f"{_FOLDER[placement]}-{index:04d}-of-{count:04d}"


def folders_of_workers(path: Path) -> list[str]:
    """Return the names of workers' folders below the path of a table."""
    try:
        return sorted(part.name for part in path.iterdir() if _OF_A_WORKER.fullmatch(part.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
