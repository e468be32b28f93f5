"""The files of a run: its manifests and dense files, written so that power loss leaves the old commit or the new.

A manifest is one line of JSON and one line with its SHA-256. Protocol (ENGINE rule 14, *publish* and *collect*):

1. every table has prepared: its own commit is durable, under an epoch no run manifest names yet;
2. each new dense file is written under a number never used before, synced, and its directory synced;
3. the manifest is written under a temporary name, synced, linked under its epoch (never replacing), the directory
   synced. The run's commit exists from here on;
4. what no remaining manifest names goes: old manifests first, durably, then files and the tables' old commits.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bunkbed import _native
from bunkbed.errors import BunkbedError, CorruptionError, FormatError, TableLockedError
from bunkbed.sharding import HASH, Sharding

FORMAT = 1
_NAME = re.compile(r"run-(\d{16})")
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
        next_file: first number no file was ever given.
        copied: a copy put this commit here, and nobody has written the run since.
        places: table name -> its directory, absolute or relative to the run's, of tables that lie elsewhere than in
            ``tables/NAME``. Where a table lies is no part of a commit: those of the newest manifest hold for all.
        sharding: what makes the run one sharded table; None for any other.
    """

    epoch: int = 0
    meta: dict[str, Any] = field(default_factory=dict)
    keep: str = ""
    tables: dict[str, int] = field(default_factory=dict)
    files: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    next_file: int = 1
    copied: bool = False
    places: dict[str, str] = field(default_factory=dict)
    sharding: Sharding | None = None


