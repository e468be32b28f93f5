"""What a folder has: a run, a sharded table or a table."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal

from bunkbed.errors import BunkbedError, FormatError
from bunkbed.files.run_files import is_sharded


def kind_of(path: Path) -> Literal["run", "sharded table", "table"]:
    """Return whether a folder has a run (several tables), a sharded table or a table. Damage raises no error here.

    Raises:
        FileNotFoundError: no such path.
        FormatError: the path is a file.
    """
    if not path.exists():
        raise FileNotFoundError(2, "no such table or run", str(path))
    if not path.is_dir():
        raise FormatError(f"{path}: is a file; give the folder of a table or of a run")
    if not (path / "tables").is_dir():
        return "table"
    with contextlib.suppress(BunkbedError, OSError):
        if is_sharded(path):
            return "sharded table"
    return "run"
