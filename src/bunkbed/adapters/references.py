"""The reference that a framework's checkpoint holds for a table: it names a kept epoch and has no rows.

The reference is the table's uuid and name, the epoch and the step; where the framework's checkpoint can hold them, also
epochs with the same contents that the user has named. Such a name may move, so the epoch that it names does not count
as kept there. Saving commits the table and keeps that epoch under an automatic name. A file that refers to it may exist
as long as the table, so all of these epochs stay by default; with `References.keep` the oldest beyond that number are
dropped, and a warning says so. Loading rewinds the writer to the epoch, with optimizer state. Each framework's adapter
decides how to store the values.

- Saving twice without a change makes one commit and one kept epoch. So do two layers on one table.
- Only its run commits a table of a `bunkbed.Run`. The reference then only names the table, and ``run.rewind`` sets
  tables and dense weights back together.
- A table in RAM only keeps its epochs in this process. Going back to an epoch works as with files; loading in another
  process is an error that asks for a path.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from bunkbed.core.types import Json
from bunkbed.table.table import Table

#: Kept epochs that take less are not worth a warning.
_MANY_BYTES = 1 << 30
_log = logging.getLogger("bunkbed")


@dataclass(frozen=True)
class Reference:
    """A kept epoch of a table."""

    uuid: str
    table: str
    epoch: int
    step: int
    also: tuple[int, ...] = ()

    def fields(self) -> Json:
        """Return the values by name."""
        return asdict(self)


class References:
    """Kept epochs of one table, for every layer on it.

    Args:
        table: the `bunkbed.Table`.
        prefix: prefix of the names under which epochs are kept.
        saved: name of the framework's checkpoint in errors: ``"state_dict"``.
        rewound: called after the table was rewound.
        can_hold_also: whether the framework's checkpoint can hold `Reference.also`.

    Not thread-safe.
    """

    def __init__(
        self,
        table: Table,
        prefix: str,
        saved: str,
        rewound: Callable[[], None] = lambda: None,
        *,
        can_hold_also: bool = False,
    ) -> None:
        self.table = table
        self.keep: int | None = 0
        self._has_warned = False
        self._warned_bytes = _MANY_BYTES // 2
        self._prefix = prefix
        self._saved = saved
        self._rewound = rewound
        self._can_hold_also = can_hold_also
        # Epochs with the same contents: a rewind, or a commit only for a name, gives old contents a new epoch.
        self._same: set[int] = set()
        self._has_new = False
        # Of epochs that `save` kept: those with the same contents that the user has named.
        self._also: dict[int, tuple[int, ...]] = {}

    def keep_at_least(self, keep: int | None) -> None:
        """Raise `keep` to the maximum over the layers on the table; None keeps all epochs."""
        if self.keep is not None:
            self.keep = None if keep is None else max(self.keep, keep)

    # ---- save and load

    def save(self, prefix: str | None = None, *, drop: bool = True) -> Reference:
        """Commit the table if it changed, and keep that epoch.

        Args:
            prefix: prefix of the names, for epochs that are counted separately; None: the prefix of this object.
            drop: drop old epochs beyond `keep`; False: the caller calls `drop_old` later.
        """
        table = self.table
        if table.mode == "r" or table.run is not None:
            return Reference(table.uuid, table.name, table.epoch, table.step)
        epoch, also = self._commit(prefix or self._prefix)
        if also:
            self._also[epoch] = also
        if drop:
            self.drop_old(prefix)
        return Reference(table.uuid, table.name, epoch, table.step, also)

    def drop_old(self, prefix: str | None = None) -> None:
        """Drop the oldest epochs of a prefix beyond `keep`, if the last `save` kept a new epoch."""
        if not self._has_new:
            return
        self._has_new = False
        prefix, table = prefix or self._prefix, self.table
        if self.keep is None:
            self._warn_of_growth()
            return
        kept = {name: epoch for name, epoch in table.snapshots().items() if _is_of(name, prefix)}
        for name in sorted(kept, key=lambda name: int(name.removeprefix(prefix)))[: max(0, len(kept) - self.keep)]:
            if not {*self._also.pop(kept[name], ())} & {*table.snapshots().values()}:
                _log.log(
                    logging.INFO if self._has_warned else logging.WARNING,
                    "table %r: commit %d is dropped, as keep_checkpoints=%d: a %s that needs it does not load; "
                    "None keeps all",
                    table.name, kept[name], self.keep, self._saved,
                )  # fmt: skip
                self._has_warned = True
            table.drop(name)

    @contextlib.contextmanager
    def keeping_nothing(self) -> Iterator[None]:
        """Within, drop no epoch; at the end drop those that `save` kept within."""
        table, keep = self.table, self.keep
        if table.mode == "r":
            yield
            return
        before = set(table.snapshots())
        self.keep = None
        try:
            yield
        finally:
            self.keep = keep
            for name in table.snapshots().keys() - before:
                if _is_of(name, self._prefix):
                    table.drop(name)

    def _warn_of_growth(self) -> None:
        """Log, at each doubling, that the kept epochs take much more than the rows alone."""
        table = self.table
        stats, num_kept = table.stats(), len(table.snapshots())
        if table.path is None:  # each is a copy of the rows
            rows = len(table) * table.record_bytes
            kept = num_kept * rows
        else:
            kept = int(stats["snapshot_bytes"])
            rows = int(stats["disk_bytes"]) - kept
        if kept < 2 * max(self._warned_bytes, rows):
            return
        self._warned_bytes = kept
        _log.warning(
            "table %r keeps %d commits that a %s may refer to, %.1f GiB more than its rows alone; drop those that are "
            "not needed (table.drop(NAME), bunkbed snapshots PATH --drop NAME), or give the layer keep_checkpoints=",
            table.name, num_kept, self._saved, kept / 2**30,
        )  # fmt: skip

    def load(self, reference: Reference) -> str | None:
        """Rewind the table to the epoch of `reference`; return the reason if that is not possible, or None."""
        table, saved = self.table, self._saved
        if reference.uuid != table.uuid:
            if table.path is None:
                return (
                    f"table {table.name!r}: the {saved} refers to table {reference.table!r}, but this layer's table is "
                    "another one, in RAM only; such a table ends with its process, so give path= to the layer that is "
                    "saved and to this one"
                )
            return (
                f"table {table.name!r}: the {saved} refers to table {reference.table!r} (uuid {reference.uuid}), but "
                f"the layer has opened another one, {table.path} (uuid {table.uuid}); give the layer the path of that "
                "table; if exist='new' replaced it, or this is a copy with another dtype or optimizer, its files do "
                "not load"
            )
        return None if table.run is not None else self.go_back(reference.epoch, *reference.also)

    def go_back(self, *epochs: int) -> str | None:
        """Rewind the table to one of some kept epochs of the same contents; return why not, or None."""
        table, saved, epoch = self.table, self._saved, epochs[0]
        if any(self._is_at(one) for one in epochs):
            return None
        snapshots: dict[str, int] = table.snapshots()
        names = [name for name, kept in snapshots.items() if kept in epochs]
        if table.mode == "r":
            at = f"the {saved} refers to commit {epoch}, but this reader is at commit {table.epoch}"
            what = f"; open it with snapshot={names[0]!r}" if names else ", and that commit is not kept here"
            return f"table {table.name!r}: {at}{what}"
        epoch = next((one for one in epochs if one in snapshots.values()), epoch)
        if not names:
            kept = ", ".join(
                f"{key!r} (commit {value})" for key, value in sorted(snapshots.items(), key=lambda x: x[1])
            )
            return (
                f"table {table.name!r}: commit {epoch} was dropped, or never was in this copy; it keeps "
                f"{kept or 'none'}; raise keep_checkpoints= of the layer (None keeps all), or name what must stay "
                f"before it is saved: layer.table.commit(keep='best'), then the {saved}; a copy has "
                "one commit (bunkbed copy --snapshot NAME)"
            )
        table.rewind(epoch)
        self._same = {table.epoch, epoch}
        self._rewound()
        return None

    def _is_at(self, epoch: int) -> bool:
        """Return whether the table has the contents of an epoch."""
        return epoch in self._equal_epochs() and (self.table.mode == "r" or not self.table.is_dirty)

    def _equal_epochs(self) -> set[int]:
        """Return the epoch of the last commit, and other epochs that have the same contents."""
        return self._same if self.table.epoch in self._same else {self.table.epoch}

    def _commit(self, prefix: str) -> tuple[int, tuple[int, ...]]:
        """Return a kept epoch of the table as it is, and those of the same contents that the user has named."""
        table = self.table
        snapshots: dict[str, int] = table.snapshots()
        # An epoch kept under another prefix does not count: that prefix may drop it earlier.
        own = {epoch for name, epoch in snapshots.items() if _is_of(name, prefix)}
        named = {epoch for name, epoch in snapshots.items() if not _AUTOMATIC.fullmatch(name)}
        same = set() if table.is_dirty else self._equal_epochs()
        stays = same & (own if self._can_hold_also else own | named)
        also = tuple(sorted(same & named)) if self._can_hold_also else ()
        self._has_new = not stays
        if stays:
            return max(stays), also
        ours = sorted(int(name.removeprefix(prefix)) for name in snapshots if _is_of(name, prefix))
        epoch: int = table.commit(keep=f"{prefix}{ours[-1] + 1 if ours else 1:06d}")
        self._same = same | {epoch}
        return epoch, also


#: The names that this module and its callers give and drop automatically.
_AUTOMATIC = re.compile(r"(state_dict|keras|get_weights)-\d{6}")


def _is_of(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name.removeprefix(prefix).isdigit()
