"""`RankCore`: the core of a table that ranks share. Rows are in `RankRows`, commits in `RankCommits`."""

from __future__ import annotations

import json
from typing import Any

from bunkbed import _native
from bunkbed.errors import BunkbedError
from bunkbed.table.table import Table
from bunkbed.torch.ranks.commits import PendingRanks, RankCommits
from bunkbed.torch.ranks.group import Ranks
from bunkbed.torch.ranks.rows import Changes, RankRows


class NothingPending:
    """The commit of a table that has not changed."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def is_over(self) -> bool:
        return True

    def wait(self) -> int:
        return self._epoch


class RankCore(RankRows):
    """All rows, seen from one rank, and the commits of all ranks. Owns this rank's rows, unless a run has the commits.

    Args:
        name, spec, local, ranks, num_shards, changes: see `RankRows`.
        commits: of this table, or of the run that it is part of.
        uuid: identity of the table, equal on all ranks.
        in_run: whether the commits are those of a run.
    """

    def __init__(
        self,
        name: str,
        spec: _native.TableSpec,
        local: Table,
        ranks: Ranks,
        num_shards: int,
        changes: Changes,
        commits: RankCommits,
        uuid: bytes,
        *,
        in_run: bool = False,
    ) -> None:
        super().__init__(name, spec, local, ranks, num_shards, changes)
        self.commits = commits
        self._uuid = uuid
        self._in_run = in_run
        commits.add(self)

    def require_open(self) -> None:
        """Raise also if the ranks' rows do not agree."""
        super().require_open()
        self.commits.require_whole()

    # ---- Facts

    def epoch(self) -> int:
        return self.commits.state.epoch

    def meta(self) -> str:
        return "{}" if self._in_run else json.dumps(self.commits.state.meta)

    def uuid(self) -> bytes:
        return self._uuid

    def is_changed(self) -> bool:
        return self.commits.is_changed()

    def uncommitted(self) -> tuple[int, bool, int]:
        """Return the changes of this rank's rows since the last commit; see `ShardedRows.uncommitted`."""
        return self.local.core.uncommitted() if self.is_changed() else (0, True, 0)

    def snapshots(self) -> list[tuple[str, int]]:
        return [] if self._in_run else list(self.commits.state.snapshots.items())

    # ---- Commits

    def begin_commit(self, meta: str | None, keep: str) -> PendingRanks | NothingPending:
        """See `bunkbed.Table.begin_commit`. Returns once every rank has settled what the commit holds."""
        self.require_open()
        if meta is None and not keep and not self.is_changed():
            return NothingPending(self.epoch())
        return self.commits.begin_commit(None if meta is None else json.loads(meta), keep)

    def commit(self, meta: str | None, keep: str) -> int:
        """See `bunkbed.Table.commit`."""
        return self.begin_commit(meta, keep).wait()

    def drop(self, name: str) -> None:
        """See `bunkbed.Table.drop`."""
        self.require_open()
        if self._in_run:
            raise BunkbedError(f"table '{self.name}' belongs to a run; drop snapshots with run.drop()")
        self.commits.drop(name)

    def rewind(self, name: str, epoch: int | None) -> None:
        """See `bunkbed.Table.rewind`. Collective: every rank goes back to the same commit."""
        super().require_open()
        self.commits.go_back(name if epoch is None else epoch)

    def settle(self, what: str, *facts: Any) -> list[Any]:
        """See `RankCommits.settle`."""
        return self.commits.settle(what, *facts)

    def refresh(self, to: int | None = None) -> int:
        raise ValueError(f"table '{self.name}' is open for writing and always up to date; refresh() is for readers")

    def write_dirty(self) -> None:
        """Start to write this rank's dirty rows."""
        self.local.core.write_dirty()

    def compact(self) -> int:
        """Compact this rank's log; return how many records were moved."""
        return self.local.core.compact()

    def set_device_cache(self, map: object | None, write_back: object | None) -> None:
        """Accept only None, which `Table.close` passes."""
        if map is not None:
            raise BunkbedError(f"table '{self.name}' has several processes, and a device cache wants one")

    def close(self) -> None:
        """Release this rank's rows without a commit."""
        if self.closed or not self.is_own:  # the locks and the connections are those of the parent
            return
        self.closed = True
        if not self._in_run:
            self.commits.close()
        if self.local.path is None:
            self.local.release()
