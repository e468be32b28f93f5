"""The encoder of SASRec (Kang and McAuley 2018): causal self-attention over the items of users.

Windows of items are aligned at their first item. The padding is behind a window's items, and causal attention sees
nothing behind an item, so padding changes no output.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["Encoder"]

_BLOCKS = 2

Drop = Callable[[Tensor], Tensor]


class Encoder(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Blocks of attention with one head and a perceptron, each after a layer norm and added to its input.

    Args:
        dim: numbers of a row and of an output.
        length: most items of a window.
        dropout: probability that a number is dropped in training: of the inputs, and of what a block adds.
        init_std: standard deviation of the rows' initial weights; positions start with that of the scaled rows.
    """

    def __init__(self, dim: int, length: int, dropout: float, init_std: float) -> None:
        super().__init__()
        self.length = length
        self._dropout = dropout
        self._scale = math.sqrt(dim)
        self.positions = nn.Parameter(torch.randn(length, dim) * init_std * self._scale)
        self.blocks = nn.ModuleList(_Block(dim) for _ in range(_BLOCKS))
        self.norm = nn.LayerNorm(dim)

    def forward(self, rows: Tensor, lengths: Tensor, *, width: int | None = None, noise: int | None = None) -> Tensor:
        """Return the output at each item, which depends on the item and those before it in its window.

        Args:
            rows: ``float32[sum(lengths), dim]``, of the items of the windows, one window after another.
            lengths: ``int64[W]``, items of each window, at most `length`.
            width: items that each window is padded to; None: the longest.
            noise: seed of the dropout; None: no dropout.

        Returns:
            ``float32[sum(lengths), dim]``. With equal `width` and W, the outputs of a window have the same bits with
            any other windows.
        """
        dim, drop = rows.shape[1], self._drop(noise)
        width = int(lengths.max()) if width is None else width
        ends = lengths.cumsum(0)
        windows = torch.repeat_interleave(lengths)
        places = windows * width + torch.arange(len(rows)) - (ends - lengths)[windows]
        places = places.to(rows.device)
        padded = rows.new_zeros(len(lengths) * width, dim).index_copy(0, places, rows * self._scale)
        hidden = drop(padded.view(-1, width, dim) + self.positions[:width])
        for block in self.blocks:
            hidden = block(hidden, drop)
        return self.norm(hidden.view(-1, dim).index_select(0, places))

    def _drop(self, noise: int | None) -> Drop:
        """Return a dropout whose masks are a function of `noise` and the order of the calls, on every device."""
        if noise is None or not self._dropout:
            return lambda x: x
        random, kept = torch.Generator().manual_seed(noise), 1 - self._dropout

        def drop(x: Tensor) -> Tensor:
            mask = torch.empty(x.shape).bernoulli_(kept, generator=random)
            return x * mask.div_(kept).to(x.device)

        return drop


class _Block(nn.Module):  # type: ignore[misc]  # torch is untyped here
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.attended = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.wide = nn.Linear(dim, dim)
        self.narrow = nn.Linear(dim, dim)

    def forward(self, hidden: Tensor, drop: Drop) -> Tensor:
        parts = self.query_key_value(self.attention_norm(hidden)).chunk(3, -1)
        attended = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + drop(self.attended(attended))
        return hidden + drop(self.narrow(torch.relu(self.wide(self.norm(hidden)))))
