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
        rate: of the link, in bytes a second.
    """

    def __init__(self, delay: float, rate: int = RATE) -> None:
        self.delay, self.rate = delay, rate
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
            command = [sys.executable, str(SLOW_LINK), *ends, str(self.delay), str(self.rate)]
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


@contextlib.contextmanager
def _linked(delay: float, rate: int = RATE) -> Iterator[Hosts]:
    made = Hosts(delay, rate)
    try:
        made.make()
    except (OSError, subprocess.SubprocessError) as error:
        made.remove()
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        yield made
    finally:
        made.remove()


HAS_TUN = os.access("/dev/net/tun", os.R_OK | os.W_OK)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with _linked(0.001 if HAS_TUN else 0) as made:
        yield made


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


_SERVER = """
import socket
with socket.create_server(("{address}", 29512)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    while connection.recv(1 << 16):
        pass
    connection.sendall(b"!")
"""
_CLIENT = """
import socket, time
began = time.monotonic()
with socket.create_connection(("{address}", 29512), timeout=30) as connection:
    connected = time.monotonic() - began
    connection.sendall(bytes({size}))
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(1) == b"!"
print(connected, time.monotonic() - began)
"""


@pytest.mark.skipif(not HAS_TUN, reason="/dev/net/tun cannot be opened")
def test_the_slow_link_has_its_delay_and_its_rate() -> None:
    delay, rate, size = 0.02, 1_000_000, 1_500_000
    with _linked(delay, rate) as hosts:
        server, client = (
            [*("ip", "netns", "exec", hosts.names[place], sys.executable, "-c"), code.format(**facts)]
            for place, code in ((1, _SERVER), (0, _CLIENT))
            for facts in [{"address": ADDRESSES[1], "size": size}]
        )
        with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as listening:
            try:
                assert listening.stdout is not None and listening.stdout.readline() == "ready\n"
                done = subprocess.run(client, capture_output=True, text=True, timeout=60, check=True)
            finally:
                listening.kill()
    connected, took = map(float, done.stdout.split())
    assert connected > 2 * delay and took > connected + size / rate


def test_two_hosts_have_the_bits_of_one_process(hosts: Hosts, tmp_path: Path) -> None:
    found = _finish([hosts.start(rank, tmp_path, "train") for rank in range(2)])
    assert [one["epoch"] for one in found] == [2, 2]
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
    for step in range(STEPS):
        table.update(*_batch(step, rank))
    found = {"epoch": table.commit(), "step": table.step}
    dist.barrier()
    table.close()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    result = _main(Path(sys.argv[1]), sys.argv[2])
    print(json.dumps(result), flush=True)
    if sys.argv[2] == "cut":
        os._exit(0)  # the process group cannot end in order: its link is cut
