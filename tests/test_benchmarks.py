"""Each measurement runs, tiny: what it prints is no figure, but it prints one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PRINTS = {
    "exactness": "seeded bug double_update: found",
    "optimizers": "RowwiseAdagrad",
    "resident": "ratio torch / bunkbed",
    "larger_than_memory": "random 4 KiB O_DIRECT reads/s",
    "bounded_memory": "peak beyond them",
    "huge": "random rows trained",
}


@pytest.mark.parametrize("name", PRINTS)
def test_runs_tiny(name: str, tmp_path: Path) -> None:
    if name in ("optimizers", "resident", "larger_than_memory"):
        pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--tiny", "--dir", str(tmp_path / "space")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert PRINTS[name] in done.stdout
    assert "machine: " in done.stdout
    assert not (tmp_path / "space").exists(), "temporary files stayed behind"


def test_every_measurement_has_its_command_in_the_results() -> None:
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    for name in PRINTS:
        assert f"python -m benchmarks.{name}" in results
