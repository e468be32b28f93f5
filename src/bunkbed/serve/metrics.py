"""Counters of a server in the format of Prometheus."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess

from bunkbed.serve.source import Source

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SHARED = "PROMETHEUS_MULTIPROC_DIR"
_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
#: Counter of `bunkbed.Table.stats` -> label of ``bunkbed_rows_total``.
_ROWS = {"hits": "ram", "misses": "disk"}


class Metrics:
    """The counters of one worker; `render` returns those of all workers together.

    Several workers share them through files in a folder, whose variable is set before `prometheus_client` is imported.
    """

    def __init__(self, source: Source, ram_bytes: int) -> None:
        _forget_ended_workers()
        registry = CollectorRegistry()
        self._registry = registry
        self._source = source
        self._requests = Counter("bunkbed_requests_total", "Requests.", ("path", "status"), registry=registry)
        self._seconds = Histogram(
            "bunkbed_request_seconds",
            "Time of a request in the server.",
            ("path",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._answers = Histogram(
            "bunkbed_answer_seconds",
            "Time to find and encode an answer, without HTTP and without waiting for a thread.",
            ("path",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._rows = Counter(
            "bunkbed_rows_total",
            "Stored rows looked up, each once a request, by where they were.",
            ("table", "place"),
            registry=registry,
        )
        self._lock = threading.Lock()  # guards `_before`
        self._before: dict[tuple[str, str], int] = {}

        def gauge(name: str, text: str, mode: str) -> Gauge:
            return Gauge(name, text, registry=registry, multiprocess_mode=mode)  # type: ignore[arg-type]

        self._version = gauge(
            "bunkbed_version", "Number of the commit that is shown; the lowest of the workers.", "livemin"
        )
        self._behind = gauge("bunkbed_behind", "Newer commits than the one shown; the most of the workers.", "livemax")
        self._age = gauge("bunkbed_age_seconds", "Age of the rows, the highest of the workers.", "livemax")
        self._ram = gauge("bunkbed_ram_bytes", "Memory of this server's processes.", "livesum")
        gauge("bunkbed_ram_budget_bytes", "RAM budget of the rows.", "livesum").set(ram_bytes)

    def count(self, path: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def answered(self, path: str, seconds: float) -> None:
        """Count an answer that was found and encoded."""
        self._answers.labels(path).observe(seconds)

    def update(self) -> None:
        """Take the present values of the reader."""
        with self._lock:
            self._update()

    def _update(self) -> None:
        reader = self._source.reader
        self._version.set(reader.version)
        self._age.set(reader.age_s)
        self._ram.set(_resident_bytes())
        for name, served in self._source.tables.items():
            stats = served.table.stats()
            for counter, place in _ROWS.items():
                now, key = int(stats[counter]), (name, place)
                self._rows.labels(name, place).inc(max(0, now - self._before.get(key, 0)))
                self._before[key] = now
        self._behind.set(math.nan)
        self._behind.set(reader.behind)  # raises where the files are gone

    def render(self) -> bytes:
        """Return the counters of all workers as text."""
        registry = self._registry
        if _SHARED in os.environ:
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        text: bytes = generate_latest(registry)
        return text


def _forget_ended_workers() -> None:
    """Remove the present values of workers that ended and were replaced, so that no old version is shown."""
    folder = os.environ.get(_SHARED)
    if folder is not None:
        for file in Path(folder).glob("gauge_live*_*.db"):
            number = int(file.stem.rpartition("_")[2])
            if not Path(f"/proc/{number}").exists():
                multiprocess.mark_process_dead(number)  # type: ignore[no-untyped-call]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
