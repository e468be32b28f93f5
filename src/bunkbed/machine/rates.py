"""The rates of this machine: memory bandwidth, and random reads, large reads and sequential writes of a disk.

`measure` takes a few seconds and stores the result in the user's cache directory; the next call reads it from there.
`remembered` only reads it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from bunkbed import _native
from bunkbed.core.budget import format_bytes

READ_THREADS = 64  # the size of the core's read pool
LARGE_READ_BYTES = 256 << 10  # the core's largest read
_LARGE_THREADS = 16  # as many large reads as the core's read slices have room for
_BLOCK_BYTES = 4096
_MEMORY_BYTES = 512 << 20  # size of the copied arrays: larger than the processor's caches
_ROUNDS = 5  # measurements of each rate. Memory: the best, because other processes only make it slower. Reads: the
# median, because a disk can be faster for a short time than in a training run
_MEMORY_S = 0.15
_FILE_BYTES = 1 << 30  # maximum size of the temporary file, which is at most an eighth of the free space
_FILE_MIN_BYTES = 16 << 20
_WRITE_S = 2.0
_READ_S = 0.3
_LARGE_READ_S = 0.2
_FORMAT = 1


@dataclass(frozen=True)
class Machine:
    """The rates of a machine; None: unknown.

    Attributes:
        memory_bytes_per_s: bytes read plus bytes written, by copies on all processors.
        read_iops: random reads of 4 KiB a second by 64 threads, without the page cache.
        read_bytes_per_s: rate of random reads of 256 KiB by 16 threads, without the page cache.
        write_bytes_per_s: rate of a file that is written sequentially and synced.
        read_unit: unit of reads from the disk in bytes; 1: the file system does not support reads without the page
            cache, and `read_iops` and `read_bytes_per_s` are those of the page cache.
        disk: device and type of the file system.
        processors: number of processors that this process may use.
        measured: time of the measurement, in seconds since 1970; 0: the caller gave the rates.
    """

    memory_bytes_per_s: float | None = None
    read_iops: float | None = None
    write_bytes_per_s: float | None = None
    read_unit: int = 4096
    disk: str = ""
    processors: int = 0
    measured: float = 0.0
    read_bytes_per_s: float | None = None

    @property
    def read_gap(self) -> int | None:
        """Bytes that the disk reads in the time of one more read; None: a rate is unknown.

        The core reads two records together where at most this many bytes separate them.

        >>> Machine(read_iops=100_000, read_bytes_per_s=2e9).read_gap
        20000
        """
        if not self.read_iops or not self.read_bytes_per_s:
            return None
        return int(self.read_bytes_per_s / self.read_iops)


def measure(directory: str | os.PathLike[str] = ".", *, again: bool = False) -> Machine:
    """Return this machine's rates: the stored ones, or else measure them, in about five seconds.

    Stored rates of an earlier release, which has no `Machine.read_bytes_per_s`, are measured again.

    Args:
        directory: a directory on the disk to measure; a temporary file of at most 1 GiB (and an eighth of the free
            space) is written there and removed. If it does not exist, the nearest existing parent is used.
        again: measure even if the rates are stored.

    Raises:
        OSError: the directory cannot be written, or has too little room.
    """
    place = _existing(directory)
    key = _key(place)
    found = _load().get(key)
    if not again and found is not None and found.read_bytes_per_s is not None:
        return found
    threads = _processors()
    read_iops, read_bytes_per_s, write_bytes_per_s, unit = _measure_disk(place)
    machine = Machine(
        memory_bytes_per_s=max(_native.probe_memory(threads, _MEMORY_BYTES, _MEMORY_S) for _ in range(_ROUNDS)),
        read_iops=read_iops,
        write_bytes_per_s=write_bytes_per_s,
        read_unit=unit,
        disk=filesystem(place),
        processors=threads,
        measured=time.time(),
        read_bytes_per_s=read_bytes_per_s,
    )
    _save({**_load(), key: machine})
    return machine


def free_bytes(directory: str | os.PathLike[str] = ".") -> int:
    """Return the bytes that may still be written to the disk of a directory, or of its nearest existing parent."""
    return shutil.disk_usage(_existing(directory)).free


def memory_bytes() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def remembered(directory: str | os.PathLike[str] | None = None) -> Machine | None:
    """Return the stored rates of this machine, or None; without a directory, those that do not depend on the disk."""
    known = _load()
    if directory is not None:
        return known.get(_key(_existing(directory)))
    here = [machine for key, machine in known.items() if key.startswith(_host() + " ")]
    newest = max(here, key=lambda machine: machine.measured, default=None)
    if newest is None:
        return None
    return replace(newest, read_iops=None, read_bytes_per_s=None, write_bytes_per_s=None, disk="")


def random_reads(files: Sequence[str | os.PathLike[str]], *, seconds: float = 3.0) -> tuple[float, int]:
    """Measure random reads of 4 KiB from these files, 64 at a time, without the page cache.

    Returns:
        (reads a second, `Machine.read_unit`); where the unit is 1 the reads were from the page cache.

    Raises:
        OSError: a file cannot be read. ValueError: the files have no whole block.
    """
    rate, unit = _native.probe_reads([os.fspath(file) for file in files], READ_THREADS, seconds, _BLOCK_BYTES)
    return float(rate), int(unit)


def large_reads(files: Sequence[str | os.PathLike[str]], *, seconds: float = 3.0) -> float:
    """Measure bytes a second of random reads of 256 KiB from these files, 16 at a time, without the page cache.

    Raises:
        OSError: a file cannot be read. ValueError: no file has 256 KiB.
    """
    paths = [os.fspath(file) for file in files]
    rate, _ = _native.probe_reads(paths, _LARGE_THREADS, seconds, LARGE_READ_BYTES)
    return float(rate) * LARGE_READ_BYTES


def sequential_writes(
    file: str | os.PathLike[str], *, num_bytes: int = _FILE_BYTES, seconds: float = math.inf
) -> float:
    """Measure bytes a second of a new file that is written sequentially without the page cache, and synced.

    Args:
        file: path of the file, which is not removed. num_bytes: maximum size. seconds: time limit before the sync.

    Raises:
        OSError, FileExistsError: the file cannot be written, or exists already.
    """
    rate, _ = _native.probe_writes(os.fspath(file), num_bytes, min(seconds, 3600.0))
    return float(rate)


def filesystem(directory: str | os.PathLike[str]) -> str:
    """Return device and type of the file system of `directory`, such as ``"/dev/nvme0n1p2 (ext4)"``; empty where
    the system has no /proc/mounts."""
    best, longest = "", -1
    target = str(Path(directory).resolve())
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in mounts:
        device, mount, kind = line.split()[:3]
        if (target == mount or target.startswith(mount.rstrip("/") + "/")) and len(mount) >= longest:
            best, longest = f"{device} ({kind})", len(mount)
    return best


def cache_file() -> Path:
    """Return the file of the stored rates: ``bunkbed/machine.json`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "bunkbed" / "machine.json"


def _measure_disk(place: Path) -> tuple[float, float, float, int]:
    """Return (reads, bytes read and bytes written a second, read unit), measured on a temporary file."""
    try:
        folder = tempfile.mkdtemp(prefix=".bunkbed-measure-", dir=place)
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise OSError(
            error.errno, f"cannot write here to measure the disk ({reason}); name another directory", str(place)
        ) from None
    try:
        room = shutil.disk_usage(place).free // 8
        if room < _FILE_MIN_BYTES:
            raise OSError(
                errno.ENOSPC,
                f"{format_bytes(room * 8)} free is too little to measure this disk with; it takes "
                f"{format_bytes(_FILE_MIN_BYTES * 8)}, or the figures of another measurement",
                str(place),
            )
        file = Path(folder) / "file"
        written_per_s = sequential_writes(file, num_bytes=min(room, _FILE_BYTES), seconds=_WRITE_S)
        small, large = [], []
        for _ in range(_ROUNDS):
            small.append(random_reads([file], seconds=_READ_S))
            large.append(large_reads([file], seconds=_LARGE_READ_S))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return statistics.median(rate for rate, _ in small), statistics.median(large), written_per_s, small[0][1]


def _existing(directory: str | os.PathLike[str]) -> Path:
    place = Path(directory).expanduser().absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place if place.is_dir() else place.parent


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _host() -> str:
    return f"{platform.node()} {platform.release()} {_processors()}"


def _key(place: Path) -> str:
    """Return the key of the stored rates: host, kernel, number of processors and device."""
    return f"{_host()} {place.stat().st_dev}:{filesystem(place)}"


def _load() -> dict[str, Machine]:
    """Return the stored rates; none where the file cannot be read or decoded. The next `measure` replaces it."""
    try:
        content: Any = json.loads(cache_file().read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            return {}
        return {key: _machine(entry) for key, entry in content["machines"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _machine(entry: dict[str, Any]) -> Machine:
    known = {field.name for field in fields(Machine)}
    machine = Machine(**{name: value for name, value in entry.items() if name in known})
    for rate in (
        machine.memory_bytes_per_s, machine.read_iops, machine.read_bytes_per_s, machine.write_bytes_per_s
    ):  # fmt: skip
        if rate is not None and not 1 <= rate <= 1e15:
            raise ValueError(f"a rate must be in [1, 1e15], got {rate}")
    return machine


def _save(machines: dict[str, Machine]) -> None:
    """Replace the file of stored rates. An error is ignored: the next `measure` then measures again."""
    path = cache_file()
    content = {"format": _FORMAT, "machines": {key: asdict(machine) for key, machine in machines.items()}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix="machine-", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink()
            raise
    except OSError:
        return
