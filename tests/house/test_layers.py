"""The plan of the folders: what each may import, no circles, and no folder or file that is too large.

A tree of sources has one plan here; a rule is one test over all trees. The sizes hold for trees without a plan too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES = 15  # of a folder, its __init__.py not counted
MOST_LINES = 600  # of a file
MOST_METHODS = 60  # of a class, those that it inherits not counted
TESTS = {"tests", "stress", "fuzz"}

#: Folder, or module at the root of the package -> what it may import, apart from itself and the compiled core. From the
#: bottom to the top: each may only name what stands above it here. "bunkbed" is the public surface, ``__init__.py``.
PYTHON = {
    "errors": "",
    "core": "errors",
    "machine": "core",
    "files": "core errors",
    "table": "core errors files machine",
    "sharded/base": "core errors files table",
    "run": "core errors files sharded/base table",
    "sharded": "core errors files machine run sharded/base table",
    "order": "core sharded table",
    "window": "core table",
    "planning": "core machine table window",
    "maintenance": "core errors files run sharded sharded/base table",
    "adapters": "core errors files sharded table",
    "io/common": "core errors files table",
    "io/formats": "core errors io/common sharded table",
    "feed": "core errors files io/common",
    "io": "core errors files io/common io/formats table",
    "bunkbed": "core errors feed io maintenance order run sharded table",
    "testing": "bunkbed core errors table window",
    "torch/base": "adapters core table",
    "torch/device/base": "adapters core errors torch/base",
    "torch/device/kernels": "core torch/device/base",
    "torch/device": "adapters core errors table torch/base torch/device/base torch/device/kernels window",
    "torch/ranks": "adapters core errors files machine run sharded/base table torch/base",
    "torch": "adapters bunkbed core errors files order run table torch/base torch/device torch/device/base torch/ranks"
    " window",
    "keras/base": "adapters bunkbed core table",
    "keras/tensorflow": "core keras/base order",
    "keras/torch": "adapters errors keras/base table torch torch/base",
    "keras/shared": "adapters bunkbed core keras/base keras/tensorflow keras/torch table",
    "keras/workers": "adapters core files keras/base keras/shared keras/tensorflow sharded/base table",
    "keras": "adapters bunkbed core keras/base keras/shared keras/tensorflow keras/torch keras/workers table window",
    "train/settings": "core errors files",
    "train/output": "core files train/settings",
    "train/processes": "run torch/ranks",
    "train/data": "core errors files order train/processes train/settings",
    "train/features": "core files train/data",
    "train/models": "core run torch train/data train/features train/settings",
    "train/evaluate": "bunkbed core files run train/data train/features train/models train/output train/processes"
    " train/settings",
    "train": "bunkbed core errors files machine maintenance run sharded/base table torch train/data train/evaluate"
    " train/features train/models train/output train/processes train/settings",
    "train/demo": "core run train train/data train/evaluate train/output train/settings",
    "train/report": "bunkbed core errors files machine table train/evaluate train/output train/settings",
    "serve": "bunkbed core errors files train train/data train/settings",
    "cli/shared": "bunkbed core errors files run table torch train train/data train/evaluate train/features"
    " train/output train/processes train/settings",
    "cli/commands": "bunkbed cli/shared core feed files io/common io/formats machine maintenance planning run serve"
    " table torch train train/data train/demo train/evaluate train/features train/output train/processes"
    " train/report train/settings",
    "cli": "bunkbed cli/commands cli/shared",
    "__main__": "cli",
}

#: The same of the core, by its includes.
CORE = {
    "base": "",
    "vfs": "base",
    "kernels": "base",
    "kernels/impl": "kernels",
    "format": "base kernels",
    "batch": "base format kernels",
    "log": "base format kernels vfs",
    "directory": "base format kernels log vfs",
    "commit": "base directory format kernels vfs",
    "cache": "base directory",
    "store": "base batch cache commit directory format log vfs",
    "device": "base batch cache directory",
    "state": "base batch commit device format kernels store vfs",
    "jobs": "base batch commit directory format state store",
    "table": "base batch commit device directory format jobs kernels state store vfs",
    "scan": "base format table",
    "many": "base batch table",
    "feed": "base commit directory format log vfs",
    "maintenance": "base commit directory format log vfs",
    "recsys": "base kernels",
    "text": "base",
    "probe": "base kernels vfs",
    "bindings": "base batch commit device feed format jobs kernels maintenance many probe recsys scan store table text"
    " vfs",
    "fuzz": "base directory format kernels maintenance table vfs",
    "stress": "base batch device jobs maintenance scan store table vfs",
    "tests": "base batch device directory kernels scan state store table vfs",
    "tests/base": "base tests",
    "tests/batch": "base batch format kernels tests",
    "tests/cache": "cache tests",
    "tests/commit": "tests vfs",
    "tests/device": "device tests",
    "tests/directory": "base directory log tests",
    "tests/format": "format kernels tests",
    "tests/fuzz": "directory format fuzz jobs table tests",
    "tests/jobs": "base commit directory format jobs maintenance table tests vfs",
    "tests/feed": "base feed tests/jobs",
    "tests/kernels": "format kernels kernels/impl tests",
    "tests/log": "base directory log tests",
    "tests/maintenance": "format maintenance tests vfs",
    "tests/many": "base many tests",
    "tests/probe": "base probe tests",
    "tests/recsys": "base kernels recsys tests",
    "tests/scan": "format maintenance scan tests tests/jobs vfs",
    "tests/state": "format state tests",
    "tests/store": "base cache directory format log state store tests",
    "tests/stress": "stress tests",
    "tests/table": "base batch format table tests",
    "tests/text": "base tests text",
    "tests/vfs": "base maintenance tests vfs",
}


class Arrow(NamedTuple):
    """The file `source` imports the file `target`; `at_import`: before it can be used itself."""

    source: Path
    target: Path
    at_import: bool


def python_arrows(folder: Path) -> Iterator[Arrow]:
    """Imports within a package, those under TYPE_CHECKING and in functions too."""
    paths = {".".join(path.relative_to(folder.parent).with_suffix("").parts): path for path in folder.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    for path in modules.values():
        for node, at_import in import_statements(ast.parse(path.read_text()), True):
            for alias in node.names:
                if isinstance(node, ast.ImportFrom):
                    assert node.level == 0, f"{path}: imports are absolute"
                    inner = f"{node.module}.{alias.name}"
                    name = inner if inner in modules else node.module
                    name = "" if inner == "bunkbed._native" else name
                else:
                    name = alias.name
                if name in modules:
                    yield Arrow(path, modules[name], at_import)


def import_statements(node: ast.AST, at_import: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, at_import
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        yield from import_statements(child, at_import and not is_function and not is_for_types)


def core_arrows(folder: Path) -> Iterator[Arrow]:
    """Includes of the core's own files."""
    for path in folder.rglob("*.[ch]*"):
        for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
            yield Arrow(path, folder / name, True)


