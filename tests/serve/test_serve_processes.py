"""`bunkbed serve` as a command: in one process and in several, with a writer, until it is stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")

import bunkbed as bb
from bunkbed.cli.commands import serve as command
from bunkbed.serve import workers as processes

Run = Callable[..., tuple[int, str, str]]
ROWS, DIM = 200, 4
EVERY = np.arange(ROWS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running `bunkbed serve`."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port

    def ask(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        if body:
            request.data, request.headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
        return text if path == "/metrics" else json.loads(text)

    def wait_until_ready(self) -> None:
        end = time.monotonic() + 120
        while True:
            assert self.process.poll() is None, self.process.communicate()
            try:
                self.ask("/healthz")
                return
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < end, "the server did not answer within two minutes"
                time.sleep(0.05)


@contextmanager
def serving(path: Path, *options: str, temporary: Path) -> Iterator[Server]:
    port = free_port()
    arguments = [sys.executable, "-m", "bunkbed", "serve", str(path), "--port", str(port), "--json", *options]
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
    )
    server = Server(process, port)
    try:
        server.wait_until_ready()
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers, too
        process.communicate()


@pytest.fixture
def table(tmp_path: Path) -> Iterator[bb.Table]:
    with bb.create(tmp_path / "user", dim=DIM, num_rows=ROWS, ram="16MiB") as table:
        table.set(EVERY, np.ones((ROWS, DIM), np.float32))
        table.commit()
        yield table


@pytest.mark.parametrize("workers", [1, 2])
def test_it_serves_with_a_writer_until_it_is_stopped(workers: int, table: bb.Table, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    options = ("--workers", str(workers), "--ram", "32MiB", "--max-age", "0.2")
    wrong: list[Any] = []
    with serving(table.path, *options, temporary=tmp_path / "tmp") as server:
        over, newest = threading.Event(), [1]

        def ask() -> None:
            try:
                while not over.is_set():
                    durable = newest[0]
                    found = server.ask("/lookup", ids=EVERY.tolist())
                    numbers = np.unique(found["row"]).tolist()
                    if numbers != [found["version"]] or found["version"] < durable - 50:
                        wrong.append((numbers, found["version"], durable))
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(2, 22):
            table.set(EVERY, np.full((ROWS, DIM), number, np.float32))
            newest[0] = table.commit()
        end = time.monotonic() + 60
        while not re.search(r"^bunkbed_version 21\.0$", server.ask("/metrics"), re.M):  # of the slowest worker
            assert time.monotonic() < end
            time.sleep(0.05)
        over.set()
        for thread in threads:
            thread.join()
        assert not wrong, wrong[:3]
        asked = [
            float(count)
            for count in re.findall(r'requests_total{path="/lookup",status="200"} (\S+)', server.ask("/metrics"))
        ]
        assert len(asked) == 1 and asked[0] > 3  # of all workers together
        server.process.send_signal(signal.SIGTERM)
        out, err = server.process.communicate(timeout=60)
    assert server.process.returncode in (0, -signal.SIGTERM, 143), err
    facts = json.loads(out.splitlines()[0])
    assert facts["workers"] == workers and facts["address"] == f"http://127.0.0.1:{server.port}"
    assert "Traceback" not in err and not list((tmp_path / "tmp").iterdir()), err


def test_a_worker_that_dies_is_replaced_and_forgotten(table: bb.Table, tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    with serving(table.path, "--workers", "2", "--ram", "32MiB", "--max-age", "0.2", temporary=tmp_path) as server:
        end = time.monotonic() + 120

        def workers() -> list[Any]:
            """The workers that have counted something."""
            numbers = [
                int(file.stem.rpartition("_")[2]) for file in tmp_path.glob("bunkbed-serve-*/gauge_livemin_*.db")
            ]
            return [child for child in psutil.Process(server.process.pid).children() if child.pid in numbers]

        def wait_for_two(without: int) -> list[Any]:
            while len(found := workers()) < 2 or without in [worker.pid for worker in found]:
                assert time.monotonic() < end
                time.sleep(0.05)
            return found

        one = wait_for_two(without=0)[0]
        one.kill()
        wait_for_two(without=one.pid)
        table.set(EVERY, np.zeros((ROWS, DIM), np.float32))
        table.commit()
        while not re.search(r"^bunkbed_version 2\.0$", ask_in_spite_of_a_worker_that_died(server), re.M):
            assert time.monotonic() < end
            time.sleep(0.05)


def test_workers_end_with_their_parent(table: bb.Table, tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    with serving(table.path, "--workers", "2", "--ram", "32MiB", temporary=tmp_path) as server:
        parent = psutil.Process(server.process.pid)
        workers = [child for child in parent.children() if "spawn_main" in " ".join(child.cmdline())]
        parent.kill()
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert workers and not alive


def ask_in_spite_of_a_worker_that_died(server: Server) -> str:
    try:
        return str(server.ask("/metrics"))
    except (urllib.error.URLError, ConnectionError):
        return ""


def test_it_listens_at_this_machine_only(table: bb.Table, tmp_path: Path) -> None:
    with serving(table.path, temporary=tmp_path) as server:
        of_others = [
            address[4][0]
            for address in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
            if not str(address[4][0]).startswith("127.")
        ]
        for address in of_others:
            with pytest.raises(OSError), socket.create_connection((address, server.port), timeout=5):
                pass
        assert server.ask("/healthz")["version"] == 1


def test_a_port_that_is_taken(table: bb.Table, tmp_path: Path) -> None:
    with serving(table.path, temporary=tmp_path) as server:
        command = [sys.executable, "-m", "bunkbed", "serve", str(table.path), "--port", str(server.port)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=120)
        taken = f"127.0.0.1:{server.port}: cannot listen: Address already in use"
        assert second.returncode != 0 and second.stdout == "" and taken in second.stderr
        assert second.stderr.count("\n") == 1


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would be started, without starting it."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        processes, "run_one", lambda settings, source, **where: calls.append({"settings": settings, **where})
    )
    monkeypatch.setattr(
        processes, "run_several", lambda settings, **where: calls.append({"settings": settings, **where})
    )
    return calls


def test_what_is_served_is_shown(table: bb.Table, cli: Run, started: list[dict[str, Any]]) -> None:
    code, out, err = cli("serve", str(table.path), "--workers", "3", "--ram", "96MiB", "--max-scan", "1e6")
    assert (code, err) == (0, "")
    assert out == (
        "serving user at commit 1, 3 workers\n  user: 200 rows x 4, by ids\n"
        "http://127.0.0.1:8080  /lookup  /neighbors  /info  /healthz  /metrics\n"
        "http://127.0.0.1:8080/docs describes and tries them; Ctrl-C stops\n"
    )
    (call,) = started
    settings = call["settings"]
    assert settings.ram_of_each == 32 << 20 and settings.max_scan == 1_000_000 and call["port"] == 8080
    assert settings == type(settings).of_json(settings.to_json())
    assert cli("serve", str(table.path), "--host", "::1")[1].splitlines()[2].startswith("http://[::1]:8080 ")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["nothing"], "nothing: no such table or run"),
        (["user", "--snapshot", "best"], "no snapshot 'best'"),
        (["user", "--ram", "1KiB"], "too small"),
        (["user", "--ram", "lots"], "lots"),
        (["user", "--max-age", "0"], "--max-age must be above 0 seconds, got 0"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], part: str, table: bb.Table, cli: Run, started: list[dict[str, Any]]
) -> None:
    code, out, err = cli("serve", *arguments)
    assert code != 0 and out == "" and part in err and err.count("\n") == 1 and not started


def test_packages_that_are_missing(table: bb.Table, cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    find = command.need.__globals__["importlib"].util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else find(name))
    code, _, err = cli("serve", str(table.path))
    assert code != 0 and 'needs uvicorn; install with: pip install "bunkbed[serve]"' in err
