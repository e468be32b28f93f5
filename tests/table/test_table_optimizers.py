"""One table of optimizers x dtypes, held against torch's own over 200 steps with duplicates."""

from __future__ import annotations

import dataclasses
import math
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


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_agrees_with_torch(name: str, dtype: str, state_dtype: str) -> None:
    optimizer, make = OPTIMIZERS[name]
    if state_dtype != "float32":
        if not optimizer.slots:
            pytest.skip("no state")
        optimizer = dataclasses.replace(optimizer, state_dtype=state_dtype)
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
        # A step divides by the root of a second moment whose rounding is off by a 256th at most.
        tolerance = TOLERANCE[dtype] if state_dtype == "float32" else max(TOLERANCE[dtype], 0.05)
        assert np.abs(ours - weight.detach().numpy()).max() <= tolerance
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


@pytest.mark.parametrize("fraction", [0.001, 0.25, 0.5, 0.77])
@pytest.mark.parametrize("field", ["weight", "sum", "exp_avg", "exp_avg_sq"])
def test_the_mean_of_stochastic_rounding_is_the_value(field: str, fraction: float) -> None:
    """Over 2.5 million roundings of one value: five deviations are 0.0015 units or less, so that random numbers one of
    whose bits is missing, or a carry that comes at half a unit, show."""
    rows, dim = 10_000, 256
    unit = 2.0**-7  # of bfloat16 in [1, 2)
    value = np.float32(1 + fraction * unit)
    # A step that leaves `value` in the field: 0 - (-value), 0 + value, and Adam's averages with beta 0.
    grad = {"weight": -value, "sum": np.sqrt(value), "exp_avg": value, "exp_avg_sq": np.sqrt(value)}[field]
    optimizer: Any = {
        "weight": bb.SGD(lr=1.0),
        "sum": bb.Adagrad(state_dtype="bfloat16"),
        "exp_avg": bb.Adam(betas=(0.0, 0.0), state_dtype="bfloat16"),
        "exp_avg_sq": bb.Adam(betas=(0.0, 0.0), state_dtype="bfloat16"),
    }[field]
    dtype = "bfloat16" if field == "weight" else "float32"
    with bb.create(None, dim=dim, num_rows=rows, optimizer=optimizer, init=bb.Zeros(), dtype=dtype, seed=5) as table:
        grads = np.full((rows, dim), grad, np.float32)
        table.update(np.arange(rows), grads)
        stored = table.get(np.arange(rows), slot=field).astype(np.float64)
    exact = float(grads[0, 0] * grads[0, 0]) if field in ("sum", "exp_avg_sq") else abs(float(grads[0, 0]))
    part = (exact - 1) / unit
    assert 0 < part < 1 and set(np.unique(stored)) <= {1.0, 1.0 + unit}
    deviation = math.sqrt(part * (1 - part) / stored.size)
    assert abs((stored.mean() - 1) / unit - part) < 5 * deviation


@pytest.mark.parametrize("optimizer", [bb.Adam(lr=0.0, state_dtype="bfloat16"), bb.Adagrad(state_dtype="bfloat16")])
def test_state_in_bfloat16_does_not_stall(optimizer: Any) -> None:
    """Accumulators arrive where float32's do; rounded to nearest they would stand still at a third of it, or less."""
    plain = dataclasses.replace(optimizer, state_dtype="float32")
    slot = optimizer.slots[-1]
    ids, grads = np.arange(20), np.full((20, 256), 0.7, np.float32)
    means = []
    for each in (optimizer, plain):
        with bb.create(None, dim=256, num_rows=20, optimizer=each, init=bb.Zeros()) as table:
            for _ in range(3000):
                table.update(ids, grads)
            means.append(float(table.get(ids, slot=slot).mean(dtype=np.float64)))
    assert means[0] == pytest.approx(means[1], rel=0.005)


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
        out = np.empty((len(values), 64), np.float16 if dtype == "float16" else np.uint16)
        assert table.lookup(np.arange(len(values)), out=out) is out
        narrow = values.astype(np.float16) if dtype == "float16" else (values.view(np.uint32) >> 16).astype(np.uint16)
        assert out.tobytes() == narrow.tobytes()
