"""Retired words (docs/design/glossary.md) stay out of code and pages: at most one in 2,000 lines of a folder."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
RETIRED = re.compile(
    r"\b(nobody|somebody|whoever|anew|for ever|lies in|lie in|lay in|stands? (?:in|for)|stood (?:in|for)|gives? way|"
    r"gave way|lets? go|begun|of them|besides?|told|thrice|once more|for good)\b",
    re.IGNORECASE,
)
MOST_PER_LINE = 0.5 / 1000
STRICT = ["csrc", "src", "docs"]
PAGES = ["README.md", "FORMAT.md", "CHANGELOG.md", "CONTRIBUTING.md"]
#: Uses in the other trees today. A ceiling may only fall.
CEILINGS = {"benchmarks": 161, "examples": 2, "tests": 127, "torture": 6}
#: Pages and files that name the words.
LISTS = [ROOT / "docs" / "design" / "glossary.md", Path(__file__).resolve()]


def sources(tree: str) -> list[Path]:
    """Return the sources of a tree, or the page of that name."""
    if (ROOT / tree).is_file():
        return [ROOT / tree]
    found = sorted(path for suffix in (".py", ".cc", ".h", ".md") for path in (ROOT / tree).rglob(f"*{suffix}"))
    return [path for path in found if path not in LISTS]


def uses(path: Path) -> list[str]:
    """Return file, line and word of each retired word in a file."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return [f"{path.relative_to(ROOT)}:{at}: {word}" for at, line in lines for word in RETIRED.findall(line)]


def folder_of(path: Path) -> str:
    """Return csrc/X, docs/X or src/bunkbed/X, or the tree of a file that is not in such a folder."""
    parts = path.relative_to(ROOT).parts[:-1]
    return "/".join(parts[: 3 if parts[:1] == ("src",) else 2]) or path.name


@pytest.mark.parametrize("tree", [*STRICT, *PAGES])
def test_no_folder_has_many_retired_words(tree: str) -> None:
    lines: Counter[str] = Counter()
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sources(tree):
        lines[folder_of(path)] += len(path.read_text(encoding="utf-8").splitlines())
        found[folder_of(path)] += uses(path)
    assert lines, f"{tree} has no sources"
    too_many = [use for folder in lines if len(found[folder]) > MOST_PER_LINE * lines[folder] for use in found[folder]]
    assert not too_many, "use the words of docs/design/glossary.md instead:\n" + "\n".join(too_many)


@pytest.mark.parametrize("tree", CEILINGS)
def test_the_other_trees_get_no_new_retired_words(tree: str) -> None:
    found = [use for path in sources(tree) for use in uses(path)]
    assert len(found) <= CEILINGS[tree], f"{len(found)} uses, at most {CEILINGS[tree]}:\n" + "\n".join(found)
