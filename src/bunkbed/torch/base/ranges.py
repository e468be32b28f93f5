"""What the tables of a model do, as named ranges of `torch.profiler`.

``bunkbed lookup NAME``, ``bunkbed update NAME`` and ``bunkbed stage NAME`` (planning what the coming batches want, and
starting its reads, which then go on by themselves); inside of them ``bunkbed stall NAME``: the time they waited for
reads, which ``table.stats()["stall_s"]`` adds up. Of a sharded table the stalls of the calling thread show, since torch
records no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bunkbed import _native

#: Whether a profiler records this thread: 50 ns, which a small lookup can afford where a range costs a microsecond.
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled


def ranged(what: str, table: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, which does `what` to that table; as a range, where a profiler records this thread."""
    if not is_profiling():
        return function(*arguments)
    range_of = torch.profiler.record_function
    with range_of(f"bunkbed {what} {table}"):
        return _native.with_stalls(lambda: range_of(f"bunkbed stall {table}"), function, *arguments)
