"""Serving: ``python -m benchmarks.cases.serving [age] [lookup] [larger]``.

- ``age``: a trainer in another process changes 10,000 of a million rows and commits each second. How old is what a
  reader that watches shows? Each 10 ms: the time since the first commit that it does not show became durable.
- ``lookup``: `bunkbed serve` of a million rows x 64 in RAM, 100 random ids a request, from `wrk` on the same cores, in
  JSON and in Arrow; and Redis with the same rows in one hash, by `redis-benchmark` and `HMGET`, in turns.
- ``larger``: the same of a table of four times ``--ram``: uniform ids, most rows from the disk; the server's memory.

Needs `wrk` and `redis-server` (Debian's packages) for the last two.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from benchmarks.harness import common

DIM, IDS = 64, 100
CONNECTIONS = (1, 2, 4)
SCRIPT = """
math.randomseed(%d)
local ids = {}
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Accept"] = "%s"
request = function()
  for j = 1, %d do ids[j] = math.random(0, %d) end
  return wrk.format(nil, "/lookup", nil, '{"ids":[' .. table.concat(ids, ",") .. "]}")
end
done = function(summary, latency)
  print(string.format("{\\"p50\\": %%g, \\"p99\\": %%g, \\"requests\\": %%d, \\"seconds\\": %%g, \\"failed\\": %%d}",
    latency:percentile(50) / 1000, latency:percentile(99) / 1000, summary.requests, summary.duration / 1e6,
    summary.errors.status + summary.errors.connect + summary.errors.read + summary.errors.timeout))
