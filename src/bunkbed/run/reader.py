"""What a run that is open for reading has to follow its writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from bunkbed import _native
from bunkbed.core.retention import Retention
from bunkbed.errors import BunkbedError, FormatError
from bunkbed.files.run_files import RunFiles, RunManifest
from bunkbed.run.sharded_tables import ShardedTables
from bunkbed.table.core import Above
from bunkbed.table.following import Following
from bunkbed.table.table import Table

#: How often a reader tries to move to a commit; the writer may collect it in between.
_ATTEMPTS = 10


class RunReader(Following):
    """The part of `bunkbed.Run` that moves a reader, all its tables and files together, to newer commits."""

    mode: Literal["w", "r"]
    folder: RunFiles
    manifest: RunManifest
    _tables: dict[str, Table]
    _sharded: ShardedTables
    _snapshot: str | None = None  # the name that a reader was opened at
    #: Internal: why the tables are not all at one commit, or empty. They refuse use then.
    torn = ""
    _above: Callable[[], Above | None] | None = None  # lies above each table

    def _require_open(self, *, write: bool = False) -> None:
        raise NotImplementedError

    def _writes(self) -> bool:
        return self.mode == "w"

    def _reader_label(self) -> str:
        self._require_open()
        if self.mode == "w":
            raise ValueError(f"{self.folder.label} is open for writing and always up to date; this is for readers")
        return self.folder.label

    # Internal: the names of the tables of the present commit whose rows go by sweeps. No table is opened.
    def names_to_sweep(self) -> list[str]:
        self._require_open()
        with self._held():
            return [name for name in self.manifest.table_names() if self._rules_of(name).removes]

    def _rules_of(self, name: str) -> Retention:
        """Return the rules of a table, and of a sharded one those of its first shard."""
        sharding = self.manifest.sharded.get(name)
        plain = name if sharding is None else sharding.names(name)[0]
        spec, _, _ = _native.read_spec(str(self.folder.own_table(plain)), "", self.manifest.tables[plain])
        return Retention.from_native(spec.retention)

    def _at(self) -> int:
        return self.manifest.epoch

    def _newest(self) -> int:
        self._reader_label()
        return self._to_follow().epoch

    def _to_follow(self) -> RunManifest:
        if self._snapshot is not None:
            return self.folder.find(self._snapshot)
        newest = self.folder.load_newest()
        if newest.epoch == 0 and not self.folder.epochs():  # a sharded table's first commit has the number 0
            raise FileNotFoundError(f"{self.folder.label}: its folder has no commit any more, or is gone")
        return newest

    def _file_of(self, number: int) -> Path:
        return self.folder.manifest_path(number)

    def _put_above(self, above: Callable[[], Above | None] | None) -> None:
        self._above = self._guard() if above is None and self.torn else above
        for table in (*self._tables.values(), *self._sharded):
            table.put_above(self._above)

    def _guard(self) -> Callable[[], Above]:
        return self._strong_guard()

    def _require_fresh(self, label: str) -> None:
        """See `Following`. Raise BunkbedError where the tables are not all at one commit."""
        super()._require_fresh(label)
        if self.torn:
            raise BunkbedError(f"{label} refuses use: {self.torn}; call refresh(), or open it again")

    def _move(self) -> int:
        """Move all tables to the commit to follow. Where it fails half-way they refuse use until a call succeeds."""
        for attempt in range(_ATTEMPTS):
            manifest = self._to_follow()
            try:
                self._move_to(manifest)  # also to the same number: another run may have it, at the same path
                break
            except FileNotFoundError:
                # The writer collected this commit after it was read: there is a newer commit.
                if attempt == _ATTEMPTS - 1 or self.folder.manifest_path(manifest.epoch).exists():
                    raise
        return self.manifest.epoch

    def _move_to(self, manifest: RunManifest) -> None:
        absent = sorted(set(self._tables) - set(manifest.tables))
        if absent or manifest.sharding != self.manifest.sharding:
            has_other = f"has no table {absent[0]!r}" if absent else "is another table"
            raise FormatError(f"{self.folder.label}: commit {manifest.epoch} {has_other}; open it again")
        reason = f"moving to commit {manifest.epoch} failed half-way"
        try:
            with self._sharded.torn(reason, write=False):
                for name, table in self._tables.items():
                    table.plain_core.refresh(manifest.tables[name])
        except BaseException as error:
            if any(table.epoch != self.manifest.tables[name] for name, table in self._tables.items()):
                self.torn = f"{reason} ({error})"
                self._put_above(self._above)
            raise
        self.manifest = manifest
        self.torn = ""
