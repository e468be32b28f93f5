"""The norm of gradient sums is an exact sum of squares: neither the order of ids nor their division matters."""

from __future__ import annotations

import math

import numpy as np
import pytest

import bunkbed as bb
from bunkbed import _native

pytestmark = pytest.mark.usefixtures("native_defaults")


def _squares(sums: np.ndarray) -> np.ndarray:
    """Return the sum of squares of each row, float64[U], of a dim of 1, where a row has one square."""
    return sums[:, 0].astype(np.float64) ** 2


def _batch(seed: int, size: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    ids = random.integers(0, size // 3, size)
    # Magnitudes over 60 powers of two, so that the order of ordinary additions would matter.
    grads = random.standard_normal((size, dim)) * 2.0 ** random.integers(-30, 30, (size, 1))
    return ids, grads.astype(np.float32)


@pytest.mark.parametrize("size", [700, 9_000])
def test_the_norm_is_the_exact_sum_rounded_once(size: int) -> None:
    ids, grads = _batch(1, size, 1)
    with bb.create(None, dim=1, num_rows=size) as table:
        sums, norm = table.batch(ids).sum(grads)
        assert norm == math.sqrt(math.fsum(_squares(sums).tolist()))


@pytest.mark.parametrize("dim", [1, 16, 33])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_norm_does_not_depend_on_the_order_of_ids(dim: int, threads: int) -> None:
    ids, grads = _batch(2, 6_000, dim)
    bb.set_num_threads(threads)
    with bb.create(None, dim=dim, num_rows=6_000) as table:
        _, norm = table.batch(ids).sum(grads)
        # Ids in another order, each with its gradients in the old order, have the same sums.
        by_id = np.argsort(ids, kind="stable")
        assert table.batch(ids[by_id]).sum(grads[by_id])[1] == norm
        apart = [np.flatnonzero(ids % 3 == part) for part in range(3)]
        squares = np.stack([table.batch(ids[part]).sum_squares(grads[part])[1] for part in apart])
        assert _native.norm_of(squares) == norm
        assert _native.norm_of(squares[::-1].copy()) == norm


@pytest.mark.parametrize(("bad", "expected"), [(np.inf, np.inf), (-np.inf, np.inf), (np.nan, np.nan)])
def test_a_value_that_is_not_finite_shows_in_the_norm(bad: float, expected: float) -> None:
    ids, grads = _batch(3, 300, 4)
    grads[17, 2] = bad
    with bb.create(None, dim=4, num_rows=300) as table:
        norm = table.batch(ids).sum(grads)[1]
        assert norm == expected or (math.isnan(norm) and math.isnan(expected))
        squares = table.batch(ids).sum_squares(grads)[1]
        finite = table.batch(ids[:5]).sum_squares(np.ones((5, 4), np.float32))[1]
        merged = _native.norm_of(np.stack([finite, squares]))
        assert merged == expected or (math.isnan(merged) and math.isnan(expected))


def test_extreme_values() -> None:
    ids = np.arange(4)
    with bb.create(None, dim=1, num_rows=4) as table:
        for values in ([0, 0, 0, 0], [1e-45, 0, 0, 0], [3e38, 3e38, 1e-45, 1], [1, 2.0**-27, 2.0**-60, 2.0**-149]):
            grads = np.array(values, np.float32)[:, None]
            expected = math.sqrt(math.fsum(_squares(grads).tolist()))
            assert table.batch(ids).sum(grads)[1] == expected


def test_many_squares_below_the_last_bit_count() -> None:
    # 4,096 squares of 2^-54 add 2^-42 to 1; added to it one after another as doubles, each is lost.
    grads = np.full((4_097, 1), 2.0**-27, np.float32)
    grads[0] = 1
    with bb.create(None, dim=1, num_rows=4_097) as table:
        assert table.batch(np.arange(4_097)).sum(grads)[1] == math.sqrt(1 + 2.0**-42)


def test_norm_of_refuses_another_shape() -> None:
    with pytest.raises(ValueError, match=r"must be int64\[N, \d+\], got 3 columns"):
        _native.norm_of(np.zeros((2, 3), np.int64))
