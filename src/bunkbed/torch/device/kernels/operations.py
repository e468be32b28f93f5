"""The operations of a device cache that have a kernel, each with the plain torch operations whose bits it must give.

An operation is a value: the chooser (choice.py) decides once for equal operations. `plain` and `kernel` take the same
arguments and do the same; `sample` makes arguments of a realistic size for a trial; `finish` applies the result as its
user does, and returns the tensor that must be equal.

These have no kernel: operations on float16 and bfloat16 fields, except moves of whole records; sums of gradients
weighted by per_sample_weights; and `TransferTier`, except its sums. The sums of equal ids' gradients and the step are
two kernels, not one, because between them a step reads the norm of the sums, may scale them (clipping, `GradScaler`)
and is refused if one is not finite.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bunkbed.core import optim
from bunkbed.core.optim import Optimizer
from bunkbed.torch.device.base.batches import PIECE
from bunkbed.torch.device.base.update_rules import StepConstants, step_constants, update_rows
from bunkbed.torch.device.kernels import launch

#: Most rows in a trial, and the bytes that it may take in all; with long rows it has fewer.
_TRIAL_ROWS, _TRIAL_BYTES = 8192, 64 << 20
_RULES = {optim.SGD: "sgd", optim.Adagrad: "adagrad", optim.RowwiseAdagrad: "rowwise", optim.Adam: "adam"}


class Operation(Protocol):
    """An operation that has a kernel; the module's docstring explains the methods."""

    @property
    def name(self) -> str:
        """A name for messages."""

    def plain(self, *args: Any) -> Tensor:
        """Run plain torch operations, on any device."""

    def kernel(self, *args: Any) -> Tensor:
        """Run a kernel, with the same bits."""

    def sample(self, rng: np.random.Generator) -> tuple[Tensor, ...]:
        """Return arguments on the CPU."""

    def finish(self, made: Tensor, *args: Any) -> Tensor:
        """Apply the result as its user does; return the tensor that must be equal."""


@dataclass(frozen=True)
class Gather:
    """Gather of float32 or int32 rows that are `stride` apart, by index: ``(source, index)`` to new rows."""

    stride: int
    width: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """See `Operation`."""
        return f"gather {self.width} of {self.stride} words"

    def plain(self, source: Tensor, index: Tensor) -> Tensor:
        """See `Operation`."""
        return source.index_select(0, index)

    def kernel(self, source: Tensor, index: Tensor) -> Tensor:
        """See `Operation`."""
        return launch.gather(source, index) if len(index) else self.plain(source, index)

    def sample(self, rng: np.random.Generator) -> tuple[Tensor, ...]:
        """See `Operation`."""
        rows = _rows(self.stride)
        source = torch.from_numpy(_bits(rng, (rows, self.stride))).view(self.dtype)[:, : self.width]
        return source, torch.from_numpy(_skewed(rng, rows, rows))

    def finish(self, made: Tensor, *args: Any) -> Tensor:
        """See `Operation`."""
        return made


