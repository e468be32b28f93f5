"""Symbolic links in a folder: nothing is written, emptied or removed through one."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.train.output.progress import MetricsLog
from bunkbed.train.settings.config import TrainConfig
from bunkbed.train.settings.run_config import read_config, write_config

TABLE: dict[str, Any] = {"dim": 2, "num_rows": 10, "init": bb.Zeros(), "optimizer": bb.SGD(lr=1.0)}
#: What a run, a split and an export write or remove by name, in the folder that a link leads to.
THEIRS = ["thesis.txt", "file-0000000000000009", "epoch-9", "rows", "sorting"]


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    folder = tmp_path / "canary"
    folder.mkdir()
    for name in THEIRS:
        (folder / name).write_text(f"five years of {name}")
    return folder


def assert_untouched(canary: Path) -> None:
    assert {entry.name: entry.read_text() for entry in canary.iterdir()} == {
        name: f"five years of {name}" for name in THEIRS
    }


def make_run(path: Path) -> Path:
    with bb.Run(path, ram="16MiB") as run:
        run.table("user", create=TABLE).update(np.array([1]), np.ones((1, 2), np.float32))
        run.commit(files={"dense.pt": b"dense"}, keep="a")
    return path


def write_run(path: Path) -> None:
    with bb.Run(path, ram="16MiB") as run:
        run.commit(files={"dense.pt": b"other"})


RUN_CALLS: dict[str, Callable[[Path, Path], object]] = {
    "Run": lambda path, _: write_run(path),
    "repair": lambda path, _: bb.check(path, repair=True),
    "drop_snapshot": lambda path, _: bb.drop_snapshot(path, "a"),
    "copy into": lambda path, work: bb.copy(make_run(work / "source"), path),
}


@pytest.mark.parametrize("call", RUN_CALLS)
@pytest.mark.parametrize("place", ["lock", "files", "tables"])
def test_a_run_with_a_link_in_place_of_its_own_is_refused(tmp_path: Path, canary: Path, place: str, call: str) -> None:
    path = make_run(tmp_path / "run")
    if place == "lock":
        (path / place).unlink()
    else:
        shutil.rmtree(path / place)
    (path / place).symlink_to(canary / "thesis.txt" if place == "lock" else canary)
    with pytest.raises(bb.FormatError, match=rf"run/{place} is a symbolic link"):
        RUN_CALLS[call](path, tmp_path)
    assert_untouched(canary)


def test_a_table_whose_lock_is_a_link_is_refused(tmp_path: Path, canary: Path) -> None:
    path = tmp_path / "table"
    bb.create(path, ram="16MiB", **TABLE).close()
    (path / "lock").unlink()
    (path / "lock").symlink_to(canary / "thesis.txt")
    for call in (bb.open, lambda path: bb.check(path, repair=True)):
        with pytest.raises(OSError, match="symbolic links"):
            call(path)
    assert_untouched(canary)


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json.tmp"])
def test_files_of_a_training_run_take_the_place_of_links(tmp_path: Path, canary: Path, name: str) -> None:
    (tmp_path / name).symlink_to(canary / "thesis.txt")
    if name == "metrics.jsonl":
        with contextlib.suppress(OSError):  # what it leads to is not read either
            MetricsLog(tmp_path / name, global_step=0, epoch=0).close()
    else:
        write_config(tmp_path, {"train": {}})
        assert read_config(tmp_path) == {"train": {}}
    assert_untouched(canary)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
def test_a_pipe_in_a_training_run_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(bb.FormatError, match=f"{name} is not a regular file"):
        if name == "config.json":
            read_config(tmp_path)
        else:
            MetricsLog(tmp_path / name, global_step=0, epoch=0)


def test_a_training_run_whose_data_is_a_link_is_not_written(tmp_path: Path, canary: Path) -> None:
    pytest.importorskip("duckdb")
    from bunkbed.train.data.interactions import read_dataset
    from bunkbed.train.data.prepare import prepare_dataset
    from bunkbed.train.data.store import save_dataset
    from bunkbed.train.data.stream import StoredOrder, open_split

    source = tmp_path / "pairs.csv"
    source.write_text("user,item\n" + "".join(f"{user},{item}\n" for user in range(9) for item in range(user + 2)))
    data = read_dataset(source)
    config = TrainConfig(ram="64MiB", valid="none")
    link = tmp_path / "data"
    link.symlink_to(canary)
    for write in (
        lambda: prepare_dataset(link, source, ram_bytes=64 << 20),
        lambda: save_dataset(link, data),
        lambda: open_split(data.train, config, link),
    ):
        with pytest.raises(bb.FormatError, match="data is a symbolic link"):
            write()
    assert_untouched(canary)
    # A folder of its own with links in it.
    real = tmp_path / "real"
    real.mkdir()
    for name in ("epoch-0.making", "users.tmp", "dataset.json.tmp"):
        (real / name).symlink_to(canary / "thesis.txt")
    save_dataset(real, data)
    StoredOrder(data.train, real, config).pairs(0, 0, 3)
    assert_untouched(canary)


@pytest.mark.parametrize("call", ["export", "vocabulary", "copy", "other files"])
def test_unfinished_files_that_are_links_are_not_written_through(tmp_path: Path, canary: Path, call: str) -> None:
    from bunkbed.io.common.naming import write_vocabulary

    path = tmp_path / "table"
    with bb.create(path, ram="16MiB", **TABLE) as table:
        table.update(np.array([1]), np.ones((1, 2), np.float32))
        table.commit()
        if call == "export":
            (tmp_path / ".rows.npy.part").symlink_to(canary)
            with pytest.raises(OSError, match=r"rows\.npy\.part"):
                bb.export_rows(table, tmp_path / "rows.npy")
        elif call == "vocabulary":
            (tmp_path / ".words.txt.part").symlink_to(canary / "thesis.txt")
            write_vocabulary(tmp_path / "words.txt", ["a", "b"])
            assert (tmp_path / "words.txt").read_text() == "a\nb\n"
        elif call == "copy":
            (tmp_path / ".small.part").symlink_to(canary)
            with pytest.raises(bb.FormatError, match=r"\.small\.part is a symbolic link"):
                bb.copy(path, tmp_path / "small", dtype="bfloat16")
        else:
            run = make_run(tmp_path / "run")
            (run / "notes").mkdir()
            (run / "notes" / "thesis.txt").write_text("mine")
            (run / "config.json").write_text("{}")
            target = tmp_path / "copy"
            bb.copy(run, target)
            shutil.rmtree(target / "notes")
            (target / "notes").symlink_to(canary)
            (target / ".config.json.part").symlink_to(canary / "rows")
            (run / "config.json").write_text("{ }")
            with pytest.raises(bb.FormatError, match="copy/notes is a symbolic link"):
                bb.copy(run, target)
    assert_untouched(canary)


def test_pictures_and_reports_are_not_written_through_links(tmp_path: Path, canary: Path) -> None:
    pytest.importorskip("matplotlib")
    from bunkbed.train.output.plots import plot_run

    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / ".training.png").symlink_to(canary / "thesis.txt")
    with contextlib.suppress(ValueError, FileNotFoundError):
        plot_run(tmp_path)
    assert_untouched(canary)
