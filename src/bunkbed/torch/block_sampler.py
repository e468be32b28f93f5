"""`BlockSampler`: the batches of a `bunkbed.BlockOrder` for PyTorch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import torch

from bunkbed.core.arguments import as_whole
from bunkbed.order.block_order import BlockOrder


class BlockSampler:
    """Batch sampler for ``DataLoader(dataset, batch_sampler=...)`` that yields the batches of a `bunkbed.BlockOrder`.

    Call `set_epoch` before each epoch, as for `torch.utils.data.DistributedSampler`; Lightning does. Without it, every
    epoch has the same order. Works with workers of the loader, and with `bunkbed.torch.lookahead`, which prefetches the
    rows of the next block when its window reaches this block. For one process: under torch.distributed with more than
    one, iterating is refused, because every process would get every batch.

    Args:
        order: the order of samples; sample i is ``dataset[i]``.
        batch_size: most samples of a batch.

    Raises:
        TypeError, ValueError: `order` is not a `bunkbed.BlockOrder`; `batch_size` is not an int or is below 1.

    >>> import bunkbed as bb, numpy as np
    >>> order = bb.BlockOrder([np.arange(6)], blocks=2)
    >>> sampler = BlockSampler(order, batch_size=3)
    >>> loader = torch.utils.data.DataLoader(torch.arange(6), batch_sampler=sampler)
    >>> for epoch in range(2):
    ...     sampler.set_epoch(epoch)
    ...     assert sorted(torch.cat(list(loader)).tolist()) == [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, order: BlockOrder, batch_size: int) -> None:
        if not isinstance(order, BlockOrder):
            raise TypeError(f"BlockSampler: order must be a bunkbed.BlockOrder, got {type(order).__name__}")
        self.order = order
        self.batch_size = as_whole(batch_size, what="batch_size", table="BlockSampler", low=1, high=2**63 - 1)
        self._epoch = 0
        self._first = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration; for example for ``order.members(sampler.epoch, 1, block)``."""
        return self._epoch

    @property
    def sampler(self) -> Self:
        """This object. Lightning calls `set_epoch` of the sampler of a batch sampler."""
        return self

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Set the epoch of the next iterations.

        Args:
            epoch: 0 or more.
            first: the number of the batch to start with, for a run that resumes within an epoch.

        Raises:
            TypeError, ValueError: not an int, or out of range; nothing changes.
        """
        self.order.batches(epoch, self.batch_size, first=first)  # checks both
        self._epoch, self._first = int(epoch), int(first)

    def __len__(self) -> int:
        """Return the number of batches of the next iteration."""
        return self.order.num_batches(self._epoch, self.batch_size) - self._first

    def __iter__(self) -> Iterator[list[int]]:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            world = torch.distributed.get_world_size()
            if world > 1:
                raise RuntimeError(
                    f"BlockSampler: torch.distributed runs with {world} processes, and each would get every batch; "
                    "use one process"
                )
        for batch in self.order.batches(self._epoch, self.batch_size, first=self._first):
            yield batch.indices.tolist()
