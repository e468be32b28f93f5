"""`Run`: several tables and dense files that are committed together."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from bunkbed import _native
from bunkbed.core.budget import Budget
from bunkbed.core.typed import typed
from bunkbed.core.types import Json
from bunkbed.errors import BunkbedError, FormatError, ReadOnlyError, TableClosedError
from bunkbed.files.run_files import MEMBER, RunFiles, RunManifest
from bunkbed.files.sharding import Sharding, shard_name
from bunkbed.run.leftovers import forget_marks, mark_new, remove_leftover
from bunkbed.run.reader import RunReader
from bunkbed.run.sharded_tables import ShardedTables
from bunkbed.sharded.base.shards import Shards, of_each
from bunkbed.table import opening
from bunkbed.table.commits import BackgroundCommit, PendingCommit, meta_text, wait_for_all
from bunkbed.table.definition import Definition
from bunkbed.table.opening import DEFAULT_RAM
from bunkbed.table.room import warn_if_small
from bunkbed.table.table import Table


def require_name(what: str, name: object) -> None:
    """Raise ValueError unless `name` may be the name of a `what`, a table or a file."""
    if not isinstance(name, str) or not MEMBER.fullmatch(name):
        raise ValueError(f"a {what}'s name is up to 200 letters, digits, '.', '_' and '-', got {name!r}")


class Run(RunReader):
    """A directory of tables and dense files that are committed together and open together.

    After a crash all tables and files have the state of the run's last commit.

    Owns its tables (closing the run closes them), their shared RAM budget and the run's lock. Not thread-safe, except
    that a reader may move by `refresh` or `watch` while other threads read; its tables are. Durable up to the last
    `commit`. The caller that made the run closes it. `close` and the end of a ``with`` block commit first; a block
    left by an exception does not commit.

    Args:
        path: the run's directory; made if it does not exist (``mode="w"``).
        ram: one hard budget for all its tables: bytes, as ``"2GiB"``, or a `Budget`.
        mode: ``"w"``: the one writer; ``"r"``: a reader of the last commit; `refresh` or `watch` moves all
            tables and files on together.
        snapshot: open this kept commit, for reading.

    Raises:
        FileNotFoundError: no run to read. TableLockedError: another process writes it.
        FormatError: the directory is not a run. CorruptionError: the last commit is damaged.

    >>> import bunkbed as bb, numpy as np, tempfile
    >>> with bb.Run(tempfile.mkdtemp(), ram="64MiB") as run:
    ...     user = run.table("user", create=dict(dim=4, num_rows=10, init=bb.Zeros()))
    ...     user.update(np.array([1]), np.ones((1, 4), np.float32))
    ...     epoch = run.commit(files={"dense.pt": b"weights"}, meta={"step": 1})
    ...     run.read("dense.pt"), run.meta
    (b'weights', {'step': 1})
    """

    @typed
    def __init__(
        self,
        path: str | os.PathLike[str],
        ram: float | str | Budget | None = None,
        *,
        mode: Literal["w", "r"] = "w",
        snapshot: str | None = None,
        _shards_of: str | None = None,
    ) -> None:
        if mode not in ("w", "r"):
            raise ValueError(f'mode must be "w" or "r", got {mode!r}')
        self.path = Path(path).expanduser().absolute()
        self.mode = "r" if snapshot is not None else mode
        self._snapshot = snapshot
        self._opening = threading.RLock()  # held while a table is opened: each name has one object
        self.budget = ram if isinstance(ram, Budget) else Budget(DEFAULT_RAM if ram is None else ram)
        self._shards_of = _shards_of  # the name of the sharded table whose shards are the run's tables, or None
        # Internal, for `bunkbed.sharded`: the files, and `manifest`, the present commit.
        self.folder = RunFiles(self.path, "run" if _shards_of is None else "sharded table")
        self._tables: dict[str, Table] = {}  # shards among them
        self._sharded = ShardedTables(self.folder.label, self._tables, lambda: self.manifest)
        self._closed = False
        self._pid = os.getpid()
        self._background: BackgroundCommit | None = None
        # Files and meta of a commit that failed or is not over. The next commit holds them too.
        self._owed: tuple[dict[str, bytes], Json] | None = None
        self._lock: int | None = None
        self._read_only_reason = ""
        # By table: the epochs that the run's commits name, and the epochs that its snapshots name.
        self._named: dict[str, set[int]] = {}
        self._kept: dict[str, set[int]] = {}
        self._enter(snapshot)

    def _enter(self, snapshot: str | None) -> None:
        """Take the lock, unless this is a reader, and read the commit."""
        if self.path.exists() and not self.path.is_dir():
            raise FormatError(f"{self.path} is not a run: it is not a directory")
        if self.mode == "r" and not self.folder.epochs():
            raise FileNotFoundError(f"no run with a commit at {self.path}")
        if self.mode == "w":
            self._require_folder()
            _native.make_directories(str(self.folder.files))
            _native.make_directories(str(self.path / "tables"))
            self._lock = self.folder.lock()
        try:
            if self.mode == "r":
                self._note_newest()
            self.manifest = self.folder.load_newest() if snapshot is None else self.folder.find(snapshot)
            self._start_following()
            if self.mode == "w":
                self._require_own(self.manifest)
            if self.mode == "w" and self.folder.epochs():
                self._named, self._kept = self.folder.collect()
                forget_marks(self.folder, set(self.manifest.tables))
        except BaseException:
            self._unlock()
            raise

    def _require_own(self, manifest: RunManifest) -> None:
        """Raise FormatError if a writer would write the shards of a sharded table one by one."""
        if manifest.sharding is not None and self._shards_of is None:
            raise FormatError(
                f"{self.path} is one sharded table, whose shards must not be written one by one; open it with "
                "bb.ShardedTable.open"
            )

    def _require_folder(self) -> None:
        """Raise FormatError if something else than a run is there."""
        if self.path.is_dir() and any(entry.name.startswith("manifest-") for entry in self.path.iterdir()):
            raise FormatError(f"{self.path} is a table, not a run; open it with bb.open")
        if self.path.is_dir() and not self.folder.epochs() and not (self.path / "lock").exists():
            # Power loss may leave these names before the lock's name or the first manifest's name is durable.
            ours = {"files", "tables", "lock"}
            strangers = sorted(e.name for e in self.path.iterdir() if e.name not in ours and e.name[:8] != "new-run-")
            if strangers:
                raise FormatError(
                    f"{self.path} is not a run and not empty (it holds {strangers[0]!r}); "
                    "give the run a folder of its own"
                )

    def _unlock(self) -> None:
        if self._lock is not None:
            self.folder.unlock(self._lock)
            self._lock = None

    def __del__(self) -> None:
        if getattr(self, "_lock", None) is not None and self._pid == os.getpid():
            self._unlock()

    # ---- Facts

    @property
    def version(self) -> int:
        """Number of the present commit, the one that is open or was made last; 0 before the first."""
        return self.manifest.epoch

    @property
    def epoch(self) -> int:
        """`version` under its older name, which the next release has no more."""
        return self.version

    @property
    def meta(self) -> Json:
        """The `meta` of the present commit."""
        value: Json = json.loads(json.dumps(self.manifest.meta))
        return value

    @property
    def tables(self) -> dict[str, Table]:
        """The open tables by name; of a sharded one, not its shards."""
        return self._sharded.by_name()

    @property
    def table_names(self) -> list[str]:
        """Names of the tables of the present commit, and of tables that were made later."""
        return sorted({*self.manifest.table_names(), *self.tables})

    @property
    def files(self) -> list[str]:
        """Names of the dense files of the present commit."""
        return sorted(self.manifest.files)

    @property
    def sharding(self) -> Sharding | None:
        """The record of a `bunkbed.ShardedTable`; None for other runs."""
        return self.manifest.sharding

    def become_sharded(self, names: list[str]) -> None:
        """Make the open tables the shards of one table, in the order of `names`, from the next commit on."""
        self.manifest = replace(self.manifest, sharding=Sharding.new([self._tables[name].uuid for name in names]))

    @property
    def closed(self) -> bool:
        """True once closed."""
        return self._closed

    def snapshots(self) -> dict[str, int]:
        """Return the kept commits: name -> epoch, oldest first."""
        self.settle(report=False)
        return self.folder.snapshots()

    def _require_open(self, *, write: bool = False) -> None:
        if self._closed:
            raise TableClosedError(f"run {self.path} is closed; open it again")
        self._require_own_process()
        if write and self.mode == "r":
            raise ReadOnlyError(f'run {self.path} is open for reading; open it with mode="w" to change it')
        if write and self._read_only_reason:
            raise ReadOnlyError(f"run {self.path} is read-only until reopened: {self._read_only_reason}")

    def _require_own_process(self) -> None:
        if self._pid != os.getpid():
            raise TableClosedError(
                f"run {self.path} was opened before this process was forked; open it in the process that uses it "
                '(with mode="r" while another process writes it)'
            )

    # ---- Tables and files

    @typed
    def table(self, name: str, *, create: Json | None = None) -> Table:
        """Return the table `name` at the run's commit. It is opened once; later calls return the same object.

        Args:
            name: letters, digits, ``.``, ``_``, ``-``.
            create: arguments of `bunkbed.create`, except path and ram, used if the run has no table of that name; with
                ``shards=``, 1 to 1024, the rows are divided among so many tables, which several processes can train
                (docs/processes.md). Otherwise each given value must be the table's, but hyperparameters replace the
                table's.

        Raises:
            ValueError: a bad name, or a mismatch with `create`. FileNotFoundError: no such table, and no `create`.
        """
        self._require_open()
        self.settle(report=False)
        require_name("table", name)
        try:
            with self._held(), self._opening:
                return self._table(name, create)
        except FileNotFoundError:
            if self.mode == "w" or self.folder.manifest_path(self.epoch).exists():
                raise
            raise FileNotFoundError(self.folder.was_collected(self.epoch)) from None

    def _table(self, name: str, create: Json | None) -> Table:
        create, shards = self._sharded.parted(name, create)
        if name in self.tables:
            return self._sharded.again(name, create)
        sharding = self.manifest.sharded.get(name)
        if sharding is not None:
            for shard in sharding.names(name):
                if shard in self._tables:  # an earlier call failed at a later one
                    continue
                self._open_table(shard, None if create is None else of_each(create, len(sharding.shards)))
            return self._whole(name, sharding, create)
        if shards is not None and name not in self.manifest.tables and self.mode == "w":
            return self._make_sharded(name, shards, create or {})
        return self._open_table(name, create)

    def _make_sharded(self, name: str, shards: int, create: Json) -> Shards:
        names = [f"{name}.{shard_name(index)}" for index in range(shards)]
        taken = sorted(set(names) & {*self.manifest.tables, *self._tables})
        if taken:
            raise ValueError(f"run {self.path}: table {name!r} would have the shard {taken[0]!r}, which is a table")
        each = of_each(create, shards)
        spec = Definition(**{key: value for key, value in each.items() if key != "disk"}).spec()
        warn_if_small(name, spec, self.budget.free_bytes(), shards=shards)
        try:
            sharding = Sharding.new([self._open_table(shard, each, is_shard=True).uuid for shard in names])
        except BaseException:
            for shard in names:
                if shard in self._tables:
                    self._tables.pop(shard).release()
            raise
        self._sharded.new[name] = sharding
        return self._whole(name, sharding, create)

    def _whole(self, name: str, sharding: Sharding, create: Json | None) -> Shards:
        tables = [self._tables[shard] for shard in sharding.names(name)]
        found = Shards(name, tables, sharding.uuid, lambda: self.epoch, num_shards=len(tables), run=self)
        self._sharded.add(name, found, create)
        found.put_above(self._above)
        found.share_pins(self._pins)
        return found

    def _open_table(self, name: str, create: Json | None, *, is_shard: bool = False) -> Table:
        """Open or make a table that is not sharded, or a shard."""
        path = self.folder.own_table(name)
        label = name if self._shards_of is None else f"{self._shards_of}/{name}"
        if name in self.manifest.tables:
            if not opening.is_table(path):  # with `create`, open_table would make an empty table there
                raise FileNotFoundError(
                    f"run {self.path}: commit {self.epoch} names table {name!r}, but {path} holds no table; put its "
                    "files back"
                )
            opened = opening.open_table(
                path,
                opening.Wanted.of(self.mode, ram=self.budget, create=create),
                run=self if self.mode == "w" else None,
                of_reader_run=self.mode == "r",
                epoch=self.manifest.tables[name],
                name=label,
            )
        elif create is None or self.mode == "r":
            known = ", ".join(sorted(self.manifest.tables)) or "none"
            hint = "" if self.mode == "r" else "; give create=dict(dim=...) to make it"
            raise FileNotFoundError(f"run {self.path} has no table {name!r} (it has: {known}){hint}")
        else:
            if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
                remove_leftover(self.folder, name, path)
            warns = not is_shard and self._shards_of is None
            opened = opening.create(path, ram=self.budget, _run=self, _name=label, _warns=warns, **create)
        self._tables[name] = opened  # from here on `close` closes it
        opened.put_above(self._above)
        opened.share_pins(self._pins)
        if self.mode == "w":
            self._pin(name, opened)
        return opened

    def _pin(self, name: str, table: Table) -> None:
        """Set the epochs of a table that must not be collected."""
        table.plain_core.set_pinned_epochs(self._named.get(name, set()), self._kept.get(name, set()))

    @typed
    def read(self, name: str) -> bytes:
        """Read a dense file of the present commit and verify its checksum.

        Raises:
            FileNotFoundError: no such file; lists the files. CorruptionError: the file is missing or damaged.
        """
        self._require_open()
        self.settle(report=False)
        with self._held():
            return self.folder.read_file(name, self.manifest)

    # ---- Durability

    @typed
    def commit(
        self,
        files: Mapping[str, bytes] | None = None,
        meta: Json | None = None,
        keep: str | None = None,
    ) -> int:
        """Make all tables and `files` durable as one commit.

        Args:
            files: dense files by name; files of the last commit that are not given again stay in the commit.
            meta: JSON-able facts; None keeps those of the last commit.
            keep: name under which this commit is kept as a snapshot. A name in use moves to this commit.

        Returns:
            The run's epoch.

        Raises:
            ReadOnlyError: a reader. OSError: the disk is full or failing; the last commit stays valid, no row is lost.
        """
        contents, facts = self._begin(files, meta, keep)
        with self._sharded.still():
            tables = {name: table.commit_in_run() for name, table in self._tables.items()}
        return self._finish(tables, contents, facts, keep or "")

    @typed
    def begin_commit(
        self,
        files: Mapping[str, bytes] | None = None,
        meta: Json | None = None,
        keep: str | None = None,
    ) -> PendingCommit:
        """Start a commit that a thread makes durable while training continues.

        The commit holds `files`, and every change of the tables made before this call and none made after it. The
        run's next commit, and each call that reads or changes the run's files, waits for this commit to end. If this
        commit fails, the next one holds its files and `meta` too, unless newer ones are given; give `keep` again.

        Returns:
            The pending commit. If it fails and `wait` was not called, the next commit, or `close`, raises its error.

        Raises:
            ReadOnlyError: a reader. OSError: an earlier commit failed.
        """
        contents, facts = self._begin(files, meta, keep)
        with self._sharded.still():
            started = {name: table.begin_commit_in_run() for name, table in self._tables.items()}

        def finish() -> int:
            return self._finish(wait_for_all(started), contents, facts, keep or "")

        self._background = BackgroundCommit(finish)
        return PendingCommit(self._background.result, self._background.done)

    # Internal: wait for the commit in the background; with `report`, raise its error unless it was raised before.
    def settle(self, *, report: bool) -> None:
        if self._background is not None:
            self._background.settle(report=report)

    def _begin(
        self, files: Mapping[str, bytes] | None, meta: Json | None, keep: str | None
    ) -> tuple[dict[str, bytes], Json]:
        self._require_open(write=True)
        if keep is not None and (not isinstance(keep, str) or not keep):
            raise ValueError(f"keep must be a name, got {keep!r}")
        for name, data in (files or {}).items():
            require_name("file", name)
            if not isinstance(data, (bytes, bytearray, memoryview)):
                raise TypeError(f"files must map names to bytes, got {name!r}: {type(data).__name__}")
        self.settle(report=True)
        if keep is not None:
            for table in self._tables.values():
                table.plain_core.require_disk_to_keep(keep)
        contents, facts = self._owed or ({}, self.manifest.meta)
        if meta is not None:
            facts = json.loads(meta_text(meta, f"run {self.path}"))
        contents = {**contents, **{name: bytes(data) for name, data in (files or {}).items()}}
        self._owed = contents, facts
        mark_new(
            self.folder, {name: one.uuid for name, one in self._tables.items() if name not in self.manifest.tables}
        )
        return contents, facts

    def _finish(self, tables: dict[str, int], contents: dict[str, bytes], meta: Json, keep: str) -> int:
        _native.failpoint("run.tables")
        manifest = self.folder.write_files(contents, self.manifest)
        _native.failpoint("run.files")
        self.publish(
            replace(
                manifest,
                epoch=self.manifest.epoch + 1,
                meta=meta,
                keep=keep,
                tables={**self.manifest.tables, **tables},
                copied=False,
                sharded=self._sharded.records(),
            )
        )
        self._owed = None
        self._sharded.new.clear()
        return self.epoch

    # Internal: make this manifest the present commit.
    def publish(self, manifest: RunManifest) -> None:
        try:
            self.folder.publish(manifest)
        except OSError as error:
            if self.folder.manifest_path(manifest.epoch).exists():
                # The manifest is linked, but may not be durable. Only opening the run again shows the last commit.
                self._read_only_reason = str(error)
            raise
        self.manifest = manifest
        # The commit is durable, so errors from here on are ignored. The next commit tries the removals again.
        with contextlib.suppress(OSError, BunkbedError):
            self._named, self._kept = self.folder.collect()
            forget_marks(self.folder, set(manifest.tables))
            for name, table in self._tables.items():
                self._pin(name, table)
                table.plain_core.collect()

    @typed
    def rewind(self, to: str | int) -> int:
        """Go back to an earlier commit: all tables, with optimizer state, and files. It becomes the newest commit.

        Args:
            to: a snapshot's name, or an epoch that still exists.

        Returns:
            The new epoch.

        Raises:
            ValueError: no such commit (lists the commits), or a commit older than a table of the run.
        """
        self._require_open(write=True)
        self.settle(report=True)
        target = self.folder.find(to)
        newer = sorted(set(self.manifest.table_names()) - set(target.table_names()))
        if newer:
            raise ValueError(
                f"run {self.path}: table {newer[0]!r} was made after {to!r}, the run cannot go back past it; "
                "copy the tables you need instead"
            )
        for name in target.table_names():
            self.table(name)
        for name in sorted(set(self.tables) - set(target.table_names())):
            raise BunkbedError(
                f"run {self.path}: table {name!r} was never committed and would be lost by going back; "
                "commit or close first"
            )
        tables = {}
        with self._sharded.torn(f"going back to commit {to!r} failed half-way"):
            for name, epoch in target.tables.items():
                self._tables[name].rewind_in_run(epoch)
                tables[name] = self._tables[name].epoch
        self.publish(
            replace(
                self.manifest,
                epoch=self.manifest.epoch + 1,
                meta=target.meta,
                keep="",
                tables=tables,
                files=target.files,
                copied=False,
                sharded=target.sharded,
            )
        )
        self._owed = None
        return self.epoch

    @typed
    def drop(self, name: str) -> None:
        """Remove a snapshot of the run; its space is freed where no other commit needs it.

        Raises:
            ValueError: no such snapshot; the message lists the snapshots. ReadOnlyError: a reader.
        """
        self._require_open(write=True)
        self.folder.find(name)
        if self.manifest.keep == name:
            # The newest commit has the name, so the same state is committed again without the name.
            self.publish(replace(self.manifest, epoch=self.manifest.epoch + 1, keep="", copied=False))
        self._named, self._kept = self.folder.forget(name)
        for table_name in self.manifest.tables:
            table = self._tables.get(table_name)
            pinned = self._named.get(table_name, set())
            if table is not None:
                self._pin(table_name, table)
                table.plain_core.collect()
            else:
                _native.collect_commits(str(self.folder.own_table(table_name)), pinned)

    @typed
    def close(self, commit: bool = True) -> None:
        """Commit (a writer with changes, unless `commit` is False) and close every table. Closing twice is no error."""
        if self._closed:
            return
        self._require_own_process()  # in a forked child the lock and the tables are the parent's
        self._stop_watching()
        self.settle(report=commit)
        if commit and self.mode == "w" and self.is_behind():
            self.commit()
        with contextlib.ExitStack() as closing:  # closes every table also after an error, and unlocks last
            closing.callback(self._unlock)
            for table in (*self._tables.values(), *self._sharded):
                closing.callback(table.release)
            self._closed = True

    def is_behind(self) -> bool:
        """Return whether the run has changes that the last commit does not hold."""
        return self._owed is not None or any(self._is_behind(name) for name in self._tables)

    def _is_behind(self, name: str) -> bool:
        """Return whether a table has changes, or a commit, that the run's last commit does not name."""
        table = self._tables[name]
        return table.is_dirty or table.epoch != self.manifest.tables.get(name, table.epoch)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(commit=kind is None)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"commit {self.epoch}"
        return f"<bunkbed.Run {self.path}: {', '.join(self.table_names) or 'no tables'}, {state}>"
