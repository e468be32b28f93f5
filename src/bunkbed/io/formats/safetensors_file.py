"""safetensors: ``weight`` float32[N, dim], ``id`` int64[N], and any slot; the step in the file's metadata.

The documented layout is 8 bytes of header length, a JSON header, the tensors' bytes. This module reads and writes it
because the library needs every tensor in memory, and its NumPy part has no bfloat16.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from bunkbed.core.arguments import Ids
from bunkbed.core.types import Json
from bunkbed.io.common.source import Chunk, Reading, Source, check_rows, read_fully, rows_of_file
from bunkbed.io.common.writing import Writing

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8}
_STEP = "bunkbed.step"
#: Most bytes of a header, by the format's definition.
_MAX_HEADER = 100_000_000


def read(reading: Reading) -> Source:
    """Return rows of a tensor, named by a tensor of ids or by position."""
    path = reading.path
    reading.refuse(state=reading.state)
    header, base = _header(reading)
    metadata = header.pop("__metadata__", {})
    names = {slot: reading.name if slot == "weight" and reading.name else slot for slot in reading.slots}
    names = {slot: name for slot, name in names.items() if slot == "weight" or name in header}
    for name in names.values():
        if name not in header:
            raise ValueError(f"{path} has no tensor {name!r}; it has: {', '.join(sorted(header))}")
    if not names:
        raise ValueError(f"{path} has none of {', '.join(reading.slots)}; it has: {', '.join(sorted(header))}")
    first = next(iter(names.values()))
    rows = int(header[first]["shape"][0]) if header[first]["shape"] else 0
    for slot, name in names.items():
        dtype = header[name]["dtype"]
        check_rows(f"{path}: {name}", header[name]["shape"], _DTYPES.get(dtype, dtype), reading.length(slot))
        if header[name]["shape"][0] != rows:
            raise ValueError(f"{path}: {name} has {header[name]['shape'][0]} rows, {first} has {rows}")
    key = reading.id_column or "id"
    if reading.id_column is not None and key not in header:
        raise ValueError(f"{path} has no tensor {key!r}; it has: {', '.join(sorted(header))}")
    if key in header and (header[key]["dtype"], header[key]["shape"]) != ("I64", [rows]):
        raise TypeError(f"{path}: {key} must be I64[{rows}], got {header[key]['dtype']}{header[key]['shape']}")
    chunk = reading.rows_of()

    def chunks() -> Iterator[Chunk]:
        tensors = {
            slot: rows_of_file(
                path,
                base + header[name]["data_offsets"][0],
                rows,
                reading.length(slot),
                _DTYPES[header[name]["dtype"]],
                chunk,
            )
            for slot, name in names.items()
        }
        keys: Iterator[Ids | None] = iter(())
        if key in header:
            keys = _ids(reading, base + header[key]["data_offsets"][0], rows, chunk)
        for parts in zip(*tensors.values(), strict=True):
            yield next(keys, None), dict(zip(tensors, parts, strict=True))

    return Source(rows, tuple(names), chunks, int(metadata[_STEP]) if _STEP in metadata else None)


def _header(reading: Reading) -> tuple[Json, int]:
    """Return the file's header, after a check that all tensors are inside the file, and the offset of their bytes."""
    path = reading.path
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise ValueError(
                f"{path} is not a safetensors file: it says that its header has {length} bytes, of {size} in all and "
                f"{_MAX_HEADER} at most"
            )
        try:
            header: Json = json.loads(file.read(length))
            for name, tensor in header.items():
                if name == "__metadata__":
                    continue
                begin, end = tensor["data_offsets"]
                wanted = _SIZES.get(tensor["dtype"])
                if not all(type(number) is int and number >= 0 for number in (begin, end, *tensor["shape"])):
                    raise TypeError("a size is no number")
                count = math.prod(tensor["shape"])
                is_outside = 8 + length + end > size
                if is_outside or (wanted is not None and end - begin != wanted * count):
                    raise ValueError(f"{path}: tensor {name!r} lies outside the file")
        except (AttributeError, KeyError, TypeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from None
    return header, 8 + length


def _ids(reading: Reading, offset: int, rows: int, chunk: int) -> Iterator[Ids]:
    with reading.path.open("rb", buffering=0) as file:
        file.seek(offset)
        for begin in range(0, rows, chunk):
            part = np.empty(min(chunk, rows - begin), "<i8")
            read_fully(file, part, reading.path)
            yield part


def write(writing: Writing) -> int:
    """Write stored rows, in log order."""
    total = len(writing.table)
    header: Json = {}
    if writing.state:
        header["__metadata__"] = {_STEP: str(writing.table.step)}
    header["id"] = {"dtype": "I64", "shape": [total], "data_offsets": [0, total * 8]}
    end = total * 8
    for slot, length in writing.lengths.items():
        header[slot] = {"dtype": "F32", "shape": [total, length], "data_offsets": [end, end + total * length * 4]}
        end += total * length * 4
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    done = 0

    def put(file: IO[bytes], offset: int, array: Any) -> None:
        file.seek(base + offset)
        file.write(array.data)

    with writing.file.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(base + end)
        for ids, values in writing.stored():
            put(file, done * 8, np.ascontiguousarray(ids, "<i8"))
            for slot, length in writing.lengths.items():
                at = header[slot]["data_offsets"][0] + done * length * 4
                put(file, at, np.ascontiguousarray(values[slot], "<f4"))
            done += len(ids)
    writing.require_all(done, total)
    return done
