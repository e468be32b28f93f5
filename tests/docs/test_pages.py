"""Every Python snippet of the pages runs, as does what a diff leaves behind; shown output is what comes out.

A page is one program from its first snippet to its last, in an empty folder. What a reader need not see (data, a
loop's model) is in the page as ``<!--- invisible-code-block: python ... -->``; what cannot run here is skipped
there with its reason, and counted here.
"""

from __future__ import annotations

import itertools
import re
import shlex
import unittest
from pathlib import Path
from typing import Any

import pytest
import typer

import bunkbed as bb
import bunkbed.table.opening
from bunkbed.cli.app import app
from bunkbed.core.budget import format_least

sybil = pytest.importorskip("sybil")
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md"))]
#: Snippets that need a GPU, torchrun, or a trained run.
SKIPPED = {"docs/first-hour-recommender.md": 1, "docs/processes.md": 2, "docs/torch.md": 1, "docs/train.md": 1}


def run_what_a_diff_leaves(example: Any) -> None:
    """Its lines with ``+`` and those without a mark."""
    lines = (line for line in str(example.parsed).splitlines() if not line.startswith("-"))
    exec(compile("\n".join(line[1:] for line in lines), "diff", "exec"), example.namespace)


PARSERS = [PythonCodeBlockParser(), CodeBlockParser("diff", run_what_a_diff_leaves), SkipParser()]


def shown(page: str) -> int:
    """Snippets a reader sees."""
    return len(re.findall(r"^```(?:py\w*|diff)$", (ROOT / page).read_text(), re.MULTILINE))


@pytest.mark.filterwarnings("default::bunkbed.UncommittedWarning")  # a page need not end as a program should
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras's callbacks
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.onnx's own use of torch
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")  # Keras's default, of any tf.data.Dataset
@pytest.mark.parametrize("page", [page for page in PAGES if shown(page)])
def test_snippets_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "import torch" in (text := (ROOT / page).read_text()) or "bunkbed.torch" in text:
        pytest.importorskip("torch")
    if "bunkbed.keras import" in text:
        pytest.importorskip("tensorflow")
    monkeypatch.chdir(tmp_path)
    document = sybil.Sybil(parsers=PARSERS, path=ROOT).parse(ROOT / page)
    ran = skipped = 0
    try:
        for example in document.examples():
            is_seen = document.text[example.start :].startswith("```")
            try:
                example.evaluate()
                ran += is_seen
            except unittest.SkipTest:
                skipped += is_seen
    finally:
        for table in list(bunkbed.table.opening._writers.values()):
            if Path(table.path).is_relative_to(tmp_path):
                table.close(commit=False)
    assert skipped == SKIPPED.get(page, 0)
    assert ran + skipped == shown(page)


def test_pages_have_snippets() -> None:
    assert sum(shown(page) for page in PAGES) >= 20
    assert set(SKIPPED) <= {page for page in PAGES if shown(page)}


@pytest.mark.parametrize(("page", "examples"), [("docs/sizing.md", 1), ("docs/scale.md", 4)])
def test_the_worked_examples_are_what_plan_prints(page: str, examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    example = re.compile(r"```sh\n(bunkbed [^`]*--ssd-iops[^`]*)```.*?```text\n(.*?)```", re.DOTALL)
    shown_examples = example.findall((ROOT / page).read_text())
    assert len(shown_examples) == examples
    for name, value in {"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    for command, output in shown_examples:
        done = CliRunner().invoke(app, shlex.split(command.replace("\\\n", " "))[1:])
        assert done.exit_code == 0, done.output
        found = [line.rstrip() for line in done.output.strip().splitlines()]
        assert found == [line.rstrip() for line in output.strip().splitlines()]


def test_the_arithmetic_of_the_worked_example() -> None:
    """The page's table of formulas repeats figures of the output."""
    output = re.findall(r"```text\n(.*?)```", (ROOT / "docs/sizing.md").read_text(), re.DOTALL)[0]
    for figure in ("5,444", "29,379", "13.4", "6.4 MiB", "7.7 TB", "77 days", "113.5 GiB", "477.6 MiB", "287.8 MiB"):
        assert figure in output, figure


def test_the_table_of_smallest_budgets() -> None:
    rows = re.findall(
        r"^\| ([\d,]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs/sizing.md").read_text(), re.MULTILINE
    )
    assert len(rows) == 4
    for text, *shown in rows:
        number = int(text.replace(",", ""))
        found = [bb.minimum_ram(number, 64), bb.minimum_ram(number // 20, 64, num_rows=number)]
        found.append(bb.minimum_ram(number, 64, num_rows=1 << 60))
        assert [format_least(size) for size in found] == shown


def shell_commands(page: str) -> list[list[str]]:
    """The arguments of every `bunkbed` command in the page's shell blocks."""
    found = []
    for block in re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            ends = [at for at, word in enumerate(words) if word in ("&&", "|", ";", ">", "&")]
            for first, last in itertools.pairwise([-1, *ends, len(words)]):
                command = words[first + 1 : last]
                if command and Path(command[0]).name == "bunkbed":
                    found.append(command[1:])
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if shell_commands(page)])
def test_commands_are_those_there_are(page: str) -> None:
    """Parsed as the command line parses them: a command, option or value that is no more does not stay in a page."""
    group = typer.main.get_command(app)
    for words in shell_commands(page):
        context = group.make_context("bunkbed", list(words))
        if context.params.get("version"):
            continue
        _, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        command.make_context(command.name, rest, parent=context)


def test_pages_have_commands() -> None:
    assert sum(len(shell_commands(page)) for page in PAGES) >= 20
