"""What tests of rows in and out share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.io.formats import format_of


def check_whole_or_not_at_all(table: bb.Table, tmp_path: Path, name: str) -> None:
    """An export that is interrupted, refused or done leaves what was there, or what it made, and nothing else."""
    format = format_of(tmp_path, name)
    target = tmp_path / "out" / f"rows{(*format.suffixes, '.any')[0]}"
    target.parent.mkdir()

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bb.export_rows(table, target, format=name, progress=stop)
    assert list(target.parent.iterdir()) == []
    bb.export_rows(table, target, format=name)
    before = {path: path.read_bytes() for path in sorted(target.parent.rglob("*")) if path.is_file()}
    assert before and not list(target.parent.glob(".*"))
    table.update([1], np.ones((1, table.dim), np.float32))
    with pytest.raises(FileExistsError, match=r"exists already and is as it was; .*overwrite=True \(--overwrite\)"):
        bb.export_rows(table, target, format=name)
    with pytest.raises(KeyboardInterrupt):
        bb.export_rows(table, target, format=name, progress=stop, overwrite=True)
    assert {path: path.read_bytes() for path in sorted(target.parent.rglob("*")) if path.is_file()} == before
    bb.export_rows(table, target, format=name, overwrite=True)
    after = {path: path.read_bytes() for path in sorted(target.parent.rglob("*")) if path.is_file()}
    assert after != before and set(after) == set(before)
