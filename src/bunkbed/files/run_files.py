"""The files of a run: its manifests and dense files, written so that power loss leaves the old commit or the new.

A manifest is one line of JSON and one line with its SHA-256. Protocol (docs/design/engine.md, rule 14, publish and
collect):

1. Every table has prepared: its own commit is durable, under an epoch that no run manifest names yet.
2. Each new dense file is written under a number that was never used before, and synced; then its directory is synced.
3. The manifest is written under a temporary name, synced, and linked under its epoch (never replacing). The directory
   is synced. From then on the run's commit exists.
4. Old manifests are removed, durably; then the files and the tables' commits that no remaining manifest names.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bunkbed import _native
from bunkbed.core.types import Json
from bunkbed.errors import BunkbedError, CorruptionError, FormatError, TableLockedError
from bunkbed.files.durable import require_real, sync_directory, write_durably
from bunkbed.files.sharding import HASH, Sharding

FORMAT = 1
_NAME = re.compile(r"run-([0-9]{16})")
_FILE = re.compile(r"file-([0-9]{16})")
#: Names of tables and dense files.
MEMBER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass
class RunManifest:
    """One commit of a run.

    Attributes:
        epoch: its number.
        meta: the caller's facts.
        keep: snapshot name, or empty.
        tables: table name -> the table's epoch.
        files: file name -> (number, bytes, sha256).
        next_file: first number that no file has had.
        copied: `bunkbed.copy` wrote this commit, and no writer has committed since.
        places: shard -> its directory, absolute or relative to the run's, for shards that are not in ``tables/NAME``.
            The places are not part of a commit: those of the newest manifest are valid for all commits.
        sharding: the record of a run that is one sharded table; None for other runs.
        sharded: table -> its record, for tables of a run that are divided into shards. Table T has the shards
            ``T.shard-NNNN``, which are in `tables` instead of T.
    """

    epoch: int = 0
    meta: Json = field(default_factory=dict)
    keep: str = ""
    tables: dict[str, int] = field(default_factory=dict)
    files: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    next_file: int = 1
    copied: bool = False
    places: dict[str, str] = field(default_factory=dict)
    sharding: Sharding | None = None
    sharded: dict[str, Sharding] = field(default_factory=dict)

    def shard(self, name: str) -> Shard | None:
        """Return what is known of a table that is a shard; None for other tables."""
        every = {"": self.sharding} if self.sharding is not None else self.sharded
        for table, one in every.items():
            names = one.names(table)
            if name in names:
                index = names.index(name)
                return Shard(table, index, len(names), one.shards[index])
        return None

    def table_names(self) -> list[str]:
        """Return the names of the tables: of a sharded one, its own name instead of its shards' names."""
        shards = {name for table, one in self.sharded.items() for name in one.names(table)}
        return sorted(set(self.tables) - shards | set(self.sharded))


@dataclass(frozen=True)
class Shard:
    """A table that is a shard.

    Attributes:
        table: the table that it is part of; empty where the run is that table.
        index: its number.
        count: shards of the table.
        uuid: its own.
    """

    table: str
    index: int
    count: int
    uuid: str


@dataclass(frozen=True)
class Named:
    """The parts of a run's manifest that collection needs: snapshot name or empty, tables' epochs, file numbers."""

    keep: str
    tables: dict[str, int]
    files: frozenset[int]


def encode(manifest: RunManifest) -> bytes:
    """Return the manifest's bytes."""
    values = {
        "bunkbed_run": FORMAT,
        "epoch": manifest.epoch,
        "meta": manifest.meta,
        "keep": manifest.keep,
        "tables": manifest.tables,
        "files": {name: list(entry) for name, entry in manifest.files.items()},
        "next_file": manifest.next_file,
    }
    if manifest.copied:
        values["copied"] = True
    if manifest.places:
        values["places"] = manifest.places
    if manifest.sharding is not None:
        values["sharding"] = manifest.sharding.as_json()
    if manifest.sharded:
        values["sharded"] = {name: one.as_json() for name, one in manifest.sharded.items()}
    body = json.dumps(values, sort_keys=True).encode()
    return body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: object) -> bool:
    """Return whether `value` may be the number of a commit or file; below 10**15, so later names have 16 digits too."""
    return _is_count(value) and value < 10**15  # type: ignore[operator]


