"""The security page: its tests are there, and what no other file tests."""

from __future__ import annotations

import io
import os
import pickle
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import bunkbed as bb

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/security.md").read_text()
TABLE = {"dim": 2, "num_rows": 10}


def test_every_line_of_the_tables_names_a_test_that_is_there() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.endswith("| test |")]
    assert len(lines) >= 20
    for line in lines:
        named = re.findall(r"`(tests/[\w./]+)::(\w+)`", line)
        assert named, line
        for file, name in named:
            assert (ROOT / file).exists(), line
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), line


class Code:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_code_in_dense_weights_does_not_run(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from bunkbed.train.models.dense import dense_state

    buffer = io.BytesIO()
    torch.save({"weights": Code(tmp_path / "ran"), "optimizer": None}, buffer)
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        dense_state(buffer.getvalue())
    assert not (tmp_path / "ran").exists()


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_files_and_folders_have_the_modes_of_the_umask(umask: int, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    with bb.Run(made / "run", ram="16MiB") as run:
        run.table("user", create=TABLE).update([1], np.ones((1, 2), np.float32))
        run.commit(files={"dense.pt": b"dense"})
    with bb.ShardedTable.create(made / "sharded", shards=2, ram="16MiB", **TABLE) as table:
        table.update([1], np.ones((1, 2), np.float32))
    bb.copy(made / "run", made / "copy", link=False)
    bb.copy(made / "sharded", made / "small", dtype="bfloat16", ram="32MiB")
    with bb.open(made / "sharded", mode="r", ram="16MiB") as table:
        bb.export_rows(table, made / "rows.npy")
    found = sorted(made.rglob("*"))
    assert len(found) > 30
    for path in found:
        wanted = (0o777 if path.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
