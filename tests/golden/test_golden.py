"""The file format, written and read a second time in Python from FORMAT.md; its bytes are pinned here.

A table made by hand opens as if the core had written it, a table written by the core reads by hand, and one
hand-made bad file per error shows the error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.testing import ReferenceTable
from bunkbed.testing.checksum import crc32c
from bunkbed.testing.philox import initial_rows

BLOCK = 4096
VERSION = 1
UUID = bytes(range(16))
FORMAT = Path(__file__).resolve().parents[2] / "FORMAT.md"

# ---- FORMAT.md in Python


@dataclasses.dataclass
class Made:
    """A table made by hand: dim 4, Adam, three stored rows."""

    uuid: bytes = UUID
    version: int = VERSION
    reader_flags: int = 0
    writer_flags: int = 0
    epoch: int = 1
    step: int = 3
    num_rows: int = 100
    dim: int = 4
    init_kind: int = 1
    optimizer_kind: int = 3
    shard_index: int = 0
    shard_count: int = 1
    fields: tuple[tuple[str, int, int, int], ...] = (
        ("weight", 0, 4, 0),
        ("exp_avg", 0, 4, 16),
        ("exp_avg_sq", 0, 4, 32),
    )
    payload_bytes: int = 48
    stored_rows: int = 3
    keep: str = ""
    meta: str = '{"made": "by hand"}'
    checkpoints: tuple[tuple[int, int], ...] = ()
    deletions_from: int = 0
    rewinds: tuple[tuple[int, int], ...] = ()
    rules: tuple[int, ...] = (30, 0, 0, 12, 1, 0, 0)  # expire, max_rows, keep, clock, kind of clock, order, zero
    admit: float = 0.5
    admit_from: tuple[int, int, int] = (3, 0, 0)  # steps, ids with a count, time before which a count is none
    chunks: tuple[tuple[int, tuple[tuple[int, int, bytes], ...]], ...] = ()  # (kind, ((id, version, payload), ...))
    segment_bytes: int | None = None  # as the manifest states it

    @property
    def stride(self) -> int:
        return (self.payload_bytes + 4 + 7) // 8 * 8

    def manifest(self, length: int) -> bytes:
        body = struct.pack("<QQ16s", self.reader_flags, self.writer_flags, self.uuid)
        body += struct.pack("<QQqQQq", self.epoch, self.epoch - 1, self.step, 100, 2, self.num_rows)
        body += struct.pack("<IBBBB", self.dim, self.init_kind, self.optimizer_kind, 0, 0)
        body += struct.pack("<ddQ", 0.1, 0.0, 7)  # init: std, nothing, seed
        body += struct.pack("<dddddd", 0.01, 1e-8, 0.9, 0.999, 0.0, 0.0)
        body += struct.pack("<II", self.shard_index, self.shard_count)
        body += struct.pack("<QQQ", self.payload_bytes, (1 << 20) // self.stride, self.stored_rows)
        body += struct.pack("<I", len(self.fields))
        for name, dtype, width, offset in self.fields:
            body += struct.pack("<I", len(name)) + name.encode() + struct.pack("<BII", dtype, width, offset)
        body += struct.pack("<IQQQ", 1, 1, self.epoch, length if self.segment_bytes is None else self.segment_bytes)
        body += struct.pack("<I", len(self.checkpoints))
        for checkpoint in self.checkpoints:
            body += struct.pack("<QQ", *checkpoint)
        for text in (self.keep, self.meta):
            body += struct.pack("<I", len(text.encode())) + text.encode()
        if self.reader_flags & 4:
            body += struct.pack("<QI", self.deletions_from, len(self.rewinds))
            for rewind in self.rewinds:
                body += struct.pack("<QQ", *rewind)
        if self.reader_flags & 8:
            body += struct.pack("<qqqqBBH", *self.rules)
        if self.reader_flags & 16:
            body += struct.pack("<d", self.admit)
        if self.reader_flags & 32:
            body += struct.pack("<IQq", *self.admit_from)
        whole = b"BBEDMAN\n" + struct.pack("<IIQ", self.version, 0, len(body)) + body
        return whole + struct.pack("<I", crc32c(whole))

    def segment(self) -> bytes:
        header = b"BBEDSEG\n" + struct.pack("<II16sQQQ", VERSION, 0, self.uuid, 1, self.epoch, self.stride)
        out = (header + struct.pack("<I", crc32c(header))).ljust(BLOCK, b"\0")
        for kind, records in self.chunks or ((1, tuple(default_records())),):
            begin = len(out)
            first_slot = -(-begin // self.stride)
            out = out.ljust(first_slot * self.stride, b"\0")
            for id_, _, payload in records if kind == 1 else ():
                crc = crc32c(self.uuid + struct.pack("<q", id_) + payload)
                out += (payload + struct.pack("<I", crc)).ljust(self.stride, b"\0")
            out = out.ljust(-(-len(out) // 8) * 8, b"\0")
            index = b"".join(struct.pack("<q", id_) for id_, _, _ in records)
            index += b"".join(struct.pack("<Q", version) for _, version, _ in records)
            index += b"".join(count for _, _, count in records if kind == 3)
            index_offset = len(out)
            end = -(-(index_offset + len(index) + 80) // BLOCK) * BLOCK
            trailer = b"BBEDCHK\n" + struct.pack(
                "<IIQQQQQQIII",
                *(
                    kind,
                    len(records),
                    1,
                    self.epoch,
                    begin,
                    end,
                    first_slot,
                    index_offset,
                    crc32c(index),
                    0,
                    0,
                ),
            )
            trailer += struct.pack("<I", crc32c(self.uuid + trailer))
            out = (out + index).ljust(end - 80, b"\0") + trailer
        return out

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        segment = self.segment()
        (folder / "segment-0000000000000001").write_bytes(segment)
        (folder / f"manifest-{self.epoch:016d}").write_bytes(self.manifest(len(segment)))
        return folder


def payload(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def default_records() -> list[tuple[int, int, bytes]]:
    return [
        (5, 1, payload(*range(1, 13))),
        (99, 2, payload(*np.arange(12) / 8)),
        (0, 3, payload(*[-0.0] * 12)),
    ]


def read_table(folder: Path) -> dict[int, tuple[int, bytes]]:
    """Newest (version, payload) of every stored id, read as FORMAT.md says."""
    found, stored = read_newest(folder)
    rows = {id_: (version, body) for id_, (version, kind, body) in found.items() if kind == 1}
    assert len(rows) == stored
    return rows


def read_newest(folder: Path) -> tuple[dict[int, tuple[int, int, bytes]], int]:
    """Newest (version, kind, payload or count) of every id, and the number of rows in the manifest."""
    manifest = max(folder.glob("manifest-*")).read_bytes()
    assert manifest[:8] == b"BBEDMAN\n"
    assert struct.unpack_from("<I", manifest, len(manifest) - 4)[0] == crc32c(manifest[:-4])
    uuid = manifest[40:56]
    epoch = struct.unpack_from("<Q", manifest, 56)[0]
    at = 56 + 6 * 8 + 8 + 24 + 48 + 8
    payload_bytes, _, stored = struct.unpack_from("<QQQ", manifest, at)
    at += 24
    stride = (payload_bytes + 4 + 7) // 8 * 8
    (num_fields,) = struct.unpack_from("<I", manifest, at)
    at += 4
    for _ in range(num_fields):
        at += 4 + struct.unpack_from("<I", manifest, at)[0] + 9
    (num_segments,) = struct.unpack_from("<I", manifest, at)
    at += 4
    rows: dict[int, tuple[int, int, bytes]] = {}
    for index in range(num_segments):
        number, _, length = struct.unpack_from("<QQQ", manifest, at + 24 * index)
        data = (folder / f"segment-{number:016d}").read_bytes()[:length]
        end = length
        while end > BLOCK:  # chunks chain backwards: each knows where it begins
            trailer = data[end - 80 : end]
            assert trailer[:8] == b"BBEDCHK\n"
            assert struct.unpack_from("<I", trailer, 76)[0] == crc32c(uuid + trailer[:76])
            kind, count, segment, chunk_epoch, begin, chunk_end, first_slot, index_offset, index_crc = (
                struct.unpack_from("<IIQQQQQQI", trailer, 8)
            )
            assert kind in (1, 2, 3) and (segment, chunk_end) == (number, end) and chunk_epoch <= epoch
            assert crc32c(data[index_offset : index_offset + (24 if kind == 3 else 16) * count]) == index_crc
            ids = struct.unpack_from(f"<{count}q", data, index_offset)
            versions = struct.unpack_from(f"<{count}Q", data, index_offset + 8 * count)
            for slot, (id_, version) in enumerate(zip(ids, versions, strict=True), start=first_slot):
                at_count = index_offset + 16 * count + 8 * (slot - first_slot)
                body = data[at_count : at_count + 8] if kind == 3 else b""
                if kind == 1:
                    record = data[slot * stride : (slot + 1) * stride]
                    body, crc = record[:payload_bytes], struct.unpack_from("<I", record, payload_bytes)[0]
                    assert crc == crc32c(uuid + struct.pack("<q", id_) + body)
                else:
                    assert index_offset == first_slot * stride
                if id_ not in rows or rows[id_][0] < version:
                    rows[id_] = (version, kind, body)
            end = begin
    return rows, stored


# ---- pinned bytes


def test_crc32c_is_castagnoli() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_pinned_bytes_of_a_table() -> None:
    made = Made()
    segment = made.segment()
    assert len(segment) == 2 * BLOCK
    assert segment[:64].hex() == PINNED["segment header"]
    assert segment[BLOCK : BLOCK + 24].hex() == PINNED["before the first record"]
    assert segment[-80:].hex() == PINNED["chunk trailer"]
    assert made.manifest(len(segment)).hex() == PINNED["manifest"]


def test_pinned_initial_values() -> None:
    for (init, seed, id_), expected in INITIAL.items():
        kind = {"normal": bb.Normal(0.5), "uniform": bb.Uniform(-0.25, 0.75)}[init]
        with bb.create(None, dim=5, num_rows=None, init=kind, seed=seed) as table:
            assert table.lookup([id_])[0].tobytes().hex() == expected
        assert initial_rows(kind, seed, np.array([id_]), 5)[0].tobytes().hex() == expected


def test_the_page_has_vectors_that_hold() -> None:
    """FORMAT.md's own test vectors, read from the page, against the core and against NumPy."""
    page = FORMAT.read_text()
    rows = re.findall(r"^\| (Normal|Uniform)\(([^)]*)\) \| (\S+) \| (\d+) \| `([^`]*)` \|$", page, re.MULTILINE)
    as_bytes = re.findall(r"`([0-9a-f]{64})`", page)
    assert len(rows) == len(as_bytes) == 4
    for (kind, arguments, seed, id_, values), expected in zip(rows, as_bytes, strict=True):
        init = {"Normal": bb.Normal, "Uniform": bb.Uniform}[kind](*map(float, arguments.split(",")))
        with bb.create(None, dim=8, num_rows=None, init=init, seed=int(seed, 0)) as table:
            row = table.lookup([int(id_)])[0]
        assert row.tolist() == [float.fromhex(value) for value in values.split()]
        assert row.tobytes().hex() == expected
        assert initial_rows(init, int(seed, 0), np.array([int(id_)]), 8)[0].tobytes().hex() == expected


