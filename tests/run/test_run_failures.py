"""Runs whose files fail: what is refused, what goes on, and what a new opening finds."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

import bunkbed as bb
from bunkbed import _native

TABLE = {"dim": 4, "num_rows": 10, "init": bb.Zeros(), "optimizer": bb.SGD(lr=1.0)}


@pytest.fixture
def faulty():
    """A filesystem that can fail, under everything opened in the test."""
    vfs = _native.FaultVfs()
    vfs.count_reads(False)
    _native.use_vfs(vfs)
    yield vfs
    vfs.heal()
    _native.use_vfs(None)
    _native.disarm_failpoints()


def add_one(run: bb.Run, name: str = "user") -> None:
    run.table(name, create=TABLE).update(np.array([1]), np.full((1, 4), -1.0, np.float32))


def value(run: bb.Run, name: str = "user") -> float:
    return float(run.table(name).lookup(np.array([1]))[0, 0])


def test_a_manifest_that_may_not_be_durable_makes_the_run_read_only(faulty, tmp_path: Path) -> None:
    run = bb.Run(tmp_path / "run")
    add_one(run)
    run.commit()
    faulty.set_fault(0)
    add_one(run)
    run.commit()
    run.close()
    # Of all its operations one is the sync behind the link of the run's own manifest.
    unknown = 0
    for at in range(1, faulty.count() + 1):
        path = tmp_path / f"copy-{at}"
        run = bb.Run(path)
        add_one(run)
        run.commit()
        faulty.set_fault(at, "error", errno.EIO)
        add_one(run)
        with contextlib.suppress(OSError):
            run.commit()
        faulty.heal()
        if (path / "run-0000000000000002").exists() and run.epoch == 1:
            unknown += 1
            with pytest.raises(bb.ReadOnlyError, match=r"run .* is read-only until reopened: .*injected failure"):
                run.commit()
            run.close(commit=False)
            with bb.Run(path) as again:
                assert (again.epoch, value(again)) == (2, 2.0)
        run.close(commit=False)
    assert unknown == 1


def test_a_commit_does_not_fail_for_what_could_not_be_removed(faulty, tmp_path: Path) -> None:
    with bb.Run(tmp_path / "run") as run:
        for _ in range(3):
            add_one(run)
            run.commit(files={"dense.pt": b"x"})
        add_one(run)
        faulty.fail_all("remove", errno.EIO)
        faulty.set_fault(0)
        with pytest.raises(OSError, match="injected"):
            run.commit(files={"dense.pt": b"y"})  # a leftover of that number must go first
        faulty.heal()
        run.commit(files={"dense.pt": b"y"})
        assert run.epoch == 4
    with bb.Run(tmp_path / "run", mode="r") as run:
        assert (run.epoch, value(run), run.read("dense.pt")) == (4, 4.0, b"y")


def test_a_run_with_a_table_that_refuses_use_can_be_closed(faulty, tmp_path: Path) -> None:
    run = bb.Run(tmp_path / "run", ram="64MiB")
    for name in ("user", "item"):
        add_one(run, name)
    run.commit(keep="a")
    add_one(run)
    run.commit()
    _native.arm_failpoint("rewind.loaded", 1, "error")
    with pytest.raises(OSError, match=r"injected failure at rewind\.loaded"):
        run.rewind("a")
    _native.disarm_failpoints()
    with pytest.raises(bb.BunkbedError, match="refuses use until it is reopened"):
        add_one(run, run.table_names[0])
        add_one(run, run.table_names[1])
    run.close(commit=False)
    with bb.Run(tmp_path / "run") as again:
        assert (again.epoch, value(again)) == (2, 2.0)


@pytest.mark.parametrize(
    "left", [["files"], ["files", "tables"], ["lock"], ["files", "tables", "new-run-0000000000000001"]]
)
def test_a_run_whose_making_was_interrupted_can_be_begun(left: list[str], tmp_path: Path) -> None:
    for name in left:
        if name in ("files", "tables"):
            (tmp_path / "run" / name).mkdir(parents=True)
        else:
            (tmp_path / "run").mkdir(exist_ok=True)
            (tmp_path / "run" / name).write_bytes(b"")
    with bb.Run(tmp_path / "run") as run:
        add_one(run)
        assert run.commit() == 1


def test_a_damaged_old_manifest_does_not_keep_a_run_from_opening(tmp_path: Path) -> None:
    with bb.Run(tmp_path / "run") as run:
        for _ in range(3):
            add_one(run)
            run.commit()
    (tmp_path / "run" / "run-0000000000000002").write_bytes(b"damaged")
    with bb.Run(tmp_path / "run") as run:
        assert (run.epoch, value(run)) == (3, 3.0)
        add_one(run)
        assert run.commit() == 4
        # The files that the damaged manifest names are unknown: no file is removed.
        assert (tmp_path / "run" / "run-0000000000000003").exists()


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_manifest_is_not_waited_for(tmp_path: Path) -> None:
    with bb.Run(tmp_path / "run") as run:
        add_one(run)
        run.commit(files={"dense.pt": b"x"})
    (tmp_path / "run" / "files" / "file-0000000000000001").unlink()
    os.mkfifo(tmp_path / "run" / "files" / "file-0000000000000001")
    with bb.Run(tmp_path / "run") as run, pytest.raises(bb.FormatError, match="is not a regular file"):
        run.read("dense.pt")
    os.mkfifo(tmp_path / "run" / "run-0000000000000002")
    with pytest.raises(bb.FormatError, match="run-0000000000000002 is not a regular file"):
        bb.Run(tmp_path / "run")


@pytest.mark.parametrize(
    "body",
    [
        b"1",
        b"not json",
        b'{"bunkbed_run": 1}',
        b'{"bunkbed_run": 1, "meta": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"bunkbed_run": 1, "epoch": 2, "files": {}, "keep": "", "meta": {}, "next_file": 1, "tables": {"../x": 1}}',
        b'{"bunkbed_run": 1, "epoch": 2, "files": {}, "keep": "", "meta": {}, "next_file": 1, "tables": {"a": 1.5}}',
        b'{"bunkbed_run": 1, "epoch": 2, "files": {"a": [1]}, "keep": "", "meta": {}, "next_file": 1, "tables": {}}',
    ],
    ids=["number", "text", "empty", "deep", "path", "fraction", "file"],
)
def test_a_manifest_that_lies_under_a_sound_checksum_is_damage(body: bytes, tmp_path: Path) -> None:
    with bb.Run(tmp_path / "run") as run:
        add_one(run)
        run.commit()
    sealed = body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"
    (tmp_path / "run" / "run-0000000000000002").write_bytes(sealed)
    with pytest.raises(bb.CorruptionError, match=r"run-0000000000000002.*older commits remain: 1"):
        bb.Run(tmp_path / "run")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("failpoint", ["run.tables", "run.files"])
def test_what_a_failed_commit_held_is_in_the_next_one(background: bool, failpoint: str, tmp_path: Path) -> None:
    run = bb.Run(tmp_path / "run")
    add_one(run)
    run.commit(files={"dense.pt": b"old", "other": b"stays"}, meta={"step": 1})
    add_one(run)
    _native.arm_failpoint(failpoint, 1, "error")
    with pytest.raises(OSError, match="injected failure"):
        if background:
            run.begin_commit(files={"dense.pt": b"new"}, meta={"step": 2}).wait()
        else:
            run.commit(files={"dense.pt": b"new"}, meta={"step": 2})
    _native.disarm_failpoints()
    run.close()  # with the tables of step 2 go its files and its facts
    with bb.Run(tmp_path / "run") as again:
        assert value(again) == 2
        assert again.read("dense.pt") == b"new"
        assert again.read("other") == b"stays"
        assert again.meta == {"step": 2}
        again.commit(meta={"step": 3})
        assert again.read("dense.pt") == b"new"
