"""The two scalar variables that stand for a table in Keras: its token, and its kept epoch.

Keras and TensorFlow know variables: what is trained, saved, restored, copied to replicas. The token stands for the
rows where steps are taken, the kept epoch where weights are saved and loaded. Both are one number; the rows stay in
the table.
"""

from __future__ import annotations

import json
import sys
import weakref
from typing import Any

import keras
import numpy as np

from bunkbed.keras.base.backend import IS_TORCH
from bunkbed.keras.base.stepping import SteppedVariable

if IS_TORCH:
    from bunkbed.keras.torch.backend import EpochParameter
else:
    import tensorflow as tf


class Token(SteppedVariable):
    """What the optimizer is given in place of the rows; its gradient names the gradients of rows that wait.

    See `bunkbed.keras.base.pending` for the protocol. Its value is 0 and stays 0. Of TensorFlow; torch's is in
    `bunkbed.keras.torch.backend`.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = weakref.ref(owner)
        self.strategy = tf.distribute.get_strategy()
        super().__init__(name, aggregation="mean")

    def assign(self, value: Any) -> Any:
        """The optimizer's step: what the gradient names becomes an update of the table."""
        owner = self._owner()
        if owner is None:
            raise RuntimeError("the table of this token is closed")
        stepping, scaling, gradient = self.assigned_by(value, sys._getframe(1).f_locals)
        value = gradient if stepping is None else value
        replica = tf.distribute.get_replica_context()
        # Set from outside, as set_weights() does; of a table that is not there yet nothing can wait.
        if replica is None or (stepping is None and not owner.has_table):
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
        if IS_TORCH:
            self._value = EpochParameter.of(self)

    def _alive(self) -> Any:
        owner = self._owner()
        if owner is None:
            raise RuntimeError("the table of this variable is closed")
        return owner

    def numpy(self) -> Any:
        """Commits the table, keeps the epoch, and returns int64[]: 0 for a table that was not trained yet."""
        return np.asarray(self.saved(in_process=True), np.int64)

    def saved(self, *, in_process: bool = False) -> int:
        """Commits the table and keeps the epoch; its number, 0 for a table that was not trained yet."""
        reference = self._alive().save(in_process=in_process)
        return 0 if reference is None else _number(reference.uuid, reference.epoch)

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
