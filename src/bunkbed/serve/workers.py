"""Starts the server, in this process or in several."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from dataclasses import replace

import uvicorn
from fastapi import FastAPI

from bunkbed.serve.settings import ServeSettings
from bunkbed.serve.source import Source

#: The settings, for the processes of several workers.
_SETTINGS = "BUNKBED_SERVE"
#: Where the workers share their counters; `prometheus_client` reads it when it is imported.
_SHARED = "PROMETHEUS_MULTIPROC_DIR"


def run_one(settings: ServeSettings, source: Source, *, host: str, port: int) -> None:
    """Serve in this process until it is interrupted. The caller closes the source."""
    from bunkbed.serve.app import create_app

    _log_with_times()
    uvicorn.run(create_app(settings, source), host=host, port=port, **_OPTIONS)  # type: ignore[arg-type]


def run_several(settings: ServeSettings, *, host: str, port: int) -> None:
    """Serve in several processes until this one is interrupted. A worker that ends is replaced."""
    with tempfile.TemporaryDirectory(prefix="bunkbed-serve-") as shared:
        os.environ[_SETTINGS] = replace(settings, parent=os.getpid()).to_json()
        os.environ[_SHARED] = shared
        try:
            uvicorn.run(
                f"{__name__}:app_of_worker",
                factory=True,
                workers=settings.workers,
                host=host,
                port=port,
                **_OPTIONS,  # type: ignore[arg-type]
            )
        finally:
            del os.environ[_SETTINGS], os.environ[_SHARED]


def app_of_worker() -> FastAPI:
    """Return the application of one of several workers."""
    from bunkbed.serve.app import create_app

    _log_with_times()
    return create_app(ServeSettings.of_json(os.environ[_SETTINGS]))


def require_free(host: str, port: int) -> None:
    """Raise OSError where an address cannot be listened at."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(error.errno, f"cannot listen: {os.strerror(error.errno or 0)}", f"{host}:{port}") from None


def _log_with_times() -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s [%(process)d] %(name)s: %(message)s")


_OPTIONS = {"log_level": "warning", "access_log": False, "server_header": False, "timeout_graceful_shutdown": 30}