end
"""


def make(path: Path, rows: int) -> None:
    """Write a table of so many rows."""
    with bb.create(path, dim=DIM, num_rows=rows, ram="512MiB", optimizer=bb.SGD(lr=0.1)) as table:
        rng = np.random.default_rng(0)
        for first in range(0, rows, 1 << 16):
            ids = np.arange(first, min(rows, first + (1 << 16)))
            table.set(ids, rng.standard_normal((len(ids), DIM), np.float32))


# ---- The age of a reader


def _train(path: Path, seconds: float, changed: int, newest: Synchronized[int], times: Any) -> None:
    with bb.open(path, ram="512MiB") as table:
        rng, began = np.random.default_rng(1), time.monotonic()
        assert table.num_rows is not None
        while time.monotonic() < began + seconds:
            following = time.monotonic() + 1
            ids = rng.integers(0, table.num_rows, changed)
            table.update(ids, np.ones((changed, DIM), np.float32))
            number = table.commit()
            times[number % len(times)] = time.monotonic()  # one clock for all processes
            newest.value = number
            time.sleep(max(0.0, following - time.monotonic()))


def age(folder: Path, rows: int, seconds: float) -> None:
    """Print percentiles of how long rows of a reader had been out of date."""
    make(folder / "age", rows)
    context = multiprocessing.get_context("spawn")
    newest, times = context.Value("q", 0), context.Array("d", 4096, lock=False)
    trainer = context.Process(target=_train, args=(folder / "age", seconds, rows // 100, newest, times))
    lookups, ages = [], []
    with bb.open(folder / "age", mode="r", ram="1GiB") as reader:
        ids = np.random.default_rng(2).integers(0, rows, (64, IDS))
        reader.watch(max_age_s=2.0)
        trainer.start()
        while trainer.is_alive():
            began = time.perf_counter()
            reader.lookup(ids[len(ages) % 64])
            lookups.append(time.perf_counter() - began)
            shown, now = reader.version, time.monotonic()
            ages.append(now - times[(shown + 1) % len(times)] if 0 < shown < newest.value else 0.0)
            time.sleep(0.01)
        trainer.join()
        moves = reader.version
    for what, values, unit, scale in (("age", ages, "s", 1.0), ("lookup of 100 ids", lookups, "ms", 1000.0)):
        points = np.percentile(np.array(values) * scale, [50, 99, 100])
        print(f"{what}: p50 {points[0]:.3f}, p99 {points[1]:.3f}, most {points[2]:.3f} {unit}", flush=True)
    print(f"{moves - 1} commits of {rows // 100:,} rows in {seconds:g} s, {len(ages):,} looks")


# ---- Requests


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(path: Path, ram: str, workers: int = 1) -> Iterator[int]:
    """Run `bunkbed serve` and yield its port."""
    port = _free_port()
    command = [sys.executable, "-m", "bunkbed", "serve", str(path), "--port", str(port), "--ram", ram]
    process = subprocess.Popen([*command, "--workers", str(workers)], stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            time.sleep(0.1)
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz").read()
                break
            except OSError:
                if process.poll() is not None:
                    raise RuntimeError("the server ended") from None
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def metrics(port: int) -> dict[str, float]:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


def places(port: int) -> tuple[float, float]:
    """Return how many rows came from RAM and from the disk."""
    found = {key: value for key, value in metrics(port).items() if key.startswith("bunkbed_rows_total")}
    return tuple(sum(v for key, v in found.items() if f'"{place}"' in key) for place in ("ram", "disk"))  # type: ignore[return-value]


def ask(port: int, folder: Path, rows: int, accept: str, connections: int, seconds: float) -> dict[str, float]:
    """Return latencies in ms and requests a second of `wrk`."""
    script = folder / "ask.lua"
    script.write_text(SCRIPT % (random.randrange(1 << 30), accept, IDS, rows - 1))
    command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "-s", str(script)]
    found = subprocess.run([*command, f"http://127.0.0.1:{port}"], capture_output=True, text=True, check=True).stdout
    values: dict[str, float] = json.loads(found.splitlines()[-1])
    if values["failed"]:
        raise RuntimeError(f"{values['failed']:g} requests failed")
    return {**values, "rate": values["requests"] / values["seconds"]}


@contextmanager
def redis(folder: Path, table: Path) -> Iterator[int]:
    """Run Redis with the rows of a table in one hash, by ids of 12 digits, and yield its port."""
    port = _free_port()
    options = ["--port", str(port), "--save", "", "--dir", str(folder), "--daemonize", "no"]
    server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    try:
        time.sleep(1)
        load = subprocess.Popen(
            ["redis-cli", "-p", str(port), "--pipe"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        assert load.stdin is not None
        with bb.open(table, mode="r", ram="512MiB") as reader:
            for ids, rows in reader.scan(chunk=4096):
                parts = [b"*%d\r\n$4\r\nHSET\r\n$4\r\nrows\r\n" % (2 + 2 * len(ids))]
                for number, row in zip(ids.tolist(), rows, strict=True):
                    parts.append(b"$12\r\n%012d\r\n$%d\r\n%s\r\n" % (number, 4 * DIM, row.tobytes()))
                load.stdin.write(b"".join(parts))
        load.stdin.close()
        load.wait()
        yield port
    finally:
        server.terminate()
        server.wait()


def ask_redis(port: int, rows: int, connections: int, seconds: float) -> dict[str, float]:
    """Return latencies in ms and requests a second of `redis-benchmark`."""
    command = ["redis-benchmark", "-p", str(port), "-c", str(connections), "-r", str(rows), "--csv"]
    command += ["-n", str(int(10_000 * seconds)), "HMGET", "rows", *["__rand_int__"] * IDS]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    values = [float(value) for value in re.findall(r'"([\d.]+)"', found)]  # rate, average, least, p50, p95, p99, most
    return {"rate": values[-7], "p50": values[-4], "p99": values[-2]}


def _show(what: str, found: list[dict[str, float]]) -> None:
    rate, p50, p99 = (statistics.median(one[key] for one in found) for key in ("rate", "p50", "p99"))
    rates = sorted(one["rate"] for one in found)
    print(
        f"{what:42} {rate:8,.0f} requests/s ({rates[0]:,.0f} to {rates[-1]:,.0f})  "
        f"p50 {p50:6.2f} ms  p99 {p99:6.2f} ms",
        flush=True,
    )


def _handler(before: dict[str, float], after: dict[str, float], limit_s: float) -> float:
    """Return the share of the lookups that were found and encoded within so long."""

    def between(key: str) -> float:
        return after[key] - before.get(key, 0.0)

    count = between('bunkbed_answer_seconds_count{path="/lookup"}')
    return between(f'bunkbed_answer_seconds_bucket{{le="{limit_s}",path="/lookup"}}') / count


def lookup(folder: Path, rows: int, seconds: float, rounds: int) -> None:
    """Print latency and throughput of the server and of Redis, in turns."""
    make(folder / "rows", rows)
    kinds = {"JSON": "application/json", "Arrow": "application/vnd.apache.arrow.stream"}
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    with served(folder / "rows", "1GiB") as port, redis(folder, folder / "rows") as other:
        for _ in range(30):  # until the rows are in RAM
            before = places(port)
            ask(port, folder, rows, kinds["Arrow"], 2, seconds / 2)
            ram, disk = (now - then for now, then in zip(places(port), before, strict=True))
            if disk < 0.01 * ram:
                break
        for connections in CONNECTIONS:
            for _ in range(rounds):
                for name, accept in kinds.items():
                    before = metrics(port)
                    asked = ask(port, folder, rows, accept, connections, seconds)
                    asked["within"] = _handler(before, metrics(port), 0.002)
                    found.setdefault((name, connections), []).append(asked)
                found.setdefault(("Redis", connections), []).append(ask_redis(other, rows, connections, seconds))
        for (name, connections), values in found.items():
            _show(f"{name}, {connections} connection{'s'[: connections > 1]}", values)
            if name != "Redis":
                share = statistics.median(one["within"] for one in values)
                print(f"{'':42} {100 * share:.2f} % of the answers were found and encoded within 2 ms")
        print(f"memory of the server: {metrics(port)['bunkbed_ram_bytes'] / 2**20:,.0f} MiB")


def larger(folder: Path, rows: int, seconds: float) -> None:
    """Print the same of a table of four times the budget, and the memory of the server."""
    make(folder / "larger", rows)
    ram = rows * DIM * 4 // 4
    with served(folder / "larger", str(ram)) as port:
        resident = metrics(port)["bunkbed_ram_bytes"]
        ask(port, folder, rows, "application/json", 4, 2 * seconds)
        for connections in CONNECTIONS:
            found = ask(port, folder, rows, "application/json", connections, seconds)
            _show(f"JSON, {connections} connection{'s'[: connections > 1]}, four times the budget", [found])
        after, (ram_rows, disk_rows) = metrics(port), places(port)
        print(
            f"budget {ram / 2**20:,.0f} MiB; the process grew from {resident / 2**20:,.0f} to "
            f"{after['bunkbed_ram_bytes'] / 2**20:,.0f} MiB; {100 * disk_rows / (ram_rows + disk_rows):.0f} % of the "
            "rows came from the disk"
        )


def main() -> int:
    options = common.parser(__doc__)
    options.add_argument("parts", nargs="*", help="age, lookup, larger; default: all")
    options.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    options.add_argument("--rounds", type=int, default=3)
    chosen = options.parse_args()
    parts = chosen.parts or ["age", "lookup", "larger"]
    if unknown := sorted(set(parts) - {"age", "lookup", "larger"}):
        options.error(f"there is no part {unknown[0]!r}; there are age, lookup and larger")
    seconds, rows, rounds = (1.0, 20_000, 1) if chosen.tiny else (chosen.seconds, 1_000_000, chosen.rounds)
    print(common.machine())
    missing = [name for name in ("wrk", "redis-server") if shutil.which(name) is None]
    with common.workspace(chosen.dir, 6 << 30) as folder:
        for part in parts:
            print(f"-- {part}", flush=True)
            if part == "age":
                age(folder, rows, 3 * seconds)
            elif missing:
                print(f"skipped: {' and '.join(missing)} not installed (apt-get install wrk redis-server)")
            elif part == "lookup":
                lookup(folder, rows, seconds, rounds)
            else:
                larger(folder, 4 * rows, seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
