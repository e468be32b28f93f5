"""Readers that follow the writer: a reader shows one commit, and moves to a newer one by `refresh` or by itself."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from bunkbed.core.arguments import as_number
from bunkbed.core.typed import typed
from bunkbed.errors import BunkbedError, TableClosedError
from bunkbed.table.core import Above

_log = logging.getLogger("bunkbed")
#: How often a reader that watches looks for a newer commit within its greatest age.
_LOOKS = 4
#: Seconds that a thread waits for others which may be waiting for it.
_PATIENCE_S = 10.0


class Pins:
    """Keeps a reader at its commit while some threads read, and moves it while none does. A thread may nest `held`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the three below
        self._holding: Counter[int] = Counter()  # by thread: how often it holds
        self._waiting = 0  # threads that move or wait to
        self._is_moving = False

    @property
    def is_mine(self) -> bool:
        """True where this thread holds the reader at its commit."""
        return self._holding[threading.get_ident()] > 0

    @contextlib.contextmanager
    def held(self, *, is_urgent: bool = True) -> Iterator[None]:
        """Keep the reader at its commit inside.

        Args:
            is_urgent: whether threads that wait to move go first, so that readers do not keep them out. They go first
                for ten seconds only: a thread that holds the reader may be waiting for this one.
        """
        thread = threading.get_ident()
        with self._changed:
            if not self._holding[thread]:
                if is_urgent:
                    self._changed.wait_for(lambda: not self._waiting, _PATIENCE_S)
                self._changed.wait_for(lambda: not self._is_moving)
            self._holding[thread] += 1
        try:
            yield
        finally:  # perhaps in another thread
            with self._changed:
                self._holding[thread] -= 1
                self._holding += Counter()  # without those that no longer hold
                self._changed.notify_all()

    @contextlib.contextmanager
    def moving(self, patience_s: float | None = None) -> Iterator[None]:
        """Move the reader inside. The thread must not hold it.

        Raises:
            BunkbedError: other threads still hold it after `patience_s` seconds; None: wait for them.
        """
        with self._changed:
            self._waiting += 1
            try:
                if not self._changed.wait_for(lambda: not self._holding and not self._is_moving, patience_s):
                    raise BunkbedError(f"another thread has been in pinned() for {patience_s:g} s")
            except BaseException:
                self._waiting -= 1
                self._changed.notify_all()
                raise
            self._is_moving = True
        try:
            yield
        finally:
            with self._changed:
                self._is_moving = False
                self._waiting -= 1
                self._changed.notify_all()


