"""Initial values, 16-bit rounding and admission in NumPy: a second implementation, from FORMAT.md.

All draw from Philox4x32-10 (Salmon et al., SC 2011) with key = seed and counter = (id, block, extra).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bunkbed.testing.arithmetic import FloatArray, IntArray

WordArray = NDArray[np.uint32]

# Initial values count blocks from 0; the stochastic rounding of each field counts from its own base, so that no two
# streams have a block in common.
_ROUNDING_STREAM = 0x80000000
_FIELD_STREAM = 0x01000000
# The block of admission.
_ADMISSION_STREAM = 0x40000000

_Q = (
    "-0x1.fffffep+0 0x1.00007ap+0 -0x1.5559dcp-1 0x1.ff623cp-2 "
    "-0x1.978e2ep-2 0x1.614c08p-2 -0x1.4c3d08p-2 0x1.9dfa6ep-3"
)
_SINE = "0x1.921fb6p-1 -0x1.4abbbap-4 0x1.465e92p-9 -0x1.2d9302p-15"
_COSINE = "0x1.fffffep-1 -0x1.3bd38cp-2 0x1.03ae64p-6 -0x1.4e35dap-12"
_MINUS_TWO_LN2 = np.float32(float.fromhex("-0x1.62e430p+0"))


def philox(seed: int, ids: IntArray, blocks: NDArray[np.int64], extra: int) -> WordArray:
    """Return the four Philox4x32-10 words of every block of every id, uint32[N, B, 4].

    The first of the generator's published test vectors (all inputs are 0):

    >>> [hex(word) for word in philox(0, np.zeros(1, np.int64), np.zeros(1, np.int64), 0)[0, 0].tolist()]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    wide = ids.astype(np.uint64)[:, None]
    shape = (ids.size, blocks.size)
    c0 = np.broadcast_to(wide & low, shape)
    c1 = np.broadcast_to(wide >> half, shape)
    c2 = np.broadcast_to(blocks.astype(np.uint64)[None], shape)
    c3 = np.full(shape, extra & 0xFFFFFFFF, np.uint64)
    key0, key1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        product0 = c0 * np.uint64(0xD2511F53)
        product1 = c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product1 >> half) ^ c1 ^ np.uint64(key0),
            product1 & low,
            (product0 >> half) ^ c3 ^ np.uint64(key1),
            product0 & low,
        )
        key0 = (key0 + 0x9E3779B9) & 0xFFFFFFFF
        key1 = (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def are_admitted(probability: float, *, seed: int, ids: IntArray, step: int) -> NDArray[np.bool_]:
    """Return bool[N]: whether a step stores rows that are not stored, int64[N] ids.

    Args:
        probability: above 0 and below 1.
        seed: the table's seed.
        ids: int64[N].
        step: the step's number.

    >>> ids = np.array([0, 1, 2, 3, 12345, 2**31, 2**40 + 3, 2**63 - 1])
    >>> are_admitted(0.5, seed=7, ids=ids, step=1).astype(int).tolist()
    [0, 0, 0, 0, 1, 0, 1, 1]
    """
    words = philox(seed, ids, np.array([_ADMISSION_STREAM]), step)[:, 0].astype(np.uint64)
    drawn = (words[:, 1] << np.uint64(32) | words[:, 0]) >> np.uint64(11)
    below: NDArray[np.bool_] = drawn.astype(np.float64) * 2.0**-53 < probability
    return below


def _horner(coefficients: str, x: FloatArray) -> FloatArray:
    result = np.zeros_like(x)
    for text in reversed(coefficients.split()):
        result = np.float32(float.fromhex(text)) + x * result
    return result


def _normal(words: WordArray, std: float) -> FloatArray:
    """Transform uint32[..., 4] words to float32[..., 4] normal values (Box and Muller)."""
    u, v = words[..., 0::2], words[..., 1::2]
    n = ((u >> np.uint32(8)) + np.uint32(1)).astype(np.float32)
    bits = n.view(np.int32)
    exponent = (bits - np.int32(0x3F3504F3)) >> np.int32(23)
    s = (bits - (exponent << np.int32(23))).view(np.float32) - np.float32(1)
    squared = (exponent - np.int32(24)).astype(np.float32) * _MINUS_TWO_LN2 + s * _horner(_Q, s)
    radius = np.sqrt(squared) * np.float32(std)
    radius = np.where(v >> np.uint32(31) == 1, -radius, radius)

    turn = ((v << np.uint32(2)).view(np.int32) >> np.int32(8)) | np.int32(1)
    y = turn.astype(np.float32) * np.float32(2.0**-23)
    z = y * y
    sine, cosine = y * _horner(_SINE, z), _horner(_COSINE, z)
    is_reflected = (v >> np.uint32(30)) & np.uint32(1) == 1
    values = np.empty(words.shape, np.float32)
    values[..., 0::2] = np.where(is_reflected, sine, cosine) * radius
    values[..., 1::2] = np.where(is_reflected, cosine, sine) * radius
    return values


def _uniform(words: WordArray, low: float, high: float) -> FloatArray:
    f32 = np.float32
    start, end = f32(low), f32(high)
    limit = np.nextafter(end, f32(-np.inf)) if start < end else start
    values = start + (words >> np.uint32(8)).astype(f32) * f32(2.0**-24) * (end - start)
    below: FloatArray = np.minimum(values, limit)
    return below


def initial_rows(init: Any, seed: int, ids: IntArray, dim: int) -> FloatArray:
    """Return the initial values of rows, float32[N, dim]: a pure function of (init, seed, id).

    Args:
        init: ``bb.Zeros``, ``bb.Normal`` or ``bb.Uniform``.
        seed: the table's seed.
        ids: int64[N].
        dim: weights per row.
    """
    kind = type(init).__name__
    if kind == "Zeros":
        return np.zeros((ids.size, dim), np.float32)
    words = philox(seed, ids, np.arange((dim + 3) // 4, dtype=np.int64), 0)
    values = _normal(words, init.std) if kind == "Normal" else _uniform(words, init.low, init.high)
    return np.ascontiguousarray(values.reshape(ids.size, -1)[:, :dim])


def narrow_nearest(dtype: str, values: FloatArray) -> FloatArray:
    """Round float32 values to the nearest value of `dtype` (ties to even); return them as float32."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), values, rounded.view(np.float32))


def narrow_stochastic(
    dtype: str, values: FloatArray, *, seed: int, ids: IntArray, step: int, field: int = 0
) -> FloatArray:
    """Round a field of updated rows to `dtype` stochastically, keyed by (seed, id, step, field).

    A value between two neighbours of the narrow type becomes the one farther from 0 with a probability equal to its
    relative distance from the other. Values are limited to the largest finite value. Infinities and NaNs do not change.

    Args:
        dtype: ``"float32"`` (returned unchanged), ``"bfloat16"`` or ``"float16"``.
        values: float32[U, dim].
        seed: the table's seed.
        ids: int64[U].
        step: the table's step number.
        field: 0 for the weights, then the optimizer's slots in record order.
    """
    if dtype == "float32":
        return values
    dim = values.shape[1]
    blocks = _ROUNDING_STREAM + field * _FIELD_STREAM + np.arange((dim + 7) // 8, dtype=np.int64)
    words = philox(seed, ids, blocks, step)
    halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=-1)
    random16 = halves.reshape(ids.size, 8 * blocks.size)[:, :dim].astype(np.int64)

    is_finite = np.isfinite(values)
    magnitude = np.abs(np.where(is_finite, values, np.float32(0))).astype(np.float64)
    if dtype == "bfloat16":
        unit_exponent = np.maximum(np.frexp(magnitude)[1] - 8, -133)
        largest, resolution = float.fromhex("0x1.fep127"), np.full(magnitude.shape, 16)
    else:
        unit_exponent = np.maximum(np.frexp(magnitude)[1] - 11, -24)
        largest = 65504.0
        # A normal float16 drops 13 bits of a float32, so 13 random bits are used.
        resolution = np.where(magnitude < 2.0**-14, 16, 13)
    unit = np.ldexp(1.0, unit_exponent)
    whole = np.floor(magnitude / unit)
    part = np.floor((magnitude / unit - whole) * 2.0**resolution).astype(np.int64)
    drawn = random16 & ((1 << resolution) - 1)
    raised = (whole + ((part + drawn) >> resolution)) * unit
    rounded = np.copysign(np.minimum(raised, largest), values).astype(np.float32)
    stored: FloatArray = np.where(is_finite, rounded, values)
    return stored
