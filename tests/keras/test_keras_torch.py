"""`bunkbed.keras` on Keras's torch backend, and on none it knows; see keras_torch_cases.py for the cases."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("keras", reason="keras is not installed")

CASES = Path(__file__).parents[1] / "support" / "keras_torch_cases.py"
NAMES = [node.name for node in ast.parse(CASES.read_text()).body if isinstance(node, ast.FunctionDef)]
HELPERS = {"batches", "row_model", "fit", "reference", "check", "run", "run_in_a_fork"}
NEEDS_TENSORFLOW = "a_model_saved_on_tensorflow_goes_on"


def run(*arguments: object, backend: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


ON_TORCH = sorted(set(NAMES) - HELPERS - {NEEDS_TENSORFLOW})


def run_cases(folder: Path, *cases: str) -> dict[str, int]:
    """Exit status by case; what a case printed is in ``folder/case/log``."""
    done = run(CASES, folder, *cases, backend="torch")
    assert done.returncode == 0, done.stderr[-4000:]
    return {case: int(status) for case, status in (line.split() for line in done.stdout.splitlines())}


@pytest.fixture(scope="module")
def statuses(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    folder = tmp_path_factory.mktemp("cases")
    return folder, run_cases(folder, *ON_TORCH)


@pytest.mark.parametrize("case", ON_TORCH)
def test_on_torch(case: str, statuses: tuple[Path, dict[str, int]]) -> None:
    folder, status_of = statuses
    assert status_of[case] == 0, (folder / case / "log").read_text()[-4000:]


def test_a_model_saved_on_tensorflow_goes_on_on_torch(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow", reason="tensorflow is not installed")
    folder = tmp_path / NEEDS_TENSORFLOW
    folder.mkdir()
    script = """
        import sys, numpy as np, keras
        from bunkbed.keras import Embedding
        layer = Embedding(50, 4, seed=3, path=sys.argv[1] + "/user", name="rows")
        ids = keras.Input((), dtype="int64")
        model = keras.Model(ids, layer(ids))
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model.fit(np.arange(64) % 50, np.ones((64, 4), np.float32), batch_size=16, verbose=0)
        model.save(sys.argv[1] + "/m.keras")
        np.save(sys.argv[1] + "/rows.npy", layer.table.get(np.arange(50)))
        layer.table.close()
    """
    done = run("-c", textwrap.dedent(script), folder, backend="tensorflow")
    assert done.returncode == 0, done.stderr[-4000:]
    status_of = run_cases(tmp_path, NEEDS_TENSORFLOW)
    assert status_of == {NEEDS_TENSORFLOW: 0}, (folder / "log").read_text()[-4000:]


def test_another_backend_is_refused() -> None:
    script = "import keras; keras.backend.backend = lambda: 'jax'; import bunkbed.keras"
    done = run("-c", script, backend="torch")
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == (
        "ImportError: bunkbed.keras works on Keras's TensorFlow and torch backends, and this process uses 'jax'; set "
        "KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before importing keras"
    )
