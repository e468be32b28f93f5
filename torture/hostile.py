"""Malicious files: valid checksums over false numbers, deep JSON, pipes and devices in place of files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from bunkbed import _native
from bunkbed.testing.checksum import crc32c
from torture.parts import Clock, Progress, Result, Size, folder, in_processes

ROWS = 12
DIM = 4
RAM = "1MiB"
#: What a case may map, in addition to what its process has from the parts of the torture before it.
ADDRESS_SPACE = 6 << 30
LONGEST_S = 20.0
#: Errors that a hostile file may cause. Any other error, and any crash of the process, is a failure.
CLEAN = (bb.BunkbedError, OSError, ValueError, MemoryError)
NUMBERS = [
    0,
    1,
    2,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
]


def manifests(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the manifest with each number written at each byte, and a valid checksum."""
    body = data[:-4]
    for at in range(8, len(body)):
        for number in NUMBERS:
            for width in (1, 4, 8):
                if number >= 1 << 8 * width or at + width > len(body):
                    continue
                changed = body[:at] + number.to_bytes(width, "little") + body[at + width :]
                if changed != body:
                    yield f"byte {at} = {number} ({width})", changed + struct.pack("<I", crc32c(changed))
    for length in range(0, len(body), 3):
        cut = bytearray(body[:length])
        if length >= 24:
            struct.pack_into("<Q", cut, 16, length - 24)
        yield f"cut at {length}", bytes(cut) + struct.pack("<I", crc32c(bytes(cut)))


