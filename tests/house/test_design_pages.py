"""Every page, rule and section that a comment, a docstring or a page cites is in the repository."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("csrc", "src", "tests", "benchmarks", "torture", "docs", "examples", "packaging")
SUFFIXES = {".cc", ".h", ".py", ".md", ".txt", ".toml", ".yml", ".yaml"}

_PAGE = re.compile(r"(?<![\w./-])((?:docs|benchmarks|examples)/[\w./-]+\.md|[A-Z]{3,}\.md)\b")
#: Pages cited by a bare word, as in "NAME rule 2"; and names that were cited so once and are no pages here.
_WORDS = (
    re.compile(r"\b([A-Z]{4,})(?:'s)? (?:rule|section)s? \d"),
    re.compile(r"\b(DESIGN|ENGINE|HOUSE|RANKS|STYLE|TENSORFLOW)\b"),
)
_RULES = re.compile(r"engine\.md, rules? (\d+)[a-z]?(?: (?:to|and) (\d+))?")
_SECTION = re.compile(r"((?:docs/)?[\w/-]+\.md), \"([^\"]+)\"")


def sources() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    found += [path for path in ROOT.iterdir() if path.suffix in SUFFIXES or path.name == "Makefile"]
    return sorted(path for path in found if path != Path(__file__).resolve())


def rules() -> set[int]:
    page = (ROOT / "docs/design/engine.md").read_text()
    listed = {int(number) for number in re.findall(r"^(\d+)\. ", page, re.MULTILINE)}
    rows = re.findall(r"^\| (\d+(?:, \d+)*) \|", page, re.MULTILINE)
    return listed | {int(number) for row in rows for number in row.split(", ")}


def missing(text: str) -> list[str]:
    """What `text` cites and the repository does not contain."""
    text = re.sub(r"\n[ \t]*(?://|#:?)?[ \t]*", " ", text)  # citations go on in the next line of a comment
    names = {path.name for path in [*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md")]}
    found = [page for page in _PAGE.findall(text) if not (ROOT / page).is_file() and page not in names]
    words = {word for pattern in _WORDS for word in pattern.findall(text)}
    found += sorted(word for word in words if f"{word}.md" not in names)
    known = rules()
    for first, last in _RULES.findall(text):
        found += [f"rule {number}" for number in {int(first), int(last or first)} - known]
    for page, heading in _SECTION.findall(text):
        lines = (ROOT / page).read_text().splitlines() if (ROOT / page).is_file() else []
        if not any(line.lstrip("#").strip() == heading for line in lines if line.startswith("#")):
            found.append(f"{page}, {heading!r}")
    return found


def test_everything_cited_is_there() -> None:
    files = sources()
    assert len(files) > 300
    found = {str(path.relative_to(ROOT)): missing(path.read_text(errors="replace")) for path in files}
    assert not {path: cited for path, cited in found.items() if cited}


def test_rules_have_one_number_each() -> None:
    assert rules() == set(range(1, 31))


def test_what_is_not_there_is_found() -> None:
    assert missing("see docs/design/nowhere.md") == ["docs/design/nowhere.md"]
    assert missing("as NOWHERE.md says") == ["NOWHERE.md"]
    assert missing("ENGINE rule 2, and DESIGN's formulas") == ["DESIGN", "ENGINE"]
    assert missing("as PAGES section 2 says") == ["PAGES"]
    assert missing("// docs/design/engine.md,\n// rule 99") == ["rule 99"]
    assert missing('FORMAT.md, "No such heading"') == ["FORMAT.md, 'No such heading'"]
    assert missing('FORMAT.md, "Index snapshot"; docs/design/engine.md, rules 10 to 13') == []
