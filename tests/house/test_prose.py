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
STRICT = ["csrc", "src", "docs", "benchmarks", "examples", "tests", "torture"]
PAGES = ["README.md", "FORMAT.md", "CHANGELOG.md", "CONTRIBUTING.md"]
#: Files that have to name the words. tests/golden/make.py writes the meta of the first release's tables again.
EXEMPT = [ROOT / "docs" / "design" / "glossary.md", Path(__file__).resolve(), ROOT / "tests" / "golden" / "make.py"]


def sources(tree: str) -> list[Path]:
    """Return the sources of a tree, or the page of that name."""
    if (ROOT / tree).is_file():
        return [ROOT / tree]
    found = sorted(path for suffix in (".py", ".cc", ".h", ".md") for path in (ROOT / tree).rglob(f"*{suffix}"))
    return [path for path in found if path not in EXEMPT]


def uses(path: Path) -> list[str]:
    """Return file, line and word of each retired word in a file."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return [f"{path.relative_to(ROOT)}:{at}: {word}" for at, line in lines for word in RETIRED.findall(line)]


def folder_of(path: Path) -> str:
    """Return src/bunkbed/X, or TREE/X for another tree, or the tree or page of a file outside such a folder."""
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
    per_line = sum(map(len, found.values())) / lines.total()
    print(f"{tree}: {1000 * per_line:.2f} retired words in 1,000 lines")
    too_many = [use for folder in lines if len(found[folder]) > MOST_PER_LINE * lines[folder] for use in found[folder]]
    assert not too_many, "use the words of docs/design/glossary.md instead:\n" + "\n".join(too_many)
