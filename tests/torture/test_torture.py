"""The torture suite in its short form: each part runs, small, and finds nothing; the oracle finds what is seeded."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: part -> (size, figures at least this many tries each)
PARTS = {
    "powerloss": (0.004, 300),
    "kills": (0.04, 4),
    "load": (0.02, 8),
    "faults": (0.022, 4),
    "corruption": (0.003, 10),
    "epochs": (0.02, 3),
    "ranks": (0.03, 2),
    "feed": (0.06, 12),
    "resume": (0.1, 1),
}


def torture(part: str, size: float, path: Path) -> list[dict]:
    """The figures of one part; the test fails where a promise did not hold."""
    out = path / "figures.json"
    command = [sys.executable, "-m", "torture", part, "--size", str(size), "--seconds", "40", "--json", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize("part", PARTS)
def test_every_promise_holds(part: str, tmp_path: Path) -> None:
    size, least = PARTS[part]
    figures = torture(part, size, tmp_path)
    assert figures
    for figure in figures:
        if figure["score"]:
            continue  # another store's
        assert figure["tried"] >= least, figure
        assert figure["passed"] == figure["tried"], figure


def test_every_seeded_bug_is_caught(tmp_path: Path) -> None:
    (figure,) = torture("mutants", 0.1, tmp_path)
    assert figure["passed"] == figure["tried"] >= 24, figure


def test_unknown_parts_are_named() -> None:
    run = subprocess.run([sys.executable, "-m", "torture", "flood"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert "there is no part 'flood'; there are: powerloss" in run.stderr


def test_processes_that_send_much_do_not_wait_for_each_other(tmp_path: Path) -> None:
    # In a process of its own, as parts fork. The second sends more than a pipe takes before the first ends.
    script = """
        import sys, time
        from pathlib import Path
        from torture.parts import in_processes
        sent = Path(sys.argv[1])

        def work(index, send):
            if index == 1:
                for number in range(5000):
                    send("x" * 100)
                sent.touch()
            while not sent.exists():
                time.sleep(0.01)
            return index

        print(in_processes(work, 2, 20.0))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "sent")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.stdout == "[0, 1]\n", run.stderr
