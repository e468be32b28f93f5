"""`BlockOrder`: every sample once per epoch, block by block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from bunkbed.core.arguments import Ids, as_ids, as_whole, describe
from bunkbed.core.typed import shortened
from bunkbed.order.cells import CELLS_PER_BLOCK, MAX_CELLS, Blocks, Groups, cells_of, group_type, parts, permutation

_MAX_WHOLE = 2**63 - 1
_SAMPLES = 1  # the random streams that shuffle the samples of a pair; `permutation` lists the streams


class BlockBatch(NamedTuple):
    """The samples of a batch.

    Attributes:
        indices: int64[<= batch_size], positions of the samples in the columns.
        blocks: the block of each column in which the ids of all these samples are.
    """

    indices: Ids
    blocks: tuple[int, ...]


class _Column(NamedTuple):
    """Distinct ids in ascending order, their blocks, and the cell of each sample."""

    ids: Ids
    blocks: Blocks
    cells: Groups


class _Epoch(NamedTuple):
    """The samples of an epoch, sorted by pair of blocks in visiting order; only pairs that have samples.

    Sample `order[starts[i]]` is the first one of the i-th pair, whose place in the visiting order is `places[i]`.
    """

    epoch: int
    order: npt.NDArray[np.uint16 | np.uint32 | np.int64]
    starts: Ids
    places: Ids


class BlockOrder:
    """Visits samples block by block, so that the rows of a block stay in RAM while its samples are trained.

    Ids have fixed *cells* by a hash, 16 for each block. In each epoch a seeded permutation regroups the cells of a
    column into `blocks` blocks. With two columns an epoch visits the pairs of blocks, one of each column, such that one
    block changes at a time: the blocks of the column with more distinct ids once each, those of the other column
    forwards and backwards in turn. Where no sample has ids in a pair, the pair is left out. Samples of a pair are
    shuffled and divided evenly over batches of at most `batch_size`. Every sample occurs once per epoch.

    Every epoch has the same number of batches, because Lightning, Keras and learning-rate schedules would cut a longer
    one: that of the worst case, up to one more for each pair of blocks than a shuffle without blocks has.

    The order is a function of (columns, blocks, seed, epoch, batch_size) and of nothing else, on every machine: it does
    not depend on the RAM. It is part of the training's input, as a shuffle is; another number of blocks is another
    order. Method: pairs of partitions, as PyTorch-BigGraph (Lerer et al., 2019) and Marius (Mohoney et al., 2021);
    cells that are regrouped per epoch, as COMET of MariusGNN (Waleffe et al., 2023).

    Holds 2 or 4 bytes for each sample and column, the distinct ids, and 2 or 4 bytes for each sample of the last
    epoch. Does not keep the columns. Methods may be called from several threads.

    Args:
        columns: one or two arrays int64[N] of ids, not negative: the ids of sample i are ``columns[c][i]``.
        blocks: the number of blocks, or one number per column; see `suggest_blocks`. 1: shuffle all samples.
        seed: 0 to 2**63 - 1.

    Raises:
        TypeError: a column is not integers, `blocks` or `seed` is not an int.
        ValueError: not one or two columns, columns of unequal length, another count of blocks than columns, blocks
            below 1 or above the number of distinct ids of the column.
        IndexError: a negative id.

    >>> import numpy as np
    >>> order = BlockOrder([np.array([0, 1, 2, 3, 0, 1]), np.array([7, 7, 8, 8, 9, 9])], blocks=2)
    >>> batches = list(order.batches(epoch=0, batch_size=2))
    >>> sorted(int(i) for batch in batches for i in batch.indices)
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, columns: Sequence[ArrayLike], blocks: int | Sequence[int], *, seed: int = 0) -> None:
        if not 1 <= len(columns) <= 2:
            raise ValueError(
                f"BlockOrder: one or two columns are needed, got {len(columns)}; pass a list of arrays, for example "
                f"[user_ids, item_ids]"
            )
        counts = list(blocks) if isinstance(blocks, (Sequence, np.ndarray)) else [blocks] * len(columns)
        if len(counts) != len(columns):
            raise ValueError(
                f"BlockOrder: blocks must be an int or one per column, got {len(counts)} for {len(columns)} columns"
            )
        self._seed = as_whole(seed, what="seed", table="BlockOrder", low=0, high=_MAX_WHOLE)
        ids = [_ids(column, f"column {at}") for at, column in enumerate(columns)]
        if len(ids[0]) != len(ids[-1]):
            raise ValueError(
                f"BlockOrder: columns must have equal lengths, got {len(ids[0])} ids in column 0 and {len(ids[1])} in "
                f"column 1"
            )
        self._num_samples = len(ids[0])
        self._columns = [
            _column(one, count, at, self._seed) for at, (one, count) in enumerate(zip(ids, counts, strict=True))
        ]
        sizes = [len(column.ids) for column in self._columns]
        #: The columns from the outer to the inner one.
        self._nesting = sorted(range(len(sizes)), key=lambda at: -sizes[at])
        self._last: _Epoch | None = None

    @property
    def blocks(self) -> tuple[int, ...]:
        """The number of blocks of each column."""
        return tuple(column.blocks.count for column in self._columns)

    @property
    def seed(self) -> int:
        """The seed."""
        return self._seed

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self._num_samples

    def batches(self, epoch: int, batch_size: int, *, first: int = 0) -> Iterator[BlockBatch]:
        """Yield the batches of an epoch.

        Args:
            epoch: 0 or more.
            batch_size: samples of a batch, 1 or more.
            first: the number of the batch to start with, for a resumed run. The batches before it cost no time.

        Raises:
            TypeError, ValueError: `epoch`, `batch_size` or `first` is not an int or is out of range.
        """
        total = self.num_batches(epoch, batch_size)
        first = as_whole(first, what="first", table="BlockOrder", low=0, high=total)
        return self._batches(int(epoch), int(batch_size), first)

    def num_batches(self, epoch: int, batch_size: int) -> int:
        """Return the number of batches of an epoch, the same for every epoch.

        Raises:
            TypeError, ValueError: see `batches`.
        """
        _epoch(epoch)
        size = as_whole(batch_size, what="batch_size", table="BlockOrder", low=1, high=_MAX_WHOLE)
        pairs = min(math.prod(self.blocks), self._num_samples)
        return (self._num_samples + pairs * (size - 1)) // size  # when each pair ends with a batch of one sample

    def members(self, epoch: int, column: int, block: int) -> Ids:
        """Return the distinct ids of a column that are in a block in this epoch, int64[M], ascending.

        For example to draw negative samples whose rows are in RAM.

        Raises:
            TypeError, ValueError: `epoch`, `column` or `block` is not an int or is out of range.
        """
        found, epoch = self._column(column), _epoch(epoch)
        block = as_whole(block, what="block", table="BlockOrder", low=0, high=found.blocks.count - 1)
        members: Ids = found.ids[found.blocks.of(found.ids, epoch) == block]
        return members

    def block_of(self, ids: ArrayLike, epoch: int, column: int) -> Ids:
        """Return the block of each id in this epoch, int64[N]; the ids need not occur in the column.

        Args:
            ids: int64[N], not negative.
            epoch: 0 or more.
            column: the column whose blocks are meant.

        Raises:
            TypeError, ValueError: see `members`. IndexError: a negative id.
        """
        return self._column(column).blocks.of(_ids(ids, "ids"), _epoch(epoch)).astype(np.int64)

    def _column(self, column: int) -> _Column:
        return self._columns[as_whole(column, what="column", table="BlockOrder", low=0, high=len(self._columns) - 1)]

    def _ends(self, grouped: _Epoch, size: int) -> Ids:
        """Return the number of batches up to the end of each pair."""
        counts = np.diff(grouped.starts, append=self._num_samples)
        least = (counts - 1) // size + 1
        room = np.cumsum(counts - least)  # batches that could be added, one for each sample
        added = room * (self.num_batches(0, size) - int(least.sum())) // max(1, int(room[-1]))
        ends: Ids = np.cumsum(least) + added
        return ends

    def _grouped(self, epoch: int) -> _Epoch:
        """Sort the samples by their pair's place in the visiting order."""
        columns = [self._columns[at] for at in self._nesting]
        blocks_of_cells = [column.blocks.of_cells(epoch).astype(np.int64) for column in columns]
        pairs = math.prod(self.blocks)
        # A stable sort of uint16 is a radix sort.
        places: npt.NDArray[np.uint16 | np.uint32 | np.int64]
        places = np.empty(self._num_samples, group_type(pairs) if pairs <= 1 << 32 else np.int64)
        for part in parts(self._num_samples):
            place: Ids | int = 0
            for column, block_of_cells in zip(columns, blocks_of_cells, strict=True):
                inner, count = block_of_cells[column.cells[part]], column.blocks.count
                # The inner blocks run backwards at every second outer block.
                place = place * count + np.where(place & 1, count - 1 - inner, inner)
            places[part] = place
        order = np.argsort(places, kind="stable")
        sorted_places = places[order]
        if self._num_samples <= 1 << 32:
            order = order.astype(group_type(self._num_samples))
        starts = np.flatnonzero(np.diff(sorted_places)) + 1
        starts = np.concatenate([np.zeros(1, np.int64), starts])
        return _Epoch(epoch, order, starts, sorted_places[starts].astype(np.int64))

    def _batches(self, epoch: int, size: int, first: int) -> Iterator[BlockBatch]:
        grouped = self._last
        if grouped is None or grouped.epoch != epoch:
            grouped = self._last = self._grouped(epoch)
        begins = np.append(grouped.starts, self._num_samples)
        ends = self._ends(grouped, size)
        for pair in range(int(np.searchsorted(ends, first, side="right")), len(ends)):
            place = int(grouped.places[pair])
            samples = grouped.order[begins[pair] : begins[pair + 1]].astype(np.int64)
            samples = samples[permutation(len(samples), self._seed, epoch, _SAMPLES, place)]
            blocks = self._blocks_at(place)
            before = int(ends[pair - 1]) if pair else 0
            cuts = np.arange(int(ends[pair]) - before + 1) * len(samples) // (int(ends[pair]) - before)
            for start, end in pairwise(cuts[max(0, first - before) :].tolist()):
                yield BlockBatch(samples[start:end], blocks)

    def _blocks_at(self, place: int) -> tuple[int, ...]:
        """Return the block of each column at a place of the visiting order."""
        blocks = {}
        if len(self._nesting) == 2:
            inner = self.blocks[self._nesting[1]]
            place, offset = divmod(place, inner)
            blocks[self._nesting[1]] = inner - 1 - offset if place & 1 else offset
        blocks[self._nesting[0]] = place
        return tuple(blocks[at] for at in range(len(blocks)))