class Tree:
    """Sources under one plan: folder or file at the root -> the others that it may import."""

    def __init__(self, folder: str, pattern: str, plan: dict[str, str], arrows: Iterator[Arrow]) -> None:
        self.folder = ROOT / folder
        self.files = sorted(self.folder.rglob(pattern))
        self.plan = {part: allowed.split() for part, allowed in plan.items()}
        self.arrows = list(arrows)

    def part_of(self, path: Path) -> str:
        """Return the part of the plan that has a file."""
        folder = path.relative_to(self.folder).parent.as_posix()
        if folder != ".":
            return folder
        return self.folder.name if path.name == "__init__.py" else path.stem


TREES = [
    Tree("src/bunkbed", "*.py", PYTHON, python_arrows(ROOT / "src/bunkbed")),
    Tree("csrc", "*.[ch]*", CORE, core_arrows(ROOT / "csrc")),
]
of_each_tree = pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.folder.name)

#: Folder -> its source files, whose number and length are limited.
SIZED = {tree.folder: tree.files for tree in TREES}
SIZED |= {ROOT / name: sorted((ROOT / name).rglob("*.py")) for name in ("tests", "benchmarks", "torture")}


@of_each_tree
def test_the_plan_has_no_way_up(tree: Tree) -> None:
    above: set[str] = set()
    for part, allowed in tree.plan.items():
        assert set(allowed) <= above, f"{part} may import {sorted(set(allowed) - above)}, not above it in the plan"
        above.add(part)


