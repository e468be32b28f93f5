"""Cells: fixed groups of ids by the core's hash. The log keeps the records of a cell together (engine.md, rule 25)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bunkbed.core.arguments import Ids

Hashes = npt.NDArray[np.uint64]
#: The cell or the block of each id or sample: uint16 or uint32.
Groups = npt.NDArray[np.uint16 | np.uint32]

MAX_CELLS = 2**32 - 1
CELLS_PER_BLOCK = 16
_CELLS = 0  # the random streams that regroup cells; `permutation` lists the streams
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


@dataclass(frozen=True)
class Blocks:
    """The blocks of one column: its cells, regrouped in each epoch.

    Attributes:
        column: the place of the column; the columns of one order have independent permutations.
        count: the number of blocks.
        seed: 0 to 2**63 - 1.
    """

    column: int
    count: int
    seed: int

    def of_cells(self, epoch: int) -> Groups:
        """Return the block of each of ``CELLS_PER_BLOCK * count`` cells in an epoch."""
        num_cells = CELLS_PER_BLOCK * self.count
        found = np.empty(num_cells, group_type(self.count))
        found[permutation(num_cells, self.seed, epoch, _CELLS, self.column)] = np.arange(num_cells) // CELLS_PER_BLOCK
        return found

    def of(self, ids: Ids, epoch: int) -> Groups:
        """Return the block of each id, [N], in an epoch."""
        return self.of_cells(epoch)[cells_of(ids, CELLS_PER_BLOCK * self.count)]


def permutation(n: int, seed: int, epoch: int, stream: int, index: int) -> Ids:
    """Return a permutation of n, int64[n], from the keys of one random stream.

    The low bits of each key are its position. Keys are distinct, so every sorting algorithm gives the same result.
    `Generator.permutation` may change between NumPy's versions; the stream of a bit generator does not.

    Args:
        n: the length.
        seed: 0 to 2**63 - 1.
        epoch: 0 to 2**63 - 1.
        stream: 0: the cells of column `index`; 1: the samples of the pair of blocks at place `index`.
        index: 0 to 2**64 - 1.
    """
    philox = np.random.Philox(
        key=np.array([seed, epoch], np.uint64), counter=np.array([0, 0, stream, index], np.uint64)
    )
    low_bits = np.uint64((1 << n.bit_length()) - 1)
    keys: npt.NDArray[np.uint64] = philox.random_raw(n)
    keys &= ~low_bits
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()
    keys &= low_bits
    found: Ids = keys.view(np.int64)
    return found
