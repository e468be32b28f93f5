"""Training pairs on disk: split, seen items and the order of every epoch, with the same bits as in memory.

For N pairs of U users, these replace the structures in memory as follows:

1. *The split* is the sort of `bunkbed.train.data.splits.pairs_by_user`; its sides are files.
2. *Seen items* are a hash of all pairs in memory (12 N bytes). Here the same sort writes one file of items, user by
   user, and one file with the start of each user. A batch reads the items of its users into the same native set.
   For a model of sequences the same sort also writes the items user by user in the order of their pairs.
3. *The order of an epoch* (in memory 8 N bytes, and random access to 16 N bytes of pairs) is here a sort by
   (block, key, place) into one file per epoch, which batches read sequentially. The thread that makes batches writes
   the file when the epoch's first batch is requested.
4. *Evaluations* use a number of users (`eval_users`), and hold only their pairs, also after the training.

DuckDB sorts, within the part of the budget that tables do not use (`TrainConfig.data_ram_bytes`). Files are raw
integers, read through the page cache, which the kernel can reclaim. All files are derived: written in a folder of
another name, renamed when complete and durable, and written again if they are missing or belong to another split or
other pairs. An existing file is complete. Its checksum is verified once, when it is opened again, because a flipped bit
would train on wrong pairs.

Several processes may share a folder: one makes a file, and the others wait for it (`_alone`). They need not be in the
same epoch: a process reads the file that it has open, which another one may have removed.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bunkbed import _native
from bunkbed.core.types import Array, Json
from bunkbed.files.durable import make_file, put_in_place, replace_file, require_real, sync_directory, sync_file
from bunkbed.train.data.blocks import pair_blocks
from bunkbed.train.data.interactions import Interactions
from bunkbed.train.data.sampling import (
    STREAM_EVAL,
    STREAM_ORDER,
    OrderedPairs,
    SeenPairs,
    first_of_order,
    order_keys,
)
from bunkbed.train.data.sequences import Sequences, num_windows
from bunkbed.train.data.sort import Sorter
from bunkbed.train.data.splits import keyed, number_type, pair_schema, pairs_by_user, refuse_nothing_held
from bunkbed.train.data.vocab import DataError, Int64Array
from bunkbed.train.settings.config import TrainConfig

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "STREAM_FOLDER",
    "StoredOrder",
    "StoredSeenPairs",
    "StoredSequences",
    "StreamedSplit",
    "draw_users",
    "open_split",
    "pairs_of",
    "sums_of",
]

#: The folder of these files in a run's folder.
STREAM_FOLDER = "stream"

_VERSION = 2
_CHUNK = 1 << 20
_DESCRIPTION = "split.json"
_BLOCK_BYTES = 1 << 20
_WEIGHT = np.dtype(np.float32)
_SUM = np.dtype("<u4")  # an epoch's file ends with the crc32 of its records


class StreamedSplit:
    """The result of `bunkbed.train.data.splits.split` on disk, with the files for batches.

    Attributes:
        train: training pairs, in file order; mapped from their file.
        valid: held-out pairs, in file order; None if no pairs are held out.
        folder: the folder of the files.
    """

    def __init__(self, pairs: Interactions, folder: Path, about: Json) -> None:
        self.folder = folder
        self._about = about
        self._num_users, self._num_items = pairs.num_users, pairs.num_items
        kinds = number_type(pairs.num_users), number_type(pairs.num_items)

        def part(name: str) -> Interactions:
            users = _mapped(folder / f"{name}.users", kinds[0], about[name])
            items = _mapped(folder / f"{name}.items", kinds[1], about[name])
            weights = None
            if pairs.is_weighted and name == "train":
                weights = _mapped(folder / "train.weights", _WEIGHT, about[name])
            text = pairs.source, pairs.duplicates, pairs.form
            return Interactions(users, items, pairs.user_vocab, pairs.item_vocab, *text, weights=weights)

        self.train = part("train")
        self.valid = part("valid") if about["valid"] else None

    def seen(self) -> StoredSeenPairs:
        """Return the training pairs as a set."""
        return StoredSeenPairs(self.folder, self._num_users, self._num_items, len(self.train))

    def order(self, config: TrainConfig) -> StoredOrder:
        """Return the training pairs in each epoch's order."""
        return StoredOrder(self.train, self.folder, config)

    def sequences(self, config: TrainConfig) -> StoredSequences:
        """Return the training pairs of each user in their order."""
        kind = number_type(self._num_items)
        return StoredSequences(self.folder, self._num_users, kind, len(self.train), self._about["predictions"])


