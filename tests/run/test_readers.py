"""What a reader of a run or a sharded table meets when the writer collects the commit that it looks at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed import _native
from bunkbed.files.run_files import RunFiles

FACTS: dict[str, Any] = {"dim": 2, "num_rows": 10, "init": bb.Zeros()}


def make_run(path: Path) -> Callable[[], None]:
    """A run with one commit; what is returned makes so many more that the first is collected."""
    run = bb.Run(path, ram="16MiB")
    table = run.table("user", create=FACTS)

    def commit() -> None:
        table.update(np.array([1]), np.ones((1, 2), np.float32))
        run.commit(files={"dense": b"weights"})

    commit()
    return lambda: [commit() for _ in range(4)] and None


@pytest.mark.parametrize("call", ["load_newest", "snapshots"])
def test_a_commit_that_is_collected_after_it_was_listed(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_more = make_run(tmp_path)
    listed = RunFiles.epochs
    is_first = True

    def list_and_commit(files: RunFiles) -> list[int]:
        nonlocal is_first
        epochs = listed(files)
        if is_first:
            is_first = False
            commit_more()
        return epochs

    monkeypatch.setattr(RunFiles, "epochs", list_and_commit)
    found = getattr(RunFiles(tmp_path), call)()
    assert found == {} if call == "snapshots" else found.epoch == 5


def test_a_collected_commit_is_not_called_damaged(tmp_path: Path) -> None:
    commit_more = make_run(tmp_path)
    with bb.Run(tmp_path, mode="r", ram="16MiB") as run:
        commit_more()
        with pytest.raises(FileNotFoundError, match="commit 1 was collected by its writer meanwhile; call refresh"):
            run.read("dense")
        with pytest.raises(FileNotFoundError, match="commit 1 was collected by its writer meanwhile"):
            run.table("user")
    place = str(tmp_path / "tables/user")
    with pytest.raises(FileNotFoundError, match="manifest-0000000000000001"):  # past the first look at the manifest
        _native.open(place, "user", False, 16 << 20, "", 1, False, 0)


@pytest.mark.parametrize("suffix", [".safetensors", ".vec"])
def test_an_export_whose_rows_changed_after_they_were_counted_is_refused(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = bb.Table.scan_slots
    with bb.create(None, **FACTS) as table:
        table.set(np.array([1, 3]), np.ones((2, 2), np.float32))

        def change_and_scan(table: bb.Table, *arguments: Any) -> Any:
            table.set(np.array([5]), np.ones((1, 2), np.float32))
            return scan(table, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(bb.Table, "scan_slots", change_and_scan)
            with pytest.raises(bb.BunkbedError, match=r"was changed while it was exported: .* says 2 rows and got 3"):
                bb.export_rows(table, tmp_path / f"rows{suffix}")
        assert list(tmp_path.iterdir()) == []
        assert bb.export_rows(table, tmp_path / f"rows{suffix}") == 3
