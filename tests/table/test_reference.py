"""The oracle itself, held against torch's own optimizers and against hand-made sums."""

from __future__ import annotations

import numpy as np
import pytest

from bunkbed import SGD, Adagrad, Adam, RowwiseAdagrad, Zeros
from bunkbed.testing import ReferenceTable
from bunkbed.testing.arithmetic import integer_power, lane_sum, sum_duplicates
from bunkbed.testing.philox import narrow_nearest


def test_duplicates_are_summed_one_after_another_in_batch_order() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 5, 100)
    grads = (rng.standard_normal((100, 3)) * 10.0 ** rng.integers(-6, 6, (100, 1))).astype(np.float32)
    unique, sums = sum_duplicates(ids, grads)
    assert unique.tolist() == list(dict.fromkeys(ids.tolist()))
    for row, total in zip(unique, sums, strict=True):
        positions = np.flatnonzero(ids == row)
        expected = grads[positions[0]].copy()
        for position in positions[1:]:
            expected += grads[position]
        assert expected.tobytes() == total.tobytes()


def test_no_ids_have_no_sums() -> None:
    unique, sums = sum_duplicates(np.zeros(0, np.int64), np.zeros((0, 4), np.float32))
    assert unique.shape == (0,) and sums.shape == (0, 4)


def test_lane_sum_folds_sixteen_lanes() -> None:
    rng = np.random.default_rng(1)
    for width in (1, 15, 16, 17, 64, 100):
        values = rng.standard_normal(width).astype(np.float32)
        lanes = [np.float32(0)] * 16
        for index, value in enumerate(values):
            lanes[index % 16] += value
        for half in (8, 4, 2, 1):
            lanes = [lanes[j] + lanes[j + half] for j in range(half)]
        assert lane_sum(values[None])[0].tobytes() == lanes[0].tobytes()


def test_integer_power() -> None:
    assert integer_power(0.9, 0) == 1.0
    assert integer_power(0.999, 12_345) == pytest.approx(0.999**12_345, rel=1e-12)


def test_bfloat16_rounds_ties_to_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, 1.005, -1.00390625], np.float32)
    expected = np.array([1.0, 1.0, 1.015625, 1.0078125, -1.0], np.float32)
    assert narrow_nearest("bfloat16", values).tolist() == expected.tolist()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
def test_agrees_with_torch_over_200_steps(name: str, weight_decay: float) -> None:
    torch = pytest.importorskip("torch")
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns until one opts in or out
    num_rows, dim, steps = 40, 6, 200
    rng = np.random.default_rng(2)
    start = rng.standard_normal((num_rows, dim)).astype(np.float32)
    weight = torch.nn.Parameter(torch.tensor(start))
    bb_optimizer, torch_optimizer = {
        "SGD": lambda: (SGD(0.1, weight_decay=weight_decay), torch.optim.SGD([weight], lr=0.1)),
        "Adagrad": lambda: (
            Adagrad(0.1, initial_accumulator=0.5, weight_decay=weight_decay),
            torch.optim.Adagrad([weight], lr=0.1, initial_accumulator_value=0.5, eps=1e-10),
        ),
        "Adam": lambda: (Adam(0.01, weight_decay=weight_decay), torch.optim.SparseAdam([weight], lr=0.01)),
    }[name]()
    table = ReferenceTable(dim=dim, num_rows=num_rows, optimizer=bb_optimizer, initial=lambda ids: start[ids], name="t")
    for _ in range(steps):
        ids = rng.integers(0, num_rows // 2, 16)  # the upper half is never touched
        grads = rng.standard_normal((16, dim)).astype(np.float32)
        table.update(ids, grads)
        weight.grad = torch.sparse_coo_tensor(ids[None], torch.tensor(grads), weight.shape).coalesce()
        if weight_decay:  # torch has none for sparse gradients: add it to the rows of the step by hand
            rows = weight.grad.indices()[0]
            decayed = weight.grad.values() + weight_decay * weight.detach()[rows]
            weight.grad = torch.sparse_coo_tensor(rows[None], decayed, weight.shape)
        torch_optimizer.step()
    ours = table.lookup(np.arange(num_rows))
    theirs = weight.detach().numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert ours[num_rows // 2 :].tobytes() == start[num_rows // 2 :].tobytes()
    assert not table.contains(np.arange(num_rows // 2, num_rows)).any()


def test_rowwise_adagrad_is_its_formula() -> None:
    rng = np.random.default_rng(3)
    table = ReferenceTable(dim=20, num_rows=4, optimizer=RowwiseAdagrad(lr=0.1), init=Zeros())
    weight, total = np.zeros(20), 0.0
    for _ in range(50):
        grad = rng.standard_normal((1, 20)).astype(np.float32)
        table.update([2], grad)
        total += float(np.mean(grad.astype(np.float64) ** 2))
        weight -= 0.1 / (np.sqrt(total) + 1e-8) * grad[0]
    np.testing.assert_allclose(table.lookup([2])[0], weight, atol=1e-5)
    assert table.get([2], slot="sum").shape == (1, 1)


def test_decoupled_decay_shrinks_touched_rows_only() -> None:
    start = np.ones((3, 2), np.float32)
    table = ReferenceTable(
        dim=2,
        num_rows=3,
        optimizer=SGD(0.5, weight_decay=0.1, decoupled=True),
        initial=lambda ids: start[ids],
    )
    table.update([1], np.zeros((1, 2), np.float32))
    assert table.lookup([0, 1, 2])[:, 0].tolist() == [1.0, float(np.float32(0.95)), 1.0]


def test_revert_and_rewind_return_rows_slots_and_step() -> None:
    table = ReferenceTable(dim=2, optimizer=Adam())
    one = np.ones((1, 2), np.float32)
    table.update([7], one)
    table.commit(keep="a", meta={"n": 1})
    before = table.get([7], slot="exp_avg").copy()
    table.update([7], one)
    table.update([8], one)
    table.revert()
    assert table.step == 1 and not table.contains([8])[0]
    assert table.get([7], slot="exp_avg").tobytes() == before.tobytes()
    table.update([7], one)
    table.commit(meta={"n": 2})
    table.rewind("a")
    assert (table.step, table.meta, table.epoch) == (1, {"n": 1}, 3)
    assert table.get([7], slot="exp_avg").tobytes() == before.tobytes()
