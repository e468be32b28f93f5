"""The protocol of `bunkbed.keras.base.pending`: the value of a token says which gradients become the update.

No TensorFlow ops.
"""

from __future__ import annotations

import numpy as np
import pytest

import bunkbed as bb
from bunkbed.keras.base.pending import BITS, Pending, StepRule
from keras_setup import DIM, ROWS, reference

PLAIN = StepRule()
SGD = bb.SGD(1.0)


class Loop:
    """A table, its pending gradients, and the same updates made at once on a reference table."""

    def __init__(self) -> None:
        self.table = bb.create(None, dim=DIM, num_rows=ROWS, optimizer=SGD, init=bb.Uniform(-0.05, 0.05), seed=3)
        self.pending = Pending(self.table)
        self.expected = reference(SGD)
        self._rng = np.random.default_rng(0)
        self._place = 0

    def lookup(self, ids, replica: int = 0) -> int:
        return self.pending.began(self.table.batch(np.array(ids)), replica, is_certain=True)

    def push(self, handle: int, ids, replica: int = 0, **options):
        grads = self._rng.standard_normal((len(ids), DIM)).astype(np.float32)
        self._place += 1
        return self.pending.push(handle, (replica, self._place), np.array(ids), grads, **options), grads

    def check(self) -> None:
        np.testing.assert_allclose(self.table.get(np.arange(ROWS)), self.expected.get(np.arange(ROWS)), atol=1e-6)
        assert self.table.step == self.pending.steps_settled


def values(*each: float) -> np.ndarray:
    return np.array(each, np.float64)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("lookups", [1, 5, BITS, BITS + 1, 3 * BITS])
def test_all_lookups_of_a_step_are_one_update_however_many(lookups: int, replicas: int) -> None:
    loop = Loop()
    for step in range(3):
        total, ids, grads = np.zeros(replicas), [], []
        handles = [[loop.lookup([i % ROWS, 7], r) for i in range(lookups)] for r in range(replicas)]
        for replica in range(replicas):
            for i, handle in enumerate(handles[replica]):
                value, grad = loop.push(handle, [i % ROWS, 7], replica)
                total[replica] += value
                ids.append([i % ROWS, 7])
                grads.append(grad)
        assert loop.pending.settle(total, PLAIN, 1e-3)
        loop.expected.update(np.concatenate(ids), np.concatenate(grads), lr=1e-3)
        assert loop.table.step == step + 1
    np.testing.assert_allclose(loop.table.get(np.arange(ROWS)), loop.expected.get(np.arange(ROWS)), atol=1e-5)
    assert not loop.pending._groups and len(loop.pending._free) == BITS


def test_two_pushes_of_different_scales_are_unscaled_apart() -> None:
    loop, rule = Loop(), StepRule(accumulate=2)
    first, one = loop.push(loop.lookup([1, 2]), [1, 2])
    loop.pending.settle(values(first), rule, None, unscale=0.5, is_update=False)
    second, two = loop.push(loop.lookup([2, 3]), [2, 3])
    loop.pending.settle(values(second), rule, None, unscale=0.25)
    loop.expected.update([1, 2, 2, 3], np.concatenate([one / 2, two / 4]) / 2)
    loop.check()


def test_any_subset_of_what_waits_can_be_accepted_in_any_order() -> None:
    loop = Loop()
    pushed = []
    for i in range(6):
        value, grads = loop.push(loop.lookup([i, i]), [i, i])
        pushed.append((value, grads, [i, i]))
    for chosen in ([4, 1], [5], [0, 2]):
        loop.pending.settle(values(sum(pushed[i][0] for i in chosen)), PLAIN, None)
        loop.expected.update(
            np.concatenate([pushed[i][2] for i in chosen]), np.concatenate([pushed[i][1] for i in chosen])
        )
        loop.check()
    with pytest.raises(RuntimeError, match="names no gradients of rows that wait"):
        loop.pending.settle(values(pushed[4][0]), PLAIN, None)  # a second time
    loop.check()


def test_what_is_never_accepted_gives_way_to_what_comes() -> None:
    loop = Loop()
    first = loop.push(loop.lookup([1]), [1])[0]
    for _ in range(3 * BITS):
        loop.push(loop.lookup([2]), [2])
    value, grads = loop.push(loop.lookup([3]), [3])
    assert len(loop.pending._groups) <= BITS
    loop.pending.settle(values(value), PLAIN, None)
    loop.expected.update([3], grads)
    loop.check()
    assert first > 0


