"""One table of optimizers x dtypes, held against torch's own over 200 steps with duplicates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bunkbed as bb

torch = pytest.importorskip("torch")
torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns until one opts in or out

NUM_ROWS, DIM, BATCH, STEPS = 60, 12, 32, 200

OPTIMIZERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "sgd": (bb.SGD(lr=0.05), lambda w: torch.optim.SGD([w], lr=0.05)),
    "adagrad": (
        bb.Adagrad(lr=0.05, initial_accumulator=0.1),
        lambda w: torch.optim.Adagrad([w], lr=0.05, initial_accumulator_value=0.1),
    ),
    "adam": (bb.Adam(lr=0.01), lambda w: torch.optim.SparseAdam([w], lr=0.01)),
}

# The largest difference of a weight. 16-bit rows round at random in each of 200 steps: unbiased, not equal.
TOLERANCE = {"float32": 1e-6, "bfloat16": 0.15, "float16": 0.02}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_agrees_with_torch(name: str, dtype: str) -> None:
    optimizer, make = OPTIMIZERS[name]
    everything = np.arange(NUM_ROWS)
    with bb.create(
        None, dim=DIM, num_rows=NUM_ROWS, optimizer=optimizer, init=bb.Normal(0.5), dtype=dtype, seed=1
    ) as table:
        start = table.lookup(everything)
        weight = torch.nn.Parameter(torch.tensor(start))
        theirs = make(weight)
        rng = np.random.default_rng(0)
        for _ in range(STEPS):
            ids = rng.integers(0, NUM_ROWS // 2, BATCH)
            grads = rng.standard_normal((BATCH, DIM)).astype(np.float32) / 8
            table.update(ids, grads)
            weight.grad = torch.sparse_coo_tensor(ids[None], torch.tensor(grads), weight.shape)
            theirs.step()
        ours = table.lookup(everything)
        assert np.abs(ours - weight.detach().numpy()).max() <= TOLERANCE[dtype]
        untouched = slice(NUM_ROWS // 2, None)
        assert ours[untouched].tobytes() == start[untouched].tobytes()
        assert table.step == STEPS


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_rounding_is_unbiased(dtype: str) -> None:
    """A thousand steps, each far smaller than half a unit in the last place, arrive where they should."""
    with bb.create(None, dim=256, num_rows=40, optimizer=bb.SGD(lr=1.0), init=bb.Zeros(), dtype=dtype) as table:
        ids = np.arange(40)
        table.set(ids, np.ones((40, 256), np.float32))
        for _ in range(1000):
            table.update(ids, np.full((40, 256), 1e-4, np.float32))
        rows = table.lookup(ids)
    assert abs(float(rows.mean()) - 0.9) < 0.002  # rounding to nearest would have stayed at 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_rows_widen_exactly(dtype: str) -> None:
    bits = np.arange(2**16, dtype=np.uint32)
    if dtype == "bfloat16":
        values = (bits << 16).view(np.float32)
    else:
        values = bits.astype(np.uint16).view(np.float16).astype(np.float32)
    values = values[np.isfinite(values)].reshape(-1, 64)
    with bb.create(None, dim=64, num_rows=len(values), dtype=dtype, init=bb.Zeros()) as table:
        table.set(np.arange(len(values)), values)
        assert table.lookup(np.arange(len(values))).tobytes() == values.tobytes()
        out = np.empty((len(values), 64), np.float16) if dtype == "float16" else None
        if out is not None:
            assert table.lookup(np.arange(len(values)), out=out) is out
            assert out.tobytes() == values.astype(np.float16).tobytes()