@dataclass(frozen=True)
class Scatter:
    """Scatter of whole records, int32[words], into distinct frames: ``(records, frames, rows)`` to the records."""

    words: int

    @property
    def name(self) -> str:
        """See `Operation`."""
        return f"scatter {self.words} words"

    def plain(self, records: Tensor, frames: Tensor, rows: Tensor) -> Tensor:
        """See `Operation`."""
        return records.index_copy_(0, frames, rows)

    def kernel(self, records: Tensor, frames: Tensor, rows: Tensor) -> Tensor:
        """See `Operation`."""
        return launch.scatter(records, frames, rows) if len(frames) else records

    def sample(self, rng: np.random.Generator) -> tuple[Tensor, ...]:
        """See `Operation`."""
        rows = _rows(self.words)
        frames = torch.from_numpy(rng.permutation(rows)[: rows // 2])
        values = [torch.from_numpy(_bits(rng, (count, self.words))) for count in (rows, len(frames))]
        return values[0], frames, values[1]

    def finish(self, made: Tensor, *args: Any) -> Tensor:
        """See `Operation`."""
        return made


@dataclass(frozen=True)
class SumPieces:
    """Sums of equal ids' gradients (sums.py): ``(grads, places, first, again)`` to float32[U, width].

    `first` and `again` are `Segments.pieces` and `firsts`: each piece is summed in order, then the pieces of each row.
    """

    width: int

    @property
    def name(self) -> str:
        """See `Operation`."""
        return f"sum of {self.width}"

    def plain(self, grads: Tensor, places: Tensor, first: Tensor, again: Tensor) -> Tensor:
        """See `Operation`."""
        pool = torch.nn.functional.embedding_bag
        pieces = pool(places, grads, first, mode="sum")
        if again is None:
            return pieces
        return pool(torch.arange(len(pieces), device=grads.device), pieces, again, mode="sum")

    def kernel(self, grads: Tensor, places: Tensor, first: Tensor, again: Tensor) -> Tensor:
        """See `Operation`."""
        pieces = launch.sum_pieces(grads, places, first, len(places))
        return pieces if again is None else launch.sum_pieces(pieces, None, again, len(pieces))

    def sample(self, rng: np.random.Generator) -> tuple[Tensor, ...]:
        """See `Operation`."""
        rows = _rows(self.width)
        ids = np.sort(_skewed(rng, rows, rows))
        bounds = np.append(np.flatnonzero(np.diff(ids, prepend=-1)), rows)
        first, again = pieces_of(bounds)
        grads = torch.from_numpy(_floats(rng, (rows, self.width)))
        return grads, torch.from_numpy(rng.permutation(rows)), torch.from_numpy(first), torch.from_numpy(again)

    def finish(self, made: Tensor, *args: Any) -> Tensor:
        """See `Operation`."""
        return made


@dataclass(frozen=True)
class Update:
    """One optimizer step of float32 records: ``(records, frames, grads, constants)``, of distinct frames.

    `plain` returns the new fields, `kernel` whole new records; the given records do not change. See `update_of`.
    """

    dim: int
    rule: str
    has_decay: bool
    has_keep: bool
    optimizer: Optimizer = field(compare=False)

    @property
    def name(self) -> str:
        """See `Operation`."""
        decay = ", decay" if self.has_decay else ", decoupled decay" if self.has_keep else ""
        return f"step of {self.dim}, {self.rule}{decay}"

    def fields(self, records: Tensor) -> list[Tensor]:
        """Return views of the weights and of each slot, float32."""
        wide = records.view(torch.float32)
        lengths = {"sgd": [], "adagrad": [self.dim], "rowwise": [1], "adam": [self.dim, self.dim]}[self.rule]
        return list(wide.split([self.dim, *lengths], dim=1))

    def plain(self, records: Tensor, frames: Tensor, grads: Tensor, constants: StepConstants) -> Tensor:
        """See `Operation`."""
        fields = [view.index_select(0, frames) for view in self.fields(records)]
        weight, slots = update_rows(self.optimizer, constants, grads, fields[0], fields[1:])
        return [weight, *slots]

    def kernel(self, records: Tensor, frames: Tensor, grads: Tensor, constants: StepConstants) -> Tensor:
        """See `Operation`."""
        if not len(frames):
            return self.plain(records, frames, grads, constants)
        return launch.update(
            self.rule, records, frames, grads, constants, has_decay=self.has_decay, has_keep=self.has_keep
        )

    def sample(self, rng: np.random.Generator) -> tuple[Tensor, ...]:
        """See `Operation`."""
        words = self.dim + {"sgd": 0, "adagrad": self.dim, "rowwise": 1, "adam": 2 * self.dim}[self.rule]
        rows = _rows(words)
        values = _floats(rng, (rows, words))
        values[:, self.dim :] = abs(values[:, self.dim :])  # sums of squares are not negative; Adam's exp_avg could be
        frames = torch.from_numpy(rng.permutation(rows))
        grads = torch.from_numpy(_floats(rng, (rows, self.dim)))
        constants = step_constants(self.optimizer, 0.01, 7)
        return torch.from_numpy(values).view(torch.int32), frames, grads, constants

    def finish(self, made: Tensor, *args: Any) -> Tensor:
        """See `Operation`; this stores the records."""
        records, frames = args[:2]
        if isinstance(made, torch.Tensor):
            return records.index_copy_(0, frames, made)
        for view, values in zip(self.fields(records), made, strict=True):
            view.index_copy_(0, frames, values)
        return records


def update_of(optimizer: optim.Optimizer, dim: int) -> Update | None:
    """Return the step of an optimizer; None if no kernel has its rule."""
    rule = _RULES.get(type(optimizer))
    if rule is None:
        return None
    decay = bool(np.float32(getattr(optimizer, "weight_decay", 0.0)))
    is_decoupled = bool(getattr(optimizer, "decoupled", False))
    return Update(dim, rule, decay and not is_decoupled, decay and is_decoupled, optimizer)


# ---- random inputs


def _rows(words: int) -> int:
    """Return the number of rows in a trial, which keeps up to nine numbers on the device for each word (12 assumed)."""
    return int(max(256, min(_TRIAL_ROWS, _TRIAL_BYTES // (12 * 4 * words))))


def pieces_of(bounds: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the start of each piece, int64[P], and the first piece of each segment, int64[U]; see `Segments`.

    Args:
        bounds: int64[U + 1], the start of each segment, then the end of the last one; no segment is empty.
    """
    counts = -(-np.diff(bounds) // PIECE)
    firsts = np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(firsts, counts)
    return np.repeat(bounds[:-1], counts) + within * PIECE, firsts


def _bits(rng: np.random.Generator, shape: tuple[int, int]) -> Tensor:
    """Return any int32 values: a move must not change them, also if they are not valid floats."""
    return rng.integers(-(2**31), 2**31, shape, dtype=np.int32)


def _floats(rng: np.random.Generator, shape: tuple[int, int]) -> Tensor:
    """Return float32 of both signs and many orders of magnitude, with zeros and subnormals; their sums are finite."""
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 3, shape)
    values[rng.random(shape) < 0.01] *= 1e-36
    values[rng.random(shape) < 0.01] = 0.0
    return values.astype(np.float32)


def _skewed(rng: np.random.Generator, count: int, rows: int) -> Tensor:
    """Return int64[count] numbers below `rows`, a few of which are very frequent."""
    return np.minimum(rng.zipf(1.2, count) - 1, rows - 1)