def _is_file(entry: object) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 3
        and _is_number(entry[0])
        and _is_count(entry[1])
        and isinstance(entry[2], str)
    )


def _is_named(value: object, is_sound: Callable[[object], bool]) -> bool:
    return isinstance(value, dict) and all(MEMBER.fullmatch(name) and is_sound(one) for name, one in value.items())


#: The checks of a manifest's values, which become paths and numbers of files.
_KEYS: dict[str, Callable[[object], bool]] = {
    "epoch": _is_number,
    "meta": lambda value: isinstance(value, dict),
    "keep": lambda value: isinstance(value, str),
    "tables": lambda value: _is_named(value, _is_count),
    "files": lambda value: _is_named(value, _is_file),
    "next_file": _is_number,
}
#: The checks of the optional values.
_OPTIONAL: dict[str, Callable[[object], bool]] = {
    "places": lambda value: _is_named(
        value, lambda place: isinstance(place, str) and place != "" and "\0" not in place
    ),
    "sharding": lambda value: Sharding.from_json(value) is not None,
    "sharded": lambda value: _is_named(value, lambda one: Sharding.from_json(one) is not None),
}


def decode(data: bytes, path: Path) -> RunManifest:
    """Decode the manifest in `data`.

    Raises:
        CorruptionError: the checksum is wrong, or the content is not a manifest. FormatError: a newer format.
    """
    body, _, rest = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() + b"\n" != rest:
        raise CorruptionError(f"run manifest {path} fails its checksum")
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise CorruptionError(f"run manifest {path} holds no JSON object")
    if values.get("bunkbed_run") != FORMAT:
        raise FormatError(
            f"run manifest {path} has format {values.get('bunkbed_run')}, this release reads format {FORMAT}"
        )
    for key, is_sound in _KEYS.items():
        if key not in values or not is_sound(values[key]):
            raise CorruptionError(f"run manifest {path}: {key!r} is {str(values.get(key))[:80]!r}, which no commit has")
    for key, is_sound in _OPTIONAL.items():
        if key in values and not is_sound(values[key]):
            raise CorruptionError(f"run manifest {path}: {key!r} is {str(values[key])[:80]!r}, which no commit has")
    sharding = Sharding.from_json(values.get("sharding"))
    strangers = sorted(set(values.get("places", {})) - set(() if sharding is None else sharding.names()))
    if strangers:
        raise CorruptionError(
            f"run manifest {path}: 'places' names {strangers[0]!r}, which is no shard; the tables of a run are in "
            "its own directory"
        )
    read = {name: Sharding.from_json(one) for name, one in values.get("sharded", {}).items()}
    sharded = {name: one for name, one in read.items() if one is not None}
    for one in (*sharded.values(), sharding):
        if one is not None and one.hash != HASH:
            raise FormatError(
                f"run manifest {path}: rows are divided among shards by rule {one.hash}, this release knows {HASH}"
            )
    if sharding is not None and sorted(values["tables"]) != sharding.names():
        raise CorruptionError(
            f"run manifest {path}: it names {len(values['tables'])} tables, and they are not its "
            f"{len(sharding.shards)} shards"
        )
    missing = sorted({name for table, one in sharded.items() for name in one.names(table)} - set(values["tables"]))
    if missing or (sharded and sharding is not None) or set(sharded) & set(values["tables"]):
        what = f"it does not name {missing[0]!r}" if missing else "a table is both whole and divided"
        raise CorruptionError(f"run manifest {path}: {what}, which 'sharded' excludes")
    return RunManifest(
        epoch=values["epoch"],
        meta=values["meta"],
        keep=values["keep"],
        tables=values["tables"],
        files={name: (entry[0], entry[1], entry[2]) for name, entry in values["files"].items()},
        next_file=values["next_file"],
        copied=bool(values.get("copied", False)),
        places=values.get("places", {}),
        sharding=sharding,
        sharded=sharded,
    )


