"""Launches of the kernels of code.py on torch tensors, on the current stream of the tensors' device.

The first launch imports Triton. Results are new tensors from torch's allocator, except that `scatter` works in place.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from types import ModuleType

import torch
from torch import Tensor

from bunkbed.torch.device.base.update_rules import StepConstants

#: Compiler options of every kernel: a product and a sum are rounded separately, as in two torch operations.
OPTIONS = {"enable_fp_fusion": False}
#: Elements of a tile, and its most columns.
_TILE, _MOST_COLS = 1024, 256


def tile(width: int) -> tuple[int, int]:
    """Return rows and columns of a tile for rows of `width` elements, both powers of two."""
    cols = min(_MOST_COLS, 1 << (width - 1).bit_length())
    return min(128, _TILE // cols), cols


def gather(source: Tensor, index: Tensor) -> Tensor:
    """Return ``source.index_select(0, index)`` of (frames, width) rows, which are ``source.stride(0)`` apart."""
    code = _code()
    count, width = len(index), source.shape[1]
    out = torch.empty((count, width), dtype=source.dtype, device=source.device)
    rows, cols = tile(width)
    with on_device(source.device):
        code.gather[_grid(count, rows, width, cols)](
            _dense_rows(source), index.contiguous(), out, count, source.stride(0), width, rows, cols, **OPTIONS
        )
    return out


def scatter(target: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Run ``target.index_copy_(0, index, rows)`` with an index without repetitions; return `target`."""
    code = _code()
    count, width = len(index), target.shape[1]
    tile_rows, cols = tile(width)
    with on_device(target.device):
        code.scatter[_grid(count, tile_rows, width, cols)](
            _dense_rows(target), index.contiguous(), rows.contiguous(), count, target.stride(0), width, tile_rows, cols,
            **OPTIONS,
        )  # fmt: skip
    return target


def sum_pieces(grads: Tensor, places: Tensor, starts: Tensor, end: int) -> Tensor:
    """Return float32[count, width], the sum of the rows of `grads` in each piece.

    Args:
        grads: float32[n, width].
        places: int64[end] rows of `grads` in the order of addition; None: all rows in their own order.
        starts: int64[count], ascending, the start of each piece; it ends at the next start, the last piece at `end`.
        end: the number of places.
    """
    code = _code()
    count, width = len(starts), grads.shape[1]
    out = torch.empty((count, width), dtype=torch.float32, device=grads.device)
    rows, cols = tile(width)
    grads, has_places = grads.contiguous(), places is not None
    places = places.contiguous() if has_places else starts
    with on_device(grads.device):
        code.sum_pieces[_grid(count, rows, width, cols)](
            grads, places, starts.contiguous(), out, count, end, width, has_places, rows, cols, **OPTIONS
        )
    return out


def update(
    rule: str,
    records: Tensor,
    frames: Tensor,
    grads: Tensor,
    constants: StepConstants,
    *,
    has_decay: bool,
    has_keep: bool,
) -> Tensor:
    """Return int32[U, words]: the records of distinct frames after one step.

    Args:
        rule: ``"sgd"``, ``"adagrad"``, ``"rowwise"`` or ``"adam"``.
        records: int32[frames, words] of float32 fields, not changed.
        frames: int64[U].
        grads: float32[U, dim], summed.
        constants: of the step.
        has_decay, has_keep: whether there is coupled or decoupled weight decay.
    """
    code = _code()
    count, dim = grads.shape
    words = records.shape[1]
    new = torch.empty((count, words), dtype=torch.float32, device=records.device)
    tensors = _dense_rows(records).view(torch.float32), frames.contiguous(), grads.contiguous(), new
    numbers = [constants.step_size, constants.eps, constants.decay, constants.keep]
    rows, cols = tile(dim)
    with on_device(records.device):
        if rule == "rowwise":
            code.update_rowwise[_grid(count, rows, 1, 1)](
                *tensors, count, *numbers, dim, words, has_decay, has_keep, rows, cols, **OPTIONS
            )
        else:
            numbers += [constants.one_minus_beta1, constants.one_minus_beta2]
            code.update[_grid(count, rows, dim, cols)](
                *tensors, count, *numbers, dim, words, rule, has_decay, has_keep, rows, cols, **OPTIONS
            )
    return new.view(torch.int32)


def _code() -> ModuleType:
    from bunkbed.torch.device.kernels import code

    return code


def _grid(count: int, rows: int, width: int, cols: int) -> tuple[int, int]:
    return -(-count // rows), -(-width // cols)


def _dense_rows(rows: Tensor) -> Tensor:
    if rows.stride(1) != 1 and rows.shape[1] > 1:
        raise ValueError(f"elements of a row must lie side by side, got strides {rows.stride()}")
    return rows


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that makes `device` current, as Triton launches on the current device."""
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return contextlib.nullcontext() if is_current else torch.cuda.device(device)
