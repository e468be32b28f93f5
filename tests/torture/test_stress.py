"""Threads and reader processes call everything at once, in the short form of ``python -m torture stress``."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from torture.stress import stress

ROOT = Path(__file__).resolve().parents[2]


def in_new_process(script: str, *arguments: str) -> str:
    """What a script prints in a process of its own, as parts of the torture suite fork."""
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("kind", [kind.name for kind in stress.KINDS])
def test_no_row_is_wrong_under_concurrent_calls(kind: str) -> None:
    if kind == "layer" and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    printed = in_new_process(
        """
        import sys
        from torture.stress import stress

        (kind,) = [kind for kind in stress.KINDS if kind.name == sys.argv[1]]
        calls, seeds = (160, [1]) if kind.name == "layer" else (600, [0, 1])  # 1: reads by threads, not io_uring
        for seed in seeds:
            outcome = stress.in_process(kind, seed, 20.0, calls)
            print(sum(outcome.made.values()) >= calls, len(outcome.made) >= 8, outcome.wrong)
        """,
        kind,
    )
    assert set(printed.splitlines()) == {"True True []"}


@pytest.mark.parametrize("bug", stress.BUGS)
def test_seeded_bugs_of_concurrency_are_found(bug: str) -> None:
    printed = in_new_process(
        """
        import sys
        from torture.stress import stress

        print(len(stress.find(sys.argv[1], 0, 60.0)) > 0)
        """,
        bug,
    )
    assert printed == "True\n"
