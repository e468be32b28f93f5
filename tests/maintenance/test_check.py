"""`bb.check`: what it finds, how it says so, and that a repair loses and invents nothing."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import bunkbed as bb
from bunkbed import _native
from bunkbed.testing.checksum import crc32c

IDS = np.arange(300)
Rows = dict[str, bytes]


def rows_of(table: bb.Table) -> Rows:
    """Every bit of the table, weights and state."""
    found = {"step": str(table.step).encode(), "weight": table.lookup(IDS, touch=False).tobytes()}
    return found | {slot: table.get(IDS, slot).tobytes() for slot in table.slots}


def train(table: bb.Table, seed: int) -> None:
    random = np.random.default_rng(seed)
    ids = random.integers(0, 300, 200)
    table.update(ids, random.standard_normal((200, table.dim)).astype(np.float32))


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, dict[int, Rows]]:
    """A table with commits 1 (kept as "one"), 2 and 3, and what it held at each."""
    path = tmp_path / "user"
    states = {}
    with bb.create(path, dim=6, num_rows=300, optimizer=bb.Adam(), ram="4MiB") as table:
        for epoch in (1, 2, 3):
            train(table, epoch)
            table.commit(keep="one" if epoch == 1 else None)
            states[epoch] = rows_of(table)
    return path, states


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(bytes(content))


def manifest(path: Path, epoch: int) -> Path:
    return path / f"manifest-{epoch:016d}"


def own_segment(path: Path, epoch: int) -> Path:
    """The segment written in that epoch."""
    return next(p for p in path.glob("segment-*") if int.from_bytes(p.read_bytes()[40:48], "little") == epoch)


def tree(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_a_problem_says_what_where_and_what_to_do(stored: tuple[Path, dict[int, Rows]]) -> None:
    path, _ = stored
    assert bb.check(path) == [] and bb.check(path).sound_epochs == [1, 2, 3]
    segment = own_segment(path, 3)
    stride = 80
    slot = 4096 // stride + 7
    flip(segment, slot * stride + 3)
    (problem,) = bb.check(path)
    assert (problem.kind, problem.file, problem.offset) == ("record", segment, slot * stride)
    assert problem.epochs == (3,) and segment.name in problem and f"byte {problem.offset}" in problem
    assert "fails its checksum" in problem.found and "commit 3" in problem.meaning
    assert "--repair --fall-back-to 2" in problem.remedy
    assert bb.check(path).sound_epochs == [1, 2]


def test_every_part_of_a_segment_is_looked_at(stored: tuple[Path, dict[int, Rows]]) -> None:
    path, _ = stored
    segment = own_segment(path, 3)
    intact = segment.read_bytes()
    kinds = {}
    # Header, its padding, gap before the records, a record, ids, zeros behind them, trailer.
    index = int.from_bytes(intact[-80 + 56 : -80 + 64], "little")
    places = {"header": 17, "header's padding": 3000, "gap": 4096 + 20, "record": 4200, "record's padding": 4160 + 78}
    places |= {"ids": index + 3, "zeros": len(intact) - 90, "trailer": len(intact) - 20}
    for name, offset in places.items():
        flip(segment, offset)
        problems = bb.check(path)
        assert problems, f"a changed byte in {name} was not noticed"
        kinds[name] = problems[0].kind
        segment.write_bytes(intact)
    assert kinds == {
        "header": "segment",
        "header's padding": "padding",
        "gap": "padding",
        "record's padding": "padding",
        "record": "record",
        "ids": "chunk",
        "zeros": "padding",
        "trailer": "chunk",
    }
    segment.write_bytes(intact[:-4096])
    (problem,) = bb.check(path)
    assert problem.kind == "segment" and "bytes long" in problem.found
    segment.unlink()
    (problem,) = bb.check(path)
    assert problem.kind == "segment" and "no such file" in problem.found


def test_many_damaged_records_are_counted(stored: tuple[Path, dict[int, Rows]]) -> None:
    path, _ = stored
    segment = own_segment(path, 3)
    content = bytearray(segment.read_bytes())
    for slot in range(60, 120):
        content[slot * 80] ^= 1
    segment.write_bytes(bytes(content))
    problems = bb.check(path)
    assert len(problems) == 21 and "40 more records" in problems[-1]


def test_a_damaged_newest_commit_is_never_rolled_back_silently(stored: tuple[Path, dict[int, Rows]]) -> None:
    path, states = stored
    flip(manifest(path, 3), 100)
    before = tree(path)
    report = bb.check(path, repair=True)
    assert [problem.kind for problem in report] == ["manifest"] and report.repaired == []
    assert tree(path) == before | {"lock": tree(path)["lock"]}
    with pytest.raises(bb.CorruptionError, match="--fall-back-to EPOCH"):
        bb.open(path, ram="4MiB")
    with pytest.raises(ValueError, match="which only repair=True does"):
        bb.check(path, epoch=2)

    report = bb.check(path, repair=True, epoch=2)
    assert report == [] and any("went back to commit 2" in line for line in report.repaired)
    assert report.sound_epochs == [1, 2, 4], "a number that was used is not used again"
    assert bb.check(path) == []
    with bb.open(path, ram="4MiB") as table:
        assert table.epoch == 4 and rows_of(table) == states[2]
        train(table, 3)
        assert rows_of(table) == states[3], "training goes on as it did"
        assert table.commit() == 5
    assert bb.check(path) == []
    with bb.open(path, snapshot="one", ram="4MiB") as reader:
        assert reader.lookup(IDS).tobytes() == states[1]["weight"]


def test_a_reader_notices_that_the_table_went_back(stored: tuple[Path, dict[int, Rows]]) -> None:
    path, states = stored
    with bb.open(path, mode="r", ram="4MiB") as reader:
        flip(manifest(path, 3), 100)
        bb.check(path, repair=True, epoch=2)
        assert reader.refresh() == 4
        assert reader.lookup(IDS).tobytes() == states[2]["weight"]


def test_falling_back_wants_a_sound_commit_and_a_damaged_newest_one(stored: tuple[Path, dict[int, Rows]]) -> None:
    path, _ = stored
    before = tree(path)
    with pytest.raises(ValueError, match=r"commit 3, the newest, is sound.*call rewind\(2\).*nothing was changed"):
        bb.check(path, repair=True, epoch=2)
    flip(own_segment(path, 2), 4300)  # commits 2 and 3 share it
    with pytest.raises(ValueError, match="commit 2 is damaged itself; sound ones: 1; nothing was changed"):
        bb.check(path, repair=True, epoch=2)
    with pytest.raises(ValueError, match="commit 9 is not there"):
        bb.check(path, repair=True, epoch=9)
    flip(own_segment(path, 2), 4300)
    assert tree(path) == before | {"lock": tree(path)["lock"]}


def test_versions_of_commits_after_the_one_gone_back_to_stay_taken(stored: tuple[Path, dict[int, Rows]]) -> None:
    path, states = stored
    with bb.open(path, ram="4MiB") as table:
        table.commit(keep="three")
        train(table, 4)
        table.commit()
    flip(manifest(path, 5), 100)
    assert bb.check(path, repair=True, epoch=1) == []  # commit 4, kept as "three", is newer and sound
    with bb.open(path, ram="4MiB") as table:
        assert rows_of(table) == states[1]
        train(table, 9)
        table.commit()
        table.rewind("three")
        assert rows_of(table) == states[3]
    assert bb.check(path) == []


def test_leftovers_are_no_problem_and_go_when_told(stored: tuple[Path, dict[int, Rows]]) -> None:
    path, states = stored
    (path / "new-manifest-0000000000000004").write_bytes(b"half")
    torn = own_segment(path, 3)
    shutil.copy(torn, path / "segment-0000000000000099")
    length = torn.stat().st_size
    with torn.open("ab") as file:
        file.write(b"torn" * 1000)
    report = bb.check(path)
    assert report == []
    assert {(file.name, size) for file, size in report.leftovers} == {
        ("new-manifest-0000000000000004", 4),
        ("segment-0000000000000099", length),
        (torn.name, 4000),
    }
    report = bb.check(path, repair=True)
    assert report == [] and len(report.repaired) == 3 and bb.check(path).leftovers == []
    assert torn.stat().st_size == length and not (path / "segment-0000000000000099").exists()
    assert bb.check(path, repair=True).repaired == []
    with bb.open(path, ram="4MiB") as table:
        assert rows_of(table) == states[3]


def test_damaged_old_commits_go_but_not_what_is_left_of_a_snapshot(stored: tuple[Path, dict[int, Rows]]) -> None:
    path, states = stored
    flip(manifest(path, 2), 100)
    flip(own_segment(path, 1), 4300)
    found = {problem.kind: problem for problem in bb.check(path)}
    assert found["manifest"].epochs == (2,) and "is not touched by it" in found["manifest"].meaning
    assert 1 in found["record"].epochs and 3 in found["record"].epochs
    assert bb.check(path, repair=True).repaired == [], "commit 3 uses the damaged segment too: nothing is sound"

    flip(own_segment(path, 1), 4300)
    report = bb.check(path, repair=True)
    assert report == [] and report.repaired == ["removed commit 2, which cannot be read"]
    assert not manifest(path, 2).exists() and bb.check(path).sound_epochs == [1, 3]

    with bb.open(path, ram="4MiB") as table:
        train(table, 7)
        table.set(IDS, np.ones((300, 6), np.float32))  # writes every row: only the snapshot uses segment 1
        table.commit()
        state = rows_of(table)
        table.commit(meta={"again": 1})
    flip(own_segment(path, 1), 4300)
    report = bb.check(path, repair=True)
    assert [problem.epochs for problem in report] == [(1,)] and report.repaired == []
    assert "snapshots --drop" in report[0].remedy and manifest(path, 1).exists()
    with bb.open(path, ram="4MiB") as table:
        table.drop("one")
        assert rows_of(table) == state
    assert bb.check(path) == []
    assert states


def test_a_foreign_manifest_and_a_stranger(stored: tuple[Path, dict[int, Rows]], tmp_path: Path) -> None:
    path, _ = stored
    bb.create(tmp_path / "other", dim=6, num_rows=300, ram="4MiB").close()
    shutil.copy(manifest(tmp_path / "other", 0), manifest(path, 0))
    (path / "notes.txt").write_text("mine")
    problems = {problem.kind: problem for problem in bb.check(path)}
    assert set(problems) == {"foreign", "stranger"} and problems["foreign"].epochs == (0,)
    report = bb.check(path, repair=True)
    assert [problem.kind for problem in report] == ["stranger"], "a file that is not ours stays"
    assert (path / "notes.txt").exists() and not manifest(path, 0).exists()


def test_no_repair_while_somebody_writes(stored: tuple[Path, dict[int, Rows]]) -> None:
    path, _ = stored
    with bb.open(path, ram="4MiB") as table:
        train(table, 4)
        assert bb.check(path) == []
        with pytest.raises(bb.TableLockedError, match="close it there before repairing it; nothing was changed"):
            bb.check(path, repair=True)
    with bb.open(path, mode="r", ram="4MiB"):
        assert bb.check(path, repair=True) == []  # readers hold no lock


def test_what_a_writer_removes_meanwhile_is_no_problem(stored: tuple[Path, dict[int, Rows]]) -> None:
    path, _ = stored
    stop = threading.Event()

    def write() -> None:
        with bb.open(path, ram="4MiB") as table:
            for seed in range(400):
                if stop.is_set():
                    return
                table.set(IDS, np.full((300, 6), seed, np.float32))
                table.commit()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(15):
            assert bb.check(path) == []
    finally:
        stop.set()
        writer.join()


def test_a_commit_that_goes_while_its_segments_are_read_is_no_problem(stored: tuple[Path, dict[int, Rows]]) -> None:
    path, _ = stored

    def collect(done: int, total: int) -> None:
        manifest(path, 3).unlink(missing_ok=True)
        for segment in path.glob("segment-*3"):
            segment.unlink()

    assert bb.check(path, progress=collect) == []
    assert bb.check(path).epochs == [1, 2]


@pytest.mark.parametrize("num_rows", [5000, None])
def test_a_count_in_little_memory_counts_the_same(tmp_path: Path, num_rows: int | None) -> None:
    path = tmp_path / "user"
    with bb.create(path, dim=2, num_rows=num_rows, optimizer=bb.SGD(), ram="8MiB") as table:
        for _ in range(3):
            table.update(np.arange(5000), np.ones((5000, 2), np.float32))
            table.commit()
    assert bb.check(path, ram=1024) == bb.check(path) == []
    # The number of rows in the newest manifest, which lies at a fixed place, and the checksum that covers it.
    target = manifest(path, 3)
    content = bytearray(target.read_bytes())
    at = 24 + 16 + 16 + 8 * 6 + 4 + 4 + 16 + 8 + 48 + 8 + 16
    assert int.from_bytes(content[at : at + 8], "little") == 5000
    content[at : at + 8] = (4999).to_bytes(8, "little")
    content[-4:] = crc32c(bytes(content[:-4])).to_bytes(4, "little")
    target.write_bytes(bytes(content))
    for ram in (1024, "256MiB"):
        (problem,) = bb.check(path, ram=ram)
        assert problem.kind == "rows" and "hold 5000 rows, it names 4999" in problem.found


def test_segments_are_verified_at_once_and_listed_in_order(tmp_path: Path) -> None:
    """A table large enough for several threads, damaged here and there."""
    path = tmp_path / "user"
    rows, part = np.arange(50_000), np.ones((5_000, 64), np.float32)
    with bb.create(path, dim=64, num_rows=rows.size, optimizer=bb.Adam(), ram="64MiB") as table:
        for begin in range(0, rows.size, part.shape[0]):
            table.set(rows[begin : begin + part.shape[0]], part)
    segments = sorted(path.glob("segment-*"))
    total = sum(file.stat().st_size for file in segments)
    assert len(segments) > 8 and total > 32 << 20, "too small for several threads"
    assert bb.check(path) == []
    damaged = segments[::3]
    for file in damaged:
        for offset in range(5000, 60_000, 9000):
            flip(file, offset)
    seen: list[tuple[int, int]] = []
    report = bb.check(path, progress=lambda done, total: seen.append((done, total)))
    assert [problem.file for problem in report] == [file for file in damaged for _ in range(7)]
    assert seen == sorted(seen) and seen[-1] == (total, total)
    offsets = [problem.offset for problem in report]
    assert all(offsets[i : i + 7] == sorted(offsets[i : i + 7]) for i in range(0, len(offsets), 7))

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bb.check(path, progress=interrupt)


def test_progress_is_told_and_can_end_the_check(stored: tuple[Path, dict[int, Rows]]) -> None:
    path, _ = stored
    seen: list[tuple[int, int]] = []
    report = bb.check(path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == report.bytes_read == sum(p.stat().st_size for p in path.glob("segment-*"))

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bb.check(path, repair=True, progress=interrupt)
    assert bb.check(path, repair=True) == [], "the lock was given back"


# ---- runs


@pytest.fixture
def run_folder(tmp_path: Path) -> tuple[Path, dict[int, Rows]]:
    """A run with commits 1 (kept as "one"), 2 and 3."""
    states = {}
    with bb.Run(tmp_path / "run", ram="8MiB") as run:
        user = run.table("user", create={"dim": 6, "num_rows": 300, "optimizer": bb.Adam()})
        item = run.table("item", create={"dim": 6, "num_rows": 300, "optimizer": bb.Adam()})
        for epoch in (1, 2, 3):
            train(user, epoch)
            train(item, 10 + epoch)
            run.commit(files={"dense.pt": b"weights %d" % epoch}, keep="one" if epoch == 1 else None)
            states[epoch] = run_state(run)
    return tmp_path / "run", states


def run_state(run: bb.Run) -> Rows:
    found = {"dense.pt": run.read("dense.pt")}
    for name in ("user", "item"):
        found |= {f"{name} {key}": value for key, value in rows_of(run.table(name)).items()}
    return found


def damage_dense(path: Path) -> None:
    flip(path / "files" / "file-0000000000000003", 0)


def damage_run_manifest(path: Path) -> None:
    flip(path / "run-0000000000000003", 5)


def damage_table_manifest(path: Path) -> None:
    flip(manifest(path / "tables" / "item", 3), 60)


def damage_row(path: Path) -> None:
    flip(own_segment(path / "tables" / "user", 3), 4300)


@pytest.mark.parametrize("damage", [damage_dense, damage_run_manifest, damage_table_manifest, damage_row])
def test_a_run_goes_back_as_a_whole_when_told(run_folder: tuple[Path, dict[int, Rows]], damage: object) -> None:
    path, states = run_folder
    assert bb.check(path) == [] and bb.check(path).sound_epochs == [1, 2, 3]
    damage(path)  # type: ignore[operator]
    before = tree(path)
    report = bb.check(path, repair=True)
    assert report and report.sound_epochs == [1, 2] and report.repaired == []
    after = tree(path)
    assert {name: after[name] for name in after if not name.endswith("lock")} == {
        name: before[name] for name in before if not name.endswith("lock")
    }
    assert any(f"bunkbed check {path} --repair --fall-back-to 2" in problem for problem in report)
    with pytest.raises(ValueError, match="commit 3 is damaged itself; sound ones: 1, 2"):
        bb.check(path, repair=True, epoch=3)

    report = bb.check(path, repair=True, epoch=2)
    assert report == [], report
    assert "the run went back to commit 2, which is now also commit 4, the newest" in report.repaired
    assert bb.check(path) == []
    with bb.Run(path, ram="8MiB") as run:
        assert run.epoch == 4 and run_state(run) == states[2]
        train(run.table("user"), 3)
        train(run.table("item"), 13)
        run.commit(files={"dense.pt": b"weights 3"})
        assert run_state(run) == states[3]
        run.rewind("one")
        assert run_state(run) == states[1]
    assert bb.check(path) == []


def test_a_run_keeps_newer_snapshots_when_it_goes_back(run_folder: tuple[Path, dict[int, Rows]]) -> None:
    path, states = run_folder
    with bb.Run(path, ram="8MiB") as run:
        run.table("user")
        run.table("item")
        run.commit(keep="three")
        run.commit()
    damage_dense_of_five = path / "run-0000000000000005"
    flip(damage_dense_of_five, 5)
    assert bb.check(path, repair=True, epoch=1) == []
    with bb.Run(path, ram="8MiB") as run:
        assert run_state(run) == states[1]
        train(run.table("user"), 50)
        run.commit()
        run.rewind("three")
        assert run_state(run) == states[3]


def test_a_run_is_repaired_as_a_whole_and_not_while_it_is_written(run_folder: tuple[Path, dict[int, Rows]]) -> None:
    path, states = run_folder
    with pytest.raises(bb.ReadOnlyError, match="belongs to a run, whose tables are repaired together"):
        bb.check(path / "tables" / "user", repair=True)
    with bb.Run(path, ram="8MiB"), pytest.raises(bb.TableLockedError, match="is being written by process"):
        bb.check(path, repair=True)
    (path / "files" / "file-0000000000000077").write_bytes(b"left")
    (path / "new-run-0000000000000004").write_bytes(b"half")
    flip(path / "run-0000000000000002", 5)
    report = bb.check(path)
    assert [problem.epochs for problem in report] == [(2,)]
    report = bb.check(path, repair=True)
    assert report == [] and "removed commit 2 of the run, which is damaged" in report.repaired
    assert not (path / "files" / "file-0000000000000077").exists() and not list(path.glob("new-*"))
    with bb.Run(path, ram="8MiB") as run:
        assert run_state(run) == states[3]


def test_a_damaged_old_commit_of_a_run_is_in_nobodys_way(run_folder: tuple[Path, dict[int, Rows]]) -> None:
    path, states = run_folder
    flip(path / "run-0000000000000002", 5)
    with bb.Run(path, ram="8MiB") as run:
        assert run_state(run) == states[3] and run.snapshots() == {"one": 1}
        train(run.table("user"), 4)
        run.commit()
        run.rewind("one")
        assert run_state(run) == states[1]


def test_what_is_left_of_a_runs_snapshot_stays(run_folder: tuple[Path, dict[int, Rows]]) -> None:
    path, states = run_folder
    with bb.Run(path, ram="8MiB") as run:
        for _ in range(3):
            run.table("user").set(IDS, np.ones((300, 6), np.float32))
            run.table("item")
            run.commit()
    flip(own_segment(path / "tables" / "user", 1), 4300)  # now the snapshot's alone
    report = bb.check(path, repair=True)
    assert report and report.repaired == [] and report.sound_epochs == [5, 6]
    assert "snapshots --drop" in report[0].remedy
    with bb.Run(path, snapshot="one", ram="8MiB") as run:
        assert rows_of_item(run) == states[1]["item weight"]


def rows_of_item(run: bb.Run) -> bytes:
    return run.table("item").lookup(IDS).tobytes()


def test_a_table_that_a_run_lost(run_folder: tuple[Path, dict[int, Rows]]) -> None:
    path, _ = run_folder
    shutil.rmtree(path / "tables" / "item")
    report = bb.check(path)
    assert {problem.kind for problem in report} == {"table"} and report.sound_epochs == []
    assert "put the files back from a copy" in report[0].remedy


def test_the_core_refuses_what_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no table and no run at"):
        bb.check(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no table at"):
        bb.check(tmp_path, repair=True)
    with pytest.raises(FileNotFoundError):
        _native.repair_table(str(tmp_path), 1 << 20, None, set(), False, None)
    assert list(tmp_path.iterdir()) == [], "not even a lock"
