"""A Keras whose optimizers step variables otherwise is noticed before anything is trained."""

from __future__ import annotations

import threading

import pytest

import bunkbed as bb
from bunkbed.keras import Embedding
from bunkbed.keras.base.stepping import require_known_keras
from keras_setup import DIM, ROWS, keras

# As Keras's own, but for what each test changes.
BASE = next(kind for kind in keras.optimizers.SGD.__mro__ if kind.__name__ == "BaseOptimizer")


@pytest.fixture(autouse=True)
def _checked_anew():
    require_known_keras.cache_clear()
    yield
    require_known_keras.cache_clear()


def test_this_keras_is_known_and_the_check_takes_no_name_and_leaves_no_thread() -> None:
    keras.backend.clear_session()
    threads = set(threading.enumerate())
    require_known_keras()
    assert not set(threading.enumerate()) - threads
    first = keras.layers.Dense(1).name
    require_known_keras.cache_clear()
    keras.backend.clear_session()
    require_known_keras()
    assert keras.layers.Dense(1).name == first


def scales(self, grads, vars):
    for g, v in zip(grads, vars, strict=True):
        g = g * 2.0
        v.assign(g)
    return [], []


def renames(self, grads, vars):
    for gradient, v in zip(grads, vars, strict=True):
        v.assign(gradient)
    return [], []


def by_another(self, grads, vars):
    def assign(v, g):
        v.assign(g)

    for one, v in zip(grads, vars, strict=True):
        assign(v, one)
    return [], []


def leaves_out(self, grads, vars):
    return [], []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (scales, "an optimizer assigns 6 where the gradient is 3"),
        (renames, "the gradient is not where it was"),
        (by_another, "an optimizer does not assign by itself"),
        (leaves_out, "an optimizer assigned 0 times in 1 steps"),
    ],
)
def test_a_keras_that_steps_otherwise_is_an_error_when_the_layer_is_made(monkeypatch, change, says: str) -> None:
    monkeypatch.setattr(BASE, "_overwrite_variables_directly_with_gradients", change)
    for _ in range(2):  # the second layer too
        with pytest.raises(RuntimeError, match=rf"a way that bunkbed\.keras does not know: {says}; .*; install keras"):
            Embedding(ROWS, DIM, optimizer=bb.SGD(0.1))


def test_a_loss_scale_optimizer_that_asks_no_more_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(
        keras.optimizers.LossScaleOptimizer, "_overwrite_variable_with_gradient", lambda self, variable: True
    )
    with pytest.raises(RuntimeError, match="LossScaleOptimizer does not ask for overwrite_with_gradient"):
        Embedding(ROWS, DIM, optimizer=bb.SGD(0.1))


def test_accumulation_that_steps_only_when_it_is_complete_is_an_error(monkeypatch) -> None:
    original = BASE._overwrite_variables_directly_with_gradients

    def changed(self, grads, vars):
        if self.gradient_accumulation_steps and int(self._iterations + 1) % self.gradient_accumulation_steps:
            return [], []
        return original(self, grads, vars)

    monkeypatch.setattr(BASE, "_overwrite_variables_directly_with_gradients", changed)
    with pytest.raises(RuntimeError, match="gradient accumulation assigned 1 times in 2 steps"):
        Embedding(ROWS, DIM, optimizer=bb.SGD(0.1))


def test_the_check_runs_within_a_strategys_scope() -> None:
    from keras_setup import tf

    with tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
        require_known_keras()
        assert Embedding(ROWS, DIM, optimizer=bb.SGD(0.1)).table.step == 0
