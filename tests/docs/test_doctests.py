"""Every example in a docstring runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import bunkbed

MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(bunkbed.__path__, "bunkbed.")
    if not info.name.rpartition(".")[2].startswith("_")  # the compiled module, and __main__, which runs
)


@pytest.mark.parametrize("name", ["bunkbed", *MODULES])
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # examples create tables in the current folder
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(str(error))
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert found.failed == 0, f"{found.failed} of {found.attempted} examples of {name} fail; pytest -s shows them"


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    modules = [importlib.import_module(name) for name in MODULES if name.startswith("bunkbed.testing")]
    assert sum(len(test.examples) for module in modules for test in finder.find(module)) >= 3
