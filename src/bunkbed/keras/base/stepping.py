"""Who steps a variable: Keras does not say, and a table must know.

A table needs the optimizer that steps it: its learning rate, clipping, gradient accumulation and the scale of the loss.
An optimizer asks a variable for ``overwrite_with_gradient`` and then assigns to it, so `SteppedVariable` looks at who
called. That is Keras's own business, which may change: `require_known_keras` has optimizers step a variable of no
consequence, and what they then do differently is an error before anything is trained.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np


class By(NamedTuple):
    """Who assigns to a variable, and what the gradient is that it assigns."""

    #: The `keras.optimizers.Optimizer` that steps; None where it is another caller, as ``set_weights``.
    optimizer: Any
    #: The `keras.optimizers.LossScaleOptimizer` around it, or None.
    scaling: Any
    #: float64[]; under accumulation the value that is assigned is another one.
    gradient: Any


def unknown_keras(what: str) -> RuntimeError:
    """The error of a Keras that steps variables otherwise than this was written for."""
    return RuntimeError(
        f"keras {keras.__version__} steps variables in a way that bunkbed.keras does not know: {what}; nothing was "
        "changed; install keras 3.15, or a newer bunkbed"
    )


class SteppedVariable(keras.Variable):  # type: ignore[misc]  # keras is untyped here
    """A trainable scalar, float64, to which optimizers assign its gradient, past clipping, decay and slots."""

    def __init__(self, name: str, **arguments: Any) -> None:
        self._scaling = threading.local()  # a strategy's replicas are threads
        # float64: 52 bits. Never autocast: float16 has 10.
        super().__init__(
            initializer=keras.initializers.Zeros(),
            shape=(),
            dtype="float64",
            trainable=True,
            autocast=False,
            name=name,
            **arguments,
        )

    @property
    def overwrite_with_gradient(self) -> bool:
        """True: optimizers assign the gradient, past clipping, decay and slots."""
        caller = sys._getframe(1).f_locals.get("self")
        if isinstance(caller, keras.optimizers.LossScaleOptimizer):
            self._scaling.optimizer = caller  # about to have its inner optimizer step
        return True

    @overwrite_with_gradient.setter
    def overwrite_with_gradient(self, value: bool) -> None:
        pass

    @property
    def trainable(self) -> bool:
        """Always True: a frozen layer looks rows up without it, and another layer on the table may train."""
        return True

    @trainable.setter
    def trainable(self, value: bool) -> None:
        pass

    def assigned_by(self, value: Any, caller: Mapping[str, Any]) -> By:
        """Who assigns `value`.

        Args:
            caller: local variables of the function that called ``assign``.

        Raises:
            RuntimeError: an optimizer does, and not as it was known to.
        """
        optimizer: Any = caller.get("self")
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            optimizer, gradient = None, value
        elif "g" not in caller:
            raise unknown_keras("the gradient is not where it was")
        else:
            gradient = caller["g"]
        scaling, self._scaling.optimizer = getattr(self._scaling, "optimizer", None), None
        if scaling is not None and scaling.inner_optimizer is not optimizer:
            scaling = None
        return By(optimizer, scaling, keras.ops.cast(gradient, "float64"))


class _Probe(SteppedVariable):
    """Remembers who assigned what."""

    def __init__(self) -> None:
        super().__init__("probe")
        self.seen: list[By] = []

    def assign(self, value: Any) -> Any:
        self.seen.append(self.assigned_by(value, sys._getframe(1).f_locals))
        return value


@functools.cache
def require_known_keras() -> None:
    """Has this Keras's optimizers step a variable, once in a process.

    Raises:
        RuntimeError: they do not do so as `SteppedVariable` expects.
    """
    failed: list[BaseException] = []

    def probe() -> None:
        try:
            _probe_all()
        except BaseException as error:
            failed.append(error)

    # In a thread of its own: outside of graphs, strategies and Keras's scopes, and no name is taken.
    thread = threading.Thread(target=probe, name="bunkbed-keras-probe")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _probe_all() -> None:
    sgd = keras.optimizers.SGD
    cases: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], int]] = {
        # Clipped, decayed and unscaled it would be another number.
        "an optimizer": (lambda: sgd(0.5, clipnorm=1e-3, weight_decay=0.1, loss_scale_factor=4.0), lambda o: o, 1),
        "gradient accumulation": (lambda: sgd(0.5, gradient_accumulation_steps=2), lambda o: o, 2),
        "LossScaleOptimizer": (
            lambda: keras.optimizers.LossScaleOptimizer(sgd(0.5), initial_scale=8.0),
            lambda o: o.inner_optimizer,
            1,
        ),
    }
    for what, (make, stepping_of, steps) in cases.items():
        optimizer, variable = make(), _Probe()
        gradients = [3.0, 5.0][:steps]
        for gradient in gradients:
            optimizer.apply([keras.ops.convert_to_tensor(gradient, "float64")], [variable])
        if len(variable.seen) != steps:
            raise unknown_keras(f"{what} assigned {len(variable.seen)} times in {steps} steps")
        scaling = optimizer if stepping_of(optimizer) is not optimizer else None
        for by, gradient in zip(variable.seen, gradients, strict=True):
            if by.optimizer is not stepping_of(optimizer):
                raise unknown_keras(f"{what} does not assign by itself")
            if by.scaling is not scaling:
                raise unknown_keras(f"{what} does not ask for overwrite_with_gradient")
            found = float(np.asarray(keras.ops.convert_to_numpy(by.gradient)))
            if found != gradient:
                raise unknown_keras(f"{what} assigns {found:g} where the gradient is {gradient:g}")