@pytest.mark.parametrize("order", ["together", "one after the other"])
def test_accumulation_takes_what_the_optimizer_was_given(order: str) -> None:
    loop, rule = Loop(), StepRule(accumulate=2)
    for step in range(3):
        kept = []
        for part in range(3):  # the second is rejected: Keras never tells of it
            if order == "together":
                handles = [loop.lookup([step, part, r], r) for r in (0, 1)]
                made = [loop.push(handles[r], [step, part, r], r) for r in (0, 1)]
            else:
                made = [loop.push(loop.lookup([step, part, r], r), [step, part, r], r) for r in (0, 1)]
            if part == 1:
                continue
            kept += [([step, part, r], made[r][1]) for r in (0, 1)]
            is_last, token = part == 2, values(*(value for value, _ in made))
            assert loop.pending.settle(token, rule, None, is_update=is_last) == is_last
        kept.sort(key=lambda each: each[0][2])
        loop.expected.update(np.concatenate([k[0] for k in kept]), np.concatenate([k[1] for k in kept]) / 2)
        loop.check()


def test_accumulated_gradients_are_added_step_after_step_then_by_lookup() -> None:
    loop, rule = Loop(), StepRule(accumulate=2)
    rng, ids, kept = np.random.default_rng(1), np.array([1, 2, 1]), []
    for is_update in (False, True):
        total = 0.0
        pushed = {place: rng.standard_normal((3, DIM)).astype(np.float32) for place in (0, 1)}  # as in a graph
        for place in (1, 0):  # backward visits the last lookup first
            total += loop.pending.push(loop.lookup(ids), (0, place), ids, pushed[place])
        kept += [pushed[0], pushed[1]]
        loop.pending.settle(values(total), rule, None, is_update=is_update)
    expected = bb.create(None, dim=DIM, num_rows=ROWS, optimizer=SGD, init=bb.Uniform(-0.05, 0.05), seed=3)
    batch = expected.batch(np.tile(ids, 4))
    expected.update_batch(batch, batch.sum(np.concatenate(kept))[0] * np.float32(0.5))
    np.testing.assert_array_equal(loop.table.get(np.arange(ROWS)), expected.get(np.arange(ROWS)))


@pytest.mark.parametrize("bad", [0.5, -1.0, 1.0, 32.5, 64.0, 97.0, 130.0, 2.0**60, float("inf")])
def test_a_value_that_names_nothing_is_an_error(bad: float) -> None:
    loop = Loop()
    value, grads = loop.push(loop.lookup([1]), [1])
    with pytest.raises(RuntimeError, match="names no gradients of rows that wait"):
        loop.pending.settle(values(bad), PLAIN, None)
    loop.check()
    loop.pending.settle(values(value), PLAIN, None)  # nothing was lost by the error
    loop.expected.update([1], grads)
    loop.check()


def test_zero_from_outside_settles_nothing() -> None:
    loop = Loop()
    loop.push(loop.lookup([1]), [1])
    assert not loop.pending.settle(values(0.0), PLAIN, None)
    loop.check()


def test_what_accumulated_for_another_optimizer_is_forgotten() -> None:
    loop, rule = Loop(), StepRule(accumulate=2)
    value, _ = loop.push(loop.lookup([1]), [1])
    loop.pending.settle(values(value), rule, None, is_update=False, optimizer=1)
    assert loop.pending.accumulates
    value, grads = loop.push(loop.lookup([2]), [2])
    loop.pending.settle(values(value), PLAIN, None, optimizer=2)
    loop.expected.update([2], grads)
    loop.check()


def test_gradients_that_are_not_finite_name_the_id_and_change_nothing() -> None:
    loop = Loop()
    grads = np.ones((2, DIM), np.float32)
    grads[1, 2] = np.inf
    value = loop.pending.push(loop.lookup([4, 9]), (0, 1), np.array([4, 9]), grads)
    assert np.isnan(value)
    with pytest.raises(ValueError, match="the gradient of id 9 is inf at column 2; nothing was changed"):
        loop.pending.settle(values(value), PLAIN, None)
    loop.check()


def test_gradients_are_unscaled_and_a_forgotten_batch_is_deduped_again() -> None:
    loop = Loop()
    value, grads = loop.push(999, [5, 5, 6])  # an unknown handle
    loop.pending.settle(values(value), PLAIN, None, unscale=0.25)
    loop.expected.update([5, 5, 6], grads / 4)
    loop.check()
