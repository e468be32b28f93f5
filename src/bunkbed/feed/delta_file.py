"""Files of changes: Parquet or Arrow IPC, with a column ``id`` and a column ``weight``, null where a row was deleted.

Each file names the commits that it leads from and to, and the position of a cursor after it. So a consumer that died
between the file and its cursor goes on behind that file, and no change is in two files of a folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bunkbed.feed.changes import Change, Changes
from bunkbed.files.durable import sync_directory, sync_file
from bunkbed.io.common.source import Arrow, need

SUFFIXES = (".parquet", ".arrow")
_SINCE, _VERSION, _CURSOR, _POSITIONS = b"bunkbed.since", b"bunkbed.version", b"bunkbed.cursor", b"bunkbed.positions"
_UUID, _COMMIT = slice(16, 32), slice(32, 40)  # in the file of a cursor
_NAME = re.compile(r"changes-\d{15}-\d{15}\.(parquet|arrow)")


@dataclass(frozen=True)
class Delta:
    """A file that was written.

    Attributes:
        file: where it is; None where nothing had changed.
        since, version: the commits that it leads from and to.
        rows: rows that were stored or changed.
        deleted: rows that were deleted.
    """

    file: Path | None
    since: int
    version: int
    rows: int
    deleted: int


def write_delta(changes: Changes, target: Path) -> Delta:
    """Write the changes to a file, which is complete or not there, and then move the cursor.

    Raises:
        FileExistsError: the file exists; it is as it was. ValueError: the name has another suffix.
    """
    if target.suffix not in SUFFIXES:
        raise ValueError(f"{target}: changes are written to a file ending in {' or '.join(SUFFIXES)}, or into a folder")
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists already and is as it was; give another name, or a folder")
    pa = need("pyarrow", target.name, '"bunkbed[train]"')
    schema = pa.schema(
        [pa.field("id", pa.int64(), nullable=False), pa.field("weight", pa.list_(pa.float32(), changes.dim))],
        metadata={
            _SINCE: str(changes.since),
            _VERSION: str(changes.version),
            _CURSOR: changes.cursor or "",
            _POSITIONS: json.dumps([position.hex() for position in changes.positions()]),
        },
    )
    rows = deleted = 0
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")  # another command may write the same file
    try:
        with _writer(pa, target.suffix, part, schema) as write:
            for change in changes.unacknowledged():
                write(_batch(pa, schema, change))
                rows += len(change.ids)
                deleted += len(change.deleted)
        sync_file(part)
        try:
            os.link(part, target)
        except FileExistsError:
            raise FileExistsError(f"{target} was made by another command meanwhile, and is as it was") from None
        sync_directory(target.parent)
    finally:
        part.unlink(missing_ok=True)
    changes.acknowledge()
    return Delta(target, changes.since, changes.version, rows, deleted)


def write_next_delta(open_changes: Callable[[], Changes], cursor: str, folder: Path, suffix: str) -> Delta:
    """Write the changes since a cursor into a folder, as ``changes-SINCE-VERSION``; no file where there are none.

    Files that an earlier call wrote, whose cursor it could not move any more, are not written again.

    Raises:
        ValueError: the folder has files of another table or cursor, or ends at another commit than the cursor.
        OSError: another command writes changes into the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        for left in folder.glob(".changes-*.part"):  # by calls that were killed
            left.unlink()
        while True:
            files = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
            if files:
                _require_cursor(files[-1], cursor)
            changes = open_changes()
            delivered = [path for path in files if path.name.startswith(f"changes-{changes.since:015d}-")]
            if files:
                _require_follows(files[-1], delivered, changes)
            if delivered:
                changes.acknowledge_at(*_position(delivered[-1]))
            elif changes.version == changes.since:
                return Delta(None, changes.since, changes.version, 0, 0)
            else:
                name = f"changes-{changes.since:015d}-{changes.version:015d}{suffix}"
                return write_delta(changes, folder / name)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise OSError(errno.EBUSY, "another command writes changes into it", str(folder)) from None
    finally:
        os.close(descriptor)


def _position(path: Path) -> tuple[list[bytes], int]:
    """Return the files of the cursor behind a file of changes, and its commit."""
    metadata = _metadata(path)
    return [bytes.fromhex(position) for position in json.loads(metadata[_POSITIONS])], int(metadata[_VERSION])


def _require_cursor(path: Path, cursor: str) -> None:
    theirs = _metadata(path).get(_CURSOR, b"").decode()
    if theirs != cursor:
        raise ValueError(f"{path} has the changes of cursor {theirs!r}; give each table and cursor a folder of its own")


def _require_follows(newest: Path, delivered: list[Path], changes: Changes) -> None:
    """Raise unless the cursor stands behind the newest file of a folder, or before one that was delivered."""
    files, version = _position(newest)
    if [one[_UUID] for one in files] != [one[_UUID] for one in changes.positions()]:
        raise ValueError(f"{newest} has the changes of another table; give each table and cursor a folder of its own")
    if delivered:
        ends = [int.from_bytes(one[_COMMIT], "little") for one in _position(delivered[-1])[0]]
        is_ours = all(end >= came for end, came in zip(ends, changes.came, strict=True))  # not of a dropped cursor
    else:
        is_ours = version == changes.since
    if not is_ours:
        raise ValueError(
            f"the files in {newest.parent} end at commit {version} and cursor {changes.cursor!r} stands at commit "
            f"{changes.since}: another command moved it, or it was dropped; empty the folder, drop the cursor "
            "(bunkbed changes --drop-cursor) and start again with every row"
        )


@contextmanager
def _writer(pa: Arrow, suffix: str, path: Path, schema: Arrow) -> Iterator[Callable[[Arrow], None]]:
    if suffix == ".parquet":
        import pyarrow.parquet as parquet

        # Trained floats rarely repeat, and do not compress.
        with parquet.ParquetWriter(
            str(path), schema, use_dictionary=False, compression="none", write_statistics=["id"]
        ) as writer:
            yield writer.write_batch
    else:
        with pa.ipc.new_file(str(path), schema) as writer:
            yield writer.write_batch


def _batch(pa: Arrow, schema: Arrow, change: Change) -> Arrow:
    if len(change.ids):
        weights = pa.FixedSizeListArray.from_arrays(pa.array(change.rows.reshape(-1)), change.rows.shape[1])
        return pa.record_batch([pa.array(change.ids), weights], schema=schema)
    nothing = pa.nulls(len(change.deleted), schema.field("weight").type)
    return pa.record_batch([pa.array(np.ascontiguousarray(change.deleted)), nothing], schema=schema)


def _metadata(path: Path) -> dict[bytes, bytes]:
    pa = need("pyarrow", path.name, '"bunkbed[train]"')
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        schema = parquet.read_schema(path)
    else:
        with pa.ipc.open_file(str(path)) as file:
            schema = file.schema
    found: dict[bytes, bytes] = schema.metadata or {}
    return found
