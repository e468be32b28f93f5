"""What is served: a table, or the tables of a run, open for reading and following their writer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

import bunkbed as bb
from bunkbed.core.arguments import Ids
from bunkbed.core.budget import format_bytes
from bunkbed.errors import BunkbedError
from bunkbed.files.kinds import kind_of
from bunkbed.serve.settings import ServeSettings
from bunkbed.train.settings.run_config import CONFIG_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

    from bunkbed.serve.labels import LabelIndex
    from bunkbed.train.data.vocab import Label
    from bunkbed.train.trained import Recommender

_R = TypeVar("_R")
Columns = dict[str, "npt.NDArray[np.generic] | pa.Array"]
#: How often a request is tried again because the writer collected the commit that it reads.
_ATTEMPTS = 5
#: How often a request may read the bytes of ``--max-scan`` again from RAM.
_SCANS = 8
#: Users whose scores are computed together.
_USERS_AT_ONCE = 256


class BadRequest(ValueError):
    """The request cannot be answered; the message says why and what to do. `status` is that of the HTTP answer."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Found(NamedTuple):
    """An answer: columns of equal length, of one commit.

    Attributes:
        version: number of the commit.
        columns: arrays ``[N]`` or, of rows, ``float32[N, dim]``; labels as Arrow arrays.
    """

    version: int
    columns: Columns


@dataclass(frozen=True)
class Served:
    """A table that is served, and the labels of its rows in a training run, or None."""

    table: bb.Table
    labels: LabelIndex | None = None

    def named(self, ids: Ids, *, by_label: bool) -> Columns:
        """Return ids as the column ``id``, or, where they have labels and these are wanted, ``label``."""
        return {"label": self.labels.vocab.take(ids)} if by_label and self.labels is not None else {"id": ids}


