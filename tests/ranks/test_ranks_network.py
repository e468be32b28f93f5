"""Two ranks in two network namespaces, as on two hosts with a shared disk: bits, commits, and a link that is cut.

The link has a delay of 1 ms and a rate of 1 Gbit/s (`slow_link`); where that cannot be made, it is the kernel's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb

SLOW_LINK = Path(__file__).resolve().parents[1] / "support" / "slow_link.py"
ADDRESSES = ("10.77.1.1", "10.77.1.2")
RATE = 125_000_000  # bytes a second of the slow link
SECONDS = 6  # the timeout of the process group
ROWS, DIM, STEPS = 500, 8, 6
EVERY = np.arange(ROWS)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


class Hosts:
    """Two namespaces with a link between them.

    Args:
        delay: of the link, in seconds; 0: a link of the kernel.
    """

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self._link: subprocess.Popen[str] | None = None
        self.names = [f"bunkbed-{os.getpid()}-{rank}" for rank in range(2)]
        self.links = [f"bb{os.getpid()}v{rank}"[-15:] for rank in range(2)]

    def make(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        ends = [each for pair in zip(self.names, self.links, strict=True) for each in pair]
        if not self.delay:
            one, own, other, its = ends
            _ip("link", "add", own, "netns", one, "type", "veth", "peer", its, "netns", other)
        else:
            command = [sys.executable, str(SLOW_LINK), *ends, str(self.delay), str(RATE)]
            self._link = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._link.stdout is not None
            if self._link.stdout.readline() != "ready\n":
                raise OSError("a TUN device cannot be made")
        for name, link, address in zip(self.names, self.links, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def set_link(self, state: str) -> None:
        _ip("-n", self.names[0], "link", "set", self.links[0], state)

    def remove(self) -> None:
        if self._link is not None:
            self._link.communicate(timeout=20)
        for name in self.names:
            with contextlib.suppress(subprocess.SubprocessError):
                _ip("netns", "del", name)

    def start(self, rank: int, folder: Path, mode: str) -> subprocess.Popen[str]:
        """Start this file as a program in a namespace."""
        more = {"GLOO_SOCKET_IFNAME": self.links[rank], "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "29511"}
        command = ["ip", "netns", "exec", self.names[rank], sys.executable, __file__, str(folder), mode]
        environment = {**os.environ, **more, "MASTER_ADDR": ADDRESSES[0], "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts(0.001 if os.access("/dev/net/tun", os.R_OK | os.W_OK) else 0)
    try:
        made.make()
    except (OSError, subprocess.SubprocessError) as error:
        made.remove()
        pytest.skip(f"network namespaces cannot be made here: {error}")
    yield made
    made.remove()


def _finish(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    found = []
    for process in processes:
        try:
            out, error = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 0, error
        found.append(json.loads(out.splitlines()[-1]))
    return found


def test_two_hosts_have_the_bits_of_one_process(hosts: Hosts, tmp_path: Path) -> None:
    found = _finish([hosts.start(rank, tmp_path, "train") for rank in range(2)])
    assert [one["epoch"] for one in found] == [2, 2]
    assert all(one["seconds"] > one["exchanges"] * hosts.delay for one in found)  # each has crossed the link
    alone = bb.create(None, dim=DIM, num_rows=ROWS, optimizer=bb.Adam(lr=0.1), init=bb.Normal(std=1.0), seed=3)
    for step in range(2 * STEPS):
        parts = [_batch(step % STEPS, rank) for rank in range(2)]
        alone.update(np.concatenate([ids for ids, _ in parts]), np.concatenate([grads for _, grads in parts]))
    assert not bb.check(tmp_path / "rows")
    with bb.open(tmp_path / "rows", mode="r") as table:
        assert (table.get(EVERY) == alone.get(EVERY)).all() and table.step == alone.step


def test_a_link_is_cut_in_a_commit(hosts: Hosts, tmp_path: Path) -> None:
    processes = [hosts.start(rank, tmp_path, "cut") for rank in range(2)]
    deadline = time.monotonic() + 60
    while not (tmp_path / "is-in-commit").exists():
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.05)
    hosts.set_link("down")
    found = _finish(processes)
    for one in found:
        assert "start all ranks again" in one["message"] and one["seconds"] < 4 * SECONDS
    hosts.set_link("up")
    assert not bb.check(tmp_path / "rows")
    with bb.open(tmp_path / "rows", mode="r") as table:
        assert table.step == STEPS
    (again,) = {one["step"] for one in _finish([hosts.start(rank, tmp_path, "train") for rank in range(2)])}
    assert again == 3 * STEPS


# ---- The program


def _batch(step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([step, rank])
    ids = (rng.zipf(1.3, 200) - 1) % ROWS
    return ids, rng.standard_normal((200, DIM)).astype(np.float32)


def _main(folder: Path, mode: str) -> dict[str, Any]:
    import datetime

    import torch.distributed as dist

    import bunkbed.torch as bt
    from bunkbed import _native

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=SECONDS))
    rank = dist.get_rank()
    table = bt.Embedding(ROWS, DIM, path=folder / "rows", ram="64MiB", optimizer=bb.Adam(lr=0.1), seed=3).table
    for step in range(STEPS):
        table.update(*_batch(step, rank))
    table.commit()
    if mode == "cut":
        table.update(*_batch(0, rank))
        started = time.monotonic()
        if rank == 1:
            _native.arm_failpoint("commit.sealed", 1, "delay", 3.0)
        message = ""
        pending = table.begin_commit()
        if rank == 0:
            (folder / "is-in-commit").touch()
        try:
            pending.wait()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        return {"message": message, "seconds": time.monotonic() - started}
    began, before = time.monotonic(), table.ranks.exchanges
    for step in range(STEPS):
        table.update(*_batch(step, rank))
    times = {"seconds": time.monotonic() - began, "exchanges": table.ranks.exchanges - before}
    assert times["exchanges"] >= STEPS
    found = {"epoch": table.commit(), "step": table.step, **times}
    dist.barrier()
    table.close()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    result = _main(Path(sys.argv[1]), sys.argv[2])
    print(json.dumps(result), flush=True)
    if sys.argv[2] == "cut":
        os._exit(0)  # the process group cannot end in order: its link is cut
