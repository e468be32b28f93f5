"""Rows in and out: `bb.import_rows` and `bb.export_rows` compared with peers that write the same bytes:
``numpy.save``, pyarrow, safetensors, and the peers of the other formats in `benchmarks.peers.rows`. The rows of each
import and export are compared bit for bit, once.

All sides end with their bytes synced to the disk. Exports find the rows in RAM, as their peers do, in a table whose
budget holds them; imports, into a table that holds few, read a file that is in the page cache, check it, and end
with a commit. Rows that must come
from the disk are exported to ``.npy`` as well, past the page cache, compared with ``numpy.save`` of an array that is
loaded from a file. Figures without a target: a peer's reading alone, into RAM; ``numpy.save`` without a sync; and the
export from the disk compared with ``numpy.save`` of rows in RAM.

``python -m benchmarks.cases.rows_in_out --bytes 20GB --ram 384MiB --limit 512MiB`` imports a ``.npy`` file of any size
inside a memory cgroup, by the command line's own path: `bb.create`, `bb.import_rows`, a commit.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import bunkbed as bb
from benchmarks.harness import common, turns
from benchmarks.harness.figures import Figure, Settings, missing
from benchmarks.peers.rows import PEERS, SAVE, Peer
from bunkbed.core.budget import parse_bytes

DIM = 64
TARGET = 0.5
RAM = "512MiB"  # holds every table here
IMPORT_RAM = "64MiB"  # holds few rows: for each row that stays in RAM an import would pay the first touch of its memory
UNSYNCED = "numpy.save not synced"
FROM_DISK = "numpy.save of a file on disk"
STATE = ("weight", "exp_avg", "exp_avg_sq")


def rows_in_out(settings: Settings) -> list[Figure]:
    """Throughput of both directions, and memory of an import."""
    rows = settings.pick(3_000, 500_000, 1_000_000)
    with common.workspace(settings.dir, rows * DIM * 4 * 16) as folder:
        figures = _npy(folder, rows, settings)
        for format in RECORDS:
            figures += _records(folder / format.name, rows, settings, format)
        for peer in PEERS:
            figures += _peer(folder / peer.format, settings, peer)
    given = ["--dir", str(settings.dir), "--seed", str(settings.seed)]
    given += settings.pick(["--tiny"], ["--bytes", "256MiB", "--limit", "120MiB"], [])
    return [*figures, measure(arguments(given))]


def _npy(folder: Path, rows: int, settings: Settings) -> list[Figure]:
    """Weights, of a table without state: the file's bytes are the records' bytes."""
    values = np.random.default_rng(settings.seed).standard_normal((rows, DIM), dtype=np.float32)
    source, target, plain = folder / "source.npy", folder / "ours.npy", folder / "plain.npy"
    np.save(source, values)

    def save() -> None:
        np.save(plain, values)
        _sync(plain)

    def load() -> None:
        np.load(source)

    def copy() -> None:
        np.save(plain, np.load(source))
        _sync(plain)

    def forget() -> None:
        common.forget_pages(folder)

    def check(table: bb.Table) -> None:
        bb.export_rows(table, target)
        assert target.read_bytes()[-values.nbytes :] == values.tobytes()
        target.unlink()

    def create(path: Path, ram: str = RAM) -> bb.Table:
        return bb.create(path, dim=DIM, num_rows=rows, optimizer=bb.SGD(), ram=ram)

    others = {"numpy.save": _alone(save, plain), UNSYNCED: _alone(lambda: np.save(plain, values), plain)}
    with create(folder / "out") as table:
        bb.import_rows(table, source)
        table.commit()
        ours = _alone(lambda: bb.export_rows(table, target), target)
        times = _turns({turns.OURS: ours, **others}, settings)
        check(table)
    figures = _figures("export to .npy", times, "numpy.save", values.nbytes, UNSYNCED)
    with bb.open(folder / "out", mode="r", ram="64MiB") as reader:
        ours = _alone(lambda: bb.export_rows(reader, target), target)
        times = _turns({turns.OURS: ours, FROM_DISK: _alone(copy, plain, forget), **others}, settings)
        check(reader)
    figures += _figures("export to .npy from the disk", times, FROM_DISK, values.nbytes, "numpy.save")
    made = folder / "in"

    def bring_in() -> None:
        with create(made, IMPORT_RAM) as table:
            bb.import_rows(table, source)

    sides = {turns.OURS: _alone(bring_in, made), "numpy.save": _alone(save, plain), "numpy.load": _alone(load, plain)}
    return figures + _figures("import of .npy", _turns(sides, settings), "numpy.save", values.nbytes, "numpy.load")


@dataclass(frozen=True)
class Records:
    """A format of ids and slots, and the library that writes and reads it.

    Args:
        write: (ids and slots by name, path). read: (path).
    """

    name: str
    peer: str
    write: Callable[[dict[str, Any], Path], Any]
    read: Callable[[Path], Any]


def _arrow_table(content: dict[str, Any]) -> Any:
    import pyarrow as pa

    columns = {"id": pa.array(content["id"])}
    for slot in STATE:
        columns[slot] = pa.FixedSizeListArray.from_arrays(pa.array(content[slot].reshape(-1)), DIM)
    return pa.table(columns)


def _write_parquet(content: dict[str, Any], path: Path) -> None:
    import pyarrow.parquet as parquet

    parquet.write_table(_arrow_table(content), path, use_dictionary=False)


def _read_parquet(path: Path) -> None:
    import pyarrow.parquet as parquet

    parquet.read_table(path)


def _write_arrow(content: dict[str, Any], path: Path) -> None:
    import pyarrow as pa

    rows = _arrow_table(content)
    with pa.ipc.new_file(str(path), rows.schema) as writer:
        writer.write_table(rows)


def _read_arrow(path: Path) -> None:
    import pyarrow as pa

    with pa.OSFile(str(path)) as file:
        pa.ipc.open_file(file).read_all()


def _write_safetensors(content: dict[str, Any], path: Path) -> None:
    import safetensors.numpy

    safetensors.numpy.save_file(content, path)


def _read_safetensors(path: Path) -> None:
    import safetensors.numpy

    safetensors.numpy.load_file(path)


RECORDS = [
    Records("parquet", "pyarrow", _write_parquet, _read_parquet),
    Records("arrow", "pyarrow", _write_arrow, _read_arrow),
    Records("safetensors", "safetensors", _write_safetensors, _read_safetensors),
]


def _records(folder: Path, rows: int, settings: Settings, format: Records) -> list[Figure]:
    """Weights with Adam's state: ids and three slots."""
    folder.mkdir()
    rng = np.random.default_rng(settings.seed)
    rows //= 3
    content: dict[str, Any] = {"id": np.arange(rows)}
    content |= {slot: rng.random((rows, DIM), dtype=np.float32) for slot in STATE}
    source, target, plain = (folder / f"{name}.{format.name}" for name in ("source", "ours", "plain"))
    num_bytes = rows * (8 + 4 * DIM * len(STATE))
    format.write(content, source)
    write, read = f"{format.peer} write", f"{format.peer} read"

    def save() -> None:
        format.write(content, plain)
        _sync(plain)

    with bb.create(folder / "out", dim=DIM, num_rows=rows, ram=RAM) as table:
        bb.import_rows(table, source)
        table.commit()
        ours = _alone(lambda: bb.export_rows(table, target, slots=STATE), target)
        times = _turns({turns.OURS: ours, write: _alone(save, plain)}, settings)
        _check(table, content)
        bb.export_rows(table, target, slots=STATE)
        _check_file(target, content)
    name = f"{format.name} with Adam state"
    figures = _figures(f"export to {name}", times, write, num_bytes)
    made = folder / "in"

    def bring_in() -> None:
        with bb.create(made, dim=DIM, num_rows=rows, ram=IMPORT_RAM) as table:
            bb.import_rows(table, source)

    sides = {turns.OURS: _alone(bring_in, made), write: _alone(save, plain)}
    sides[read] = _alone(lambda: format.read(source), plain)
    figures += _figures(f"import of {name}", _turns(sides, settings), write, num_bytes, read)
    shutil.rmtree(folder)
    return figures


