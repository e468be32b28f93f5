"""The two scalar variables that stand for a table in Keras: its token, and its kept epoch.

Keras and TensorFlow know variables: what is trained, saved, restored, copied to replicas. The token stands for the
rows where steps are taken, the kept epoch where weights are saved and loaded. Both are one number; the rows stay in
the table.
"""

from __future__ import annotations

import json
import sys
import threading
import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf


class Token(keras.Variable):  # type: ignore[misc]  # keras is untyped here
    """What the optimizer is given in place of the rows; its gradient names the gradients of rows that wait.

    See `bunkbed.keras.pending` for the protocol. Its value is 0 and stays 0.

    Keras does not tell a variable which optimizer steps it, and the table must know: for its learning rate, clipping,
    gradient accumulation and the scale of the loss. The optimizer asks for `overwrite_with_gradient` and then assigns,
    so both look at who called them. Where that is not the Keras this was written for, the step is an error.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = weakref.ref(owner)
        self._scaling = threading.local()  # a strategy's replicas are threads
        self.strategy = tf.distribute.get_strategy()
        # float64: 52 bits. Never autocast: float16 has 10.
        super().__init__(
            initializer=keras.initializers.Zeros(),
            shape=(),
            dtype="float64",
            trainable=True,
            autocast=False,
            aggregation="mean",
            name=name,
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

    def assign(self, value: Any) -> Any:
        """The optimizer's step: what the gradient names becomes an update of the table."""
        owner = self._owner()
        if owner is None:
            raise RuntimeError("the table of this token is closed")
        caller = sys._getframe(1).f_locals
        stepping = caller.get("self")
        if not isinstance(stepping, keras.optimizers.Optimizer):
            stepping = None
            value = gradient = tf.cast(value, tf.float64)
        elif "g" not in caller:
            raise RuntimeError(f"keras {keras.__version__} steps variables in a way that bunkbed.keras does not know")
        else:  # under accumulation `value` is not the gradient
            gradient = tf.cast(caller["g"], tf.float64)
        scaling, self._scaling.optimizer = getattr(self._scaling, "optimizer", None), None
        if scaling is not None and scaling.inner_optimizer is not stepping:
            scaling = None
        replica = tf.distribute.get_replica_context()
        if replica is None:  # set from outside, as set_weights() does
            return value
        if owner.workers is not None:
            if stepping is None and tf.executing_eagerly() and not owner.workers.is_in_replica() and not gradient:
                return value  # restored from a checkpoint, which holds its 0
            zero = owner.settle(tf.reshape(gradient, [1]), stepping, scaling)
            replica.merge_call(_set, args=(self, zero))
        elif replica.num_replicas_in_sync == 1:
            # The lookups of the next step read the variable: they come after the step that its value came of.
            self.value.assign(owner.settle(tf.reshape(gradient, [1]), stepping, scaling))
        elif tf.__internal__.distribute.strategy_supports_no_merge_call():
            raise RuntimeError("bunkbed.keras steps tables only where replicas can meet; leave jit_compile out")
        else:
            replica.merge_call(_settle_once, args=(self, owner, gradient, stepping, scaling))
        return value


def _settle_once(strategy: Any, token: Token, owner: Any, gradients: Any, stepping: Any, scaling: Any) -> None:
    stepping, scaling = (strategy.experimental_local_results(each)[0] for each in (stepping, scaling))
    zero = owner.settle(tf.stack(strategy.experimental_local_results(gradients)), stepping, scaling)
    _set(strategy, token, zero)


def _set(strategy: Any, token: Token, value: Any) -> None:
    strategy.extended.update(token.value, lambda variable, value: variable.assign(value), args=(value,))


class KeptEpoch(keras.Variable):  # type: ignore[misc]  # keras is untyped here
    """The epoch that saved weights refer to: reading it commits the table and keeps the epoch, setting it goes back.

    So ``get_weights`` and ``set_weights`` (which early stopping uses), ``.weights.h5``, ``.keras`` and
    `tf.train.Checkpoint` hold the reference where they hold the weights of other layers. As a number it is the epoch in
    the low 40 bits, and above it 23 bits of the table's uuid, so that another table's number is told apart.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = weakref.ref(owner)
        super().__init__(
            initializer=keras.initializers.Zeros(), shape=(), dtype="int64", trainable=False, autocast=False, name=name
        )

    def _alive(self) -> Any:
        owner = self._owner()
        if owner is None:
            raise RuntimeError("the table of this variable is closed")
        return owner

    def numpy(self) -> Any:
        """Commits the table, keeps the epoch, and returns int64[]: 0 for a table that was not trained yet."""
        reference = self._alive().save(in_process=True)
        return np.asarray(0 if reference is None else _number(reference.uuid, reference.epoch), np.int64)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.numpy(), dtype)

    def assign(self, value: Any) -> Any:
        """Puts the table back to the kept epoch.

        Raises:
            ValueError: it was dropped (lists those that remain), or belongs to another table.
        """
        number = int(value)
        self._alive().go_back(number, _number)
        return value

    def __repr__(self) -> str:
        return f"<KeptEpoch {self.path}>"  # the base class reads the value, which commits

    # ---- tf.train.Checkpoint

    def _serialize_to_tensors(self) -> dict[str, Any]:
        reference = self._alive().save()
        return {"REFERENCE": tf.constant(json.dumps(None if reference is None else reference.fields()))}

    def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> Any:
        fields = json.loads(restored_tensors["REFERENCE"].numpy())
        self._alive().load(fields)
        return self.value


def _number(uuid: str, epoch: int) -> int:
    return int(uuid[:6], 16) % 2**23 << 40 | epoch
