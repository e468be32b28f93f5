"""Choice of the operations of a device cache that run as kernels: those that are faster, with the same bits.

A device cache can do everything with plain torch operations. Kernels (code.py, in Triton) do the same in fewer passes
over memory. Whether they are faster depends on card, sizes and versions, so it is measured:

1. The first use of an operation (operations.py) on a CUDA device waits for a trial, once per process, device, dim and
   optimizer. Without Triton there is no trial, and all operations stay plain.
2. Both versions run on the same random input of some thousand rows, which takes at most 64 MiB and is then freed. If
   the results differ in one bit, the operation stays plain.
3. Both are timed in turns, by events on the current stream, with launch overhead; medians are compared. The kernel is
   chosen only if it is faster.
4. After any failure, in the compiler or at a launch, in the trial or later, the operation is plain, and a line is
   logged. The same holds if the process imported TensorFlow before Triton: importing Triton would crash it (code.py).

A trial runs in the order of the current stream, draws no numbers from torch's generators and changes no tensor of the
caller. While a CUDA graph is captured, no trial runs and all operations are plain. On other devices than CUDA all
operations are plain.

The kernels were checked under Triton's interpreter, in the assembly that its compiler makes for sm_80, sm_90 and sm_100
(tests/device/kernel_cases_*.py), and on an H200 (tests/torch/test_torch_cuda.py). There only the step is faster than
plain operations, whose launches cost less than Triton's.

So the choice changes speed, never rows. `chooser.choices` lists the decisions, and `chooser.forced` overrides them, for
tests.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bunkbed.torch.device.kernels import launch
from bunkbed.torch.device.kernels.operations import Operation

_log = logging.getLogger("bunkbed.torch.device")
_ROUNDS, _CALLS = 9, 10


@dataclass(frozen=True)
class Choice:
    """The decision for an operation on a device.

    Attributes:
        operation, device: their names.
        is_kernel: whether a kernel runs; else plain operations do.
        reason: the reason, as text.
        speedup: time of the plain operations divided by that of the kernel; None if not measured.
    """

    operation: str
    device: str
    is_kernel: bool
    reason: str
    speedup: float | None = None

    def __str__(self) -> str:
        return f"{self.operation} on {self.device}: {'kernel' if self.is_kernel else 'plain'} ({self.reason})"


class Chooser:
    """Runner of operations, each in the version that its trial chose. Thread-safe; `chooser` is the process's only one.

    Args:
        seconds: function of ``(device, run)`` that returns the seconds of one call of `run`.
        device_types: types of devices on which kernels are tried.
    """

    def __init__(
        self,
        seconds: Callable[[torch.device, Callable[[], Any]], float] | None = None,
        device_types: tuple[str, ...] = ("cuda",),
    ) -> None:
        self._seconds = seconds or seconds_of
        self._device_types = device_types
        self._forced: bool | None = None
        self._lock = threading.Lock()  # guards trials; `_decided` is read without it
        self._decided: dict[tuple[Operation, torch.device], Choice] = {}

    @property
    def choices(self) -> list[Choice]:
        """The decisions so far, in order."""
        return list(self._decided.values())

    @contextlib.contextmanager
    def forced(self, is_kernel: bool) -> Iterator[None]:
        """Run every operation within as a kernel, or none, on any device and in every thread. For tests."""
        before, self._forced = self._forced, is_kernel
        try:
            yield
        finally:
            self._forced = before

    def run(self, operation: Operation, *args: Any) -> Any:
        """Return ``operation.plain(*args)``, or the kernel's same bits. The first argument's device decides."""
        device = args[0].device
        if self._forced is None and device.type not in self._device_types:
            return operation.plain(*args)
        if not self._picks_kernel(operation, device):
            return operation.plain(*args)
        try:
            return operation.kernel(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if self._forced:
                raise
            # Nothing was launched, or its output is dropped or overwritten: plain operations start again.
            self._decide(operation, device, False, f"a launch failed: {_short(error)}", is_worth_a_warning=True)
            return operation.plain(*args)

    def _picks_kernel(self, operation: Operation, device: torch.device) -> bool:
        if self._forced is not None:
            return self._forced
        choice = self._decided.get((operation, device))
        if choice is not None and not choice.is_kernel:
            return False
        if device.type == "cuda":
            with launch.on_device(device):
                if torch.cuda.is_current_stream_capturing():
                    return False
        if choice is None:
            with self._lock:
                choice = self._decided.get((operation, device)) or self._try(operation, device)
        return choice.is_kernel

    def _try(self, operation: Operation, device: torch.device) -> Choice:
        if not has_triton():
            return self._decide(operation, device, False, "triton is not installed")
        try:
            with launch.on_device(device):
                if not self._is_equal(operation, device):
                    reason = "the kernel has other bits than plain operations"
                    return self._decide(operation, device, False, reason, is_worth_a_warning=True)
                plain_s, kernel_s = self._measure(operation, device)
        except Exception as error:
            reason = f"the trial failed: {_short(error)}"
            return self._decide(operation, device, False, reason, is_worth_a_warning=True)
        reason = f"{1e6 * kernel_s:.1f} us, plain {1e6 * plain_s:.1f} us"
        return self._decide(operation, device, kernel_s < plain_s, reason, speedup=plain_s / kernel_s)

    def _is_equal(self, operation: Operation, device: torch.device) -> bool:
        results = []
        for run in (operation.plain, operation.kernel):
            args = _sample(operation, device)
            results.append(_use(operation, run, args).contiguous().view(torch.int32))
        return bool(torch.equal(*results))

    def _measure(self, operation: Operation, device: torch.device) -> tuple[float, float]:
        args = _sample(operation, device)
        taken: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(_ROUNDS):
            for is_kernel in (False, True) if turn % 2 else (True, False):
                version = operation.kernel if is_kernel else operation.plain
                taken[is_kernel].append(self._seconds(device, partial(_use, operation, version, args)))
        return statistics.median(taken[False]), statistics.median(taken[True])

    def _decide(
        self,
        operation: Operation,
        device: torch.device,
        is_kernel: bool,
        reason: str,
        *,
        speedup: float | None = None,
        is_worth_a_warning: bool = False,
    ) -> Choice:
        choice = Choice(operation.name, str(device), is_kernel, reason, speedup)
        self._decided[operation, device] = choice
        _log.log(logging.WARNING if is_worth_a_warning else logging.DEBUG, "device cache: %s", choice)
        return choice


def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def seconds_of(device: torch.device, run: Callable[[], Any]) -> float:
    """Return the mean seconds of several consecutive calls of `run`, which start on an idle device."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(_CALLS):
            run()
        return (time.perf_counter() - started) / _CALLS
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.current_stream(device).synchronize()
    begin.record()
    for _ in range(_CALLS):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _CALLS


def _use(operation: Operation, version: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return operation.finish(version(*args), *args)


def _sample(operation: Operation, device: torch.device) -> tuple[Any, ...]:
    """Return the same random arguments at every call, on the device."""
    made = operation.sample(np.random.default_rng(0))
    return tuple(_like(value, device) if isinstance(value, torch.Tensor) else value for value in made)


def _like(value: Tensor, device: torch.device) -> Any:
    """Return `value` on the device, with its strides: a view of long rows stays a view."""
    if value.is_contiguous():
        return value.to(device)
    whole = value.as_strided((value.shape[0], value.stride(0)), (value.stride(0), 1)).to(device)
    return whole[:, : value.shape[1]]


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


#: The chooser of the process.
chooser = Chooser()