def segments(data: bytes, uuid: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield segments with a false header, trailer or index, and valid checksums."""
    for at in range(8, 56):
        for number in NUMBERS:
            changed = bytearray(data)
            changed[at : at + 8] = number.to_bytes(8, "little")
            changed[56:60] = struct.pack("<I", crc32c(bytes(changed[:56])))
            yield f"header byte {at} = {number}", bytes(changed)
    trailer = len(data) - 80
    for at in range(8, 76):
        for number in NUMBERS:
            for width in (4, 8):
                if number >= 1 << 8 * width or at + width > 76:
                    continue
                changed = bytearray(data)
                changed[trailer + at : trailer + at + width] = number.to_bytes(width, "little")
                changed[-4:] = struct.pack("<I", crc32c(bytes(changed[trailer:-4]), crc32c(uuid)))
                yield f"trailer byte {at} = {number} ({width})", bytes(changed)
    index = struct.unpack_from("<Q", data, trailer + 56)[0]
    count = struct.unpack_from("<I", data, trailer + 12)[0]
    for at in range(index, index + 16 * count, 8):
        for number in [*NUMBERS, *range(ROWS)]:
            changed = bytearray(data)
            changed[at : at + 8] = number.to_bytes(8, "little")
            changed[trailer + 64 : trailer + 68] = struct.pack("<I", crc32c(bytes(changed[index : index + 16 * count])))
            changed[-4:] = struct.pack("<I", crc32c(bytes(changed[trailer:-4]), crc32c(uuid)))
            yield f"index byte {at} = {number}", bytes(changed)


def directories(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield index snapshots with a false header or entries, and valid checksums."""
    for at in range(8, 80):
        for number in NUMBERS:
            for width in (4, 8):
                if number >= 1 << 8 * width or at + width > 80:
                    continue
                changed = bytearray(data)
                changed[at : at + width] = number.to_bytes(width, "little")
                changed[80:84] = struct.pack("<I", crc32c(bytes(changed[:80])))
                yield f"header byte {at} = {number} ({width})", bytes(changed)
    size = struct.unpack_from("<Q", data, 48)[0]
    place = data[16:32] + data[32:40]
    for index, begin in enumerate(range(4096, len(data), size)):
        for at in range(begin + 4, begin + 100, 3):
            for number in NUMBERS[::3]:
                changed = bytearray(data)
                changed[at : at + 8] = number.to_bytes(8, "little")
                seed = crc32c(place + index.to_bytes(8, "little"))
                changed[begin : begin + 4] = struct.pack("<I", crc32c(bytes(changed[begin + 4 : begin + size]), seed))
                yield f"piece byte {at} = {number}", bytes(changed)


def run_manifests(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield invalid run manifests with a valid SHA-256."""
    values = json.loads(data.splitlines()[0])
    odd: list[Any] = [
        None,
        True,
        -1,
        0,
        1 << 70,
        1.5,
        "x",
        "../../etc",
        [],
        [1],
        {},
        {"a": 1},
        {"../x": 1},
        [[]],
        "\x00",
    ]
    for key in values:
        for value in odd:
            yield f"{key} = {value!r}", json.dumps({**values, key: value}).encode()
        yield f"no {key}", json.dumps({k: v for k, v in values.items() if k != key}).encode()
    for name, entry in values["files"].items():
        for at in range(len(entry)):
            for value in odd:
                changed = [*entry[:at], value, *entry[at + 1 :]]
                yield f"files[{at}] = {value!r}", json.dumps({**values, "files": {name: changed}}).encode()
    for value in odd:
        yield f"tables = {value!r}", json.dumps({**values, "tables": {"user": value}}).encode()
        yield f"table {value!r}", json.dumps({**values, "tables": {str(value): 1}}).encode()
        for name in ("user", "loot", "shard-0000"):
            yield f"{name} at {value!r}", json.dumps({**values, "places": {name: value}}).encode()
        yield f"sharding = {value!r}", json.dumps({**values, "sharding": value}).encode()
    deep = 100_000
    yield "deep", b'{"meta":' + b"[" * deep + b"]" * deep + b"}"
    yield "deep meta", json.dumps(values).encode()[:-1] + b',"meta":' + b"[" * deep + b"]" * deep + b"}"
    yield "keys twice", json.dumps(values).encode()[:-1] + b',"epoch":9}'
    yield "no JSON", b"not json"
    yield "no object", b"[1, 2]"
    yield "a number", b"1"
    yield "NaN", b'{"bunkbed_run": NaN}'
    yield "not UTF-8", b'{"bunkbed_run": "\xff"}'
    yield "future", json.dumps({**values, "bunkbed_run": 2}).encode()


def use_table(path: Path) -> None:
    """Make all calls of a user on the files at `path`."""
    for mode in ("r", "w"):
        try:
            with bb.open(path, mode=mode, ram=RAM) as table:
                ids = np.arange(min(ROWS, table.num_rows or ROWS))
                for slot in ("weight", *table.slots):
                    table.get(ids, slot=slot)
                for _ in table.scan():
                    pass
        except CLEAN:
            pass
    with contextlib.suppress(CLEAN):
        bb.check(path)


def use_run(path: Path) -> None:
    for mode in ("r", "w"):
        try:
            run = bb.Run(path, mode=mode, ram="64MiB")
        except CLEAN:
            continue
        try:
            for name in run.files:
                with contextlib.suppress(CLEAN):
                    run.read(name)
            for name in run.table_names:
                with contextlib.suppress(CLEAN):
                    run.table(name).lookup(np.arange(3))
            with contextlib.suppress(CLEAN):
                run.table("loot", create={"dim": DIM, "num_rows": ROWS})
            run.snapshots()
        except CLEAN:
            pass
        finally:
            run.close(commit=False)
    with contextlib.suppress(CLEAN):
        bb.check(path)


def _make(root: Path) -> None:
    with bb.create(root / "table", dim=DIM, num_rows=ROWS, ram=RAM) as table:
        table.set(np.arange(ROWS), np.ones((ROWS, DIM), np.float32))
        _native.set_index_snapshots(1, in_line=True)
        table.commit(keep="first", meta={"a": 1})
        table.commit(meta={"a": 2})  # names the index snapshot of the commit before
        _native.set_index_snapshots()
    with bb.Run(root / "run", ram="64MiB") as run:
        run.table("user", create={"dim": DIM, "num_rows": ROWS}).set(np.arange(3), np.ones((3, DIM), np.float32))
        run.commit(files={"dense.pt": b"dense"})


Case = tuple[str, Callable[[Path], None]]


def _put(folder_name: str, name: str, data: bytes, use: Callable[[Path], None]) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        path = root / "copy"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(root / folder_name, path)
        (path / name).write_bytes(data)
        use(path)

    return apply


def _replace(folder_name: str, name: str, kind: str, use: Callable[[Path], None]) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        path = root / "copy"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(root / folder_name, path)
        place = path / name
        place.unlink()
        if kind == "pipe":
            os.mkfifo(place)
        elif kind == "folder":
            place.mkdir()
        elif kind == "link to itself":
            place.symlink_to(place.name)
        elif kind == "link to the file":
            place.symlink_to(root / folder_name / name)
        elif kind == "link to nothing":
            place.symlink_to("nothing")
        elif kind == "link to /dev/zero":
            place.symlink_to("/dev/zero")
        elif kind == "unreadable":
            place.write_bytes(b"")
            place.chmod(0)
        use(path)

    return apply


def numbers_cases(root: Path) -> list[Case]:
    table = root / "table"
    newest = max(p.name for p in table.glob("manifest-*"))
    data = (table / newest).read_bytes()
    cases = [(f"manifest, {what}", _put("table", newest, bad, use_table)) for what, bad in manifests(data)]
    segment = max(p.name for p in table.glob("segment-*"))
    uuid = data[40:56]
    bad_segments = segments((table / segment).read_bytes(), uuid)
    cases += [(f"segment, {what}", _put("table", segment, bad, use_table)) for what, bad in bad_segments]
    checkpoint = max(p.name for p in table.glob("directory-*"))
    bad_checkpoints = directories((table / checkpoint).read_bytes())
    cases += [(f"directory, {what}", _put("table", checkpoint, bad, use_table)) for what, bad in bad_checkpoints]
    name = "run-0000000000000001"
    for what, body in run_manifests((root / "run" / name).read_bytes()):
        sealed = body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"
        cases.append((f"run manifest, {what}", _put("run", name, sealed, use_run)))
    return cases


def places_cases(root: Path) -> list[Case]:
    cases: list[Case] = []
    kinds = [
        "pipe",
        "folder",
        "link to itself",
        "link to the file",
        "link to nothing",
        "link to /dev/zero",
        "unreadable",
    ]
    for folder_name, use in (("table", use_table), ("run", use_run)):
        top = root / folder_name
        for file in sorted(p for p in top.rglob("*") if p.is_file()):
            name = str(file.relative_to(top))
            cases += [(f"{folder_name}/{name}: {kind}", _replace(folder_name, name, kind, use)) for kind in kinds]
    return cases


def _survive(title: str, cases_of: Callable[[Path], list[Case]], size: Size) -> Result:
    """Run every case, in processes with limits of memory and time; a process that dies names its case."""

    def work(index: int, send: Callable[[Any], None]) -> Any:
        clock = Clock(size.seconds)
        result = Result(title)
        with folder() as root:
            _make(root)
            cases = cases_of(root)
            mine = cases[index :: size.processes]
            if size.factor < 1:
                mine = random.Random(size.seed).sample(mine, min(len(mine), size.of(len(mine), least=20)))
            most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + ADDRESS_SPACE
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            progress = Progress(title.split(":")[0], len(mine), index)
            for number, (what, apply) in enumerate(mine):
                if clock.is_over:
                    break
                progress.show(number)
                send(what)
                signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
                result.tried += 1
                try:
                    apply(root)
                    result.passed += 1
                except Exception as error:
                    result.fail(f"{what}: {type(error).__name__}: {str(error)[:200]}")
            signal.setitimer(signal.ITIMER_REAL, size.seconds + 60)
        return result

    total = Result(title)
    for part in in_processes(work, size.processes, size.seconds + 60):
        total.add(part)
    return total


def run(size: Size) -> list[Result]:
    return [
        _survive("hostile numbers under sound checksums: a clean error or right use", numbers_cases, size),
        _survive("pipes, folders, links, devices in place of files: no hang, no crash", places_cases, size),
    ]
