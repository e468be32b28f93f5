"""A link of the CPU device that behaves as badly as a stream of copies may: for tests of the waits.

On the CPU every copy is done when it returns, so an executor that forgets to wait for one would not be seen. Here

- what is copied within `Link.copying` has no values until a caller waits for it: until then rows and frames of records
  are NaN, and frame numbers are -1, which no gather takes;
- frames that the model's own operations used are noted until `Link.used`: a copy that takes such a frame before that
  might have overtaken the operations, and is recorded in `overtaken`;
- copies into frames that are still under way when those are given back would be left in `pending`.

Only copies are late: what else runs among them (`TransferTier` widening 16-bit rows) is done at once, on what has not
landed, so that case is not for this link.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from bunkbed.torch.device.base.link import Link
from bunkbed.torch.device.records import DeviceRecords
from device_setup import torch

#: Not a number as float32, as two bfloat16 and as two float16.
POISON = 0x7FC07FC0


class DeferredLink(Link):
    """See the module."""

    links: ClassVar[list[DeferredLink]] = []

    def __init__(self, device: Any, delay: Any = None) -> None:
        super().__init__(device, delay)
        self.overtaken: set[int] = set()
        self.landed = 0
        self._queue: deque[tuple[int, Callable[[], Any], bool]] = deque()
        self._number = 0
        self._guard = threading.RLock()  # of the queue and of what it has landed
        self._in_copying = threading.local()
        self._unannounced: set[int] = set()
        self._to_be: dict[int, Any] = {}  # of what `send` returned, by its memory
        WatchedRecords.join(self)
        self.links.append(self)

    @property
    def pending(self) -> int:
        """Copies into frames that have not landed. (Memory of its own the allocator keeps until a copy is done.)"""
        return sum(into_frames for _, _, into_frames in self._queue)

    # ---- the model's stream: its operations are done when they return

    def used(self) -> None:
        self._unannounced.clear()

    def uses(self, frames: Any) -> None:
        """The model's operations use these frames."""
        self._unannounced.update(frames.tolist())

    def wait(self, ready: Any, *made: Any) -> None:
        if ready is not None:
            self._land(ready)

    # ---- the stream of the copies

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        self._in_copying.now = True
        try:
            yield
        finally:
            self._in_copying.now = False
        self._copied = self._number

    @property
    def is_copying(self) -> bool:
        """Whether this thread's operations are copies."""
        return getattr(self._in_copying, "now", False)

    def ready(self) -> Any:
        return self._number

    def finish(self) -> None:
        self._land(self._number)

    def takes(self, frames: Any) -> None:
        """A copy reads or writes these frames."""
        self.overtaken |= self._unannounced & set(frames.tolist())

    def defer(self, work: Callable[[], Any], *, into_frames: bool = False) -> None:
        """Runs `work` when a caller waits for it, after all work deferred before."""
        with self._guard:
            self._number += 1
            self._queue.append((self._number, work, into_frames))

    def _land(self, last: int) -> None:
        with self._guard:
            while self._queue and self._queue[0][0] <= last:
                self._queue.popleft()[1]()
                self.landed += 1

    def send(self, values: Any) -> Any:
        there = super().send(values)
        if not self.is_copying:
            return there
        empty = torch.full_like(there, float("nan") if there.is_floating_point() else -1)
        self._to_be[empty.untyped_storage().data_ptr()] = there
        self.defer(lambda: empty.copy_(there))
        return empty

    def to_be(self, view: Any) -> Any:
        """Return what a part of a vector that `send` returned will hold."""
        there = self._to_be[view.untyped_storage().data_ptr()]
        return there[view.storage_offset() :][: len(view)]

    def start_down(self, values: Any) -> Any:
        if self.is_copying:
            self.finish()
        return super().start_down(values)


class WatchedRecords(DeviceRecords):
    """Records that tell their link which frames are used, and by whom."""

    without_link: ClassVar[list[WatchedRecords]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.link: Any = None
        self._raw.fill_(POISON)
        self.without_link.append(self)

    @classmethod
    def join(cls, link: DeferredLink) -> None:
        """The next link made is theirs. Work under way may still use what their memory held before."""
        while cls.without_link:
            records = cls.without_link.pop()
            records.link = link
            link.uses(torch.arange(records.frames))

    def read(self, frames: Any) -> Any:
        if self.link.is_copying:
            self.link.finish()  # `Link.down` waits for it in any case
            self.link.takes(frames)
        else:
            self.link.uses(frames)
        return super().read(frames)

    def write(self, frames: Any, records: Any) -> None:
        assert self.link.is_copying, "else it is not in order with other copies"
        self.link.takes(self.link.to_be(frames))
        self._raw.index_fill_(0, self.link.to_be(frames), POISON)
        write = super().write
        self.link.defer(lambda: write(frames, records), into_frames=True)

    def weights(self, frames: Any) -> Any:
        self.link.uses(frames)
        return super().weights(frames)

    def stepped(self, optimizer: Any, constants: Any, frames: Any, *args: Any, **kwargs: Any) -> list[Any]:
        self.link.uses(frames)
        return super().stepped(optimizer, constants, frames, *args, **kwargs)

    def store(self, frames: Any, fields: list[Any]) -> None:
        self.link.uses(frames)
        super().store(frames, fields)
