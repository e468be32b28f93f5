"""What callers hand in, checked once at the public door: ids, gradients, values, offsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bunkbed import _native

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_INT64_MAX = np.iinfo(np.int64).max


def describe(array: npt.NDArray[Any]) -> str:
    """Dtype and shape as messages show them: ``float32[32, 4]``."""
    return f"{array.dtype}[{', '.join(map(str, array.shape))}]"


def as_ids(ids: Any, *, what: str = "ids", table: str = "table") -> Ids:
    """Ids as contiguous int64 of any shape.

    Integers of other widths are widened; bool, float and everything else is refused, as are unsigned values past
    int64.

    Raises:
        TypeError: not integers.
        IndexError: an unsigned value that int64 cannot hold; names it and its position.
    """
    if type(ids) is np.ndarray and ids.dtype == np.int64:
        return ids if ids.flags.c_contiguous else np.ascontiguousarray(ids)
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{table}: {what} must be int64[N], got {type(ids).__name__} ({error})") from None
    if array.size == 0 and array.dtype.kind == "f" and not isinstance(ids, np.ndarray):
        return array.astype(np.int64)  # an empty list has no dtype of its own
    if array.dtype.kind not in "iu":
        hint = ""
        if array.dtype.kind == "O" and array.size and all(isinstance(v, int) for v in array.flat):
            position = next(i for i, v in enumerate(array.flat) if not -(2**63) <= v <= _INT64_MAX)
            raise IndexError(f"{table}: id {array.flat[position]} at position {position} does not fit int64")
        if array.dtype.kind == "f":
            hint = "; convert them with ids.astype(np.int64) if they are whole numbers"
        if array.dtype.kind == "b":
            hint = "; a mask is not ids: use np.flatnonzero(mask)"
        raise TypeError(f"{table}: {what} must be int64[N], got {describe(array)}{hint}")
    if array.dtype == np.uint64 and array.size and int(array.max()) > _INT64_MAX:
        position = int(np.flatnonzero(array.ravel() > _INT64_MAX)[0])
        raise IndexError(f"{table}: id {array.ravel()[position]} at position {position} does not fit int64")
    return np.ascontiguousarray(array, dtype=np.int64)


def as_rows(values: Any, shape: tuple[int, ...], *, what: str, table: str) -> Floats:
    """Float32 values of exactly `shape`, contiguous.

    Raises:
        TypeError: another dtype.
        ValueError: another shape.
    """
    array = values if type(values) is np.ndarray else np.asarray(values)
    if array.dtype != np.float32:
        expected = ", ".join(map(str, shape))
        raise TypeError(f"{table}: {what} must be float32[{expected}], got {describe(array)}")
    if array.shape != shape:
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{table}: {what} must be float32[{expected}], got {describe(array)}")
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def as_out(out: Any, shape: tuple[int, ...], *narrow: str, table: str) -> npt.NDArray[Any]:
    """A writable C-contiguous array of float32, or one of the `narrow` dtypes, of exactly `shape`.

    Raises:
        ValueError: another dtype, shape or layout.
    """
    allowed = ("float32", *narrow)
    if not isinstance(out, np.ndarray) or out.dtype.name not in allowed:
        got = describe(out) if isinstance(out, np.ndarray) else type(out).__name__
        raise ValueError(f"{table}: out must be an array of {' or '.join(allowed)}, got {got}")
    if out.shape != shape or not out.flags.c_contiguous or not out.flags.writeable:
        expected = ", ".join(map(str, shape))
        raise ValueError(
            f"{table}: out must be a writable C-contiguous array of shape [{expected}], got {describe(out)}"
        )
    return out


def as_offsets(offsets: Any, num_ids: int, *, table: str) -> Ids:
    """Starts of bags, int64[B]: the first is 0, none decreases, none passes the ids' end.

    Raises:
        TypeError: not integers. ValueError: not such starts; names the first bad one and its position.
    """
    array = as_ids(offsets, what="offsets", table=table)
    if array.ndim != 1:
        raise ValueError(f"{table}: offsets must be int64[B], got {describe(array)}")
    if array.size == 0:
        if num_ids:
            raise ValueError(f"{table}: there are {num_ids} ids and no offsets, so no bag to put them in")
        return array
    position = _native.first_bad_offset(array, num_ids)
    if position < 0:
        return array
    if position == 0:
        raise ValueError(f"{table}: offsets must begin with 0, got {array[0]} at position 0")
    if array[position] < array[position - 1]:
        raise ValueError(
            f"{table}: offsets must not decrease, got {array[position]} at position {position} "
            f"after {array[position - 1]}"
        )
    raise ValueError(f"{table}: offset {array[position]} at position {position} passes the {num_ids} ids")
