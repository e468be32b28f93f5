"""Rows in and out of a table: ``.npy``, Parquet, safetensors; streaming, in memory of one chunk.

| format | import | export |
|---|---|---|
| ``.npy`` | float32[N, dim]; row `i` is id `i`, or ``ids[i]`` | every id in ``[0, num_rows)`` |
| Parquet | columns ``id`` and ``weight``, and any slot | stored rows, in log order |
| safetensors | ``weight`` float32[N, dim], ``id`` int64[N] if there, and any slot | stored rows, in log order |

A file is written under a temporary name beside its own and takes its place when complete: an interrupted export leaves
nothing half-done.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from bunkbed.arguments import Floats, Ids, as_ids
from bunkbed.table import Table

#: (rows done, rows in all) after each chunk.
Progress = Callable[[int, int], None]
Chunk = tuple[Ids | None, dict[str, Floats]]


def import_rows(
    table: Table,
    path: str | os.PathLike[str],
    *,
    ids: Any = None,
    chunk: int = 65_536,
    progress: Progress | None = None,
) -> int:
    """Set rows of `table` from a file; commits nothing.

    Args:
        table: an open table; rows already there are overwritten.
        path: ``.npy``, ``.parquet`` or ``.safetensors``.
        ids: int64[N], the id of each row of a file that names none; default ``0 .. N-1``.
        chunk: rows held in memory at a time.
        progress: called after each chunk.

    Returns:
        Rows set.

    Raises:
        ValueError: an unknown suffix, another dim or number of rows, a column missing. TypeError: not float32.
        IndexError: an id outside the table. Rows of earlier chunks are set then; the table's last commit is as it was.
        ImportError: the format's library is missing; says how to install it.
    """
    source = Path(path)
    total, chunks = _reader(source)(source, table, chunk)
    given = None if ids is None else as_ids(ids, table=f"table '{table.name}'").reshape(-1)
    if given is not None and given.size != total:
        raise ValueError(f"{source} holds {total} rows, ids names {given.size}")
    if given is not None:
        table.contains(given)  # an id outside the table is found before anything is set
    elif source.suffix == ".npy" and table.num_rows is not None and total > table.num_rows:
        raise ValueError(f"{source} holds {total} rows, table '{table.name}' has {table.num_rows}")
    done = 0
    for own, values in chunks:
        count = len(values["weight"])
        if own is None:
            own = np.arange(done, done + count) if given is None else given[done : done + count]
        for slot, rows in values.items():
            table.set(own, rows, slot=slot)
        done += count
        if progress is not None:
            progress(done, total)
    return done


def export_rows(
    table: Table,
    path: str | os.PathLike[str],
    *,
    slots: Sequence[str] = ("weight",),
    chunk: int = 65_536,
    progress: Progress | None = None,
) -> int:
    """Write rows of `table` to a file, in place of one that is there.

    Args:
        table: an open table, a reader too.
        path: ``.npy``, ``.parquet`` or ``.safetensors``.
        slots: what to write beside the ids; ``.npy`` holds one.
        chunk: rows held in memory at a time.
        progress: called after each chunk.

    Returns:
        Rows written.

    Raises:
        ValueError: an unknown suffix or slot; ``.npy`` of a table without num_rows, or of several slots.
        OSError: the disk is full; nothing is left behind. ImportError: the format's library is missing.
    """
    target = Path(path)
    write = _writer(target)
    lengths = {slot: table.get(np.empty(0, np.int64), slot).shape[-1] for slot in slots}
    temporary = target.with_name(f".{target.name}.part")
    try:
        count: int = write(table, temporary, lengths, chunk, progress)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _suffix(path: Path, known: dict[str, Any]) -> Any:
    if path.suffix not in known:
        raise ValueError(f"cannot tell the format of {path}; its name must end in one of {', '.join(known)}")
    return known[path.suffix]


def _pyarrow_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ImportError('Parquet needs pyarrow; install it with: pip install "bunkbed[train]"') from None
    return pyarrow.parquet


def _check_rows(source: Path, shape: tuple[int, ...], dtype: Any, length: int, what: str) -> None:
    if np.dtype(dtype) != np.float32:
        raise TypeError(f"{source}: {what} must be float32[N, {length}], got {dtype}{list(shape)}")
    if len(shape) != 2 or shape[1] != length:
        raise ValueError(f"{source}: {what} must be float32[N, {length}], got {dtype}{list(shape)}")


def _slot_length(table: Table, slot: str) -> int:
    return int(table.get(np.empty(0, np.int64), slot).shape[-1])


# ---- .npy


def _read_npy(source: Path, table: Table, chunk: int) -> tuple[int, Iterator[Chunk]]:
    try:
        rows = np.load(source, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{source} is not a .npy file: {error}") from None
    _check_rows(source, rows.shape, rows.dtype, table.dim, "rows")

    def chunks() -> Iterator[Chunk]:
        for begin in range(0, len(rows), chunk):
            yield None, {"weight": np.array(rows[begin : begin + chunk])}

    return len(rows), chunks()


def _write_npy(table: Table, path: Path, lengths: dict[str, int], chunk: int, progress: Progress | None) -> int:
    if table.num_rows is None:
        raise ValueError(f"table '{table.name}' takes any id, which .npy cannot name; export to .parquet")
    if len(lengths) != 1:
        raise ValueError(f".npy holds one slot, got {', '.join(lengths)}; export to .parquet or .safetensors")
    ((slot, length),) = lengths.items()
    rows = table.num_rows
    with path.open("wb") as file:
        np.lib.format.write_array_header_2_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, length)})
        for begin in range(0, rows, chunk):
            ids = np.arange(begin, min(rows, begin + chunk))
            values = table.lookup(ids, touch=False) if slot == "weight" else table.get(ids, slot)
            file.write(np.ascontiguousarray(values, "<f4").data)
            if progress is not None:
                progress(begin + len(ids), rows)
    return rows


# ---- Parquet


def _read_parquet(source: Path, table: Table, chunk: int) -> tuple[int, Iterator[Chunk]]:
    file = _pyarrow_parquet().ParquetFile(source)
    names = file.schema_arrow.names
    for column in ("id", "weight"):
        if column not in names:
            raise ValueError(f"{source} has no column {column!r}; it has: {', '.join(names)}")
    slots = [name for name in names if name == "weight" or name in table.slots]

    def chunks() -> Iterator[Chunk]:
        for batch in file.iter_batches(batch_size=chunk, columns=["id", *slots]):
            values = {}
            for slot in slots:
                column = batch.column(slot)
                length = _slot_length(table, slot)
                flat = column.flatten().to_numpy(zero_copy_only=False)
                if flat.size != len(column) * length:
                    raise ValueError(f"{source}: column {slot!r} must hold lists of {length} values")
                _check_rows(source, (len(column), length), flat.dtype, length, f"column {slot!r}")
                values[slot] = flat.reshape(len(column), length)
            yield as_ids(batch.column("id").to_numpy(zero_copy_only=False), table=str(source)), values

    return file.metadata.num_rows, chunks()


def _write_parquet(table: Table, path: Path, lengths: dict[str, int], chunk: int, progress: Progress | None) -> int:
    parquet = _pyarrow_parquet()
    import pyarrow as pa

    fields = [pa.field("id", pa.int64(), nullable=False)]
    fields += [pa.field(slot, pa.list_(pa.float32(), length), nullable=False) for slot, length in lengths.items()]
    total, done = len(table), 0
    with parquet.ParquetWriter(path, pa.schema(fields)) as writer:
        for ids, values in _stored(table, lengths, chunk):
            columns = [pa.array(ids)]
            columns += [
                pa.FixedSizeListArray.from_arrays(pa.array(values[slot].reshape(-1)), length)
                for slot, length in lengths.items()
            ]
            writer.write_table(pa.table(columns, schema=pa.schema(fields)))
            done += len(ids)
            if progress is not None:
                progress(done, total)
    return done


def _stored(table: Table, lengths: dict[str, int], chunk: int) -> Iterator[tuple[Ids, dict[str, Floats]]]:
    """Stored rows in log order with several slots at once: one scan each, in step."""
    scans = [table.scan(slot, chunk) for slot in lengths]
    for parts in zip(*scans, strict=True):
        yield parts[0][0], {slot: part[1] for slot, part in zip(lengths, parts, strict=True)}


# ---- safetensors: 8 bytes of header length, a JSON header, the tensors' bytes. Written here because the library
# wants every tensor in memory; the layout is its documented format.


def _read_safetensors(source: Path, table: Table, chunk: int) -> tuple[int, Iterator[Chunk]]:
    size = source.stat().st_size
    with source.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, 100 << 20):
            raise ValueError(f"{source} is not a safetensors file")
        header = json.loads(file.read(length))
    if "weight" not in header:
        raise ValueError(f"{source} has no tensor 'weight'; it has: {', '.join(sorted(header))}")
    rows = int(header["weight"]["shape"][0])

    def view(name: str, dtype: str) -> Any:
        tensor = header[name]
        begin, end = tensor["data_offsets"]
        shape = tuple(tensor["shape"])
        if begin < 0 or 8 + length + end > size or end - begin != np.dtype(dtype).itemsize * int(np.prod(shape)):
            raise ValueError(f"{source}: tensor {name!r} lies outside the file")
        return np.memmap(source, dtype, "r", offset=8 + length + begin, shape=shape)

    views = {}
    for slot in ("weight", *table.slots):
        if slot not in header:
            continue
        dtype, width = header[slot]["dtype"], _slot_length(table, slot)
        _check_rows(source, tuple(header[slot]["shape"]), "float32" if dtype == "F32" else "float64", width, slot)
        views[slot] = view(slot, "<f4")
    own = view("id", "<i8") if "id" in header else None

    def chunks() -> Iterator[Chunk]:
        for begin in range(0, rows, chunk):
            part = slice(begin, begin + chunk)
            yield (
                None if own is None else np.array(own[part]),
                {slot: np.array(values[part]) for slot, values in views.items()},
            )

    return rows, chunks()


def _write_safetensors(table: Table, path: Path, lengths: dict[str, int], chunk: int, progress: Progress | None) -> int:
    total = len(table)
    header: dict[str, Any] = {"id": {"dtype": "I64", "shape": [total], "data_offsets": [0, total * 8]}}
    end = total * 8
    for slot, length in lengths.items():
        header[slot] = {"dtype": "F32", "shape": [total, length], "data_offsets": [end, end + total * length * 4]}
        end += total * length * 4
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    done = 0

    def put(file: IO[bytes], offset: int, array: Any) -> None:
        file.seek(base + offset)
        file.write(array.data)

    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(base + end)
        for ids, values in _stored(table, lengths, chunk):
            put(file, done * 8, np.ascontiguousarray(ids, "<i8"))
            for slot, length in lengths.items():
                put(
                    file, header[slot]["data_offsets"][0] + done * length * 4, np.ascontiguousarray(values[slot], "<f4")
                )
            done += len(ids)
            if progress is not None:
                progress(done, total)
    return done


def _reader(path: Path) -> Any:
    return _suffix(path, {".npy": _read_npy, ".parquet": _read_parquet, ".safetensors": _read_safetensors})


def _writer(path: Path) -> Any:
    return _suffix(path, {".npy": _write_npy, ".parquet": _write_parquet, ".safetensors": _write_safetensors})