def open_split(pairs: Interactions, config: TrainConfig, folder: Path) -> StreamedSplit:
    """Open the split of `config` in `folder`; make it if it does not exist.

    Raises:
        ValueError: no pairs can be held out, as `bunkbed.train.data.splits.split`.
        DataError: a file is damaged, or memory or disk are too small for DuckDB.
        OSError: the folder cannot be written.
    """
    wanted = {
        "version": _VERSION,
        "option": config.valid,
        "seed": config.seed,
        "pairs": len(pairs),
        "num_users": pairs.num_users,
        "num_items": pairs.num_items,
        "sums": sums_of(pairs),
    }
    if config.is_sequential:
        wanted["length"] = config.length_or_default
    if pairs.rounds:
        wanted["rounds"] = list(pairs.rounds)
    require_real(folder)
    about = _whole(folder, wanted)
    if about is None:
        with _alone(folder):
            about = _whole(folder, wanted) or _made(pairs, config, folder, wanted)
    return StreamedSplit(pairs, folder, about)


def _whole(folder: Path, wanted: Json) -> Json | None:
    """Return the description of a split whose files are there and undamaged; None if it is of something else."""
    about = _description(folder)
    if about is None or any(about.get(name) != value for name, value in wanted.items()):
        return None
    for name, (size, wanted_sum) in about["files"].items():
        path = folder / name
        if not path.exists() or path.stat().st_size != size or _sum_of(path) != wanted_sum:
            raise _damaged(path)
    return about


def _made(pairs: Interactions, config: TrainConfig, folder: Path, wanted: Json) -> Json:
    """Make the files of a split; return their description."""
    made = folder.with_name(folder.name + ".making")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    try:
        about: Json = {**wanted, **_Making(pairs, config, made).run()}
        about["files"] = {}
        for path in sorted(made.iterdir()):
            sync_file(path)
            about["files"][path.name] = [path.stat().st_size, _sum_of(path)]
        replace_file(made / _DESCRIPTION, json.dumps(about, indent=2).encode())
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
        sync_directory(folder.parent)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return about


class _Making:
    """Writer of the files of a `StreamedSplit`."""

    def __init__(self, pairs: Interactions, config: TrainConfig, folder: Path) -> None:
        self._pairs = pairs
        self._config = config
        self._folder = folder
        self._kinds = number_type(pairs.num_users), number_type(pairs.num_items)

    def run(self) -> dict[str, int]:
        is_held = self._sort()
        counts = self._part(is_held)
        refuse_nothing_held(self._pairs, self._config, counts["valid"])
        del is_held
        (self._folder / "held").unlink()
        if self._config.is_sequential:
            counts["predictions"] = self._windows()
        return counts

    def _sort(self) -> npt.NDArray[np.bool_]:
        """Write the seen items of every user; return which pairs are held out, mapped from a file."""
        pairs = self._pairs
        sequential = self._config.is_sequential
        is_held = np.memmap(self._folder / "held", np.bool_, "w+", shape=(max(len(pairs), 1),))
        starts = np.memmap(self._folder / "seen.starts", np.int64, "w+", shape=(pairs.num_users + 1,))
        with (
            Sorter(self._folder / "sorting", self._config.data_ram_bytes) as sorter,
            (self._folder / "seen.items").open("wb") as file,
            (self._folder / "sequences.items").open("wb") if sequential else nullcontext() as in_order,
        ):
            for users, items, places, held in pairs_by_user(pairs, self._config, sorter):
                is_held[places[held]] = True
                users, items = users[~held], items[~held]
                items[np.lexsort((items, users))].astype(self._kinds[1]).tofile(file)
                if in_order is not None:
                    places = places[~held]
                    items[np.lexsort((places, users))].astype(self._kinds[1]).tofile(in_order)
                known, counts = np.unique(users, return_counts=True)
                starts[known + 1] = counts
        _add_up(starts)
        return is_held

    def _windows(self) -> int:
        """Write the number of each user's first window; return the number of predictions."""
        count = self._pairs.num_users
        starts = _mapped(self._folder / "seen.starts", np.dtype(np.int64), count + 1)
        windows = np.memmap(self._folder / "sequences.windows", np.int64, "w+", shape=(count + 1,))
        predictions = 0
        for first in range(0, count, _CHUNK):
            counts = np.diff(starts[first : first + _CHUNK + 1])
            windows[first + 1 : first + 1 + len(counts)] = num_windows(counts, self._config.length_or_default)
            predictions += int(np.maximum(counts - 1, 0).sum())
        _add_up(windows)
        return predictions

    def _part(self, is_held: npt.NDArray[np.bool_]) -> dict[str, int]:
        """Write both sides of the split in file order; return the number of pairs of each."""
        counts = {"train": 0, "valid": 0}
        files = {
            (name, column): (self._folder / f"{name}.{column}").open("wb")
            for name in counts
            for column in ("users", "items")
        }
        if self._pairs.is_weighted:
            files["train", "weights"] = (self._folder / "train.weights").open("wb")
        try:
            done = 0
            for (users, items), weights in zip(self._pairs.batches(), self._pairs.weight_batches(), strict=True):
                held = np.asarray(is_held[done : done + len(users)])
                for name, mine in (("train", ~held), ("valid", held)):
                    users[mine].astype(self._kinds[0]).tofile(files[name, "users"])
                    items[mine].astype(self._kinds[1]).tofile(files[name, "items"])
                    counts[name] += int(mine.sum())
                if weights is not None:
                    weights[~held].astype(_WEIGHT).tofile(files["train", "weights"])
                done += len(users)
        finally:
            for file in files.values():
                file.close()
        return counts


