"""Ranks of torch.distributed as processes of this host, for tests."""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import multiprocessing
import os
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: The timeout of the process group: a rank that waits longer raises an error.
GROUP_SECONDS = 30
Worker = Callable[..., Any]


def spawn(
    world: int,
    worker: Worker,
    *arguments: Any,
    seconds: float = 120,
    group: bool = True,
    dying: int | None = None,
) -> list[Any]:
    """Return what ``worker(rank, *arguments)`` returns on each of `world` processes.

    Args:
        world: number of processes.
        worker: a function of a module, as it is imported by name.
        arguments: for pickle.
        seconds: after these the processes are killed, and the test fails.
        group: whether the processes begin with a process group.
        dying: the rank that must end by SIGKILL; its value is None.

    Raises:
        AssertionError: a process raised, died, or did not end; shows each one's trace.
    """
    # A server that has imported all this forks the processes: it takes seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["bunkbed.torch", "torch._dynamo", "torch.distributed.checkpoint.state_dict", "pytest"]
    )
    port = free_port()
    processes, pipes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_run, args=(worker, rank, world, port, group, theirs, arguments, seconds), name=f"rank {rank}"
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    found: dict[int, Any] = {}
    failed: dict[int, str] = {}
    died: set[int] = set()
    deadline = time.monotonic() + seconds
    while len(found) + len(failed) < world:
        waiting = {pipes[rank]: rank for rank in range(world) if rank not in found and rank not in failed}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            failed |= dict.fromkeys(waiting.values(), f"has not ended after {seconds:.0f} s")
        for pipe in ready:
            rank = waiting[pipe]
            try:
                is_good, value = pipe.recv()
            except EOFError:
                processes[rank].join(5)
                if rank == dying and processes[rank].exitcode == -signal.SIGKILL:
                    died.add(rank)
                    found[rank] = None
                    continue
                is_good, value = False, f"died with exit status {processes[rank].exitcode}"
            (found if is_good else failed)[rank] = value
        if failed:  # the others then wait for this one: give them the time to say so
            deadline = min(deadline, time.monotonic() + 5)
    for process in processes:
        process.join(max(5.0, deadline - time.monotonic()) if not failed else 1.0)
        if process.is_alive():
            process.kill()
            failed.setdefault(int(process.name.split()[1]), "did not exit")
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items()))
    assert dying is None or dying in died, f"rank {dying} did not die"
    statuses = {rank: process.exitcode for rank, process in enumerate(processes) if rank != dying}
    assert not any(statuses.values()), f"exit statuses {statuses}"
    return [found[rank] for rank in range(world)]


def free_port() -> int:
    """Return a TCP port that no process listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _run(
    worker: Worker,
    rank: int,
    world: int,
    port: int,
    group: bool,
    results: Any,
    arguments: tuple[Any, ...],
    seconds: float,
) -> None:
    faulthandler.dump_traceback_later(seconds - 1, exit=False)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if group:
            start_group(rank, world, port)
        value = worker(rank, *arguments)
    except BaseException:
        results.send((False, traceback.format_exc()))
        results.close()
        os._exit(1)  # the others may wait for this rank at its exit
    results.send((True, value))
    if group and rank == 0:
        # The store ends with this process; the threads of others may still use it.
        time.sleep(0.2)
    faulthandler.cancel_dump_traceback_later()


_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


def why_no_own_disks() -> str:
    """Return why `use_own_disk` does not work here; empty if it does."""
    command = ["unshare", "--mount", "mount", "--bind", "/tmp", "/tmp"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except OSError as error:
        return str(error)
    return done.stderr.strip()


def use_own_disk(disk: Path, place: Path) -> None:
    """In this thread, and in those that it starts: have the folder `disk` at `place`, as a host without a shared disk.

    Raises:
        OSError: the process may not; see `why_no_own_disks`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for failed in (
        libc.unshare(_CLONE_NEWNS),
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        libc.mount(bytes(disk), bytes(place), None, _MS_BIND, None),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), f"{place} cannot be another folder")


def start_group(rank: int, world: int, port: int, seconds: float = GROUP_SECONDS) -> None:
    """Initialise torch.distributed."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=seconds),
    )


def message_of(call: Callable[[], Any]) -> str:
    """Return the kind and message of the error that a call raises; "no error" if it raises none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
