"""The two scalar variables that stand for a table in Keras: its token, and its kept epoch.

Keras and TensorFlow know variables: what is trained, saved, restored, copied to replicas. The token stands for the
rows where steps are taken, the kept epoch where weights are saved and loaded. Both are one number; the rows stay in
the table.
"""

from __future__ import annotations

import json
import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from bunkbed.references import Reference


class Token(keras.Variable):  # type: ignore[misc]  # keras is untyped here
    """What the optimizer is given in place of the rows; its gradient names the gradients of rows that wait.

    See `bunkbed.keras.pending` for the protocol. Its value is 0 and stays 0.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = weakref.ref(owner)
        # float64: 52 bits name 52 lookups. Never autocast: float16 has 10.
        super().__init__(
            initializer=keras.initializers.Zeros(),
            shape=(),
            dtype="float64",
            trainable=True,
            autocast=False,
            aggregation="mean",
            name=name,
        )
        self.overwrite_with_gradient = True
        # Every backward writes it and every step reads it, so that a graph runs the step after the backward of every
        # replica. What the step is given does not ensure that: where gradients accumulate, or LossScaleOptimizer looks
        # at the first replica's alone, it does not come of them. Made directly: a strategy would mirror a tf.Variable.
        with tf.init_scope():
            self.fence = ResourceVariable(0, trainable=False, dtype=tf.int64, name=f"{name}_fence")

    @property
    def trainable(self) -> bool:
        """Always True: a frozen layer looks rows up without it, and another layer on the table may train."""
        return True

    @trainable.setter
    def trainable(self, value: bool) -> None:
        pass

    def assign(self, value: Any) -> Any:
        """The optimizer's step: what `value` names becomes one update of the table."""
        value = tf.cast(value, tf.float64)
        owner = self._owner()
        if owner is None:
            raise RuntimeError("the table of this token is closed")
        replica = tf.distribute.get_replica_context()
        if replica is None:  # set from outside, as set_weights() does
            return value
        if replica.num_replicas_in_sync == 1:
            self._assign_zero(owner.settle(tf.reshape(value, [1])))
        elif tf.__internal__.distribute.strategy_supports_no_merge_call():
            # Each replica goes its own way: all learn what all were given, and the first one steps.
            total = replica.all_reduce(tf.distribute.ReduceOp.SUM, value)
            if replica.replica_id_in_sync_group == 0:
                self._assign_zero(owner.settle(tf.reshape(total, [1])))
        else:
            replica.merge_call(_settle_once, args=(self, owner, value))
        return value

    def _assign_zero(self, zero: Any) -> None:
        # The lookups of the next step read the variable: they come after the step that this value came of.
        self.value.assign(zero)


def _settle_once(strategy: Any, token: Token, owner: Any, values: Any) -> None:
    zero = owner.settle(tf.stack(strategy.experimental_local_results(values)))
    strategy.extended.update(token.value, lambda variable, value: variable.assign(value), args=(zero,))


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
        reference = self._alive().save()
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
        self._alive().load(None if fields is None else Reference(**fields))
        return self.value


def _number(uuid: str, epoch: int) -> int:
    return int(uuid[:6], 16) % 2**23 << 40 | epoch