class StoredSeenPairs(SeenPairs):
    """`SeenPairs` in files: each call reads the items of its users. Not thread-safe; owns the mappings."""

    def __init__(self, folder: Path, num_users: int, num_items: int, num_pairs: int) -> None:
        self._num_items = num_items
        self._starts = _Scattered(folder / "seen.starts", np.dtype(np.int64), num_users + 1)
        self._items = _Scattered(folder / "seen.items", number_type(num_items), num_pairs)

    def _of(self, users: Int64Array) -> tuple[_native.SeenPairs, Int64Array]:
        """Return the pairs of some users with new user numbers, and these numbers: ``int64[N]``."""
        known, numbers = np.unique(users, return_inverse=True)
        self._starts.want(known, known + 2)
        starts = self._starts.values[known]
        counts = self._starts.values[known + 1] - starts
        self._items.want(starts, starts + counts)
        before = np.cumsum(counts) - counts
        at = np.repeat(starts - before, counts) + np.arange(int(counts.sum()))
        owners = np.repeat(np.arange(len(known)), counts)
        return _native.SeenPairs(owners * self._num_items + self._items.values[at], self._num_items), numbers

    def contains(self, users: Int64Array, items: Int64Array) -> npt.NDArray[np.bool_]:
        """As `SeenPairs.contains`."""
        part, numbers = self._of(users)
        return part.contains(numbers, items)

    def clashes(self, users: Int64Array, items: Int64Array) -> Int64Array:
        """As `SeenPairs.clashes`."""
        part, numbers = self._of(users)
        return part.clashes(numbers, items)

    def items_of(self, user: int) -> Int64Array:
        """As `SeenPairs.items_of`."""
        first, last = self._starts.values[user : user + 2]
        return self._items.values[first:last].astype(np.int64)


class StoredSequences(Sequences):
    """`Sequences` in files. Not thread-safe; owns the mappings."""

    def __init__(self, folder: Path, num_users: int, kind: np.dtype[Any], num_pairs: int, num_predictions: int) -> None:
        self._starts_on_disk = _Scattered(folder / "seen.starts", np.dtype(np.int64), num_users + 1)
        self._items_on_disk = _Scattered(folder / "sequences.items", kind, num_pairs)
        windows = _mapped(folder / "sequences.windows", np.dtype(np.int64), num_users + 1)
        super().__init__(self._starts_on_disk.values, self._items_on_disk.values, windows, num_predictions)

    def _want_starts(self, users: Int64Array) -> None:
        self._starts_on_disk.want(users, users + 2)

    def _want_items(self, first: Int64Array, last: Int64Array) -> None:
        self._items_on_disk.want(first, last)


