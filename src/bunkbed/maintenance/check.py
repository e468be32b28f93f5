"""Find damage, and repair what can be repaired without a guess."""

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

#: Called with (bytes done, bytes in all), a few times a second.
Progress = Callable[[int, int], None]


@typed
def check(
    path: str | os.PathLike[str],
    repair: bool = False,
    epoch: int | None = None,
    *,
    ram: float | str = "256MiB",
    progress: Progress | None = None,
) -> Report:
    """Return the problems of the table or run at `path`; an empty list when it is sound.

    Reads every commit, chunk, record and dense file and verifies every checksum; in a sharded table also that each row
    is in its own shard. Without `repair` the check changes nothing and takes no lock. A writer may be at work; files
    that it removes during the check are no problem.

    With `repair` the check takes the writer's lock and makes only repairs that need no guess. It removes files and
    bytes that no commit names (unfinished commits, segments of processes that died), and older commits that are
    damaged. It goes back to a commit only if `epoch` names it; otherwise a damaged newest commit stays a problem.

    Args:
        path: folder of a table or of a run.
        repair: repair, then report the problems that are left.
        epoch: the sound commit to go back to when the newest is damaged; it becomes the newest commit again.
        ram: memory to use; with less the check takes longer.
        progress: called with (bytes done, bytes in all), a few times a second.

    Returns:
        A list of `Problem`: lines of text with attributes for file, offset, meaning and remedy. The list also has the
        repairs and the sound commits.

    Raises:
        FileNotFoundError, FormatError: `path` has neither a table nor a run. TableLockedError: `repair` while another
        process writes. ValueError: `epoch` without `repair`, or not of a sound commit; lists the sound ones.

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
