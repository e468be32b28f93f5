"""Named ranges of `torch.profiler` for the work of tables.

They are ``bunkbed lookup NAME``, ``bunkbed update NAME`` and ``bunkbed stage NAME`` (planning for the coming batches,
and the start of reads that continue in the background). Inside them, ``bunkbed stall NAME`` is a wait for reads;
``table.stats()["stall_s"]`` adds these up. For a sharded table only stalls of the calling thread show, since torch
records no other thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bunkbed import _native

#: Whether a profiler records this thread. The call takes 50 ns, which is cheap for a small lookup; a range takes 1 us.
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled


def ranged(what: str, table: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(*arguments)``; run it in a range named `what` if a profiler records this thread."""
    if not is_profiling():
        return function(*arguments)
    range_of = torch.profiler.record_function
    with range_of(f"bunkbed {what} {table}"):
        return _native.with_stalls(lambda: range_of(f"bunkbed stall {table}"), function, *arguments)
