"""Every row in the order of the ids: of several slots with one scan, straight into an archive or a dataset."""

from __future__ import annotations

import itertools
import mmap
import struct
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.core.optim import Optimizer
from bunkbed.io.formats import dense, torch_checkpoint, zip_members

ROWS, DIM = 1003, 6
OPTIMIZERS = {"adam": bb.Adam(), "rowwise": bb.RowwiseAdagrad()}  # a slot of which has another length


def filled(order: str, optimizer: Optimizer) -> bb.Table:
    """Some rows in the log in that order, trained once or twice; others are not stored."""
    rng = np.random.default_rng(4)
    table = bb.create(None, dim=DIM, num_rows=ROWS, optimizer=optimizer, ram="1MiB")
    ids = np.flatnonzero(rng.random(ROWS) < 0.8)
    if order == "shuffled":
        rng.shuffle(ids)
    for part in (*np.array_split(ids, 9), rng.choice(ids, 31, replace=False)):
        table.update(part, rng.standard_normal((len(part), DIM)).astype(np.float32))
    return table


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many regions and parts of a few rows."""
    for name, value in {"_REGION_BYTES": 5000, "_SCAN_BYTES": 1000, "_LEAST_ROWS": 7, "_STEP_BYTES": 500}.items():
        monkeypatch.setattr(dense, name, value)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("order", ["in order", "shuffled"])
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.usefixtures("small")
def test_all_slots_come_with_one_scan(
    kind: str, order: str, on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: list[Any] = []
    scan = bb.Table.scan_slots

    def spy(table: bb.Table, slots: Any, chunk: int) -> Any:
        scans.append(slots)
        return scan(table, slots, chunk)

    with filled(order, OPTIMIZERS[kind]) as made:
        bb.export_rows(made, tmp_path / "rows.safetensors", slots=("weight", *made.slots))
        path = tmp_path / "table" if on_disk else None
        with bb.create(path, dim=DIM, num_rows=ROWS, optimizer=OPTIMIZERS[kind], ram="1MiB") as table:
            bb.import_rows(table, tmp_path / "rows.safetensors")
            if on_disk:
                table.commit()
            again = np.append(np.arange(5, ROWS, 25), [900, 3, 500])  # of regions that a scan in order has passed
            table.update(again, np.ones((len(again), DIM), np.float32))
            slots = (*table.slots[::-1], "weight")
            wanted = {slot: table.get(np.arange(ROWS), slot) for slot in slots}
            found = {slot: np.full_like(rows, np.nan) for slot, rows in wanted.items()}
            (tmp_path / "scratch").mkdir()
            seen: list[tuple[int, int]] = []
            monkeypatch.setattr(bb.Table, "scan_slots", spy)
            dense.fill(table, found, tmp_path / "scratch", lambda *at: seen.append(at))
            assert scans == [slots]
            assert seen[-1] == (ROWS, ROWS) and len(seen) > 5
            assert not list((tmp_path / "scratch").iterdir())
    for slot, rows in found.items():
        np.testing.assert_array_equal(rows.view(np.uint32), wanted[slot].view(np.uint32), slot)


@pytest.mark.usefixtures("small")
def test_rows_that_a_region_was_written_without_must_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not looked up one by one; should the log not bring them, that is an error and no file."""
    rows = np.random.default_rng(1).standard_normal((ROWS, DIM)).astype(np.float32)
    np.save(tmp_path / "in.npy", rows)
    with bb.create(tmp_path / "table", dim=DIM, num_rows=ROWS, optimizer=bb.SGD(), ram="1MiB") as table:
        bb.import_rows(table, tmp_path / "in.npy")
        table.commit()
        table.set(np.arange(0, ROWS, 3), rows[::3] + 1)
        rows[::3] += 1
        with monkeypatch.context() as patch:
            patch.setattr(bb.Table, "lookup", lambda *args, **kwargs: pytest.fail("looked up"))
            bb.export_rows(table, tmp_path / "out.npy")
        np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), rows)
        append = dense._Filling._append
        monkeypatch.setattr(dense._Filling, "_append", lambda *args: append(*args[:-1], args[-1][:-1]))
        (tmp_path / "lost").mkdir()
        with pytest.raises(
            bb.BunkbedError, match=r"table 'table': the log brought \d+ of \d+ rows that ids from \d+ still lacked"
        ):
            bb.export_rows(table, tmp_path / "lost" / "out.npy")
        assert list((tmp_path / "lost").iterdir()) == []


@pytest.mark.usefixtures("small")
def test_what_is_set_aside_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = dense._Filling._append

    def slowly(*args: Any) -> None:
        time.sleep(0.003)
        append(*args)

    monkeypatch.setattr(dense._Filling, "_append", slowly)
    monkeypatch.setattr(dense, "_SCAN_BYTES", 2400)  # some of the last rows are of the first region
    with filled("shuffled", bb.Adam()) as table:
        wanted = table.lookup(np.arange(ROWS))
        found = np.full_like(wanted, np.nan)
        dense.fill(table, {"weight": found}, tmp_path, lambda *at: None)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("order", ["in order", "shuffled"])
@pytest.mark.parametrize("slot", ["weight", "exp_avg"])
@pytest.mark.usefixtures("small")
def test_rows_are_gathered_in_memory(order: str, slot: str) -> None:
    seen: list[tuple[int, int]] = []
    with filled(order, bb.Adam()) as table:
        wanted = table.get(np.arange(ROWS), slot)
        found = np.full_like(wanted, np.nan)
        dense.gather(table, slot, found, lambda *at: seen.append(at))
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))
    assert seen[-1] == (ROWS, ROWS) and seen == sorted(seen) and len(seen) > 10


