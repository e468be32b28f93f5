"""Looking for damage."""

from __future__ import annotations

import os
from pathlib import Path

from bunkbed import _native
from bunkbed.errors import BunkbedError
from bunkbed.run_files import RunFiles


def check(path: str | os.PathLike[str]) -> list[str]:
    """Problems of the table or run at `path`, one line each; empty when it is sound.

    Reads every commit, chunk, record and dense file and verifies every checksum; changes nothing. What is being written
    may be checked, at the risk of reports about files that go away meanwhile.

    Raises:
        FileNotFoundError, FormatError: neither a table nor a run there.
    """
    place = Path(path).expanduser().absolute()
    files = RunFiles(place)
    if not files.epochs():
        return list(_native.check_table(str(place)))
    problems = []
    tables: set[str] = set()
    for epoch in files.epochs():
        try:
            manifest = files.load(epoch)
        except BunkbedError as error:
            problems.append(str(error))
            continue
        tables |= set(manifest.tables)
        for name in manifest.files:
            try:
                files.read_file(name, manifest)
            except BunkbedError as error:
                problems.append(str(error))
        for name, table_epoch in manifest.tables.items():
            commit = place / "tables" / name / f"manifest-{table_epoch:016d}"
            if not commit.exists():
                problems.append(f"run commit {epoch}: commit {table_epoch} of table {name!r} is missing")
    for name in sorted(tables):
        problems += [f"table {name!r}: {problem}" for problem in _native.check_table(str(place / "tables" / name))]
    return list(dict.fromkeys(problems))
