"""Damaged files of a table: every bit flipped, every length cut, files swapped; also of other stores, to compare.

Damage is *detected* when opening, reading all rows or `check` reports it, and *harmless* when every bit of every row is
still right; otherwise the store returned wrong rows without an error.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from bunkbed import _native
from torture import hostile
from torture.parts import Child, Clock, Progress, Result, Size, folder, in_processes

ROWS = 12
DIM = 4
RAM = "1MiB"
OURS = (bb.BunkbedError, OSError, ValueError, MemoryError)


def values() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, DIM), dtype=np.float32)


def make(path: Path, seed: int = 0, commits: int = 2) -> None:
    """Make a small table of several commits and segments."""
    chance = np.random.default_rng(seed)
    _native.set_index_snapshots(1, in_line=True)
    with bb.create(path, dim=DIM, num_rows=ROWS, ram=RAM) as table:
        table.set(np.arange(ROWS), values())
        table.commit(keep="first")
        for _ in range(commits - 1):
            table.update(chance.integers(0, ROWS, 6), chance.standard_normal((6, DIM), dtype=np.float32))
            table.commit()
        _native.set_index_snapshots()  # otherwise close() would take another checkpoint, with a commit


def contents(table: Any) -> bytes:
    ids = np.arange(ROWS)
    return b"".join(table.get(ids, slot=slot).tobytes() for slot in ("weight", *table.slots))


def judge(path: Path, wanted: bytes, kept: bytes) -> str:
    """Return "detected", "harmless" or "wrong"."""
    try:
        with bb.open(path, mode="r", ram=RAM) as table:
            newest = contents(table)
        with bb.open(path, snapshot="first", ram=RAM) as table:
            first = contents(table)
    except OURS:
        return "detected"
    if bb.check(path):
        return "detected"
    return "harmless" if (newest, first) == (wanted, kept) else "wrong"


def _table(root: Path) -> tuple[Path, bytes, bytes, dict[str, bytes]]:
    path = root / "table"
    make(path)
    with bb.open(path, mode="r", ram=RAM) as table:
        wanted = contents(table)
    with bb.open(path, snapshot="first", ram=RAM) as table:
        kept = contents(table)
    files = {p.name: p.read_bytes() for p in sorted(path.iterdir()) if p.name != "lock"}
    return path, wanted, kept, files


def flips(size: Size) -> list[Result]:
    """Flip every bit of every file, and cut to every length."""

    def work(index: int, send: Callable[[Any], None]) -> Any:
        clock = Clock(size.seconds)
        bits = Result("single-bit flips detected or harmless")
        cuts = Result("truncations detected or harmless")
        counts = {"detected": 0, "harmless": 0, "wrong": 0}
        with folder() as root:
            path, wanted, kept, files = _table(root)
            cases: list[tuple[str, int, bool]] = []
            for name, data in files.items():
                cases += [(name, bit, True) for bit in range(8 * len(data))]
                cases += [(name, length, False) for length in range(len(data))]
            total = [sum(case[2] is is_flip for case in cases) for is_flip in (True, False)]
            cases = cases[index :: size.processes]
            if size.factor < 1:
                cases = random.Random(size.seed).sample(cases, size.of(len(cases), least=50))
            progress = Progress("flips and truncations", len(cases), index)
            for name, at, is_flip in cases:
                if clock.is_over:
                    break
                progress.show(bits.tried + cuts.tried)
                data = files[name]
                changed = bytearray(data)
                if is_flip:
                    changed[at // 8] ^= 1 << at % 8
                else:
                    changed = changed[:at]
                (path / name).write_bytes(changed)
                verdict = judge(path, wanted, kept)
                (path / name).write_bytes(data)
                counts[verdict] += 1
                result = bits if is_flip else cuts
                result.tried += 1
                result.passed += verdict != "wrong"
                if verdict == "wrong":
                    result.fail(f"{name}, {'bit' if is_flip else 'length'} {at}: wrong rows, nothing noticed")
        return bits, cuts, counts, total

    bits, cuts = Result("single-bit flips: no wrong row"), Result("truncations: no wrong row")
    counts = {"detected": 0, "harmless": 0, "wrong": 0}
    for one, other, found, total in in_processes(work, size.processes, size.seconds + 120):
        bits.wanted, cuts.wanted = total
        bits.add(one)
        cuts.add(other)
        counts = {key: counts[key] + found[key] for key in counts}
    bits.note = (
        f"both: {counts['detected']:,} detected, {counts['harmless']:,} harmless (padding that is never read), "
        f"{counts['wrong']} wrong; of {bits.wanted + cuts.wanted:,}"
    )
    return [bits, cuts]


# ---- Whole files


def _exchanges(root: Path) -> Iterator[tuple[str, Path, str, bytes]]:
    """Yield (description, table, name, bytes of another file to write there)."""
    path, _, _, files = _table(root)
    make(root / "other", seed=1)
    foreign = {p.name: p.read_bytes() for p in (root / "other").iterdir()}
    older = root / "older"
    make(older, seed=0, commits=1)
    for name, data in files.items():
        for other, theirs in files.items():
            if other != name:
                yield f"{name} replaced by its own {other}", path, name, theirs
        for other, theirs in foreign.items():
            yield f"{name} replaced by another table's {other}", path, name, theirs
        yield f"{name} with bytes behind its end", path, name, data + b"more" * 2000
        yield f"{name} empty", path, name, b""
        yield f"{name} of zeros", path, name, bytes(len(data))
    yield "the newest manifest twice", path, "manifest-0000000000000009", files[max(files, key=str)]
    newest = max(name for name in files if name.startswith("manifest-"))
    yield "the newest manifest again under a later name", path, "manifest-0000000000000009", files[newest]
    yield "another table's manifest added", path, "manifest-0000000000000009", foreign[newest]
    segment = max(name for name in files if name.startswith("segment-"))
    yield "a segment twice", path, "segment-0000000000000099", files[segment]


def exchanged(size: Size) -> list[Result]:
    result = Result("swapped, foreign, duplicated, padded files: no wrong row")
    counts = {"detected": 0, "harmless": 0, "wrong": 0}
    with folder() as root:
        path = root / "table"
        exchanges = _exchanges(root)
        wanted = kept = b""
        for what, path, name, data in exchanges:
            if not wanted:
                with bb.open(path, mode="r", ram=RAM) as table:
                    wanted = contents(table)
                with bb.open(path, snapshot="first", ram=RAM) as table:
                    kept = contents(table)
            file = path / name
            before = file.read_bytes() if file.exists() else None
            file.write_bytes(data)
            verdict = judge(path, wanted, kept)
            if before is None:
                file.unlink()
            else:
                file.write_bytes(before)
            counts[verdict] += 1
            result.tried += 1
            result.passed += verdict != "wrong"
            if verdict == "wrong":
                result.fail(what)
    result.note = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return [result]


# ---- Other stores, the same script


def _npy_make(path: Path) -> None:
    path.mkdir()
    np.save(path / "rows.npy", values())


def _npy_read(path: Path) -> bytes:
    return np.array(np.load(path / "rows.npy", mmap_mode="r")).tobytes()


def _lmdb_make(path: Path) -> None:
    import lmdb

    with lmdb.open(str(path), map_size=1 << 20) as env, env.begin(write=True) as txn:
        for row, value in enumerate(values()):
            txn.put(row.to_bytes(8, "big"), value.tobytes())


def _lmdb_read(path: Path) -> bytes:
    import lmdb

    with lmdb.open(str(path), map_size=1 << 20, readonly=True, lock=False) as env, env.begin() as txn:
        found = [txn.get(row.to_bytes(8, "big")) for row in range(ROWS)]
    if None in found:
        return b"a row is gone"
    return b"".join(found)


def _rocksdb_make(path: Path) -> None:
    from rocksdict import Options, Rdict

    options = Options(raw_mode=True)
    store = Rdict(str(path), options)
    for row, value in enumerate(values()):
        store[row.to_bytes(8, "big")] = value.tobytes()
    store.flush()
    store.close()


def _rocksdb_read(path: Path) -> bytes:
    from rocksdict import AccessType, Options, Rdict

    store = Rdict(str(path), Options(raw_mode=True), access_type=AccessType.read_only())
    try:
        found = [store.get(row.to_bytes(8, "big")) for row in range(ROWS)]
    finally:
        store.close()
    return b"a row is gone" if None in found else b"".join(found)


PEERS = {
    "np.memmap": (_npy_make, _npy_read),
    "LMDB": (_lmdb_make, _lmdb_read),
    "RocksDB": (_rocksdb_make, _rocksdb_read),
}
SILENT_FILES = ("LOCK", "lock.mdb", "LOG", "IDENTITY")


def _peer(name: str, size: Size) -> Result:
    """Try some thousand flips and cuts on another store, in child processes, because some end the process."""
    result = Result(f"the same on {name}: right rows or an error", score=True)
    make_it, read = PEERS[name]
    crashed = wrong = detected = 0
    with folder() as root:
        try:
            maker = Child(lambda send: make_it(root / "store"))
            if maker.wait() != 0:
                raise ImportError(str(maker.sent))
        except ImportError as error:
            result.note = f"not measured: {error}"
            return result
        store = root / "store"
        files = {p.name: p.read_bytes() for p in sorted(store.iterdir()) if p.name not in SILENT_FILES}
        files = {file: data for file, data in files.items() if data}
        places = [(file, at) for file, data in files.items() for at in range(len(data))]
        chance = random.Random(size.seed)
        clock = Clock(min(size.seconds, 90.0))
        cases = [(*chance.choice(places), chance.randrange(9)) for _ in range(size.of(2000, least=20))]
        done = 0
        progress = Progress(f"the same on {name}", len(cases))
        while done < len(cases) and not clock.is_over:
            part = cases[done : done + 50]

            def look(send: Callable[[Any], None], part: list[tuple[str, int, int]] = part) -> None:
                for file, at, bit in part:
                    changed = bytearray(files[file])
                    if bit < 8:
                        changed[at] ^= 1 << bit
                    else:
                        changed = changed[:at]
                    copy = root / "copy"
                    shutil.rmtree(copy, ignore_errors=True)
                    shutil.copytree(store, copy)
                    (copy / file).write_bytes(changed)
                    try:
                        verdict = "right" if read(copy) == values().tobytes() else "wrong"
                    except Exception:
                        verdict = "detected"
                    send(verdict)

            child = Child(look, 60.0)
            child.wait()
            done += len(child.sent)
            progress.show(done)
            result.tried += len(child.sent)
            wrong += child.sent.count("wrong")
            detected += child.sent.count("detected")
            if len(child.sent) < len(part):
                done += 1
                result.tried += 1
                crashed += 1
    result.passed = result.tried - wrong - crashed
    result.note = f"{wrong} wrong rows without an error, {crashed} crashes or hangs, {detected} detected"
    return result


def peers(size: Size) -> list[Result]:
    """Run the same on the other stores, as many at once as there are processors."""

    def work(index: int, send: Callable[[Any], None]) -> Any:
        return [_peer(name, size) for name in list(PEERS)[index :: size.processes]]

    found = [one for part in in_processes(work, size.processes, 2 * size.seconds + 120) for one in part]
    names = list(PEERS)
    return sorted(found, key=lambda one: next(i for i, name in enumerate(names) if name in one.name))


def run(size: Size) -> list[Result]:
    return [*flips(size), *exchanged(size), *hostile.run(size), *peers(size)]
