"""`open_run`: a run for one process or for several."""

from __future__ import annotations

import os
from typing import Literal

from bunkbed.core.budget import Budget
from bunkbed.run.run import Run
from bunkbed.table.opening import resolve
from bunkbed.torch.base.groups import ProcessGroup
from bunkbed.torch.ranks.run import RankRun
from bunkbed.torch.ranks.sharing import Sharing


def open_run(
    path: str | os.PathLike[str],
    ram: float | str | Budget | None = None,
    *,
    process_group: ProcessGroup = None,
    gradients: Literal["mean", "sum"] = "mean",
    _one_disk: bool = False,
) -> Run:
    """Open or make a run for writing, from one process or from all processes of a process group.

    In one process this is ``bunkbed.Run(path, ram)``. In several the call is collective, and so are the methods
    `table`, `commit`, `begin_commit` and `rewind` of the result, and `close` where it commits. Each table is divided
    over the processes, and all tables and the dense files of rank 0 are committed together. One process can open the
    run later.

    Args:
        path: the run's directory. On a host that does not share the disk of the first process, a directory of this path
            has the rows of the processes there, and copies of the dense files (docs/processes.md).
        ram: hard budget of all tables in all processes of this host; default 1 GiB.
        process_group: the processes that share the run; default: all.
        gradients: how gradients of the processes are joined: ``"mean"``, as under DDP, or ``"sum"``.

    Raises:
        RuntimeError: one of several processes, and torch.distributed is not initialised. ValueError: an argument is not
        equal on all processes, or a table has fewer shards than there are processes. See also `bunkbed.Run`.

    >>> import bunkbed as bb, tempfile, torch
    >>> from bunkbed.torch import Embedding, open_run
    >>> with open_run(tempfile.mkdtemp(), ram="64MiB") as run:
    ...     table = run.table("user", create=dict(dim=4, num_rows=10, optimizer=bb.SGD(lr=1.0)))
    ...     layer = Embedding(10, 4, table=table)
    ...     run.commit(files={"dense.pt": b"weights"}, meta={"epoch": 1})
    1
    """
    sharing = Sharing(process_group=process_group, gradients=gradients)
    sharing.require_valid("open_run")
    ranks = sharing.ranks("open_run")
    return Run(path, ram) if ranks is None else RankRun(resolve(path), ram, ranks, gradients, one_disk=_one_disk)