def encode(manifest: RunManifest) -> bytes:
    """The manifest's bytes."""
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
    body = json.dumps(values, sort_keys=True).encode()
    return body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_file(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 3 and all(map(_is_count, entry[:2])) and isinstance(entry[2], str)


def _is_named(value: object, is_sound: Callable[[object], bool]) -> bool:
    return isinstance(value, dict) and all(MEMBER.fullmatch(name) and is_sound(one) for name, one in value.items())


#: What the values of a manifest may be: they become paths and numbers of files.
_KEYS: dict[str, Callable[[object], bool]] = {
    "epoch": _is_count,
    "meta": lambda value: isinstance(value, dict),
    "keep": lambda value: isinstance(value, str),
    "tables": lambda value: _is_named(value, _is_count),
    "files": lambda value: _is_named(value, _is_file),
    "next_file": _is_count,
}
#: And of those that not every manifest has.
_OPTIONAL: dict[str, Callable[[object], bool]] = {
    "places": lambda value: _is_named(
        value, lambda place: isinstance(place, str) and place != "" and "\0" not in place
    ),
    "sharding": lambda value: Sharding.from_json(value) is not None,
}


def decode(data: bytes, path: Path) -> RunManifest:
    """The manifest in `data`.

    Raises:
        CorruptionError: the checksum does not fit, or what it covers is no manifest. FormatError: a newer format.
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
    if sharding is not None and sharding.hash != HASH:
        raise FormatError(
            f"run manifest {path}: rows are divided among shards by rule {sharding.hash}, this release knows {HASH}"
        )
    if sharding is not None and sorted(values["tables"]) != sharding.names():
        raise CorruptionError(
            f"run manifest {path}: it names {len(values['tables'])} tables, and they are not its "
            f"{len(sharding.shards)} shards"
        )
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
    )


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    _native.sync_directory(str(path))


def sync_file(path: Path) -> None:
    """Make the bytes of a file that is written durable; of a directory its names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(made: Path, path: Path) -> None:
    """Give a file that was written beside `path` its name, durably: whoever looks finds the old one or the new one."""
    sync_file(made)
    made.replace(path)
    sync_directory(path.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file durably and all at once."""
    made = path.with_name(f"{path.name}.tmp")
    made.write_bytes(content)
    put_in_place(made, path)


def write_durably(path: Path, data: bytes) -> None:
    """A new file whose bytes are durable; its name is, once the directory is synced."""
    _native.write_file(str(path), data)


def unlock(descriptor: int) -> None:
    """Give a lock of `RunFiles.lock` back."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # explicit: a forked child may hold a copy of the descriptor
    os.close(descriptor)


class RunFiles:
    """The manifests and dense files in a run's directory, and where its tables lie.

    Args:
        directory: the run's.
        kind: what messages call it.
    """

    def __init__(self, directory: Path, kind: str = "run") -> None:
        self.directory = directory
        self.files = directory / "files"
        self.label = f"{kind} {directory}"
        #: Where tables lie, when that is known better than the manifests say.
        self.places: dict[str, str] | None = None

    def table_path(self, name: str) -> Path:
        """The directory of a table: the one seam through which everything that opens, checks or copies finds it."""
        places = self._recorded_places() if self.places is None else self.places
        return self.directory / places.get(name, f"tables/{name}")  # an absolute place stands for itself

    def _recorded_places(self) -> dict[str, str]:
        for epoch in reversed(self.epochs()):
            try:
                return self.load(epoch).places
            except (BunkbedError, OSError):
                continue  # damaged, or just collected; an older one says the same unless directories moved since
        return {}

    def lock(self) -> int:
        """The writer's lock, held until `unlock`.

        Raises:
            TableLockedError: another process has it; names it.
        """
        descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise TableLockedError(
                f"{self.label} is being written by process {holder or 'unknown'}; close it there, "
                'or open it with mode="r"'
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor

    def epochs(self) -> list[int]:
        """Epochs with a manifest, ascending."""
        if not self.directory.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.directory.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def manifest_path(self, epoch: int) -> Path:
        return self.directory / f"run-{epoch:016d}"

    def file_path(self, number: int) -> Path:
        return self.files / f"file-{number:016d}"

    def load(self, epoch: int) -> RunManifest:
        path = self.manifest_path(epoch)
        return decode(_native.read_file(str(path)), path)

    def load_newest(self) -> RunManifest:
        """The newest commit; an empty manifest when there is none.

        Raises:
            CorruptionError: it is damaged; names the older ones. Never a silent roll-back.
        """
        epochs = self.epochs()
        if not epochs:
            return RunManifest()
        try:
            return self.load(epochs[-1])
        except CorruptionError as error:
            older = ", ".join(map(str, epochs[:-1]))
            place = shlex.quote(str(self.directory))
            remain = (
                f"older commits remain: epoch {older}; "
                f"to go back to one: bunkbed check {place} --repair --fall-back-to EPOCH"
                if older
                else "no older commit remains"
            )
            raise CorruptionError(f"{error}; {remain}") from None

    def snapshots(self) -> dict[str, int]:
        """Kept commits: name -> epoch, oldest first."""
        newest: dict[str, int] = {}
        for epoch in self.epochs():
            try:
                name = self.load(epoch).keep
            except BunkbedError:
                continue  # check() reports it; the sound ones can still be opened
            if name:
                newest[name] = epoch
        return dict(sorted(newest.items(), key=lambda item: item[1]))

    def find(self, to: str | int) -> RunManifest:
        """The commit kept under a name, or of an epoch.

        Raises:
            ValueError: there is none; lists those there are.
        """
        if isinstance(to, str):
            kept = self.snapshots()
            if to not in kept:
                names = ", ".join(map(repr, kept)) or "none"
                raise ValueError(f"{self.label} has no snapshot {to!r}; there are: {names}")
            return self.load(kept[to])
        if to not in self.epochs():
            remain = ", ".join(map(str, self.epochs())) or "none"
            raise ValueError(f"{self.label} has no epoch {to}; epochs that remain: {remain}")
        return self.load(to)

    def write_file(self, number: int, data: bytes) -> tuple[int, int, str]:
        """Step 2 for one file; its directory must still be synced."""
        path = self.file_path(number)
        _native.remove_file(str(path))  # of a commit that never came to be
        write_durably(path, data)
        return (number, len(data), hashlib.sha256(data).hexdigest())

    def read_file(self, name: str, manifest: RunManifest) -> bytes:
        """A dense file of a commit, verified.

        Raises:
            FileNotFoundError: no such name; lists those there are. CorruptionError: it is missing or damaged.
        """
        if name not in manifest.files:
            known = ", ".join(sorted(manifest.files)) or "none"
            raise FileNotFoundError(f"{self.label} has no file {name!r} in epoch {manifest.epoch}; it has: {known}")
        number, size, digest = manifest.files[name]
        path = self.file_path(number)
        try:
            data = _native.read_file(str(path))
        except FileNotFoundError:
            raise CorruptionError(f"file {path} ({name!r} of epoch {manifest.epoch}) is missing") from None
        if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
            raise CorruptionError(f"file {path} ({name!r} of epoch {manifest.epoch}) fails its checksum")
        return data

    def publish(self, manifest: RunManifest) -> None:
        """Step 3."""
        final = self.manifest_path(manifest.epoch)
        temporary = self.directory / f"new-{final.name}"
        _native.remove_file(str(temporary))
        write_durably(temporary, encode(manifest))
        _native.link_file(str(temporary), str(final))
        sync_directory(self.directory)
        _native.failpoint("run.published")
        with contextlib.suppress(OSError):  # the commit is durable; the next one removes the temporary
            _native.remove_file(str(temporary))

    def forget(self, name: str) -> dict[str, set[int]]:
        """Lets go of the commits kept under a name, but the newest; returns what `collect` does."""
        epochs = self.epochs()
        dropped = [epoch for epoch in epochs[:-1] if self._keeps(epoch, name)]
        for epoch in dropped:
            self.manifest_path(epoch).unlink()
        if dropped:
            sync_directory(self.directory)
        return self.collect()

    def _keeps(self, epoch: int, name: str) -> bool:
        try:
            return self.load(epoch).keep == name
        except CorruptionError:
            return False

    def kept(self, table: str) -> set[int]:
        """Epochs of a table that snapshots name."""
        return {
            self.load(epoch).tables[table] for epoch in self.snapshots().values() if table in self.load(epoch).tables
        }

    def collect(self) -> dict[str, set[int]]:
        """Step 4, except the tables' part: their epochs that remaining manifests name, by table."""
        epochs = self.epochs()
        try:
            manifests = {epoch: self.load(epoch) for epoch in epochs}
        except BunkbedError:
            return {}  # nobody knows what that one names, so nothing goes; check() reports it
        kept = set(self.snapshots().values())
        remaining = [m for epoch, m in manifests.items() if epoch in epochs[-2:] or epoch in kept]
        dropped = [epoch for epoch in epochs if manifests[epoch] not in remaining]
        for epoch in dropped:
            _native.remove_file(str(self.manifest_path(epoch)))
        if dropped:
            sync_directory(self.directory)
        wanted = {entry[0] for manifest in remaining for entry in manifest.files.values()}
        for path in self.files.glob("file-*"):
            if int(path.name.removeprefix("file-")) not in wanted:
                _native.remove_file(str(path))
        named: dict[str, set[int]] = {}
        for manifest in remaining:
            for table, epoch in manifest.tables.items():
                named.setdefault(table, set()).add(epoch)
        return named