class Following:
    """What a reader has to follow the writer: of `bunkbed.Table` and of `bunkbed.Run`."""

    _max_age_s: float = math.inf
    _stop: threading.Event | None = None  # ends the thread that follows
    _looked_s = 0.0  # when the reader last looked for a newer commit
    _seen: tuple[int, ...] | None = None  # the file of the commit that it last moved to; see `_stamp`
    _pins: Pins

    # ---- What a subclass has

    def _move(self) -> int:
        """Move to the commit to follow and return its number."""
        raise NotImplementedError

    def _newest(self) -> int:
        """Return the number of the commit to follow."""
        raise NotImplementedError

    def _file_of(self, number: int) -> Path:
        """Return the file of a commit."""
        raise NotImplementedError

    def _at(self) -> int:
        """Return the number of the commit that is shown."""
        raise NotImplementedError

    def _reader_label(self) -> str:
        """Return what the reader is called in messages.

        Raises:
            ValueError: it is a writer, or another object moves it. TableClosedError: it is closed.
        """
        raise NotImplementedError

    def _writes(self) -> bool:
        """Return whether this is a writer, which shows its own changes."""
        raise NotImplementedError

    def _put_above(self, above: Callable[[], Above] | None) -> None:
        """Make `above` see each call that reads rows."""
        raise NotImplementedError

    # ---- For users

    @typed
    def refresh(self) -> int:
        """Move a reader to the newest commit and return its number. The cost depends on the number of changed rows.

        A reader that was opened at a snapshot moves to the commit that has the snapshot's name now. Rows with a new
        record leave the cache; the others stay. Where the writer went back to an earlier commit, the reader builds its
        directory again, like opening. ``stats()["indexed_records"]`` counts the records read for it. Other threads may
        read meanwhile; each call shows one commit, and all calls within `pinned` the same one.

        Raises:
            ValueError: a writer, which is always up to date; or a table of a run, which `bunkbed.Run.refresh` moves
            with the others. BunkbedError: within `pinned`. FileNotFoundError, CorruptionError: the files are gone or
            damaged.
        """
        label = self._reader_label()
        if self._pins.is_mine:
            raise BunkbedError(f"{label}: refresh() within pinned() of the same thread would wait without end")
        return self._refresh()

    def _refresh(self, patience_s: float | None = None, stop: threading.Event | None = None) -> int:
        with self._pins.moving(patience_s):
            if stop is not None and stop.is_set():
                return self._at()
            looked_s, stamp = time.monotonic(), self._stamp()
            self._seen = None  # until it has moved
            number = self._move()
            self._looked_s, self._seen = looked_s, stamp
        return number

    def _stamp(self) -> tuple[int, ...] | None:
        """Return what identifies the file of the commit to follow; None: it cannot be read."""
        try:
            number = self._newest()
            about = self._file_of(number).stat()
        except (BunkbedError, OSError, ValueError):
            return None
        return number, about.st_dev, about.st_ino, about.st_mtime_ns, about.st_ctime_ns, about.st_size

    def _look(self, patience_s: float | None = None, stop: threading.Event | None = None) -> None:
        """Move if there is something newer. Does not wait for threads that read where there is not."""
        looked_s, stamp = time.monotonic(), self._stamp()
        if stamp is not None and stamp == self._seen:
            self._looked_s = looked_s
        else:
            self._refresh(patience_s, stop)

    @typed
    def watch(self, max_age_s: float | None = 2.0) -> None:
        """Follow the writer: a thread moves this reader to newer commits until it is closed.

        A call that reads rows when the reader's age is above `max_age_s` moves it first, and raises where that fails:
        rows that were out of date for longer are never returned. Errors of the thread are logged, once while they
        last.

        Args:
            max_age_s: the greatest `age_s` in seconds, above 0. The thread looks four times as often. None: stop.

        Raises:
            ValueError: as `refresh`, or another `max_age_s`.
        """
        label = self._reader_label()
        limit = math.inf if max_age_s is None else as_number(max_age_s, what="max_age_s", table=label)
        if not limit > 0:
            raise ValueError(f"{label}: max_age_s must be above 0 seconds, got {max_age_s!r}")
        self._stop_watching()
        if limit == math.inf:
            return
        self._max_age_s = limit
        self._stop = threading.Event()
        self._put_above(self._guard())
        threading.Thread(
            target=_follow,
            args=(weakref.ref(self), self._stop, limit / _LOOKS),
            name="bunkbed-watch",
            daemon=True,
        ).start()

    @property
    def age_s(self) -> float:
        """Seconds since the reader last looked for a newer commit: its rows were the newest then. 0 for a writer."""
        return 0.0 if self._writes() else time.monotonic() - self._looked_s

    @property
    def behind(self) -> int:
        """Number of commits after the one that the reader shows, up to the one that `refresh` moves to.

        Raises:
            OSError: the files are gone.
        """
        return 0 if self._writes() else abs(self._newest() - self._at())

    @typed
    def pinned(self) -> AbstractContextManager[None]:
        """Return a context in which a reader stays at its commit; `refresh` and `watch` of other threads wait.

        For several calls that must see one commit, such as the lookups of a model with several tables. Keep it short:
        after ten seconds calls of other threads raise, where the reader would be older than it may be.

        Raises:
            ValueError: as `refresh`. BunkbedError: when it is entered, the reader is older than it may be.
        """
        return self._pinned(self._reader_label())

    # ---- Internal

    def _guard(self) -> Callable[[], Above]:
        """Return what lies above tables that ask, before each call that reads rows, whether these may be used."""
        guard = _Guard(weakref.ref(self))
        return lambda: guard

    def _strong_guard(self) -> Callable[[], Above]:
        """Return the same, which keeps this reader alive as long as its tables."""
        guard = _Guard(lambda: self)
        return lambda: guard

    @contextlib.contextmanager
    def _pinned(self, label: str) -> Iterator[None]:
        self._require_fresh(label)
        with self._held():
            yield

    def _held(self) -> AbstractContextManager[None]:
        """Return a context in which a reader does not move."""
        if self._writes():
            return contextlib.nullcontext()
        return self._pins.held(is_urgent=self._max_age_s == math.inf or self.age_s > self._max_age_s / 2)

    def _note_newest(self) -> None:
        """Note the file of the commit to follow, before a reader reads a commit."""
        self._looked_s, self._seen = time.monotonic(), self._stamp()

    def _start_following(self) -> None:
        """Begin at the commit that was read. The first look reads it again if it is not the one that was noted."""
        self._pins = Pins()
        if self._seen is not None and self._seen[0] != self._at():
            self._seen = None

    def _stop_watching(self) -> None:
        if self._stop is not None:
            self._stop.set()
            self._stop = None
            self._max_age_s = math.inf
            self._put_above(None)

    def _require_fresh(self, label: str) -> None:
        """Move the reader if it may be older than it may; raise BunkbedError where that fails."""
        if self._pins.is_mine or time.monotonic() - self._looked_s <= self._max_age_s:
            return
        try:
            self._look(_PATIENCE_S)
        except (BunkbedError, OSError, ValueError, MemoryError) as error:
            raise BunkbedError(
                f"{label}: its rows may be out of date for {time.monotonic() - self._looked_s:.2f} s, more than "
                f"max_age_s={self._max_age_s:g}, and moving to a newer commit failed ({error}); watch(None) goes on "
                f"with commit {self._at()}"
            ) from error


class _Guard:
    """Checks the age of a reader that watches, before each call that reads its rows."""

    def __init__(self, reader: Callable[[], Following | None]) -> None:
        self._reader = reader

    def reading(self) -> AbstractContextManager[None]:
        reader = self._reader()
        if reader is not None:
            reader._require_fresh(reader._reader_label())
        return contextlib.nullcontext()

    def writing(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()  # the core refuses changes of a reader

    def table_closed(self) -> None:
        reader = self._reader()
        if reader is not None:
            reader._stop_watching()

    def stats(self) -> dict[str, int | float]:
        return {}


def _follow(reader: weakref.ref[Following], stop: threading.Event, every_s: float) -> None:
    """Move a reader again and again, until it is closed or gone."""
    failed = ""
    while not stop.wait(min(every_s, threading.TIMEOUT_MAX)):
        follower = reader()
        if follower is None:
            return
        try:
            follower._look(stop=stop)
            failed = ""
        except (BunkbedError, OSError, ValueError, MemoryError) as error:
            if stop.is_set() or isinstance(error, TableClosedError):
                return
            if str(error) != failed:
                failed = str(error)
                _log.warning("a reader that watches could not move to a newer commit, and tries again: %s", error)
        del follower