class Source:
    """A table or a run that is served. Thread-safe.

    Owns the open reader; `close` closes it. Every answer is of one commit.

    Raises:
        FileNotFoundError, FormatError: nothing to serve is there. ModuleNotFoundError: a training run, without what
        the extra ``train`` installs.
    """

    def __init__(self, settings: ServeSettings) -> None:
        path = Path(settings.path)
        self._settings = settings
        self.recommender: Recommender | None = None
        self.name = path.resolve().name
        self.reader: bb.Table | bb.Run
        if kind_of(path) != "run":
            self.reader = bb.open(path, mode="r", ram=settings.ram_of_each, snapshot=settings.snapshot)
            self.tables = {self.reader.name: Served(self.reader)}
        elif (path / CONFIG_NAME).exists():
            from bunkbed.serve.labels import LabelIndex
            from bunkbed.train.trained import Recommender

            self.recommender = Recommender.load(path, ram=settings.ram_of_each, snapshot=settings.snapshot)
            self.reader = self.recommender.run
            self._users, self._items = LabelIndex(self.recommender.users), LabelIndex(self.recommender.items)
            labels = {"user": self._users, "item": self._items, "item_bias": self._items}
            self.tables = {name: Served(self.reader.table(name), labels.get(name)) for name in self.reader.table_names}
        else:
            self.reader = bb.Run(path, mode="r", ram=settings.ram_of_each, snapshot=settings.snapshot)
            self.tables = {name: Served(self.reader.table(name)) for name in self.reader.table_names}
        self.reader.watch(settings.max_age_s)

    # ---- Answers

    def lookup(self, table: str | None, ids: Sequence[int] | None, labels: Sequence[Label] | None) -> Found:
        """Return the rows of ids, or of labels, in their order: columns ``id`` or ``label``, and ``row``."""
        served = self._table(table)
        places = self._places(served, ids, labels)

        def read() -> Found:
            named = served.named(places, by_label=labels is not None)
            return Found(self.reader.version, {**named, "row": served.table.lookup(places)})

        return self._at_one_commit(read)

    def neighbors(
        self,
        table: str | None,
        ids: Sequence[int] | None,
        labels: Sequence[Label] | None,
        k: int,
        metric: str,
    ) -> Found:
        """Return the stored rows most similar to each given one.

        Columns ``of``, ``rank`` from 1, ``id`` or ``label``, and ``score``.
        """
        served = self._table(table)
        places = self._places(served, ids, labels)
        self._require_k(k)
        self._require_scan(served.table, len(places))

        def read() -> Found:
            found, scores = bb.neighbors(served.table, places, k, metric=metric)
            owners, ranks = np.nonzero(found >= 0)
            best = found[owners, ranks]
            columns: Columns = {
                "of": next(iter(served.named(places[owners], by_label=labels is not None).values())),
                "rank": ranks + 1,
                **served.named(best, by_label=True),
                "score": scores[owners, ranks],
            }
            return Found(self.reader.version, columns)

        return self._at_one_commit(read)

    def recommend(self, users: Sequence[Label], k: int, include_seen: bool, items: Sequence[Label] | None) -> Found:
        """Return the items with the highest scores for each user: columns ``user``, ``rank``, ``item``, ``score``."""
        model = self.recommender
        if model is None:
            raise BadRequest(f"what is served, {self.name!r}, is no training run: it has no recommendations", 404)
        self._require_number(len(users), "users")
        self._require_k(k)
        self._require_scan(self.tables["item"].table, -(-len(users) // _USERS_AT_ONCE))
        places = _known(self._users, users, "users")
        allowed = None
        if items is not None:
            self._require_number(len(items), "items")
            allowed = np.unique(_known(self._items, items, "items"))

        def read() -> Found:
            best = model.best_of(places, k, include_seen=include_seen, items=allowed)
            owners, ranks = np.nonzero(best.items >= 0)
            columns: Columns = {
                "user": self._users.vocab.take(places[owners]),
                "rank": ranks + 1,
                "item": self._items.vocab.take(best.items[owners, ranks]),
                "score": best.scores[owners, ranks],
            }
            return Found(self.reader.version, columns)

        return self._at_one_commit(read)

    # ---- Facts

    def facts(self) -> dict[str, object]:
        """Return what is served, as JSON-able facts."""
        with self.reader.pinned():
            tables = {
                name: {
                    "dim": served.table.dim,
                    "num_rows": served.table.num_rows,
                    "stored_rows": len(served.table),
                    "dtype": served.table.dtype,
                    "has_labels": served.labels is not None,
                }
                for name, served in self.tables.items()
            }
            version = self.reader.version
        recommends = self.recommender is not None
        return {"name": self.name, "version": version, "tables": tables, "recommends": recommends}

    def health(self) -> dict[str, object]:
        """Return the commit that is shown, its age, and how many are newer (None: unknown).

        Raises:
            BunkbedError: the rows may be older than they may be, and the reader cannot move.
        """
        with self.reader.pinned():
            found: dict[str, object] = {"version": self.reader.version, "age_s": self.reader.age_s, "behind": None}
        with suppress(BunkbedError, OSError, ValueError):  # the files are gone, and the rows not too old yet
            found["behind"] = self.reader.behind
        return found

    def close(self) -> None:
        """Close the reader. Idempotent."""
        self.reader.close(commit=False)

    # ---- Checks

    def _table(self, name: str | None) -> Served:
        if name is None and len(self.tables) == 1:
            return next(iter(self.tables.values()))
        found = self.tables.get(name or "")
        if found is None:
            known = ", ".join(sorted(self.tables))
            if name is None:
                raise BadRequest(f"give table, one of {known}")
            raise BadRequest(f"there is no table {name!r}; there are {known}", 404)
        return found

    def _places(self, served: Served, ids: Sequence[int] | None, labels: Sequence[Label] | None) -> Ids:
        """Return the ids ``int64[N]`` of the rows that a request names."""
        if (ids is None) == (labels is None):
            raise BadRequest("give one of ids and labels")
        given = ids if ids is not None else labels
        assert given is not None
        self._require_number(len(given), "ids" if labels is None else "labels")
        if labels is not None:
            if served.labels is None:
                raise BadRequest(f"the rows of table {served.table.name!r} have no labels; give ids")
            return _known(served.labels, labels, "labels")
        assert ids is not None
        for place, number in enumerate(ids):
            if not -(2**63) <= number < 2**63:
                raise BadRequest(f"id {number} at position {place} is no int64")
        return np.array(ids, np.int64)

    def _require_number(self, number: int, what: str) -> None:
        most = self._settings.max_rows
        if number > most:
            raise BadRequest(f"{number} {what} in one request; the most is {most} (--max-rows)", 413)

    def _require_k(self, k: int) -> None:
        most = self._settings.max_k
        if not 1 <= k <= most:
            raise BadRequest(f"k must be in [1, {most}] (--max-k), got {k}", 413 if k > most else 400)

    def _require_scan(self, table: bb.Table, times: int) -> None:
        """Raise BadRequest where comparing all rows of a table, so many times, would read more than allowed."""
        size, most = 4 * table.dim * len(table), self._settings.max_scan
        if size > most:
            raise BadRequest(
                f"this reads all rows of table {table.name!r}, {format_bytes(size)}; the most is {format_bytes(most)} "
                "(--max-scan)",
                413,
            )
        if size * times > _SCANS * most:
            raise BadRequest(
                f"this compares all rows of table {table.name!r} with too many others; the most is "
                f"{_SCANS * most // size} (--max-scan)",
                413,
            )

    def _at_one_commit(self, read: Callable[[], _R]) -> _R:
        """Call `read` while the reader stays at its commit; again where the writer has collected its files."""
        for attempt in range(_ATTEMPTS):
            try:
                with self.reader.pinned():
                    return read()
            except FileNotFoundError:
                if attempt == _ATTEMPTS - 1:
                    raise
            try:
                self.reader.refresh()
            except ValueError as error:  # for instance the snapshot was dropped: no mistake of the client
                raise BunkbedError(str(error)) from error
        raise AssertionError("unreachable")


def _known(index: LabelIndex, labels: Sequence[Label], what: str) -> Ids:
    """Return the ids ``int64[N]`` of labels; raise BadRequest for an unknown one."""
    found = index.find(labels)
    for place in np.flatnonzero(found < 0)[:1].tolist():
        known = f"{len(index.vocab):,} known"
        raise BadRequest(f"{what}[{place}] is {labels[place]!r}, which is not among the {known}", 404)
    return found


@contextmanager
def opened(settings: ServeSettings, given: Source | None = None) -> Iterator[Source]:
    """Open what is served, and close it afterwards; or pass on what is open."""
    if given is not None:
        yield given
        return
    source = Source(settings)
    try:
        yield source
    finally:
        source.close()
