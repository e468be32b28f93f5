"""Which operations of a device cache run as kernels: those that measure faster, with the same bits.

Plain torch operations are what a device cache is made of, and they are never wrong to use. Kernels (code.py, in Triton)
do the same in fewer passes over memory. Whether that is faster depends on card, sizes and versions, so it is measured:

1. The first use of an operation (operations.py) on a CUDA device is held up by a trial, once per process, device,
   dim and optimizer. Where Triton is not installed there is none, and everything stays plain.
2. Both versions run on the same random input, of some thousand rows within 64 MiB, which are given back. A result that
   differs in one bit is the end of it: plain.
3. Both are timed in turns, by events on the stream that is current, launch overhead included; medians count. The kernel
   is kept only where it is faster.
4. Whatever fails, in the compiler or at a launch, then or at any later use, means plain, and a line in the log. So
   does a process that imported TensorFlow and not Triton yet: Triton's library crashes it then (code.py).

A trial takes what it waits for from nobody: it runs in the order of the current stream, draws no numbers from torch's
generators and changes no tensor of the caller. While a stream is captured into a CUDA graph nothing is tried and
everything is plain. Other devices are plain always.

Checked so far under Triton's interpreter, and by the assembly that its compiler makes for sm_80, sm_90 and sm_100
(tests/kernel_cases_*.py); no card was at hand.

So which version ran never shows in rows, only in speed. `chooser.choices` tells what was decided, and
`chooser.forced` decides otherwise, for tests.
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

from bunkbed.torch.device.kernels.operations import Operation

_log = logging.getLogger("bunkbed.torch.device")
_ROUNDS, _CALLS = 9, 10


@dataclass(frozen=True)
class Choice:
    """What was decided for an operation on a device.

    Attributes:
        operation, device: which.
        is_kernel: a kernel runs; else plain operations.
        reason: why, in words.
        speedup: how many times as fast as plain operations the kernel ran; None where it was not measured.
    """

    operation: str
    device: str
    is_kernel: bool
    reason: str
    speedup: float | None = None

    def __str__(self) -> str:
        return f"{self.operation} on {self.device}: {'kernel' if self.is_kernel else 'plain'} ({self.reason})"


class Chooser:
    """Runs operations, each in the version that its trial chose. Thread-safe; one serves the process (`chooser`).

    Args:
        seconds: ``(device, run)`` to the seconds that one call of `run` takes.
        device_types: of devices on which kernels are tried at all.
    """

    def __init__(
        self,
        seconds: Callable[[torch.device, Callable[[], Any]], float] | None = None,
        device_types: tuple[str, ...] = ("cuda",),
    ) -> None:
        self._seconds = seconds or seconds_of
        self._device_types = device_types
        self._forced: bool | None = None
        self._lock = threading.Lock()  # guards trials; what was decided is read without it
        self._decided: dict[tuple[Operation, torch.device], Choice] = {}

    @property
    def choices(self) -> list[Choice]:
        """What was decided so far, in order."""
        return list(self._decided.values())

    @contextlib.contextmanager
    def forced(self, is_kernel: bool) -> Iterator[None]:
        """Within, every operation is a kernel, or none is, on any device and in every thread. For tests."""
        before, self._forced = self._forced, is_kernel
        try:
            yield
        finally:
            self._forced = before

    def run(self, operation: Operation, *args: Any) -> Any:
        """``operation.plain(*args)``, or the kernel with the same bits. The first argument's device decides."""
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
            # Nothing was launched, or into a tensor that is dropped: plain operations begin anew.
            self._decide(operation, device, False, f"a launch failed: {_short(error)}", is_worth_a_warning=True)
            return operation.plain(*args)

    def _picks_kernel(self, operation: Operation, device: torch.device) -> bool:
        if self._forced is not None:
            return self._forced
        choice = self._decided.get((operation, device))
        if choice is not None and not choice.is_kernel:
            return False
        if device.type == "cuda":
            with torch.cuda.device(device):
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
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
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
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def seconds_of(device: torch.device, run: Callable[[], Any]) -> float:
    """Seconds of one of several calls of `run` that follow each other, the device idle before them."""
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
    """The same random arguments at every call, on the device."""
    made = operation.sample(np.random.default_rng(0))
    return tuple(_like(value, device) if isinstance(value, torch.Tensor) else value for value in made)


def _like(value: Any, device: torch.device) -> Any:
    """`value` on the device, with its strides: a view of long rows stays one."""
    if value.is_contiguous():
        return value.to(device)
    whole = value.as_strided((value.shape[0], value.stride(0)), (value.stride(0), 1)).to(device)
    return whole[:, : value.shape[1]]


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


#: The process's.
chooser = Chooser()