# ---- both ways


def test_a_table_made_by_hand_opens(tmp_path: Path) -> None:
    folder = Made(keep="by-hand").write(tmp_path / "made")
    assert bb.check(folder) == []
    with bb.open(folder, ram="16MiB") as table:
        assert (table.dim, table.num_rows, table.step, table.epoch) == (4, 100, 3, 1)
        assert table.optimizer == bb.Adam(lr=0.01) and table.init == bb.Normal(std=0.1) and table.seed == 7
        assert table.meta == {"made": "by hand"}
        assert np.flatnonzero(table.contains(np.arange(100))).tolist() == [0, 5, 99]
        for id_, _, body in default_records():
            whole = np.concatenate([table.get([id_], slot=s)[0] for s in ("weight", "exp_avg", "exp_avg_sq")])
            assert whole.tobytes() == body
        assert table.lookup([6])[0].tobytes() == initial_rows(bb.Normal(0.1), 7, np.array([6]), 4)[0].tobytes()
        table.update([5, 6], np.ones((2, 4), np.float32))
    assert bb.snapshots(folder) == {"by-hand": 1}
    with bb.open(folder, mode="r", snapshot="by-hand") as reader:
        assert reader.lookup([5])[0].tolist() == [1, 2, 3, 4]


def test_the_newest_version_wins_wherever_it_lies(tmp_path: Path) -> None:
    """Without versions, a compaction chunk that lands after a newer record would win."""
    new, old = payload(*[2.0] * 12), payload(*[1.0] * 12)
    chunks = ((1, ((5, 9, new),)), (1, ((5, 4, old), (6, 5, old))))
    folder = Made(chunks=chunks, stored_rows=2).write(tmp_path / "made")
    with bb.open(folder, mode="r", ram="16MiB") as reader:
        assert reader.lookup([5, 6])[:, 0].tolist() == [2.0, 1.0]


