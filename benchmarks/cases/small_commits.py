"""What one-row commits leave behind: ``python -m benchmarks.cases.small_commits [--commits 10000] [--tables 1 12 26]``.

A step sets one row of one table and commits it; the tables take turns. The soft limit of open files is set to
``--files``. For each number of tables: commits a second, and the highest number of descriptors of the process, segments
of one table and files of one table. A state that runs out of descriptors is measured up to the commit that failed.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

import bunkbed as bb
from benchmarks.harness import common

ROWS = 5_000
DIM = 8
#: Commits between two looks at the descriptors and files.
LOOK_EVERY = 8


class Peaks(NamedTuple):
    """What one number of tables took."""

    commits: int
    seconds: float
    descriptors: int
    segments: int  # of one table
    files: int  # of one table
    failure: str


def _count(path: Path) -> int:
    return sum(1 for _ in path.iterdir())


def limit_files(soft: int) -> None:
    """Sets the soft limit of open files; 0: the hard one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft or hard, hard))


def measure(folder: Path, num_tables: int, commits: int, limit: int) -> Peaks:
    """Commits in turn; stops at the first commit that fails."""
    limit_files(limit)
    tables = [bb.create(folder / f"{num_tables}-{i}", dim=DIM, num_rows=ROWS, ram="2MiB") for i in range(num_tables)]
    values = np.ones((1, DIM), np.float32)
    descriptors = segments = files = done = 0
    looking, failure = 0.0, ""
    start = time.perf_counter()
    for done in range(commits):
        table = tables[done % num_tables]
        try:
            table.set([done // num_tables % ROWS], values)
            table.commit()
        except (OSError, bb.BunkbedError) as error:
            failure = str(error)
            break
        if done // num_tables % LOOK_EVERY == 0:
            begin = time.perf_counter()
            descriptors = max(descriptors, _count(Path("/proc/self/fd")))
            segments = max(segments, int(table.stats()["segments"]))
            files = max(files, _count(Path(table.path)))
            looking += time.perf_counter() - begin
    else:
        done = commits
    seconds = time.perf_counter() - start - looking
    limit_files(0)  # closing needs descriptors too
    for table in tables:
        table.close(commit=False)
    return Peaks(done, seconds, descriptors, segments, files, failure)


def main() -> int:
    options = common.parser(__doc__)
    options.add_argument("--commits", type=int, default=10_000, help="in all, for each number of tables")
    options.add_argument("--tables", type=int, nargs="+", default=[1, 12, 26], help="numbers of tables")
    options.add_argument("--files", type=int, default=1024, help="soft limit of open files; 0: the hard one")
    chosen = options.parse_args()
    commits = 100 if chosen.tiny else chosen.commits
    print(f"{common.machine()}; files in {chosen.dir}, {chosen.files or 'any number'} may be open")
    print(f"{'tables':>6} {'commits':>8} {'commits/s':>10} {'descriptors':>12} {'segments':>9} {'files':>6}")
    failed = False
    with common.workspace(chosen.dir, 1 << 28) as folder:
        for num_tables in chosen.tables:
            peaks = measure(folder, num_tables, commits, chosen.files)
            rate = peaks.commits / peaks.seconds if peaks.seconds else 0.0
            print(
                f"{num_tables:6} {peaks.commits:8,} {rate:10,.0f} {peaks.descriptors:12,} {peaks.segments:9,} "
                f"{peaks.files:6,}" + (f"  failed: {peaks.failure}" if peaks.failure else ""),
                flush=True,
            )
            failed |= bool(peaks.failure)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
