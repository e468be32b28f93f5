"""Files of changes, by ``bunkbed changes`` and by `bunkbed.feed.delta_file`."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.cli.main import main
from bunkbed.feed.delta_file import write_delta
from bunkbed.files.sharding import shards_of

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as parquet


@pytest.fixture
def table(tmp_path: Path) -> Any:
    with bb.create(tmp_path / "t", dim=2, optimizer=bb.SGD(lr=1.0), init=bb.Zeros()) as table:
        table.update([1, 2, 3], np.ones((3, 2), np.float32))
        table.commit()
        yield table


def read(path: Path) -> dict[int, list[float] | None]:
    if path.suffix == ".parquet":
        found = parquet.read_table(path)
    else:
        with pa.ipc.open_file(str(path)) as file:
            found = file.read_all()
    return dict(zip(found["id"].to_pylist(), found["weight"].to_pylist(), strict=True))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_file_of_the_changes_since_a_commit(
    table: bb.Table, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = table.epoch
    table.update([3, 4], np.ones((2, 2), np.float32))
    table.delete([1])
    second = table.commit()
    out = tmp_path / f"delta{suffix}"
    code, shown, _ = run(capsys, "changes", tmp_path / "t", "--since", first, "--out", out, "--json")
    assert code == 0 and json.loads(shown) == {
        "path": str(tmp_path / "t"),
        "file": str(out),
        "since": first,
        "version": second,
        "rows": 2,
        "deleted": 1,
    }
    assert read(out) == {3: [-2.0, -2.0], 4: [-1.0, -1.0], 1: None}
    code, _, error = run(capsys, "changes", tmp_path / "t", "--since", first, "--out", out)
    assert code == 1 and "exists already and is as it was" in error


def test_a_folder_gets_a_file_for_each_call_that_finds_changes(
    table: bb.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("changes", tmp_path / "t", "--since", "nightly", "--out", tmp_path / "out")
    rows: dict[int, Any] = {}
    for number in range(4):
        table.update([number], np.ones((1, 2), np.float32))
        table.delete([number + 99] if number == 0 else [number - 1])
        table.commit()
        assert run(capsys, *command)[0] == 0
    assert "nothing changed since commit" in run(capsys, *command)[1]
    at = 0
    for path in sorted((tmp_path / "out").iterdir()):
        _, since, version = path.stem.split("-")
        assert int(since) == at
        at = int(version)
        rows |= read(path)
    assert at == table.epoch
    assert {row: weights for row, weights in rows.items() if weights is not None} == {3: [-2.0, -2.0]}
    shown = run(capsys, "info", tmp_path / "t")[1]
    assert f"nightly (commit {at})" in shown and "deleted rows" in shown
    assert json.loads(run(capsys, "info", tmp_path / "t", "--json")[1])["cursors"] == {"nightly": at}
    assert "nightly  commit" in run(capsys, "changes", tmp_path / "t", "--cursors")[1]
    assert "dropped cursor nightly" in run(capsys, "changes", tmp_path / "t", "--drop-cursor", "nightly")[1]
    assert "has no cursors" in run(capsys, "changes", tmp_path / "t", "--cursors")[1]


def test_a_file_whose_cursor_did_not_move_is_not_written_again(
    table: bb.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("changes", tmp_path / "t", "--since", "c", "--out", tmp_path / "out")

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bb.Changes, "acknowledge", dies)
        assert run(capsys, *command)[0] == 130
    (written,) = (tmp_path / "out").iterdir()
    table.update([9], np.ones((1, 2), np.float32))
    table.commit()
    assert run(capsys, *command)[0] == 0
    first, second = sorted((tmp_path / "out").iterdir())
    assert first == written and sorted(read(first)) == [1, 2, 3] and sorted(read(second)) == [9]


def test_a_folder_belongs_to_one_table_and_cursor(
    table: bb.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with bb.create(tmp_path / "other", dim=2) as other:
        other.update([1], np.ones((1, 2), np.float32))
    assert run(capsys, "changes", tmp_path / "t", "--since", "c", "--out", tmp_path / "out")[0] == 0
    for path, cursor in ((tmp_path / "other", "c"), (tmp_path / "t", "d")):
        code, _, error = run(capsys, "changes", path, "--since", cursor, "--out", tmp_path / "out")
        assert code == 1 and "give each table and cursor a folder of its own" in " ".join(error.split())
        assert run(capsys, "changes", path, "--since", cursor, "--out", tmp_path / f"out-{cursor}")[0] == 0
    assert bb.cursors(tmp_path / "t").keys() == {"c", "d"} and bb.cursors(tmp_path / "other").keys() == {"c"}


def test_a_folder_has_no_gap(table: bb.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("changes", tmp_path / "t", "--since", "c", "--out", tmp_path / "out")
    assert run(capsys, *command)[0] == 0
    table.update([9], np.ones((1, 2), np.float32))
    table.commit()
    list(bb.changes(tmp_path / "t", "c"))  # another consumer with the same cursor
    table.update([10], np.ones((1, 2), np.float32))
    table.commit()
    code, _, error = run(capsys, *command)
    assert code == 1 and "another command moved it" in " ".join(error.split())
    bb.drop_cursor(tmp_path / "t", "c")
    code, _, error = run(capsys, *command)
    assert code == 1 and "empty the folder" in " ".join(error.split())
    (old,) = (tmp_path / "out").iterdir()
    old.unlink()
    assert run(capsys, *command)[0] == 0
    (new,) = (tmp_path / "out").iterdir()
    assert sorted(read(new)) == [1, 2, 3, 9, 10]


def test_one_command_at_a_time_writes_into_a_folder(
    table: bb.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".changes-000000000000000-000000000000001.parquet.7.part").write_bytes(b"killed")
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    command = ("changes", tmp_path / "t", "--since", "c", "--out", tmp_path / "out")
    code, _, error = run(capsys, *command)
    assert code == 1 and "another command writes changes into it" in " ".join(error.split())
    assert bb.cursors(tmp_path / "t") == {}
    os.close(descriptor)
    assert run(capsys, *command)[0] == 0
    assert len(list((tmp_path / "out").iterdir())) == 1


def test_a_failed_file_leaves_nothing(table: bb.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(parquet.ParquetWriter, "write_batch", fails)
    with pytest.raises(OSError, match="no space"):
        write_delta(bb.changes(tmp_path / "t", "c"), tmp_path / "d.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t"]
    assert bb.cursors(tmp_path / "t") == {"c": 0}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ((), "give --out"),
        (("--out", "x"), "a folder needs a cursor"),
        (("--since", "c", "--out", "x.csv"), "a file must end in .parquet or .arrow"),
        (("--cursors", "--out", "x.parquet"), "go alone"),
        (("--since", "99", "--out", "x.parquet"), "commit 99 is in the future"),
        (("--since", "a b", "--out", "x.parquet"), "the name of a cursor"),
        (("--drop-cursor", "x"), "has no cursor 'x'"),
    ],
)
def test_bad_options(
    table: bb.Table, tmp_path: Path, options: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run(capsys, "changes", tmp_path / "t", *options)
    assert code != 0 and why in " ".join(error.split())
    assert not list(tmp_path.glob("*.parquet"))


def test_a_file_of_shards_whose_cursors_moved_in_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command dies between the cursors of two shards."""
    command = ("changes", tmp_path / "r", "--table", "t", "--since", "c", "--out", tmp_path / "out")
    with bb.Run(tmp_path / "r") as run_:
        table = run_.table("t", create={"dim": 2, "shards": 2, "optimizer": bb.SGD(lr=1.0), "init": bb.Zeros()})
        one = int(np.flatnonzero(shards_of(np.arange(100), 2) == 1)[0])
        for _ in range(4):
            table.update([one], np.ones((1, 2), np.float32))
            run_.commit()
        bb.changes(tmp_path / "r", "c")  # the cursor exists from here on
        new = [path.read_bytes() for path in sorted((tmp_path / "r").rglob("cursor-c"))]
        assert run(capsys, *command)[0] == 0
        first, second = sorted((tmp_path / "r" / "tables").rglob("cursor-c"))
        second.write_bytes(new[1])
        (tmp_path / "r" / "cursor-c.t").write_text("0\n")
        table.update([one], np.ones((1, 2), np.float32))
        run_.commit()
        assert first.exists() and run(capsys, *command)[0] == 0
    assert [sorted(read(path)) for path in sorted((tmp_path / "out").iterdir())] == [[one], [one]]