class StoredOrder:
    """`bunkbed.train.data.sampling.PairOrder` with one file per epoch.

    Not thread-safe; owns its files, `close` removes them. Processes that are an epoch apart make files again.

    Making a file sorts all pairs. It needs twice their bytes on disk, and more to spill.
    """

    def __init__(self, pairs: Interactions, folder: Path, config: TrainConfig) -> None:
        self._pairs = pairs
        self._folder = folder
        self._seed = config.seed
        self._blocks = pair_blocks(config, pairs)
        self._suffix = "" if config.blocks is None else "-{}x{}".format(*config.blocks)
        self._ram_bytes = config.data_ram_bytes
        weight = [("weight", _WEIGHT)] if pairs.is_weighted else []
        self._record = np.dtype(
            [("user", number_type(pairs.num_users)), ("item", number_type(pairs.num_items)), *weight]
        )
        self._open: tuple[int, Array] | None = None  # the epoch, and the bytes of its file

    def pairs(self, epoch: int, first: int, last: int) -> OrderedPairs:
        """As `PairOrder.pairs`; the first call of an epoch makes its file."""
        path = self._folder / f"epoch-{epoch}{self._suffix}"
        if self._open is None or self._open[0] != epoch:
            with _alone(self._folder):
                self._make(epoch, path)
                self._open = epoch, _mapped(path, np.dtype(np.uint8), self._length() + _SUM.itemsize)
        records = self._open[1][: self._length()].view(self._record)[first:last]
        weights = records["weight"].copy() if self._pairs.is_weighted else None
        return records["user"].astype(np.int64), records["item"].astype(np.int64), weights

    def _make(self, epoch: int, path: Path) -> None:
        for other in self._folder.glob("epoch-*"):
            if other != path:
                other.unlink()
        if path.exists() and self._is_whole(path):
            return
        making = path.with_name(f"{path.name}.making")
        sum_of_records = 0
        with Sorter(self._folder / "sorting", self._ram_bytes) as sorter, make_file(making) as file:
            columns = self._columns(epoch)
            sorter.stream("pairs", columns[0], columns[1])
            names = ", ".join(f'"{name}"' for name in self._record.names or ())
            for batch in sorter.batches(f"SELECT {names} FROM pairs ORDER BY block, key, place"):
                records = np.empty(len(batch), self._record)
                for name, column in zip(batch.schema.names, batch.columns, strict=True):
                    records[name] = column.to_numpy()
                records.tofile(file)
                sum_of_records = zlib.crc32(records.data, sum_of_records)
            np.array([sum_of_records], _SUM).tofile(file)
        put_in_place(making, path)

    def _columns(self, epoch: int) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """Return the pairs with their keys and places, and the place of their blocks in the epoch."""
        import pyarrow as pa

        schema = pair_schema(self._pairs)
        blocks = self._blocks
        wider = schema.append(pa.field("block", pa.int64()))
        if self._pairs.is_weighted:
            wider = wider.append(pa.field("weight", pa.float32()))

        def with_blocks() -> Iterator[pa.RecordBatch]:
            batches = keyed(self._pairs, schema, order_keys(self._seed, STREAM_ORDER, epoch))
            for batch, weights in zip(batches, self._pairs.weight_batches(), strict=True):
                places = np.zeros(len(batch), np.int64)
                if blocks is not None:
                    users, items = (batch.column(at).to_numpy().astype(np.int64) for at in (0, 1))
                    places[:] = blocks.places(users, items, epoch)
                more = [] if weights is None else [pa.array(weights)]
                yield pa.record_batch([*batch.columns, pa.array(places), *more], schema=wider)

        return wider, with_blocks()

    def _is_whole(self, path: Path) -> bool:
        """Return whether the epoch's file of an earlier process is complete and undamaged."""
        length = self._length()
        if path.stat().st_size != length + _SUM.itemsize:
            return False
        return _sum_of(path, length) == int(np.fromfile(path, _SUM, offset=length)[0])

    def _length(self) -> int:
        """Return the bytes of an epoch's records."""
        return len(self._pairs) * self._record.itemsize

    def close(self) -> None:
        """Remove the file of the epoch; `pairs` makes it again."""
        self._open = None
        with _alone(self._folder):
            for path in self._folder.glob("epoch-*"):
                path.unlink()


def _add_up(counts: np.memmap) -> None:
    """Replace the numbers of a mapped file by their running sums, part by part."""
    total = 0
    for first in range(0, len(counts), _CHUNK):
        part = counts[first : first + _CHUNK]
        np.cumsum(part, out=part)
        part += total
        total = int(part[-1])
    counts.flush()


