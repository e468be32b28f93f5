"""Capabilities of torch on a device: the only module that knows how devices differ.

CPU and CUDA are known. Any other device is probed once per process, when a device cache first uses it, by small
operations with known results: Apple's `mps` and some of Intel's `xpu` have no float64, and the operations that a
backend lacks differ by version. If an operation is missing or wrong, the device cache uses slower ones. Rows are then
still a function of the batch alone: the same bits with every size of cache, with and without `lookahead`.

A device that does not move records unchanged is refused before any row is on it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bunkbed.errors import BunkbedError
from bunkbed.torch.device.base import rounding


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a device.

    Attributes:
        has_streams: copies from pinned memory run concurrently with the model (link.py); else there is one queue.
        has_float64: norms are taken in float64 (sums.py); else in float32 for each row, and the host adds the squares.
        has_bags: ``embedding_bag`` sums segments (sums.py); else gathers and additions of pairs do.
        has_integers: products and shifts of int64 work, for stochastic rounding; else the host rounds (records.py).
        adds_in_order: any number of gradients of a row is added one after another, as the core does.
    """

    has_streams: bool
    has_float64: bool = True
    has_bags: bool = True
    has_integers: bool = True
    adds_in_order: bool = False


CPU = Capabilities(has_streams=False, adds_in_order=True)
CUDA = Capabilities(has_streams=True)

_KNOWN = {"cpu": CPU, "cuda": CUDA}
#: crc32 of the values that `_rounds` makes with correct integers, by type.
_ROUNDED = {"bfloat16": 0xECDFE87C, "float16": 0xC95EDCCC}

_lock = threading.Lock()  # guards probes; `_found` is read without it
_found: dict[torch.device, Capabilities] = {}
_forced: list[Capabilities] = []


def of(device: torch.device) -> Capabilities:
    """Return the capabilities of `device`; the first call probes it.

    Raises:
        BunkbedError: the device does not move records unchanged.
    """
    if _forced:
        return _forced[-1]
    found = _KNOWN.get(device.type) or _found.get(device)
    if found is None:
        with _lock:
            found = _found.get(device) or probe(device)
            _found[device] = found
    return found


@contextlib.contextmanager
def forced(capabilities: Capabilities) -> Iterator[None]:
    """Give every device these capabilities within the context, in every thread. For tests."""
    _forced.append(capabilities)
    try:
        yield
    finally:
        _forced.pop()


def probe(device: torch.device) -> Capabilities:
    """Find the capabilities of a device.

    Raises:
        BunkbedError: the device does not move records unchanged.
    """
    with torch.device("cpu"):  # tensors without a device are on the host, with any default device of torch
        return _probe(device)


def _probe(device: torch.device) -> Capabilities:
    if not _succeeds(lambda: _moves_records(device)):
        raise BunkbedError(
            f"torch does not move the records of a device cache unchanged on {device} (index_select, index_copy_ and "
            "views of int32 as other types, tried on known bits); leave device_cache out"
        )
    return Capabilities(
        has_streams=_succeeds(lambda: _has_streams(device)),
        has_float64=_succeeds(lambda: _takes_norms(device)),
        has_bags=_succeeds(lambda: _adds_bags(device)),
        has_integers=_succeeds(lambda: _rounds(device)),
        adds_in_order=device.type == "cpu",
    )


def _succeeds(question: Callable[[], bool]) -> bool:
    # Backends raise for missing operations: RuntimeError, NotImplementedError, TypeError (mps, for float64), and
    # AssertionError if torch was built without the backend.
    try:
        return question()
    except (RuntimeError, TypeError, AttributeError, AssertionError):
        return False


def _moves_records(device: torch.device) -> bool:
    """Return whether any bits are moved unchanged, with subnormals and NaN of both widths."""
    bits = [1, -1, 0x00400001, 0x7FC00001, -0x00800001, 0x00018001, 0x7F817F81, 0x12345678]
    records = torch.tensor(bits, dtype=torch.int32).reshape(4, 2)
    frames, back = torch.tensor([3, 0]), torch.tensor([0, 3])
    there = records.to(device, copy=True)
    moved = there.index_select(0, frames.to(device))
    there.index_copy_(0, back.to(device), moved)
    wanted = records.clone()
    wanted[back] = records[frames]
    if not torch.equal(there.cpu(), wanted):
        return False
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        view, raw = there.view(dtype), there.clone()
        copied = raw.view(dtype)
        copied.index_copy_(0, back.to(device), view.index_select(0, frames.to(device)))
        again = wanted.clone()
        again[back] = wanted[frames]
        if not torch.equal(raw.cpu(), again):
            return False
    return True


def _has_streams(device: torch.device) -> bool:
    if device.type not in ("cuda", "xpu") or not torch.empty(1, pin_memory=True).is_pinned():
        return False
    stream = torch.Stream(device)
    with stream:
        event = stream.record_event()
    torch.accelerator.current_stream(device.index).wait_event(event)
    stream.synchronize()
    return True


def _takes_norms(device: torch.device) -> bool:
    # The sum of the squares needs more digits than float32 has.
    values = torch.tensor([[1.0, 2.0**-15]]).to(device)
    found = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    return math.isclose(found, math.hypot(1.0, 2.0**-15), rel_tol=1e-14)


def _adds_bags(device: torch.device) -> bool:
    """Return whether plain and weighted bags, one of which is empty, are summed; the sums are exact in any order."""
    rows = torch.arange(12, dtype=torch.float32).reshape(4, 3).to(device)
    places, starts = (torch.tensor(values).to(device) for values in ([3, 0, 0, 2, 1], [0, 3, 3]))
    weights = torch.tensor([1.0, 2, 3, 4, 5]).to(device)
    plain, weighted = (
        torch.nn.functional.embedding_bag(places, rows, starts, mode="sum", per_sample_weights=given).tolist()
        for given in (None, weights)
    )
    return bool(plain == [[9, 12, 15], [0, 0, 0], [9, 11, 13]] and weighted == [[9, 15, 21], [0, 0, 0], [39, 48, 57]])


def _rounds(device: torch.device) -> bool:
    """Return whether any bits are rounded correctly, with ids and steps of more than 32 bits."""
    ids = torch.tensor([0, 1, 9_999_999_999, 2**62 - 1]).to(device)
    bits = torch.tensor([[(7919 * place * place * 65_521) % 2**32 - 2**31 for place in range(68)]], dtype=torch.int32)
    values = bits.view(torch.float32).reshape(4, 17).to(device)
    for kind, wanted in _ROUNDED.items():
        made = rounding.round_rows(kind, values, seed=0x0123456789ABCDEF, ids=ids, number=4_294_967_303, field=2)
        if zlib.crc32(made.cpu().numpy().tobytes()) != wanted:
            return False
    return True
