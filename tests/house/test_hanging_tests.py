"""A test that hangs in native code is named and ends: what `pyproject.toml` says to pytest of that, at work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = Path(__file__).parents[2] / "pyproject.toml"

#: Locks a mutex twice. No signal handler of Python's runs meanwhile, and with `PyDLL`, which keeps the GIL, no thread.
STUCK = """
import ctypes

def test_before():
    pass

def test_stuck():
    lock = ctypes.{library}(None).pthread_mutex_lock
    mutex = ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a mutex of zeros is Linux's")
@pytest.mark.parametrize("library", ["CDLL", "PyDLL"])
def test_a_test_that_hangs_is_named(tmp_path: Path, library: str) -> None:
    (tmp_path / "test_it.py").write_text(STUCK.format(library=library))
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-c", SETTINGS, "--rootdir", tmp_path, "-n", "1",
            "--max-worker-restart", "0", "-o", "timeout=1", "-o", "faulthandler_timeout=3", "test_it.py",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "crashed while running 'test_it.py::test_stuck'" in done.stdout
    assert "in test_stuck" in done.stderr  # a stack
