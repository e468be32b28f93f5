"""What torch.distributed does not offer by its public functions."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.distributed as dist

#: A process group of torch; None is the default group.
ProcessGroup: TypeAlias = dist.ProcessGroup | None

#: The timeout of a group whose backend does not tell its own.
_TIMEOUT = datetime.timedelta(minutes=10)


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta:
    """Return the timeout that the group was made with; `new_group` does not take it over."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            timeout: datetime.timedelta = group._get_backend(torch.device(device)).options._timeout
            return timeout
    return _TIMEOUT


def gpu_of(group: dist.ProcessGroup) -> tuple[torch.device | None, str]:
    """Return this rank's GPU, and what tells it from others of this host, if the group has NCCL."""
    if dist.is_nccl_available() and torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            if group._get_backend(torch.device("cuda")).name() == "nccl":
                device = group.bound_device_id or torch.device("cuda", torch.cuda.current_device())
                return device, str(torch.cuda.get_device_properties(device).uuid)
    return None, ""


def base_store() -> dist.Store:
    """Return the store of torch.distributed, without wrappers."""
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def after_reduction(call: Callable[[], object]) -> None:
    """In a backward pass: call at its end, after the reductions of `DistributedDataParallel`.

    DDP queues a callback, too, maybe later than this one: so this one queues the real one.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(call))