def _peer(folder: Path, settings: Settings, peer: Peer) -> list[Figure]:
    """Both directions of a format, or why not."""
    if peer.needs is not None and importlib.util.find_spec(peer.needs[0]) is None:
        figure = missing(f"rows as {peer.format}", f"needs {peer.needs[0]}: pip install {peer.needs[1]}")
        print(figure.line())
        return [figure]
    rng = np.random.default_rng(settings.seed)
    rows = settings.pick(*peer.rows)
    slots = STATE if peer.has_state else STATE[:1]
    content: dict[str, Any] = {slot: rng.random((rows, DIM), dtype=np.float32) for slot in slots}
    content["weight"] = rng.standard_normal((rows, DIM), dtype=np.float32)
    given = {"format": peer.format, "ids": "word" if peer.has_words else None}
    write = peer.ready(content)
    source, ours, plain, made = (folder / name for name in ("source", "ours", "plain", "in"))
    source.mkdir(parents=True)
    write(source / peer.file)
    num_bytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    as_many = rng.integers(0, 256, num_bytes, dtype=np.uint8)

    def save(write: Callable[[Path], Any], name: str) -> turns.Turn:
        def call() -> None:
            write(plain / name)
            for path in plain.rglob("*"):
                if path.is_file():
                    _sync(path)

        return _alone(call, plain, plain.mkdir)

    def create(path: Path | None, ram: str = RAM) -> bb.Table:
        optimizer = bb.Adam() if peer.has_state else bb.SGD()
        return bb.create(path, dim=DIM, num_rows=rows, optimizer=optimizer, ram=ram)

    def bring_in() -> None:
        with create(made, IMPORT_RAM) as table:
            bb.import_rows(table, source / peer.file, **given)

    sides = {peer.side: save(write, peer.file), SAVE: save(lambda path: np.save(path, as_many), "bytes.npy")}
    first, second = (SAVE, peer.side) if peer.against_save else (peer.side, SAVE)
    name = f"{peer.format} with Adam state" if peer.has_state else peer.format
    figures = []
    with create(folder / "out") as table:
        bb.import_rows(table, source / peer.file, **given)
        _check(table, content)
        table.commit()
        if not peer.only_import:
            target = ours / peer.file

            def bring_out() -> None:
                bb.export_rows(table, target, format=peer.format, slots=slots)

            times = _turns({turns.OURS: _alone(bring_out, ours, ours.mkdir), **sides}, settings)
            figures += _figures(f"export to {name}", times, first, num_bytes, second, is_judged=peer.is_judged)
            ours.mkdir()
            bring_out()
            with create(folder / "again") as again:
                bb.import_rows(again, target, **given)
                _check(again, content)
    times = _turns({turns.OURS: _alone(bring_in, made), **sides}, settings)
    figures += _figures(f"import of {name}", times, first, num_bytes, second, is_judged=peer.is_judged)
    shutil.rmtree(folder)
    return figures


