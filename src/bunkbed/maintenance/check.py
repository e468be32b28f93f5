"""Looking for damage, and repairing what can be repaired without guessing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from bunkbed import _native
from bunkbed.core.budget import parse_bytes
from bunkbed.core.typed import typed
from bunkbed.files.run_files import RunFiles
from bunkbed.maintenance.check_run import check_run
from bunkbed.maintenance.problems import Problem, Report, problems_of_table

#: (bytes done, bytes in all), a few times a second.
Progress = Callable[[int, int], None]


@typed
def check(
    path: str | os.PathLike[str],
    repair: bool = False,
    epoch: int | None = None,
    *,
    ram: int | str = "256MiB",
    progress: Progress | None = None,
) -> Report:
    """Problems of the table or run at `path`; empty when it is sound.

    Reads every commit, chunk, record and dense file and verifies every checksum, and of a sharded table that each row
    lies in its own shard. Without `repair` it changes nothing and takes no lock: what is being written may be checked,
    and what its writer removes meanwhile is no problem.

    With `repair` it takes the writer's lock and does what needs no guess: it removes what no commit names (unfinished
    commits, segments and bytes of sessions that died), and commits that are damaged and superseded. It goes back to
    an older commit only when `epoch` names it; without that a damaged newest commit stays a problem.

    Args:
        path: folder of a table or of a run.
        repair: repair, then report what is still wrong.
        epoch: the sound commit to go back to when the newest is damaged; it becomes the newest commit again.
        ram: memory to use; less only takes longer.
        progress: called with (bytes done, bytes in all), a few times a second.

    Returns:
        A list of `Problem`, each a line of text with its file, offset, meaning and remedy as attributes. The list also
        says what was repaired and which commits are sound.

    Raises:
        FileNotFoundError, FormatError: neither a table nor a run there. TableLockedError: `repair` while somebody
        writes it. ValueError: `epoch` without `repair`, or of a commit that is not sound; lists those that are.

    >>> import bunkbed as bb, numpy as np, tempfile
    >>> path = tempfile.mkdtemp() + "/user"
    >>> with bb.create(path, dim=4, num_rows=100, ram="8MiB") as table:
    ...     table.update(np.arange(10), np.ones((10, 4), np.float32))
    >>> bb.check(path)
    []
    """
    if epoch is not None and not repair:
        raise ValueError("epoch= names the commit to go back to, which only repair=True does")
    place = Path(path).expanduser().absolute()
    ram_bytes = parse_bytes(ram)
    if not place.exists():
        raise FileNotFoundError(f"no table and no run at {place}")
    files = RunFiles(place)
    if files.epochs():
        return check_run(files, repair, epoch, ram_bytes, progress)
    if not repair:
        return problems_of_table(place, _native.check_table(str(place), ram_bytes, progress))
    checked, done = _native.repair_table(str(place), ram_bytes, epoch, set(), False, progress)
    report = problems_of_table(place, checked)
    report.repaired = list(done)
    return report


__all__ = ["Problem", "Progress", "Report", "check"]