@pytest.fixture
def torch() -> Iterator[Any]:
    yield pytest.importorskip("torch")


@pytest.mark.parametrize("order", ["in order", "shuffled"])
@pytest.mark.usefixtures("small")
def test_a_torch_checkpoint_is_a_sound_archive(torch: Any, order: str, tmp_path: Path) -> None:
    """Its regions were written in any order, some regions twice; its name is not ASCII."""
    with filled(order, bb.Adam()) as table:
        slots = ("exp_avg_sq", "weight", "exp_avg")
        bb.export_rows(table, tmp_path / "Zeilen ü.pt", slots=slots)
        wanted = {slot: table.get(np.arange(ROWS), slot) for slot in slots}
    with zipfile.ZipFile(tmp_path / "Zeilen ü.pt") as archive:
        assert archive.testzip() is None
        sizes = [one.file_size for one in archive.infolist()]
        checksums = [one.CRC for one in archive.infolist()]
    assert sizes.count(ROWS * DIM * 4) == 3 and 0 not in checksums
    for is_mapped in (False, True):
        found = torch.load(tmp_path / "Zeilen ü.pt", weights_only=True, mmap=is_mapped)
        tensors = {**found["optimizer"]["state"][0], **found["model"]}
        for slot, rows in wanted.items():
            np.testing.assert_array_equal(tensors[slot].numpy().view(np.uint32), rows.view(np.uint32), slot)


def test_a_torch_checkpoint_beyond_4_gib(torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor, and where the second one begins: sizes and places of 64 bits. A file of holes, but for four rows."""
    rows, dim = (1 << 18) + 3, 4096

    def fill(table: bb.Table, targets: dict[str, Any], *_: Any) -> None:
        for number, target in enumerate(targets.values(), 1):
            target[0:1] = np.full((1, dim), number, "<f4")
            target[rows - 1 : rows] = np.full((1, dim), -number, "<f4")

    monkeypatch.setattr(torch_checkpoint, "fill", fill)
    monkeypatch.setattr(zip_members.MemberRows, "checksum", lambda self: 0x1234_5678)
    file = tmp_path / "rows.pt"
    with bb.create(None, dim=dim, num_rows=rows, optimizer=bb.Adagrad()) as table:
        bb.export_rows(table, file, slots=("weight", "sum"))
    assert file.stat().st_size > 8 << 30 and file.stat().st_blocks * 512 < 1 << 20
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):  # takes no memory from the system's account
        found = torch.load(file, weights_only=True, mmap=True)
    for number, tensor in enumerate((found["model"]["weight"], found["optimizer"]["state"][0]["sum"]), 1):
        assert tensor.shape == (rows, dim)
        assert bool((tensor[0] == number).all()) and bool((tensor[-1] == -number).all())
    with zipfile.ZipFile(file) as archive, file.open("rb") as raw:
        large = [one for one in archive.infolist() if one.file_size > 1 << 32]
        assert len(large) == 2 and large[1].header_offset > 1 << 32
        for one in large:
            assert one.CRC == 0x1234_5678
            raw.seek(zip_members.offset_of(raw, one) + one.file_size)
            assert struct.unpack("<4sIQQ", raw.read(24)) == (b"PK\x07\x08", one.CRC, one.file_size, one.file_size)
        assert archive.read("rows/version").strip().isdigit()  # which stands behind both


def test_a_torch_that_leaves_no_room_is_named(torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda content, path: save({"weight": content["weight"][:2].clone()}, path))
    message = r"torch .* left no room for the rows of .*rows.pt; export to .safetensors"
    with filled("in order", bb.Adam()) as table, pytest.raises(RuntimeError, match=message):
        bb.export_rows(table, tmp_path / "rows.pt")
    assert list(tmp_path.iterdir()) == []


def test_checksums_of_parts_in_any_order(tmp_path: Path) -> None:
    """As `zlib.crc32` has it of the whole, of archives that keep it before a member too."""
    rows = np.random.default_rng(0).standard_normal((1000, 3)).astype(np.float32)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("before", b"1" * 99)
        archive.writestr("rows", bytes(rows.nbytes))
        archive.writestr("after", b"2")
    with (tmp_path / "a.zip").open("r+b") as file:
        with zipfile.ZipFile(file) as archive:
            member = archive.getinfo("rows")
        target = zip_members.MemberRows(file.fileno(), zip_members.offset_of(file, member), 3)
        assert target.checksum() == 0
        parts = [slice(*one) for one in itertools.pairwise([0, 7, 14, 400, 999, 1000])]
        for part in (parts[2], parts[4]):
            target[part] = np.ones((part.stop - part.start, 3), np.float32)  # written again below
        for at in (3, 1, 4, 0, 2):
            target[parts[at]] = rows[parts[at]]
        assert target.checksum() == zlib.crc32(rows)
        with pytest.raises(zipfile.BadZipFile), zipfile.ZipFile(file) as archive:
            archive.read("rows")
        zip_members.set_checksums(file, {"rows": target.checksum()})
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert archive.testzip() is None and archive.read("rows") == rows.tobytes()
        at = archive.getinfo("rows").header_offset + 14
    assert (tmp_path / "a.zip").read_bytes()[at : at + 4] == struct.pack("<I", zlib.crc32(rows))
