"""`bb.reshard` of a run: every kept commit has the same bits, and a kill at any time leaves a whole run."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed import _native
from bunkbed.maintenance import resharding

ROWS = 300
EVERY = np.arange(ROWS)
OPTIMIZERS = {"user": bb.Adam(lr=0.1), "item": bb.Adagrad(lr=0.1)}


def _create(name: str, **more: Any) -> dict[str, Any]:
    return {"dim": 4, "num_rows": ROWS, "seed": len(name), "optimizer": OPTIMIZERS[name], **more}


def _train(run: bb.Run, steps: int) -> None:
    for table in run.tables.values():
        for _ in range(steps):
            rng = np.random.default_rng(table.step)
            ids = rng.integers(0, ROWS, 60)
            table.update(ids, rng.standard_normal((60, table.dim), np.float32))


def _made(place: Path) -> None:
    """A run with kept commits before its last one, one sharded table and one that is not, and files of others."""
    with bb.Run(place, ram="64MiB") as run:
        run.table("user", create=_create("user"))
        _train(run, 2)
        run.commit(files={"dense": b"two"}, meta={"step": 2}, keep="two")
        run.table("item", create=_create("item", shards=2))
        _train(run, 2)
        run.commit(files={"dense": b"four", "more": b"?"}, meta={"step": 4}, keep="four")
        _train(run, 1)
        run.commit(files={"dense": b"five", "late": b"!"}, meta={"step": 5}, keep="last")
    (place / "data" / "deep").mkdir(parents=True)
    (place / "data" / "deep" / "pairs").write_bytes(b"pairs")
    (place / "config.json").write_text("{}")
    (place / "link").symlink_to("config.json")


def _go_back(place: Path, more_steps: int = 0) -> None:
    """Make "four" the newest commit, which has fewer steps and a file less than "last"; train on, and commit."""
    with bb.Run(place, ram="64MiB") as run:
        for name in OPTIMIZERS:
            run.table(name)
        run.rewind("four")
        _train(run, more_steps)


def _state(place: Path, snapshot: str | None) -> dict[str, Any]:
    with bb.Run(place, ram="64MiB", mode="r", snapshot=snapshot) as run:
        found: dict[str, Any] = {"run": (run.epoch, run.meta, {name: run.read(name) for name in run.files})}
        for name in run.table_names:
            table = run.table(name)
            assert table.num_rows == ROWS
            found[name] = table.uuid, table.step, table.optimizer, table.init, table.seed, len(table)
            for slot in ("weight", *table.slots):
                parts = [(ids.copy(), values.copy()) for ids, (values,) in table.scan_slots((slot,), 64)]
                ids, values = (np.concatenate(column) for column in zip(*parts, strict=True))
                found[f"{name} {slot}"] = ids[np.argsort(ids)].tobytes(), values[np.argsort(ids)].tobytes()
        return found


def _states(place: Path) -> dict[Any, Any]:
    with bb.Run(place, ram="64MiB", mode="r") as run:
        kept = run.snapshots()
    return {"kept": kept, **{name: _state(place, name) for name in (None, *kept)}}


def _shards(place: Path) -> set[int]:
    with bb.Run(place, ram="64MiB", mode="r") as run:
        return {getattr(run.table(name), "num_shards", 0) for name in run.table_names}


def test_every_kept_commit_of_a_run_has_the_same_bits(tmp_path: Path) -> None:
    place, plain = tmp_path / "run", tmp_path / "plain"
    _made(place)
    _made(plain)
    before = _states(place)
    assert before["kept"] == {"two": 1, "four": 2, "last": 3}
    seen: list[tuple[int, int]] = []
    for shards, fewest in ((4, 0), (3, 4), (1, 3), (2, 1)):
        done = bb.reshard(place, shards=shards, ram="128MiB", progress=lambda *at: seen.append(at))
        commits = [before[name] for name in ("two", "four", "last")]
        rows = sum(commit[name][5] for commit in commits for name in OPTIMIZERS if name in commit)
        assert done == resharding.Resharded(3, shards, fewest, rows)
        assert not bb.check(place) and _states(place) == before and _shards(place) == {shards}
        assert (place / "data" / "deep" / "pairs").read_bytes() == b"pairs" and (place / "link").read_text() == "{}"
        assert (place / "link").is_symlink() and sorted(tmp_path.iterdir()) == [plain, place]
    assert seen and all(0 < number <= total for number, total in seen)
    assert bb.reshard(place, shards=2).rows == 0
    for each in (place, plain):  # both go on with the same bits
        with bb.Run(each, ram="64MiB") as run:
            for name in OPTIMIZERS:
                run.table(name)
            _train(run, 2)
            run.commit(meta={"step": 7})
            run.rewind("four")
            _train(run, 1)
            run.commit()
    one, other = _state(place, None), _state(plain, None)
    for name in OPTIMIZERS:
        one.pop(name), other.pop(name)  # another uuid
    assert one == other


def test_what_a_snapshot_cannot_keep_is_told(tmp_path: Path) -> None:
    place = tmp_path / "run"
    _made(place)
    _go_back(place)
    before = _states(place)
    with pytest.raises(
        ValueError, match=r"'item' has 2 steps, fewer than before, in commit 4.*'two', 'four', 'last'.*--drop-snapshots"
    ):
        bb.reshard(place, shards=3, ram="128MiB")
    assert _states(place) == before and [each.name for each in tmp_path.iterdir()] == ["run"]
    assert bb.reshard(place, shards=3, ram="128MiB", drop_snapshots=True).epoch == 4
    assert _states(place) == {"kept": {}, None: before[None]}


def test_a_snapshot_with_rows_that_were_lost_cannot_be_kept(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with bb.Run(place, ram="64MiB") as run:
        table = run.table("user", create=_create("user"))
        run.commit(keep="none")
        table.set(EVERY[:9], np.ones((9, 4), np.float32))
        run.commit(keep="nine")
        run.rewind("none")
    with pytest.raises(ValueError, match=r"'user' has lost rows that it had before in commit 3.*'none', 'nine'"):
        bb.reshard(place, shards=2, ram="128MiB")
    assert bb.reshard(place, shards=2, ram="128MiB", drop_snapshots=True).rows == 0 and _shards(place) == {2}


def test_commits_after_the_run_went_back_are_kept(tmp_path: Path) -> None:
    place = tmp_path / "run"
    _made(place)
    _go_back(place, more_steps=3)
    before = _states(place)
    assert "late" in before["last"]["run"][2] and "late" not in before[None]["run"][2]
    assert bb.reshard(place, shards=3, ram="128MiB").epoch == 5
    assert _states(place) == before and not bb.check(place)


def test_bad_input_changes_nothing(tmp_path: Path) -> None:
    place = tmp_path / "run"
    _made(place)
    before = _states(place)
    with bb.Run(place, ram="64MiB"), pytest.raises(bb.TableLockedError, match="is being written by process"):
        bb.reshard(place, shards=3)
    with pytest.raises(bb.FormatError, match="give the folder of the run"):
        bb.reshard(place / "tables" / "user", shards=3)
    with pytest.raises(MemoryError, match="too small"):
        bb.reshard(place, shards=3, ram="1MiB")
    _native.arm_failpoint("run.published", 4, "error")
    with pytest.raises(OSError, match="injected"):
        bb.reshard(place, shards=3, ram="128MiB")
    _native.disarm_failpoints()
    segment = max(place.glob("tables/user/segment-*"), key=lambda file: file.stat().st_size)
    data = segment.read_bytes()
    segment.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 255]) + data[len(data) // 2 + 1 :])
    with pytest.raises(bb.CorruptionError):
        bb.reshard(place, shards=3, ram="128MiB")
    segment.write_bytes(data)
    manifest = place / "run-0000000000000001"
    data = manifest.read_bytes()
    manifest.write_bytes(data.replace(b"two", b"too"))
    with pytest.raises(bb.CorruptionError, match="run-0000000000000001 fails its checksum"):
        bb.reshard(place, shards=3, ram="128MiB")
    manifest.write_bytes(data)
    assert _states(place) == before and [each.name for each in tmp_path.iterdir()] == ["run"]


def test_a_kill_at_any_time_leaves_a_whole_run(tmp_path: Path) -> None:
    place = tmp_path / "run"
    _made(place)
    before = _states(place)
    code = f"""
import itertools
import bunkbed as bb
print("ready", flush=True)
for shards in itertools.cycle((3, 4, 2)):
    bb.reshard({str(place)!r}, shards=shards, ram="128MiB")
"""
    moments, found = random.Random(0), set()
    for _ in range(12):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
            assert other.stdout is not None and other.stdout.readline() == b"ready\n"
            time.sleep(moments.uniform(0, 0.6))
            other.send_signal(signal.SIGKILL)
        assert not bb.check(place) and _states(place) == before
        assert (place / "data" / "deep" / "pairs").read_bytes() == b"pairs"
        found |= _shards(place)
    assert found & {2, 3, 4}
    bb.reshard(place, shards=5, ram="128MiB")
    assert _states(place) == before and [each.name for each in tmp_path.iterdir()] == ["run"]