def test_a_deleted_id_is_its_initial_value(tmp_path: Path) -> None:
    body = payload(*[1.0] * 12)
    chunks = ((1, ((5, 1, body), (6, 2, body), (7, 9, body))), (2, ((5, 3, b""), (7, 4, b""))))
    folder = Made(chunks=chunks, stored_rows=2).write(tmp_path / "made")
    with bb.open(folder, mode="r", ram="16MiB") as reader:
        assert reader.contains([5, 6, 7]).tolist() == [False, True, True]
        assert reader.lookup([5])[0].tobytes() == initial_rows(bb.Normal(0.1), 7, np.array([5]), 4)[0].tobytes()
        assert reader.lookup([6, 7]).tolist() == [[1.0] * 4] * 2


def test_the_facts_of_the_change_feed_open(tmp_path: Path) -> None:
    body = payload(*[1.0] * 12)
    chunks = ((1, ((5, 1, body), (6, 2, body))), (2, ((5, 3, b""),)))
    facts: dict[str, Any] = {"chunks": chunks, "stored_rows": 1, "reader_flags": 4, "epoch": 9}
    folder = Made(deletions_from=3, rewinds=((2, 4), (4, 8)), **facts).write(tmp_path / "made")
    assert bb.check(folder) == []
    with bb.open(folder, ram="16MiB") as table:
        assert table.contains([5, 6]).tolist() == [False, True]
    for commit, undone in ((3, "commit 2"), (5, "commit 4"), (7, "commit 4")):
        with pytest.raises(ValueError, match=f"commit {commit} was undone: the table went back to {undone}"):
            bb.changes(folder, since=commit)
    for commit in (2, 4, 8):
        with pytest.raises(ValueError, match=f"commit {commit} is gone"):
            bb.changes(folder, since=commit)
    for commit, version, gone in ((8, 2, True), (8, 3, False)):
        cursor = b"BBEDCUR\n" + struct.pack("<II16sQQ", 1, 0, UUID, commit, version)
        (folder / "cursor-c").write_bytes(cursor + struct.pack("<I", crc32c(cursor)))
        if gone:
            with pytest.raises(ValueError, match="deleted after it are no longer known"):
                bb.changes(folder, "c")
    (change,) = bb.changes(folder, "c")
    assert change.deleted.tolist() == [5] and change.ids.tolist() == []
    assert (folder / "cursor-c").read_bytes()[:48] == b"BBEDCUR\n" + struct.pack("<II16sQQ", 1, 0, UUID, 9, 100)


