"""Cells: fixed groups of ids by the core's hash. The log keeps the records of a cell together (engine.md, rule 25)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from bunkbed.core.arguments import Ids

Hashes = npt.NDArray[np.uint64]
#: The cell or the block of each id or sample: uint16 or uint32.
Groups = npt.NDArray[np.uint16 | np.uint32]

MAX_CELLS = 2**32 - 1
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
_AT_ONCE = 1 << 16


def mix_id(ids: Ids) -> Hashes:
    """Return the hash of each id, uint64[N]: `mix_id` of csrc/directory/directory.h.

    >>> import numpy as np
    >>> hex(mix_id(np.array([1]))[0])
    '0x4179b061e0c0e0d0'
    """
    hashes = ids.astype(np.uint64)  # a copy
    for _ in range(2):
        hashes ^= hashes >> _HALF
        hashes *= _MULTIPLIER
    hashes ^= hashes >> _HALF
    return hashes


def parts(n: int) -> Iterator[slice]:
    """Yield slices of n items whose temporary arrays fit in the processor's cache."""
    for start in range(0, n, _AT_ONCE):
        yield slice(start, start + _AT_ONCE)


def group_type(groups: int) -> type[np.uint16] | type[np.uint32]:
    """Return the smallest type that numbers `groups` groups, at most 2**32."""
    return np.uint16 if groups <= 1 << 16 else np.uint32


def cells_of(ids: Ids, num_cells: int) -> Groups:
    """Return the cell of each id, uint16[N] or uint32[N] in [0, num_cells): a contiguous range of hashes for each cell.

    >>> import numpy as np
    >>> cells_of(np.arange(5), 16).tolist()
    [0, 4, 1, 7, 7]
    """
    cells = np.empty(len(ids), group_type(num_cells))
    for part in parts(len(ids)):
        cells[part] = ((mix_id(ids[part]) >> _HALF) * np.uint64(num_cells)) >> _HALF
    return cells
