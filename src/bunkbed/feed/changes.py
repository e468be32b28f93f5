"""`changes`: the rows of a table that changed since a commit, and the ids of the rows that were deleted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bunkbed import _native
from bunkbed.core.arguments import Floats, Ids, as_whole
from bunkbed.core.budget import parse_bytes
from bunkbed.core.typed import typed
from bunkbed.feed import positions
from bunkbed.feed.parts import Parts, commits_at, parts_of
from bunkbed.files.run_files import kept_commits

#: How often `changes` looks for a newer commit; the writer may collect the one it found.
_ATTEMPTS = 20


@dataclass(frozen=True)
class Change:
    """Some of the changes between two commits. No id is in two.

    Attributes:
        ids: int64[n], the rows that were stored or changed.
        rows: float32[n, dim], their newest weights.
        deleted: int64[m], the rows that were deleted.
        version: number of the commit that the rows are of.
    """

    ids: Ids
    rows: Floats
    deleted: Ids
    version: int


class Changes:
    """The changes since a commit, to be iterated over once. Not thread-safe; `changes` makes it.

    Attributes:
        since: number of the commit that the consumer has; 0 for none.
        version: number of the commit that the changes lead to.
        dim: numbers in a row.
    """

    def __init__(
        self, parts: Parts, feeds: list[_native.Changes], since: int, cursor: str | None, chunk: int, came: list[int]
    ) -> None:
        self._parts = parts
        self._feeds = feeds
        self._cursor = cursor
        self._chunk = chunk
        self.since = since
        self.version = feeds[0].commit() if parts.commit is None else parts.commit
        self.dim = feeds[0].dim()
        self._is_used = False
        #: Internal: of each part that the consumer has not read whole yet, the commit when it came; 0 for the others.
        self.came = came

    def __iter__(self) -> Iterator[Change]:
        yield from self.unacknowledged()
        self.acknowledge()

    # Internal: the changes, without moving the cursor at their end.
    def unacknowledged(self) -> Iterator[Change]:
        if self._is_used:
            raise RuntimeError("the changes were iterated over before; call bunkbed.changes again")
        self._is_used = True
        nothing = np.empty(0, np.int64)
        no_rows = np.empty((0, self.dim), np.float32)
        for feed in self._feeds:
            while True:
                ids, deleted = np.empty(self._chunk, np.int64), np.empty(self._chunk, np.int64)
                rows = np.empty((self._chunk, self.dim), np.float32)
                stored, gone = feed.next(ids, rows, deleted)
                if stored:
                    yield Change(ids[:stored], rows[:stored], nothing, self.version)
                elif gone:
                    yield Change(nothing, no_rows, deleted[:gone], self.version)
                else:
                    break

    # Internal: the files of a cursor at `version`, one for each part.
    def positions(self) -> list[bytes]:
        return [feed.cursor() for feed in self._feeds]

    def acknowledge(self) -> None:
        """Move the cursor to `version`, durably. The end of a loop over the changes does that by itself."""
        self.acknowledge_at(self.positions(), self.version)

    @property
    def cursor(self) -> str | None:
        """The name of the cursor, if `since` was one."""
        return self._cursor

    # Internal: moves the cursor to a commit whose changes were delivered.
    def acknowledge_at(self, files: list[bytes], version: int) -> None:
        if self._cursor is not None:
            positions.save(self._parts, self._cursor, files, version)


@typed
def changes(
    path: str | os.PathLike[str],
    since: int | str = 0,
    *,
    table: str | None = None,
    chunk: int = 65_536,
    ram: float | str = "256MiB",
) -> Changes:
    """Return the rows that changed between a commit and the newest one, each once, and the ids of deleted rows.

    Reads only files: the table may be open for writing, here or in another process, and goes on meanwhile. The time
    follows the number of changed rows, not the size of the table. A row counts as changed when it was updated or set,
    also to the value that it had. Changes that are not committed are not seen.

    A commit that `since` names must still exist: a table keeps its newest two commits, and those that are kept by name.
    A consumer that comes less often uses a cursor: ``since="a name"``. The first call with a new name gives every row.
    When a loop over the changes ends, the cursor moves to their commit, durably. A loop that fails, or a process that
    dies in it, leaves the cursor where it was: the next call gives the changes again. Each consumer has its own cursor,
    and begins with an empty store: `Changes.since` is 0 then.
    The writer keeps what a cursor needs: 16 bytes for each row that was deleted. So drop a cursor that is no longer in
    use (`drop_cursor`).

    Args:
        path: a table, a sharded table, or a run.
        since: number of the commit that the consumer has, 0 for none (then every stored row is given, and no deletion);
            or the name of a cursor.
        table: name of the table, where `path` is a run with several.
        chunk: the most rows of one `Change`.
        ram: memory for ids and versions, 24 bytes a changed row; with less, the indexes are read several times.

    Raises:
        ValueError: the commit is in the future, is gone, or was undone by going back to an earlier one; or rows
            deleted since then are no longer known. Read every row into an empty store then, with ``since=0`` or after
            `drop_cursor`. Or a new cursor has the name of a snapshot.
        CorruptionError: a file is damaged. FileNotFoundError: no such table.

    >>> import bunkbed as bb, numpy as np
    >>> table = bb.create("feed-example", dim=2, init=bb.Zeros(), optimizer=bb.SGD(lr=1.0))
    >>> table.update([1, 2], np.ones((2, 2), np.float32))
    >>> first = table.commit()
    >>> table.update([2, 3], np.ones((2, 2), np.float32))
    >>> table.delete([1])
    1
    >>> second = table.commit()
    >>> for change in bb.changes("feed-example", since=first):
    ...     print(change.ids.tolist(), change.rows[:, 0].tolist(), change.deleted.tolist())
    [2, 3] [-2.0, -1.0] []
    [] [] [1]
    """
    place = Path(path).expanduser().absolute()
    chunk = as_whole(chunk, what="chunk", table="changes", low=1, high=2**31 - 1)
    cursor = positions.checked_name(since) if isinstance(since, str) else None
    if isinstance(since, int):
        as_whole(since, what="since", table="changes", low=0, high=10**15)
    for attempt in range(_ATTEMPTS):
        parts = parts_of(place, table)
        try:
            return _open(parts, since, cursor, chunk, parse_bytes(ram))
        except FileNotFoundError:
            if attempt == _ATTEMPTS - 1 or parts.commit == parts_of(place, table).commit:
                raise
    raise AssertionError


def _open(parts: Parts, since: int | str, cursor: str | None, chunk: int, ram: int) -> Changes:
    advice = "; read every row with since=0 into an empty store; a cursor (since='a name') keeps what it needs"
    if cursor is not None:
        advice = (
            f"; empty your store, or your folder of changes, then drop cursor {cursor!r} (bunkbed.drop_cursor, bunkbed "
            "changes --drop-cursor): the next call gives every row"
        )
        commit = positions.commit_of(parts, cursor)
        if commit == 0:
            _require_no_snapshot(parts, cursor)
            positions.make(parts, cursor)
        held = [positions.position_of(part, cursor) for part in parts.parts]
        if commit > 0 and 0 in [own for own, _, _ in held]:
            raise ValueError(
                f"'{parts.label}': the table was divided into other shards after cursor {cursor!r} was saved, so its "
                f"changes since then are not known{advice}"
            )
    else:
        assert isinstance(since, int)
        commit = since
        if parts.commit is not None and since > parts.commit:
            raise ValueError(f"'{parts.label}': commit {since} is in the future; the newest one is {parts.commit}")
        held = [(own, 0, False) for own in commits_at(parts, since)]
    feeds = [
        _native.Changes(str(part.folder), parts.label, *position, part.commit, ram, advice)
        for part, position in zip(parts.parts, held, strict=True)
    ]
    return Changes(parts, feeds, commit, cursor, chunk, [own if is_new else 0 for own, _, is_new in held])


def _require_no_snapshot(parts: Parts, name: str) -> None:
    snapshots = kept_commits(parts.home)
    if name in snapshots:
        raise ValueError(
            f"'{parts.label}': {name!r} is a snapshot, and a text is a cursor; for the changes since the snapshot give "
            f"the number of its commit, {snapshots[name]}, or give the cursor another name"
        )


@typed
def cursors(path: str | os.PathLike[str], *, table: str | None = None) -> dict[str, int]:
    """Return the cursors of a table's change feed: name -> the number of the commit that its consumer has.

    Args:
        path, table: see `changes`.

    Raises:
        FileNotFoundError: no such table. CorruptionError: a cursor is damaged.
    """
    parts = parts_of(Path(path).expanduser().absolute(), table)
    return {name: positions.commit_of(parts, name) for name in positions.names_in(parts)}


@typed
def drop_cursor(path: str | os.PathLike[str], name: str, *, table: str | None = None) -> None:
    """Drop the cursor of a consumer that no longer reads the changes; the writer then keeps nothing for it.

    Args:
        path, table: see `changes`.
        name: name of the cursor.

    Raises:
        ValueError: no such cursor; the message lists the positions.
    """
    parts = parts_of(Path(path).expanduser().absolute(), table)
    known = positions.names_in(parts)
    if name not in known:
        raise ValueError(f"'{parts.label}' has no cursor {name!r}; it has: {', '.join(known) or 'none'}")
    positions.remove(parts, name)
