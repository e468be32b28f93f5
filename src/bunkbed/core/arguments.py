"""Checks of the arguments of public calls: ids, gradients, values, offsets. Each argument is checked once."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from bunkbed import _native
from bunkbed.core.typed import shortened
from bunkbed.core.types import Array

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_INT64_MAX = np.iinfo(np.int64).max
_SWAPPED = np.dtype(np.float32).newbyteorder()


def describe(array: Array) -> str:
    """Return dtype and shape for messages: ``float32[32, 4]``."""
    return f"{array.dtype}[{', '.join(map(str, array.shape))}]"


def as_ids(ids: ArrayLike, *, what: str = "ids", table: str = "table") -> Ids:
    """Return ids as contiguous int64 of any shape.

    Integers of other widths are widened. An empty list is accepted, although NumPy makes it float.

    Raises:
        TypeError: not integers, for instance bool or float.
        IndexError: a value that int64 cannot hold; names it and its position.
    """
    if type(ids) is np.ndarray and ids.dtype == np.int64:
        return _as_plain(ids)
    array = as_array(ids, "int64[N]", what, table)
    if array.size == 0 and array.dtype.kind == "f" and not isinstance(ids, np.ndarray):
        return array.astype(np.int64)  # NumPy gives an empty list the dtype float64
    if array.dtype.kind not in "iu":
        hint = ""
        if array.dtype.kind == "O" and array.size and all(isinstance(v, int) for v in array.flat):
            for position, value in enumerate(array.flat):
                if not -(2**63) <= value <= _INT64_MAX:
                    raise IndexError(f"{table}: id {value} at position {position} does not fit int64")
            hint = "; convert them with ids.astype(np.int64)"
        if array.dtype.kind == "f":
            hint = "; convert them with ids.astype(np.int64) if they are whole numbers"
        if array.dtype.kind == "b":
            hint = "; a mask is not ids: use np.flatnonzero(mask)"
        raise TypeError(f"{table}: {what} must be int64[N], got {describe(array)}{hint}")
    if array.dtype == np.uint64 and array.size and int(array.max()) > _INT64_MAX:
        position = int(np.flatnonzero(array.ravel() > _INT64_MAX)[0])
        raise IndexError(f"{table}: id {array.ravel()[position]} at position {position} does not fit int64")
    return _as_plain(array.astype(np.int64, copy=False))


def is_masked_array(values: object) -> bool:
    """Return whether `values` is a masked array. Does not import `np.ma` (1.5 MiB): without it no such array exists."""
    return "numpy.ma" in sys.modules and isinstance(values, np.ma.MaskedArray)


def as_array(values: ArrayLike, wanted: str, what: str, table: str) -> Array:
    """Return an argument as an array.

    Raises:
        TypeError: NumPy cannot convert it. ValueError: a masked array with a masked value, whose mask would be ignored.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"{table}: {what} must be {wanted}, got {type(values).__name__} ({error})") from None
    if is_masked_array(values) and np.ma.is_masked(values):
        position = int(np.flatnonzero(np.ma.getmaskarray(np.ma.asarray(values)))[0])
        raise ValueError(
            f"{table}: {what} are masked at position {position}; leave masked values out, or fill them: {what}.filled()"
        )
    return array


def _as_plain(array: Array) -> Array:
    """Return the array contiguous and aligned, as the core requires."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else np.require(array, requirements=("C", "A"))


def as_rows(values: ArrayLike, shape: tuple[int, ...], *, what: str, table: str) -> Floats:
    """Return float32 values of exactly `shape`, contiguous; the other byte order is converted.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, a masked value.
    """
    array: Array
    if type(values) is np.ndarray:
        array = values
    else:
        array = as_array(values, f"float32[{', '.join(map(str, shape))}]", what, table)
    if array.dtype != np.float32 and array.dtype == _SWAPPED:
        array = array.astype(np.float32)
    if array.dtype != np.float32:
        expected = ", ".join(map(str, shape))
        raise TypeError(f"{table}: {what} must be float32[{expected}], got {describe(array)}")
    if array.shape != shape:
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{table}: {what} must be float32[{expected}], got {describe(array)}")
    return _as_plain(array)


def require_finite(rows: Floats, *, what: str, table: str) -> None:
    """Check that no value of [N, dim] is NaN or infinite.

    Raises:
        ValueError: a value is; the message names the first and its position.
    """
    bad = np.argwhere(~np.isfinite(rows))
    if bad.size:
        position, element = bad[0].tolist()
        raise ValueError(
            f"{table}: {what} must be finite, got {rows[position, element]} at position {position}, element {element}"
        )


def as_out(out: object, shape: tuple[int, ...], *narrow: str, table: str, read: Sequence[Array | None] = ()) -> Array:
    """Check that `out` is a writable C-contiguous array of float32 or a `narrow` dtype, of exactly `shape`; return it.

    Args:
        read: arrays that are read while `out` is written, so must not share memory with it.

    Raises:
        ValueError: another dtype, byte order, shape or layout, or memory shared with an array of `read`.
    """
    allowed = ("float32", *narrow)
    if not isinstance(out, np.ndarray) or is_masked_array(out):
        got = type(out).__name__
    else:
        got = describe(out) if out.dtype.name not in allowed or not out.dtype.isnative else ""
    if got or not isinstance(out, np.ndarray):
        raise ValueError(f"{table}: out must be an array of {' or '.join(allowed)} in native byte order, got {got}")
    if out.shape != shape or not out.flags.carray:
        expected = ", ".join(map(str, shape))
        raise ValueError(
            f"{table}: out must be a writable, aligned, C-contiguous array of shape [{expected}], got "
            f"{describe(out)}{_layout(out)}"
        )
    if any(one is not None and np.may_share_memory(one, out) for one in read):
        raise ValueError(f"{table}: out shares memory with what is read; give it an array of its own")
    return out


def _layout(array: Array) -> str:
    """Return text that names the reasons why the core cannot write to the array."""
    flags = array.flags
    lacks = {
        "read-only": not flags.writeable,
        "not aligned": not flags.aligned,
        "not contiguous": not flags.c_contiguous,
    }
    return "".join(f", {name}" for name, lacking in lacks.items() if lacking)


def as_flag(value: object, *, what: str, table: str) -> bool:
    """Return a flag as a bool.

    Raises:
        TypeError: `value` is neither True nor False.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{table}: {what} must be True or False, got {shortened(value)}")
    return bool(value)


def as_number(value: object, *, what: str, table: str) -> float:
    """Return a number as a float.

    Raises:
        TypeError: `value` is not a number. ValueError: it is too large for a float.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{table}: {what} must be a number, got {shortened(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{table}: {what} must be finite, got {shortened(value)}") from None


def as_whole(value: object, *, what: str, table: str = "", low: int, high: int) -> int:
    """Return an int in [low, high].

    Raises:
        TypeError: `value` is not an int. ValueError: it is out of range.
    """
    label = f"{table}: {what}" if table else what
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{label} must be an int, got {shortened(value)}")
    if not low <= value <= high:
        raise ValueError(f"{label} must be in [{low}, {high}], got {shortened(value)}")
    return int(value)


def as_offsets(offsets: ArrayLike, num_ids: int, *, table: str) -> Ids:
    """Return the starts of bags, int64[B]: the first is 0, they do not decrease, none is above `num_ids`.

    Raises:
        TypeError: not integers. ValueError: a bad start; names the first and its position.
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
