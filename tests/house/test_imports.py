"""``import bunkbed`` needs NumPy and nothing else: no framework is imported, or even present."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

BLOCKED = (
    "torch", "tensorflow", "keras", "pyarrow", "matplotlib", "safetensors", "lightning", "yaml", "pytest",
    "jinja2", "tensorboard",
)  # fmt: skip


def run_without(blocked: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh interpreter in which importing any of `blocked` raises."""
    prelude = f"""
        import sys

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {blocked!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)

        sys.meta_path.insert(0, Blocker())
    """
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(prelude) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
    )


def test_the_block_blocks() -> None:
    done = run_without(("numpy",), "import bunkbed")
    assert done.returncode != 0 and "blocked" in done.stderr


def test_import_works_without_any_framework() -> None:
    done = run_without(
        BLOCKED,
        f"""
        import numpy as np
        import bunkbed as bb
        from bunkbed.testing import ReferenceTable

        table = bb.create(None, dim=4, num_rows=10, optimizer=bb.SGD(lr=1.0), init=bb.Zeros())
        table.update(np.array([3, 3]), np.ones((2, 4), np.float32))
        assert table.lookup([3]).tolist() == [[-2.0] * 4], table.lookup([3])
        assert not set({BLOCKED!r}) & set(sys.modules)
        """,
    )
    assert done.returncode == 0, done.stderr


def test_import_imports_no_framework_that_is_there() -> None:
    done = run_without((), f"import bunkbed; found = set({BLOCKED!r}) & set(sys.modules); assert not found, found")
    assert done.returncode == 0, done.stderr


def test_torch_adapter_without_torch_says_what_to_install() -> None:
    done = run_without(("torch",), "import bunkbed.torch")
    assert done.returncode != 0
    assert 'bunkbed.torch needs PyTorch; install it with: pip install "bunkbed[torch]"' in done.stderr


@pytest.mark.parametrize(("missing", "least"), [("tensorflow", "tensorflow 2.16"), ("keras", "keras 3.15")])
def test_keras_adapter_without_its_frameworks_says_what_to_install(missing: str, least: str) -> None:
    done = run_without((missing,), "import bunkbed.keras")
    assert done.returncode != 0
    assert f'bunkbed.keras needs {least} or newer: pip install "bunkbed[keras]"' in done.stderr


def test_keras_adapter_with_an_old_framework_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "keras.py").write_text('__version__ = "2.15.0"\n')
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import bunkbed.keras"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        'bunkbed.keras needs keras 3.15 or newer, and 2.15.0 is installed: pip install "bunkbed[keras]"' in done.stderr
    )


def test_the_command_line_starts_without_frameworks() -> None:
    done = run_without(
        BLOCKED,
        """
        from bunkbed.cli import main

        sys.argv = ["bunkbed", "--help"]
        main()
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


def test_testing_needs_pytest_only_for_the_suite() -> None:
    done = run_without(
        ("pytest",), "from bunkbed.testing import ReferenceTable; import bunkbed.testing as t; t.TableTests"
    )
    assert done.returncode != 0 and "pytest" in done.stderr.splitlines()[-1]


def test_public_names() -> None:
    import bunkbed as bb

    errors = {"BunkbedError", "FormatError", "CorruptionError", "ReadOnlyError"}
    errors |= {"TableLockedError", "TableClosedError"}
    classes = {
        "Table",
        "Run",
        "ShardedTable",
        "Budget",
        "SGD",
        "Adagrad",
        "RowwiseAdagrad",
        "Adam",
        "Zeros",
        "Normal",
        "Uniform",
    }
    functions = {"create", "open", "snapshots", "check", "import_rows", "export_rows"}
    threads = {"set_num_threads", "get_num_threads"}
    for name in sorted(errors | classes | functions | threads):
        assert hasattr(bb, name), f"bunkbed.{name} is missing"
    for name in errors:
        assert issubclass(getattr(bb, name), bb.BunkbedError)


@pytest.mark.parametrize("name", ["csrc"])
def test_the_core_knows_no_framework(name: str) -> None:
    folder = Path(__file__).resolve().parents[2] / name
    if not folder.is_dir():
        pytest.skip("sources are not here")
    for path in folder.rglob("*"):
        if path.suffix not in (".cc", ".h"):
            continue
        text = path.read_text()
        for framework in ("<torch/", "<ATen/", "tensorflow/"):
            assert framework not in text, f"{path} includes {framework}"
        if "bindings" not in path.parts:
            for word in ("Python.h", "nanobind", "pybind11"):
                assert word not in text, f"{path} knows Python: {word}"
