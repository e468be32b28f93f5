"""Links between the project's pages lead somewhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("benchmarks/*.md")]
)
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings: lower case, spaces to dashes, other marks gone."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(text))
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue  # another site's
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}, where there is no file"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}; its headings: {sorted(anchors(target))}"


def test_every_question_has_an_answer_with_a_link() -> None:
    rows = [line for line in (ROOT / "docs/questions.md").read_text().splitlines() if line.startswith("| ")]
    questions = [row for row in rows if not row.startswith("| question")]
    assert len(questions) >= 25
    for row in questions:
        assert _LINK.search(row), row


def messages() -> Iterator[str]:
    """The texts of the sources that a user may see: strings but not docstrings, with {} for values; error classes."""
    for source in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(source.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield node.value
            elif isinstance(node, ast.ClassDef) and source.name == "errors.py":
                yield node.name
    for source in (ROOT / "csrc").rglob("*.cc"):
        if not {"tests", "stress", "fuzz"} & set(source.parts):
            yield from re.findall(r'"((?:[^"\\\n]|\\.)*)"', re.sub(r'"\s*\n\s*"', "", source.read_text()))


def test_troubleshooting_quotes_messages_that_there_are() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) >= 40
    texts = list(messages())
    for quoted in re.findall(r"`([^`]+)`", "\n".join(rows)):
        assert any(quoted in text for text in texts), quoted


@pytest.mark.parametrize(
    ("page", "package"), [("bunkbed", "bunkbed"), ("torch", "bunkbed.torch"), ("keras", "bunkbed.keras")]
)
def test_the_reference_has_the_names_that_dir_shows(page: str, package: str) -> None:
    """In a process of its own: names of modules depend on what was imported before."""
    text = (ROOT / f"docs/api/{page}.md").read_text()
    named = set(re.findall(rf"^::: {re.escape(package)}\.(\w+)$", text, re.MULTILINE)) - {"workers_table"}
    code = f"import {package} as it; print(*(name for name in dir(it) if not name.startswith('__')))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(shown) - {"machine", "window"} == named
