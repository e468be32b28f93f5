"""The core of a sharded table: it has the interface of `_native.Table`. Rows are in `ShardedRows`, commits here.

A commit of all shards is one commit of the run (docs/design/engine.md, rule 14):

1. Every shard begins its commit while no row can change, so all shards commit the same step.
2. Each shard's commit becomes durable, under an epoch that no parent manifest names yet.
3. The parent's manifest names all epochs. From then on the commit exists.

After a failure before step 3, opening the table gives the commit before, in all shards.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from bunkbed.errors import CorruptionError
from bunkbed.files.sharding import Sharding
from bunkbed.run.run import Run
from bunkbed.sharded.base.rows import ShardedRows
from bunkbed.table.commits import PendingCommit
from bunkbed.table.table import Table


class PendingParent:
    """A commit of all shards that was started. It has the interface of `_native.PendingCommit`."""

    def __init__(self, pending: PendingCommit) -> None:
        self.wait = pending.wait
        self._pending = pending

    def is_over(self) -> bool:
        return self._pending.done


class ShardedCore(ShardedRows):
    """All shards, with the interface of `_native.Table`. Owns the run, and with it the shards.

    Args:
        name: name of the sharded table.
        run: the run of the shards, every shard open.
        sharding: the sharding in the run's manifest.
        disk_bytes: limit for the files of all shards, 0 for none.
    """

    def __init__(self, name: str, run: Run, sharding: Sharding, disk_bytes: int) -> None:
        tables = shards_in(run, sharding)
        super().__init__(name, tables[0].spec, [table.plain_core for table in tables], writable=run.mode == "w")
        self._run = run
        self._sharding = sharding
        self._disk_bytes = disk_bytes
        self._commits = threading.RLock()  # guards calls of the run's methods; taken before `ShardedRows._lock`
        self._require_one_step()

    def tables(self) -> list[Table]:
        """Return the shards, in order."""
        return shards_in(self._run, self._sharding)

    def _require_one_step(self) -> None:
        steps = [core.step() for core in self._cores]
        if len(set(steps)) > 1:
            raise CorruptionError(
                f"table '{self.name}': its shards are at different steps ({', '.join(map(str, steps))}) in commit "
                f"{self._run.epoch}; a shard was written on its own, or a folder was put back from elsewhere"
            )

    # ---- Facts

    def epoch(self) -> int:
        """Return the number of the last commit."""
        return self._run.epoch

    def meta(self) -> str:
        """Return the meta of the last commit, as JSON."""
        return json.dumps(self._run.meta)

    def uuid(self) -> bytes:
        """Return the identity of the sharded table."""
        return bytes.fromhex(self._sharding.uuid)

    def stats(self) -> dict[str, int | float]:
        return {**super().stats(), "disk_limit_bytes": self._disk_bytes}

    def snapshots(self) -> list[tuple[str, int]]:
        """Return (name, epoch) of the kept commits, oldest first."""
        self._require_own_process()
        with self._commits:
            self._require_open()
            return list(self._run.snapshots().items())

    # ---- Commits

    def begin_commit(self, meta: str | None, keep: str) -> PendingParent:
        """See `bunkbed.Table.begin_commit`."""
        self._require_own_process()
        with self._commits:
            # Wait for the commit under way without the lock of the rows, so that other calls can use rows.
            self._run.settle(report=True)
            with self.alone(write=True):
                facts = None if meta is None else json.loads(meta)
                return PendingParent(self._run.begin_commit(meta=facts, keep=keep or None))

    def commit(self, meta: str | None, keep: str) -> int:
        """See `bunkbed.Table.commit`."""
        self._require_own_process()
        with self._commits:
            self._run.settle(report=True)
            with self.alone(write=True):
                if meta is None and not keep and not self._run.is_behind():
                    return self._run.epoch
            return self.begin_commit(meta, keep).wait()

    def drop(self, name: str) -> None:
        """See `bunkbed.Table.drop`."""
        self._require_own_process()
        with self._commits:
            self._run.settle(report=True)
            with self.alone(write=True):
                self._run.drop(name)

    def rewind(self, name: str, epoch: int | None) -> None:
        """See `bunkbed.Table.rewind`. A torn table accepts this call; afterwards it is no longer torn."""
        self._require_own_process()
        with self._commits, self._lock:
            self._require_open()
            self._require_writer()
            self._run.settle(report=True)
            to = name if epoch is None else epoch
            self._run.folder.find(to)
            before, was_torn = self._epochs(), self._torn
            self._torn = f"going back to commit {to!r} failed half-way"
            try:
                self._run.rewind(to)
            except BaseException as error:
                if isinstance(error, Exception) and self._epochs() == before and not self._is_broken():
                    self._torn = was_torn  # nothing moved
                else:
                    self._torn += f" ({error})"
                raise
            self._require_one_step()
            self._torn = ""

    def _epochs(self) -> list[int]:
        return [core.epoch() for core in self._cores]

    # ---- Readers

    def refresh(self, to: int | None = None) -> int:
        """See `bunkbed.Table.refresh`. Move all shards to the commit that the parent names, or none of the shards."""
        assert to is None, "the parent's commits are those of a run"
        self._require_own_process()
        with self._lock:
            self._require_open()
            if self._writable:
                raise ValueError(
                    f"table '{self.name}' is open for writing and always up to date; refresh() is for readers"
                )
            try:
                self._run.refresh()
            finally:
                self._torn = self._run.torn
            self._torn = "its shards are at different steps"  # until it is known that they are not
            self._require_one_step()
            self._torn = ""
            return self._run.epoch

    def file_of(self, number: int) -> Path:
        """Return the file of a commit."""
        return self._run.folder.manifest_path(number)

    def newest(self) -> int:
        """Return the number of the commit that `refresh` moves to."""
        with self._lock:
            self._require_open()
            return self._run.epoch + self._run.behind

    # ---- Closing

    def close(self) -> None:
        """Close all shards without a commit. In a child after a fork do nothing: the shards are the parent's."""
        if self._pid != os.getpid():
            return
        with self._commits, self._lock:
            self._closed = True
            self._run.close(commit=False)
        self._threads.shutdown()


def shards_in(run: Run, sharding: Sharding) -> list[Table]:
    """Return the open shards, in order."""
    return [run.tables[name] for name in sharding.names()]
