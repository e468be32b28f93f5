"""What docs/optimizers.md says of our Adam, torch's SparseAdam and its dense Adam, row by row of the table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bunkbed as bb

torch = pytest.importorskip("torch")
ROWS, DIM, LR = 6, 4, 0.1
START = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)


class Three:
    """The same weights under our Adam, SparseAdam and dense Adam."""

    def __init__(self, **ours: Any) -> None:
        torch.sparse.check_sparse_tensor_invariants.disable()  # or torch warns that they are disabled
        self.table = bb.create(None, dim=DIM, num_rows=ROWS, optimizer=bb.Adam(LR, **ours))
        self.table.set(np.arange(ROWS), START)
        self.sparse = torch.nn.Parameter(torch.tensor(START))
        self.dense = torch.nn.Parameter(torch.tensor(START))
        self.theirs = torch.optim.SparseAdam([self.sparse], LR), torch.optim.Adam([self.dense], LR)

    def step(self, ids: list[int], value: float = 1.0) -> None:
        grads = np.full((len(ids), DIM), value, np.float32)
        self.table.update(np.array(ids), grads)
        self.sparse.grad = torch.sparse_coo_tensor(torch.tensor([ids]), torch.tensor(grads), (ROWS, DIM))
        self.dense.grad = self.sparse.grad.to_dense()
        for optimizer in self.theirs:
            optimizer.step()

    def rows(self) -> tuple[Any, Any, Any]:
        ours = self.table.get(np.arange(ROWS))
        return ours, self.sparse.detach().numpy().copy(), self.dense.detach().numpy().copy()


def test_which_rows_a_step_moves() -> None:
    three = Three()
    three.step([0, 1])
    before = three.rows()
    average = three.table.get(np.array([0]), slot="exp_avg")
    three.step([1])
    ours, sparse, dense = (after - first for after, first in zip(three.rows(), before, strict=True))
    assert not ours[0].any() and not sparse[0].any() and dense[0].all()  # trained once, not in this batch
    assert ours[1].all() and sparse[1].all() and dense[1].all()
    assert not ours[2].any() and not sparse[2].any() and not dense[2].any()  # never trained: dense averages are zero
    assert np.array_equal(three.table.get(np.array([0]), slot="exp_avg"), average)
    assert np.array_equal(three.theirs[0].state[three.sparse]["exp_avg"][0], average[0])
    assert (three.theirs[1].state[three.dense]["exp_avg"][0].numpy() < average[0]).all()
    three.table.close()


def test_a_row_that_comes_late_is_corrected_by_the_tables_step() -> None:
    three = Three()
    for _ in range(9):
        three.step([0])
    three.step([5])  # the first step of row 5 is the tenth of the table
    ours, sparse, dense = three.rows()
    first, second = (1 - 0.9) / (1 - 0.9**10), (1 - 0.999) / (1 - 0.999**10)
    expected = START[5] - LR * first / np.sqrt(second)
    for found in (ours, sparse, dense):
        np.testing.assert_allclose(found[5], expected, atol=1e-5)
    assert three.table.step == 10
    three.table.close()


def test_weight_decay() -> None:
    with pytest.raises(TypeError, match="weight_decay"):
        torch.optim.SparseAdam([torch.nn.Parameter(torch.zeros(1))], weight_decay=0.1)
    decoupled = Three(weight_decay=0.5, decoupled=True)
    decoupled.theirs = decoupled.theirs[0], torch.optim.AdamW([decoupled.dense], LR, weight_decay=0.5)
    decoupled.step([1])
    ours, _, dense = decoupled.rows()
    np.testing.assert_allclose(ours[1], dense[1], atol=1e-6)  # the batch's row as AdamW has it
    assert np.array_equal(ours[0], START[0]) and (np.abs(dense[0]) < np.abs(START[0])).all()  # the others only there
    decoupled.table.close()


def test_duplicates_are_one_step() -> None:
    three = Three()
    three.step([2, 2, 2], 0.5)
    once = Three()
    once.step([2], 1.5)
    for found, expected in zip(three.rows(), once.rows(), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-7)
    assert three.table.step == 1
    averages = [three.table.get(np.array([2]), slot="exp_avg")[0]]  # the first step's size is the same for any gradient
    averages += [optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"][2] for optimizer in three.theirs]
    for average in averages:
        np.testing.assert_allclose(average, 0.1 * 1.5, rtol=1e-6)
    three.table.close()
    once.table.close()
