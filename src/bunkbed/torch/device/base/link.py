"""What travels between the host and one device: copies on a stream of their own, in order with what uses the frames.

Where a device has streams (CUDA, XPU) copies run beside the model's kernels. Events keep them in order: a copy that
takes frames over waits for the last use of any frame so far (`used`), and a use of loaded frames waits for the copy
that loaded them (`ready`, `wait`). Memory that is made on one stream and used on another is announced to the allocator
where it is used (`wait`), on whichever stream that is. Elsewhere every operation is done when it returns, or there is
one queue for all of them (MPS) and copies between it and the host return when they are done: there is nothing to order,
and nothing is pinned, which memory shared with the host would gain nothing by.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from bunkbed.torch.device.base import capabilities


class Link:
    """Copies to and from `device`. Owns a stream, no memory. What it counts is read by `DeviceRows.counters`.

    Args:
        device: the other end.
        delay: called before every copy, with ``"up"`` (to the device) or ``"down"``: tests make a slow link of it.
    """

    def __init__(self, device: torch.device, delay: Callable[[str], None] | None = None) -> None:
        self.device = device
        self.bytes_up = 0
        self.bytes_down = 0
        self.delay = delay
        self._module: Any = torch.get_device_module(device) if capabilities.of(device).has_streams else None
        self._stream: Any = None if self._module is None else self._module.Stream(device)
        self._used: dict[Any, Any] = {}  # by stream: threads may train and commit on streams of their own
        self._copied: Any = None

    def used(self) -> None:
        """What was issued so far to the present stream used frames: copies begun later wait for it."""
        if self._module is not None:
            stream = self._module.current_stream(self.device)
            self._used[stream] = stream.record_event()

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Within, device operations run on the stream of the copies, after every use of frames so far."""
        if self._module is None:
            yield
            return
        with self._module.device(self.device), self._module.stream(self._stream):
            for event in list(self._used.values()):
                self._stream.wait_event(event)
            yield
            self._copied = self._stream.record_event()

    def ready(self) -> Any:
        """Marks where the copies are now, for `wait`."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, ready: Any, *made: Any) -> None:
        """The model's stream goes on only after the copies up to `ready`; it then uses the tensors they `made`."""
        if self._module is None:
            return
        stream = self._module.current_stream(self.device)
        if ready is not None:
            stream.wait_event(ready)
        for tensor in made:
            tensor.record_stream(stream)

    def wait_for_all(self) -> None:
        """`wait` for every copy so far."""
        self.wait(self._copied)

    def finish(self) -> None:
        """Returns when every copy so far is done: before memory they write to is given back."""
        if self._stream is not None:
            self._stream.synchronize()

    def host_memory(self, shape: Any, dtype: torch.dtype) -> Any:
        """A tensor in memory that the device copies from and to beside other work."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self._stream is not None)

    def up(self, values: Any) -> Any:
        """A host tensor or array, on the device, made on the present stream. On a CPU it may be the same memory."""
        tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
        if self.delay is not None:
            self.delay("up")
        self.bytes_up += tensor.nbytes
        if self._stream is None:
            return tensor.to(self.device)
        if not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def down(self, values: Any) -> Any:
        """A device tensor in host memory, once it is all there."""
        if self.delay is not None:
            self.delay("down")
        self.bytes_down += values.nbytes
        if self._stream is None:
            return values.to("cpu")
        host = self.host_memory(values.shape, values.dtype)
        host.copy_(values, non_blocking=True)
        self._module.current_stream(self.device).synchronize()
        return host


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of torch's says that memory is short, and no more. MPS has no class for it."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
