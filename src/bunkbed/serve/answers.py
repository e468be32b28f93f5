"""Answers as JSON or as an Arrow IPC stream."""

from __future__ import annotations

import numpy as np
import orjson

from bunkbed.serve.source import BadRequest, Found

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"


def media_type_of(accept: str) -> str:
    """Return the type of the answer that a client wants, by its Accept header."""
    return ARROW if ARROW in accept.lower() else JSON


def encode(found: Found, media_type: str) -> bytes:
    """Return the bytes of an answer.

    Raises:
        BadRequest: JSON, and a value is NaN or infinite.
    """
    return _arrow(found) if media_type == ARROW else _json(found)


def _json(found: Found) -> bytes:
    for name, values in found.columns.items():
        if isinstance(values, np.ndarray) and values.dtype.kind == "f" and not np.isfinite(values).all():
            bad = np.argwhere(~np.isfinite(values))[0]
            raise BadRequest(f"{name}[{bad[0]}] has a value that JSON cannot have (NaN, infinity); accept {ARROW}", 406)
    columns = {
        name: np.ascontiguousarray(values) if isinstance(values, np.ndarray) else values.to_pylist()
        for name, values in found.columns.items()
    }
    return orjson.dumps({"version": found.version, **columns}, option=orjson.OPT_SERIALIZE_NUMPY)


def _arrow(found: Found) -> bytes:
    import pyarrow as pa

    columns: dict[str, pa.Array] = {}
    for name, values in found.columns.items():
        if isinstance(values, np.ndarray) and values.ndim == 2:
            flat = pa.array(np.ascontiguousarray(values).reshape(-1))
            columns[name] = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
        else:
            columns[name] = pa.array(values) if isinstance(values, np.ndarray) else values
    batch = pa.record_batch(columns).replace_schema_metadata({"version": str(found.version)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    result: bytes = sink.getvalue().to_pybytes()
    return result
