"""Commits of a table: made, kept, gone back to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from bunkbed import _native
from bunkbed.core.arguments import as_whole
from bunkbed.core.typed import shortened, typed
from bunkbed.errors import BunkbedError


class PendingCommit:
    """A commit that was begun: what it holds is settled, when it is durable is not.

    Thread-safe. Needs no closing: the table, or run, finishes the commit whether anybody waits or not.
    """

    def __init__(self, wait: Callable[[], int], is_over: Callable[[], bool]) -> None:
        self._wait = wait
        self._is_over = is_over

    @property
    def done(self) -> bool:
        """True once it is durable or has failed; does not wait."""
        return self._is_over()

    def wait(self) -> int:
        """Return its epoch once it is durable.

        Raises:
            OSError: it failed: the disk is full or failing. The last commit stands, no row is lost, and the next commit
                holds every row that this one did; `meta` and `keep` of a table are to be given again.
        """
        return self._wait()


class BackgroundCommit:
    """The rest of a commit, on a thread of its own. Thread-safe."""

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
        except BaseException as error:  # raised where somebody waits
            self._error = error

    def done(self) -> bool:
        """Whether it came to its end."""
        return not self._thread.is_alive()

    def result(self) -> int:
        """Wait; its epoch, or what it failed with."""
        self._thread.join()
        if self._error is not None:
            self._is_reported = True
            raise self._error
        return self._epoch

    def settle(self, *, report: bool) -> None:
        """Wait; with `report`, raise what it failed with unless somebody was told."""
        self._thread.join()
        if report and not self._is_reported:
            self.result()


def meta_text(meta: dict[str, Any], label: str) -> str:
    """What `commit` is given as `meta`, as JSON.

    Raises:
        TypeError: it is not a dict, or holds what JSON has no word for.
    """
    if not isinstance(meta, dict):
        raise TypeError(f"{label}: meta must be a dict, got {shortened(meta)}")
    try:
        return json.dumps(meta)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{label}: meta must be JSON-able: {error}") from None


class TableCommits:
    """What `bunkbed.Table` has of commits."""

    _name: str
    _native: _native.Table
    _run: Any
    _above: Any

    @typed
    def commit(self, meta: dict[str, Any] | None = None, keep: str | None = None) -> int:
        """Make everything so far durable.

        Calls of other threads go on meanwhile; what they change after this call began belongs to the next commit.
        Of a scratch table (see `bunkbed.create`) nothing becomes durable: the epoch is counted, `meta` remembered.

        Args:
            meta: JSON-able facts stored with the commit; `meta` reads them back. None keeps the last ones.
            keep: name under which this commit is kept as a snapshot. A name used before moves here.

        Returns:
            The epoch. Without changes since the last commit, and without `meta` or `keep`, that one's.

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
    def begin_commit(self, meta: dict[str, Any] | None = None, keep: str | None = None) -> PendingCommit:
        """`commit` without waiting: training goes on while a thread makes it durable.

        It holds every change made before this call and none made after it. A second one waits for the first to end.

        Args:
            meta, keep: see `commit`; `meta` and `epoch` tell of it once it is durable.

        Returns:
            What to wait on. A failure that nobody waited for is raised by the next commit, or `close`.

        Raises:
            ReadOnlyError: a reader. BunkbedError: the table belongs to a run. OSError: an earlier one failed.

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

    def _begin_commit(self, meta: dict[str, Any] | None, keep: str | None) -> PendingCommit:
        with self._reading():  # what the commit holds is settled within: all of a step above, or nothing of it
            pending = self._native.begin_commit(self._checked_meta(meta), self._checked_keep(keep))
        return PendingCommit(pending.wait, pending.is_over)

    def _commit(self, meta: dict[str, Any] | None, keep: str | None) -> int:
        if self._above is not None:
            return self._begin_commit(meta, keep).wait()  # training above goes on while it is written
        return int(self._native.commit(self._checked_meta(meta), self._checked_keep(keep)))

    def _checked_keep(self, keep: str | None) -> str:
        if keep is not None and (not isinstance(keep, str) or not keep):
            raise ValueError(f"table '{self._name}': keep must be a name, got {keep!r}")
        return keep or ""

    def _checked_meta(self, meta: dict[str, Any] | None) -> str | None:
        return None if meta is None else meta_text(meta, f"table '{self._name}'")

    def snapshots(self) -> dict[str, int]:
        """Kept commits: name -> epoch, oldest first."""
        return dict(self._native.snapshots())

    @typed
    def drop(self, name: str) -> None:
        """Forget a snapshot; its space is freed where no other commit needs it.

        Raises:
            ValueError: no such snapshot; lists those there are.
        """
        self._native.drop(name)

    @typed
    def rewind(self, to: str | int) -> None:
        """Go back to a kept commit, optimizer state and step too; it becomes the newest commit.

        Args:
            to: a snapshot's name, or an epoch that still exists.

        Raises:
            ValueError: no such commit; lists those that remain. ReadOnlyError: a reader.
        """
        if self._run is not None:
            raise BunkbedError(f"table '{self._name}' belongs to a run; go back with run.rewind()")
        self._rewind(to)

    def _reading(self) -> AbstractContextManager[None]:
        """Within, the table has the newest rows; see `bunkbed.table.table.Above`."""
        raise NotImplementedError

    def _writing(self) -> AbstractContextManager[None]:
        """Within, the table may change; see `bunkbed.table.table.Above`."""
        raise NotImplementedError

    def _rewind(self, to: str | int) -> None:
        with self._writing():
            if isinstance(to, str):
                self._native.rewind(to, None)
            else:
                self._native.rewind("", as_whole(to, what="to", table=f"table '{self._name}'", low=0, high=2**64 - 1))

    def refresh(self) -> int:
        """Reader only: move to the newest commit, at the cost of what changed since. Returns its epoch.

        Rows with a new record leave the cache; the others stay. Where the table went back to an earlier commit, the
        reader finds all its rows anew, as opening does. ``stats()["indexed_records"]`` counts the records looked at.
        """
        return int(self._native.refresh())

    def compact(self) -> int:
        """Compact the log now rather than little by little. Returns how many records were moved."""
        return int(self._native.compact())
