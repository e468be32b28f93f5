"""The scripts of examples/torch run as they stand, small, in this process: importing torch costs more than they do."""

from __future__ import annotations

import difflib
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "torch"

#: Every script, as its README lists them.
SCRIPTS = {"after", "before"}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(FOLDER))  # as `python examples/torch/NAME.py` has it


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """``run(name, *arguments)``: what the script printed."""

    def call(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *(str(argument) for argument in arguments)])
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return call


def test_every_example_is_known_short_and_in_the_readme() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == SCRIPTS
    for name in SCRIPTS:
        text = (FOLDER / f"{name}.py").read_text()
        assert text.startswith('"""') and f"python examples/torch/{name}.py" in text, name
        assert len(text.splitlines()) < 150, name
        assert f"`{name}.py`" in (FOLDER / "README.md").read_text(), name


def test_the_swap_is_a_handful_of_lines_and_trains_alike(run: Any) -> None:
    before, after = ((FOLDER / f"{name}.py").read_text().splitlines() for name in ("before", "after"))
    code = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and "The script" not in line]
    assert sum(line[0] == "-" for line in code) <= 8 and sum(line.strip() not in "+-" for line in code) <= 15

    def losses(name: str) -> list[float]:
        return [float(number) for number in re.findall(r"0\.\d+", run(name))]

    start = runpy.run_path(str(FOLDER / "before.py"))["Model"]().state_dict()
    torch.save(start, "model.pt")
    wanted = losses("before")
    torch.save(start, "model.pt")
    ours = losses("after")
    assert wanted[1] < 0.5 * wanted[0] and ours == pytest.approx(wanted, abs=2e-4)
    assert losses("after")[0] < 0.5 * ours[0]  # goes on from the file it wrote, and its tables