def test_deletes_and_cursors_of_the_core_read_by_hand(tmp_path: Path) -> None:
    with bb.create(tmp_path / "table", dim=20, num_rows=400, ram="16MiB") as table:
        table.update(np.arange(100), np.ones((100, 20), np.float32))
        table.commit(keep="full")
        table.delete(np.arange(0, 100, 2))
        table.update([4], np.ones((1, 20), np.float32))
        commit = table.commit()
        assert sorted(read_table(tmp_path / "table")) == [1, 3, 4, *range(5, 100, 2)]
        list(bb.changes(tmp_path / "table", "c"))
        cursor = (tmp_path / "table" / "cursor-c").read_bytes()
        manifest = (tmp_path / "table" / f"manifest-{commit:016d}").read_bytes()
        assert cursor[:32] == b"BBEDCUR\n" + struct.pack("<II", 1, 0) + manifest[40:56]
        assert struct.unpack_from("<Q", cursor, 32)[0] == commit and cursor[40:48] == manifest[80:88]
        assert struct.unpack_from("<I", cursor, 48)[0] == crc32c(cursor[:48]) and len(cursor) == 52
        assert struct.unpack_from("<Q", manifest, 24)[0] == 4 and struct.unpack_from(
            "<QI", manifest, len(manifest) - 16
        ) == (1, 0)
        table.rewind("full")
        back = table.epoch
        manifest = (tmp_path / "table" / f"manifest-{back:016d}").read_bytes()
        assert struct.unpack_from("<QIQQ", manifest, len(manifest) - 32) == (0, 1, commit - 1, back)


