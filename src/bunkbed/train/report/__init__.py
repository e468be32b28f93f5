"""`write_report`: one self-contained page about a run or a table, for ``bunkbed report``.

1. `facts` opens the run or table read-only and gathers its facts; `hot_rows` counts uses in a run's pairs; `ages` reads
   the ages of rows.
2. `charts` draws figures as SVG with the page's colours, light and dark.
3. `page` formats each figure and fills ``page.html.j2``, which escapes every name.
"""

from __future__ import annotations

import os
from pathlib import Path

from bunkbed.files.durable import make_file
from bunkbed.train.report.facts import gather, kind_of
from bunkbed.train.report.page import render

__all__ = ["write_report"]

PathLike = str | os.PathLike[str]


def write_report(
    path: PathLike, out: PathLike | None = None, *, overwrite: bool = False, ram: float | str = "1GiB"
) -> Path:
    """Write one self-contained HTML page about a run or a table, which needs no network and no other file.

    Opens read-only and takes no lock, so that it works during a training. Reads the whole log of each table that has
    ``expire=`` or ``max_rows=``, as ``sweep(dry_run=True)`` does, for the ages of its rows. Starts no
    measurement: the machine's limits are those that `bunkbed.machine.measure` (or ``bunkbed plan``) measured before.

    Args:
        path: folder of a run, of a table, or of a sharded table.
        out: the page; default: ``report.html`` in a run's folder, and for a table its path with ``.html`` at the end.
        overwrite: replace an existing file.
        ram: budget for reading, bytes or as ``"256MiB"``; must hold the directories of all tables. The search
            for ages takes up to a tenth more.

    Returns:
        The page's path. The page is complete or absent.

    Raises:
        FileExistsError: `out` exists; it is not changed. FileNotFoundError: `path` does not exist.
        FormatError: neither a run nor a table. CorruptionError: its last commit, its configuration, or a row
        whose age is read, is damaged.
        ValueError: `ram` is too small (says how much is needed), or a line of the run's metrics is not a report.
        OSError: the page cannot be written. ModuleNotFoundError: matplotlib, jinja2 or pyarrow is not installed.
    """
    place = Path(path).expanduser()
    kind = kind_of(place)
    place = place.resolve()
    default = place / "report.html" if kind == "run" else place.with_name(f"{place.name}.html")
    target = default if out is None else Path(out).expanduser()
    _require_free(target, overwrite)
    page = render(gather(place, kind, ram=ram))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with make_file(temporary) as file:
            file.write(page.encode())
        _require_free(target, overwrite)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _require_free(target: Path, overwrite: bool) -> None:
    if target.is_dir():
        raise FileExistsError(f"{target} is a folder; name a file for the report")
    if not overwrite and os.path.lexists(target):
        raise FileExistsError(
            f"{target} exists already and is as it was; give another name, or overwrite=True (--overwrite)"
        )
