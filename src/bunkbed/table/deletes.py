"""Rows that go: by name, or by the table's rules."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from bunkbed import _native
from bunkbed.core.arguments import Floats, Ids, as_flag, as_ids
from bunkbed.core.retention import Retention
from bunkbed.errors import ReadOnlyError
from bunkbed.table.core import Core
from bunkbed.table.sweeps import NEVER_GOES, Swept, as_usage, from_usage, sweep


class TableDeletes:
    """The part of `bunkbed.Table` that removes rows."""

    core: Core
    spec: _native.TableSpec
    _name: str
    _ram_bytes: int
    _mode: Literal["w", "r"]
    _path: Path | None
    _run: object
    _expired_rows = 0
    _evicted_rows = 0

    def _writing(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def _reading(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    @property
    def retention(self) -> Retention:
        """See `bunkbed.table.facts.TableFacts`."""
        raise NotImplementedError

    @property
    def usage_fields(self) -> list[tuple[int, int]]:
        """See `bunkbed.table.facts.TableFacts`."""
        raise NotImplementedError

    def delete(self, ids: ArrayLike) -> int:
        """Delete rows: each looks up as its initial row again, and is stored with fresh optimizer state when updated.

        A delete is an ordinary change: it is durable with the next commit, and readers, copies and `changes` see it.
        It frees the row's memory at once and its disk through compaction. Until then the log has 16 bytes for each
        deleted row. Deletes of many rows in one call are faster and take less disk than one call for each row.

        Args:
            ids: int64[...]; may have repeated ids, and ids of rows that are not stored.

        Returns:
            The number of rows that were stored and are deleted now.

        Raises:
            IndexError, TypeError: see `lookup`; nothing is changed.
            ReadOnlyError: the table is open for reading.
            OSError: the disk, or the limit ``disk=``, has no room for the tombstones. BunkbedError: a call larger than
            the table's memory failed half-way; the table refuses use until it is reopened at its last commit.

        >>> import bunkbed as bb, numpy as np
        >>> table = bb.create(None, dim=2, init=bb.Zeros(), optimizer=bb.SGD(lr=1.0))
        >>> table.update([7, 8], np.ones((2, 2), np.float32))
        >>> table.delete([7, 7, 9])
        1
        >>> table.lookup([7, 8]).tolist(), len(table)
        ([[0.0, 0.0], [-1.0, -1.0]], 1)
        """
        array = as_ids(ids, table=f"table '{self._name}'")
        with self._writing():
            rows, _ = self.core.erase(array.reshape(-1))
        return rows

    def sweep(self, dry_run: bool = False) -> Swept:
        """Remove the rows that have expired, and those beyond ``max_rows``, by the rules in `retention`.

        A sweep is an ordinary change of the table at its present step, as `delete` is. It removes the same rows for
        every budget, number of threads and number of shards, and is durable with the next commit. With ``expire=``, ids
        that were not named for so long lose their counts of ``admit=n``, too. Call it between two steps. It reads the
        whole table once for each `ram` / 512 rows that go; while it searches, it takes up to a tenth more memory than
        the budget. A padding row of a layer stays.

        Args:
            dry_run: True: remove nothing; say what would go. A reader can do that, too. It reads as much.

        Returns:
            What went, and the ages and counts of the rows before.

        Raises:
            ValueError: the table has no rule. BunkbedError: another thread changed the table meanwhile. ReadOnlyError:
            a reader, unless `dry_run`. OSError: see `delete`. Rows that went before an error stay removed, and another
            call removes the others.

        >>> import bunkbed as bb, numpy as np
        >>> table = bb.create(None, dim=2, expire=2, max_rows=2)
        >>> for ids in ([1, 2], [2, 3, 4], [3, 4, 5]):
        ...     table.update(ids, np.ones((len(ids), 2), np.float32))
        >>> swept = table.sweep()
        >>> swept.rows, swept.expired, swept.evicted, table.contains([1, 2, 3, 4, 5]).tolist()
        (5, 1, 2, [False, False, False, True, True])
        """
        as_flag(dry_run, what="dry_run", table=f"table '{self._name}'")
        rules = self.sweep_rules()
        if self._mode == "r" and not dry_run:
            raise ReadOnlyError(
                f"table '{self._name}' is open for reading, and only its writer sweeps; sweep(dry_run=True) says "
                "what would go"
            )
        with self._reading() if dry_run else self._writing():
            now = self.core.clock()
            swept = self.swept_by(rules, now, dry_run=dry_run)
            if not dry_run and rules.expire is not None:
                self.core.forget_counts(max(0, now - rules.expire + 1))
        if not dry_run:
            self._expired_rows += swept.expired
            self._evicted_rows += swept.evicted
        return swept

    def sweep_rules(self) -> Retention:
        """Internal: return the rules; raise ValueError where there is none."""
        rules = self.retention
        if not rules.removes:
            raise ValueError(
                f"table '{self._name}' has no rule by which rows go: it was made without expire= and max_rows=; name "
                "the rows with delete(ids)"
            )
        return rules

    def swept_by(self, rules: Retention, clock: int, *, dry_run: bool) -> Swept:
        """Internal: sweep by these rules as if it were `clock`; others than the table's for a dry run only."""
        use = self.spec.memory_use(1, 0, 4096, True)
        bytes_each = int(use["record_bytes" if self._path is None and self._run is None else "stored_bytes"])
        return sweep(self.core, self._name, rules, clock, self._ram_bytes, bytes_each, dry_run=dry_run)

    def put(self, ids: Ids, values: Floats, field: int) -> None:
        """Internal: set rows without a check of the clock."""
        with self._writing():
            self.core.set(ids, field, values)

    def spare(self, row: int) -> None:
        """Internal: keep a stored row from every sweep."""
        ids = np.array([row], np.int64)
        for field, length in self.usage_fields:
            found = np.empty((1, length), np.float32)
            with self._reading():
                self.core.get(ids, field, found)
            if from_usage(found)[0][0] != NEVER_GOES:
                self.put(ids, as_usage(np.array([NEVER_GOES]), np.array([0])), field)

    def _require_time(self) -> None:
        """Raise ValueError where rows would be dated by a clock that was not set."""
        if self.spec.retention.clock and self.core.clock() < 0:
            raise ValueError(
                f"table '{self._name}': its rows expire by clock=\"event\", which was not set; assign table.clock "
                "before rows are set; nothing was changed"
            )

    def _removed_rows(self) -> dict[str, int]:
        """Return the counters of `sweep`, for `stats`."""
        has_ages = self.retention.removes
        return {"expired_rows": self._expired_rows, "evicted_rows": self._evicted_rows} if has_ages else {}