@of_each_tree
def test_each_folder_imports_what_it_may(tree: Tree) -> None:
    assert {tree.part_of(path) for path in tree.files} == set(tree.plan)
    spare = {(part, name) for part, allowed in tree.plan.items() for name in allowed}
    for source, target, _ in tree.arrows:
        part, wanted = tree.part_of(source), tree.part_of(target)
        assert part == wanted or wanted in tree.plan[part], f"{source} imports {target}, but {part} not {wanted}"
        spare.discard((part, wanted))
    assert not spare, "the plan allows what nothing needs"


@of_each_tree
def test_no_circle(tree: Tree) -> None:
    sorter: TopologicalSorter[Path] = TopologicalSorter()
    for source, target, at_import in tree.arrows:
        if at_import:
            sorter.add(source, target)
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail("each imports the one before it: " + ", ".join(map(str, error.args[1])))


@pytest.mark.parametrize("root", SIZED, ids=lambda root: root.name)
def test_no_folder_and_no_file_is_too_large(root: Path) -> None:
    folders = [path.parent for path in SIZED[root] if path.name != "__init__.py"]
    for folder in set(folders):
        assert folders.count(folder) <= MOST_FILES, f"{folder} has {folders.count(folder)} files"
    for path in SIZED[root]:
        lines = len(path.read_text().splitlines())
        assert lines <= MOST_LINES, f"{path} has {lines} lines"
    lines = sum(
        len(path.read_text().splitlines()) for path in SIZED[root] if not TESTS & set(path.relative_to(root).parts)
    )
    most = max(folders.count(folder) for folder in folders)
    print(f"{root.name}: {lines:,} lines, {', '.join(sorted(TESTS))} not counted; at most {most} files in a folder")


def methods_in_python(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            yield node.name, sum(isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) for part in node.body)


def methods_in_cpp(path: Path) -> Iterator[tuple[str, int]]:
    """Declarations with parentheses directly in the body of a class."""
    text = re.sub(r'//[^\n]*|"(?:\\.|[^"\\\n])*"', "", path.read_text())
    text = re.sub(r"\b[A-Z_]{2,}\((?:[^()]|\([^()]*\))*\)", "", text)  # attributes
    for found in re.finditer(r"\b(?:class|struct) (\w+)[^;{}()]*\{", text):
        depth, count, has_parameters = 1, 0, False
        for character in text[found.end() :]:
            has_parameters |= depth == 1 and character == "("
            if depth == 1 and character in "{;":
                count += has_parameters
                has_parameters = False
            depth += (character == "{") - (character == "}")
            if depth == 0:
                break
        yield found[1], count


@pytest.mark.parametrize("root", SIZED, ids=lambda root: root.name)
def test_no_class_has_too_many_methods(root: Path) -> None:
    for path in SIZED[root]:
        count_methods = methods_in_python if path.suffix == ".py" else methods_in_cpp
        for name, count in count_methods(path):
            assert count <= MOST_METHODS, f"{path}: {name} has {count} methods"
            if count > MOST_METHODS // 2:
                print(f"{name}: {count} methods")


def test_methods_are_counted(tmp_path: Path) -> None:
    source = tmp_path / "a.h"
    source.write_text(
        "class A {\n public:\n  A() : x_(1) {}\n  void f(int (*call)()) REQUIRES(lock_);  // g()\n"
        "  int x() const { return h(x_); }\n private:\n  struct B {\n    void of_b();\n  };\n  int x_ = 0;\n};\n"
    )
    assert dict(methods_in_cpp(source)) == {"A": 3, "B": 1}
