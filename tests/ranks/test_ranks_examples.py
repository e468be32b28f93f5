"""The examples of several processes run as they stand, started as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bunkbed as bb

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "torch"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def _run(folder: Path, *arguments: str) -> str:
    # Without the last one, most restarts of torchrun with gloo fail, also without Bunkbed (docs/processes.md).
    more = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    more |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command, environment = [sys.executable, *arguments], {**os.environ, **more}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _assert_trained(name: str, out: str, folder: Path) -> None:
    assert float(re.search(r": loss [\d.]+ -> ([\d.]+)", out).group(1)) < 0.02  # at first about 0.17
    assert "step 300, 500 rows of users in 2 shards" in out
    for table in ("user", "item"):
        assert not bb.check(folder / name / table)


@pytest.mark.parametrize("name", ["processes", "processes_accelerate", "processes_fsdp", "processes_lightning"])
def test_examples_of_torchrun(name: str, tmp_path: Path) -> None:
    _assert_trained(name, _run(tmp_path, *TORCHRUN, str(FOLDER / f"{name}.py")), tmp_path)


def test_torchrun_starts_a_crashed_job_again(tmp_path: Path) -> None:
    out = _run(tmp_path, *TORCHRUN, "--max-restarts=1", str(FOLDER / "processes.py"), "--fail-at", "150")
    assert "rank 0 goes on at step 100" in out and "rank 1 goes on at step 100" in out
    _assert_trained("processes", out, tmp_path)
    plain = tmp_path / "plain"
    plain.mkdir()
    _run(plain, *TORCHRUN, str(FOLDER / "processes.py"))
    ids = range(500)
    with bb.open(tmp_path / "processes/user", mode="r") as one, bb.open(plain / "processes/user", mode="r") as other:
        assert (one.get(ids) == other.get(ids)).all()  # the bits of a job that did not crash


def test_example_of_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="ray is not installed")
    _assert_trained("processes_ray", _run(tmp_path, str(FOLDER / "processes_ray.py")), tmp_path)
