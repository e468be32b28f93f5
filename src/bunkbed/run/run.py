"""Several tables and dense files committed as one."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from bunkbed import _native
from bunkbed.core.budget import Budget
from bunkbed.core.typed import typed
from bunkbed.errors import BunkbedError, FormatError, ReadOnlyError, TableClosedError
from bunkbed.files.durable import sync_directory
from bunkbed.files.run_files import MEMBER, RunFiles, RunManifest
from bunkbed.files.sharding import Sharding
from bunkbed.run.leftovers import forget_marks, mark_new, remove_leftover
from bunkbed.table import opening
from bunkbed.table.commits import BackgroundCommit, PendingCommit, meta_text
from bunkbed.table.opening import DEFAULT_RAM
from bunkbed.table.table import Table


def _require_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not MEMBER.fullmatch(name):
        raise ValueError(f"a {what}'s name is up to 200 letters, digits, '.', '_' and '-', got {name!r}")


class Run:
    """A directory of tables and dense files that are committed together and open together.

    After a crash every table and every file is that of the run's last commit, never a mixture.

    Owns its tables (closing the run closes them), their shared RAM budget and the run's lock. Not thread-safe; its
    tables are. Durable up to the last `commit`. Whoever made it closes it: `close`, or a ``with`` block, commits
    first; a block left by an exception does not commit.

    Args:
        path: the run's directory; made when it is not there (``mode="w"``).
        ram: one hard budget for all its tables: bytes, as ``"2GiB"``, or a `Budget`.
        mode: ``"w"``: the one writer; ``"r"``: readers of one commit.
        snapshot: open this kept commit, for reading.

    Raises:
        FileNotFoundError: nothing there to read. TableLockedError: another process writes it.
        FormatError: the directory is something else. CorruptionError: the last commit is damaged.

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
        ram: int | str | Budget | None = None,
        *,
        mode: Literal["w", "r"] = "w",
        snapshot: str | None = None,
        _shards_of: str | None = None,
    ) -> None:
        if mode not in ("w", "r"):
            raise ValueError(f'mode must be "w" or "r", got {mode!r}')
        self.path = Path(path).expanduser().absolute()
        self.mode: Literal["w", "r"] = "r" if snapshot is not None else mode
        self.budget = ram if isinstance(ram, Budget) else Budget(DEFAULT_RAM if ram is None else ram)
        self._shards_of = _shards_of  # the name of the sharded table that its tables are
        self._files = RunFiles(self.path, "run" if _shards_of is None else "sharded table")
        self._tables: dict[str, Table] = {}
        self._closed = False
        self._pid = os.getpid()
        self._background: BackgroundCommit | None = None
        # Files and facts of a commit that failed, or is not over: the next one holds them too.
        self._owed: tuple[dict[str, bytes], dict[str, Any]] | None = None
        self._lock: int | None = None
        self._read_only_reason = ""
        if self.path.exists() and not self.path.is_dir():
            raise FormatError(f"{self.path} is not a run: it is not a directory")
        if self.mode == "r" and not self._files.epochs():
            raise FileNotFoundError(f"no run with a commit at {self.path}")
        if self.mode == "w":
            self._prepare_directory()
        try:
            # The table's epochs that the run's commits name, and those of them that its snapshots do.
            self._named: dict[str, set[int]] = {}
            self._kept: dict[str, set[int]] = {}
            self._manifest = self._files.load_newest() if snapshot is None else self._files.find(snapshot)
            if self.mode == "w" and self._manifest.sharding is not None and _shards_of is None:
                raise FormatError(
                    f"{self.path} is one sharded table, whose shards must not be written one by one; open it with "
                    "bb.ShardedTable.open"
                )
            if self.mode == "w" and self._files.epochs():
                self._named, self._kept = self._files.collect()
                forget_marks(self._files, set(self._manifest.tables))
        except BaseException:
            self._unlock()
            raise

    def _prepare_directory(self) -> None:
        if self.path.is_dir() and any(entry.name.startswith("manifest-") for entry in self.path.iterdir()):
            raise FormatError(f"{self.path} is a table, not a run; open it with bb.open")
        if self.path.is_dir() and not self._files.epochs() and not (self.path / "lock").exists():
            # Power may be lost before the lock's name is durable, or the first commit's manifest has its own.
            ours = {"files", "tables", "lock"}
            strangers = sorted(e.name for e in self.path.iterdir() if e.name not in ours and e.name[:8] != "new-run-")
            if strangers:
                raise FormatError(
                    f"{self.path} is not a run and not empty (it holds {strangers[0]!r}); "
                    "give the run a folder of its own"
                )
        _native.make_directories(str(self._files.files))
        _native.make_directories(str(self.path / "tables"))
        self._lock = self._files.lock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._files.unlock(self._lock)
            self._lock = None

    def __del__(self) -> None:
        if getattr(self, "_lock", None) is not None and self._pid == os.getpid():
            self._unlock()

    # ---- Facts

    @property
    def epoch(self) -> int:
        """Number of the commit in view; 0 before the first."""
        return self._manifest.epoch

    @property
    def meta(self) -> dict[str, Any]:
        """What that commit was given as `meta`."""
        value: dict[str, Any] = json.loads(json.dumps(self._manifest.meta))
        return value

    @property
    def tables(self) -> dict[str, Table]:
        """The open tables by name."""
        return dict(self._tables)

    @property
    def table_names(self) -> list[str]:
        """Names of the tables the commit in view holds, and of those made since."""
        return sorted({*self._manifest.tables, *self._tables})

    @property
    def files(self) -> list[str]:
        """Names of the dense files of the commit in view."""
        return sorted(self._manifest.files)

    @property
    def sharding(self) -> Sharding | None:
        """What makes it one `bunkbed.ShardedTable`; None for any other run."""
        return self._manifest.sharding

    def become_sharded(self, names: list[str]) -> None:
        """From the next commit on its open tables are the shards of one table, in the order of `names`."""
        self._manifest = replace(self._manifest, sharding=Sharding.new([self._tables[name].uuid for name in names]))

    @property
    def closed(self) -> bool:
        """True once closed."""
        return self._closed

    def snapshots(self) -> dict[str, int]:
        """Kept commits: name -> epoch, oldest first."""
        self._settle(report=False)
        return self._files.snapshots()

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
                '(mode="r" beside its writer)'
            )

    # ---- Tables and files

    @typed
    def table(self, name: str, *, create: dict[str, Any] | None = None) -> Table:
        """The table `name` at the run's commit; opened once, then the same object.

        Args:
            name: letters, digits, ``.``, ``_``, ``-``.
            create: arguments of `bunkbed.create`, except path and ram: makes the table when the run has none of that
                name, otherwise each is compared with the table's.

        Raises:
            ValueError: a bad name, or a mismatch with `create`. FileNotFoundError: no such table, and no `create`.
        """
        self._require_open()
        self._settle(report=False)
        _require_name("table", name)
        if name in self._tables:
            opening.compare_with(self._tables[name], create, None)
            return self._tables[name]
        path = self._files.own_table(name)
        label = name if self._shards_of is None else f"{self._shards_of}/{name}"
        if name in self._manifest.tables:
            if not opening.is_table(path):  # with `create` an empty one would take its place
                raise FileNotFoundError(
                    f"run {self.path}: commit {self.epoch} names table {name!r}, but {path} holds no table; put its "
                    "files back"
                )
            opened = opening.open_table(
                path,
                opening.Wanted.of(self.mode, ram=self.budget, create=create),
                run=self if self.mode == "w" else None,
                epoch=self._manifest.tables[name],
                name=label,
            )
        elif create is None or self.mode == "r":
            known = ", ".join(sorted(self._manifest.tables)) or "none"
            hint = "" if self.mode == "r" else "; give create=dict(dim=...) to make it"
            raise FileNotFoundError(f"run {self.path} has no table {name!r} (it has: {known}){hint}")
        else:
            if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
                remove_leftover(self._files, name, path)
            opened = opening.create(path, ram=self.budget, _run=self, _name=label, **create)
        self._tables[name] = opened  # from here on closing the run closes it
        if self.mode == "w":
            self._pin(name, opened)
        return opened

    def _pin(self, name: str, table: Table) -> None:
        """Tells a table which of its commits stay."""
        table._native.set_pinned_epochs(self._named.get(name, set()), self._kept.get(name, set()))

    def reopen(self, name: str, epoch: int) -> Table:
        """A reader's open table anew, at another of its commits. The one before is closed, and stays so on an error."""
        label = self._tables[name].name
        self._tables[name]._close()  # first: the budget may not hold both
        path = self._files.own_table(name)
        wanted = opening.Wanted.of("r", ram=self.budget)
        self._tables[name] = opening.open_table(path, wanted, epoch=epoch, name=label)
        return self._tables[name]

    @typed
    def read(self, name: str) -> bytes:
        """A dense file of the commit in view, verified.

        Raises:
            FileNotFoundError: no such file; lists those there are. CorruptionError: it is missing or damaged.
        """
        self._require_open()
        self._settle(report=False)
        return self._files.read_file(name, self._manifest)

    # ---- Durability

    @typed
    def commit(
        self,
        files: Mapping[str, bytes] | None = None,
        meta: dict[str, Any] | None = None,
        keep: str | None = None,
    ) -> int:
        """Make all tables and `files` durable as one commit.

        Args:
            files: dense files by name; those of the last commit that are not named again carry over.
            meta: JSON-able facts; None keeps the last ones.
            keep: name under which this commit is kept as a snapshot; a name used before moves here.

        Returns:
            The run's epoch.

        Raises:
            ReadOnlyError: a reader. OSError: the disk is full or failing; the last commit stands and nothing is lost.
        """
        contents, facts = self._begin(files, meta, keep)
        tables = {name: table._commit(None, None) for name, table in self._tables.items()}
        return self._finish(tables, contents, facts, keep or "")

    @typed
    def begin_commit(
        self,
        files: Mapping[str, bytes] | None = None,
        meta: dict[str, Any] | None = None,
        keep: str | None = None,
    ) -> PendingCommit:
        """`commit` without waiting: training goes on while a thread makes it durable.

        It holds `files`, and every change of the tables made before this call and none made after it. The run's next
        commit, and whatever else reads or changes its files, waits for it to end. Should it fail, the next commit holds
        its files and `meta` too, where it names no newer ones; the name in `keep` is to be given again.

        Returns:
            What to wait on. A failure that nobody waited for is raised by the next commit, or `close`.

        Raises:
            ReadOnlyError: a reader. OSError: an earlier one failed.
        """
        contents, facts = self._begin(files, meta, keep)
        begun = {name: table._begin_commit(None, None) for name, table in self._tables.items()}

        def finish() -> int:
            epochs, errors = {}, []
            for name, one in begun.items():
                try:
                    epochs[name] = one.wait()
                except BaseException as error:  # a failure that is not waited for is raised by a later commit
                    errors.append(error)
            if errors:
                raise errors[0]
            return self._finish(epochs, contents, facts, keep or "")

        self._background = BackgroundCommit(finish)
        return PendingCommit(self._background.result, self._background.done)

    def _settle(self, *, report: bool) -> None:
        """Wait for a commit in the background; with `report`, raise what it failed with unless somebody was told."""
        if self._background is not None:
            self._background.settle(report=report)

    def _begin(
        self, files: Mapping[str, bytes] | None, meta: dict[str, Any] | None, keep: str | None
    ) -> tuple[dict[str, bytes], dict[str, Any]]:
        self._require_open(write=True)
        if keep is not None and (not isinstance(keep, str) or not keep):
            raise ValueError(f"keep must be a name, got {keep!r}")
        for name, data in (files or {}).items():
            _require_name("file", name)
            if not isinstance(data, (bytes, bytearray, memoryview)):
                raise TypeError(f"files must map names to bytes, got {name!r}: {type(data).__name__}")
        self._settle(report=True)
        if keep is not None:
            for table in self._tables.values():
                table._native.require_disk_to_keep(keep)
        contents, facts = self._owed or ({}, self._manifest.meta)
        if meta is not None:
            facts = json.loads(meta_text(meta, f"run {self.path}"))
        contents = {**contents, **{name: bytes(data) for name, data in (files or {}).items()}}
        self._owed = contents, facts
        mark_new(
            self._files, {name: one.uuid for name, one in self._tables.items() if name not in self._manifest.tables}
        )
        return contents, facts

    def _finish(self, tables: dict[str, int], contents: dict[str, bytes], meta: dict[str, Any], keep: str) -> int:
        _native.failpoint("run.tables")
        entries = dict(self._manifest.files)
        number = self._manifest.next_file
        for name, data in contents.items():
            entries[name] = self._files.write_file(number, data)
            number += 1
        if contents:
            sync_directory(self._files.files)
        _native.failpoint("run.files")
        epoch = self._manifest.epoch + 1
        self._publish(
            RunManifest(
                epoch=epoch,
                meta=meta,
                keep=keep,
                tables={**self._manifest.tables, **tables},
                files=entries,
                next_file=number,
                places=self._manifest.places,
                sharding=self._manifest.sharding,
            )
        )
        self._owed = None
        return epoch

    def _publish(self, manifest: RunManifest) -> None:
        try:
            self._files.publish(manifest)
        except OSError as error:
            if self._files.manifest_path(manifest.epoch).exists():
                # Linked, not known to be durable: only a new opening can tell which commit it is.
                self._read_only_reason = str(error)
            raise
        self._manifest = manifest
        # The commit is durable and acknowledged: what cannot be removed now goes with the next one.
        with contextlib.suppress(OSError, BunkbedError):
            self._named, self._kept = self._files.collect()
            forget_marks(self._files, set(manifest.tables))
            for name, table in self._tables.items():
                self._pin(name, table)
                table._native.collect()

    @typed
    def rewind(self, to: str | int) -> int:
        """Go back to a kept commit: all tables, with optimizer state, and files; it becomes the newest commit.

        Args:
            to: a snapshot's name, or an epoch that still exists.

        Returns:
            The new epoch.

        Raises:
            ValueError: no such commit (lists those there are), or one older than a table of the run.
        """
        self._require_open(write=True)
        self._settle(report=True)
        target = self._files.find(to)
        newer = sorted(set(self._manifest.tables) - set(target.tables))
        if newer:
            raise ValueError(
                f"run {self.path}: table {newer[0]!r} was made after {to!r}, the run cannot go back past it; "
                "copy the tables you need instead"
            )
        for name in target.tables:
            self.table(name)
        for name in sorted(set(self._tables) - set(target.tables)):
            raise BunkbedError(
                f"run {self.path}: table {name!r} was never committed and would be lost by going back; "
                "commit or close first"
            )
        tables = {}
        for name, epoch in target.tables.items():
            self._tables[name]._rewind(epoch)
            tables[name] = self._tables[name].epoch
        self._publish(
            RunManifest(
                epoch=self._manifest.epoch + 1,
                meta=target.meta,
                tables=tables,
                files=target.files,
                next_file=self._manifest.next_file,
                places=self._manifest.places,
                sharding=self._manifest.sharding,
            )
        )
        self._owed = None
        return self.epoch

    @typed
    def drop(self, name: str) -> None:
        """Forget a snapshot of the run; its space is freed where no other commit needs it.

        Raises:
            ValueError: no such snapshot; lists those there are. ReadOnlyError: a reader.
        """
        self._require_open(write=True)
        self._files.find(name)
        if self._manifest.keep == name:
            # The newest commit carries the name: the same state is committed again without it.
            self._publish(replace(self._manifest, epoch=self._manifest.epoch + 1, keep="", copied=False))
        self._named, self._kept = self._files.forget(name)
        for table_name in self._manifest.tables:
            table = self._tables.get(table_name)
            pinned = self._named.get(table_name, set())
            if table is not None:
                self._pin(table_name, table)
                table._native.collect()
            else:
                _native.collect_commits(str(self._files.own_table(table_name)), pinned)

    @typed
    def close(self, commit: bool = True) -> None:
        """Commit (a writer with changes, unless told not to) and close every table. Closing twice is no error."""
        if self._closed:
            return
        self._require_own_process()  # the lock and the tables are the parent's
        self._settle(report=commit)
        if commit and self.mode == "w" and self.is_behind():
            self.commit()
        with contextlib.ExitStack() as closing:  # in any case all of them, and the lock last
            closing.callback(self._unlock)
            for table in self._tables.values():
                closing.callback(table._close)
            self._closed = True

    def is_behind(self) -> bool:
        """Whether a commit would hold anything that the last one does not."""
        return self._owed is not None or any(self._is_behind(name) for name in self._tables)

    def _is_behind(self, name: str) -> bool:
        """Whether the run's last commit lacks something of a table; its own may be newer where the run's failed."""
        table = self._tables[name]
        return table.is_dirty or table.epoch != self._manifest.tables.get(name, table.epoch)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(commit=kind is None)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"epoch {self.epoch}"
        return f"<bunkbed.Run {self.path}: {', '.join(self.table_names) or 'no tables'}, {state}>"
