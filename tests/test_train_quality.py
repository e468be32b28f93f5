"""The quality measurement, tiny, and the recipes it runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bunkbed.train.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", ["gowalla", "ml1m"])
def test_quality_runs_tiny(name, tmp_path):
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.quality", name, "--tiny", "--dir", str(tmp_path / "space")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "machine: " in done.stdout
    assert "full ranking of 300 items" in done.stdout
    assert "rows and optimizer state identical to the last bit: True" in done.stdout
    assert "steps identical to the last bit: True" in done.stdout
    assert not (tmp_path / "space").exists(), "temporary files stayed behind"


def test_recipes_are_options_like_any_other():
    for recipe in RECIPES.values():
        assert type(recipe).from_dict(recipe.to_dict()) == recipe
