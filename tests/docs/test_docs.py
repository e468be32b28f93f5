"""Links between the project's pages lead somewhere."""

from __future__ import annotations

import re
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
