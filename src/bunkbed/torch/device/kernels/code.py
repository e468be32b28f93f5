"""The kernels, in Triton. launch.py imports this module at the first launch, as Triton is not required.

Each kernel gives the bits of plain torch operations (operations.py). So every operation rounds once, as in torch: roots
and quotients are correctly rounded, and every launch and compilation must pass `launch.OPTIONS`, which forbids the
compiler to fuse a product with a sum. One program writes each element of a result, and adds in the order that
operations.py states; there are no atomic additions.

A program works on a tile of ROWS rows by COLS columns; the first axis of the grid counts tiles of rows. Offsets in
records are int64, as a device cache may have more than 2**31 words. Kernels are not specialised on the number of rows,
which differs between batches.
"""

from __future__ import annotations

import sys

# Seen with Triton 3.7 and TensorFlow 2.21. Importing Triton first works.
if "tensorflow" in sys.modules and "triton" not in sys.modules:
    raise ImportError("TensorFlow was imported before Triton, which would crash the process if it was imported now")

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]  # triton is untyped here
def gather(
    source: tl.tensor,  # (frames, stride)
    index: tl.tensor,  # int64[count]
    out: tl.tensor,  # (count, width)
    count: tl.tensor,
    stride: tl.constexpr,
    width: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    """Gather rows of `source` by index, which may repeat."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    is_row = row < count
    is_in = is_row[:, None] & (col < width)[None, :]
    place = tl.load(index + row, mask=is_row, other=0)
    values = tl.load(source + place[:, None] * stride + col[None, :], mask=is_in)
    tl.store(out + row.to(tl.int64)[:, None] * width + col[None, :], values, mask=is_in)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def scatter(
    target: tl.tensor,  # (frames, stride)
    index: tl.tensor,  # int64[count], distinct
    rows: tl.tensor,  # (count, width)
    count: tl.tensor,
    stride: tl.constexpr,
    width: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    """Store rows in `target` by index."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    is_row = row < count
    is_in = is_row[:, None] & (col < width)[None, :]
    place = tl.load(index + row, mask=is_row, other=0)
    values = tl.load(rows + row.to(tl.int64)[:, None] * width + col[None, :], mask=is_in)
    tl.store(target + place[:, None] * stride + col[None, :], values, mask=is_in)


@triton.jit(do_not_specialize=["count", "end"])  # type: ignore[untyped-decorator]
def sum_pieces(
    grads: tl.tensor,  # float32(n, width)
    places: tl.tensor,  # int64[end]: rows of grads in the order of addition; unused without HAS_PLACES
    starts: tl.tensor,  # int64[count], ascending: the start of each piece in places
    out: tl.tensor,  # float32(count, width)
    count: tl.tensor,
    end: tl.tensor,
    width: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    """Sum each piece, one addition after another from zero."""
    piece = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    is_piece = piece < count
    begin = tl.load(starts + piece, mask=is_piece, other=0)
    stop = tl.load(starts + piece + 1, mask=piece + 1 < count, other=0)
    stop = tl.where(piece + 1 < count, stop, end)
    length = tl.where(is_piece, stop - begin, 0)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for step in range(0, tl.max(length, axis=0)):
        is_left = step < length
        place = begin + step
        if HAS_PLACES:
            place = tl.load(places + place, mask=is_left, other=0)
        is_in = is_left[:, None] & (col < width)[None, :]
        values = tl.load(grads + place[:, None] * width + col[None, :], mask=is_in, other=0.0)
        total = tl.where(is_in, total + values, total)
    is_out = is_piece[:, None] & (col < width)[None, :]
    tl.store(out + piece.to(tl.int64)[:, None] * width + col[None, :], total, mask=is_out)


@triton.jit  # type: ignore[untyped-decorator]
def _decayed(
    grad: tl.tensor,  # (ROWS, columns)
    weight: tl.tensor,  # (ROWS, columns)
    decay: tl.tensor,
    keep: tl.tensor,
    HAS_DECAY: tl.constexpr,
    HAS_KEEP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return gradient and weight after weight decay of either kind."""
    if HAS_KEEP:
        weight = weight * keep
    if HAS_DECAY:
        grad = grad + weight * decay
    return grad, weight


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def update(
    records: tl.tensor,  # float32(frames, words)
    frames: tl.tensor,  # int64[count], distinct
    grads: tl.tensor,  # float32(count, dim), summed
    new: tl.tensor,  # float32(count, words)
    count: tl.tensor,
    step_size: tl.tensor,
    eps: tl.tensor,
    decay: tl.tensor,
    keep: tl.tensor,
    one_minus_beta1: tl.tensor,
    one_minus_beta2: tl.tensor,
    dim: tl.constexpr,
    words: tl.constexpr,
    RULE: tl.constexpr,  # "sgd", "adagrad" or "adam"
    HAS_DECAY: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    """Write records after one optimizer step of an elementwise rule: `update_rules.update_rows`, line for line."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    is_row = row < count
    is_in = is_row[:, None] & (col < dim)[None, :]
    frame = tl.load(frames + row, mask=is_row, other=0)
    old = records + frame[:, None] * words + col[None, :]
    made = new + row.to(tl.int64)[:, None] * words + col[None, :]
    grad = tl.load(grads + row.to(tl.int64)[:, None] * dim + col[None, :], mask=is_in, other=0.0)
    weight = tl.load(old, mask=is_in, other=0.0)
    grad, weight = _decayed(grad, weight, decay, keep, HAS_DECAY, HAS_KEEP)
    if RULE == "sgd":
        weight = weight - grad * step_size
    elif RULE == "adagrad":
        total = tl.load(old + dim, mask=is_in, other=0.0)
        total = total + grad * grad
        tl.store(made + dim, total, mask=is_in)
        weight = weight - tl.div_rn(grad, tl.sqrt_rn(total) + eps) * step_size
    else:
        exp_avg = tl.load(old + dim, mask=is_in, other=0.0)
        exp_avg_sq = tl.load(old + 2 * dim, mask=is_in, other=0.0)
        exp_avg = exp_avg + (grad - exp_avg) * one_minus_beta1
        exp_avg_sq = exp_avg_sq + (grad * grad - exp_avg_sq) * one_minus_beta2
        tl.store(made + dim, exp_avg, mask=is_in)
        tl.store(made + 2 * dim, exp_avg_sq, mask=is_in)
        weight = weight - tl.div_rn(exp_avg, tl.sqrt_rn(exp_avg_sq) + eps) * step_size
    tl.store(made, weight, mask=is_in)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def update_rowwise(
    records: tl.tensor,  # float32(frames, words): weights, then one number
    frames: tl.tensor,  # int64[count], distinct
    grads: tl.tensor,  # float32(count, dim), summed
    new: tl.tensor,  # float32(count, words)
    count: tl.tensor,
    step_size: tl.tensor,
    eps: tl.tensor,
    decay: tl.tensor,
    keep: tl.tensor,
    dim: tl.constexpr,
    words: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    """Write records after one step of row-wise Adagrad. The sum over a row has 16 lanes, folded 8, 4, 2, 1."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < count
    frame = tl.load(frames + row, mask=is_row, other=0)
    old = records + frame * words
    made = new + row.to(tl.int64) * words
    given = grads + row.to(tl.int64) * dim

    lane = tl.arange(0, 16)
    lanes = tl.zeros((ROWS, 16), dtype=tl.float32)
    for start in range(0, dim, 16):
        col = start + lane
        is_in = is_row[:, None] & (col < dim)[None, :]
        grad = tl.load(given[:, None] + col[None, :], mask=is_in, other=0.0)
        weight = tl.load(old[:, None] + col[None, :], mask=is_in, other=0.0)
        grad, weight = _decayed(grad, weight, decay, keep, HAS_DECAY, HAS_KEEP)
        lanes = tl.where(is_in, lanes + grad * grad, lanes)
    # Each fold adds the upper half to the lower; the order of two summands does not matter.
    eight = tl.sum(tl.reshape(lanes, (ROWS, 2, 8)), axis=1)
    four = tl.sum(tl.reshape(eight, (ROWS, 2, 4)), axis=1)
    two = tl.sum(tl.reshape(four, (ROWS, 2, 2)), axis=1)
    squares = tl.sum(two, axis=1)

    total = tl.load(old + dim, mask=is_row, other=0.0)
    length = tl.full((ROWS,), dim, dtype=tl.float32)
    total = total + tl.div_rn(squares, length)
    tl.store(made + dim, total, mask=is_row)
    root = tl.sqrt_rn(total) + eps
    size = tl.div_rn(tl.zeros((ROWS,), dtype=tl.float32) + step_size, root)
    for start in range(0, dim, COLS):
        col = start + tl.arange(0, COLS)
        is_in = is_row[:, None] & (col < dim)[None, :]
        grad = tl.load(given[:, None] + col[None, :], mask=is_in, other=0.0)
        weight = tl.load(old[:, None] + col[None, :], mask=is_in, other=0.0)
        grad, weight = _decayed(grad, weight, decay, keep, HAS_DECAY, HAS_KEEP)
        tl.store(made[:, None] + col[None, :], weight - grad * size[:, None], mask=is_in)