class RunFiles:
    """The manifests and dense files in a run's directory, and the paths of its tables.

    Args:
        directory: the run's directory.
        kind: the word for the run in messages.
    """

    def __init__(self, directory: Path, kind: str = "run") -> None:
        self.directory = directory
        self.files = directory / "files"
        self.label = f"{kind} {directory}"
        #: The places of the tables, when the caller gave newer ones than the manifests have.
        self.places: dict[str, str] | None = None
        self._is_locked = False
        self._known: dict[int, Named] = {}
        #: The last result of `_recorded` and the identity of its file, because each shard needs the result.
        self._newest: tuple[tuple[int, int, int], RunManifest] = ((-1, 0, 0), RunManifest())

    def table_path(self, name: str) -> Path:
        """Return the recorded directory of a table, without a check. To open or change it, use `own_table`."""
        places = self._recorded().places if self.places is None else self.places
        return self.directory / places.get(name, f"tables/{name}")  # an absolute place replaces the directory

    def own_table(self, name: str) -> Path:
        """Return `table_path` after a check that the table is of this run: a copied folder may have any links.

        A shard may be in any directory, so its uuid is checked. Any other table is in the run's own directory.

        Raises:
            FormatError: the path has a symbolic link, or another table is there. CorruptionError: none of a shard's
            commits can be read. FileNotFoundError: no shard is there.
        """
        path, shard = self.table_path(name), self._recorded().shard(name)
        if path == self.directory / "tables" / name and (shard is None or shard.table):
            require_real(path.parent)
            require_real(path)
        if shard is not None:
            uuid = shard.uuid
            found = {commit["uuid"].hex() for commit in _native.commits(str(path))}
            if not found:
                raise CorruptionError(f"{self.label}: no commit of {name} at {path} can be read")
            if found != {uuid}:
                raise FormatError(
                    f"{self.label}: {path} holds another table (uuid {', '.join(found - {uuid})}) than its {name} "
                    f"(uuid {uuid}); were directories mixed up?"
                )
        return path

    def _recorded(self) -> RunManifest:
        """Return the newest readable manifest. Sharding never changes; places change only when shards are moved."""
        for epoch in reversed(self.epochs()):
            try:
                about = self.manifest_path(epoch).stat()
                key = (epoch, about.st_ino, about.st_mtime_ns)
                if self._newest[0] != key:
                    self._newest = (key, self.load(epoch))
                return self._newest[1]
            except (BunkbedError, OSError):
                continue  # damaged, or just collected; an older manifest has the same places unless directories moved
        return RunManifest()

    def lock(self, mark: str = "") -> int:
        """Take the writer's lock, until `unlock`.

        Args:
            mark: what `mark` returns meanwhile, to processes that see this directory.

        Raises:
            TableLockedError: another process has the lock; names the process. FormatError: the lock file or a folder
            that the writer writes to is a symbolic link.
        """
        path = self.directory / "lock"
        for place in (path, self.files, self.directory / "tables"):
            require_real(place)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The process id is only for the message of another process, so a full disk is not an error here.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n{mark}".encode(), 0)
                if mark:
                    os.fsync(descriptor)  # for other hosts on a shared disk
            self._is_locked = True
            return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").partition("\n")[0]
            os.close(descriptor)
            raise TableLockedError(
                f"{self.label} is being written by process {holder or 'unknown'}; close it there, "
                'or open it with mode="r"'
            ) from None
        except BaseException:
            os.close(descriptor)
            raise

    def mark(self) -> str:
        """Return the mark that the writer gave to `lock`; empty if the directory has no lock."""
        try:
            return (self.directory / "lock").read_text(errors="replace").partition("\n")[2]
        except FileNotFoundError:
            return ""

    def unlock(self, descriptor: int) -> None:
        """Release the lock."""
        self._is_locked = False
        self._known.clear()
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # explicit: a forked child may hold a copy of the descriptor
        os.close(descriptor)

    def epochs(self) -> list[int]:
        """Return the epochs that have a manifest, ascending."""
        found = (_NAME.fullmatch(name) for name in _names_in(self.directory))
        return sorted(int(match.group(1)) for match in found if match)

    def manifest_path(self, epoch: int) -> Path:
        return self.directory / f"run-{epoch:016d}"

    def file_path(self, number: int) -> Path:
        return self.files / f"file-{number:016d}"

    def load(self, epoch: int) -> RunManifest:
        path = self.manifest_path(epoch)
        manifest = decode(_native.read_file(str(path)), path)
        if manifest.epoch != epoch:
            raise CorruptionError(f"run manifest {path} holds commit {manifest.epoch}")
        return manifest

    def named(self, epoch: int) -> Named:
        """Return the names in a commit. With the lock each manifest is read once, because manifests never change."""
        found = self._known.get(epoch)
        if found is None:
            manifest = self.load(epoch)
            found = Named(manifest.keep, manifest.tables, frozenset(entry[0] for entry in manifest.files.values()))
            if self._is_locked:
                self._known[epoch] = found
        return found

    def load_newest(self) -> RunManifest:
        """Return the newest commit; an empty manifest when there is none.

        Raises:
            CorruptionError: it is damaged; names the older ones. An older commit is never returned silently.
        """
        epochs = self.epochs()
        if not epochs:
            return RunManifest()
        try:
            return self.load(epochs[-1])
        except FileNotFoundError:
            if self.epochs()[-1:] == epochs[-1:]:
                raise
            return self.load_newest()  # the writer made newer commits and collected this one after it was listed
        except CorruptionError as error:
            older = ", ".join(map(str, epochs[:-1]))
            place = shlex.quote(str(self.directory))
            remain = (
                f"older commits remain: {older}; to go back to one: bunkbed check {place} --repair --fall-back-to EPOCH"
                if older
                else "no older commit remains"
            )
            raise CorruptionError(f"{error}; {remain}") from None

    def snapshots(self) -> dict[str, int]:
        """Return the kept commits: name -> epoch, oldest first."""
        newest: dict[str, int] = {}
        for epoch in self.epochs():
            try:
                name = self.named(epoch).keep
            except FileNotFoundError:
                continue  # collected by the writer after it was listed
            except BunkbedError:
                continue  # damaged, which check() reports; the sound snapshots can still be opened
            if name:
                newest[name] = epoch
        return dict(sorted(newest.items(), key=lambda item: item[1]))

    def find(self, to: str | int) -> RunManifest:
        """Return the commit kept under a name, or of an epoch.

        Raises:
            ValueError: no such commit; the message lists the commits.
        """
        if isinstance(to, str):
            for epoch in reversed(self.epochs()):
                if to and self._keeps(epoch, to):
                    return self.load(epoch)
            names = ", ".join(map(repr, self.snapshots())) or "none"
            raise ValueError(f"{self.label} has no snapshot {to!r}; there are: {names}")
        if to not in self.epochs():
            remain = ", ".join(map(str, self.epochs())) or "none"
            raise ValueError(f"{self.label} has no commit {to}; commits that remain: {remain}")
        return self.load(to)

    def write_file(self, number: int, data: bytes) -> tuple[int, int, str]:
        """Do step 2 for one file; the caller syncs the directory afterwards."""
        path = self.file_path(number)
        _native.remove_file(str(path))  # left by a commit that failed
        write_durably(path, data)
        return (number, len(data), hashlib.sha256(data).hexdigest())

    def write_files(self, contents: Mapping[str, bytes], manifest: RunManifest) -> RunManifest:
        """Do step 2; return `manifest` with these files, in place of its own of the same names."""
        entries, number = dict(manifest.files), manifest.next_file
        for name, data in contents.items():
            entries[name] = self.write_file(number, data)
            number += 1
        if contents:
            sync_directory(self.files)
        return replace(manifest, files=entries, next_file=number)

    def was_collected(self, epoch: int) -> str:
        """Return the message for a reader whose commit is gone."""
        return f"{self.label}: commit {epoch} was collected by its writer meanwhile; call refresh(), or open it again"

    def read_file(self, name: str, manifest: RunManifest) -> bytes:
        """Read a dense file of a commit and verify its checksum.

        Raises:
            FileNotFoundError: no such name (lists the names), or the writer has collected the commit.
            CorruptionError: the file is missing or damaged.
        """
        if name not in manifest.files:
            known = ", ".join(sorted(manifest.files)) or "none"
            raise FileNotFoundError(f"{self.label} has no file {name!r} in commit {manifest.epoch}; it has: {known}")
        number, size, digest = manifest.files[name]
        path = self.file_path(number)
        try:
            data = _native.read_file(str(path))
        except FileNotFoundError:
            if not self.manifest_path(manifest.epoch).exists():
                raise FileNotFoundError(self.was_collected(manifest.epoch)) from None
            raise CorruptionError(f"file {path} ({name!r} of commit {manifest.epoch}) is missing") from None
        if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
            raise CorruptionError(f"file {path} ({name!r} of commit {manifest.epoch}) fails its checksum")
        return data

    def publish(self, manifest: RunManifest) -> None:
        """Do step 3."""
        self.publish_bytes(manifest.epoch, encode(manifest))

    def publish_bytes(self, epoch: int, data: bytes) -> None:
        """Do step 3 with the bytes of a manifest."""
        final = self.manifest_path(epoch)
        temporary = self.directory / f"new-{final.name}"
        _native.remove_file(str(temporary))
        write_durably(temporary, data)
        _native.link_file(str(temporary), str(final))
        sync_directory(self.directory)
        _native.failpoint("run.published")
        with contextlib.suppress(OSError):  # the commit is durable; the next one removes the temporary
            _native.remove_file(str(temporary))

    def forget(self, name: str) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
        """Remove the commits kept under a name, except the newest commit; return the result of `collect`."""
        epochs = self.epochs()
        dropped = [epoch for epoch in epochs[:-1] if self._keeps(epoch, name)]
        for epoch in dropped:
            self.manifest_path(epoch).unlink()
        if dropped:
            sync_directory(self.directory)
        return self.collect()

    def _keeps(self, epoch: int, name: str) -> bool:
        try:
            return self.named(epoch).keep == name
        except (BunkbedError, FileNotFoundError):
            return False  # damaged, which check() reports, or collected by the writer after it was listed

    def collect(self) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
        """Do step 4 without the tables' commits; return (epochs that remaining commits name, that snapshots name).

        Both are by table. If a manifest is damaged, its names are unknown: nothing is removed, and the first is empty.
        """
        epochs = self.epochs()
        commits: dict[int, Named] = {}
        for epoch in epochs:
            with contextlib.suppress(BunkbedError):  # damaged, which check() reports
                commits[epoch] = self.named(epoch)
        kept = set({commit.keep: epoch for epoch, commit in commits.items() if commit.keep}.values())
        if len(commits) < len(epochs):
            return {}, _epochs_of_tables(commits[epoch] for epoch in kept)
        remaining = kept.union(epochs[-2:])
        dropped = [epoch for epoch in epochs if epoch not in remaining]
        for epoch in dropped:
            _native.remove_file(str(self.manifest_path(epoch)))
        if dropped:
            sync_directory(self.directory)
        self.remove_unnamed_files()
        return (
            _epochs_of_tables(commits[epoch] for epoch in remaining),
            _epochs_of_tables(commits[epoch] for epoch in kept),
        )

    def remove_unnamed_files(self) -> None:
        """Remove the dense files that no commit names. If a manifest is damaged, its names are unknown: remove none."""
        try:
            wanted = set().union(*(self.named(epoch).files for epoch in self.epochs()))
        except BunkbedError:
            return
        for number, path in self.dense_files():
            if number not in wanted:
                _native.remove_file(str(path))

    def dense_files(self) -> list[tuple[int, Path]]:
        """Return (number, path) of the existing dense files, ascending."""
        found = (_FILE.fullmatch(name) for name in _names_in(self.files))
        return sorted((int(match.group(1)), self.files / match.group()) for match in found if match)


def _names_in(directory: Path) -> list[str]:
    """Return the names in a directory; none if it does not exist. `Path.iterdir` would take several times as long."""
    if not directory.is_dir():
        return []
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries]


def _epochs_of_tables(commits: Iterable[Named]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for commit in commits:
        for table, epoch in commit.tables.items():
            found.setdefault(table, set()).add(epoch)
    return found


def is_sharded(place: Path) -> bool:
    """Return whether `place` has a sharded table."""
    files = RunFiles(place)
    return bool(files.epochs()) and files.load_newest().sharding is not None


def kept_commits(place: Path) -> dict[str, int]:
    """Return the kept commits of the table, sharded table or run at `place`: name -> number, oldest first."""
    files = RunFiles(place)
    return files.snapshots() if files.epochs() else dict(_native.snapshots(str(files.directory)))