def draw_users(pairs: Interactions, count: int, seed: int) -> tuple[npt.NDArray[np.bool_], int]:
    """Draw `count` of the users of some pairs, by seed; all users if they are fewer.

    Returns:
        A mask of the users, ``bool[num_users]``, and the number of users from which they were drawn.
    """
    has = np.zeros(pairs.num_users, dtype=np.bool_)
    for users, _ in pairs.batches():
        has[users] = True
    total = int(np.count_nonzero(has))
    if count < total:
        ranks = np.sort(first_of_order(seed, STREAM_EVAL, 1, total, count))
        done = 0
        for first in range(0, len(has), _CHUNK):
            part = has[first : first + _CHUNK]
            there = np.flatnonzero(part)
            mine = ranks[slice(*np.searchsorted(ranks, [done, done + len(there)]))] - done
            part[:] = False
            part[there[mine]] = True
            done += len(there)
    return has, total


def pairs_of(pairs: Interactions, users: npt.NDArray[np.bool_]) -> Interactions:
    """Return the pairs, in memory, of the users ``bool[num_users]``."""
    parts = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    for some_users, some_items in pairs.batches():
        mine = users[some_users]
        parts.append((some_users[mine].astype(np.int64), some_items[mine].astype(np.int64)))
    found_users, found_items = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return pairs.replace(found_users, found_items)


class _Scattered:
    """Mapped file of numbers for random access, with prefetching.

    Reads of pages that are not in memory wait for the disk one after another; prefetches are served concurrently. Owns
    the mapping.
    """

    def __init__(self, path: Path, kind: np.dtype[Any], count: int) -> None:
        self._map = _map(path, kind, count)
        #: All numbers, read-only.
        self.values = np.frombuffer(self._map or b"", kind)
        if self._map is not None:
            self._map.madvise(mmap.MADV_RANDOM)  # no read-ahead

    def want(self, first: Int64Array, last: Int64Array) -> None:
        """Start to read ``values[first[i]:last[i]]`` for every i, without waiting."""
        if self._map is None:
            return
        size = self.values.itemsize
        begins, ends = first * size // mmap.PAGESIZE, -(-last * size // mmap.PAGESIZE)
        pages = np.unique(np.stack([begins, ends], 1)[ends > begins], axis=0) * mmap.PAGESIZE
        for begin, end in pages.tolist():
            self._map.madvise(mmap.MADV_WILLNEED, begin, end - begin)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from making files of a folder inside; wait until none does."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f"{folder.name}.lock")
    require_real(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # with the lock


def _mapped(path: Path, kind: np.dtype[Any], count: int) -> Array:
    """Return ``kind[count]`` of a file, read-only; raises as `_map` does."""
    return np.frombuffer(_map(path, kind, count) or b"", kind)


def _map(path: Path, kind: np.dtype[Any], count: int) -> mmap.mmap | None:
    """Map the bytes of ``kind[count]``; return None for 0 bytes.

    Raises:
        DataError: the file is missing or of another length.
    """
    if not path.exists() or path.stat().st_size != count * kind.itemsize:
        raise _damaged(path)
    if not count:
        return None  # an empty file cannot be mapped
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _damaged(path: Path) -> DataError:
    return DataError(f"{path}: is damaged; remove the folder {path.parent}, it is made again")


def sums_of(pairs: Interactions) -> list[int]:
    """Return the crc32 of all users, of all items, as int64 in order, and of all weights if there are any.

    They do not depend on the storage of the pairs.
    """
    sums = [0, 0, 0][: 2 + pairs.is_weighted]
    for batch, weights in zip(pairs.batches(), pairs.weight_batches(), strict=True):
        for at, column in enumerate(batch):
            sums[at] = zlib.crc32(np.ascontiguousarray(column, np.int64).data, sums[at])
        if weights is not None:
            sums[2] = zlib.crc32(np.ascontiguousarray(weights, _WEIGHT).data, sums[2])
    return sums


def _sum_of(path: Path, length: int | None = None) -> int:
    """Return the crc32 of a file, or of its first `length` bytes."""
    found, left = 0, path.stat().st_size if length is None else length
    with path.open("rb") as file:
        while left and (block := file.read(min(_BLOCK_BYTES, left))):
            found = zlib.crc32(block, found)
            left -= len(block)
    return found


def _description(folder: Path) -> Json | None:
    try:
        about = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return about if isinstance(about, dict) else None
