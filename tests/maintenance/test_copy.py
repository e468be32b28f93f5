"""`bb.copy`: equal bits, only what is new, all or nothing, and no copy into what went its own way."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed import _native

IDS = np.arange(4000)
Rows = dict[str, bytes]


def rows_of(table: bb.Table) -> Rows:
    found = {"step": str(table.step).encode(), "weight": table.lookup(IDS, touch=False).tobytes()}
    found["contains"] = table.contains(IDS).tobytes()
    return found | {slot: table.get(IDS, slot).tobytes() for slot in (table.slots if table.mode == "w" else ())}


def state(path: Path) -> Rows:
    with bb.open(path, ram="8MiB") as table:
        return rows_of(table)


def train(table: bb.Table, seed: int) -> None:
    random = np.random.default_rng(seed)
    ids = random.integers(0, 4000, 1500)
    table.update(ids, random.standard_normal((1500, table.dim)).astype(np.float32))


def tree(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file() and p.name != "lock"
    }


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, dict[int, Rows]]:
    """A table with commits 1 (kept as "one") and 2."""
    states = {}
    path = tmp_path / "src"
    with bb.create(path, dim=8, num_rows=4000, optimizer=bb.Adam(), ram="8MiB") as table:
        for epoch in (1, 2):
            train(table, epoch)
            table.commit(meta={"epoch": epoch}, keep="one" if epoch == 1 else None)
            states[epoch] = rows_of(table)
    return path, states


def go_on(path: Path, seed: int) -> Rows:
    with bb.open(path, ram="8MiB") as table:
        train(table, seed)
        table.commit()
        return rows_of(table)


def inodes(path: Path) -> dict[str, int]:
    return {p.name: p.stat().st_ino for p in path.glob("segment-*")}


@pytest.mark.parametrize("link", [True, False])
def test_a_copy_has_equal_bits_and_brings_only_what_is_new(
    stored: tuple[Path, dict[int, Rows]], tmp_path: Path, link: bool
) -> None:
    path, states = stored
    dst = tmp_path / "dst"
    first = bb.copy(path, dst, link=link)
    size = sum(p.stat().st_size for p in dst.glob("segment-*"))
    assert first.epoch == 2 and first.present_bytes == 0
    assert (first.linked_bytes, first.copied_bytes) == ((size, 0) if link else (0, size))
    shared = set(inodes(path).values()) & set(inodes(dst).values())
    assert len(shared) == (len(inodes(dst)) if link else 0)
    assert bb.check(dst) == []
    with bb.open(dst, mode="r", ram="8MiB") as reader:
        assert reader.lookup(IDS).tobytes() == states[2]["weight"] and reader.meta == {"epoch": 2}

    latest = go_on(path, 3)
    second = bb.copy(path, dst, link=link)
    assert second.epoch == 3 and second.present_bytes > 0
    assert second.linked_bytes + second.copied_bytes + second.present_bytes == sum(
        size for size in _native.commits(str(dst))[-1]["segments"].values()
    )
    new = second.linked_bytes + second.copied_bytes
    assert 0 < new < size + new and new < size, "only what is new"
    assert bb.check(dst) == []
    third = bb.copy(path, dst, link=link)
    assert (third.epoch, third.linked_bytes, third.copied_bytes) == (3, 0, 0)
    assert state(dst) == latest == state(path)


def test_the_two_do_not_touch_each_other(stored: tuple[Path, dict[int, Rows]], tmp_path: Path) -> None:
    path, states = stored
    dst = tmp_path / "dst"
    bb.copy(path, dst)
    with bb.open(path, ram="8MiB") as table:  # writes every row, compacts and collects: the source's files are removed
        for step in range(6):
            table.set(IDS, np.full((4000, 8), step, np.float32))
            table.commit()
        table.drop("one")
        table.compact()
        table.commit(meta={"x": 1})
    assert not set(inodes(path).values()) & set(inodes(dst).values())
    assert bb.check(path) == bb.check(dst) == []
    assert state(dst) == states[2]
    own = go_on(dst, 9)
    assert state(path) != own and bb.check(path) == []
    with bb.open(path, mode="r", ram="8MiB") as one, bb.open(dst, mode="r", ram="8MiB") as other:
        assert one.uuid == other.uuid


def test_a_snapshot_is_copied_under_its_name(stored: tuple[Path, dict[int, Rows]], tmp_path: Path) -> None:
    path, states = stored
    dst = tmp_path / "dst"
    assert bb.copy(path, dst, snapshot="one").epoch == 1
    assert bb.snapshots(dst) == {"one": 1} and state(dst) == states[1]
    with pytest.raises(ValueError, match="has no snapshot 'two'; there are: 'one'"):
        bb.copy(path, tmp_path / "other", snapshot="two")
    assert not (tmp_path / "other").exists()
    bb.copy(path, dst)
    bb.copy(path, dst)
    with bb.open(dst, snapshot="one", ram="8MiB") as kept:
        assert kept.lookup(IDS).tobytes() == states[1]["weight"]
    with pytest.raises(ValueError, match="holds commit 2 already, which is newer than 1; nothing was changed"):
        bb.copy(path, dst, snapshot="one")


def test_no_copy_into_what_went_its_own_way(stored: tuple[Path, dict[int, Rows]], tmp_path: Path) -> None:
    path, _ = stored
    dst = tmp_path / "dst"
    bb.copy(path, dst)
    with bb.open(dst, ram="8MiB"):
        pass  # opened for writing, and nothing committed: still a copy
    go_on(path, 3)
    bb.copy(path, dst)
    go_on(dst, 4)
    before = tree(dst)
    go_on(path, 5)
    with pytest.raises(ValueError, match="went its own way with commit 4; copy to another folder; nothing was changed"):
        bb.copy(path, dst)
    bb.create(tmp_path / "stranger", dim=8, num_rows=4000, ram="8MiB").close()
    with pytest.raises(ValueError, match="another table lies there"):
        bb.copy(tmp_path / "stranger", dst)
    assert tree(dst) == before


@pytest.mark.parametrize("collected", [False, True])
def test_no_copy_of_another_history(stored: tuple[Path, dict[int, Rows]], tmp_path: Path, collected: bool) -> None:
    """The source was put back from a backup and trained again: the same numbers mean something else."""
    path, _ = stored
    bb.copy(path, tmp_path / "backup", link=False)
    dst = tmp_path / "dst"
    go_on(path, 3)
    bb.copy(path, dst)
    shutil.rmtree(path)
    shutil.copytree(tmp_path / "backup", path)
    for seed in range(10, 14 if collected else 11):
        go_on(path, seed)
    before = tree(dst)
    with pytest.raises(ValueError, match="copy to another folder; nothing was changed"):
        bb.copy(path, dst)
    assert tree(dst) == before


@pytest.mark.parametrize("same_epoch", [False, True])
@pytest.mark.parametrize("differs", ["values", "meta"])
def test_no_copy_of_a_history_whose_numbers_are_all_the_same(
    stored: tuple[Path, dict[int, Rows]], tmp_path: Path, differs: str, same_epoch: bool
) -> None:
    path, _ = stored
    dst = tmp_path / "dst"

    def commit(variant: int) -> None:
        with bb.open(path, ram="8MiB") as table:
            value = variant if differs == "values" else 1
            table.update(np.arange(100), np.full((100, 8), value, np.float32))
            table.commit(meta={"variant": variant if differs == "meta" else 1})

    shutil.copytree(path, tmp_path / "backup")
    commit(1)
    bb.copy(path, dst)
    shutil.rmtree(path)
    shutil.copytree(tmp_path / "backup", path)
    commit(2)
    if not same_epoch:
        go_on(path, 5)
    before = tree(dst)
    with pytest.raises(ValueError, match="copy to another folder; nothing was changed"):
        bb.copy(path, dst)
    assert tree(dst) == before


def test_old_commits_of_a_copy_are_collected(stored: tuple[Path, dict[int, Rows]], tmp_path: Path) -> None:
    path, _ = stored
    for seed in range(5):
        bb.copy(path, tmp_path / "dst")
        latest = go_on(path, seed)
    bb.copy(path, tmp_path / "dst")
    assert len(list((tmp_path / "dst").glob("manifest-*"))) == 2 and bb.check(tmp_path / "dst").leftovers == []
    assert state(tmp_path / "dst") == latest


def test_damage_is_not_copied(stored: tuple[Path, dict[int, Rows]], tmp_path: Path) -> None:
    path, _ = stored
    dst = tmp_path / "dst"
    for link in (True, False):
        segment = max(path.glob("segment-*"))
        intact = segment.read_bytes()
        segment.write_bytes(intact[:4300] + bytes([intact[4300] ^ 1]) + intact[4301:])
        with pytest.raises(bb.CorruptionError, match=r"fails its checksum.*look at the source with bunkbed check"):
            bb.copy(path, dst, link=link)
        assert not dst.exists()
        segment.write_bytes(intact)
    bb.copy(path, dst)
    before = state(dst)
    go_on(path, 3)
    segment = max(path.glob("segment-*"))
    content = segment.read_bytes()
    segment.write_bytes(content[:4300] + bytes([content[4300] ^ 1]) + content[4301:])
    with pytest.raises(bb.CorruptionError):
        bb.copy(path, dst)
    assert state(dst) == before and bb.check(dst) == []


@pytest.mark.parametrize("link", [True, False])
def test_an_interrupted_copy_leaves_what_was_there_and_is_taken_up_again(
    stored: tuple[Path, dict[int, Rows]], tmp_path: Path, link: bool
) -> None:
    path, states = stored
    dst = tmp_path / "dst"

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bb.copy(path, dst, link=link, progress=interrupt)
    assert not dst.exists()
    bb.copy(path, dst, link=link)
    latest = go_on(path, 3)
    with pytest.raises(KeyboardInterrupt):
        bb.copy(path, dst, link=link, progress=interrupt)
    with bb.open(dst, mode="r", ram="8MiB") as reader:
        assert reader.epoch == 2 and reader.lookup(IDS).tobytes() == states[2]["weight"]
    assert bb.check(dst) == []
    # A session on the copy that died left a segment of the same number, and a copy that died half of one.
    new = max(path.glob("segment-*"))
    (dst / new.name).write_bytes(b"something else" * 1000)
    (dst / f"new-{new.name}").write_bytes(new.read_bytes()[:5000])
    bb.copy(path, dst, link=link)
    assert bb.check(dst) == [] and bb.check(dst).leftovers == []
    assert state(dst) == latest


def test_segments_of_an_interrupted_copy_are_used(stored: tuple[Path, dict[int, Rows]], tmp_path: Path) -> None:
    path, states = stored
    dst = tmp_path / "dst"
    bb.copy(path, dst, link=False)
    for manifest in dst.glob("manifest-*"):
        manifest.unlink()  # as if it had stopped before the last step
    done = bb.copy(path, dst, link=False)
    assert done.copied_bytes == 0 and done.present_bytes > 0
    assert state(dst) == states[2]


def test_a_torn_end_of_the_source_does_not_come_along(stored: tuple[Path, dict[int, Rows]], tmp_path: Path) -> None:
    path, states = stored
    torn = max(path.glob("segment-*"))
    with torn.open("ab") as file:
        file.write(b"torn" * 1024)
    done = bb.copy(path, tmp_path / "dst")
    assert done.copied_bytes == torn.stat().st_size - 4096 and done.linked_bytes > 0
    assert bb.check(tmp_path / "dst").leftovers == [] and state(tmp_path / "dst") == states[2]


def test_a_source_that_is_written_meanwhile(stored: tuple[Path, dict[int, Rows]], tmp_path: Path) -> None:
    path, _ = stored
    with bb.open(path, ram="8MiB") as table:
        for seed in range(20):
            train(table, seed)
            epoch = table.commit()
            expected = rows_of(table)["weight"]
            train(table, 100 + seed)  # not committed: not copied
            assert bb.copy(path, tmp_path / "dst").epoch == epoch
            with bb.open(tmp_path / "dst", mode="r", ram="8MiB") as reader:
                assert reader.lookup(IDS).tobytes() == expected


def test_who_may_not_be_copied_where(stored: tuple[Path, dict[int, Rows]], tmp_path: Path) -> None:
    path, _ = stored
    with pytest.raises(ValueError, match="one lies within the other"):
        bb.copy(path, path)
    with pytest.raises(ValueError, match="one lies within the other"):
        bb.copy(path, path / "inner")
    with pytest.raises(FileNotFoundError, match="no table and no run at"):
        bb.copy(tmp_path / "nowhere", tmp_path / "dst")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds notes\.txt, which is none of a table's; nothing was changed"):
        bb.copy(path, tmp_path / "full")
    assert os.listdir(tmp_path / "full") == ["notes.txt"]  # noqa: PTH208
    bb.copy(path, tmp_path / "dst")
    go_on(path, 3)
    with bb.open(tmp_path / "dst", ram="8MiB"), pytest.raises(bb.TableLockedError, match="is being written by process"):
        bb.copy(path, tmp_path / "dst")


# ---- rewritten


def test_rows_are_rewritten_for_serving(stored: tuple[Path, dict[int, Rows]], tmp_path: Path) -> None:
    path, states = stored
    dst = tmp_path / "dst"
    done = bb.copy(path, dst, dtype="bfloat16", optimizer=bb.SGD(), ram="16MiB")
    with bb.open(path, mode="r", ram="8MiB") as table, bb.open(dst, mode="r", ram="8MiB") as serving:
        assert done.rows == len(table) == len(serving) and done.epoch == 2
        assert (serving.dtype, serving.slots, serving.step, serving.meta) == ("bfloat16", (), 2, {"epoch": 2})
        assert (serving.init, serving.seed, serving.num_rows) == (table.init, table.seed, table.num_rows)
        wide = table.lookup(IDS)
        stored_rows = table.contains(IDS)
        nearest = np.empty(wide.size, np.uint16)
        _native.narrow(wide.reshape(-1), 1, nearest)
        expected = (nearest.astype(np.uint32) << 16).view(np.float32).reshape(wide.shape)
        assert serving.lookup(IDS).tobytes() == expected.tobytes(), "rounded to nearest, untouched rows too"
        assert np.array_equal(serving.contains(IDS), stored_rows)
        assert serving.uuid != table.uuid and serving.record_bytes == 16
    with pytest.raises(FileExistsError, match="rows are rewritten into a new folder"):
        bb.copy(path, dst, dtype="bfloat16")
    assert bb.check(dst) == [] and state(path) == states[2]


def test_slots_both_have_are_carried_over(stored: tuple[Path, dict[int, Rows]], tmp_path: Path) -> None:
    path, states = stored
    narrow = bb.Adam(state_dtype="bfloat16")
    bb.copy(path, tmp_path / "narrow", optimizer=narrow, ram="16MiB")
    with bb.open(tmp_path / "narrow", ram="8MiB") as table, bb.open(path, ram="8MiB") as source:
        assert table.optimizer == narrow and table.lookup(IDS).tobytes() == states[2]["weight"]
        for slot in ("exp_avg", "exp_avg_sq"):
            got, exact = table.get(IDS, slot), source.get(IDS, slot)
            assert np.abs(exact).max() > 0 and np.allclose(got, exact, rtol=2**-8, atol=0)
    bb.copy(tmp_path / "narrow", tmp_path / "wide", optimizer=bb.Adam(), ram="16MiB")
    with bb.open(tmp_path / "wide", ram="8MiB") as wide, bb.open(tmp_path / "narrow", ram="8MiB") as table:
        assert wide.get(IDS, "exp_avg").tobytes() == table.get(IDS, "exp_avg").tobytes() and wide.step == 2
        train(wide, 5)
    bb.copy(path, tmp_path / "adagrad", snapshot="one", optimizer=bb.Adagrad(initial_accumulator=0.5), ram="16MiB")
    with bb.open(tmp_path / "adagrad", ram="8MiB") as other:
        assert set(other.get(IDS, "sum").reshape(-1).tolist()) == {0.5} and other.snapshots() == {"one": 1}
        assert other.lookup(IDS).tobytes() == states[1]["weight"]


def test_a_rewrite_is_all_or_nothing(stored: tuple[Path, dict[int, Rows]], tmp_path: Path) -> None:
    path, _ = stored

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    places = set(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        bb.copy(path, tmp_path / "dst", dtype="float16", ram="16MiB", progress=interrupt)
    assert set(tmp_path.iterdir()) == places
    with pytest.raises(ValueError, match=r"has float32 rows and Adam already; leave dtype= and optimizer= out"):
        bb.copy(path, tmp_path / "dst", dtype="float32")
    with pytest.raises(ValueError, match="dtype must be one of"):
        bb.copy(path, tmp_path / "dst", dtype="float8")
    with pytest.raises((MemoryError, ValueError), match="needs at least ram="):
        bb.copy(path, tmp_path / "dst", dtype="float16", ram="64KiB")
    assert set(tmp_path.iterdir()) == places
    (tmp_path / ".dst.part").mkdir()  # of one that was killed
    assert bb.copy(path, tmp_path / "dst", dtype="float16", ram="16MiB").rows > 0


# ---- runs


@pytest.fixture
def run_folder(tmp_path: Path) -> tuple[Path, Callable[[Path], Rows]]:
    path = tmp_path / "run"
    with bb.Run(path, ram="16MiB") as run:
        spec: dict[str, Any] = {"dim": 8, "num_rows": 4000, "optimizer": bb.Adam()}
        user, item = run.table("user", create=spec), run.table("item", create=spec)
        for epoch in (1, 2):
            train(user, epoch)
            train(item, 10 + epoch)
            run.commit(files={"dense.pt": b"%d" % epoch * 999}, meta={"e": epoch}, keep="one" if epoch == 1 else None)
    (path / "config.json").write_text("{}")
    (path / "data").mkdir()
    (path / "data" / "train.bin").write_bytes(b"123")
    return path, run_state


def run_state(path: Path, snapshot: str | None = None) -> Rows:
    with bb.Run(path, ram="16MiB", mode="r", snapshot=snapshot) as run:
        found = {name: run.read(name) for name in run.files}
        for name in run.table_names:
            found |= {f"{name} {key}": value for key, value in rows_of(run.table(name)).items()}
        return found


def go_on_run(path: Path, seed: int) -> None:
    with bb.Run(path, ram="16MiB") as run:
        train(run.table("user"), seed)
        run.table("item")
        run.commit(files={"dense.pt": b"%d" % seed * 999})


@pytest.mark.parametrize("link", [True, False])
def test_a_run_is_copied_as_one(run_folder: tuple[Path, Any], tmp_path: Path, link: bool) -> None:
    path, _ = run_folder
    dst = tmp_path / "dst"
    one = run_state(path, "one")
    assert bb.copy(path, dst, snapshot="one", link=link).epoch == 1
    assert run_state(dst) == one and bb.check(dst) == []
    assert (dst / "config.json").read_text() == "{}" and (dst / "data" / "train.bin").read_bytes() == b"123"
    go_on_run(path, 3)
    done = bb.copy(path, dst, link=link)
    assert done.epoch == 3 and done.present_bytes > 0
    assert run_state(dst) == run_state(path) and run_state(dst, "one") == one and bb.check(dst) == []
    for _ in range(2):
        again = bb.copy(path, dst, link=link)
        assert (again.linked_bytes, again.copied_bytes) == (0, 0)
    for seed in (4, 5, 6):
        go_on_run(path, seed)
        bb.copy(path, dst, link=link)
    assert bb.check(dst) == [] and run_state(dst) == run_state(path)
    assert len(list((dst / "tables" / "user").glob("manifest-*"))) <= 4, "old commits are collected"

    go_on_run(dst, 7)  # it can be trained, and is a copy no longer
    assert bb.check(dst) == []
    go_on_run(path, 8)
    with pytest.raises(ValueError, match="went its own way with commit 7"):
        bb.copy(path, dst, link=link)


def test_a_table_copied_out_of_a_run_is_one_of_its_own(run_folder: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = run_folder
    expected = run_state(path)
    bb.copy(path / "tables" / "user", tmp_path / "user")
    with bb.open(tmp_path / "user", ram="8MiB") as table:
        assert table.lookup(IDS).tobytes() == expected["user weight"]
        train(table, 1)
    assert bb.check(tmp_path / "user") == [] and run_state(path) == expected


def test_an_interrupted_copy_of_a_run(run_folder: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = run_folder
    dst = tmp_path / "dst"

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bb.copy(path, dst, progress=interrupt)
    assert not dst.exists()
    bb.copy(path, dst)
    before = run_state(dst)
    go_on_run(path, 3)
    with pytest.raises(KeyboardInterrupt):
        bb.copy(path, dst, progress=interrupt)
    assert run_state(dst) == before and bb.check(dst) == []
    bb.copy(path, dst)
    assert run_state(dst) == run_state(path)
    dense = max((path / "files").glob("file-*"))
    dense.write_bytes(b"?" + dense.read_bytes()[1:])
    with pytest.raises(bb.CorruptionError, match=r"dense.pt.*fails its checksum"):
        bb.copy(path, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_run_is_rewritten_for_serving(run_folder: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = run_folder
    done = bb.copy(path, tmp_path / "serving", dtype="bfloat16", optimizer=bb.SGD(), ram="32MiB")
    with bb.Run(tmp_path / "serving", mode="r", ram="16MiB") as run, bb.Run(path, mode="r", ram="16MiB") as source:
        assert run.meta == {"e": 2} and run.read("dense.pt") == b"2" * 999
        assert run.table("user").dtype == "bfloat16" and run.table("user").slots == ()
        assert done.rows == len(source.table("user")) + len(source.table("item"))
    assert (tmp_path / "serving" / "config.json").exists() and bb.check(tmp_path / "serving") == []