def test_a_table_of_the_core_reads_by_hand(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {
        "dim": 20,
        "num_rows": 400,
        "optimizer": bb.Adam(lr=0.01),
        "init": bb.Normal(0.1),
        "seed": 3,
    }
    oracle = ReferenceTable(**kwargs)
    rng = np.random.default_rng(0)
    with bb.create(tmp_path / "table", ram="16MiB", **kwargs) as table:
        for step in range(6):
            ids = rng.integers(0, 400, 150)
            grads = rng.standard_normal((150, 20)).astype(np.float32)
            table.update(ids, grads)
            oracle.update(ids, grads)
            if step % 2:
                table.commit()
    rows = read_table(tmp_path / "table")
    assert sorted(rows) == np.flatnonzero(oracle.contains(np.arange(400))).tolist()
    for id_, (_, body) in rows.items():
        expected = b"".join(oracle.get([id_], slot=s)[0].tobytes() for s in ("weight", *oracle.slots))
        assert body[:240] == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_weights_are_padded_to_four_bytes(tmp_path: Path, dtype: str) -> None:
    kwargs: dict[str, Any] = {"dim": 5, "num_rows": 9, "optimizer": bb.Adagrad(), "init": bb.Normal(1.0)}
    with bb.create(tmp_path / "table", dtype=dtype, ram="16MiB", **kwargs) as table:
        table.update([4, 7], np.ones((2, 5), np.float32))
        weight, sums = table.lookup([4, 7]), table.get([4, 7], slot="sum")
    rows = read_table(tmp_path / "table")
    for index, id_ in enumerate((4, 7)):
        body = rows[id_][1]
        narrow = weight[index].view(np.uint32) >> 16 if dtype == "bfloat16" else weight[index].astype(np.float16)
        assert body[:10] == (narrow.astype(np.uint16) if dtype == "bfloat16" else narrow).tobytes()
        assert body[12:32] == sums[index].tobytes() and len(body) == 32


def test_a_run_reads_by_hand(tmp_path: Path) -> None:
    with bb.Run(tmp_path / "run") as run:
        table = run.table("user", create={"dim": 4, "num_rows": 10, "optimizer": bb.SGD()})
        table.update([3], np.ones((1, 4), np.float32))
        run.commit(files={"dense.pt": b"weights", "other": b""}, meta={"step": 1}, keep="best")
        epoch, table_epoch = run.epoch, table.epoch
    newest = max((tmp_path / "run").glob("run-*"))
    assert newest.name == f"run-{epoch:016d}"
    line, digest, end = newest.read_bytes().split(b"\n")
    assert digest.decode() == hashlib.sha256(line).hexdigest() and end == b""
    manifest = json.loads(line)
    assert manifest["bunkbed_run"] == 1 and manifest["epoch"] == epoch and manifest["keep"] == "best"
    assert manifest["meta"] == {"step": 1} and manifest["tables"] == {"user": table_epoch}
    for name, content in (("dense.pt", b"weights"), ("other", b"")):
        number, length, sha = manifest["files"][name]
        assert (tmp_path / "run" / "files" / f"file-{number:016d}").read_bytes() == content
        assert (length, sha) == (len(content), hashlib.sha256(content).hexdigest())
    assert list(read_table(tmp_path / "run" / "tables" / "user")) == [3]


# ---- one bad file per error


def broken(change: Callable[[bytearray], None], name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        change(data)
        (folder / name).write_bytes(bytes(data))

    return apply


def flip(place: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[place] ^= 1

    return change


MANIFEST, SEGMENT = "manifest-0000000000000001", "segment-0000000000000001"


@pytest.mark.parametrize(
    ("made", "kind", "message"),
    [
        (Made(version=2), bb.FormatError, r"version 2.*version 1"),
        (Made(reader_flags=1 << 40), bb.FormatError, r"newer"),
        (Made(init_kind=9), bb.FormatError, r"initialiser 9"),
        (Made(optimizer_kind=9), bb.FormatError, r"optimizer 9"),
        (Made(dim=0), bb.FormatError, r"malformed"),
        (Made(payload_bytes=40), bb.FormatError, r"exp_avg_sq"),
        (Made(fields=(("weight", 0, 4, 0), ("weight", 0, 4, 16))), bb.FormatError, r"twice"),
        (Made(fields=(("weight", 7, 4, 0),)), bb.FormatError, r"dtype 7"),
        (Made(fields=(("exp_avg", 0, 4, 0),)), bb.FormatError, r"first field"),
        (Made(shard_index=3), bb.FormatError, r"malformed|shard"),
        (Made(segment_bytes=1 << 30), bb.CorruptionError, r"segment.*(short|bytes)"),
        (Made(segment_bytes=5000), bb.FormatError, r"segment 1"),
        (Made(stored_rows=7), bb.CorruptionError, r"7"),
        (Made(chunks=((1, ((100, 1, bytes(48)),)),), stored_rows=1), bb.CorruptionError, r"100"),
        (Made(chunks=((1, ((-1, 1, bytes(48)),)),), stored_rows=1), bb.CorruptionError, r"-1|18446744073709551615"),
        (Made(chunks=((1, ((5, 100, bytes(48)),)),), stored_rows=1), bb.CorruptionError, r"version"),
        (Made(chunks=((4, ((5, 1, b""),)),), stored_rows=0), bb.FormatError, r"unknown kind 4"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_manifest_that_lies(tmp_path: Path, made: Made, kind: type[Exception], message: str) -> None:
    folder = made.write(tmp_path / "made")
    for mode in ("r", "w"):
        with pytest.raises(kind, match=message):
            bb.open(folder, mode=mode, ram="16MiB")
    assert bb.check(folder)


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (broken(flip(3), MANIFEST), r"manifest"),
        (broken(flip(100), MANIFEST), r"manifest.*checksum"),
        (broken(lambda data: data.append(0), MANIFEST), r"manifest"),
        (broken(lambda data: data.__delitem__(slice(50, None)), MANIFEST), r"manifest"),
        (broken(lambda data: data.clear(), MANIFEST), r"manifest"),
        (broken(flip(3), SEGMENT), r"segment"),
        (broken(flip(40), SEGMENT), r"segment.*checksum"),
        (broken(flip(2 * BLOCK - 1), SEGMENT), r"segment.*checksum"),
        (broken(flip(2 * BLOCK - 40), SEGMENT), r"segment.*checksum"),
        (broken(lambda data: data.__delitem__(slice(BLOCK, None)), SEGMENT), r"segment"),
        (lambda folder: (folder / SEGMENT).unlink(), r"segment"),
    ],
)
def test_a_damaged_file(tmp_path: Path, apply: Callable[[Path], None], message: str) -> None:
    folder = Made().write(tmp_path / "made")
    apply(folder)
    for mode in ("r", "w"):
        with pytest.raises(bb.CorruptionError, match=message):
            bb.open(folder, mode=mode, ram="16MiB")
    assert bb.check(folder)


def test_a_damaged_record_is_an_error_when_read(tmp_path: Path) -> None:
    folder = Made().write(tmp_path / "made")
    first_record = -(-BLOCK // Made().stride) * Made().stride
    broken(flip(first_record + 9), SEGMENT)(folder)
    with bb.open(folder, mode="r", ram="16MiB") as reader:
        with pytest.raises(bb.CorruptionError, match=r"id 5|row 5"):
            reader.lookup([5])
        assert reader.lookup([99])[0].tolist() == [0, 0.125, 0.25, 0.375]
    assert any("5" in problem for problem in bb.check(folder))


def test_a_record_of_another_table_is_an_error(tmp_path: Path) -> None:
    folder = Made().write(tmp_path / "made")
    other = Made(uuid=bytes(16)).write(tmp_path / "other")
    (folder / SEGMENT).write_bytes((other / SEGMENT).read_bytes())
    with pytest.raises(bb.CorruptionError, match=r"segment"):
        bb.open(folder, mode="r", ram="16MiB")


def test_a_damaged_newest_manifest_names_the_older_one(tmp_path: Path) -> None:
    folder = Made(keep="first").write(tmp_path / "made")
    with bb.open(folder, ram="16MiB") as table:
        table.update([1], np.ones((1, 4), np.float32))
    newest = max(folder.glob("manifest-*"))
    assert newest.name != MANIFEST
    broken(flip(60), newest.name)(folder)
    with pytest.raises(bb.CorruptionError, match=rf"{newest.name}(.|\n)*(first|{MANIFEST}|remain: 1)"):
        bb.open(folder, ram="16MiB")
    newest.unlink()  # what the error says to do: going back is the user's decision
    with bb.open(folder, ram="16MiB") as table:
        assert len(table) == 3 and table.lookup([5])[0].tolist() == [1, 2, 3, 4]


def test_an_unknown_writer_flag_is_read_only(tmp_path: Path) -> None:
    folder = Made(writer_flags=1 << 40).write(tmp_path / "made")
    with pytest.raises(bb.ReadOnlyError, match=r"newer|mode"):
        bb.open(folder, ram="16MiB")
    with bb.open(folder, mode="r", ram="16MiB") as reader:
        assert reader.lookup([5])[0].tolist() == [1, 2, 3, 4]


def test_bytes_above_the_committed_length_are_discarded(tmp_path: Path) -> None:
    """A torn tail is not bit rot: it is what a crash leaves."""
    folder = Made().write(tmp_path / "made")
    with (folder / SEGMENT).open("ab") as file:
        file.write(b"\xff" * 12_345)
    (folder / "segment-0000000000000002").write_bytes(b"torn")
    (folder / "new-manifest").write_bytes(b"torn")
    with bb.open(folder, ram="16MiB") as table:
        assert table.lookup([5])[0].tolist() == [1, 2, 3, 4]
        table.update([6], np.ones((1, 4), np.float32))
    with bb.open(folder, ram="16MiB") as table:
        assert len(table) == 4
    assert bb.check(folder) == []


PINNED: dict[str, str] = {
    "segment header": (
        "424245445345470a0100000000000000000102030405060708090a0b0c0d0e0f01000000000000000100000000000000"
        "3800000000000000b441cc3c00000000"
    ),
    "before the first record": ("000000000000000000000000000000000000000000000000"),
    "chunk trailer": (
        "4242454443484b0a01000000030000000100000000000000010000000000000000100000000000000020000000000000"
        "4a00000000000000d810000000000000076f09ea0000000000000000ac31f41a"
    ),
    "manifest": (
        "424245444d414e0a01000000000000003d01000000000000000000000000000000000000000000000001020304050607"
        "08090a0b0c0d0e0f01000000000000000000000000000000030000000000000064000000000000000200000000000000"
        "640000000000000004000000010300009a9999999999b93f000000000000000007000000000000007b14ae47e17a843f"
        "3a8c30e28e79453ecdccccccccccec3f2b8716d9cef7ef3f000000000000000000000000000000000000000001000000"
        "300000000000000024490000000000000300000000000000030000000600000077656967687400040000000000000007"
        "0000006578705f6176670004000000100000000a0000006578705f6176675f7371000400000020000000010000000100"
        "000000000000010000000000000000200000000000000000000000000000130000007b226d616465223a202262792068"
        "616e64227d0994e22a"
    ),
}

INITIAL: dict[tuple[str, int, int], str] = {
    ("normal", 0, 0): "afb6ec3e34bbfdbe9f1b9ebeb2d176beb5c6593e",
    ("normal", 7, 1): "f8b740beccbc24bfeb837b3e5bdf67bf9cee12be",
    ("normal", 18446744073709551615, 9223372036854775807): "8ed0a4be651b03bf374b043f5c3b4dbd48e75fbf",
    ("uniform", 0, 0): "a09f183ec569213f58aff83eb601b63e2a8a883e",
    ("uniform", 7, 1): "38ba203ebc970b3f0828a0bdee35353f2529233f",
    ("uniform", 18446744073709551615, 9223372036854775807): "d4946c3efcdc163f84a0aa3e800a7cbce8923cbe",
}
