"""Commits of a table: commit, keep under a name, rewind."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from bunkbed.core.arguments import as_whole
from bunkbed.core.typed import shortened, typed
from bunkbed.core.types import Json
from bunkbed.errors import BunkbedError
from bunkbed.table.core import Core


class PendingCommit:
    """A commit that was started: its contents are settled, and it becomes durable in the background.

    Thread-safe. Needs no closing: the table, or run, finishes the commit whether or not a thread waits for it.
    """

    def __init__(self, wait: Callable[[], int], is_over: Callable[[], bool]) -> None:
        self._wait = wait
        self._is_over = is_over

    @property
    def done(self) -> bool:
        """True once the commit is durable or has failed; does not wait."""
        return self._is_over()

    def wait(self) -> int:
        """Wait until the commit is durable; return its epoch.

        Raises:
            OSError: the commit failed, because the disk is full or failing. The commit before is still valid, no row
                is lost, and the next commit holds every row of this one; give `meta` and `keep` again.
        """
        return self._wait()


def wait_for_all(pending: Mapping[str, PendingCommit]) -> dict[str, int]:
    """Wait for commits by name; return their epochs. An error is raised when all have ended.

    The next commit would raise an error of one that was not waited for.
    """
    epochs, errors = {}, []
    for name, one in pending.items():
        try:
            epochs[name] = one.wait()
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return epochs


class BackgroundCommit:
    """A thread that finishes a commit. Thread-safe."""

    def __init__(self, finish: Callable[[], int]) -> None:
        self._finish = finish
        self._epoch = 0
        self._error: BaseException | None = None
        self._is_reported = False
        self._thread = threading.Thread(target=self._run, name="bunkbed-commit")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._epoch = self._finish()
        except BaseException as error:  # raised by `result` or `settle`
            self._error = error

    def done(self) -> bool:
        """Return whether the thread has ended."""
        return not self._thread.is_alive()

    def result(self) -> int:
        """Wait for the thread; return the epoch, or raise the error that it failed with."""
        self._thread.join()
        if self._error is not None:
            self._is_reported = True
            raise self._error
        return self._epoch

    def settle(self, *, report: bool) -> None:
        """Wait for the thread; with `report`, raise its error unless `result` raised it before."""
        self._thread.join()
        if report and not self._is_reported:
            self.result()


def meta_text(meta: Json, label: str) -> str:
    """Return the argument `meta` of `commit` as JSON.

    Raises:
        TypeError: `meta` is not a dict, or holds a value that JSON cannot represent.
    """
    if not isinstance(meta, dict):
        raise TypeError(f"{label}: meta must be a dict, got {shortened(meta)}")
    try:
        return json.dumps(meta)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{label}: meta must be JSON-able: {error}") from None


class TableCommits:
    """The part of `bunkbed.Table` that commits, keeps and rewinds."""

    _name: str
    core: Core
    _run: Any
    _above: object

    @typed
    def commit(self, meta: Json | None = None, keep: str | None = None) -> int:
        """Make all changes so far durable.

        Other threads may use the table meanwhile; what they change after the start of this call is in the next commit.
        For a scratch table (see `bunkbed.create`) nothing becomes durable: the call counts the epoch and keeps `meta`.

        Args:
            meta: JSON-able facts stored with the commit; `meta` reads them back. None keeps those of the last commit.
            keep: name under which this commit is kept as a snapshot. A name in use moves to this commit.

        Returns:
            The epoch; that of the last commit if nothing changed since and `meta` and `keep` are None.

        Raises:
            OSError: the disk is full (nothing is lost, free space and call again) or failing (after a failed sync the
                table refuses writes until reopened). ReadOnlyError: a reader. BunkbedError: the table belongs to a run.
            ValueError: `keep` for a scratch table.
        """
        if self._run is not None:
            raise BunkbedError(
                f"table '{self._name}' belongs to a run; commit all its tables together with run.commit()"
            )
        return self._commit(meta, keep)

    @typed
    def begin_commit(self, meta: Json | None = None, keep: str | None = None) -> PendingCommit:
        """Start a commit that a thread makes durable while training continues.

        The commit holds every change made before this call and none made after it. A second commit waits for the first.

        Args:
            meta, keep: see `commit`; `Table.meta` and `Table.epoch` show this commit once it is durable.

        Returns:
            The pending commit. If it fails and `wait` was not called, the next commit, or `close`, raises its error.

        Raises:
            ReadOnlyError: a reader. BunkbedError: the table belongs to a run. OSError: an earlier commit failed.

        >>> import bunkbed as bb, numpy as np, tempfile
        >>> with bb.create(f"{tempfile.mkdtemp()}/user", dim=2, num_rows=10, ram="16MiB") as table:
        ...     table.update(np.array([3]), np.ones((1, 2), np.float32))
        ...     pending = table.begin_commit(meta={"step": table.step})
        ...     table.update(np.array([3]), np.ones((1, 2), np.float32))  # part of the next commit
        ...     pending.wait(), table.meta
        (1, {'step': 1})
        """
        if self._run is not None:
            raise BunkbedError(
                f"table '{self._name}' belongs to a run; commit all its tables together with run.begin_commit()"
            )
        return self._begin_commit(meta, keep)

    # Internal: the calls of the run that commits this table together with others.

    def commit_in_run(self) -> int:
        return self._commit(None, None)

    def begin_commit_in_run(self) -> PendingCommit:
        return self._begin_commit(None, None)

    def rewind_in_run(self, epoch: int) -> None:
        self._rewind(epoch)

    def _begin_commit(self, meta: Json | None, keep: str | None) -> PendingCommit:
        with self._reading():  # so that the commit holds all of a device cache's step, or nothing of it
            pending = self.core.begin_commit(self._checked_meta(meta), self._checked_keep(keep))
        return PendingCommit(pending.wait, pending.is_over)

    def _commit(self, meta: Json | None, keep: str | None) -> int:
        if self._above is not None:
            return self._begin_commit(meta, keep).wait()  # the device cache may train while the commit is written
        return int(self.core.commit(self._checked_meta(meta), self._checked_keep(keep)))

    def _checked_keep(self, keep: str | None) -> str:
        if keep is not None and (not isinstance(keep, str) or not keep):
            raise ValueError(f"table '{self._name}': keep must be a name, got {keep!r}")
        return keep or ""

    def _checked_meta(self, meta: Json | None) -> str | None:
        return None if meta is None else meta_text(meta, f"table '{self._name}'")

    def snapshots(self) -> dict[str, int]:
        """Return the kept commits: name -> epoch, oldest first."""
        return dict(self.core.snapshots())

    @typed
    def drop(self, name: str) -> None:
        """Remove a snapshot; its space is freed where no other commit needs it.

        Raises:
            ValueError: no such snapshot; the message lists the snapshots.
        """
        self.core.drop(name)

    @typed
    def rewind(self, to: str | int) -> None:
        """Go back to an earlier commit, with its optimizer state and step; it becomes the newest commit.

        Args:
            to: a snapshot's name, or an epoch that still exists; of a table in RAM only also 0, the table as it was
                made.

        Raises:
            ValueError: no such commit; the message lists the commits that remain. ReadOnlyError: a reader.
        """
        if self._run is not None:
            raise BunkbedError(f"table '{self._name}' belongs to a run; go back with run.rewind()")
        self._rewind(to)

    def _reading(self) -> AbstractContextManager[None]:
        """Return a context in which the table has the newest rows; see `bunkbed.table.core.Above`."""
        raise NotImplementedError

    def _writing(self) -> AbstractContextManager[None]:
        """Return a context in which the table may change; see `bunkbed.table.core.Above`."""
        raise NotImplementedError

    def _rewind(self, to: str | int) -> None:
        with self._writing():
            if isinstance(to, str):
                self.core.rewind(to, None)
            else:
                self.core.rewind("", as_whole(to, what="to", table=f"table '{self._name}'", low=0, high=2**64 - 1))

    def compact(self) -> int:
        """Compact the log in this call, not in small parts. Return how many records were moved.

        The last two commits keep their files, so the second commit after this call frees the disk.
        """
        return int(self.core.compact())