def _epoch(epoch: int) -> int:
    return as_whole(epoch, what="epoch", table="BlockOrder", low=0, high=_MAX_WHOLE)


def _ids(values: ArrayLike, what: str) -> Ids:
    ids = as_ids(values, what=what, table="BlockOrder")
    if ids.ndim != 1:
        raise ValueError(f"BlockOrder: {what} must be int64[N], got {describe(ids)}")
    if ids.size and int(ids.min()) < 0:
        position = int(np.argmax(ids < 0))
        raise IndexError(f"BlockOrder: {what} must not be negative, got id {ids[position]} at position {position}")
    return ids


def _column(ids: Ids, blocks: object, at: int, seed: int) -> _Column:
    count = as_whole(
        blocks, what=f"blocks of column {at}", table="BlockOrder", low=1, high=MAX_CELLS // CELLS_PER_BLOCK
    )
    distinct = _distinct(ids)
    if count > len(distinct):
        raise ValueError(
            f"BlockOrder: blocks of column {at} must be at most its number of distinct ids, {len(distinct)}, got "
            f"{shortened(count)}"
        )
    return _Column(distinct, Blocks(at, count, seed), cells_of(ids, CELLS_PER_BLOCK * count))


def _distinct(ids: Ids) -> Ids:
    """Return the distinct ids in ascending order, without a sort where flags for all ids take little memory."""
    if not ids.size or int(ids.max()) >= 8 * ids.size:
        return np.unique(ids)
    flags = np.zeros(int(ids.max()) + 1, bool)
    flags[ids] = True
    return np.flatnonzero(flags)
