"""Copies between the host and one device, on a separate stream, ordered with the uses of frames.

On a device with streams (CUDA, XPU), copies run concurrently with the model's kernels. Events order them: a copy that
reuses frames waits for the last use of any frame so far (`used`), and a use of loaded frames waits for the copy that
loaded them (`ready`, `wait`). `wait` also tells the allocator that memory made on one stream is used on another.

Other devices need no order and no pinned memory: an operation is complete when it returns (CPU), or all share one queue
and a copy to or from the host is complete when it returns (MPS, whose memory is shared with the host).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bunkbed.torch.base.types import DeviceHandle
from bunkbed.torch.device.base import capabilities


class Link:
    """Copies to and from `device`. Owns a stream, no memory. `DeviceRows.counters` reports its byte counts.

    Args:
        device: any device of torch.
        delay: called before every copy, with ``"up"`` (to the device) or ``"down"``; for tests of a slow link.
    """

    def __init__(self, device: torch.device, delay: Callable[[str], None] | None = None) -> None:
        self.device = device
        self.bytes_up = 0
        self.bytes_down = 0
        self.delay = delay
        self._stream: DeviceHandle = torch.Stream(device) if capabilities.of(device).has_streams else None
        self._used: dict[DeviceHandle, DeviceHandle] = {}  # last use by stream: each thread may use a stream of its own
        self._copied: DeviceHandle = None

    def used(self) -> None:
        """Make later copies wait for the work issued so far on the current stream, which uses frames."""
        if self._stream is not None:
            stream = self._current_stream()
            self._used[stream] = stream.record_event()

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Run the operations within on the stream of the copies, after every use of frames so far."""
        if self._stream is None:
            yield
            return
        with self._stream:  # makes its device the current one, too
            for event in list(self._used.values()):
                self._stream.wait_event(event)
            yield
            self._copied = self._stream.record_event()

    def ready(self) -> DeviceHandle:
        """Return an event after the copies of `copying` contexts that ended, for `wait`; None without streams."""
        return self._copied

    def wait(self, ready: DeviceHandle, *made: Tensor) -> None:
        """Make the current stream wait for the copies up to `ready`, and record that it uses the tensors `made`."""
        if self._stream is None:
            return
        stream = self._current_stream()
        if ready is not None:
            stream.wait_event(ready)
        for tensor in made:
            tensor.record_stream(stream)

    def _current_stream(self) -> DeviceHandle:
        # An index: torch takes several times as long to resolve a device.
        return torch.accelerator.current_stream(self.device.index)

    def wait_for_all(self) -> None:
        """Make the current stream wait for every copy so far."""
        self.wait(self._copied)

    def finish(self) -> None:
        """Block until every copy so far is complete, before the memory they use is freed."""
        if self._stream is not None:
            self._stream.synchronize()

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a host tensor, pinned if the device has streams, so that its copies run concurrently."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self._stream is not None)

    def up(self, values: npt.NDArray[np.generic]) -> Tensor:
        """Return a host array on the device, made on the current stream. On a CPU it may share the memory."""
        tensor = torch.from_numpy(values)
        return self.send(tensor if self._stream is None else tensor.pin_memory())

    def send(self, values: Tensor) -> Tensor:
        """Return a tensor of `host_memory` on the device, as `up` does."""
        if self.delay is not None:
            self.delay("up")
        self.bytes_up += values.nbytes
        return values.to(self.device, non_blocking=self._stream is not None)

    def down(self, values: Tensor) -> Tensor:
        """Return a device tensor in host memory, after the copy is complete."""
        return self.start_down(values)()

    def start_down(self, values: Tensor) -> Callable[[], Tensor]:
        """Start to copy a device tensor to host memory; return a function that waits for the copy and returns it."""
        if self.delay is not None:
            self.delay("down")
        self.bytes_down += values.nbytes
        if self._stream is None:
            host = values.to("cpu")
            return lambda: host
        host = self.host_memory(values.shape, values.dtype)
        host.copy_(values, non_blocking=True)
        copied = self._current_stream().record_event()

        def finish() -> Tensor:
            copied.synchronize()
            return host

        return finish


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error of torch means only that memory is short. MPS has no class for it."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
