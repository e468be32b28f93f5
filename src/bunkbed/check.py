"""Looking for damage."""

from __future__ import annotations

import os
from pathlib import Path

from bunkbed import _native


def check(path: str | os.PathLike[str]) -> list[str]:
    """Problems of the table at `path`, one line each; empty when it is sound.

    Reads every commit, chunk and record and verifies every checksum; changes nothing. A table that is being written
    may be checked, at the risk of reports about files that go away meanwhile.

    Raises:
        FileNotFoundError, FormatError: no table there.
    """
    return list(_native.check_table(str(Path(path).expanduser().absolute())))