def _check(table: bb.Table, content: dict[str, Any]) -> None:
    """Each row is what it was, bit for bit."""
    ids = np.arange(len(content["weight"]))
    for slot in content.keys() - {"id"}:
        found = table.get(ids, slot)
        np.testing.assert_array_equal(found.view(np.uint32), content[slot].view(np.uint32), slot)


def _check_file(file: Path, content: dict[str, Any]) -> None:
    """What we wrote, read into a table of its own; the file goes."""
    rows = len(content["weight"])
    again = file.parent / "again"
    with bb.create(again, dim=DIM, num_rows=rows, ram=RAM) as table:
        bb.import_rows(table, file)
        _check(table, content)
    shutil.rmtree(again)
    file.unlink()


def _alone(call: Callable[[], Any], makes: Path, before: Callable[[], Any] = lambda: None) -> turns.Turn:
    """A turn that times calls which make something; removing it, and what comes `before`, is not timed."""

    def turn(indices: Any) -> list[float]:
        seconds = []
        for _ in indices:
            before()
            os.sync()  # so that no call writes back the pages of an earlier one
            seconds.append(common.timed(call))
            shutil.rmtree(makes, ignore_errors=True)
            makes.unlink(missing_ok=True)
        return seconds

    return turn


def _turns(sides: dict[str, turns.Turn], settings: Settings) -> turns.Times:
    return turns.take(sides, 1, rounds=settings.pick(1, 3, 7), steps=1, warmup=settings.pick(0, 1, 1))


