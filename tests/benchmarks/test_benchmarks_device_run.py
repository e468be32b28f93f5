"""`benchmarks/device_run.py`: what it starts, in which order, and what it makes of what fails."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from benchmarks import device_run


class Commands:
    """Replaces `run`: records each command, and returns the status of the first word that the command contains."""

    def __init__(self, **statuses: int) -> None:
        self.statuses, self.started = statuses, list[str]()

    def __call__(self, *command: str, timeout: float | None = None) -> int:
        line = " ".join(command)
        self.started.append(line)
        return next((status for word, status in self.statuses.items() if word in line), 0)

    def index(self, text: str) -> int:
        return next(i for i, line in enumerate(self.started) if text in line)


def start(monkeypatch: pytest.MonkeyPatch, *arguments: str, tools: tuple[str, ...] = (), **statuses: int) -> Commands:
    commands = Commands(**statuses)
    monkeypatch.setattr(device_run, "run", commands)
    monkeypatch.setattr(device_run.signal, "signal", lambda *args: None)  # the tests' process keeps its own
    monkeypatch.setattr(device_run.shutil, "which", lambda name: name if name in tools else None)
    try:
        device_run.main(list(arguments))
    except SystemExit as end:
        commands.started.append(f"ended: {end}")
    return commands


def test_checks_then_measures_and_says_what_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = start(monkeypatch, "--device", "cpu", "--tiny", "--zipf", "1.2").started
    assert [line.split(" -m ")[-1].split(" --minutes")[0] for line in found[1:]] == [
        "benchmarks.device.check --device cpu",
        "benchmarks.device.experiment",
    ]
    minutes = float(found[2].split("--minutes ")[1].split()[0])
    assert 7 < minutes < 8 and found[2].endswith("--device cpu --tiny --zipf 1.2")
    assert "compute-sanitizer is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("statuses", "ends"),
    [
        ({"device.check": 1, "compute": 0}, "failed: the check"),
        ({"error-exitcode": 86}, "failed: compute-sanitizer found errors"),
        ({"error-exitcode": 124}, ""),
        ({"minutes": 1}, "failed: measuring"),
    ],
)
def test_a_part_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch, statuses: dict[str, int], ends: str) -> None:
    found = start(monkeypatch, tools=("compute-sanitizer",), **statuses)
    assert found.index("device.check") < found.index("--error-exitcode 86") < found.index("--minutes")
    assert found.started[-1].startswith(f"ended: {ends}") if ends else "--minutes" in found.started[-1]


def test_an_extension_that_is_not_there_is_built_or_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device_run, "ROOT", tmp_path)
    (tmp_path / "src" / "bunkbed").mkdir(parents=True)
    (tmp_path / "build" / "device").mkdir(parents=True)
    (tmp_path / "build" / "device" / "_native.so").write_bytes(b"built")
    found = start(monkeypatch, **{"import": 1})
    assert "building it needs cmake" in found.started[-1] and len(found.started) == 2
    monkeypatch.setattr(device_run.importlib.util, "find_spec", lambda name: None if name == "nanobind" else name)
    assert "needs nanobind: " in start(monkeypatch, tools=("cmake",), **{"import": 1}).started[-1]
    monkeypatch.setattr(device_run.importlib.util, "find_spec", lambda name: name)
    found = start(monkeypatch, tools=("cmake",), **{"import": 1})
    assert "cmake -S" in found.started[1] and "cmake --build" in found.started[2]
    assert (tmp_path / "src" / "bunkbed" / "_native.so").read_bytes() == b"built"
    assert "cannot be imported" in found.started[-1]
    assert "could not be built" in start(monkeypatch, tools=("cmake",), **{"import": 1, "cmake": 2}).started[-1]


def is_running(stat: Path) -> bool:
    try:
        return stat.read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may go between opening and reading
        return False


def test_a_command_that_takes_too_long_ends_with_all_it_started(tmp_path: Path) -> None:
    number = tmp_path / "number"
    assert device_run.run("sh", "-c", f"sleep 600 & echo $! > {number}; wait", timeout=5.0) == 124
    child = Path(f"/proc/{number.read_text().strip()}/stat")
    # A killed process that the test did not start goes when the scheduler comes to it.
    deadline = time.monotonic() + 60
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)
    assert device_run.run(sys.executable, "-c", "raise SystemExit(3)") == 3
