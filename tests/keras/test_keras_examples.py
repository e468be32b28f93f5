"""The scripts of examples/keras run as they stand, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("keras", reason="keras is not installed")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "keras"

#: What each must print.
SAYS = {
    "bfloat16_rows": r"float32, Adam as compiled: loss 0\.0\d+, 768 bytes a row\n.*384 bytes a row\n.*13\d bytes a row",
    "gmf_movielens": r"val_ndcg: 0\.\d+",
    "large_table": r"19,\d{3} rows of 0\.02 GB stored, \d+ MiB of RAM\nloss .*; loaded model agrees: True",
    "lazy_table": r"1,000 rows stored of 2\^63 possible; accuracy 1\.00\n.*\nand is not stored: False",
    "migrate": r"taken over: True\ngiven back: True",
    "mirrored": r"120 updates\nnumbers in mirrored variables: \d+; keras.layers.Embedding would mirror 6,400,000",
    "multi_worker": r"loss \d\.\d+ -> 0\.\d+, 60 updates\nusers of each worker: \d{3} in shard-0000-of-0002, "
    r"\d{3} in shard-0001-of-0002\nitems of both workers are the same bits: True",
    "prefetch": r"[\d,]{5,} rows were read ahead of their batch",
}


def test_every_example_is_known() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SAYS)
    assert all(f"`{name}.py`" in (FOLDER / "README.md").read_text() for name in SAYS)


@pytest.mark.parametrize("name", sorted(SAYS))
def test_example(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py")],
        capture_output=True, text=True, cwd=tmp_path, timeout=200,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(SAYS[name], done.stdout), done.stdout[-2000:]
    assert "UncommittedWarning" not in done.stderr