def _figures(
    what: str, times: turns.Times, peer: str, num_bytes: int, *others: str, is_judged: bool = True
) -> list[Figure]:
    note = f"{common.bb_bytes(num_bytes)}; {num_bytes / times.median(turns.OURS) / 1e6:,.0f} MB/s"
    note += "".join(f", {side} {num_bytes / times.median(side) / 1e6:,.0f}" for side in (peer, *others))
    target = {"at_least": TARGET} if is_judged else {}
    figures = [turns.ratio(times, peer, name=f"{what}, ratio {peer} / bunkbed", note=note, **target)]
    figures += [turns.ratio(times, side, name=f"{what}, ratio {side} / bunkbed") for side in others]
    for figure in figures:
        print(figure.line())
    return figures


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


# ---- within a memory limit


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    options = common.parser(__doc__)
    options.add_argument("--bytes", default="1GiB", help="size of the .npy file")
    options.add_argument("--ram", default="48MiB", help="the table's budget; its directory grows with the rows")
    options.add_argument("--dim", type=int, default=256, help="numbers of a row")
    options.add_argument("--limit", default="128MiB", help="the memory cgroup")
    options.add_argument("--child", nargs=2, type=Path, metavar=("TABLE", "FILE"), help=argparse.SUPPRESS)
    parsed = options.parse_args(given)
    if parsed.tiny:
        parsed.bytes, parsed.ram = "4MiB", "8MiB"
    return parsed


def child(options: argparse.Namespace) -> None:
    """Imports inside the cgroup."""
    path, file = options.child
    rows, dim = np.load(file, mmap_mode="r").shape

    def handle() -> dict[str, Any]:
        with bb.create(path, dim=dim, num_rows=rows, optimizer=bb.SGD(), ram=options.ram) as table:
            seconds = common.timed(lambda: bb.import_rows(table, file))
            seconds += common.timed(table.commit)
        return {"seconds": seconds}

    common.serve(handle)


def measure(options: argparse.Namespace) -> Figure:
    """Writes a file, imports it in a child inside the memory limit, and compares what came in."""
    num_bytes = parse_bytes(options.bytes)
    rows, chunk = num_bytes // (options.dim * 4), 10_000
    with common.workspace(options.dir, int(num_bytes * 2.5)) as folder:
        print(common.machine(folder))
        file = folder / "rows.npy"
        block = np.random.default_rng(options.seed).standard_normal((chunk, options.dim), dtype=np.float32)
        with file.open("wb") as out:
            np.lib.format.write_array_header_2_0(
                out, {"descr": "<f4", "fortran_order": False, "shape": (rows, options.dim)}
            )
            for begin in range(0, rows, chunk):
                block[:, 0] = begin
                out.write(block[: min(chunk, rows - begin)].data)
        common.forget_pages(folder)
        command = ["-m", "benchmarks.cases.rows_in_out", "--child", str(folder / "table"), str(file)]
        command += ["--ram", options.ram]
        why_not = common.MemoryLimit.why_not()
        note = f"ram={options.ram!r}"
        peak = None
        if why_not:
            if not options.tiny:
                return Figure("peak of an import of .npy within a memory limit", None, note=why_not)
            answer = _ask(common.Child(command))
        else:
            with common.MemoryLimit(parse_bytes(options.limit)) as limit:
                answer = _ask(common.Child(command, limit))
                peak = limit.peak_bytes()
        with bb.open(folder / "table", mode="r", ram="1GiB") as table:
            seen = np.arange(0, rows, max(1, rows // 997))
            np.testing.assert_array_equal(table.lookup(seen), np.load(file, mmap_mode="r")[seen])
    size = common.bb_bytes(num_bytes)
    print(f"{size} imported and committed in {answer['seconds']:.1f} s, {note}, cgroup {options.limit}")
    rate = num_bytes / answer["seconds"] / common.MIB
    return Figure(
        f"import of a .npy of {size}, {options.dim} numbers a row, inside a memory cgroup of {options.limit}",
        rate,
        "MiB/s",
        note=note if peak is None else f"{note}; peak {common.bb_bytes(peak)}, page cache included",
    )


def _ask(process: common.Child) -> dict[str, Any]:
    try:
        return process.ask()
    finally:
        process.close()


def main() -> None:
    options = arguments()
    if options.child:
        return child(options)
    figure = measure(options)
    print(figure.line())
    if figure.value is None:
        sys.exit("no figure without a memory limit")
    return None


if __name__ == "__main__":
    main()
