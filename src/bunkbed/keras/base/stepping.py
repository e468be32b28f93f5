"""Detection of the optimizer that steps a variable, which Keras does not pass on.

A table needs the optimizer that steps it: its learning rate, clipping, gradient accumulation and the scale of the loss.
An optimizer reads a variable's ``overwrite_with_gradient`` and then assigns to the variable, so `SteppedVariable` reads
the caller's local variables (`bunkbed.keras.base.caller`). These are internals of Keras and may change. So
`require_known_keras` lets optimizers step a test variable, and raises an error before any training if they do not work
as expected.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from bunkbed.keras.base.caller import caller_locals
from bunkbed.keras.base.types import KerasOptimizer, Tensor


class By(NamedTuple):
    """The optimizer that assigns to a variable, and the gradient that it assigns."""

    #: The `keras.optimizers.Optimizer` that steps; None for another caller, such as ``set_weights``.
    optimizer: KerasOptimizer
    #: The `keras.optimizers.LossScaleOptimizer` around it, or None.
    scaling: KerasOptimizer
    #: float64[]; under accumulation the assigned value differs from it.
    gradient: Tensor


def unknown_keras(what: str) -> RuntimeError:
    """Return the error for a Keras that steps variables in an unexpected way."""
    return RuntimeError(
        f"keras {keras.__version__} steps variables in a way that bunkbed.keras does not know: {what}; nothing was "
        "changed; install keras 3.15, or a newer bunkbed"
    )


class SteppedVariable(keras.Variable):  # type: ignore[misc]  # keras is untyped here
    """A trainable float64 scalar to which optimizers assign its gradient, without clipping, decay or slots."""

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
        """True: optimizers assign the gradient, without clipping, decay or slots."""
        caller = caller_locals().get("self")
        if isinstance(caller, keras.optimizers.LossScaleOptimizer):
            self._scaling.optimizer = caller  # it will now step its inner optimizer
        return True

    @overwrite_with_gradient.setter
    def overwrite_with_gradient(self, value: bool) -> None:
        pass

    @property
    def trainable(self) -> bool:
        """Always True: a frozen layer does not use the token, and another layer on the table may train."""
        return True

    @trainable.setter
    def trainable(self, value: bool) -> None:
        pass

    def assigned_by(self, value: Tensor, caller: Mapping[str, Any]) -> By:
        """Return the optimizer that assigns `value`.

        Args:
            caller: local variables of the function that called ``assign``.

        Raises:
            RuntimeError: an optimizer assigns it in an unexpected way.
        """
        optimizer: KerasOptimizer = caller.get("self")
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
    """A variable that records its assignments."""

    def __init__(self) -> None:
        super().__init__("probe")
        self.seen: list[By] = []

    def assign(self, value: Tensor) -> Tensor:
        self.seen.append(self.assigned_by(value, caller_locals()))
        return value


@functools.cache
def require_known_keras() -> None:
    """Let this Keras's optimizers step a variable, once in a process.

    Raises:
        RuntimeError: they do not step it as `SteppedVariable` expects.
    """
    failed: list[BaseException] = []

    def probe() -> None:
        try:
            _probe_all()
        except BaseException as error:
            failed.append(error)

    # In a separate thread: outside graphs, strategies and Keras's scopes, and without using up names.
    thread = threading.Thread(target=probe, name="bunkbed-keras-probe")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _probe_all() -> None:
    sgd = keras.optimizers.SGD
    cases: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], int]] = {
        # Clipping, decay or unscaling would change the number.
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
