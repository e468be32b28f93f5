"""`open`: open the table at a path, plain or sharded. This module imports both kinds; they do not import each other."""

from __future__ import annotations

import os
from typing import Literal

from bunkbed.core import optim as _optim
from bunkbed.core.budget import Budget
from bunkbed.core.typed import typed
from bunkbed.core.types import Json
from bunkbed.files.run_files import is_sharded
from bunkbed.sharded.table import ShardedTable
from bunkbed.table import opening
from bunkbed.table.table import Table


@typed
def open(
    path: str | os.PathLike[str],
    *,
    mode: Literal["w", "r"] = "w",
    ram: float | str | Budget | None = None,
    snapshot: str | None = None,
    create: Json | None = None,
    optimizer: _optim.Optimizer | None = None,
    disk: float | str | None = None,
) -> Table:
    """Open a table at its last commit; the directory of a sharded table gives a `bunkbed.ShardedTable`.

    Opening a path that this process already writes returns the same table; each opening needs its own `close`.

    Args:
        path: the table's directory.
        mode: ``"w"``: the one writer; ``"r"``: a reader of the last commit (`Table.refresh` moves on), without locks.
        ram: hard budget in bytes, as ``"2GiB"``, or a shared `Budget`; default 1 GiB.
        snapshot: open this kept commit, for reading.
        create: arguments of `bunkbed.create`, used if there is no table or only a scratch table. Otherwise each given
            value must be the table's, but the hyperparameters of the optimizer and the rules of `Retention` replace
            the table's.
        optimizer: new hyperparameters; the class must be that of the table's optimizer.
        disk: maximum bytes of the table's files while this writer has it open; see `bunkbed.create`.

    Returns:
        The open table.

    Raises:
        FileNotFoundError: `path` does not exist. FormatError: no table, a scratch table, or a table of a newer format.
        TableLockedError: another process writes it. CorruptionError: its last commit is damaged; names the older ones.
        ValueError: a mismatch with `create` (names both values), an unknown snapshot, a budget or limit too small.
    """
    place = opening.resolve(path)
    wanted = opening.Wanted.of(mode, ram=ram, snapshot=snapshot, create=create, optimizer=optimizer, disk=disk)
    with opening.path_lock(place if wanted.writable else None):
        if is_sharded(place):
            return ShardedTable.open(
                place,
                mode=mode,
                ram=wanted.ram,
                snapshot=snapshot,
                create=wanted.create,
                optimizer=optimizer,
                disk=wanted.disk,
            )
        return opening.open_table(place, wanted)
