"""Shared code of the parts: sizes, results, workers with a time limit."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@dataclass
class Result:
    """One figure of a part.

    Attributes:
        name: description of the tried cases.
        passed: number of cases that passed.
        tried: number of tried cases.
        note: further information.
        failures: the first few failures.
        score: the figure is only reported, not a promise (for example of another store).
        wanted: number of existing cases, where it can be counted.
    """

    name: str
    passed: int = 0
    tried: int = 0
    note: str = ""
    failures: list[str] = field(default_factory=list)
    score: bool = False
    wanted: int = 0

    @property
    def ok(self) -> bool:
        return self.score or (self.tried > 0 and self.passed == self.tried)

    def fail(self, text: str) -> None:
        if len(self.failures) < 5:
            self.failures.append(text)

    def add(self, other: Result) -> None:
        self.passed += other.passed
        self.tried += other.tried
        for text in other.failures:
            self.fail(text)


@dataclass(frozen=True)
class Size:
    """Size of a part: a factor on its long form, and a limit of seconds."""

    factor: float = 1.0
    seconds: float = 3600.0
    seed: int = 0
    processes: int = max(1, os.cpu_count() or 1)

    def of(self, number: int, least: int = 1) -> int:
        return max(least, round(number * self.factor))


@contextmanager
def folder() -> Iterator[Path]:
    """Make a temporary folder, in memory where possible."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="bunkbed-torture-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Child:
    """A function in a forked process, ended by SIGALRM when it takes too long.

    Attributes:
        outcome: the last item that it sent, or None.
        status: 0; or minus the signal that ended it; or 1 after an exception, whose text is `outcome`.
    """

    def __init__(self, body: Callable[[Callable[[Any], None]], Any], seconds: float = 60.0) -> None:
        self._pipe, theirs = multiprocessing.Pipe(duplex=False)
        self.sent: list[Any] = []
        self._ended = False
        self.pid = os.fork()
        if self.pid == 0:
            self._pipe.close()
            _live(body, theirs, seconds)
        theirs.close()

    def receive(self) -> Iterator[Any]:
        """Yield the items that it sends, until it ends."""
        while not self._ended:
            try:
                item = self._pipe.recv()
            except (EOFError, OSError):
                self._ended = True
                return
            self.sent.append(item)
            yield item

    def receive_one(self) -> None:
        """Wait for the next item."""
        next(self.receive(), None)

    @property
    def pipe(self) -> Connection | None:
        """Pipe of the items; None once the process has ended."""
        return None if self._ended else self._pipe

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the end and return the status."""
        for _ in self.receive():
            pass
        self._pipe.close()
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


def _live(body: Callable[[Callable[[Any], None]], Any], pipe: Connection, seconds: float) -> None:
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends even a process that hangs inside the core
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, chain=True)  # shows stacks before the process ends
        signal.setitimer(signal.ITIMER_REAL, seconds)
        result = body(pipe.send)
        if result is not None:
            pipe.send(result)
        code = 0
    except BaseException as error:
        with suppress(OSError):
            pipe.send(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)


def in_processes(work: Callable[[int, Callable[[Any], None]], Any], processes: int, seconds: float) -> list[Any]:
    """Run `work(i, send)` in forked processes; return the last item of each. A process that dies is an error.

    The processes run concurrently; each is ended when it takes longer than `seconds`.
    """
    children = [Child(lambda send, i=i: work(i, send), seconds) for i in range(processes)]
    # Receives from all children: a child with a full pipe would wait, and look like one that hangs.
    while sending := {child.pipe: child for child in children if child.pipe is not None}:
        for pipe in multiprocessing.connection.wait(list(sending)):
            sending[pipe].receive_one()
    outcomes = []
    errors = []
    for child in children:
        status = child.wait()
        last = child.sent[-1] if child.sent else None
        if status != 0:
            errors.append(f"a process ended with status {status}: {last}")
        outcomes.append(last)
    if errors:
        raise RuntimeError("; ".join(errors))
    return outcomes


class Progress:
    """Reports the progress of a long part on standard error at intervals; of several processes only the first."""

    EVERY_S = 20.0

    def __init__(self, what: str, total: int, index: int = 0) -> None:
        self._what = what
        self._total = total
        self._is_silent = index != 0
        self._begin = self._said = time.monotonic()

    def show(self, done: int) -> None:
        now = time.monotonic()
        if self._is_silent or now - self._said < self.EVERY_S:
            return
        self._said = now
        text = f"        ... {self._what}: {done:,} of {self._total:,} a process after {now - self._begin:.0f} s"
        print(text, file=sys.stderr, flush=True)


class Clock:
    """Time limit."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end
