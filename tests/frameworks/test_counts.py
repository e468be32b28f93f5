"""How many of the frameworks' own tests work, are refused or do not apply: complete, and as the page says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "compatibility.md"
SUITES = {
    "PyTorch": "test_torch_suite",
    "Keras, keras-rs": "test_keras_suite",
    "TensorFlow": "test_keras_tensorflow_suite",
}


def parts(file: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return the functions of a suite, and its lists of names. Not imported: TensorFlow stays out of this process."""
    functions, names = [], {}
    for node in ast.parse((HERE / f"{file}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            functions.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if ast.unparse(target) in ("NAMES", "REFUSED", "NOT_APPLICABLE"):
                elements = node.value.keys if isinstance(node.value, ast.Dict) else node.value.elts
                names[ast.unparse(target)] = [one.value for one in elements]
    return functions, names


@pytest.mark.parametrize("suite", SUITES)
def test_every_test_of_a_suite_is_asked_once(suite: str) -> None:
    functions, names = parts(SUITES[suite])
    works = [name for name in names["NAMES"] if f"test_{name}" in functions]
    assert sorted(works + names["REFUSED"] + names["NOT_APPLICABLE"]) == sorted(names["NAMES"])
    assert len(set(names["NAMES"])) == len(names["NAMES"])


def test_the_page_has_the_counts() -> None:
    rows = []
    for suite, file in SUITES.items():
        _, names = parts(file)
        total, refused, others = (len(names[key]) for key in ("NAMES", "REFUSED", "NOT_APPLICABLE"))
        counts = f"{total} | {total - refused - others} | {refused} | {others}"
        rows.append(f"| {suite} | {counts} | `tests/frameworks/{file}.py` |")
    table = "\n".join(rows)
    assert table in PAGE.read_text(), table
