"""What the measurements share: the machine's facts, temporary space, memory limits, the kernel's counts."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from bunkbed.machine import rates as machine_rates

MIB = 1 << 20
GIB = 1 << 30


# ---- the command line


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options every measurement has."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument("--tiny", action="store_true", help="a few seconds, for tests; no figure")
    options.add_argument("--dir", type=Path, default=Path("bench-data"), help="where temporary files go")
    options.add_argument("--seed", type=int, default=0, help="of ids and gradients")
    return options


@contextlib.contextmanager
def workspace(directory: Path, needed_bytes: int) -> Iterator[Path]:
    """A new folder inside `directory`, removed afterwards; refuses when the disk has too little room."""
    existed = directory.exists()
    require_space(directory, needed_bytes)
    folder = Path(tempfile.mkdtemp(prefix="bunkbed-", dir=directory))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not existed:
            with contextlib.suppress(OSError):  # someone else put a file there: leave it
                directory.rmdir()


def require_space(directory: Path, needed_bytes: int) -> None:
    """Makes the folder; leaves with a message when its disk has too little room."""
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if free < needed_bytes + GIB // 4:
        sys.exit(f"{directory} has {bb_bytes(free)} free and this run needs {bb_bytes(needed_bytes)}; pass --dir")


def bb_bytes(num_bytes: float) -> str:
    """Bytes for people."""
    from bunkbed.core.budget import format_bytes

    return format_bytes(num_bytes)


# ---- facts


def machine(directory: Path | None = None) -> str:
    """One paragraph about where the figures were taken."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    memory = machine_rates.memory_bytes()
    versions = [f"Python {platform.python_version()}", f"NumPy {np.__version__}"]
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        versions.append(f"torch {torch.__version__} ({torch.get_num_threads()} threads)")
    lines = [
        f"machine: {model}, {os.cpu_count()} cores, {bb_bytes(memory)} RAM, Linux {platform.release()}",
        f"software: bunkbed {bb.__version__} ({native_facts()}), {', '.join(versions)}",
    ]
    if "OMP_WAIT_POLICY" in os.environ or "OMP_NUM_THREADS" in os.environ:
        settings = {k: v for k, v in os.environ.items() if k in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")}
        lines.append(f"environment: {settings}")
    if directory is not None:
        lines.append(f"disk: {machine_rates.filesystem(directory)}")
    return "\n".join(lines)


def native_facts() -> str:
    from bunkbed import _native

    return f"{_native.simd()}, {bb.get_num_threads()} threads"


# ---- numbers


def zipf(num_rows: int, exponent: float = 1.05) -> Callable[[np.random.Generator, int], np.ndarray]:
    """A sampler of Zipf ids over [0, num_rows), scattered so that hot rows are not neighbours.

    Ranks are drawn from the exact distribution up to ten million rows; above that the head is exact and the
    tail follows the continuous inverse, which a step cannot tell apart.
    """
    head = min(num_rows, 10_000_000)
    weight = np.arange(1, head + 1, dtype=np.float64) ** -exponent
    cumulative = np.cumsum(weight)
    tail = 0.0
    if num_rows > head:
        power = 1.0 - exponent
        tail = (num_rows**power - head**power) / power
    total = cumulative[-1] + tail
    place = scatter(num_rows)

    def sample(rng: np.random.Generator, size: int) -> np.ndarray:
        drawn = rng.random(size) * total
        ranks = np.searchsorted(cumulative, drawn).astype(np.int64)
        if tail:
            beyond = drawn > cumulative[-1]
            power = 1.0 - exponent
            ranks[beyond] = (head**power + power * (drawn[beyond] - cumulative[-1])) ** (1.0 / power)
        return place(np.minimum(ranks, num_rows - 1))

    return sample


def scatter(num_rows: int) -> Callable[[np.ndarray], np.ndarray]:
    """The bijection of [0, num_rows) that `zipf` scatters ranks by, `int64[N]` -> `int64[N]`."""
    # A multiplier coprime to num_rows is a bijection that needs no table.
    multiplier = 2_654_435_761 % num_rows or 1
    while np.gcd(multiplier, num_rows) != 1:
        multiplier += 1

    def place(ranks: np.ndarray) -> np.ndarray:
        if num_rows < 2**31:
            return ranks * multiplier % num_rows
        return np.array([rank * multiplier % num_rows for rank in ranks.tolist()], np.int64)

    return place


def spread(values: Iterable[float], unit: str = "ms", scale: float = 1e3) -> str:
    """Median, least and most of times in seconds."""
    numbers = [value * scale for value in values]
    return (
        f"median {statistics.median(numbers):.3g} {unit} "
        f"(min {min(numbers):.3g}, max {max(numbers):.3g}, n={len(numbers)})"
    )


def timed(call: Callable[[], Any]) -> float:
    """Seconds one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def busy_seconds() -> float:
    """Processor seconds everything on this machine has used since it started, waiting for I/O not counted."""
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def delta(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """What each counter grew by."""
    return {key: after[key] - before.get(key, 0) for key in after}


# ---- what the kernel saw


def proc_io() -> dict[str, int]:
    """This process's /proc counters; ``read_bytes`` is what storage delivered, the page cache not counted."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}


def resident_bytes(key: str = "VmRSS") -> int:
    """Resident memory of this process now (``VmRSS``) or at its highest (``VmHWM``)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def reset_peak() -> None:
    """Makes ``VmHWM`` start again from the present size."""
    Path("/proc/self/clear_refs").write_text("5")


def forget_pages(folder: Path) -> None:
    """Writes back and drops every cached page of the files in `folder`.

    Pages cached by the process that built a file are charged to that process: a later one under a memory
    limit would read them for nothing.
    """
    os.sync()
    for path in [folder] if folder.is_file() else [p for p in folder.rglob("*") if p.is_file()]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


class MemoryLimit:
    """A memory cgroup of its own for child processes (version 1 or 2); a context manager.

    `why_not` says why it cannot be had, or is None: a caller prints it and goes on without a figure.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.folder: Path | None = None
        self._is_v2 = False

    @staticmethod
    def why_not() -> str | None:
        """None where memory cgroups can be made, else the reason."""
        try:
            with MemoryLimit(64 * MIB):
                return None
        except OSError as error:
            return f"memory cgroups cannot be made here: {error}"

    def __enter__(self) -> MemoryLimit:
        first = Path("/sys/fs/cgroup/memory")
        second = Path("/sys/fs/cgroup")
        self._is_v2 = not first.is_dir()
        parent = second if self._is_v2 else first
        if not parent.is_dir():
            raise OSError(f"{parent} does not exist")
        folder = parent / f"bunkbed-{os.getpid()}-{time.monotonic_ns()}"
        folder.mkdir()
        self.folder = folder
        try:
            name = "memory.max" if self._is_v2 else "memory.limit_in_bytes"
            (folder / name).write_text(str(self.limit_bytes))
        except OSError:
            folder.rmdir()
            self.folder = None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self.folder is not None
        for _ in range(50):  # a dying child leaves the group a moment after it is waited for
            try:
                self.folder.rmdir()
                return
            except OSError:
                time.sleep(0.1)

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv` as a command that enters the group before its first instruction."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._file("cgroup.procs")), *argv]

    def peak_bytes(self) -> int:
        """The most the group was ever charged, page cache included."""
        return int(self._file("memory.peak" if self._is_v2 else "memory.max_usage_in_bytes").read_text())

    def refusals(self) -> int:
        """How often the limit was hit (and something had to be reclaimed)."""
        if self._is_v2:
            events = dict(line.split() for line in self._file("memory.events").read_text().splitlines())
            return int(events["max"])
        return int(self._file("memory.failcnt").read_text())

    def _file(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / name


class Child:
    """A benchmark process that steps on request, so that two processes can be interleaved.

    The child reads one JSON request a line from standard input and answers with one JSON line (see `serve`).
    """

    def __init__(
        self, argv: Sequence[str], limit: MemoryLimit | None = None, environment: dict[str, str] | None = None
    ) -> None:
        command = [sys.executable, *argv]
        self._process = subprocess.Popen(
            limit.command(command) if limit is not None else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**(environment or {}), **os.environ},
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            code = self._process.wait()
            reason = "killed: out of its memory limit" if code in (-9, 137) else f"exit status {code}"
            raise RuntimeError(f"the child process ended ({reason})")
        return dict(json.loads(answer))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def serve(handle: Callable[..., dict[str, Any]]) -> None:
    """Answers requests from standard input until it ends; the other half of `Child`."""
    # Whatever a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(handle(**json.loads(line))) + "\n")
        answers.flush()


def random_read_iops(files: Sequence[Path], *, seconds: float = 3.0) -> float:
    """4 KiB random reads a second over these files past the page cache, 64 at a time: the device's limit.

    Raises:
        OSError: a file cannot be read, or the file system refuses reads past the page cache.
    """
    rate, unit = machine_rates.random_reads(files, seconds=seconds)
    if unit == 1:
        raise OSError(f"{Path(files[0]).parent}: this file system cannot be read past the page cache")
    return rate


def sequential_write_bandwidth(directory: Path, *, num_bytes: int = 512 * MIB) -> float:
    """Bytes a second of large writes to a new file in `directory`, synced: the device's limit."""
    with tempfile.TemporaryDirectory(prefix="bunkbed-write-", dir=directory) as folder:
        return machine_rates.sequential_writes(Path(folder) / "file", num_bytes=num_bytes)


def segment_files(folder: Path) -> list[Path]:
    """The files of a table that hold its records."""
    return sorted(folder.glob("segment-*"))


def fill(table: Any, *, chunk: int = 100_000, seed: int = 0) -> None:
    """Stores every row of a table with random weights: untouched rows cost nothing and would flatter us."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((chunk, table.dim), dtype=np.float32)
    for start in range(0, table.num_rows, chunk):
        ids = np.arange(start, min(start + chunk, table.num_rows), dtype=np.int64)
        table.set(ids, values[: ids.size])
