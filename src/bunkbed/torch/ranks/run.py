"""`RankRun`: a run whose tables several processes train together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from bunkbed.core.budget import Budget
from bunkbed.core.types import Json
from bunkbed.files.run_files import RunManifest
from bunkbed.run.run import Run, require_name
from bunkbed.table.commits import PendingCommit
from bunkbed.table.table import Table
from bunkbed.torch.ranks.commits import PendingRanks, RankCommits
from bunkbed.torch.ranks.epochs import FileEpochs
from bunkbed.torch.ranks.files import RankFiles, budget_of_rank, same_arguments
from bunkbed.torch.ranks.group import Ranks, RanksError
from bunkbed.torch.ranks.rows import Changes
from bunkbed.torch.ranks.table import DistributedTable

_COMMIT = "a commit of a run"


class RankRun(Run):
    """A `bunkbed.Run` whose tables are divided over the processes of a torch process group; made by `open_run`.

    Has the methods of `bunkbed.Run`, and makes an ordinary one, which one process can open. `table`, `commit`,
    `begin_commit`, `rewind` and `close` with a commit are collective: every rank calls them, with equal arguments.
    The dense files of a commit are those that rank 0 gives. A table has a shard for each rank, or ``shards=`` of
    `create`.

    Args:
        one_disk: whether every rank must see the directory of rank 0.
    """

    def __init__(
        self,
        path: Path,
        ram: float | str | Budget | None,
        ranks: Ranks,
        gradients: Literal["mean", "sum"],
        *,
        one_disk: bool,
    ) -> None:
        self.ranks = ranks
        self._one_disk = one_disk
        self.sums_gradients = gradients == "sum"
        self._pending: PendingRanks | None = None
        self._number = 0  # commits so far
        same_arguments(
            ranks, "open_run", path=str(path), ram=None if isinstance(ram, Budget) else ram, gradients=gradients
        )
        super().__init__(path, budget_of_rank(ram, ranks))

    def _enter(self, snapshot: str | None) -> None:
        files = RankFiles(self.path, self.ranks, "run")
        self._rank_files = files
        try:
            files.enter(self._require_ours, one_disk=self._one_disk)
        except BaseException:
            files.undo()
            raise
        files.shards, files.shardings = self._tables, self._sharded.new
        self._epochs = FileEpochs(files)
        self._commits = RankCommits(files.folder.label, self.ranks, self._epochs, Changes())

    def _require_ours(self) -> None:
        self._require_folder()
        self._require_own(self._rank_files.manifest)

    @property
    def manifest(self) -> RunManifest:
        """The present commit."""
        return self._rank_files.manifest

    @manifest.setter
    def manifest(self, manifest: RunManifest) -> None:
        raise AssertionError("the ranks' commits set it")

    def snapshots(self) -> dict[str, int]:
        """See `bunkbed.Run.snapshots`."""
        self.settle(report=False)
        return dict(self._commits.state.snapshots)

    def table(self, name: str, *, create: Json | None = None) -> Table:
        """See `bunkbed.Run.table`. Collective."""

        def check() -> tuple[Json | None, int | None]:
            self._require_open()
            require_name("table", name)
            return self._sharded.parted(name, create)

        self.ranks.gather("a table of a run", lambda: check() and None)
        same_arguments(self.ranks, "Run.table", name=name, create=create)
        arguments, shards = check()
        if name in self.tables:
            self.ranks.gather("a table of a run", lambda: self._sharded.again(name, arguments) and None)
            return self.tables[name]
        files = self._rank_files
        sharding = files.open_table(name, create=arguments, shards=shards, budget=self.budget)
        table = DistributedTable.in_run(name, files, sharding, self._commits, self)
        self._sharded.add(name, table, arguments)
        return table

    # ---- Durability

    def commit(
        self, files: Mapping[str, bytes] | None = None, meta: Json | None = None, keep: str | None = None
    ) -> int:
        """See `bunkbed.Run.commit`. Collective."""
        return self.begin_commit(files, meta, keep).wait()

    def begin_commit(
        self, files: Mapping[str, bytes] | None = None, meta: Json | None = None, keep: str | None = None
    ) -> PendingCommit:
        """See `bunkbed.Run.begin_commit`. Collective."""

        def begin() -> list[object]:
            contents, facts = self._begin(files, meta, keep)
            if self.ranks.is_first:
                self._epochs.contents = contents
            return [facts, keep]

        before, copies = self._owed, self._rank_files.copies
        try:
            said = self.ranks.gather(_COMMIT, begin)
            if any(one != said[0] for one in said):
                raise RanksError(f"{self.folder.label}: the ranks commit with different meta or keep: {said}")
            if copies.keepers:
                self._epochs.contents = copies.share(self._epochs.contents, self.manifest.next_file)
                # A rank's thread begins the commit once any rank has asked for it: all have the files before that.
                self.ranks.gather(_COMMIT, dict)
        except BaseException:
            self._owed = before
            raise
        facts, _ = said[0]
        self._number += 1
        self._pending = self._commits.begin_commit(facts, keep or "", self._number)
        return PendingCommit(partial(self._await_outcome, self._pending), self._pending.is_over)

    def _await_outcome(self, pending: PendingRanks) -> int:
        """Wait for a commit, and note that its caller has its outcome."""
        is_last = pending is self._pending
        if is_last:
            self._pending = None
        epoch = pending.wait()
        if is_last:
            self._owed = None
        return epoch

    def settle(self, *, report: bool) -> None:
        """Wait for the commit that is on its way; with `report`, raise its error unless it was raised before."""
        if self._pending is not None and report:
            self._await_outcome(self._pending)
        elif self._pending is not None:
            with contextlib.suppress(Exception):
                self._pending.wait()

    def rewind(self, to: str | int) -> int:
        """See `bunkbed.Run.rewind`. Collective."""
        self._require_open(write=True)
        self.settle(report=True)
        self._commits.go_back(to)
        self._owed = None
        return self.epoch

    def drop(self, name: str) -> None:
        """See `bunkbed.Run.drop`. Any rank may call it alone."""
        self._require_open(write=True)
        self.settle(report=True)
        self.folder.find(name)
        self._commits.drop(name)

    def is_behind(self) -> bool:
        """Return whether the run has changes that the last commit does not hold; equal on all ranks."""
        return self._owed is not None or self._commits.is_changed()

    def close(self, commit: bool = True) -> None:
        """See `bunkbed.Run.close`. Collective where it commits."""
        if self._closed:
            return
        self._require_own_process()
        self.settle(report=commit)
        if commit and self.is_behind():
            self.commit()
        self._closed = True
        with contextlib.ExitStack() as closing:
            closing.callback(self._commits.close)
            for table in self._sharded:
                closing.callback(table.release)

    def __del__(self) -> None:
        commits = getattr(self, "_commits", None)
        if commits is not None and not self._closed and self._pid == os.getpid():
            with contextlib.suppress(Exception):
                commits.close()
