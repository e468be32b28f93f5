"""The rules for types in the package: few uses of `Any`, no private field of another package."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "bunkbed"
MOST_ANY = 400


def test_any_is_rare() -> None:
    counts = {path: len(re.findall(r"\bAny\b", path.read_text())) for path in PACKAGE.rglob("*.py")}
    print(f"Any in src: {sum(counts.values())}")
    most = sorted(counts, key=lambda path: -counts[path])[:5]
    assert sum(counts.values()) <= MOST_ANY, f"name the type, or use an alias; most are in {most}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(of_class: ast.ClassDef) -> Iterator[str]:
    """Yield the private methods, class variables and fields that a class has."""
    for node in ast.walk(of_class):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_of_own(node, set()):
            yield node.attr


def is_of_own(access: ast.Attribute, classes: set[str]) -> bool:
    """Return whether an attribute is one of self, cls, super() or a class of the module."""
    owner = access.value
    if isinstance(owner, ast.Call):
        owner = owner.func
        return isinstance(owner, ast.Name) and owner.id == "super"
    return isinstance(owner, ast.Name) and owner.id in {"self", "cls", *classes}


def test_no_package_reaches_into_another() -> None:
    """A folder may use `x._y` only if one of its own classes has a `_y`, or none of the package has (a framework's)."""
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    owners: dict[str, set[Path]] = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for name in filter(is_private, private_names(node)):
                    owners[name].add(path.parent)
    found = []
    for path, tree in trees.items():
        classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not is_private(node.attr) or is_of_own(node, classes):
                continue
            if node.attr in owners and path.parent not in owners[node.attr]:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert not found, found
