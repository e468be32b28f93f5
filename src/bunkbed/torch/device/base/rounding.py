"""Stochastic rounding to 16 bits in plain torch operations, on any device; FORMAT.md, "Stochastic rounding".

The bits are those of the core's kernels: a device cache and RAM round a row equally. The arithmetic is on integers, in
int64 where a product needs 64 bits, and for float16's subnormals on float32 values that no operation rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROUNDING_STREAM = 0x80000000
_FIELD_STREAM = 0x01000000
_ROUNDS = 10


def round_rows(kind: str, values: Tensor, *, seed: int, ids: Tensor, number: int, field: int) -> Tensor:
    """Round float32[U, n] of rows `ids`, int64[U], at step `number` to 16 bits of `kind`, as int16[U, n]."""
    random = random_halves(seed, ids, number, field, values.shape[1])
    return round_to_bfloat16(values, random) if kind == "bfloat16" else round_to_float16(values, random)


def random_halves(seed: int, ids: Tensor, step: int, field: int, count: int) -> Tensor:
    """Return int32[U, count] numbers below 2**16 for the elements of a field of rows `ids`, int64[U].

    Philox4x32-10 (Salmon et al., SC 2011) with key = seed and counter = (id, block, step).
    """
    blocks = torch.arange((count + 7) // 8, dtype=torch.int64, device=ids.device)
    blocks += _ROUNDING_STREAM + field * _FIELD_STREAM
    wide = ids[:, None]
    c0, c1 = wide & _MASK, (wide >> 32) & _MASK
    c2 = blocks[None, :]
    c3 = torch.full_like(blocks, step & _MASK)[None, :]
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        # The lower 64 bits of a product are the same signed and unsigned; the mask removes the shift's sign bits.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ key0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ key1,
            product0 & _MASK,
        )
        key0 = (key0 + 0x9E3779B9) & _MASK
        key1 = (key1 + 0xBB67AE85) & _MASK
    words = torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=-1)
    return halves.reshape(len(ids), -1)[:, :count].to(torch.int32)


def round_to_bfloat16(values: Tensor, random: Tensor) -> Tensor:
    """Round float32[U, n] to bfloat16 as int16[U, n], up or down by int32[U, n] `random` below 2**16."""
    bits = values.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    # From the largest finite bfloat16 on, values are truncated: they stay that value, or infinity.
    raised = bits + torch.where(magnitude < 0x7F7F0000, random, 0)
    return ((raised >> 16) | torch.where(magnitude > 0x7F800000, 0x40, 0)).to(torch.int16)


def round_to_float16(values: Tensor, random: Tensor) -> Tensor:
    """Round float32[U, n] to float16 as int16[U, n], up or down by int32[U, n] `random` below 2**16."""
    bits = values.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude - 0x38000000 + (random & 0x1FFF)) >> 13
    is_subnormal = magnitude < 0x38800000
    # In units of 2^-24, the subnormals' spacing.
    units = torch.where(is_subnormal, magnitude, 0).view(torch.float32) * 2.0**24
    whole = units.to(torch.int32)
    part = ((units - whole.to(torch.float32)) * 2.0**16).to(torch.int32)
    subnormal = whole + ((part + random) >> 16)
    finite = torch.where(is_subnormal, subnormal, normal).clamp(max=0x7BFF)
    is_nan = magnitude > 0x7F800000
    special = torch.where(is_nan, 0x7C00 | 0x200 | ((magnitude >> 13) & 0x3FF), 0x7C00)
    rounded = torch.where(magnitude < 0x7F800000, finite, special)
    return (((bits >> 16) & 0x8000) | rounded).to(torch.int16)
