"""RESULTS.md is what results.toml says, and its rows name commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks import results
from benchmarks.harness import suite
from torture.__main__ import PARTS

ROOT = Path(__file__).resolve().parents[2]
ROWS = [row for claim in results.read()[1] for row in claim.rows]


def is_there(command: str) -> bool:
    """Whether the case, module, script or make target of a row's command exists."""
    first, *rest = command.split()
    if first == "make":
        return re.search(rf"^{re.escape(rest[0])}:", (ROOT / "Makefile").read_text(), re.MULTILINE) is not None
    if first == "-m":
        folder = ROOT / rest[0].replace(".", "/")
        is_part = rest[0] != "torture" or rest[1] in PARTS
        return is_part and (folder.with_suffix(".py").is_file() or (folder / "__main__.py").is_file())
    if first.endswith(".py"):
        return (ROOT / first).is_file()
    return {first, *rest} <= {case.name for case in suite.CASES}


def test_the_page_is_made_from_the_data() -> None:
    page = results.PAGE.read_text(encoding="utf-8")
    assert page == results.page(), "run `python -m benchmarks.results`"
    assert page.count("\n") <= 150


@pytest.mark.parametrize("command", sorted({row.command for row in ROWS}))
def test_commands_exist(command: str) -> None:
    assert is_there(command)


@pytest.mark.parametrize(
    "command", ["adan", "adam adan", "-m torture loads", "-m benchmarks.nothing", "make stresses", "packaging/none.py"]
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    assert not is_there(command)


def test_rows_are_complete() -> None:
    machines = results.read()[0]["machines"]
    for row in ROWS:
        verdicts = {reading.verdict for reading in row.readings}
        assert verdicts and verdicts <= set(results.VERDICTS), row
        assert {reading.machine for reading in row.readings} <= set(machines), row
        assert ("none" in verdicts) == (row.target == "-"), f"a verdict needs a target: {row}"
        assert ("missed" in verdicts) == bool(row.cause), f"what is missed needs a cause, nothing else: {row}"
